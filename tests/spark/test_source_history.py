"""Checks that nothing is left out without a word: topics made again, data paths put back or copied, nsqds that
nsqlookupd forgets.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Nsqd, eventually
from harness.http_server import LocalServer, QuietHandler
from harness.lookupd import Nsqlookupd
from spark.source_rig import addresses, bodies, info, nsqd_id, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.plan import DataLost
from spark.micro_batches import MakeQuery, MicroBatches

pytestmark = pytest.mark.ours


@pytest.fixture
def lookupd(make_lookupd: Callable[..., Nsqlookupd]) -> Nsqlookupd:
    """Gives each test an nsqlookupd of its own."""
    return make_lookupd()


def count_of_batch(**options: Any) -> int:
    """Returns how many messages a batch read would give."""
    parts = plan_batch(SourceOptions.parse({name: str(value) for name, value in options.items()}))
    return sum(part.count for part in parts)


# -- topics made again -----------------------------------------------------------------------------------


def test_a_topic_that_was_made_again_is_an_error_with_what_was_lost(
    nsqd: Nsqd, topic: str, start: MakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, bodies(0, 200))
    one = start(nsqd, topic=topic, maxMessagesPerTrigger=100)
    assert one.next() == bodies(0, 100)
    old = info(nsqd, topic)["id"]
    nsqd.post("/topic/delete", topic=topic)
    publish(nsqd, topic, bodies(200, 250))
    new = info(nsqd, topic)["id"]
    assert old != new
    with pytest.raises(DataLost, match=f"made again.*{old}.*{new}.* 100 messages") as lost:
        one.plan()
    assert nsqd_id(nsqd) in str(lost.value)
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == bodies(200, 250)
    assert f"{old} and is {new}), with 100 messages" in caplog.text
    publish(nsqd, topic, bodies(250, 260))
    assert again.state() == bodies(250, 260), "said once, then it goes on"
    again.stop()


def test_a_topic_that_is_made_again_between_plan_and_read_is_an_error(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 100))
    one = start(nsqd, topic=topic)
    assert one.plan()
    [part] = one.partitions()
    nsqd.post("/topic/delete", topic=topic)
    publish(nsqd, topic, bodies(200, 250))
    with pytest.raises(DataLost, match=r"100 messages.*made again"):
        one.partitions()
    with pytest.raises(DataLost, match=r"100 messages.*REPLACED"):
        one.read(part)


def test_a_topic_that_was_read_to_its_end_may_be_made_again(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 100))
    one = start(nsqd, topic=topic)
    assert one.next() == bodies(0, 100)
    nsqd.post("/topic/delete", topic=topic)
    publish(nsqd, topic, bodies(100, 150))
    assert one.state() == bodies(100, 150)


def test_a_topic_that_was_deleted_with_unread_messages_is_an_error(
    nsqd: Nsqd, topic: str, start: MakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, bodies(0, 150))
    one = start(nsqd, topic=topic, maxMessagesPerTrigger=100)
    assert one.next() == bodies(0, 100)
    nsqd.post("/topic/delete", topic=topic)
    with pytest.raises(DataLost, match="deleted, with 50 messages"):
        one.plan()
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == []
    assert "deleted, with 50 messages" in caplog.text
    again = again.restarted(failOnDataLoss="true")
    assert not again.plan(), "it was said once, and the checkpoint knows of it"
    publish(nsqd, topic, bodies(200, 230))
    nsqd.post("/topic/delete", topic=topic)
    with pytest.raises(DataLost, match="deleted, with 30 messages"):
        again.restarted().plan()
    publish(nsqd, topic, bodies(300, 310))
    with pytest.raises(DataLost, match=r"made again.*with 30 messages"):
        again.plan()
    assert again.restarted(failOnDataLoss="false").state() == bodies(300, 310)


def test_all_that_was_lost_counts_when_a_topic_was_made_again_more_than_once(
    nsqd: Nsqd, topic: str, start: MakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, bodies(0, 120))
    one, all_read = start(nsqd, topic=topic, maxMessagesPerTrigger=100), start(nsqd, topic=topic)
    assert (one.next(), all_read.next()) == (bodies(0, 100), bodies(0, 120))
    for low, high in ((200, 230), (300, 307)):
        nsqd.post("/topic/delete", topic=topic)
        publish(nsqd, topic, bodies(low, high))
    nsqd.post("/topic/delete", topic=topic)
    publish(nsqd, topic, bodies(400, 410))
    for reading, lost in ((one, 20 + 30 + 7), (all_read, 30 + 7)):
        with pytest.raises(DataLost, match=f"made again.*with {lost} messages"):
            reading.plan()
        again = reading.restarted(failOnDataLoss="false")
        assert again.state() == bodies(400, 410)
        assert f"with {lost} messages" in caplog.text
        again.stop()


def test_an_incarnation_outlives_restarts_and_what_was_deleted_too(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    publish(daemon, "t", bodies(0, 10))
    before = info(daemon, "t")
    for crash in (False, True):
        daemon.restart(crash=crash)
        assert info(daemon, "t")["id"] == before["id"]
    daemon.post("/topic/delete", topic="t")
    publish(daemon, "t", bodies(0, 5))
    daemon.restart(crash=True)
    reply = daemon.get("/log/plan", topic="t", id=before["id"], **{"from": before["first"] + 3, "to": before["next"]})
    fields = reply.json()
    assert (reply.status, fields["message"], fields["lost"]) == (410, "REPLACED", 7)


# -- data paths put back and copied ----------------------------------------------------------------------


def put_back(daemon: Nsqd, backup: Path) -> None:
    daemon.stop()
    shutil.rmtree(daemon.data_path)
    shutil.copytree(backup, daemon.data_path)
    daemon.start()


@pytest.mark.parametrize("published", [0, 20, 300], ids="published-{}".format)
def test_an_nsqd_put_back_to_a_backup_is_an_error_and_what_is_new_is_read(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, published: int
) -> None:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    publish(daemon, "t", bodies(0, 100))
    daemon.stop()
    shutil.copytree(daemon.data_path, tmp_path / "backup")
    daemon.start()
    publish(daemon, "t", bodies(100, 200))
    one = start(daemon, topic="t")
    assert one.state() == bodies(0, 200)
    put_back(daemon, tmp_path / "backup")
    if published:
        publish(daemon, "t", bodies(1000, 1000 + published))
    with pytest.raises(DataLost, match="older state"):
        one.restarted().plan()
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == bodies(1000, 1000 + published)
    publish(daemon, "t", bodies(2000, 2010))
    assert again.state() == bodies(2000, 2010)
    again.stop()


@pytest.mark.parametrize("published", [0, 20], ids="published-{}".format)
def test_a_backup_is_noticed_also_when_its_numbers_go_on_behind_all_that_was_read(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, published: int
) -> None:
    """The numbers go on there hours later, since they begin above the clock, or, as here, after the file of sequence
    numbers was damaged.
    """
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    publish(daemon, "t", bodies(0, 100))
    daemon.stop()
    shutil.copytree(daemon.data_path, tmp_path / "backup")
    (tmp_path / "backup" / "nsquark" / "sequence").write_bytes(b"damaged")
    daemon.start()
    publish(daemon, "t", bodies(100, 200))
    one = start(daemon, topic="t", maxMessagesPerTrigger=150)
    assert one.next() == bodies(0, 150)
    read_to = one.offset[f"t@{nsqd_id(daemon)}"]["next"]
    put_back(daemon, tmp_path / "backup")
    if published:
        publish(daemon, "t", bodies(1000, 1000 + published))
        assert info(daemon, "t")["next"] - published > read_to
    with pytest.raises(DataLost, match="older state"):
        one.restarted().plan()
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == bodies(1000, 1000 + published)
    again.stop()
    once = again.restarted(failOnDataLoss="true")
    publish(daemon, "t", bodies(2000, 2010))
    assert once.state() == bodies(2000, 2010), "failOnDataLoss=false is needed once"
    once.stop()


def test_a_backup_that_is_put_back_twice_is_said_once_each_time(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery
) -> None:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    publish(daemon, "t", bodies(0, 100))
    daemon.stop()
    shutil.copytree(daemon.data_path, tmp_path / "backup")
    (tmp_path / "backup" / "nsquark" / "sequence").write_bytes(b"damaged")
    daemon.start()
    one = start(daemon, topic="t")
    assert one.state() == bodies(0, 100)
    for _ in range(2):
        put_back(daemon, tmp_path / "backup")
        with pytest.raises(DataLost, match="older state"):
            one.restarted().plan()
        again = one.restarted(failOnDataLoss="false")
        assert again.state() == []
        one.committed = again.committed
        assert not one.restarted().plan(), "failOnDataLoss=false is needed once"


def test_two_nsqds_with_one_id_are_an_error_that_names_both(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery
) -> None:
    first = make_nsqd(data_path=tmp_path / "one")
    publish(first, "t", bodies(0, 10))
    first.stop()
    shutil.copytree(first.data_path, tmp_path / "two")
    first.start()
    second = make_nsqd(data_path=tmp_path / "two")
    publish(second, "t", bodies(10, 20))
    port_one, port_two = first.http[1], second.http[1]
    with pytest.raises(NsqdError, match=f"one id|have the id.*{port_one} and .*{port_two}"):
        start(first, second, topic="t").plan()
    with pytest.raises(NsqdError, match="have the id"):
        count_of_batch(nsqd=addresses(first, second), topic="t")


def test_one_nsqd_under_two_names_is_read_once(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, bodies(0, 10))
    names = f"127.0.0.1:{nsqd.http[1]},localhost:{nsqd.http[1]}"
    one = MicroBatches({"nsqd": names, "topic": topic, "startingOffsets": "earliest"})
    assert one.next() == bodies(0, 10)
    one.stop()
    assert count_of_batch(nsqd=names, topic=topic) == 10


# -- found by nsqlookupd ---------------------------------------------------------------------------------


def test_a_batch_says_which_nsqds_it_reads_and_knows_how_many_to_expect(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, lookupd: Nsqlookupd, caplog: pytest.LogCaptureFixture
) -> None:
    flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
    pair = [make_nsqd(flag, data_path=tmp_path / name) for name in ("one", "two")]
    for number, daemon in enumerate(pair):
        publish(daemon, "t", bodies(100 * number, 100 * number + 100))
    ids = [nsqd_id(daemon) for daemon in pair]
    eventually(lambda: len(lookupd.producers("t")) == 2)
    where = {"lookupd": lookupd.http_address, "topic": "t"}
    assert count_of_batch(**where, expectedNsqds=2) == count_of_batch(**where, expectedNsqds=",".join(ids)) == 200
    assert "the batch reads" not in caplog.text
    pair[1].kill()
    eventually(lambda: len(lookupd.producers("t")) == 1)
    assert count_of_batch(**where) == 100
    assert "the batch reads" in caplog.text and ids[0] in caplog.text and ids[1] not in caplog.text
    with pytest.raises(Unreachable, match="1 of 2 nsqds cannot be found"):
        count_of_batch(**where, expectedNsqds=2)
    with pytest.raises(Unreachable, match=f"nsqd {ids[1]} cannot be found"):
        count_of_batch(**where, expectedNsqds=",".join(ids))
    assert count_of_batch(**where, expectedNsqds=ids[0]) == 100
    for wrong in ("0", "", "1,2", "x,3"):
        with pytest.raises(OptionError, match="expectedNsqds"):
            SourceOptions.parse({**where, "expectedNsqds": wrong})


def test_a_stream_notices_an_nsqd_that_came_back_wiped(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, lookupd: Nsqlookupd, start: MakeQuery
) -> None:
    flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
    daemon = on_fixed_port(make_nsqd(flag, "--broadcast-address=127.0.0.1", data_path=tmp_path / "data"))
    publish(daemon, "t", bodies(0, 10))
    eventually(lambda: lookupd.producers("t"))
    one = start(lookupd=lookupd.http_address, topic="t")
    assert one.state() == bodies(0, 10)
    publish(daemon, "t", bodies(10, 20))
    lost_id = nsqd_id(daemon)
    daemon.kill()
    eventually(lambda: not lookupd.producers("t"))
    shutil.rmtree(daemon.data_path)
    daemon.data_path.mkdir()
    daemon.start()
    publish(daemon, "t", bodies(20, 25))
    eventually(lambda: lookupd.producers("t"))
    with pytest.raises(DataLost, match=f"lostNsqds={lost_id}"):
        one.restarted().plan()
    for options in ({"lostNsqds": lost_id}, {"failOnDataLoss": "false"}):
        again = one.restarted(**options)
        assert again.state() == bodies(20, 25)
        again.stop()


def test_a_stream_goes_on_with_an_nsqd_that_nsqlookupd_has_forgotten(
    make_nsqd: Callable[..., Nsqd], lookupd: Nsqlookupd, start: MakeQuery
) -> None:
    daemon = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}", "--broadcast-address=127.0.0.1")
    publish(daemon, "t", bodies(0, 10))
    eventually(lambda: lookupd.producers("t"))
    one = start(lookupd=lookupd.http_address, topic="t")
    assert one.state() == bodies(0, 10)
    publish(daemon, "t", bodies(10, 20))
    with Nsqlookupd() as empty:
        again = one.restarted(lookupd=empty.http_address)
        assert again.state() == bodies(10, 20)
        again.stop()


@pytest.fixture
def foreign() -> Iterator[tuple[str, int]]:
    """Answers as NSQ's own nsqd does, as far as the source asks it: that has no /log/…"""

    class WithoutLog(QuietHandler):
        def do_GET(self) -> None:
            if self.path == "/info":
                self.answer(200, b'{"version":"1.3.0","tcp_port":4150,"http_port":4151}')
            else:
                self.answer(404, b'{"message":"NOT_FOUND"}')

    with LocalServer(WithoutLog) as server:
        yield "127.0.0.1", server.server_port


