"""The bounds of what is staged, the memory of tokens, and how far a log was removed."""

import time
from pathlib import Path

import pytest

from nsquark.log import staging, tokens
from nsquark.log.removed import Removed
from nsquark.log.staging import AppendTooBig, Stage, Staging, StagingFull, log_bytes_of, remove_leftovers, write_part
from nsquark.log.tokens import Tokens


def _token(number: int) -> bytes:
    return (number + 1).to_bytes(16, "little")


def _add(area: Staging, directory: Path, token: int, part: int, size: int) -> Stage:
    stage, arriving = area.begin_part("topic", directory, _token(token), part, 1, size)
    write_part(arriving, b"body")
    useless = area.end_part(stage, part, arriving, written=True)
    if useless is not None:
        useless.path.unlink()
    return stage


def test_an_append_has_a_bound_that_replaced_parts_do_not_count_for(tmp_path: Path) -> None:
    area = Staging()
    _add(area, tmp_path, 0, 0, staging.STAGE_BYTES_MAX - 10)
    with pytest.raises(AppendTooBig):
        _add(area, tmp_path, 0, 1, 11)
    _add(area, tmp_path, 0, 0, staging.STAGE_BYTES_MAX)
    assert area.staged_bytes == staging.STAGE_BYTES_MAX
    assert len(list(tmp_path.glob("staged/*"))) == 1


def test_all_appends_together_have_a_bound(tmp_path: Path) -> None:
    area = Staging()
    count = staging.STAGED_BYTES_MAX // staging.STAGE_BYTES_MAX
    stages = [_add(area, tmp_path, token, 0, staging.STAGE_BYTES_MAX) for token in range(count)]
    with pytest.raises(StagingFull):
        _add(area, tmp_path, count, 0, 1)
    assert area.drop("topic", stages[0])
    _add(area, tmp_path, count, 0, 1)


def test_the_number_of_stages_has_a_bound(tmp_path: Path) -> None:
    area = Staging()
    for token in range(staging.STAGES_MAX):
        _add(area, tmp_path, token, 0, 1)
    with pytest.raises(StagingFull):
        _add(area, tmp_path, staging.STAGES_MAX, 0, 1)
    _add(area, tmp_path, 5, 1, 1)


def test_stages_left_alone_are_dropped(tmp_path: Path) -> None:
    area = Staging()
    idle, arriving, fresh = (_add(area, tmp_path, token, 0, 100) for token in range(3))
    area.begin_part("topic", tmp_path, _token(1), 1, 1, 100)
    for stage in (idle, arriving):
        stage.used_s = time.monotonic() - staging.STAGE_IDLE_S - 1
    paths = [part.path for part in idle.parts.values()]
    assert area.drop_idle() == paths
    assert area.find("topic", _token(0)) is None
    assert area.find("topic", _token(1)) is arriving, "a part of it is on its way"
    assert area.find("topic", _token(2)) is fresh
    assert area.staged_bytes == 300


def test_a_part_that_failed_or_came_too_late_leaves_nothing(tmp_path: Path) -> None:
    area = Staging()
    stage, part = area.begin_part("topic", tmp_path, _token(0), 0, 1, 100)
    assert area.end_part(stage, 0, part, written=False) is part
    assert (area.staged_bytes, stage.parts) == (0, {})
    stage, part = area.begin_part("topic", tmp_path, _token(0), 0, 1, 100)
    area.drop("topic", stage)
    assert area.end_part(stage, 0, part, written=True) is part
    assert area.staged_bytes == 0


def test_leftovers_of_every_topic_are_removed(tmp_path: Path) -> None:
    for topic in ("t.a", "t.b"):
        (tmp_path / topic).mkdir()
        _add(Staging(), tmp_path / topic, 0, 0, 1)
        (tmp_path / topic / "cursors").touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["cursors", "cursors", "staged", "staged"]
    assert not list(tmp_path.glob("*/staged/*"))


def test_bytes_in_the_log_are_counted_with_each_record_s_head() -> None:
    assert log_bytes_of(len(b"\0\0\0\2\0\0\0\1a\0\0\0\3abc"), 2) == 2 * 34 + 4


# -- tokens ------------------------------------------------------------------------------------------------


def test_tokens_are_remembered_from_file_and_log(tmp_path: Path) -> None:
    first = Tokens(tmp_path / "tokens", [_token(1)])
    first.add(_token(2))
    first.store(_token(2))
    again = Tokens(tmp_path / "tokens", [_token(3)])
    assert _token(2) in again and _token(3) in again
    assert _token(1) not in again, "neither in the file nor in the log any more"


def test_a_torn_or_zeroed_end_of_the_file_of_tokens_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(_token(1) + bytes(16) + b"torn")
    found = Tokens(path, [])
    assert _token(1) in found and bytes(16) not in found
    found.store(_token(2))
    assert _token(2) in Tokens(path, [])


def test_tokens_are_bounded_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TOKENS_MAX", 10)
    path = tmp_path / "tokens"
    found = Tokens(path, [])
    for number in range(100):
        found.add(_token(number))
        found.store(_token(number))
        assert path.stat().st_size <= 21 * 16
    for memory in (found, Tokens(path, [])):
        assert [number for number in range(100) if _token(number) in memory] == list(range(90, 100))


# -- what was removed --------------------------------------------------------------------------------------


def test_what_was_removed_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "removed"
    fresh = Removed(path)
    fresh.load(500)
    assert fresh.to == 0, "nothing was ever removed"
    fresh.note(480, 500)
    again = Removed(path)
    again.load(500)
    assert again.to == 480


@pytest.mark.parametrize("damage", ["other segment", "torn", "garbled"])
def test_in_doubt_everything_below_the_log_counts_as_removed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "removed"
    Removed(path).note(480, 500)
    raw = path.read_bytes()
    if damage == "torn":
        path.write_bytes(raw[:-1])
    elif damage == "garbled":
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    found = Removed(path)
    found.load(900 if damage == "other segment" else 500)
    assert found.to == (900 if damage == "other segment" else 500)
