"""Channels are positions in a log: they start anywhere, are moved by a seek, and commit what was read by range."""

import time
from collections.abc import Callable

import pytest

from broker.logs import answer, info, read, read_all, refusal
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours


def _bodies(wire: Wire, count: int) -> list[bytes]:
    """Finishes so many messages; when it returns, nsqd has heard of that."""
    bodies = sorted(message.body for message in wire.read_messages(count, finish=True))
    wire.assert_usable()
    return bodies


def _publish(daemon: Nsqd, topic: str, low: int, high: int) -> None:
    with daemon.connect() as wire:
        wire.publish(topic, *[b"%03d" % number for number in range(low, high)])


def _seek(daemon: Nsqd, topic: str, to: str | int, channel: str = "ch", **query: str) -> dict[str, object]:
    return answer(daemon, "POST", "/channel/seek", topic=topic, channel=channel, to=to, **query)


def _commit(daemon: Nsqd, topic: str, owner: str, seq: int, **query: object) -> dict[str, object]:
    return answer(daemon, "POST", "/channel/commit", topic=topic, channel="spark", owner=owner, seq=seq, **query)


# -- start -----------------------------------------------------------------------------------------------


def test_a_channel_starts_where_it_is_told(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="first")
    _publish(nsqd, topic, 0, 10)
    time.sleep(0.002)  # the next millisecond
    between_ms = time.time_ns() // 1_000_000 + 1
    time.sleep(0.002)
    _publish(nsqd, topic, 10, 20)
    seqs = [record.seq for record in read_all(nsqd, topic)]
    for name, start, depth in (
        ("a", "oldest", 20),
        ("b", "newest", 0),
        ("c", str(seqs[7]), 13),
        ("d", f"time:{between_ms}", 10),
        ("e", "time:0", 20),
        ("f", "0", 20),
        ("g", str(2**60), 0),
    ):
        assert nsqd.post("/channel/create", topic=topic, channel=name, start=start).status == 200
        assert nsqd.channel(topic, name)["depth"] == depth, start
    consumer = connect().subscribe(topic, "d", rdy=20)
    assert _bodies(consumer, 10) == [b"%03d" % number for number in range(10, 20)]


def test_a_first_channel_told_to_start_at_the_newest_gets_no_backlog(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 0, 10)
    assert nsqd.post("/channel/create", topic=topic, channel="ch", start="newest").status == 200
    _publish(nsqd, topic, 10, 12)
    assert nsqd.channel(topic)["depth"] == 2


