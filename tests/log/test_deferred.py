"""Messages that wait for their time: none lost, none twice, over crashes and failed appends."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hypothesis_profiles import examples
from nsquark.log import deferred as deferred_module
from nsquark.log.deferred import BUCKET_MS, DeferredMessages, Due

NOW_MS = 10 * BUCKET_MS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "deferred"


def take(waiting: DeferredMessages, now_ms: int) -> Due | None:
    """What the daemon does each tick."""
    waiting.next_due_ms(now_ms)
    return waiting.take_due(now_ms)


def take_bodies(waiting: DeferredMessages, now_ms: int) -> list[bytes]:
    """Everything due, appended at once."""
    bodies: list[bytes] = []
    while (due := take(waiting, now_ms)) is not None:
        bodies.extend(message[2] for message in due.messages)
        waiting.confirm(due)
    return bodies


@pytest.mark.parametrize("durable", [True, False])
def test_messages_come_when_they_are_due_and_in_that_order(directory: Path, durable: bool) -> None:
    waiting = DeferredMessages(directory if durable else None, 0, 1)
    for delay_ms in (300, 100, 200, 2 * BUCKET_MS, 100):
        waiting.add(b"%d" % delay_ms, 5, NOW_MS + delay_ms)
    assert waiting.count == 5
    assert waiting.next_due_ms(NOW_MS) == NOW_MS + 100
    assert take_bodies(waiting, NOW_MS + 99) == []
    assert take_bodies(waiting, NOW_MS + 200) == [b"100", b"100", b"200"]
    assert waiting.next_due_ms(NOW_MS + 200) == NOW_MS + 300
    assert take_bodies(waiting, NOW_MS + 4 * BUCKET_MS) == [b"300", b"120000"]
    assert waiting.count == 0
    assert waiting.next_due_ms(NOW_MS) is None


def test_publish_times_and_numbers_are_kept(directory: Path) -> None:
    waiting = DeferredMessages(directory, 0, 7)
    waiting.add(b"a", 111, NOW_MS)
    waiting.add(b"", 222, NOW_MS)
    due = take(waiting, NOW_MS)
    assert due is not None
    assert due.messages == [(7, 111, b"a"), (8, 222, b"")]
    assert waiting.number == 9


def test_an_empty_file_goes_when_its_minute_is_over(directory: Path) -> None:
    waiting = DeferredMessages(directory, 0, 1)
    waiting.add(b"a", 1, NOW_MS)
    assert take_bodies(waiting, NOW_MS) == [b"a"]
    assert take(waiting, NOW_MS + BUCKET_MS - 1) is None
    assert len(list(directory.iterdir())) == 1
    assert take(waiting, NOW_MS + BUCKET_MS) is None
    assert list(directory.iterdir()) == []


def test_a_far_bucket_is_looked_into_in_time(directory: Path) -> None:
    waiting = DeferredMessages(directory, 0, 1)
    due_ms = NOW_MS + 5 * BUCKET_MS + 30_000
    waiting.add(b"far", 1, due_ms)
    now_ms = NOW_MS
    while (next_ms := waiting.next_due_ms(now_ms)) is not None and next_ms < due_ms:
        assert next_ms > now_ms, "somebody would wait for nothing"
        now_ms = next_ms
    assert next_ms == due_ms
    assert take_bodies(waiting, due_ms) == [b"far"]


def test_many_due_at_once_come_in_portions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_module, "DUE_MESSAGES_MAX", 3)
    waiting = DeferredMessages(directory, 0, 1)
    for number in range(8):
        waiting.add(b"%d" % number, 1, NOW_MS)
    sizes = []
    while (due := take(waiting, NOW_MS)) is not None:
        sizes.append(len(due.messages))
        waiting.confirm(due)
    assert sizes == [3, 3, 2]


class TestCrash:
    def test_before_the_note(self, directory: Path) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        waiting.add(b"a", 1, NOW_MS)
        waiting.close()
        again = DeferredMessages(directory, 0, 1)
        assert (again.found, again.count, again.number) == ([1], 1, 2)
        assert take_bodies(again, NOW_MS) == [b"a"]

    def test_between_the_note_and_the_append(self, directory: Path) -> None:
        waiting = DeferredMessages(directory, 4, 1)
        waiting.add(b"a", 1, NOW_MS)
        due = take(waiting, NOW_MS)
        assert due is not None
        assert due.append_number == 5
        again = DeferredMessages(directory, 4, 1)  # the log's last append is still 4
        assert take_bodies(again, NOW_MS) == [b"a"]

    def test_after_the_append(self, directory: Path) -> None:
        waiting = DeferredMessages(directory, 4, 1)
        waiting.add(b"a", 1, NOW_MS)
        waiting.add(b"b", 1, NOW_MS + 10)
        take(waiting, NOW_MS)
        again = DeferredMessages(directory, 5, 1)
        assert again.found == [2]
        assert take_bodies(again, NOW_MS + 10) == [b"b"]

    def test_after_an_append_that_failed_once(self, directory: Path) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        waiting.add(b"a", 1, NOW_MS)
        first = take(waiting, NOW_MS)
        assert first is not None
        waiting.put_back(first)
        assert waiting.count == 1
        waiting.add(b"b", 1, NOW_MS)
        second = take(waiting, NOW_MS)
        assert second is not None
        assert second.append_number == first.append_number
        assert [message[2] for message in second.messages] == [b"a", b"b"]
        assert DeferredMessages(directory, second.append_number, 1).count == 0
        assert DeferredMessages(directory, second.append_number - 1, 1).count == 2

    @pytest.mark.parametrize("garbage", [b"\0", b"\xff" * 39, b"\0" * 200])
    def test_a_torn_end_is_cut_and_writing_goes_on(self, directory: Path, garbage: bytes) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        waiting.add(b"a", 1, NOW_MS)
        (path,) = directory.iterdir()
        path.write_bytes(path.read_bytes() + garbage)
        again = DeferredMessages(directory, 0, 1)
        again.add(b"b", 1, NOW_MS)
        third = DeferredMessages(directory, 0, 1)
        assert take_bodies(third, NOW_MS) == [b"a", b"b"]

    def test_at_every_cut_whole_messages_stay(self, directory: Path) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        ends = []
        for body in (b"one", b"two", b"three"):
            waiting.add(body, 1, NOW_MS)
            (path,) = directory.iterdir()
            ends.append(path.stat().st_size)
        raw = path.read_bytes()
        for cut in range(len(raw) + 1):
            path.write_bytes(raw[:cut])
            again = DeferredMessages(directory, 0, 1)
            assert again.count == sum(end <= cut for end in ends)
            again.close()


def test_numbers_start_above_the_floor_and_above_what_waits(directory: Path) -> None:
    waiting = DeferredMessages(directory, 0, 50)
    waiting.add(b"a", 1, NOW_MS)
    waiting.close()
    assert DeferredMessages(directory, 0, 10).number == 51
    assert DeferredMessages(directory, 0, 100).number == 100


class TestDisk:
    def fail(self, monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> None:
        real = deferred_module.write_all

        def short(fd: int, data: bytes, offset: int) -> None:
            real(fd, data[:after_bytes], offset)
            raise OSError(28, "no space left on device")

        monkeypatch.setattr(deferred_module, "write_all", short)

    @pytest.mark.parametrize("after_bytes", [0, 10, 41])
    def test_a_message_that_cannot_be_stored_is_refused(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, after_bytes: int
    ) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        waiting.add(b"kept", 1, NOW_MS)
        with monkeypatch.context() as patch:
            self.fail(patch, after_bytes)
            with pytest.raises(OSError, match="no space"):
                waiting.add(b"refused", 1, NOW_MS)
        waiting.add(b"later", 1, NOW_MS)
        assert waiting.count == 2
        assert DeferredMessages(directory, 0, 1).count == 2
        assert take_bodies(waiting, NOW_MS) == [b"kept", b"later"]

    def test_an_append_that_cannot_be_noted_is_not_made(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting = DeferredMessages(directory, 0, 1)
        waiting.add(b"a", 1, NOW_MS)
        with monkeypatch.context() as patch:
            self.fail(patch, 20)
            with pytest.raises(OSError, match="no space"):
                take(waiting, NOW_MS)
        assert waiting.count == 1
        assert take_bodies(waiting, NOW_MS) == [b"a"]


class DeferredModel(RuleBasedStateMachine):
    """Beside a list: `waiting` bodies not appended yet, `appended` those in the log, each once."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(self.make_directory()) / "deferred"
        self.now_ms = NOW_MS
        self.serial = 0
        self.waiting: dict[bytes, int] = {}
        self.last_append = 0
        self.taken: Due | None = None
        self.store = DeferredMessages(self.directory, 0, 1)

    @rule(delay_ms=st.sampled_from([0, 1, 1000, BUCKET_MS - 1, BUCKET_MS, 3 * BUCKET_MS]))
    def add(self, delay_ms: int) -> None:
        self.serial += 1
        body = b"%d" % self.serial
        self.store.add(body, 1, self.now_ms + delay_ms)
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
        self.store = DeferredMessages(self.directory, self.last_append, 1)
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
    machine = type("Machine", (DeferredModel,), {"make_directory": lambda _: tmp_path_factory.mktemp("deferred")})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(2)))
