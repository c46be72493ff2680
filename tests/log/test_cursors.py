"""What must survive a crash of a topic and its channels: one small file of paired slots."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from nsquark.log.cursors import SLOT_BYTES, CursorFile, Slot, SlotTooSmall


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cursors"


def opened(path: Path) -> CursorFile:
    cursors = CursorFile(path)
    cursors.load()
    return cursors


def stored(path: Path) -> dict[int, tuple[int, int, bytes]]:
    """What a start finds: slot to position, deferred position and the rest."""
    cursors = CursorFile(path)
    found = {slot.index: (slot.position, slot.deferred, slot.rest) for slot in cursors.load()}
    cursors.close()
    return found


def write(cursors: CursorFile, slot: Slot, position: int, rest: bytes | None = None) -> None:
    slot.position = position
    slot.deferred = position + 1
    if rest is not None:
        slot.rest = rest
    cursors.write(slot)


def test_a_new_file_has_no_slots(path: Path) -> None:
    assert stored(path) == {}


def test_the_last_write_counts(path: Path) -> None:
    cursors = opened(path)
    topic, channel = cursors.topic_slot(), cursors.new_slot()
    write(cursors, topic, 1, b"topic")
    for position in range(5):
        write(cursors, channel, position, b"channel")
        assert stored(path) == {0: (1, 2, b"topic"), channel.index: (position, position + 1, b"channel")}


def test_generations_go_on_after_a_restart(path: Path) -> None:
    cursors = opened(path)
    write(cursors, cursors.topic_slot(), 1, b"topic")
    for position in range(2, 8):
        cursors = CursorFile(path)
        (slot,) = cursors.load()
        write(cursors, slot, position)
        assert stored(path)[0][0] == position


@pytest.mark.parametrize("new_rest", [b"old", b"a longer one than before"])
def test_a_torn_write_leaves_the_older_generation(path: Path, new_rest: bytes) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    for position in (1, 2, 3):
        write(cursors, slot, position, b"old")
    before = path.read_bytes()
    write(cursors, slot, 4, new_rest)
    after = path.read_bytes().ljust(len(before), b"\0")
    changed = [index for index in range(len(after)) if index >= len(before) or before[index] != after[index]]
    for cut in changed:  # only what lies before `cut` reached the disk
        path.write_bytes(after[:cut] + before[cut:])
        assert stored(path)[0] == (3, 4, b"old")
    path.write_bytes(after)
    assert stored(path)[0] == (4, 5, new_rest)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2 * SLOT_BYTES - 1), bit=st.integers(0, 7))
def test_a_damaged_bit_leaves_one_generation(tmp_path: Path, position: int, bit: int) -> None:
    path = tmp_path / "bits"
    path.unlink(missing_ok=True)
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 1, b"name")
    write(cursors, slot, 2, b"name")
    raw = bytearray(path.read_bytes().ljust(2 * SLOT_BYTES, b"\0"))
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
    assert stored(path)[0] in [(1, 2, b"name"), (2, 3, b"name")]


def test_a_freed_slot_is_gone_and_none_of_its_generations_comes_back(path: Path) -> None:
    cursors = opened(path)
    slot = cursors.new_slot()
    write(cursors, slot, 1, b"a")
    write(cursors, slot, 2, b"a")
    cursors.free(slot)
    assert stored(path) == {}
    raw = bytearray(path.read_bytes())
    for place in (0, 1):  # even if one of the two places is damaged
        damaged = bytearray(raw)
        damaged[(2 * slot.index + place) * SLOT_BYTES + 9] ^= 1
        path.write_bytes(damaged)
        assert stored(path) == {}


def test_slots_are_used_again_and_others_stay(path: Path) -> None:
    cursors = opened(path)
    slots = [cursors.new_slot() for _ in range(3)]
    assert len({slot.index for slot in slots} | {0}) == 4
    for slot in slots:
        write(cursors, slot, slot.index, b"%d" % slot.index)
    cursors.free(slots[1])
    assert cursors.new_slot().index == slots[1].index
    assert cursors.new_slot().index > slots[2].index
    assert set(stored(path)) == {slots[0].index, slots[2].index}


def test_a_freed_slot_is_used_again_after_a_restart(path: Path) -> None:
    cursors = opened(path)
    first, second = cursors.new_slot(), cursors.new_slot()
    write(cursors, first, 1, b"first")
    write(cursors, second, 2, b"second")
    cursors.free(first)
    assert opened(path).new_slot().index == first.index


def test_too_much_to_remember_is_an_error_and_changes_nothing(path: Path) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 1, b"x" * (SLOT_BYTES - 40))
    before = path.read_bytes()
    with pytest.raises(SlotTooSmall):
        write(cursors, slot, 2, b"x" * (SLOT_BYTES - 39))
    assert path.read_bytes() == before


def test_a_failed_write_is_made_up_for_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 1, b"name")

    def full(*_args: object) -> int:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nsquark.log.files.os.pwrite", full)
        with pytest.raises(OSError, match="no space"):
            write(cursors, slot, 2, b"other")
    assert stored(path)[0] == (1, 2, b"name")
    write(cursors, slot, 3)
    assert stored(path)[0] == (3, 4, b"other")
