"""A snapshot puts together what several nsqds say, and makes rates of their counters."""

from typing import Any

import msgspec
import pytest

from nsquark.admin.assembly import build, read_rows, version_key
from nsquark.admin.snapshot import (
    ClusterTotals,
    DescribedNsqd,
    Failure,
    LogHeads,
    NodeAnswer,
    Snapshot,
    StatsAnswer,
    StatsRows,
)


def answer(
    address: str, at: float, *topics: dict[str, Any], start_time: int = 1, heads: dict[str, Any] | None = None
) -> NodeAnswer:
    said = {"version": "1.3.0", "health": "OK", "start_time": start_time, "topics": topics}
    return NodeAnswer(
        producer=DescribedNsqd(address=address, hostname="h", version="1.3.0"),
        stats=msgspec.convert(said, StatsAnswer),
        heads=msgspec.convert(heads, LogHeads) if heads is not None else None,
        stats_at=at,
    )


def topic(name: str, messages: int = 0, depth: int = 0, *channels: dict[str, Any]) -> dict[str, Any]:
    return {"topic_name": name, "message_count": messages, "depth": depth, "channels": channels}


def channel(name: str, messages: int = 0, depth: int = 0, **more: Any) -> dict[str, Any]:
    return {"channel_name": name, "message_count": messages, "depth": depth, "clients": None, **more}


def two_polls(first: list[NodeAnswer], second: list[NodeAnswer]) -> Snapshot:
    build(10.0, first)
    return build(12.0, second, previous={each.producer.address: each for each in first})


def test_rows_of_all_nsqds_are_summed_up() -> None:
    snapshot = build(
        1.0,
        [
            answer("b:1", 1.0, topic("t", 5, 1, channel("c", 4, 2, in_flight_count=1, client_count=3))),
            answer("a:1", 1.0, topic("t", 7, 2, channel("c", 5, 3, paused=True)), topic("s")),
        ],
    )
    assert list(snapshot.nodes) == ["a:1", "b:1"]
    assert list(snapshot.topics) == ["s", "t"]
    found = snapshot.topics["t"]
    assert (found.messages, found.depth, found.total_depth) == (12, 3, 8)
    both = found.channels["c"]
    assert (both.messages, both.depth, both.in_flight, both.client_count, both.paused) == (9, 5, 1, 3, True)
    assert [each.node for each in both.nodes] == ["a:1", "b:1"]
    assert (snapshot.totals.topics, snapshot.totals.channels, snapshot.totals.depth) == (2, 1, 8)


def test_rates_are_not_known_at_first_sight() -> None:
    snapshot = build(1.0, [answer("a:1", 1.0, topic("t", 5, 0, channel("c", 5)))])
    assert snapshot.topics["t"].rate_in is None
    assert snapshot.topics["t"].channels["c"].rate_out is None
    assert snapshot.totals.rate_in is None


def test_rates_come_from_counters() -> None:
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 100, 0, channel("c", 100, 20, requeue_count=5, timeout_count=0)))],
        [answer("a:1", 12.0, topic("t", 140, 0, channel("c", 140, 30, requeue_count=9, timeout_count=1)))],
    )
    found = snapshot.topics["t"]
    assert found.rate_in == 20.0
    # 40 came, 10 of them still wait.
    assert found.channels["c"].rate_out == 15.0
    assert (found.channels["c"].rate_requeued, found.channels["c"].rate_timed_out) == (2.0, 0.5)
    assert (snapshot.totals.rate_in, snapshot.totals.rate_out) == (20.0, 15.0)


@pytest.mark.parametrize("start_time", [1, 2])
def test_a_restart_is_not_a_negative_rate(start_time: int) -> None:
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 100, 0, channel("c", 100, requeue_count=7)))],
        [answer("a:1", 12.0, topic("t", 4, 0, channel("c", 4)), start_time=start_time)],
    )
    assert snapshot.topics["t"].rate_in is None
    assert snapshot.topics["t"].channels["c"].rate_requeued is None
    assert snapshot.topics["t"].channels["c"].rate_out in (None, 0.0)


def test_what_waits_again_after_a_seek_is_no_negative_rate() -> None:
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 100, 0, channel("c", 100, 0)))],
        [answer("a:1", 12.0, topic("t", 100, 0, channel("c", 100, 90)))],
    )
    assert snapshot.topics["t"].channels["c"].rate_out == 0.0


def test_an_nsqd_that_is_new_does_not_hide_the_rate_of_others() -> None:
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 0))],
        [answer("a:1", 12.0, topic("t", 10)), answer("b:1", 12.0, topic("t", 9999))],
    )
    assert snapshot.topics["t"].rate_in == 5.0


def test_an_nsqd_cannot_invent_rates() -> None:
    """Rates are ours to count: whatever stands in /stats under our names is overwritten."""
    said = channel("c", 1, node="evil", rate_out=1e9)
    snapshot = build(1.0, [answer("a:1", 1.0, {**topic("t", 1, 0, said), "rate_in": 1e9, "is_tombstoned": True})])
    found = snapshot.topics["t"]
    assert found.rate_in is None and found.nodes[0].is_tombstoned is False
    assert found.channels["c"].rate_out is None and found.channels["c"].nodes[0].node == "a:1"


