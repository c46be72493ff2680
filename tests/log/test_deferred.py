"""Of messages that wait for their time none is lost and none comes twice, over crashes and failed appends."""

import os
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from xxhash import xxh3_64_intdigest

from hypothesis_profiles import run_model
from log.rig import fail_reads, make_shared
from nsquark.log import durable
from nsquark.log.deferred import DeferredMessages, Due
from nsquark.log.deferred_appends import Appends
from nsquark.log.deferred_records import BUCKET_MS

NOW_MS = 10 * BUCKET_MS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "deferred"


def opened(
    directory: Path | None,
    last_append: int = 0,
    number_min: int = 1,
    now_ms: int = NOW_MS,
    reports: list[str] | None = None,
) -> DeferredMessages:
    shared = make_shared(reports.append if reports is not None else lambda text: None)
    return DeferredMessages(shared, directory, Appends(last_append), number_min, now_ms)


def add(waiting: DeferredMessages, body: bytes, timestamp_ns: int, due_ms: int) -> None:
    waiting.add(body, timestamp_ns, min(NOW_MS, due_ms), due_ms - min(NOW_MS, due_ms))


def take(waiting: DeferredMessages, now_ms: int) -> Due | None:
    """Does what the daemon does each tick."""
    waiting.load_near(now_ms)
    return waiting.next_due(now_ms)


def take_bodies(waiting: DeferredMessages, now_ms: int) -> list[bytes]:
    """Appends everything that is due at once; returns the bodies."""
    bodies: list[bytes] = []
    while (due := take(waiting, now_ms)) is not None:
        bodies.extend(message[2] for message in due.messages)
        waiting.confirm(due)
    return bodies


@pytest.mark.parametrize("durable", [True, False])
def test_messages_come_when_they_are_due_and_in_that_order(directory: Path, durable: bool) -> None:
    waiting = opened(directory if durable else None)
    for delay_ms in (300, 100, 200, 2 * BUCKET_MS, 100):
        add(waiting, b"%d" % delay_ms, 5, NOW_MS + delay_ms)
    assert waiting.count == 5
    assert waiting.next_due_ms(NOW_MS) == NOW_MS + 100
    assert take_bodies(waiting, NOW_MS + 99) == []
    assert take_bodies(waiting, NOW_MS + 200) == [b"100", b"100", b"200"]
    assert waiting.next_due_ms(NOW_MS + 200) == NOW_MS + 300
    assert take_bodies(waiting, NOW_MS + 4 * BUCKET_MS) == [b"300", b"120000"]
    assert waiting.count == 0
    assert waiting.next_due_ms(NOW_MS) is None


def test_publish_times_and_numbers_are_kept(directory: Path) -> None:
    waiting = opened(directory, 0, 7)
    add(waiting, b"a", 111, NOW_MS)
    add(waiting, b"", 222, NOW_MS)
    due = take(waiting, NOW_MS)
    assert due is not None
    assert due.messages == [(7, 111, b"a"), (8, 222, b"")]
    assert waiting.number == 9


def test_an_empty_file_goes_when_its_minute_is_over(directory: Path) -> None:
    waiting = opened(directory, 0, 1)
    add(waiting, b"a", 1, NOW_MS)
    assert take_bodies(waiting, NOW_MS) == [b"a"]
    assert take(waiting, NOW_MS + BUCKET_MS - 1) is None
    assert len(list(directory.iterdir())) == 1
    assert take(waiting, NOW_MS + BUCKET_MS) is None
    assert list(directory.iterdir()) == []


def test_a_far_bucket_is_looked_into_in_time(directory: Path) -> None:
    waiting = opened(directory, 0, 1)
    due_ms = NOW_MS + 5 * BUCKET_MS + 30_000
    add(waiting, b"far", 1, due_ms)
    now_ms = NOW_MS
    while (next_ms := waiting.next_due_ms(now_ms)) is not None and next_ms < due_ms:
        assert next_ms > now_ms, "somebody would wait for nothing"
        now_ms = next_ms
        waiting.load_near(now_ms)
    assert next_ms == due_ms
    assert take_bodies(waiting, due_ms) == [b"far"]


def test_many_due_at_once_come_in_portions(directory: Path) -> None:
    waiting = DeferredMessages(make_shared(), directory, Appends(), 1, NOW_MS, due_messages_max=3)
    for number in range(8):
        add(waiting, b"%d" % number, 1, NOW_MS)
    sizes = []
    while (due := take(waiting, NOW_MS)) is not None:
        sizes.append(len(due.messages))
        waiting.confirm(due)
    assert sizes == [3, 3, 2]


