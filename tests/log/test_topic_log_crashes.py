"""Failures and crashes follow one another: what each of them leaves must not mislead what comes next."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from log.rig import Rig, make_shared
from nsquark.kernel.extents import Extents
from nsquark.log.cursors import CursorFile
from nsquark.log.deferred import DeferredMessages, Due
from nsquark.log.deferred_appends import Appends
from nsquark.wire.batch_format import DEFERRED, MORE_FOLLOWS, StoredBatch, scan

MakeRig = Callable[..., Rig]


def fail(code: int) -> Callable[..., None]:
    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return failing


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> list[int]:
    """Lets the next call of this function of `os` fail; its code is in the list afterwards."""
    real = getattr(os, name)
    failed: list[int] = []

    def call(*arguments: object) -> object:
        if not failed:
            failed.append(code)
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return failed


# -- the log ---------------------------------------------------------------------------------------------


def test_a_cut_run_takes_its_append_number_along(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.publish(b"before")
    rig.append_apart(*[b"x" * 9000] * 20, flags=DEFERRED, token=(5).to_bytes(16, "little"))
    rig.crash()
    (path,) = (tmp_path / "topic").glob("*.log")
    batches = [item for item in scan(memoryview(path.read_bytes()), 0) if isinstance(item, StoredBatch)]
    assert batches[1].flags & MORE_FOLLOWS
    os.truncate(path, batches[-1].offset)
    again = make_rig()
    assert again.bodies() == [b"before"]
    assert again.log.segments is not None
    assert again.log.segments.deferred_appends.last == 0


def test_a_failed_sync_and_a_crash_double_nothing(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(sync_every=10)
    rig.publish(*[b"a"] * 10)
    failed = fail_once(monkeypatch, "fdatasync", errno.EIO)
    rig.publish(*[b"b"] * 10)
    assert rig.log.segments is not None
    rig.log.segments.sync()
    rig.settle()
    assert failed
    expected = [b"a"] * 10 + [b"b"] * 10
    assert rig.bodies() == expected
    rig.crash()
    again = make_rig()
    assert again.log.extents.count == 20
    assert again.bodies() == expected


def test_a_failed_first_write_that_cannot_be_cut_does_not_stop_the_log(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(max_bytes_per_file=200)
    assert rig.publish(b"x" * 100).error is None  # the next one needs a new file

    def half(fd: int, pieces: Sequence[bytes], offset: int) -> int:
        os.pwrite(fd, b"half", offset)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail(errno.ENOSPC))
        patch.setattr(os, "pwritev", half)
        assert rig.publish(b"a").error is not None
    assert rig.publish(b"b").error is None
    assert rig.bodies() == [b"x" * 100, b"b"]


def test_what_was_refused_and_could_not_be_cut_is_never_served(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written whole, but its sync failed and so did the cut: publishers were told that it failed."""
    rig = make_rig(sync_every=1)
    rig.publish(b"good")
    with monkeypatch.context() as patch:
        failed = fail_once(patch, "fdatasync", errno.EIO)
        patch.setattr(os, "ftruncate", fail(errno.EIO))
        assert rig.publish(b"bad").error is not None
        assert failed
    assert rig.publish(b"next").error is None
    assert rig.bodies() == [b"good", b"next"]
    rig.close()
    assert make_rig().bodies() == [b"good", b"next"]


def test_after_a_refused_lease_the_log_works(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    with monkeypatch.context() as patch:
        patch.setattr(rig.shared.sequences, "lease", fail(errno.ENOSPC))
        with pytest.raises(OSError, match="space"):
            rig.append(b"a")
        rig.log.write()
    assert rig.publish(b"b").error is None
    assert rig.bodies() == [b"b"]


def test_a_backlog_larger_than_the_cache_is_read_back(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish(*[b"x" * 1000] * 200)
    rig.crash()
    assert len(make_rig(cache_bytes=1000).bodies()) == 200


# -- its other files -------------------------------------------------------------------------------------


def test_a_channel_in_a_slot_used_before_survives_a_crash(tmp_path: Path) -> None:
    cursors = CursorFile(make_shared(), tmp_path / "cursors")
    cursors.load()
    topic = cursors.topic_slot()
    topic.state = b"t"
    cursors.write(topic)
    old = cursors.new_slot()
    old.state = b"old"
    for position in range(10):
        old.position = position
        cursors.write(old)
    cursors.free(old)
    new = cursors.new_slot()
    new.state, new.position = b"new", 77
    assert new.index == old.index
    cursors.write(new)
    found = CursorFile(make_shared(), tmp_path / "cursors").load()
    assert [(slot.state, slot.position) for slot in found] == [(b"t", 0), (b"new", 77)]


def take(waiting: DeferredMessages, now_ms: int) -> Due:
    waiting.load_near(now_ms)
    due = waiting.next_due(now_ms)
    assert due is not None
    return due


def test_a_deferred_number_is_not_used_twice(tmp_path: Path) -> None:
    first = DeferredMessages(make_shared(), tmp_path / "deferred", Appends(), 1, 0)
    first.add(b"one", 1, 0, 1000)
    first.confirm(take(first, 2000))
    first.close()
    second = DeferredMessages(make_shared(), tmp_path / "deferred", Appends(1), 1, 0)
    second.add(b"two", 1, 0, 3000)
    second.close()
    assert DeferredMessages(make_shared(), tmp_path / "deferred", Appends(1), 1, 0).count == 1


def test_what_was_put_back_is_not_confirmed_with_another_minute(tmp_path: Path) -> None:
    waiting = DeferredMessages(make_shared(), tmp_path / "deferred", Appends(), 1, 0)
    waiting.add(b"late", 1, 0, 61_000)
    waiting.put_back(take(waiting, 62_000))
    waiting.add(b"early", 1, 0, 59_000)  # the clock went back
    due = take(waiting, 62_000)
    assert [message[2] for message in due.messages] == [b"early"]
    waiting.confirm(due)
    waiting.close()
    assert DeferredMessages(make_shared(), tmp_path / "deferred", Appends(due.append_number), 1, 0).count == 1


def test_a_deferred_message_that_cannot_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = DeferredMessages(make_shared(), tmp_path / "deferred", Appends(), 1, 0)
    waiting.add(b"one", 1, 0, 1000)
    waiting.load_near(2000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail(errno.EIO))
        assert waiting.next_due(2000) is None
    assert waiting.count == 1
    assert [message[2] for message in take(waiting, 3000).messages] == [b"one"]


# -- messages that exist ---------------------------------------------------------------------------------


def test_what_follows_removed_messages_and_a_gap_is_the_first() -> None:
    extents = Extents()
    extents.add(10, 5)
    extents.remove_below(15)
    extents.add(100, 5)
    assert (extents.first, extents.at_or_after(0)) == (100, 100)
    assert extents.ranges() == [(100, 5)]


def test_the_head_outlives_the_loss_of_the_end() -> None:
    extents = Extents()
    extents.add(10, 5)
    extents.remove(10, 15)
    assert extents.at_or_after(3) == 15, "the head if there is none"