def test_start_is_only_for_a_new_channel(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    _publish(nsqd, topic, 0, 10)
    nsqd.post("/channel/create", topic=topic, channel="ch", start="newest")
    assert nsqd.channel(topic)["depth"] == 10


def test_a_start_that_says_nothing_is_refused(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    for start in ("", "sometime", "time:", "time:x", "-1", "time:" + "9" * 18, "9" * 30):
        status, refused = refusal(nsqd, "POST", "/channel/create", topic=topic, channel="ch", start=start)
        assert (status, refused["message"]) == (400, "INVALID_ARG_START")
    assert nsqd.topic(topic)["channels"] == []


# -- seek ------------------------------------------------------------------------------------------------


def test_seeking_back_delivers_again_and_forward_skips(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=100)
    _publish(nsqd, topic, 0, 50)
    assert len(_bodies(consumer, 50)) == 50
    seqs = [record.seq for record in read_all(nsqd, topic)]
    assert _seek(nsqd, topic, "oldest")["position"] == seqs[0]
    assert len(_bodies(consumer, 50)) == 50
    assert _seek(nsqd, topic, seqs[45])["position"] == seqs[45]
    assert _bodies(consumer, 5) == [b"%03d" % number for number in range(45, 50)]
    assert _seek(nsqd, topic, 2**60)["position"] == seqs[-1] + 1
    consumer.expect_silence(0.1)


def test_seek_drops_what_is_in_flight_and_requeued(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=20)
    _publish(nsqd, topic, 0, 20)
    messages = consumer.read_messages(20)
    consumer.REQ(messages[3].id, 3_600_000)
    eventually(lambda: nsqd.channel(topic)["deferred_count"] == 1)
    _seek(nsqd, topic, "newest")
    channel = nsqd.channel(topic)
    assert (channel["depth"], channel["in_flight_count"], channel["deferred_count"]) == (0, 0, 0)
    _publish(nsqd, topic, 20, 25)
    assert _bodies(consumer, 5) == [b"%03d" % number for number in range(20, 25)]


def test_a_seek_survives_a_crash(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    _publish(daemon, "t", 0, 20)
    seqs = [record.seq for record in read_all(daemon, "t")]
    _seek(daemon, "t", seqs[15])
    daemon.restart(crash=True)
    assert _bodies(connect(daemon).subscribe("t", rdy=20), 5) == [b"%03d" % number for number in range(15, 20)]
    daemon.restart(crash=True)
    _seek(daemon, "t", seqs[2])
    daemon.restart(crash=True)
    assert daemon.channel("t")["depth"] == 18


def test_seeking_to_the_newest_skips_what_a_pause_holds_back(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    consumer = connect().subscribe(topic, rdy=20)
    nsqd.post("/topic/pause", topic=topic)
    _publish(nsqd, topic, 0, 10)
    assert _seek(nsqd, topic, "newest")["position"] == info(nsqd, topic)["next"]
    nsqd.post("/topic/unpause", topic=topic)
    _publish(nsqd, topic, 10, 12)
    assert _bodies(consumer, 2) == [b"010", b"011"]


def test_seek_needs_a_topic_and_a_channel_that_exist(nsqd: Nsqd, topic: str) -> None:
    query = {"topic": topic, "channel": "ch", "to": "oldest"}
    assert refusal(nsqd, "POST", "/channel/seek", **query)[1]["message"] == "TOPIC_NOT_FOUND"
    nsqd.post("/topic/create", topic=topic)
    assert refusal(nsqd, "POST", "/channel/seek", **query)[1]["message"] == "CHANNEL_NOT_FOUND"
    nsqd.post("/channel/create", topic=topic, channel="ch")
    assert refusal(nsqd, "POST", "/channel/seek", **(query | {"to": "x"}))[1]["message"] == "INVALID_ARG_TO"


# -- commit ----------------------------------------------------------------------------------------------


def test_commits_go_forward_only_and_may_be_repeated(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 0, 20)
    seqs = [record.seq for record in read_all(nsqd, topic)]
    first = _commit(nsqd, topic, "q1", 0)
    assert (first["position"], first["depth"], first["owner"]) == (seqs[0], 20, "q1")
    for _ in range(2):
        assert _commit(nsqd, topic, "q1", seqs[12])["position"] == seqs[12]
    assert _commit(nsqd, topic, "q1", seqs[3])["position"] == seqs[12]
    assert nsqd.channel(topic, "spark")["depth"] == 8
    beyond = _commit(nsqd, topic, "q1", 2**60)
    assert beyond["position"] == info(nsqd, topic)["next"]
    _publish(nsqd, topic, 20, 23)
    assert nsqd.channel(topic, "spark")["depth"] == 3


def test_a_range_channel_can_start_at_the_newest(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 0, 20)
    assert _commit(nsqd, topic, "q1", 0, start="newest")["position"] == info(nsqd, topic)["next"]


def test_a_channel_has_one_owner(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 0, 5)
    position = _commit(nsqd, topic, "q1", 0)["position"]
    for path, query in (("/channel/commit", {"seq": 2**60}), ("/channel/seek", {"to": "newest"})):
        status, refused = refusal(nsqd, "POST", path, topic=topic, channel="spark", owner="q2", **query)
        assert (status, refused["message"], refused["owner"]) == (409, "OWNED", "q1")
    assert refusal(nsqd, "POST", "/channel/seek", topic=topic, channel="spark", to="newest")[0] == 409
    assert _commit(nsqd, topic, "q1", 0)["position"] == position
    assert _seek(nsqd, topic, "newest", "spark", owner="q1")["position"] == info(nsqd, topic)["next"]


def test_push_and_range_exclude_each_other(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    _publish(nsqd, topic, 0, 5)
    _commit(nsqd, topic, "q1", 0)
    subscriber = connect()
    subscriber.SUB(topic, "spark")
    reason = "E_SUB_FAILED SUB failed channel spark is read by range, by q1; subscribe to another channel"
    subscriber.expect_error(reason)
    connect().subscribe(topic, "push")
    status, refused = refusal(nsqd, "POST", "/channel/commit", topic=topic, channel="push", owner="q1", seq=0)
    assert (status, refused["message"]) == (409, "USED_BY_SUBSCRIBERS")


@pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])
def test_push_and_range_exclude_each_other_over_a_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], crash: bool
) -> None:
    """It holds even if nothing was delivered before: a commit would skip what the subscribers have not read."""
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "push").close()
    answer(daemon, "POST", "/channel/commit", topic="t", channel="spark", owner="q1", seq=0)
    _publish(daemon, "t", 0, 50)
    daemon.restart(crash=crash)
    head = info(daemon, "t")["next"]
    status, refused = refusal(daemon, "POST", "/channel/commit", topic="t", channel="push", owner="q1", seq=head)
    assert (status, refused["message"]) == (409, "USED_BY_SUBSCRIBERS")
    assert len(connect(daemon).subscribe("t", "push", rdy=50).read_messages(50, finish=True)) == 50
    subscriber = connect(daemon)
    subscriber.SUB("t", "spark")
    subscriber.expect_error(
        "E_SUB_FAILED SUB failed channel spark is read by range, by q1; subscribe to another channel"
    )