class TestCrash:
    def test_before_the_note(self, directory: Path) -> None:
        waiting = opened(directory, 0, 1)
        add(waiting, b"a", 1, NOW_MS)
        waiting.close()
        again = opened(directory, 0, 1)
        assert (again.found, again.count, again.number) == ([1], 1, 2)
        assert take_bodies(again, NOW_MS) == [b"a"]

    def test_between_the_note_and_the_append(self, directory: Path) -> None:
        waiting = opened(directory, 4, 1)
        add(waiting, b"a", 1, NOW_MS)
        due = take(waiting, NOW_MS)
        assert due is not None
        assert due.append_number == 5
        again = opened(directory, 4, 1)  # the log's last append is still 4
        assert take_bodies(again, NOW_MS) == [b"a"]

    def test_after_the_append(self, directory: Path) -> None:
        waiting = opened(directory, 4, 1)
        add(waiting, b"a", 1, NOW_MS)
        add(waiting, b"b", 1, NOW_MS + 10)
        take(waiting, NOW_MS)
        again = opened(directory, 5, 1)
        assert again.found == [2]
        assert take_bodies(again, NOW_MS + 10) == [b"b"]

    def test_after_an_append_that_failed_once(self, directory: Path) -> None:
        waiting = opened(directory, 0, 1)
        add(waiting, b"a", 1, NOW_MS)
        first = take(waiting, NOW_MS)
        assert first is not None
        waiting.put_back(first)
        assert waiting.count == 1
        add(waiting, b"b", 1, NOW_MS)
        second = take(waiting, NOW_MS)
        assert second is not None
        assert second.append_number == first.append_number
        assert [message[2] for message in second.messages] == [b"a", b"b"]
        assert opened(directory, second.append_number, 1).count == 0
        assert opened(directory, second.append_number - 1, 1).count == 2

    @pytest.mark.parametrize("garbage", [b"\0", b"\xff" * 39, b"\0" * 200])
    def test_a_torn_end_is_cut_and_writing_goes_on(self, directory: Path, garbage: bytes) -> None:
        waiting = opened(directory, 0, 1)
        add(waiting, b"a", 1, NOW_MS)
        (path,) = directory.iterdir()
        path.write_bytes(path.read_bytes() + garbage)
        again = opened(directory, 0, 1)
        add(again, b"b", 1, NOW_MS)
        third = opened(directory, 0, 1)
        assert take_bodies(third, NOW_MS) == [b"a", b"b"]

    def test_at_every_cut_whole_messages_stay(self, directory: Path) -> None:
        waiting = opened(directory, 0, 1)
        ends = []
        for body in (b"one", b"two", b"three"):
            add(waiting, body, 1, NOW_MS)
            (path,) = directory.iterdir()
            ends.append(path.stat().st_size)
        raw = path.read_bytes()
        for cut in range(len(raw) + 1):
            path.write_bytes(raw[:cut])
            again = opened(directory, 0, 1)
            assert again.count == sum(end <= cut for end in ends)
            again.close()


def test_numbers_start_above_the_floor_and_above_what_waits(directory: Path) -> None:
    waiting = opened(directory, 0, 50)
    add(waiting, b"a", 1, NOW_MS)
    waiting.close()
    assert opened(directory, 0, 10).number == 51
    assert opened(directory, 0, 100).number == 100


