"""Checks a topic's log beside a plain list: whatever happens, every committed message is there, in order, once."""

import os
import struct
from collections.abc import Callable
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

from hypothesis_profiles import run_model
from log.rig import Rig
from nsquark.kernel.commits import Commit
from nsquark.log.cache import CHUNK_BYTES_MIN
from nsquark.wire.batch_format import DEFERRED

MakeRig = Callable[..., Rig]


def sized(bodies: list[bytes]) -> bytearray:
    return bytearray(b"".join(struct.pack(">i", len(body)) + body for body in bodies))


class TestCommits:
    def test_messages_of_one_turn_share_a_commit(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        first = rig.append(b"a")
        assert rig.append(b"b") is first
        assert rig.log.head == 0
        assert not first.is_settled
        rig.log.write()
        assert first.is_settled
        assert rig.append(b"c") is not first

    def test_waiters_are_told_once(self, make_rig: MakeRig) -> None:
        class Waiter:
            def __init__(self) -> None:
                self.told: list[Commit] = []

            def settled(self, commit: Commit) -> None:
                self.told.append(commit)

        rig, waiter = make_rig(), Waiter()
        commit = rig.append(b"a")
        commit.waiters.append(waiter)
        rig.log.write()
        rig.publish(b"b")
        assert waiter.told == [commit]

    def test_committed_messages_and_bytes_are_reported(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        seen: list[tuple[int, int]] = []
        rig.log.tail.on_committed = lambda messages, body_bytes: seen.append((messages, body_bytes))
        rig.append(b"aa", b"bbb")
        bodies = [b"c", b"dddd"]
        source = sized(bodies)
        rig.log.append_sized(source, 0, len(source), 2, 1)
        rig.log.write()
        rig.append_apart(b"ee")
        assert seen == [(4, 10), (1, 2)]

    def test_a_log_without_a_directory_keeps_everything_in_memory(self, make_rig: MakeRig) -> None:
        rig = make_rig(None, cache_bytes=1)
        rig.publish(*[b"x" * 1000] * 100)
        rig.publish(b"y")
        assert rig.bodies() == [b"x" * 1000] * 100 + [b"y"]
        rig.log.forget_below(rig.log.head)
        assert rig.log.extents.count == 0

    def test_appending_apart_says_which_numbers_it_gave(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.append(b"open")
        bodies = [b"%d" % number * 3000 for number in range(10)]
        commit, seqs = rig.append_apart(*bodies, flags=DEFERRED, token=(1).to_bytes(16, "little"))
        assert commit.error is None
        assert rig.read()[1:] == list(zip(seqs, bodies, strict=True))

    def test_appending_apart_waits_for_a_write_under_way(self, make_rig: MakeRig) -> None:
        rig = make_rig(sync_every=1)
        commit = rig.append(b"a")
        with pytest.raises(BlockingIOError):
            rig.log.append_apart([(1, b"b")], 0, bytes(16))
        rig.settle()
        assert commit.error is None
        assert rig.append_apart(b"b")[0].error is None
        assert rig.bodies() == [b"a", b"b"]

    def test_what_waits_for_the_disk_is_congestion(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.append(*[b"x" * (1 << 20)] * 9)
        assert rig.log.is_congested
        rig.log.write()
        assert not rig.log.is_congested

    def test_close_writes_what_is_open(self, make_rig: MakeRig) -> None:
        rig = make_rig(sync_every=1)
        rig.append(b"a")
        rig.log.write()
        rig.append(b"b")
        rig.close()
        assert make_rig().bodies() == [b"a", b"b"]

    def test_numbers_after_a_restart_are_above_all_before(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.publish(b"a")
        head = rig.log.head
        rig.crash()
        again = make_rig()
        again.publish(b"b")
        assert again.read()[1][0] > head
        assert again.log.extents.count == 2


class LogModel(RuleBasedStateMachine):
    """`committed` is what must be there, `open` what was appended and not written."""

    make_root: Callable[[], Path]

    @initialize(
        cache_bytes=st.sampled_from([1, 2 * CHUNK_BYTES_MIN, 1 << 24]),
        file_bytes=st.sampled_from([500, 20_000, 1 << 20]),
        sync_every=st.sampled_from([1, 3, 2500]),
    )
    def start(self, cache_bytes: int, file_bytes: int, sync_every: int) -> None:
        self.root = self.make_root()
        self.settings = {
            "cache_bytes": cache_bytes,
            "max_bytes_per_file": file_bytes,
            "sync_every": sync_every,
        }
        self.serial = 0
        self.committed: list[bytes] = []
        self.open: list[bytes] = []
        self.commits: list[Commit] = []
        self.rig = Rig(self.root, self.root / "topic", **self.settings)

    def bodies(self, sizes: list[int]) -> list[bytes]:
        made = []
        for size in sizes:
            self.serial += 1
            made.append(b"%d:" % self.serial + b"." * size)
        return made

    sizes = st.lists(st.sampled_from([0, 1, 50, 5000, 20_000]), min_size=1, max_size=8)

    @rule(sizes=sizes)
    def append(self, sizes: list[int]) -> None:
        bodies = self.bodies(sizes)
        self.commits.append(self.rig.append(*bodies))
        self.open += bodies

    @rule(sizes=sizes, repeat=st.sampled_from([1, 40]))
    def append_sized(self, sizes: list[int], repeat: int) -> None:
        bodies = self.bodies(sizes * repeat)
        source = bytearray(b"123") + sized(bodies)
        self.commits.append(self.rig.log.append_sized(source, 3, len(source), len(bodies), 1))
        self.open += bodies

    @rule()
    def write(self) -> None:
        self.rig.log.write()

    @rule()
    def settle(self) -> None:
        """Ends a turn, and what threads were doing."""
        self.rig.log.write()
        self.rig.settle()
        self.rig.log.write()
        self.rig.settle()
        assert all(commit.is_settled and commit.error is None for commit in self.commits)
        self.committed += self.open
        self.open, self.commits = [], []

    @rule(sizes=sizes)
    def append_apart(self, sizes: list[int]) -> None:
        self.settle()
        bodies = self.bodies(sizes)
        commit, seqs = self.rig.append_apart(*bodies, flags=DEFERRED, token=(9).to_bytes(16, "little"))
        assert commit.error is None
        assert len(seqs) == len(bodies)
        self.committed += bodies

    @rule()
    def read_everything(self) -> None:
        self.settle()
        messages = self.rig.read()
        assert [body for _, body in messages] == self.committed
        seqs = [seq for seq, _ in messages]
        assert seqs == sorted(set(seqs))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        self.settle()
        index = data.draw(st.integers(0, len(self.committed) - 1))
        extents = self.rig.log.extents
        seq = extents.nth(extents.ordinal(extents.first) + index)
        record = self.rig.record(seq)
        assert record is not None
        assert record[34:] == self.committed[index]

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def remove_below(self, data: st.DataObject) -> None:
        """Removes what nobody needs below some message: all from it on stays."""
        self.settle()
        index = data.draw(st.integers(0, len(self.committed)))
        log = self.rig.log
        seq = log.extents.nth(log.extents.ordinal(log.extents.first) + index)
        assert log.segments is not None
        log.segments.remove_below(seq, 0)
        left = log.extents.count
        assert left >= len(self.committed) - index
        self.committed = self.committed[len(self.committed) - left :]

    @rule()
    def restart(self) -> None:
        self.rig.close()
        self.committed += self.open
        self.open, self.commits = [], []
        self.rig = Rig(self.root, self.root / "topic", **self.settings)
        assert self.rig.reports == []

    @rule(garbage=st.sampled_from([b"", b"\0", b"NQB1", b"\xff" * 500, b"NQB1" * 100]))
    def crash(self, garbage: bytes) -> None:
        """Crashes: what was not committed may be there or not, but only as a beginning of it."""
        self.rig.crash()
        last = max((self.root / "topic").glob("*.log"), default=None)
        if last is not None:
            with last.open("ab") as file:
                file.write(garbage)
        self.reopen_and_compare()

    @rule(share=st.floats(0, 1))
    def crash_while_writing(self, share: float) -> None:
        """Crashes in the middle of a write, which is cut anywhere."""
        self.settle()
        sizes = {path: path.stat().st_size for path in (self.root / "topic").glob("*.log")}
        self.append([10, 3000, 10])
        self.rig.log.write()
        self.rig.crash()
        last = max((self.root / "topic").glob("*.log"))
        before = sizes.get(last, 0)
        os.truncate(last, before + int(share * (last.stat().st_size - before)))
        self.reopen_and_compare()

    def reopen_and_compare(self) -> None:
        self.rig = Rig(self.root, self.root / "topic", **self.settings)
        found = self.rig.bodies()
        acknowledged = len(self.committed)
        assert found[:acknowledged] == self.committed
        assert found[acknowledged:] == self.open[: len(found) - acknowledged]
        self.committed, self.open, self.commits = found, [], []

    @invariant()
    def counts_agree(self) -> None:
        log = self.rig.log
        assert len(self.committed) <= log.extents.count <= len(self.committed) + len(self.open)
        if log.extents.count:
            assert log.head == log.extents.head

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.crash()


@pytest.mark.timeout(3600)  # for HYPOTHESIS_PROFILE=long
def test_the_log_agrees_with_a_list(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_model(LogModel, 0.7, make_root=lambda _: tmp_path_factory.mktemp("log"))
