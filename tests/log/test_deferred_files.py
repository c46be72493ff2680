"""Checks the files of messages that wait: they are read in portions, counted as used disk, and again if they prove
damaged.
"""

from pathlib import Path

import pytest

from log.rig import make_shared
from log.test_deferred import NOW_MS, add, opened, take_bodies
from nsquark.log.deferred import LOAD_RECORDS_MAX, DeferredMessages
from nsquark.log.deferred_appends import Appends
from nsquark.log.deferred_records import BUCKET_MS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "deferred"


def test_a_large_file_is_looked_into_in_portions(directory: Path) -> None:
    due_ms = NOW_MS + 5 * BUCKET_MS
    before = opened(directory)
    for number in range(LOAD_RECORDS_MAX + 1):
        add(before, b"%d" % number, 1, due_ms)
    before.close()
    waiting = opened(directory)
    waiting.load_near(due_ms)
    assert (waiting.next_due(due_ms), waiting.next_due_ms(due_ms)) == (None, due_ms)
    assert len(take_bodies(waiting, due_ms)) == LOAD_RECORDS_MAX + 1


def test_its_bytes_count_as_used_disk(directory: Path) -> None:
    shared = make_shared()
    waiting = DeferredMessages(shared, directory, Appends(), 1, NOW_MS)
    for delay_ms in (0, 1, 2 * BUCKET_MS):
        add(waiting, b"x" * 100, 1, NOW_MS + delay_ms)
    assert shared.disk_bytes == sum(path.stat().st_size for path in directory.iterdir()) > 300
    waiting.close()
    assert shared.disk_bytes == 0
    waiting = DeferredMessages(shared, directory, Appends(), 1, NOW_MS)
    assert shared.disk_bytes == sum(path.stat().st_size for path in directory.iterdir()) > 300
    assert len(take_bodies(waiting, NOW_MS + 4 * BUCKET_MS)) == 3
    assert shared.disk_bytes == 0


def test_what_proves_to_be_missing_is_told_with_the_lowest_number_it_can_have(directory: Path) -> None:
    due_ms = NOW_MS + 5 * BUCKET_MS
    before = opened(directory, number_min=7)
    for number in range(5):
        add(before, b"body %d" % number, 1, due_ms)
    before.close()
    waiting = opened(directory)
    told: list[tuple[int, int]] = []
    waiting.on_missing = lambda number, count: told.append((number, count))
    (path,) = directory.iterdir()
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"body 2")] ^= 1
    path.write_bytes(raw)
    assert take_bodies(waiting, due_ms) == [b"body 0", b"body 1", b"body 3", b"body 4"]
    assert told == [(9, 1)]
