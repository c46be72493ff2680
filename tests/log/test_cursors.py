"""Checks what must survive a crash or a bad disk of a topic and its channels: one small file of paired slots."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from xxhash import xxh3_64_intdigest

from log.rig import make_shared
from nsquark.log.cursors import SLOT_BYTES, SLOTS_PER_PAGE, STATE_BYTES_MAX, CursorFile, Slot
from nsquark.log.files import PAGE_BYTES

Stored = dict[int, tuple[int, int, bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cursors"


def opened(path: Path) -> CursorFile:
    cursors = CursorFile(make_shared(), path)
    cursors.load()
    return cursors


@contextmanager
def loaded(path: Path) -> Iterator[tuple[CursorFile, Stored, list[str]]]:
    """Returns what a start finds: slot to position, deferred position and the rest; and what it says of damage."""
    reports: list[str] = []
    cursors = CursorFile(make_shared(reports.append), path)
    try:
        yield cursors, {slot.index: (slot.position, slot.deferred, slot.state) for slot in cursors.load()}, reports
    finally:
        cursors.close()


def stored(path: Path) -> Stored:
    with loaded(path) as (_, found, _):
        return found


def write(cursors: CursorFile, slot: Slot, position: int, rest: bytes | None = None) -> None:
    slot.position = position
    slot.deferred = 7
    if rest is not None:
        slot.state, slot.brief = rest, rest[:10]
    cursors.write(slot)


def offset_of(index: int, place: int) -> int:
    pair, within = divmod(index, SLOTS_PER_PAGE)
    return (2 * pair + place) * PAGE_BYTES + within * SLOT_BYTES


def test_a_new_file_has_no_slots(path: Path) -> None:
    with loaded(path) as (cursors, found, reports):
        assert found == {}
        assert cursors.is_new
        assert not cursors.lost
        assert not reports


def test_the_last_write_counts(path: Path) -> None:
    cursors = opened(path)
    topic, channel = cursors.topic_slot(), cursors.new_slot()
    write(cursors, topic, 1, b"topic")
    for position in range(5):
        write(cursors, channel, position, b"channel")
        assert stored(path) == {0: (1, 7, b"topic"), channel.index: (position, 7, b"channel")}


def test_generations_go_on_after_a_restart(path: Path) -> None:
    cursors = opened(path)
    write(cursors, cursors.topic_slot(), 1, b"topic")
    for position in range(2, 8):
        cursors = CursorFile(make_shared(), path)
        (slot,) = cursors.load()
        write(cursors, slot, position)
        assert stored(path)[0][0] == position


def test_a_torn_write_of_a_position_leaves_the_older_one(path: Path) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    for position in (1, 2, 3):
        write(cursors, slot, position, b"old")
    before = path.read_bytes()
    write(cursors, slot, 4)
    after = path.read_bytes()
    changed = [index for index in range(len(after)) if before[index] != after[index]]
    for cut in changed:  # only what lies before `cut` reached the disk
        path.write_bytes(after[:cut] + before[cut:])
        assert stored(path)[0] == (3, 7, b"old")
    path.write_bytes(after)
    assert stored(path)[0] == (4, 7, b"old")


def test_a_torn_write_of_a_state_leaves_the_older_or_the_newer_one(path: Path) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 3, b"old")
    before = path.read_bytes()
    write(cursors, slot, 4, b"a longer one than before")
    after = path.read_bytes()
    before = before.ljust(len(after), b"\0")
    for cut in [index for index in range(len(after)) if before[index] != after[index]]:
        path.write_bytes(after[:cut] + before[cut:])
        assert stored(path)[0] in [(3, 7, b"old"), (4, 7, b"a longer one than before")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2 * PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_a_damaged_bit_leaves_one_generation(tmp_path: Path, position: int, bit: int) -> None:
    path = tmp_path / "bits"
    path.unlink(missing_ok=True)
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 1, b"name")
    write(cursors, slot, 2, b"name")
    raw = bytearray(path.read_bytes().ljust(2 * PAGE_BYTES, b"\0"))
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
    assert stored(path)[0] in [(1, 7, b"name"), (2, 7, b"name")]


class TestDamage:
    CHANNELS = 9
    """This many are enough for three pairs of pages."""

    def filled(self, path: Path) -> Stored:
        cursors = opened(path)
        write(cursors, cursors.topic_slot(), 1, b"topic")
        for number in range(self.CHANNELS):
            write(cursors, cursors.new_slot(), 100 + number, b"channel %d" % number)
        cursors.close()
        return stored(path)

    def test_any_page_may_be_lost(self, path: Path) -> None:
        before = self.filled(path)
        raw = path.read_bytes()
        for page in range(-(-len(raw) // PAGE_BYTES)):
            for garbage in (b"\0", b"\xa5"):
                damaged = bytearray(raw)
                damaged[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = garbage * PAGE_BYTES
                path.write_bytes(damaged)
                with loaded(path) as (cursors, found, reports):
                    assert found == before
                    assert not cursors.lost
                    assert reports
                    assert all(str(path) in report for report in reports)

    def test_a_state_that_changed_once_is_in_both_places(self, path: Path) -> None:
        cursors = opened(path)
        slot = cursors.topic_slot()
        write(cursors, slot, 1, b"running")
        write(cursors, slot, 2)
        write(cursors, slot, 2, b"paused")
        raw = path.read_bytes()
        for place in (0, 1):
            damaged = bytearray(raw)
            damaged[offset_of(0, place) + 45] ^= 1
            path.write_bytes(damaged)
            assert stored(path)[0] == (2, 7, b"paused")

    def test_a_position_that_went_back_is_in_both_places(self, path: Path) -> None:
        """If one place had the position before, it would skip what is to be read again."""
        cursors = opened(path)
        slot = cursors.topic_slot()
        for position in (10, 20, 5):
            write(cursors, slot, position, b"topic")
        raw = path.read_bytes()
        for place in (0, 1):
            damaged = bytearray(raw)
            damaged[offset_of(0, place)] ^= 1
            path.write_bytes(damaged)
            assert stored(path)[0][0] == 5

    @pytest.mark.parametrize("index", [0, 2, 4, 9])
    def test_a_slot_of_which_nothing_is_left_is_told_and_the_others_stay(self, path: Path, index: int) -> None:
        before = self.filled(path)
        raw = bytearray(path.read_bytes())
        for place in (0, 1):
            raw[offset_of(index, place) + 3] ^= 0x10
        path.write_bytes(raw)
        with loaded(path) as (cursors, found, reports):
            if index == self.CHANNELS:  # the last: the topic's slot tells how many there are
                cursors.expect(self.CHANNELS + 1)
            assert cursors.lost
            assert any("lost" in report and f"slot {index}" in report for report in reports)
            del before[index]
            assert found == before

    def test_a_zeroed_pair_of_pages_is_noticed(self, path: Path) -> None:
        self.filled(path)
        raw = bytearray(path.read_bytes())
        raw[2 * PAGE_BYTES :] = bytes(len(raw) - 2 * PAGE_BYTES)
        path.write_bytes(raw)
        with loaded(path) as (cursors, _, _):
            assert cursors.lost

    @pytest.mark.parametrize("size", [0, 100, 2 * PAGE_BYTES, 4 * PAGE_BYTES + 10])
    def test_a_cut_file_is_noticed(self, path: Path, size: int) -> None:
        before = self.filled(path)
        path.write_bytes(path.read_bytes()[:size])
        with loaded(path) as (cursors, found, _):
            if size:
                cursors.expect(self.CHANNELS + 1)
            assert cursors.lost
            assert found.items() <= before.items()

    def test_what_proves_the_loss_stays_until_it_is_repaired(self, path: Path) -> None:
        self.filled(path)
        raw = bytearray(path.read_bytes())
        raw[2 * PAGE_BYTES : 4 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)
        path.write_bytes(raw)
        with loaded(path) as (cursors, _, _):
            assert cursors.lost
        with loaded(path) as (cursors, found, _):
            assert cursors.lost
            write(cursors, cursors.new_slot(), 5, b"made again")
            cursors.repair()
        with loaded(path) as (cursors, found, reports):
            assert not cursors.lost
            assert not reports
            assert (5, 7, b"made again") in found.values()

    def test_a_damaged_place_is_written_anew(self, path: Path) -> None:
        before = self.filled(path)
        raw = bytearray(path.read_bytes())
        raw[PAGE_BYTES : 2 * PAGE_BYTES] = bytes(PAGE_BYTES)
        path.write_bytes(raw)
        with loaded(path) as (cursors, _, _):
            cursors.repair()
        raw = bytearray(path.read_bytes())
        raw[:PAGE_BYTES] = bytes(PAGE_BYTES)
        path.write_bytes(raw)
        assert stored(path) == before


class TestFormat1:
    """In format 1 the two places of a slot lay side by side."""

    HEAD = struct.Struct("<QQQQII")

    def place(self, generation: int, position: int, rest: bytes, used: bool = True) -> bytes:
        head = self.HEAD.pack(0, generation, position, 7, len(rest), used)[8:]
        check = xxh3_64_intdigest(rest, seed=xxh3_64_intdigest(head))
        return (check.to_bytes(8, "little") + head + rest).ljust(SLOT_BYTES, b"\0")

    def file(self, slots: list[tuple[bytes, bool]]) -> bytes:
        """Makes a file with each slot written twice, the newer generation in its first place."""
        pieces = [
            self.place(2, 100 + index, rest, used) + self.place(1, 50, rest, used)
            for index, (rest, used) in enumerate(slots)
        ]
        return b"".join(pieces)

    def test_is_read_and_written_anew(self, path: Path) -> None:
        longest = b"x" * (SLOT_BYTES - 40)
        path.write_bytes(self.file([(b"topic", True), (b"a", True), (b"", False), (b"c", True), (longest, True)]))
        expected = {0: (100, 7, b"topic"), 1: (101, 7, b"a"), 3: (103, 7, b"c"), 4: (104, 7, longest)}
        for _ in range(2):
            with loaded(path) as (cursors, found, reports):
                assert found == expected
                assert not reports
                assert cursors.new_slot().index == 2
        raw = bytearray(path.read_bytes())
        raw[:PAGE_BYTES] = bytes(PAGE_BYTES)
        path.write_bytes(raw)
        assert stored(path) == expected

    def test_a_slot_that_is_damaged_in_both_places_is_told(self, path: Path) -> None:
        raw = bytearray(self.file([(b"topic", True), (b"a", True), (b"b", True)]))
        raw[2 * SLOT_BYTES + 10] ^= 1
        raw[3 * SLOT_BYTES + 10] ^= 1
        path.write_bytes(raw)
        for _ in range(2):
            with loaded(path) as (cursors, found, _):
                assert cursors.lost
                assert set(found) == {0, 2}

    def test_on_a_full_disk_it_is_written_anew_before_the_next_change(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path.write_bytes(self.file([(b"topic", True), (b"a", True)]))

        def full(*_args: object, **_options: object) -> None:
            raise OSError(28, "no space left on device")

        cursors = CursorFile(make_shared(), path)
        with monkeypatch.context() as patch:
            patch.setattr("nsquark.log.cursors.write_atomically", full)
            _, channel = cursors.load()
            with pytest.raises(OSError, match="no space"):
                write(cursors, channel, 200)
        assert stored(path) == {0: (100, 7, b"topic"), 1: (101, 7, b"a")}
        write(cursors, channel, 201)
        assert stored(path) == {0: (100, 7, b"topic"), 1: (201, 7, b"a")}


class TestLongState:
    """Checks a state that does not fit into a slot."""

    LONG = b"long state " * 1000

    def test_is_kept_and_its_position_moves(self, path: Path) -> None:
        cursors = opened(path)
        slot = cursors.topic_slot()
        for position, rest in ((1, self.LONG), (2, None), (3, self.LONG + b"longer"), (4, None), (5, b"short")):
            write(cursors, slot, position, rest)
            assert stored(path)[0] == (position, 7, slot.state)

    def test_is_kept_over_restarts(self, path: Path) -> None:
        cursors = opened(path)
        write(cursors, cursors.topic_slot(), 1, self.LONG)
        for position in range(2, 6):
            cursors = CursorFile(make_shared(), path)
            (slot,) = cursors.load()
            assert slot.state.startswith(self.LONG)
            write(cursors, slot, position, slot.state + b"+")
            assert stored(path)[0] == (position, 7, self.LONG + b"+" * (position - 1))

    def test_fits_to_the_last_byte(self, path: Path) -> None:
        cursors = opened(path)
        slots = [cursors.topic_slot(), cursors.new_slot()]
        for slot in slots:
            write(cursors, slot, 1, b"x" * STATE_BYTES_MAX)
        assert not list(path.parent.glob("cursors.*"))
        assert [rest for _, _, rest in stored(path).values()] == [b"x" * STATE_BYTES_MAX] * 2

    def test_a_crash_before_the_slot_names_it_leaves_the_older_one(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cursors = opened(path)
        slot = cursors.topic_slot()
        write(cursors, slot, 1, self.LONG)

        def fail(*_args: object) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("nsquark.log.durable.write_all", fail)
            with pytest.raises(OSError, match="Input/output"):
                write(cursors, slot, 2, self.LONG + b"newer")
        assert stored(path)[0] == (1, 7, self.LONG)

    def test_when_its_file_is_lost_the_brief_one_is_left(self, path: Path) -> None:
        cursors = opened(path)
        write(cursors, cursors.topic_slot(), 1, self.LONG)
        (state,) = path.parent.glob("cursors.0.*")
        raw = bytearray(state.read_bytes())
        raw[500] ^= 4
        state.write_bytes(raw)
        with loaded(path) as (_, found, reports):
            assert found[0] == (1, 7, self.LONG[:10])
            assert any("state of slot 0 is lost" in report for report in reports)

    def test_goes_with_its_slot(self, path: Path) -> None:
        cursors = opened(path)
        slot = cursors.new_slot()
        write(cursors, slot, 1, self.LONG)
        write(cursors, slot, 2, self.LONG + b"newer")
        cursors.free(slot)
        assert not list(path.parent.glob("cursors.*"))
        assert stored(path) == {}


def test_a_freed_slot_is_gone_and_none_of_its_generations_comes_back(path: Path) -> None:
    cursors = opened(path)
    write(cursors, cursors.topic_slot(), 1, b"topic")
    slot = cursors.new_slot()
    write(cursors, slot, 1, b"a")
    write(cursors, slot, 2, b"a")
    cursors.free(slot)
    assert set(stored(path)) == {0}
    raw = path.read_bytes()
    for place in (0, 1):  # even if one of the two places is damaged
        damaged = bytearray(raw)
        damaged[offset_of(slot.index, place) + 9] ^= 1
        path.write_bytes(damaged)
        assert set(stored(path)) == {0}


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


@pytest.mark.parametrize("good_writes", [0, 1])
def test_a_failed_write_is_made_up_for_by_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch, good_writes: int
) -> None:
    cursors = opened(path)
    slot = cursors.topic_slot()
    write(cursors, slot, 1, b"name")

    real, left = os.pwrite, [good_writes]

    def full(fd: int, data: bytes, offset: int) -> int:
        if not left[0]:
            raise OSError(28, "no space left on device")
        left[0] -= 1
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr("nsquark.log.files.os.pwrite", full)
        with pytest.raises(OSError, match="no space"):
            write(cursors, slot, 2, b"other")
    assert stored(path)[0] in [(1, 7, b"name"), (2, 7, b"other")]
    write(cursors, slot, 3)
    assert stored(path)[0] == (3, 7, b"other")