def test_a_cluster_half_moved_from_nsq_fails_or_is_read_without_the_rest(
    make_nsqd: Callable[..., Nsqd],
    lookupd: Nsqlookupd,
    foreign: tuple[str, int],
    start: MakeQuery,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}", "--broadcast-address=127.0.0.1")
    publish(daemon, "t", bodies(0, 10))
    eventually(lambda: lookupd.producers("t"))
    with lookupd.connect() as wire:
        wire.identify(broadcast_address=foreign[0], http_port=foreign[1])
        assert wire.ask(b"REGISTER t\n") == b"OK"
        assert len(lookupd.producers("t")) == 2
        where = {"lookupd": lookupd.http_address, "topic": "t"}
        with pytest.raises(NsqdError, match=r"without a log API.*nsq_to_nsq.*onForeignNsqd=skip"):
            start(**where).plan()
        with pytest.raises(NsqdError, match="onForeignNsqd=skip"):
            count_of_batch(**where)
        assert start(**where, onForeignNsqd="skip").state() == bodies(0, 10)
        assert count_of_batch(**where, onForeignNsqd="skip") == 10
        assert caplog.text.count(f"{foreign[0]}:{foreign[1]} is an nsqd without a log API") == 2


@pytest.mark.skipif("PEER_NSQD" not in os.environ, reason="PEER_NSQD names no nsqd of NSQ")
@pytest.mark.parametrize("whose_lookupd", ["ours", "theirs"])
def test_a_real_nsqd_of_nsq_in_the_cluster_fails_or_is_left_out(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, whose_lookupd: str
) -> None:
    program = os.environ.get("PEER_NSQLOOKUPD") if whose_lookupd == "theirs" else None
    if whose_lookupd == "theirs" and program is None:
        pytest.skip("PEER_NSQLOOKUPD names no nsqlookupd of NSQ")
    (tmp_path / "theirs").mkdir()
    with Nsqlookupd(program=program) as lookupd:
        flags = (f"--lookupd-tcp-address={lookupd.tcp_address}", "--broadcast-address=127.0.0.1")
        daemon = make_nsqd(*flags, data_path=tmp_path / "ours")
        publish(daemon, "t", bodies(0, 10))
        eventually(lambda: len(lookupd.producers("t")) == 1)
        where = {"lookupd": lookupd.http_address, "topic": "t"}
        fails, skips = start(**where), start(**where, onForeignNsqd="skip")
        assert fails.next() == skips.next() == bodies(0, 10)
        with Nsqd(tmp_path / "theirs", *flags, program=os.environ["PEER_NSQD"]) as foreign:
            publish(foreign, "t", bodies(100, 110))
            eventually(lambda: len(lookupd.producers("t")) == 2)
            said = rf"{foreign.http_address} is an nsqd without a log API.*nsq_to_nsq.*onForeignNsqd=skip"
            with pytest.raises(NsqdError, match=said):
                fails.restarted().plan()
            with pytest.raises(NsqdError, match=said):
                count_of_batch(**where)
            publish(daemon, "t", bodies(10, 20))
            again = skips.restarted()
            assert again.state() == bodies(10, 20)
            assert count_of_batch(**where, onForeignNsqd="skip") == 20
            again.stop()