def test_spark_queries_are_channels_with_an_owner() -> None:
    owned = {"channel": "spark", "owner": "q1", "position": 7, "ttl_s": 0.0, "idle_s": 2.0}
    heads = {"topics": [{"topic": "t", "first": 1, "next": 9, "count": 8, "owned": [owned]}], "nsqd_id": "n"}
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 0, 0, channel("spark", 0, 100)), heads=heads)],
        [answer("a:1", 12.0, topic("t", 20, 0, channel("spark", 20, 60)), heads=heads)],
    )
    (query,) = snapshot.queries
    assert (query.topic, query.channel, query.owner, query.lag) == ("t", "spark", "q1", 60)
    assert (query.rate, query.rate_in, query.last_commit) == (30.0, 10.0, 10.0)
    assert query.remaining_s == 3.0
    assert snapshot.nodes["a:1"].is_ours and snapshot.topics["t"].has_log


def test_a_query_that_gains_nothing_never_ends() -> None:
    owned = {"channel": "spark", "owner": "q1"}
    heads = {"topics": [{"topic": "t", "owned": [owned]}]}
    snapshot = two_polls(
        [answer("a:1", 10.0, topic("t", 0, 0, channel("spark", 0, 100)), heads=heads)],
        [answer("a:1", 12.0, topic("t", 20, 0, channel("spark", 20, 120)), heads=heads)],
    )
    assert snapshot.queries[0].remaining_s is None


def test_an_nsqd_without_an_answer_is_still_a_node() -> None:
    silent = NodeAnswer(producer=DescribedNsqd(address="a:1", version="1.2.0"), failure="no answer")
    snapshot = build(1.0, [silent, answer("b:1", 1.0, topic("t"))])
    assert snapshot.nodes["a:1"].answered is False
    assert snapshot.nodes["a:1"].failure == "no answer"
    assert snapshot.nodes["a:1"].is_out_of_date
    assert (snapshot.totals.nodes, snapshot.totals.nodes_answering) == (2, 1)


def test_what_no_nsqd_told_is_not_known() -> None:
    silent = NodeAnswer(producer=DescribedNsqd(address="a:1", version="1.2.0"), failure="no answer")
    failure = Failure(kind="nsqd", address="a:1", text="no answer", since=1.0)
    assert build(1.0, [silent], failures=[failure]).totals == ClusterTotals(nodes=1)
    assert build(1.0, []).totals.depth == 0
    assert build(1.0, [silent, answer("b:1", 1.0, topic("t"))], failures=[failure]).totals.topics == 1


def test_versions_are_ordered() -> None:
    words = ["nonsense", "1.2.9-alpha", "1.2.9", "1.3.0-rc.1", "1.3.0", "1.10.0"]
    assert [max(words[: place + 1], key=version_key) for place in range(len(words))] == words


def rows(*topics: dict[str, Any]) -> StatsRows:
    return msgspec.json.decode(msgspec.json.encode({"start_time": 1, "topics": topics}), type=StatsRows)


def test_what_did_not_change_is_used_again() -> None:
    idle, busy = topic("idle", 5, 0, channel("c", 5)), topic("busy", 1)
    producer = DescribedNsqd(address="a:1")
    previous: dict[str, NodeAnswer] = {}
    stats: StatsAnswer | None = None
    snapshots = [Snapshot()]
    for number in range(4):
        stats = read_rows(rows(idle, {**busy, "message_count": number}), stats)
        answered = NodeAnswer(producer=producer, stats=stats, stats_at=10.0 + 2 * number)
        snapshots.append(build(10.0 + 2 * number, [answered], previous=previous, last=snapshots[-1]))
        previous = {"a:1": answered}
    _, first, second, third, fourth = snapshots
    assert first.topics["idle"].rate_in is None, "what was shown stays as it was"
    assert second.topics["idle"].rate_in == 0.0 == second.topics["idle"].channels["c"].rate_out
    assert fourth.topics["idle"] is third.topics["idle"] is second.topics["idle"]
    assert [each.topics["busy"].rate_in for each in (second, third, fourth)] == [0.5, 0.5, 0.5]
    assert fourth.totals.messages == 8


def test_what_stops_has_a_rate_of_zero() -> None:
    stats: StatsAnswer | None = None
    previous: dict[str, NodeAnswer] = {}
    found = Snapshot()
    rates = []
    for number, messages in enumerate([0, 10, 10, 10, 14]):
        stats = read_rows(rows(topic("t", messages)), stats)
        answered = NodeAnswer(producer=DescribedNsqd(address="a:1"), stats=stats, stats_at=2.0 * number)
        found = build(2.0 * number, [answered], previous=previous, last=found)
        previous = {"a:1": answered}
        rates.append(found.topics["t"].rate_in)
    assert rates == [None, 5.0, 0.0, 0.0, 2.0]
