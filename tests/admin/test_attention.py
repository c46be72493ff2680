"""Checks what needs a person: each kind is told, with since when and where, and is gone when it is over."""

from typing import Any

import pytest

from admin.snapshots import make_channel, make_topic
from nsquark.admin.attention import ATTENTION_MAX, Attention, Watch
from nsquark.admin.snapshot import (
    ChannelOnNode,
    ClusterChannel,
    ClusterTopic,
    DescribedNsqd,
    Disk,
    Failure,
    Lookupd,
    Node,
    Snapshot,
    SparkQuery,
)

POLL_S = 2.0


def node(address: str = "h:4151", **more: Any) -> Node:
    remotes = more.pop("remote_addresses", ())
    producer = DescribedNsqd(address=address, version=more.get("version", "1.3.0"), remote_addresses=remotes)
    return Node(**{"producer": producer, "answered": True, "health": "OK", "version": "1.3.0", **more})


def snapshot(at: float, *topics: ClusterTopic, nodes: tuple[Node, ...] = (), **more: Any) -> Snapshot:
    return Snapshot(
        at=at, topics={each.name: each for each in topics}, nodes={each.address: each for each in nodes}, **more
    )


def told(watch: Watch, at: float, *channels: ClusterChannel) -> tuple[Attention, ...]:
    return watch.update(snapshot(at, make_topic(*channels)))


def texts(found: tuple[Attention, ...]) -> list[str]:
    return [each.text for each in found]


def test_all_well_is_nothing_to_tell() -> None:
    watch = Watch()
    for number in range(60):
        assert told(watch, number * POLL_S, make_channel(depth=number % 5)) == ()


def test_an_nsqd_that_is_silent() -> None:
    failure = Failure(kind="nsqd", address="h:4151", text='Get "http://h:4151/stats": connection refused', since=7.0)
    (found,) = Watch().update(snapshot(10.0, failures=(failure,)))
    assert (found.severity, found.since, found.path) == ("critical", 7.0, "/nodes/h:4151")
    assert found.text == "nsqd h:4151 does not answer: connection refused"


def test_an_nsqlookupd_that_is_silent() -> None:
    failure = Failure(kind="nsqlookupd", address="h:4161", text="no answer for 2.0 s", since=7.0)
    (found,) = Watch().update(snapshot(10.0, failures=(failure,)))
    assert (found.severity, found.path) == ("critical", "/lookup")


def test_an_nsqd_that_answers_nok() -> None:
    watch = Watch()
    watch.update(snapshot(8.0, nodes=(node(health="NOK - disk full"),)))
    (found,) = watch.update(snapshot(10.0, nodes=(node(health="NOK - disk full"),)))
    assert (found.severity, found.since) == ("critical", 8.0)
    assert "NOK - disk full" in found.text
    assert watch.update(snapshot(12.0, nodes=(node(),))) == ()
    (found,) = watch.update(snapshot(14.0, nodes=(node(health="NOK - disk full"),)))
    assert found.since == 14.0


@pytest.mark.parametrize(("free", "used", "severity"), [(10, 0, "warning"), (3, 0, "critical"), (90, 96, "critical")])
def test_a_disk_nearly_full(free: int, used: int, severity: str) -> None:
    disk = Disk(free_bytes=free, total_bytes=100, used_bytes=used, limit_bytes=100)
    (found,) = Watch().update(snapshot(1.0, nodes=(node(disk=disk),)))
    assert (found.severity, found.path) == (severity, "/nodes/h:4151")


def test_a_disk_with_room_is_fine() -> None:
    disk = Disk(free_bytes=50, total_bytes=100, used_bytes=10, limit_bytes=0)
    assert Watch().update(snapshot(1.0, nodes=(node(disk=disk),))) == ()


def test_versions_that_differ() -> None:
    (found,) = Watch().update(snapshot(1.0, nodes=(node("a:1", version="1.2.1"), node("b:1"))))
    assert found.text == "nsqds run 2 versions: 1.2.1, 1.3.0"
    assert found.path == "/nodes"


def test_an_nsqd_that_an_nsqlookupd_does_not_know() -> None:
    lookupds = (Lookupd(address="l1:1"), Lookupd(address="l2:1"), Lookupd(address="l3:1", failure="down"))
    known = node(remote_addresses=("l1:1/h:5",))
    (found,) = Watch().update(snapshot(1.0, nodes=(known,), lookupds=lookupds))
    assert found.text == "nsqd h:4151 is not registered with nsqlookupd l2:1"


