"""Checks many small topics, NSQ's way: they take few requests and few tasks, whatever their number."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from harness import Nsqd, eventually
from spark.source_rig import bodies, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.endpoint import Endpoint
from nsquark.spark.source.plan import DataLost, PackedPartition
from spark.micro_batches import MakeQuery

pytestmark = pytest.mark.ours


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """Counts the requests that the source makes, by path."""
    made: Counter[str] = Counter()
    send: Callable[..., Any] = Endpoint._send

    def counted(self: Endpoint, method: str, path: str, *more: Any) -> Any:
        made[path] += 1
        return send(self, method, path, *more)

    monkeypatch.setattr(Endpoint, "_send", counted)
    return made


def fill(daemon: Nsqd, topics: int, each: int, low: int = 0) -> list[bytes]:
    for number in range(topics):
        first = low + number * each
        publish(daemon, f"many_{number}", bodies(first, first + each))
    return bodies(low, low + topics * each)


def test_requests_of_a_trigger_do_not_grow_with_the_topics(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery, requests: "Counter[str]"
) -> None:
    daemon = make_nsqd()
    made: list[dict[str, int]] = []
    for topics in (10, 200):
        everything = fill(daemon, topics, 5)
        one = start(daemon, topicPattern="many_.*", channel=f"spark_{topics}", maxMessagesPerTrigger=10**6)
        assert one.next() == []
        requests.clear()
        assert one.plan()
        parts = one.partitions()
        one.reader.reportLatestOffset()
        assert [type(part.value) for part in parts] == [PackedPartition]
        assert len([body for part in parts for body in one.read(part)]) == len(everything) + 50 * (topics > 10)
        made.append({path: count for path, count in requests.items() if path != "/log/info"})
    assert made[0] == made[1]
    assert sum(made[1].values()) <= 6, made


@pytest.mark.parametrize("options", [{}, {"minPartitions": 4}], ids=["packed", "at-least-4"])
def test_every_message_of_many_topics_is_read_once(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery, options: dict[str, Any]
) -> None:
    daemon = make_nsqd()
    everything = fill(daemon, 100, 10)
    one = start(daemon, topicPattern="many_.*", **options)
    assert one.plan()
    assert options.get("minPartitions", 1) <= len(one.partitions()) <= options.get("minPartitions", 1) + 1
    assert one.run() == everything
    more = fill(daemon, 100, 1, low=10_000)
    assert one.next() == more
    assert not one.plan()


def test_topics_and_places_are_those_of_the_rows(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd()
    fill(daemon, 20, 10)
    one = start(daemon, topicPattern="many_.*")
    assert one.plan()
    rows = [row for part in one.partitions() for batch in one.reader.read(part) for row in batch.to_pylist()]
    assert Counter(row["topic"] for row in rows) == {f"many_{number}": 10 for number in range(20)}
    for row in rows:
        assert int(row["body"]) // 10 == int(row["topic"].removeprefix("many_"))
        head = daemon.get("/log/info", topic=row["topic"]).json()
        assert head["first"] <= row["seq"] < head["next"]
    assert len({row["id"] for row in rows}) == 200


def test_a_packed_partition_that_changed_is_read_range_by_range(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery
) -> None:
    daemon = on_fixed_port(make_nsqd())
    everything = fill(daemon, 20, 10)
    one = start(daemon, topicPattern="many_.*")
    assert one.plan()
    [part] = one.partitions()
    daemon.restart(crash=True)
    assert sorted(one.read(part)) == everything
    daemon.kill()
    batches = one.reader.read(part)
    daemon.start()
    assert sum(batch.num_rows for batch in batches) == 200
    daemon.post("/topic/delete", topic="many_7")
    eventually(lambda: daemon.get("/log/info", topic="many_7").status == 404)
    with pytest.raises(DataLost, match="many_7"):
        one.read(part)
    lenient = one.restarted(failOnDataLoss="false")
    assert sorted(lenient.read(part)) == everything[:70] + everything[80:]
    lenient.stop()


def test_a_batch_is_packed_the_same_when_topics_have_grown(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd()
    fill(daemon, 60, 7)
    one = start(daemon, topicPattern="many_.*", minPartitions=5)
    assert one.plan()

    def packed() -> list[list[tuple[str, int, int]]]:
        return [
            [(r.key.topic, r.low, r.high) for r in getattr(part.value, "ranges", [part.value])]
            for part in one.partitions()
        ]

    before = packed()
    for low in range(3):
        fill(daemon, 60, 11, low=1000 * low)
        assert packed() == before
