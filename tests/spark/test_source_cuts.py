"""A batch that is run again has the partitions that it had, whatever became of its log meanwhile."""

from collections.abc import Callable

import pytest

from harness import Nsqd, eventually
from spark.source_rig import SMALL_FILES, bodies, info, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from spark.micro_batches import MicroBatches, query

pytestmark = pytest.mark.ours

Cut = tuple[int, int, int]


def cuts(one: MicroBatches) -> list[Cut]:
    return [(part.value.low, part.value.high, part.value.count) for part in one.partitions()]


def grow(daemon: Nsqd, low: int, count: int) -> None:
    """Publishes 7 messages at a time, whose sizes differ, so that bytes and messages are not spread alike."""
    for number, first in enumerate(range(low, low + count, 7)):
        publish(daemon, "t", [body + b"x" * (number % 50) * 20 for body in bodies(first, first + 7)])


def drain(daemon: Nsqd) -> None:
    """Lets nsqd remove what only a channel without a reader held."""
    daemon.post("/channel/create", topic="t", channel="drain", start="oldest")
    daemon.post("/channel/empty", topic="t", channel="drain")
    daemon.post("/channel/delete", topic="t", channel="drain")


def test_the_cut_outlives_growth_rolls_restarts_retention_and_a_lost_index(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = on_fixed_port(make_nsqd(*SMALL_FILES))
    grow(daemon, 0, 700)
    daemon.restart(crash=True)  # a gap between sequence numbers
    grow(daemon, 700, 1400)
    one = query(daemon, topic="t", channel="spark", minPartitions=8, maxMessagesPerTrigger=500)
    assert one.next() == []
    assert len(one.next()) == 500
    assert one.plan()
    first = cuts(one)
    assert len(first) == 8 and sum(count for _, _, count in first) == 500
    one.stop()

    def check(what: str) -> None:
        again = one.restarted()
        again.planned = one.planned
        assert cuts(again) == first, what
        again.stop()

    for round_number in range(2):
        grow(daemon, 10_000 * (round_number + 1), 420)
        check("the log has grown")
        daemon.restart()
        check("nsqd was started again")
        drain(daemon)
        daemon.restart(crash=True)
        check("nsqd was killed")
        daemon.stop()
        indexes = list(daemon.data_path.rglob("*.idx"))
        assert indexes
        for path in indexes:
            path.unlink()
        daemon.start()
        check("the index was made again")
    eventually(lambda: info(daemon, "t")["removed_to"] > 0)  # retention took what was read before
