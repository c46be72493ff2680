"""Checks the bounds of what is staged, and the order in which it is written."""

import os
import time
from pathlib import Path

import pytest

from nsquark.log import staging
from nsquark.log.staging import (
    BATCH_BYTES,
    AppendTooBig,
    Stage,
    StagedAppend,
    StagedPart,
    Staging,
    StagingFull,
    log_bytes_of,
    remove_leftovers,
    write_part,
)


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


def _begin(area: Staging, directory: Path, token: int, size: int, peer: str) -> None:
    stage, part = area.begin_part("topic", directory, _token(token), 0, 1, size, peer)
    area.end_part(stage, 0, part, written=True)


def test_one_peer_has_a_half_of_the_stages_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    area = Staging()
    share = staging.STAGES_MAX // staging.PEER_DIVISOR
    for token in range(share):
        _begin(area, tmp_path, token, 1, "10.0.0.1")
    with pytest.raises(StagingFull, match=r"10\.0\.0\.1 has staged"):
        _begin(area, tmp_path, share, 1, "10.0.0.1")
    _begin(area, tmp_path, share, 1, "10.0.0.2")


def test_one_peer_has_a_half_of_the_bytes_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    area = Staging()
    count = staging.STAGED_BYTES_MAX // staging.PEER_DIVISOR // staging.STAGE_BYTES_MAX
    for token in range(count):
        _begin(area, tmp_path, token, staging.STAGE_BYTES_MAX, "10.0.0.1")
    with pytest.raises(StagingFull, match=r"10\.0\.0\.1 has staged"):
        _begin(area, tmp_path, count, 1, "10.0.0.1")
    _begin(area, tmp_path, count, 1, "10.0.0.2")


def test_the_last_batch_is_written_when_all_before_it_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the append is whole, so a loss of power must not leave it without the others."""
    body = b"x" * (BATCH_BYTES // 2)
    count = 10
    part = StagedPart(tmp_path / "part", count, count * (len(body) + 34))
    write_part(part, count.to_bytes(4, "big") + (len(body).to_bytes(4, "big") + body) * count)
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        real(fd)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    batches = StagedAppend(1, _token(1), [part], [(4096, count)], 1).write(fd, 0)
    os.close(fd)
    assert len(batches) > 2
    assert synced == [batches[-1].offset, batches[-1].end]