def test_a_channel_without_consumers() -> None:
    watch = Watch()
    assert told(watch, 1.0, make_channel(0, client_count=0)) == ()
    (found,) = told(watch, 3.0, make_channel(1234, client_count=0))
    assert (found.severity, found.since, found.path) == ("warning", 3.0, "/topics/t/c")
    assert found.text == "channel t/c has no consumers: 1,234 messages wait"
    (found,) = told(watch, 4.0, make_channel(1, client_count=0))
    assert found.text == "channel t/c has no consumers: 1 message waits"
    assert told(watch, 5.0, make_channel(1234, client_count=1)) == ()


def test_a_depth_that_grows() -> None:
    watch = Watch()
    found: tuple[Attention, ...] = ()
    for number in range(40):
        found = told(watch, 100.0 + number * POLL_S, make_channel(depth=1000 + 20 * number))
    (grows,) = found
    assert grows.severity == "warning"
    assert grows.text.startswith("depth of t/c grows by 10.")
    assert 100.0 <= grows.since <= 115.0
    # Worked off again, it is over within two steps of time.
    for number in range(15):
        found = told(watch, 180.0 + number * POLL_S, make_channel(depth=1000))
    assert found == ()


def test_bursts_that_are_worked_off_are_no_growth() -> None:
    watch = Watch()
    for number in range(100):
        depth = 50_000 if number % 10 == 0 else 200
        assert told(watch, number * POLL_S, make_channel(depth=depth)) == ()


def test_an_nsqd_that_comes_back_is_no_growth() -> None:
    watch = Watch()
    both = (ChannelOnNode(name="c", depth=1), ChannelOnNode(name="c", depth=1))
    for number in range(60):
        nodes, depth = (both[:1], 500) if number < 20 else (both, 100_000)
        assert told(watch, number * POLL_S, make_channel(depth=depth, nodes=nodes)) == ()


@pytest.mark.parametrize(("field", "word"), [("rate_requeued", "requeues"), ("rate_timed_out", "timeouts")])
def test_more_handed_back_than_usual(field: str, word: str) -> None:
    watch = Watch()
    at = 0.0
    for _ in range(1500):
        at += POLL_S
        found = told(watch, at, make_channel(1, **{field: 1.0}))
    assert found == (), "after fifty minutes it is usual"
    for _ in range(20):
        at += POLL_S
        found = told(watch, at, make_channel(1, **{field: 10.0}))
    (above,) = found
    assert word in above.text and above.severity == "warning"
    assert at - 40 < above.since < at


def test_a_few_requeues_are_never_told() -> None:
    watch = Watch()
    for number in range(100):
        assert told(watch, number * POLL_S, make_channel(1, rate_requeued=0.2)) == ()


def test_what_is_paused_is_told() -> None:
    watch = Watch()
    assert texts(told(watch, 1.0, make_channel(paused=True))) == ["channel t/c is paused"]
    assert texts(watch.update(snapshot(3.0, make_topic(paused=True)))) == ["topic t is paused"]


def test_a_topic_without_a_channel() -> None:
    (found,) = Watch().update(snapshot(1.0, make_topic(depth=5)))
    assert (found.severity, found.path) == ("info", "/topics/t")


def query(**more: Any) -> SparkQuery:
    fields: dict[str, Any] = {
        "topic": "t",
        "channel": "c",
        "owner": "q1",
        "lag": 0,
        "rate": 1.0,
        "rate_in": 1.0,
        "last_commit": 1.0,
        "nodes": ("h:4151",),
    }
    return SparkQuery(**{**fields, **more})


def test_a_spark_query_that_falls_behind() -> None:
    watch = Watch()
    for number in range(40):
        at, lag = 100.0 + number * POLL_S, 1000 + 20 * number
        behind = query(lag=lag, last_commit=at)
        found = watch.update(snapshot(at, make_topic(make_channel(lag, owner="q1", client_count=0)), queries=(behind,)))
    (falls,) = found
    assert falls.text.startswith("Spark query q1 on t/c falls behind by 10.")
    assert falls.path == "/spark"


def test_a_spark_query_that_is_silent() -> None:
    (found,) = Watch().update(snapshot(1000.0, queries=(query(lag=5, last_commit=400.0),)))
    assert (found.severity, found.since) == ("critical", 400.0)
    assert "10 minutes" in found.text


def test_worst_comes_first_and_the_rest_is_counted() -> None:
    topics = [
        make_topic(make_channel(number + 1, topic=f"t{number}", client_count=0), name=f"t{number}")
        for number in range(300)
    ]
    found = Watch().update(snapshot(1.0, *topics, nodes=(node(health="NOK - x"),)))
    assert len(found) == ATTENTION_MAX + 1
    assert found[0].severity == "critical"
    assert "t299/c" in found[1].text
    assert found[-1].text == "201 more of the kind above"
