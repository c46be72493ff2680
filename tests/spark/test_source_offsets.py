"""Checks which messages each batch of a stream takes, on real nsqds, by the calls that Spark makes."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from spark.source_rig import address, addresses, bodies, info, nsqd_id, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.source.plan import DataLost
from spark.micro_batches import MakeQuery, MicroBatches

pytestmark = pytest.mark.ours


@pytest.fixture
def pair(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> tuple[Nsqd, Nsqd]:
    return make_nsqd(data_path=tmp_path / "one"), make_nsqd(data_path=tmp_path / "two")


def drained(daemon: Nsqd, topic: str) -> None:
    """Lets nsqd remove what no channel holds."""
    daemon.post("/channel/create", topic=topic, channel="drain", start="oldest")
    daemon.post("/channel/empty", topic=topic, channel="drain")
    eventually(lambda: info(daemon, topic)["segments"] <= 1)


# -- where it starts -------------------------------------------------------------------------------------


def test_earliest_and_latest(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    earliest, latest = start(nsqd, topic=topic), start(nsqd, topic=topic, startingOffsets="latest")
    assert earliest.next() == bodies(0, 10)
    assert latest.next() == []
    publish(nsqd, topic, bodies(10, 15))
    assert earliest.next() == latest.next() == bodies(10, 15)
    assert not earliest.plan() and not latest.plan()


def test_latest_is_the_default_of_a_stream(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, bodies(0, 10))
    one = MicroBatches({"nsqd": address(nsqd), "topic": topic})
    assert one.next() == []
    publish(nsqd, topic, bodies(10, 11))
    assert one.next() == bodies(10, 11)
    one.stop()


def test_a_timestamp(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    time.sleep(0.002)  # the next millisecond
    between_ms = time.time_ns() // 1_000_000 + 1
    time.sleep(0.002)
    publish(nsqd, topic, bodies(10, 20))
    assert start(nsqd, topic=topic, startingTimestamp=between_ms).next() == bodies(10, 20)


def test_json_and_the_logged_offset_of_another_query(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    first = start(nsqd, topic=topic)
    assert first.next() == bodies(0, 10)
    publish(nsqd, topic, bodies(10, 20))
    key = f"{topic}@{nsqd_id(nsqd)}"
    seq = info(nsqd, topic)["first"] + 4
    assert start(nsqd, topic=topic, startingOffsets=json.dumps({key: seq})).next() == bodies(4, 20)
    assert start(nsqd, topic=topic, startingOffsets=first.committed).next() == bodies(10, 20)
    assert start(nsqd, topic=topic, startingOffsets=json.dumps({key: "latest"})).next() == []
    assert start(nsqd, topic=topic, startingOffsets="{}").next() == bodies(0, 20), "not named: earliest"


def test_a_batch_that_failed_is_the_same_again(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    one = start(nsqd, topic=topic)
    assert one.plan()
    again = one.restarted()
    again.planned = one.planned
    publish(nsqd, topic, bodies(10, 20))
    assert again.run() == bodies(0, 10)
    assert again.next() == bodies(10, 20)
    again.stop()


def test_offsets_have_the_documented_form(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    one = start(nsqd, topic=topic)
    assert json.loads(one.committed) == {"v": 2}
    publish(nsqd, topic, bodies(0, 3))
    one.next()
    there = info(nsqd, topic)
    assert list(one.offset) == sorted(one.offset)
    span = {"from": there["first"], "id": there["id"], "next": there["next"]}
    assert one.offset[f"{topic}@{nsqd_id(nsqd)}"] == span
    assert one.offset["n"] == {nsqd_id(nsqd): {"at": address(nsqd), "run": there["nsqd_run"]}}
    assert set(one.offset) == {f"{topic}@{nsqd_id(nsqd)}", "n", "q", "t", "v"}


def test_offsets_of_version_1_are_read_on(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    one = start(nsqd, topic=topic)
    assert one.next() == bodies(0, 10)
    key = f"{topic}@{nsqd_id(nsqd)}"
    span = {name: one.offset[key][name] for name in ("from", "next")}
    one.committed = json.dumps({key: span, "q": one.offset["q"], "t": one.offset["t"], "v": 1})
    publish(nsqd, topic, bodies(10, 20))
    again = one.restarted()
    assert again.state() == bodies(10, 20)
    assert again.offset["v"] == 2 and again.offset[key]["id"] == info(nsqd, topic)["id"]
    again.stop()


# -- how much it takes -----------------------------------------------------------------------------------


def test_max_messages_per_trigger(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 25))
    one = start(nsqd, topic=topic, maxMessagesPerTrigger=10)
    assert one.next() == bodies(0, 10)
    assert one.next() == bodies(10, 20)
    assert one.next() == bodies(20, 25)
    assert not one.plan()
    publish(nsqd, topic, bodies(25, 50))
    assert one.all_available() == bodies(25, 50), "Trigger.Once takes all"


def test_limits_are_shared_by_backlog_and_starve_nobody(pair: tuple[Nsqd, Nsqd], start: MakeQuery) -> None:
    publish(pair[0], "t", bodies(0, 900))
    publish(pair[1], "t", bodies(900, 910))
    one = start(*pair, topic="t", maxMessagesPerTrigger=91)
    taken = one.next()
    assert len(taken) <= 91
    assert set(taken) & set(bodies(0, 900)) and set(taken) & set(bodies(900, 910))
    assert sorted(taken + one.state()) == bodies(0, 910)


def test_max_bytes_per_trigger(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    for number in range(20):
        publish(nsqd, topic, [b"%06d" % number + bytes(50_000)])
    one = start(nsqd, topic=topic, maxBytesPerTrigger=300_000)
    counts = []
    while one.plan():
        counts.append(len(one.run()))
    assert sum(counts) == 20
    assert max(counts) <= 7 and len(counts) >= 3


def test_min_messages_wait_for_more_or_for_the_delay(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    one = start(nsqd, topic=topic, minMessagesPerTrigger=10, maxTriggerDelay="8s")
    publish(nsqd, topic, bodies(0, 5))
    assert one.next() == [], "only the first offset, which reads nothing"
    assert not one.plan()
    publish(nsqd, topic, bodies(5, 12))
    assert one.next() == bodies(0, 12)
    publish(nsqd, topic, bodies(12, 13))
    assert not one.plan()
    eventually(one.plan, 60)
    assert one.run() == bodies(12, 13)


def test_available_now_ends_at_what_was_there_and_ignores_the_minimum(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 25))
    one = start(nsqd, topic=topic, minMessagesPerTrigger=20, maxMessagesPerTrigger=20)
    one.reader.prepareForTriggerAvailableNow()
    publish(nsqd, topic, bodies(25, 30))
    publish(nsqd, topic + "_new", bodies(30, 35))
    assert one.state() == bodies(0, 25)


def test_partitions_are_at_least_as_many_as_asked_for(pair: tuple[Nsqd, Nsqd], start: MakeQuery) -> None:
    for daemon in pair:
        for low in range(0, 2000, 20):
            publish(daemon, "t", bodies(low, low + 20))
    one = start(*pair, topic="t", minPartitions=8)
    assert one.plan()
    parts = one.partitions()
    assert 8 <= len(parts) <= 10
    assert sum(part.value.count for part in parts) == 4000
    assert one.run() == sorted(bodies(0, 2000) * 2)


# -- many topics and nsqds -------------------------------------------------------------------------------


def test_topic_pattern_finds_topics_made_later(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd()
    publish(daemon, "a_1", bodies(0, 5))
    publish(daemon, "b_1", bodies(5, 10))
    publish(daemon, "a_1#ephemeral", bodies(10, 15))
    one = start(daemon, topicPattern="a_.*")
    assert one.next() == bodies(0, 5)
    publish(daemon, "a_2", bodies(20, 25))
    assert one.next() == bodies(20, 25)
    assert {key.partition("@")[0] for key in one.offset if "@" in key} == {"a_1", "a_2"}


def test_several_topics(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    names = [f"{topic}_{number}" for number in range(6)]
    one = start(nsqd, topic=",".join(names))
    for number, name in enumerate(names):
        publish(nsqd, name, bodies(number, number + 1))
    assert one.state() == bodies(0, 6)


def test_a_new_nsqd_is_found_and_with_latest_enters_at_the_start_of_the_query(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    first, second = (make_nsqd(data_path=tmp_path / name) for name in ("one", "two"))
    publish(second, "t", bodies(0, 5))
    where = addresses(*map(on_fixed_port, (first, second)))
    second.stop()
    publish(first, "t", bodies(5, 10))
    one = MicroBatches({"nsqd": where, "topic": "t", "startingOffsets": "latest"})
    assert one.next() == []
    second.start()
    publish(second, "t", bodies(10, 15))
    eventually(one.plan, 20)
    assert one.run() == bodies(10, 15), "neither what was there before, nor less than came since"
    one.stop()


def test_lookupd_tells_where(make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery) -> None:
    from harness.lookupd import Nsqlookupd

    with Nsqlookupd() as lookupd:
        flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
        first = make_nsqd(flag, data_path=tmp_path / "one")
        publish(first, "t", bodies(0, 5))
        eventually(lambda: lookupd.producers("t"))
        one = start(lookupd=lookupd.http_address, topic="t")
        assert one.next() == bodies(0, 5)
        second = make_nsqd(flag, data_path=tmp_path / "two")
        publish(second, "t", bodies(5, 10))
        eventually(one.plan, 20)
        assert one.run() == bodies(5, 10)
        first.restart()  # on another port, which nsqlookupd knows
        publish(first, "t", bodies(10, 12))
        eventually(lambda: one.state() == bodies(10, 12), 30)
        pattern = start(lookupd=lookupd.http_address, topicPattern="t+")
        assert pattern.state() == bodies(0, 12)


# -- unreachable, replaced, removed ----------------------------------------------------------------------


def test_an_nsqd_that_is_down_is_left_out_and_taken_up_again(pair: tuple[Nsqd, Nsqd], start: MakeQuery) -> None:
    first, second = map(on_fixed_port, pair)
    publish(first, "t", bodies(0, 5))
    publish(second, "t", bodies(5, 10))
    one = start(first, second, topic="t")
    assert one.next() == bodies(0, 10)
    publish(second, "t", bodies(10, 15))
    second.kill()
    publish(first, "t", bodies(15, 20))
    assert eventually(one.next, 20) == bodies(15, 20)
    second.start()
    assert eventually(one.next, 20) == bodies(10, 15)


def test_a_range_is_read_on_after_a_restart_in_the_middle(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = on_fixed_port(make_nsqd())
    for low in range(0, 40_000, 1000):
        publish(daemon, "t", [body + bytes(1000) for body in bodies(low, low + 1000)])
    one = start(daemon, topic="t")
    assert one.plan()
    [*parts] = one.partitions()
    batches = one.reader.read(parts[0])
    rows = next(batches).num_rows
    daemon.restart(crash=True)
    assert rows + sum(batch.num_rows for batch in batches) == parts[0].value.count


def test_reading_gives_up_after_the_read_timeout(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = on_fixed_port(make_nsqd())
    publish(daemon, "t", bodies(0, 5))
    one = start(daemon, topic="t", readTimeout="4s")
    assert one.plan()
    [part] = one.partitions()
    daemon.kill()
    with pytest.raises(Unreachable, match=r"raise readTimeout.*lostNsqds="):
        one.read(part)
    with pytest.raises(Unreachable, match="no nsqd answers"):
        one.restarted().plan()


def test_an_nsqd_whose_disk_was_replaced_is_an_error_until_it_is_given_up(
    pair: tuple[Nsqd, Nsqd], make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery
) -> None:
    first, second = map(on_fixed_port, pair)
    publish(first, "t", bodies(0, 5))
    publish(second, "t", bodies(5, 10))
    one = start(first, second, topic="t")
    assert one.next() == bodies(0, 10)
    lost_id = nsqd_id(second)
    second.kill()
    third = make_nsqd(*second.flags, data_path=tmp_path / "three")
    publish(third, "t", bodies(10, 15))
    with pytest.raises(DataLost, match=f"lostNsqds={lost_id}"):
        eventually(one.restarted().plan)
    for options in ({"lostNsqds": lost_id}, {"failOnDataLoss": "false"}):
        again = one.restarted(**options)
        assert again.next() == bodies(10, 15)
        again.stop()


def test_what_retention_removed_is_an_error_or_a_warning(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_nsqd("--max-bytes-per-file=20000")
    for low in range(0, 1000, 50):
        publish(daemon, "t", bodies(low, low + 50))
    one = start(daemon, topic="t", maxMessagesPerTrigger=100)
    assert one.next() == bodies(0, 100)
    assert one.plan()
    planned = one.partitions()[0]
    drained(daemon, "t")
    left = 1000 - info(daemon, "t")["count"]
    with pytest.raises(DataLost, match="set failOnDataLoss=false"):
        one.partitions()
    with pytest.raises(DataLost, match="give the query a channel"):
        one.read(planned)
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == bodies(left, 1000)
    assert "are gone from nsqd" in caplog.text
    again.stop()


def test_a_gap_between_sequence_numbers_is_no_loss(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = on_fixed_port(make_nsqd())
    publish(daemon, "t", bodies(0, 5))
    one = start(daemon, topic="t")
    assert one.next() == bodies(0, 5)
    daemon.restart(crash=True)  # sequence numbers go on in another lease
    publish(daemon, "t", bodies(5, 10))
    assert eventually(one.next, 20) == bodies(5, 10)


def test_damage_on_the_disk_is_found(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd()
    messages = [b"<%d>" % number for number in range(1000, 1300)]
    for low in range(0, 300, 100):
        publish(daemon, "t", messages[low : low + 100])
    one = start(daemon, topic="t")
    assert one.plan()
    files = [path for path in daemon.data_path.rglob("*") if path.is_file() and b"<1150>" in path.read_bytes()]
    assert len(files) == 1
    raw = files[0].read_bytes()
    with files[0].open("r+b") as file:
        file.seek(raw.index(b"<1150>"))
        file.write(b"xxxxxx")
    with pytest.raises(DataLost, match="100 of its 300 messages are damaged"):
        one.run()
    again = one.restarted(failOnDataLoss="false")
    assert again.next() == messages[:100] + messages[200:]
    again.stop()


# -- the query as a channel ------------------------------------------------------------------------------


def test_a_channel_holds_what_was_not_read_and_shows_the_lag(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd("--max-bytes-per-file=20000")
    for low in range(0, 1000, 50):
        publish(daemon, "t", bodies(low, low + 50))
    one = start(daemon, topic="t", channel="spark", maxMessagesPerTrigger=400)
    assert one.next() == [], "the first offset only says who the query is"
    assert one.next() == bodies(0, 400)
    assert daemon.channel("t", "spark")["depth"] == 1000
    daemon.post("/channel/create", topic="t", channel="drain", start="oldest")
    daemon.post("/channel/empty", topic="t", channel="drain")
    assert one.plan()
    assert daemon.channel("t", "spark")["depth"] == 600, "what is below the start of a batch is done"
    assert one.reader.reportLatestOffset() == {
        f"t@{nsqd_id(daemon)}": {"next": info(daemon, "t")["next"], "behind": 200}
    }
    assert one.run() == bodies(400, 800)
    assert one.state() == bodies(800, 1000)
    assert daemon.channel("t", "spark")["depth"] == 0
    eventually(lambda: info(daemon, "t")["segments"] == 1)


def test_a_channel_has_one_owner(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 5))
    one, other = (start(nsqd, topic=topic, channel="spark") for _ in range(2))
    assert one.state() == bodies(0, 5)
    assert other.next() == []
    with pytest.raises(NsqdError) as refused:
        other.plan()
    assert one.offset["q"] in str(refused.value) and other.offset["q"] in str(refused.value)
    assert "channel of its own" in str(refused.value)
    publish(nsqd, topic, bodies(5, 6))
    again = one.restarted()
    assert again.next() == bodies(5, 6), "the owner is in the checkpoint"
    again.stop()


def test_a_channel_of_subscribers_is_refused(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 5))
    one = start(nsqd, topic=topic, channel="ch")
    assert one.next() == []
    with nsqd.connect() as wire:
        wire.subscribe(topic, "ch", rdy=1)
        with pytest.raises(NsqdError, match="has subscribers"):
            one.plan()


def test_a_channel_goes_when_its_query_is_gone_for_its_ttl(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 5))
    one = start(nsqd, topic=topic, channel="spark", channelTtl="10s")
    assert one.state() == bodies(0, 5)
    assert nsqd.channel(topic, "spark")["depth"] == 0
    one.stop()
    eventually(lambda: nsqd.topic(topic)["channels"] == [], 60)


def test_earliest_begins_where_its_channel_does(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd("--max-bytes-per-file=20000")
    for low in range(0, 1000, 50):
        publish(daemon, "t", bodies(low, low + 50))
    one = start(daemon, topic="t", channel="spark")
    assert one.next() == []
    drained(daemon, "t")
    left = 1000 - info(daemon, "t")["count"]
    assert one.next() == bodies(left, 1000), "what went before the query had its channel was never its own"