def test_a_range_channel_keeps_position_owner_and_data_over_a_crash(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--max-bytes-per-file=1000")
    for low in range(0, 300, 10):
        _publish(daemon, "t", low, low + 10)
    records = read_all(daemon, "t")
    _commit(daemon, "t", "q1", 0)
    _commit(daemon, "t", "q1", records[200].seq)
    eventually(lambda: records[150].seq < info(daemon, "t")["first"] <= records[200].seq)
    daemon.restart(crash=True)
    assert daemon.channel("t", "spark")["depth"] == 100
    assert read(daemon, "t", records[200].seq, records[-1].seq + 1) == records[200:]
    status, refused = refusal(daemon, "POST", "/channel/commit", topic="t", channel="spark", owner="q2", seq=0)
    assert (status, refused["owner"]) == (409, "q1")
    assert _commit(daemon, "t", "q1", 0)["position"] == records[200].seq


def test_a_channel_whose_owner_is_gone_goes_after_its_ttl(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 0, 5)
    _commit(nsqd, topic, "q1", 0, ttl=0.5)
    answer(nsqd, "POST", "/channel/commit", topic=topic, channel="stays", owner="q1", seq=0)
    eventually(lambda: [entry["channel_name"] for entry in nsqd.topic(topic)["channels"]] == ["stays"])


def test_commits_that_make_no_sense_are_refused(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    good = {"topic": topic, "channel": "spark", "owner": "q", "seq": "0"}
    for change, status, code in (
        ({"topic": "missing"}, 404, "TOPIC_NOT_FOUND"),
        ({"channel": "bad name"}, 400, "INVALID_ARG_CHANNEL"),
        ({"channel": "c#ephemeral"}, 400, "EPHEMERAL_CHANNEL"),
        ({"owner": ""}, 400, "INVALID_ARG_OWNER"),
        ({"owner": "x" * 129}, 400, "INVALID_ARG_OWNER"),
        ({"seq": "-1"}, 400, "INVALID_ARG_SEQ"),
        ({"seq": "1.5"}, 400, "INVALID_ARG_SEQ"),
        ({"ttl": "soon"}, 400, "INVALID_ARG_TTL"),
        ({"start": "soon"}, 400, "INVALID_ARG_START"),
    ):
        refused = refusal(nsqd, "POST", "/channel/commit", **(good | change))
        assert (refused[0], refused[1]["message"]) == (status, code)
    assert nsqd.topic(topic)["channels"] == []