class TestDamage:
    COUNT = 10

    def filled(self, directory: Path) -> Path:
        waiting = opened(directory)
        for number in range(self.COUNT):
            add(waiting, b"body %d " % number * 20, 1, NOW_MS)
        waiting.close()
        (path,) = directory.iterdir()
        return path

    def bodies_without(self, *numbers: int) -> list[bytes]:
        return [b"body %d " % number * 20 for number in range(self.COUNT) if number not in numbers]

    @pytest.mark.parametrize("number", [0, 4, 9], ids=["first", "middle", "last"])
    @pytest.mark.parametrize("at", [0, 8, 12, 20, 40, 47, 48, 100])
    def test_a_flipped_bit_costs_one_message_and_is_told(self, directory: Path, number: int, at: int) -> None:
        path = self.filled(directory)
        raw = bytearray(path.read_bytes())
        raw[number * len(raw) // self.COUNT + at] ^= 0x10
        path.write_bytes(raw)
        reports: list[str] = []
        again = opened(directory, reports=reports)
        assert len(reports) == 1
        assert str(path) in reports[0]
        add(again, b"after", 1, NOW_MS)
        again.close()
        reports.clear()
        third = opened(directory, reports=reports)
        assert not reports, "the damage is gone"
        assert take_bodies(third, NOW_MS) == [*self.bodies_without(number), b"after"]

    def test_a_lost_page_costs_what_was_in_it(self, directory: Path) -> None:
        waiting = opened(directory)
        for number in range(100):
            add(waiting, b"%03d" % number * 100, 1, NOW_MS)
        waiting.close()
        (path,) = directory.iterdir()
        raw = bytearray(path.read_bytes())
        raw[4096:8192] = bytes(4096)
        path.write_bytes(raw)
        kept = take_bodies(opened(directory), NOW_MS)
        assert 100 - 13 - 1 <= len(kept) < 100
        assert kept == sorted(kept)
        assert len(set(kept)) == len(kept)

    def test_a_body_that_looks_like_records_is_none(self, directory: Path) -> None:
        """The body has the bytes of another minute's file, behind a head that is damaged."""
        copied = self.filled(directory).read_bytes()
        other = directory.with_name("other")
        waiting = opened(other)
        add(waiting, copied, 1, NOW_MS + BUCKET_MS)
        add(waiting, b"behind", 1, NOW_MS + BUCKET_MS)
        waiting.close()
        (path,) = other.iterdir()
        raw = bytearray(path.read_bytes())
        raw[5] ^= 1
        path.write_bytes(raw)
        assert take_bodies(opened(other), NOW_MS + BUCKET_MS) == [b"behind"]

    def test_a_damaged_note_brings_messages_again_and_loses_none(self, directory: Path) -> None:
        """The second note takes the first one back; without it, the first must not count."""
        waiting = opened(directory)
        add(waiting, b"a", 1, NOW_MS)
        first = take(waiting, NOW_MS)
        assert first is not None
        (path,) = directory.iterdir()
        start = path.stat().st_size
        waiting.put_back(first)
        add(waiting, b"other minute", 1, NOW_MS - BUCKET_MS)
        second = take(waiting, NOW_MS)
        assert second is not None
        assert second.append_number == first.append_number
        assert [message[2] for message in second.messages] == [b"other minute"]
        waiting.confirm(second)
        add(waiting, b"b", 1, NOW_MS)
        waiting.close()
        raw = bytearray(path.read_bytes())
        raw[start + 20] ^= 1
        path.write_bytes(raw)
        assert take_bodies(opened(directory, second.append_number), NOW_MS) == [b"a", b"b"]

    def test_on_a_full_disk_a_doubtful_note_stays_doubtful(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = opened(directory)
        add(waiting, b"a", 1, NOW_MS)
        take(waiting, NOW_MS)
        waiting.close()
        (path,) = directory.iterdir()
        path.write_bytes(path.read_bytes() + b"torn")

        def full(*_args: object) -> None:
            raise OSError(28, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_all", full)
            assert opened(directory, 1).count == 1
        assert opened(directory, 1).count == 1
        assert take_bodies(opened(directory, 1), NOW_MS) == [b"a"]

    def test_a_message_damaged_while_it_waits_is_left_out(self, directory: Path) -> None:
        reports: list[str] = []
        waiting = opened(directory, reports=reports)
        for body in (b"one", b"two", b"three"):
            add(waiting, body, 1, NOW_MS)
        (path,) = directory.iterdir()
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"two", b"TWO"))
        due = take(waiting, NOW_MS)
        assert due is not None
        assert [message[2] for message in due.messages] == [b"one", b"three"]
        assert due.lost == [2]
        assert "damaged" in reports[0]

    def test_a_damaged_file_has_its_name_until_another_takes_it(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A crash between two steps of mending it leaves what was intact."""
        waiting = opened(directory)
        for body in (b"one", b"two", b"three"):
            add(waiting, body, 1, NOW_MS)
        waiting.close()
        (path,) = directory.iterdir()
        path.write_bytes(path.read_bytes().replace(b"two", b"TWO"))
        real = os.replace

        def replace(source: Path, target: Path) -> None:
            if Path(target) == path:
                raise OSError(5, "Input/output error")
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            opened(directory).close()
        assert take_bodies(opened(directory), NOW_MS) == [b"one", b"three"]

    def test_pages_that_cannot_be_read(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.filled(directory)
        before = path.read_bytes()
        record_bytes = len(before) // self.COUNT

        def is_bad(fd: int, size: int, offset: int) -> bool:
            return offset < record_bytes * 2 and offset + size > 1000 and os.fstat(fd).st_size == len(before)

        reports: list[str] = []
        with monkeypatch.context() as patch:
            fail_reads(patch, is_bad)
            again = opened(directory, reports=reports)
        assert any("cannot be read" in report for report in reports)
        assert path.with_name(path.name + ".bad").read_bytes() == before
        assert again.count == 0, "the file is smaller than a page"
        add(again, b"after", 1, NOW_MS)
        again.close()
        assert take_bodies(opened(directory), NOW_MS) == [b"after"]


class TestFormat1:
    HEAD = struct.Struct("<QIIqqQ")

    def record(self, kind: int, due_ms: int, timestamp_ns: int, number: int, body: bytes) -> bytes:
        record = self.HEAD.pack(0, kind, len(body), due_ms, timestamp_ns, number)[8:] + body
        return xxh3_64_intdigest(record).to_bytes(8, "little") + record

    def file(self, directory: Path) -> Path:
        directory.mkdir()
        path = directory / f"{NOW_MS // BUCKET_MS}.deferred"
        records = [self.record(1, NOW_MS + number, 1, number, b"%d" % number) for number in range(1, 5)]
        path.write_bytes(b"".join(records) + self.record(2, 0, 0, 3, (2).to_bytes(8, "little")))
        return path

    def test_is_read_and_added_to(self, directory: Path) -> None:
        self.file(directory)
        waiting = opened(directory, 3)
        assert waiting.number == 5
        add(waiting, b"new", 1, NOW_MS + 5)
        waiting.close()
        assert take_bodies(opened(directory, 3), NOW_MS + 5) == [b"1", b"3", b"4", b"new"]

    def test_a_flipped_bit_costs_one_message(self, directory: Path) -> None:
        path = self.file(directory)
        raw = bytearray(path.read_bytes())
        raw[41 + 15] ^= 1
        path.write_bytes(raw)
        assert take_bodies(opened(directory), NOW_MS + 5) == [b"1", b"3", b"4"]


class TestClock:
    """The clock may be anywhere after a boot; no message waits for longer than its delay from then on."""

    @pytest.mark.parametrize("ahead_ms", [1, 20_000, BUCKET_MS, 3_600_000, 200 * 365 * 86_400_000])
    def test_one_that_was_ahead(self, directory: Path, ahead_ms: int) -> None:
        waiting = opened(directory, now_ms=NOW_MS + ahead_ms)
        waiting.add(b"soon", 1, NOW_MS + ahead_ms, 3_000)
        waiting.add(b"later", 1, NOW_MS + ahead_ms, 90_000)
        waiting.close()
        for start_ms in (NOW_MS, NOW_MS + 1_000):  # the second start does not begin the delay again
            again = opened(directory, now_ms=start_ms)
            assert again.found == [1, 2]
            assert again.count == 2
            again.close()
        again = opened(directory, now_ms=NOW_MS + 2_000)
        again.load_near(NOW_MS + 2_000)
        assert again.next_due_ms(NOW_MS + 2_000) == NOW_MS + 3_000
        assert take_bodies(again, NOW_MS + 2_999) == []
        assert take_bodies(again, NOW_MS + 3_000) == [b"soon"]
        assert take_bodies(again, NOW_MS + 90_000) == [b"later"]
        assert take_bodies(again, NOW_MS + 5 * BUCKET_MS) == []
        assert list(directory.iterdir()) == []

    def test_one_that_was_behind(self, directory: Path) -> None:
        waiting = opened(directory, now_ms=0)
        waiting.add(b"a", 1, 0, 3_000)
        waiting.close()
        assert take_bodies(opened(directory), NOW_MS) == [b"a"]

    def test_on_a_full_disk_they_are_in_time_all_the_same(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = opened(directory, now_ms=100 * NOW_MS)
        waiting.add(b"a", 1, 100 * NOW_MS, 3_000)
        waiting.close()

        def full(*_args: object) -> None:
            raise OSError(28, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_all", full)
            again = opened(directory)
        assert take_bodies(again, NOW_MS + 2_999) == []
        assert take_bodies(again, NOW_MS + 3_000) == [b"a"]


class TestDisk:
    def fail(self, monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> None:
        real = durable.write_all

        def short(fd: int, data: bytes, offset: int) -> None:
            real(fd, data[:after_bytes], offset)
            raise OSError(28, "no space left on device")

        monkeypatch.setattr(durable, "write_all", short)

    @pytest.mark.parametrize("after_bytes", [0, 10, 41])
    def test_a_message_that_cannot_be_stored_is_refused(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, after_bytes: int
    ) -> None:
        waiting = opened(directory, 0, 1)
        add(waiting, b"kept", 1, NOW_MS)
        with monkeypatch.context() as patch:
            self.fail(patch, after_bytes)
            with pytest.raises(OSError, match="no space"):
                add(waiting, b"refused", 1, NOW_MS)
        add(waiting, b"later", 1, NOW_MS)
        assert waiting.count == 2
        assert opened(directory, 0, 1).count == 2
        assert take_bodies(waiting, NOW_MS) == [b"kept", b"later"]

    def test_an_append_that_cannot_be_noted_is_not_made(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting = opened(directory, 0, 1)
        add(waiting, b"a", 1, NOW_MS)
        with monkeypatch.context() as patch:
            self.fail(patch, 20)
            with pytest.raises(OSError, match="no space"):
                take(waiting, NOW_MS)
        assert waiting.count == 1
        assert take_bodies(waiting, NOW_MS) == [b"a"]


class DeferredModel(RuleBasedStateMachine):
    """Stands beside a list: `waiting` bodies are not appended yet, `appended` are those in the log, each once."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(self.make_directory()) / "deferred"  # type: ignore[attr-defined]
        self.now_ms = NOW_MS
        self.serial = 0
        self.waiting: dict[bytes, int] = {}
        self.last_append = 0
        self.taken: Due | None = None
        self.store = opened(self.directory, 0, 1)

    @rule(delay_ms=st.sampled_from([0, 1, 1000, BUCKET_MS - 1, BUCKET_MS, 3 * BUCKET_MS]))
    def add(self, delay_ms: int) -> None:
        self.serial += 1
        body = b"%d" % self.serial
        self.store.add(body, 1, self.now_ms, delay_ms)
        self.waiting[body] = self.now_ms + delay_ms

    @rule(passed_ms=st.sampled_from([1, 1000, BUCKET_MS, 4 * BUCKET_MS]))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @precondition(lambda self: self.taken is None)
    @rule()
    def take(self) -> None:
        self.taken = take(self.store, self.now_ms)
        due = {body for body, due_ms in self.waiting.items() if due_ms <= self.now_ms}
        if self.taken is None:
            assert not due
        else:
            assert {message[2] for message in self.taken.messages} <= due

    @precondition(lambda self: self.taken is not None)
    @rule()
    def append_fails(self) -> None:
        assert self.taken is not None
        self.store.put_back(self.taken)
        self.taken = None

    @precondition(lambda self: self.taken is not None)
    @rule(crash=st.booleans())
    def append(self, crash: bool) -> None:
        assert self.taken is not None
        assert self.taken.append_number == self.last_append + 1
        self.last_append = self.taken.append_number
        for _, _, body in self.taken.messages:
            del self.waiting[body]
        if crash:
            self.reopen()
        else:
            self.store.confirm(self.taken)
            self.taken = None

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.taken = None
        self.store = opened(self.directory, self.last_append, 1, self.now_ms)
        assert len(self.store.found) == len(self.waiting)

    @invariant()
    def counts_agree(self) -> None:
        taken = len(self.taken.messages) if self.taken is not None else 0
        assert self.store.count + taken == len(self.waiting)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


@pytest.mark.timeout(3600)  # for HYPOTHESIS_PROFILE=long
def test_every_deferred_message_is_appended_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_model(DeferredModel, 2, make_directory=lambda _: tmp_path_factory.mktemp("deferred"))


def test_an_append_that_was_lost_although_a_later_one_was_not(tmp_path: Path) -> None:
    """Pages reach the disk in any order: the bucket, which has the messages, is believed."""
    appends = Appends(durable=3, later=[5])
    assert [appends.happened(number) for number in (3, 4, 5, 6)] == [True, False, True, False]
    assert appends.last == 5
    again = Appends()
    again.add_token(appends.token(6))
    assert (again.durable, again.later) == (3, {6})
    again.add_all(appends)
    again.add_durable(5)
    assert (again.durable, again.later) == (5, {6})
