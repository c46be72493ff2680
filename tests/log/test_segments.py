"""Checks the files of a log: what a start finds after clean stops, crashes and damage, and what is removed when."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from log.rig import Rig
from nsquark.log import segment as segment_module
from nsquark.log.segment import Segment
from nsquark.wire.batch_format import DEFERRED, HEADER_BYTES_EVER, MORE_FOLLOWS, StoredBatch, UnknownVersion, scan

MakeRig = Callable[..., Rig]

SMALL_FILE_BYTES = 1000
"""Holds two messages of BODY, each in a batch of its own."""
BODY = b"x" * 350


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "topic"


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def batches_of(path: Path) -> list[StoredBatch]:
    return [item for item in scan(memoryview(path.read_bytes()), 0) if isinstance(item, StoredBatch)]


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x55
    path.write_bytes(raw)


class TestIndex:
    def test_a_clean_stop_leaves_an_index_and_the_start_reads_no_data(
        self, make_rig: MakeRig, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = make_rig()
        rig.publish(b"a", b"b")
        rig.publish(b"c")
        rig.close()
        assert len(files(directory, ".idx")) == 1

        real_pread = os.pread

        def unwanted(fd: int, size: int, offset: int) -> bytes:
            is_data = os.readlink(f"/proc/self/fd/{fd}").endswith(".log")
            assert not is_data or (size, offset) == (HEADER_BYTES_EVER, 0), "data was read although the index tells all"
            return real_pread(fd, size, offset)  # which version it is

        with monkeypatch.context() as patch:
            patch.setattr(segment_module.os, "pread", unwanted)
            again = make_rig()
        assert again.log.extents.count == 3
        assert again.bodies() == [b"a", b"b", b"c"]
        assert again.reports == []

    def test_writing_goes_on_in_the_same_file_after_a_clean_stop(self, make_rig: MakeRig, directory: Path) -> None:
        for body in (b"a", b"b", b"c"):
            rig = make_rig()
            assert rig.publish(body).error is None
            rig.close()
        assert len(files(directory, ".log")) == 1
        assert make_rig().bodies() == [b"a", b"b", b"c"]

    def test_sealed_files_have_an_index(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
        for _ in range(6):
            rig.publish(BODY)
        rig.crash()
        assert (len(files(directory, ".log")), len(files(directory, ".idx"))) == (3, 2)
        again = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
        assert again.bodies() == [BODY] * 6
        assert again.reports == []

    def test_a_checkpoint_is_followed_by_what_came_later(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig(sync_every=4, checkpoint_bytes=1000)
        for number in range(7):
            rig.publish(b"%d" % number + BODY)
        rig.crash()
        assert len(files(directory, ".idx")) == 1
        assert [body[:1] for body in make_rig().bodies()] == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
    def test_a_damaged_index_is_made_up_for_by_the_data(self, make_rig: MakeRig, directory: Path, damage: str) -> None:
        rig = make_rig()
        rig.publish(b"a")
        rig.publish(b"b")
        rig.close()
        (index,) = files(directory, ".idx")
        if damage == "flip":
            flip(index, 20)
        else:
            index.write_bytes(index.read_bytes()[: 20 if damage == "cut" else 0])
        assert make_rig().bodies() == [b"a", b"b"]

    def test_an_index_of_another_version_is_made_up_for_by_the_data(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        rig.publish(b"a", b"b")
        rig.close()
        (index,) = files(directory, ".idx")
        magic, content = segment_module._INDEX_MAGIC, msgspec.msgpack.encode({"unknown": 1})
        index.write_bytes(magic + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little") + content)
        assert make_rig().bodies() == [b"a", b"b"]

    def test_a_file_shorter_than_its_index_says_is_scanned(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        rig.publish(b"a")
        rig.publish(b"b")
        rig.close()
        (path,) = files(directory, ".log")
        os.truncate(path, batches_of(path)[1].offset + 5)
        assert make_rig().bodies() == [b"a"]

    def test_positions_by_time(self, make_rig: MakeRig, tmp_path: Path) -> None:
        segment = Segment(make_rig().shared.syncer, tmp_path, 10)
        for number, time_ns in enumerate([100, 200, 150, 300]):
            segment.add(StoredBatch((number << 20), 10 + number, 1, 100, time_ns, time_ns, 0, bytes(16)))
        for time_ns in range(90, 310, 10):
            below = segment.seq_at_time(time_ns)
            assert all(t < time_ns for s, t in zip(range(10, 14), [100, 200, 150, 300], strict=True) if s < below)
        assert segment.seq_at_time(300) == 13
        assert (segment.time_min_ns, segment.time_max_ns) == (100, 300)


class TestTornEnd:
    def test_every_cut_keeps_the_batches_before_it(self, make_rig: MakeRig, directory: Path, tmp_path: Path) -> None:
        rig = make_rig()
        for body in (b"a", b"bb", b"ccc"):
            rig.publish(body)
        rig.crash()
        (path,) = files(directory, ".log")
        raw, batches = path.read_bytes(), batches_of(path)
        for cut in range(0, len(raw) + 1, 7):
            other = tmp_path / f"cut{cut}"
            other.mkdir()
            (other / path.name).write_bytes(raw[:cut])
            again = make_rig(other)
            whole = [batch for batch in batches if batch.end <= cut]
            assert again.bodies() == [b"a", b"bb", b"ccc"][: len(whole)]
            assert (other / path.name).stat().st_size == (whole[-1].end if whole else 0)
            assert bool(again.reports) == ((bool(whole) and cut > whole[-1].end) or (not whole and cut > 0))
            assert again.publish(b"new").error is None
            again.crash()
            assert make_rig(other).bodies()[-1] == b"new"

    def test_what_was_cut_is_set_aside_and_reported(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        rig.publish(b"a")
        rig.crash()
        (path,) = files(directory, ".log")
        size = path.stat().st_size
        path.write_bytes(path.read_bytes() + b"half a batch")
        again = make_rig()
        assert [bad.read_bytes() for bad in files(directory, ".bad")] == [b"half a batch"]
        assert len(again.reports) == 1
        assert f"bytes {size} to {size + 12} set aside" in again.reports[0]

    def test_a_run_of_batches_that_belong_together_is_there_whole_or_not_at_all(
        self, make_rig: MakeRig, directory: Path, tmp_path: Path
    ) -> None:
        rig = make_rig()
        rig.publish(b"before")
        rig.append_apart(*[b"y" * 9000] * 20, flags=DEFERRED, token=(5).to_bytes(16, "little"))
        rig.crash()
        (path,) = files(directory, ".log")
        raw, batches = path.read_bytes(), batches_of(path)
        run = batches[1:]
        assert len(run) > 2
        assert [bool(batch.flags & MORE_FOLLOWS) for batch in run] == [True] * (len(run) - 1) + [False]
        for number, cut in enumerate([batch.offset for batch in run] + [run[0].end - 1, run[-1].end - 1]):
            other = tmp_path / f"cut{number}"
            other.mkdir()
            (other / path.name).write_bytes(raw[:cut])
            assert make_rig(other).bodies() == [b"before"]
        whole = make_rig()
        assert whole.log.extents.count == 21
        assert whole.log.segments is not None
        assert whole.log.segments.deferred_appends.last == 5


class TestDamage:
    @pytest.mark.parametrize("part", ["header", "payload"])
    def test_a_damaged_batch_is_set_aside_and_the_rest_served(
        self, make_rig: MakeRig, directory: Path, part: str
    ) -> None:
        rig = make_rig()
        for body in (b"a", b"b", b"c"):
            rig.publish(body)
        rig.crash()
        (path,) = files(directory, ".log")
        damaged = batches_of(path)[1]
        flip(path, damaged.offset + 20 if part == "header" else damaged.end - 1)
        again = make_rig()
        assert again.bodies() == [b"a", b"c"]
        assert [bad.stat().st_size for bad in files(directory, ".bad")] == [damaged.end - damaged.offset]
        assert len(again.reports) == 1
        again.publish(b"d")
        again.close()
        assert make_rig().bodies() == [b"a", b"c", b"d"]

    def test_damage_under_an_index_is_found_when_it_is_read(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        for body in (b"a", b"b", b"c"):
            rig.publish(body)
        rig.close()
        (path,) = files(directory, ".log")
        flip(path, batches_of(path)[1].end - 1)
        again = make_rig()
        assert again.bodies() == [b"a", b"c"]
        assert again.log.extents.count == 2
        assert any("1 messages" in report and "damaged" in report for report in again.reports)

    @pytest.mark.parametrize("index", [0, 2])
    def test_damage_at_either_end_under_an_index(self, make_rig: MakeRig, directory: Path, index: int) -> None:
        rig = make_rig()
        for body in (b"a", b"b", b"c"):
            rig.publish(body)
        rig.close()
        (path,) = files(directory, ".log")
        flip(path, batches_of(path)[index].end - 1)
        again = make_rig()
        assert again.bodies() == [body for number, body in enumerate([b"a", b"b", b"c"]) if number != index]
        assert again.publish(b"d").error is None
        assert again.bodies()[-1] == b"d"


class TestRemoving:
    def full(self, make_rig: MakeRig, **settings: int) -> Rig:
        """Makes four files: two messages in each but the last, published at 1000, 2000, ... ns."""
        rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES, **settings)
        for number in range(7):
            rig.publish(BODY, timestamp_ns=1000 * (number + 1))
        assert rig.log.segments is not None
        assert len(rig.log.segments) == 4
        return rig

    def remove(self, rig: Rig, needed: int, now_ns: int = 8000) -> int:
        """Removes what is below the `needed`-th message; returns how many are left."""
        assert rig.log.segments is not None
        seqs = [seq for seq, _ in rig.read()]
        lowest = rig.log.segments.remove_below(seqs[needed] if needed < len(seqs) else rig.log.head, now_ns)
        rig.settle()
        assert lowest == rig.log.extents.first
        return rig.log.extents.count

    @pytest.mark.parametrize(("needed", "left"), [(0, 7), (1, 7), (2, 5), (3, 5), (4, 3), (6, 1), (7, 1)])
    def test_whole_files_that_nobody_needs_go(self, make_rig: MakeRig, directory: Path, needed: int, left: int) -> None:
        rig = self.full(make_rig)
        assert self.remove(rig, needed) == left
        assert rig.shared.disk_bytes == sum(path.stat().st_size for path in files(directory, ".log"))
        assert files(directory, ".removed") == []
        rig.crash()
        again = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
        assert again.log.extents.count == left
        assert again.bodies() == [BODY] * left

    def test_where_space_is_short_the_newest_is_ended_so_that_it_can_go(
        self, make_rig: MakeRig, directory: Path
    ) -> None:
        rig = make_rig()
        for body in (b"finished", b"waits"):
            rig.publish(body)
        assert rig.log.segments is not None
        waits = rig.read()[1][0]
        rig.log.segments.remove_below(waits, 1, newest_too=True)
        rig.publish(b"next")
        assert (rig.bodies(), len(files(directory, ".log"))) == ([b"finished", b"waits", b"next"], 2)
        rig.log.segments.remove_below(waits + 1, 1, newest_too=True)
        rig.settle()
        assert rig.bodies() == [b"next"]

    @pytest.mark.parametrize(("now_ns", "left"), [(6500, 7), (7000, 5), (8999, 5), (9000, 3)])
    def test_retention_by_time_holds_them(self, make_rig: MakeRig, now_ns: int, left: int) -> None:
        rig = self.full(make_rig, retention_ns=5000)
        assert self.remove(rig, 7, now_ns) == left

    @pytest.mark.parametrize(("files_kept", "left"), [(1, 3), (2, 5), (9, 7)])
    def test_retention_by_bytes_holds_them(self, make_rig: MakeRig, files_kept: int, left: int) -> None:
        rig = self.full(make_rig)
        assert rig.log.segments is not None
        rig.shared.settings.retention_bytes = files_kept * next(iter(rig.log.segments)).size
        assert self.remove(rig, 7) == left

    def test_what_a_crash_left_half_removed_goes_at_the_start(self, make_rig: MakeRig, directory: Path) -> None:
        rig = self.full(make_rig)
        rig.crash()
        first = files(directory, ".log")[0]
        first.rename(first.with_suffix(".removed"))
        again = make_rig()
        assert again.log.extents.count == 5
        assert files(directory, ".removed") == []


class TestVersions:
    """The version is the fifth byte of a batch."""

    def changed(self, directory: Path, version: int, *, all_batches: bool = True) -> None:
        (path,) = files(directory, ".log")
        raw = bytearray(path.read_bytes())
        for batch in batches_of(path)[:: 1 if all_batches else 1000]:
            raw[batch.offset + 4] = version
        path.write_bytes(raw)

    @pytest.mark.parametrize("clean", [True, False])
    def test_batches_of_a_later_version_refuse_the_start(self, make_rig: MakeRig, directory: Path, clean: bool) -> None:
        rig = make_rig()
        rig.publish(b"a")
        rig.publish(b"b")
        rig.close() if clean else rig.crash()
        self.changed(directory, 2)
        before = {path: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(UnknownVersion, match="version 2, this nsqd knows version 1: start the nsqd that wrote it"):
            make_rig()
        assert {path: path.read_bytes() for path in directory.iterdir()} == before, "nothing may be changed"

    def test_a_flipped_bit_is_no_other_version(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        rig.publish(b"a")
        rig.publish(b"b")
        rig.crash()
        self.changed(directory, 3, all_batches=False)
        assert make_rig().bodies() == [b"b"]


class TestOverlap:
    """Checks two files with some of the same messages, as a failed sync could leave them in an earlier version."""

    def overlapping(self, make_rig: MakeRig, directory: Path, *, index: bool) -> list[bytes]:
        rig = make_rig()
        bodies = [b"%d" % number for number in range(10)]
        for body in bodies:
            rig.publish(body)
        rig.close() if index else rig.crash()
        (path,) = files(directory, ".log")
        raw, batches = path.read_bytes(), batches_of(path)
        middle = batches[4:7]
        (directory / f"{middle[0].first_seq:020d}.log").write_bytes(raw[middle[0].offset : middle[-1].end])
        path.write_bytes(raw[: batches[5].offset] + raw[batches[7].offset :])
        path.with_suffix(".idx").unlink(missing_ok=not index)
        return bodies

    @pytest.mark.parametrize("index", [True, False])
    def test_every_message_is_there_once(self, make_rig: MakeRig, directory: Path, index: bool) -> None:
        bodies = self.overlapping(make_rig, directory, index=index)
        before = {path.read_bytes() for path in files(directory, ".log")}
        again = make_rig()
        assert again.bodies() == bodies
        assert any("overlapped" in report for report in again.reports)
        assert before & {path.read_bytes() for path in files(directory, ".bad")}, "nothing is thrown away"
        assert again.publish(b"new").error is None
        again.close()
        assert make_rig().bodies() == [*bodies, b"new"]

    def test_the_same_file_twice(self, make_rig: MakeRig, directory: Path) -> None:
        rig = make_rig()
        for body in (b"a", b"b", b"c"):
            rig.publish(body)
        rig.crash()
        (path,) = files(directory, ".log")
        raw, second = path.read_bytes(), batches_of(path)[1]
        (directory / f"{second.first_seq:020d}.log").write_bytes(raw[second.offset :])
        assert make_rig().bodies() == [b"a", b"b", b"c"]

    def test_a_full_disk_refuses_to_repair_and_keeps_both(
        self, make_rig: MakeRig, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bodies = self.overlapping(make_rig, directory, index=False)
        before = {path: path.read_bytes() for path in files(directory, ".log")}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _fail)
            with pytest.raises(OSError, match="no space"):
                make_rig()
        assert {path: path.read_bytes() for path in files(directory, ".log")} == before
        assert make_rig().bodies() == bodies


def _fail(*_arguments: object) -> None:
    raise OSError(28, "no space left on device")


class TestUnreadable:
    """Checks a disk that cannot read some sectors: EIO."""

    @pytest.fixture
    def bad_sector(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
        """Yields the set of what cannot be read, as (file name, offset of a page)."""
        bad: list[tuple[str, int]] = []
        real_pread, real_preadv = os.pread, os.preadv

        def check(fd: int, size: int, offset: int) -> None:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            for bad_name, page in bad:
                if name == bad_name and offset < page + 4096 and page < offset + size:
                    raise OSError(5, "input/output error")

        def pread(fd: int, size: int, offset: int) -> bytes:
            check(fd, size, offset)
            return real_pread(fd, size, offset)

        def preadv(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
            check(fd, sum(map(len, buffers)), offset)
            return real_preadv(fd, buffers, offset, flags)

        monkeypatch.setattr(os, "pread", pread)
        monkeypatch.setattr(os, "preadv", preadv)
        yield bad
        monkeypatch.undo()

    @pytest.mark.parametrize("clean", [True, False])
    def test_all_but_what_cannot_be_read_is_served(
        self, make_rig: MakeRig, directory: Path, bad_sector: list[tuple[str, int]], clean: bool
    ) -> None:
        bodies = [b"%02d" % number + b"x" * 1000 for number in range(40)]
        rig = make_rig()
        for body in bodies:
            rig.publish(body)
        rig.close() if clean else rig.crash()
        (path,) = files(directory, ".log")
        bad_sector.append((path.name, 8192))
        lost = [
            body
            for body, batch in zip(bodies, batches_of(path), strict=True)
            if batch.offset < 8192 + 4096 and batch.end > 8192
        ]
        again = make_rig()
        assert again.bodies() == [body for body in bodies if body not in lost]
        assert any(path.name in report for report in again.reports)
        assert again.publish(b"new").error is None
        again.crash()
        bad_sector.clear()
        assert make_rig().bodies()[-1] == b"new"

    def test_a_segment_that_cannot_be_opened_is_not_passed_over(
        self, make_rig: MakeRig, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
        for number in range(6):
            rig.publish(b"%d" % number + BODY)
        rig.crash()
        middle = files(directory, ".log")[1]
        real_open = os.open

        def fail_one(path: object, flags: int, mode: int = 0o777) -> int:
            if str(path) == str(middle):
                raise OSError(5, "input/output error")
            return real_open(path, flags, mode)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail_one)
            with pytest.raises(OSError, match="input/output error"):
                make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
        assert [body[:1] for body in make_rig().bodies()] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_sealed_files_are_not_written_to_again(make_rig: MakeRig, directory: Path) -> None:
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
    for _ in range(3):
        rig.publish(BODY)
    first = files(directory, ".log")[0]
    before = first.read_bytes()
    for _ in range(5):
        rig.publish(b"small")
    assert first.read_bytes() == before


def test_a_commit_larger_than_a_file_gets_its_own(make_rig: MakeRig, directory: Path) -> None:
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
    rig.publish(b"small")
    rig.publish(b"z" * 5000)
    rig.publish(b"small")
    assert len(files(directory, ".log")) == 3
    rig.crash()
    assert make_rig().bodies() == [b"small", b"z" * 5000, b"small"]


def test_the_disk_limit_refuses_and_recovers(make_rig: MakeRig) -> None:
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES, disk_bytes_max=2500)
    bodies = []
    while (commit := rig.publish(BODY)).error is None:
        bodies.append(BODY)
        assert len(bodies) < 10
    assert "--max-disk-bytes=2500" in str(commit.error)
    assert rig.shared.disk_bytes <= 2500
    assert rig.bodies() == bodies
    assert rig.log.segments is not None
    rig.log.segments.remove_below(rig.log.head, 0)
    assert rig.publish(b"again").error is None


def test_cold_messages_are_read_through_a_small_memory(make_rig: MakeRig) -> None:
    rig = make_rig(cache_bytes=50_000, max_bytes_per_file=30_000)
    expected = []
    for number in range(300):
        expected.append(b"%05d" % number * 100)
        rig.publish(expected[-1])
    assert rig.bodies() == expected
    assert rig.shared.cache.used_bytes <= 50_000
    seqs = [seq for seq, _ in rig.read()]
    for index in (299, 0, 150, 149, 298, 3):
        record = rig.record(seqs[index])
        assert record is not None
        assert record[34:] == expected[index]


def test_a_read_that_fails_is_tried_again(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.publish(b"a")
    rig.close()
    again = make_rig()
    failures = [1, 1]
    real_preadv, real_pread = os.preadv, os.pread

    def fail_twice() -> None:
        if failures:
            failures.pop()
            raise OSError(5, "input/output error")

    def preadv(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError("not in memory")
        fail_twice()
        return real_preadv(fd, buffers, offset)

    def pread(fd: int, size: int, offset: int) -> bytes:
        fail_twice()
        return real_pread(fd, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(os, "pread", pread)
        assert again.bodies() == [b"a"]
    assert len(again.reports) == 2
    assert "trying again" in again.reports[0]