# -- where it starts -------------------------------------------------------------------------------------


def test_offsets_that_name_what_is_not_there_are_refused(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 10))
    here = nsqd_id(nsqd)
    for key, why in (
        (f"other@{here}", "is not among those to read"),
        (f"{topic}@x", "there is no nsqd with this id"),
    ):
        place = json.dumps({key: "earliest"})
        with pytest.raises(OptionError, match=f"startingOffsets names {key}, but .*{why}"):
            start(nsqd, topic=topic, startingOffsets=place).plan()
        for name in ("startingOffsets", "endingOffsets"):
            with pytest.raises(OptionError, match=f"{name} names {key}"):
                count_of_batch(nsqd=addresses(nsqd), topic=topic, **{name: place})
    missing = json.dumps({f"{topic}_2@{here}": "earliest"})
    with pytest.raises(OptionError, match=f"there is no topic {topic}_2 on this nsqd"):
        start(nsqd, topic=f"{topic},{topic}_2", startingOffsets=missing).plan()


def test_latest_takes_positions_from_nsqd_and_not_from_the_clock_of_the_driver(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (on_fixed_port(make_nsqd(data_path=tmp_path / name)) for name in ("one", "two"))
    publish(second, "t", bodies(0, 5))
    second.stop()
    real_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 5_000_000_000)
    one = MicroBatches({"nsqd": addresses(first, second), "topic": "t", "startingOffsets": "latest"})
    assert one.next() == []
    publish(first, "t", bodies(10, 20))
    assert one.next() == bodies(10, 20), "a topic made after the query began is read whole"
    second.start()
    publish(second, "t", bodies(20, 30))
    assert eventually(one.next, 20) == bodies(20, 30), "neither what was there before, nor less than came since"
    one.stop()


def test_a_channel_made_before_decides_nothing(nsqd: Nsqd, topic: str, start: MakeQuery) -> None:
    publish(nsqd, topic, bodies(0, 4000))
    nsqd.post("/channel/create", topic=topic, channel="spark", start="newest")
    assert nsqd.channel(topic, "spark")["depth"] == 0
    one = start(nsqd, topic=topic, channel="spark", maxMessagesPerTrigger=1000)
    assert one.next() == []
    assert one.next() == bodies(0, 1000)
    assert nsqd.channel(topic, "spark")["depth"] == 4000, "it holds what the query has not read"
    assert one.state() == bodies(1000, 4000)


def test_a_channel_that_consumers_used_is_refused_also_after_a_restart(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery
) -> None:
    daemon = on_fixed_port(make_nsqd())
    publish(daemon, "t", bodies(0, 10))
    with daemon.connect() as wire:
        wire.subscribe("t", "ch", rdy=0)
    for restart in (lambda: None, daemon.restart, lambda: daemon.restart(crash=True)):
        restart()
        one = start(daemon, topic="t", channel="ch")
        assert one.next() == []
        with pytest.raises(NsqdError, match="has subscribers, or had some"):
            one.plan()
