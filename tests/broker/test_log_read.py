"""Checks the Log API: what a log holds, reading it by range, and channels as positions in it."""

import http.client
import itertools
import json
import os
import resource
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.logs import answer, begin, decode, info, plan, read, read_all, read_raw, refusal
from harness import Nsqd, Wire, body_of, eventually
from nsquark.wire.batch_format import RANGE_PIECE, RANGE_REFUSED, Damage, StoredBatch, scan

pytestmark = pytest.mark.ours

SMALL_FILES = ("--max-bytes-per-file=20000", "--sync-every=50")


def _publish(daemon: Nsqd, topic: str, count: int, *, size: int = 100, together: int = 20) -> list[bytes]:
    bodies = [b"%06d" % number + b"x" * (size - 6) for number in range(count)]
    with daemon.connect() as wire:
        for start in range(0, count, together):
            wire.publish(topic, *bodies[start : start + together])
    return bodies


# -- /log/info -------------------------------------------------------------------------------------------


def test_info_tells_what_a_topic_holds(nsqd: Nsqd, topic: str) -> None:
    before = time.time_ns()
    bodies = _publish(nsqd, topic, 100)
    found = info(nsqd, topic)
    records = read_all(nsqd, topic)
    assert [record.body for record in records] == bodies
    assert found["count"] == 100
    assert found["first"] == records[0].seq
    assert found["next"] == records[-1].seq + 1
    assert found["oldest_ns"] == records[0].timestamp_ns >= before
    assert found["newest_ns"] == records[-1].timestamp_ns <= time.time_ns()
    assert found["segments"] == 1
    assert found["bytes"] == len(read_raw(nsqd, topic, 0, found["next"]))
    assert found["pump"] <= found["first"], "without a channel the messages are the topic's own"


def test_info_without_a_topic_lists_all(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 3)
    listed = answer(nsqd, "GET", "/log/info")
    mine = next(entry for entry in listed["topics"] if entry["topic"] == topic)
    found = info(nsqd, topic)
    assert mine == {key: found[key] for key in ("topic", "id", "first", "next", "count")}


def test_info_without_a_topic_shows_who_reads_by_range(nsqd: Nsqd, topic: str) -> None:
    _publish(nsqd, topic, 3)
    seq = info(nsqd, topic)["first"] + 2
    nsqd.post("/channel/create", topic=topic, channel="plain")
    answer(nsqd, "POST", "/channel/commit", topic=topic, channel="query", owner="spark-1", seq=seq, ttl=60)
    listed = answer(nsqd, "GET", "/log/info")
    mine = next(entry for entry in listed["topics"] if entry["topic"] == topic)
    (owned,) = mine["owned"]
    assert 0 <= owned.pop("idle_s") < 60
    assert owned == {"channel": "query", "owner": "spark-1", "position": seq, "ttl_s": 60}


def test_info_without_a_topic_tells_of_the_disk(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--max-disk-bytes=1000000000")
    _publish(daemon, "t", 3)
    disk = answer(daemon, "GET", "/log/info")["disk"]
    assert 0 < disk["free_bytes"] < disk["total_bytes"]
    assert info(daemon, "t")["bytes"] <= disk["used_bytes"] < disk["limit_bytes"] == 1_000_000_000


def test_every_answer_names_the_nsqd_and_the_name_stays(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 3)
    node = info(daemon, "t")["nsqd_id"]
    _, refused = refusal(daemon, "GET", "/log/info", topic="missing")
    run = refused["nsqd_run"]
    assert refused == {"message": "TOPIC_NOT_FOUND", "nsqd_id": node, "nsqd_run": run}
    daemon.restart(crash=True)
    assert info(daemon, "t")["nsqd_id"] == node
    stream = daemon.get("/log/read", topic="t", **{"from": 0, "to": 1})
    assert stream.headers["X-Nsquark-Id"] == node


def test_a_long_poll_ends_with_the_next_message(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"one")
    head = info(nsqd, topic)["next"]
    waiting = begin(nsqd, "GET", "/log/info", topic=topic, after=head, wait=15)
    started = time.monotonic()
    client.publish(topic, b"two")
    reply = waiting.getresponse()
    assert b'"count":2' in reply.read()
    assert time.monotonic() - started < 10
    waiting.close()


def test_a_long_poll_for_what_is_there_already_does_not_wait(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"one")
    started = time.monotonic()
    found = info(nsqd, topic, after=info(nsqd, topic)["next"] - 1, wait=30)
    assert found["count"] == 1 and time.monotonic() - started < 10


def test_a_long_poll_ends_with_its_time(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"one")
    head = info(nsqd, topic)["next"]
    started = time.monotonic()
    assert info(nsqd, topic, after=head, wait=0.3)["next"] == head
    assert time.monotonic() - started >= 0.3


def test_a_long_poll_ends_with_the_topic(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"one")
    waiting = begin(nsqd, "GET", "/log/info", topic=topic, after=info(nsqd, topic)["next"], wait=15)
    eventually(lambda: nsqd.post("/topic/delete", topic=topic).status == 200)
    assert waiting.getresponse().status == 404
    waiting.close()


def test_long_polls_do_not_hold_up_a_stop(make_nsqd: Callable[..., Nsqd]) -> None:
    """They are answered: the server gives requests five seconds to end by themselves, and then cuts them off."""
    daemon = make_nsqd()
    _publish(daemon, "t", 1)
    waiting = begin(daemon, "GET", "/log/info", topic="t", after=info(daemon, "t")["next"], wait=50)
    info(daemon, "t")  # by now the first request has been taken up
    assert daemon.stop() == 0
    assert waiting.getresponse().status == 200
    waiting.close()


def _long_polls(daemon: Nsqd, connections: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Begins two long polls on each connection, which is as many as may wait there."""
    request = f"GET /log/info?topic=t&after={info(daemon, 't')['next']}&wait=50 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    opened = [socket.create_connection(daemon.http, source_address=(host, 0)) for _ in range(connections)]
    for connection in opened:
        connection.sendall(2 * request)
    return opened


def test_too_many_long_polls_of_one_peer_are_refused_until_it_leaves(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 1)
    one_more = {"topic": "t", "after": info(daemon, "t")["next"], "wait": 0.2}
    waiting = _long_polls(daemon, 256)
    eventually(lambda: daemon.get("/log/info", **one_more).status == 503)
    (another,) = _long_polls(daemon, 1, "127.0.0.2")
    for connection in waiting:
        connection.close()
    eventually(lambda: daemon.get("/log/info", **one_more).status == 200)
    _publish(daemon, "t", 1)
    assert another.recv(100).startswith(b"HTTP/1.1 200 OK")
    another.close()


def test_of_too_many_long_polls_the_oldest_is_answered_early(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 1)
    (first,) = _long_polls(daemon, 1, "127.0.0.9")
    waiting = [_long_polls(daemon, 250, f"127.0.0.{number}") for number in (1, 2)]
    waiting.append(_long_polls(daemon, 12, "127.0.0.3"))
    assert first.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert not select.select([waiting[-1][-1]], [], [], 0)[0]
    for connection in [first, *itertools.chain(*waiting)]:
        connection.close()


def test_a_long_poll_whose_client_sends_no_more_is_answered_at_once(make_nsqd: Callable[..., Nsqd]) -> None:
    """It may be gone, or it may only have closed its side: either way the place is free."""
    daemon = make_nsqd()
    _publish(daemon, "t", 1)
    (connection,) = _long_polls(daemon, 1)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while data := connection.recv(65536):
        answer += data
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    connection.close()


def test_the_slowest_reader_makes_room(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    for _ in range(8):
        _publish(daemon, "t", 20, size=200_000)
    now = info(daemon, "t")
    path = f"/log/read?topic=t&from={now['first']}&to={now['next']}"
    slow = []
    for host in ("127.0.0.1", "127.0.0.2"):
        for _ in range(64):
            slow.append(socket.socket())
            slow[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow[-1].bind((host, 0))
            slow[-1].connect(daemon.http)
            slow[-1].sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    eventually(lambda: daemon.get("/log/read", topic="t", **{"from": now["first"], "to": now["next"]}).status == 503)
    reading = http.client.HTTPConnection(*daemon.http, timeout=30, source_address=("127.0.0.3", 0))

    def read() -> bool:
        """Is cut off, too, if it is this process that is held up, and the slowest."""
        try:
            reading.request("GET", path)
            answer = reading.getresponse()
            return len(answer.read()) == now["bytes"] and answer.status == 200
        except (http.client.HTTPException, OSError):
            reading.close()
            return False

    assert eventually(read)
    reading.close()
    for connection in slow:
        connection.close()


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("/log/info", {"topic": "bad name"}, "INVALID_ARG_TOPIC"),
        ("/log/info", {"topic": "t", "wait": "nan"}, "INVALID_ARG_WAIT"),
        ("/log/info", {"topic": "t", "wait": "-1"}, "INVALID_ARG_WAIT"),
        ("/log/info", {"topic": "t", "wait": "1", "after": "x"}, "INVALID_ARG_AFTER"),
        ("/log/at", {"topic": "t"}, "MISSING_ARG_TS"),
        ("/log/at", {"topic": "t", "ts": "-5"}, "INVALID_ARG_TS"),
        ("/log/at", {"topic": "t", "ts_ms": "9" * 19}, "INVALID_ARG_TS_MS"),
        ("/log/plan", {"topic": "t", "to": "1"}, "MISSING_ARG_FROM"),
        ("/log/plan", {"topic": "t", "from": "1"}, "MISSING_ARG_TO"),
        ("/log/plan", {"topic": "t", "from": "1", "to": "0"}, "INVALID_ARG_TO"),
        ("/log/plan", {"topic": "t", "from": "0", "to": "1", "parts": "0"}, "INVALID_ARG_PARTS"),
        ("/log/plan", {"topic": "t", "from": "0", "to": "1", "part_bytes": "0"}, "INVALID_ARG_PART_BYTES"),
        ("/log/plan", {"topic": "t", "from": "0", "to": "1", "max_bytes": "9" * 5000}, "INVALID_ARG_MAX_BYTES"),
        ("/log/plan", {"topic": "t", "from": "9" * 18, "to": "9" * 18}, "BEYOND_HEAD"),
        ("/log/read", {"topic": "t", "from": "9" * 18, "to": "9" * 18}, "BEYOND_HEAD"),
        ("/log/read", {"topic": "t", "from": "0"}, "MISSING_ARG_TO"),
        ("/log/read", {"from": "0", "to": "0"}, "MISSING_ARG_TOPIC"),
        ("/log/read", {"topic": "t#ephemeral", "from": "0", "to": "0"}, "EPHEMERAL_TOPIC"),
        ("/log/at", {"topic": "t#ephemeral", "ts": "0"}, "EPHEMERAL_TOPIC"),
    ],
)
def test_bad_arguments_are_named(nsqd: Nsqd, client: Wire, path: str, query: dict[str, Any], code: str) -> None:
    client.publish("t", b"x")
    client.publish("t#ephemeral", b"x")
    status, refused = refusal(nsqd, "GET", path, **query)
    assert (status, refused["message"]) == (400, code)


BAD_DOCUMENTS = {
    "no JSON": b"{",
    "another kind": b"[]",
    "not UTF-8": b'{"topics":["\xff"]}',
    "deep": b'{"x":' + b"[" * 100_000,
}


@pytest.mark.parametrize("document", BAD_DOCUMENTS)
@pytest.mark.parametrize(
    "target", ["/log/at?ts=0", "/log/plan", "/log/read", "/channel/commit?channel=ch&owner=me&ttl=60"]
)
def test_a_bad_document_is_refused(nsqd: Nsqd, target: str, document: str) -> None:
    reply = nsqd.request("POST", target, BAD_DOCUMENTS[document])
    assert (reply.status, reply.json()["message"]) == (400, "INVALID_BODY")
    assert reply.json()["reason"]


# -- /log/at ---------------------------------------------------------------------------------------------


def test_a_time_is_found_to_the_message(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    _publish(daemon, "t", 600)
    with daemon.connect() as wire:  # one commit whose messages do not share a time
        wire.send(b"".join(b"PUB t\n\x00\x00\x00\x03%03d" % number for number in range(300)))
        wire.expect_ok(300)
    assert info(daemon, "t")["segments"] > 3
    records = read_all(daemon, "t")
    assert len(records) == 900

    def expected(time_ns: int) -> int:
        return next((record.seq for record in records if record.timestamp_ns >= time_ns), records[-1].seq + 1)

    for record in [*records[:: len(records) // 40], *records[600::25], records[-1]]:
        for time_ns in (record.timestamp_ns - 1, record.timestamp_ns, record.timestamp_ns + 1):
            assert answer(daemon, "GET", "/log/at", topic="t", ts=time_ns)["seq"] == expected(time_ns)
    assert answer(daemon, "GET", "/log/at", topic="t", ts=0)["seq"] == records[0].seq
    later_ms = records[-1].timestamp_ns // 1_000_000 + 1
    assert answer(daemon, "GET", "/log/at", topic="t", ts_ms=later_ms)["seq"] == info(daemon, "t")["next"]


def test_a_time_is_found_among_deferred_messages_with_older_times(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    with daemon.connect() as wire:
        # Together, so that nothing comes between them, however long this process is held up.
        wire.send(b"DPUB t 3000\n" + body_of(b"early, but late") + b"PUB t\n" + body_of(b"first in the log"))
        wire.expect_ok(2)
    eventually(lambda: info(daemon, "t")["count"] == 2)
    first, second = read_all(daemon, "t")
    assert (first.body, second.body) == (b"first in the log", b"early, but late")
    assert second.timestamp_ns < first.timestamp_ns
    at = answer(daemon, "GET", "/log/at", topic="t", ts=second.timestamp_ns)
    assert at["seq"] == first.seq, "in the order of the log it is the first that is not older"
    later = answer(daemon, "GET", "/log/at", topic="t", ts=first.timestamp_ns + 1)
    assert later["seq"] == info(daemon, "t")["next"]


# -- /log/plan -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Makes a topic of many files with gaps in its sequence numbers: a crash makes the next lease begin elsewhere."""
    with Nsqd(tmp_path_factory.mktemp("planned"), *SMALL_FILES) as daemon:
        for round_number in range(3):
            _publish(daemon, "t", 700, size=60 + 100 * round_number, together=30)
            daemon.restart(crash=True)
        yield daemon


def test_plans_have_real_counts_whatever_the_gaps(planned: Nsqd) -> None:
    records = read_all(planned, "t")
    seqs = [record.seq for record in records]
    assert len(records) == 2100 and seqs[-1] - seqs[0] > 4096, "there are gaps"
    for low in range(0, 2100, 171):
        for high in range(low, 2101, 333):
            end = seqs[high] if high < 2100 else seqs[-1] + 1
            found = plan(planned, "t", seqs[low], end, parts=3)
            assert found["count"] == high - low
            assert sum(part["count"] for part in found["parts"]) == high - low
            assert (found["from"], found["to"], found["removed"]) == (seqs[low], end, None)


def test_parts_together_are_the_range_and_each_has_its_count(planned: Nsqd) -> None:
    head = info(planned, "t")["next"]
    whole = read_all(planned, "t")
    for parts in (1, 2, 7, 40, 500):
        found = plan(planned, "t", 0, head, parts=parts)
        records = []
        for part in found["parts"]:
            mine = read(planned, "t", part["from"], part["to"])
            assert len(mine) == part["count"] > 0
            records += mine
        assert records == whole
        assert len(found["parts"]) <= parts
        assert len(found["parts"]) >= min(parts, 7)
        assert found["bytes"] == info(planned, "t")["bytes"] == sum(part["bytes"] for part in found["parts"])


def test_a_fixed_range_is_cut_the_same_for_ever(make_nsqd: Callable[..., Nsqd]) -> None:
    """A writer recognises what it has written by the part that it came from, however the log goes on."""
    daemon = make_nsqd(*SMALL_FILES)
    cuts: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
    ends = [0]

    def cut(low: int, high: int, parts: int, part_bytes: int) -> list[dict[str, Any]]:
        found = plan(daemon, "t", low, high, parts=parts, part_bytes=part_bytes)
        assert found["removed"] is None
        return [{**part, "bytes": None} for part in found["parts"]]

    def grow() -> None:
        size = 20 + 37 * len(ends)
        _publish(daemon, "t", 40, size=size, together=1 + len(ends) % 7)
        ends.append(info(daemon, "t")["next"])
        for low in ends[-4:-1]:
            for parts, part_bytes in ((2, 1 << 60), (8, 1 << 60), (1, 3000), (1, 20_000)):
                cuts[low, ends[-1], parts, part_bytes] = cut(low, ends[-1], parts, part_bytes)

    def differing() -> list[tuple[int, ...]]:
        return [key for key, parts in cuts.items() if cut(*key) != parts]

    for _ in range(12):
        grow()
        assert differing() == []
    for crash in (False, True):
        daemon.restart(crash=crash)
        assert differing() == []
        grow()
        assert differing() == []
    daemon.stop()
    for index in (daemon.data_path / "nsquark" / "topics").rglob("*.idx"):
        index.unlink()
    daemon.start()
    assert differing() == []
    assert len(cuts) > 100 and max(map(len, cuts.values())) > 8
    first = info(daemon, "t")["first"]
    daemon.post("/channel/create", topic="t", channel="ch", start=ends[9])
    eventually(lambda: info(daemon, "t")["first"] > first)
    removed_to = info(daemon, "t")["removed_to"]
    cuts = {key: parts for key, parts in cuts.items() if key[0] >= removed_to}
    assert cuts and differing() == []


def test_limits_cut_a_plan_at_a_message(planned: Nsqd) -> None:
    records = read_all(planned, "t")
    seqs = [record.seq for record in records]
    head = seqs[-1] + 1
    by_count = plan(planned, "t", seqs[5], head, max_messages=1000)
    assert by_count["count"] == 1000
    assert [record.seq for record in read(planned, "t", by_count["from"], by_count["to"])] == seqs[5:1005]
    by_bytes = plan(planned, "t", seqs[5], head, max_bytes=100_000)
    assert 0 < by_bytes["count"] == len(read(planned, "t", by_bytes["from"], by_bytes["to"]))
    assert 50_000 < by_bytes["bytes"] <= 100_000 + 32_768
    both = plan(planned, "t", seqs[5], head, max_bytes=100_000, max_messages=10)
    assert both["count"] == 10
    assert plan(planned, "t", seqs[5], head, max_bytes=1)["count"] == 1, "a limit must not stop a reader"


def test_plans_chained_by_their_ends_visit_every_message_once(planned: Nsqd) -> None:
    info_now = info(planned, "t")
    at, seen = 0, []
    while at < info_now["next"]:
        found = plan(planned, "t", at, info_now["next"], max_bytes=37_000, max_messages=333, parts=2)
        assert found["to"] > at
        seen += read(planned, "t", at, found["to"])
        at = found["to"]
    assert seen == read_all(planned, "t")


def test_an_empty_range_has_an_empty_plan(planned: Nsqd) -> None:
    head = info(planned, "t")["next"]
    found = plan(planned, "t", head, head, parts=4)
    assert (found["count"], found["bytes"], found["parts"]) == (0, 0, [])
    assert read_raw(planned, "t", head, head) == b""


# -- /log/read -------------------------------------------------------------------------------------------


def test_a_read_gives_the_batches_that_overlap_the_range_and_no_more(planned: Nsqd) -> None:
    whole = read_raw(planned, "t", 0, info(planned, "t")["next"])
    records = decode(whole)
    for low, high in ((0, 1), (29, 31), (650, 1500), (2099, 2100), (333, 333 + 30)):
        raw = read_raw(planned, "t", records[low].seq, records[high - 1].seq + 1)
        found = decode(raw)
        assert raw in whole or found[-1].seq - found[0].seq > 30, "in several files"
        inside = [record for record in found if records[low].seq <= record.seq < records[high - 1].seq + 1]
        assert inside == records[low:high]
        assert len(found) - len(inside) <= 2 * 29, "at most the rest of a batch at each end"


def test_large_messages_and_batches_are_read_whole(nsqd: Nsqd, client: Wire, topic: str) -> None:
    bodies = [bytes([number]) * 900_000 for number in range(8)]
    client.publish(topic, *bodies[:5])
    client.publish(topic, *bodies[5:])
    records = read_all(nsqd, topic)
    assert [record.body for record in records] == bodies
    assert [r.body for r in read(nsqd, topic, records[6].seq, records[7].seq)] == bodies[6:7]
    assert plan(nsqd, topic, records[2].seq, records[7].seq, parts=3)["count"] == 5


def test_reading_goes_on_while_messages_are_published(nsqd: Nsqd, topic: str) -> None:
    """Every answer is of whole, committed batches, though the file grows under it."""
    done, was_read = threading.Event(), threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        with nsqd.connect() as wire:
            while published < 300 or not was_read.is_set():
                wire.publish(topic, *[b"%d" % published * 50] * 20)
                published += 1
        done.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    eventually(lambda: topic in nsqd.topic_names())
    try:
        while not done.is_set():
            found = info(nsqd, topic)
            assert len(read(nsqd, topic, 0, found["next"])) == found["count"]
            assert len(read_all(nsqd, topic)) % 20 == 0
            was_read.set()
    finally:
        was_read.set()
        publisher.join()
    assert len(read_all(nsqd, topic)) == published * 20


def test_a_damaged_batch_is_passed_on_and_can_be_stepped_over(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 100)
    found = info(daemon, "t")
    seqs = [record.seq for record in read_all(daemon, "t")]
    assert daemon.stop() == 0
    [log_file] = daemon.data_path.glob("**/t.t/*.log")
    raw = bytearray(log_file.read_bytes())
    raw[len(raw) // 2] ^= 1
    log_file.write_bytes(raw)
    daemon.start()
    stream = read_raw(daemon, "t", found["first"], found["next"])
    assert stream == raw
    items = list(scan(memoryview(stream), 0))
    damages = [item for item in items if isinstance(item, Damage)]
    intact = [seq for item in items if isinstance(item, StoredBatch) for seq in range(item.first_seq, item.next_seq)]
    assert len(damages) == 1
    assert intact == seqs[:40] + seqs[60:], "one batch of 20 is lost, and no other"


def test_a_reader_that_stalls_holds_up_nobody(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 3000, size=10_000, together=100)
    head = info(daemon, "t")["next"]
    stalled = [begin(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head}) for _ in range(10)]
    answers = [connection.getresponse() for connection in stalled]
    assert daemon.get("/ping").text == "OK"
    with daemon.connect() as wire:
        wire.publish("other", b"x")
    assert len(read_all(daemon, "t")) == 3000
    for reply in answers:
        assert len(decode(reply.read())) == 3000
    for connection in stalled:
        connection.close()


def test_too_many_reads_at_once_are_refused(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 2000, size=10_000, together=100)
    head = info(daemon, "t")["next"]
    connections = [begin(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head}) for _ in range(64)]
    for connection in connections:
        assert connection.getresponse().status == 200
    status, refused = refusal(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head})
    assert (status, refused["message"]) == (503, "TOO_MANY_READS")
    for connection in connections:
        connection.close()
    eventually(lambda: daemon.get("/log/read", topic="t", **{"from": head, "to": head}).status == 200)


# -- removal ---------------------------------------------------------------------------------------------


def _drain(daemon: Nsqd, topic: str, count: int) -> None:
    with daemon.connect() as wire:
        wire.subscribe(topic, rdy=500).read_messages(count, finish=True)
        eventually(lambda: daemon.channel(topic)["depth"] + daemon.channel(topic)["in_flight_count"] == 0)


def test_removed_is_told_from_never_existed(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    _publish(daemon, "t", 500)
    old = info(daemon, "t")
    assert plan(daemon, "t", 0, old["next"])["removed"] is None, "below the first message there never was one"
    assert read_raw(daemon, "t", 0, old["next"])
    _drain(daemon, "t", 500)
    eventually(lambda: info(daemon, "t")["segments"] == 1)
    for _ in range(2):
        now = info(daemon, "t")
        assert old["first"] < now["first"] <= now["next"] == old["next"]
        assert now["removed_to"] == now["first"], "here the files follow each other without a gap"
        found = plan(daemon, "t", old["first"], old["next"])
        assert found["removed"] == {"from": old["first"], "to": now["first"]}
        assert found["count"] == len(read(daemon, "t", now["first"], now["next"])) == now["count"]
        status, refused = refusal(daemon, "GET", "/log/read", topic="t", **{"from": old["first"], "to": old["next"]})
        assert (status, refused["message"], refused["first"]) == (410, "REMOVED", now["first"])
        daemon.restart(crash=True)


def test_a_reader_at_the_end_of_what_was_removed_has_lost_nothing(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    _publish(daemon, "t", 150)
    reader_at = info(daemon, "t")["next"]
    daemon.restart(crash=True)  # sequence numbers go on in another lease
    _publish(daemon, "t", 500)
    _drain(daemon, "t", 650)
    eventually(lambda: info(daemon, "t")["segments"] == 1)
    _publish(daemon, "t", 10)
    gone = info(daemon, "t")["removed_to"]
    assert gone > reader_at
    assert plan(daemon, "t", reader_at, gone + 1)["removed"] == {"from": reader_at, "to": gone}
    assert plan(daemon, "t", gone, info(daemon, "t")["next"])["removed"] is None


def test_a_gap_behind_removed_messages_is_no_loss(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--max-bytes-per-file=1000")
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    _publish(daemon, "t", 1, size=1000)
    reader_at = info(daemon, "t")["next"]
    daemon.restart(crash=True)
    _publish(daemon, "t", 1, size=1000)
    _drain(daemon, "t", 2)
    now = eventually(lambda: found if (found := info(daemon, "t"))["segments"] == 1 else None)
    assert now["first"] > reader_at == now["removed_to"]
    for _ in range(2):
        found = plan(daemon, "t", reader_at, now["next"])
        assert (found["count"], found["removed"]) == (1, None)
        assert len(read(daemon, "t", reader_at, now["next"])) == 1
        daemon.restart(crash=True)


def test_a_file_removed_during_a_read_is_read_to_its_end(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--max-bytes-per-file=4000000")
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    _publish(daemon, "t", 2000, size=10_000, together=100)
    found = info(daemon, "t")
    assert found["segments"] > 3
    slow = begin(daemon, "GET", "/log/read", topic="t", **{"from": found["first"], "to": found["next"]})
    reply = slow.getresponse()
    assert reply.read(100)
    assert daemon.post("/channel/empty", topic="t", channel="ch").status == 200
    eventually(lambda: info(daemon, "t")["segments"] == 0)
    rest = reply.read()
    slow.close()
    assert len(rest) == found["bytes"] - 100
    status, _ = refusal(daemon, "GET", "/log/read", topic="t", **{"from": found["first"], "to": found["next"]})
    assert status == 410


def _break_file(file: Path, *, opens: bool) -> None:
    """Takes a file of the log away, or puts a directory in its place, which can be opened and not be read."""
    file.rename(file.with_suffix(".away"))
    if opens:
        file.mkdir()


def _mend_file(file: Path) -> None:
    if file.is_dir():
        file.rmdir()
    file.with_suffix(".away").rename(file)


@pytest.mark.parametrize("opens", [False, True])
def test_a_time_in_a_file_that_cannot_be_read_is_refused(make_nsqd: Callable[..., Nsqd], opens: bool) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    _publish(daemon, "t", 500)
    at_ns = read_all(daemon, "t")[250].timestamp_ns
    questions: list[tuple[str, str, bytes, dict[str, Any]]] = [
        ("GET", "/log/at", b"", {"topic": "t", "ts": at_ns}),
        ("GET", "/log/at", b"", {"topic": "t", "ts": at_ns, "side": "end"}),
        ("POST", "/channel/create", b"", {"topic": "t", "channel": "c", "start": f"time:{at_ns // 1_000_000}"}),
    ]
    files = sorted(daemon.data_path.glob("**/t.t/*.log"))
    for file in files:
        _break_file(file, opens=opens)
    for method, path, body, question in questions:
        status, why = refusal(daemon, method, path, body, **question)
        assert (status, why["message"]) == (503, "DISK_ERROR"), path
    [place] = answer(daemon, "POST", "/log/at", b'{"topics":["t"]}', ts=at_ns)["places"]
    assert (place["status"], place["message"]) == (503, "DISK_ERROR")
    for file in files:
        _mend_file(file)
    for method, path, body, question in questions:
        assert daemon.request(method, f"{path}?{urllib.parse.urlencode(question)}", body).status == 200
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("bodies", ["true", "false"])
@pytest.mark.parametrize("opens", [False, True])
def test_a_range_that_cannot_be_read_is_refused_until_it_can(
    make_nsqd: Callable[..., Nsqd], opens: bool, bodies: str
) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    published = _publish(daemon, "t", 500)
    files = sorted(daemon.data_path.glob("**/t.t/*.log"))
    broken = files[0] if opens else files[-1]
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    question = {"topic": "t", "from": 0, "to": info(daemon, "t")["next"], "bodies": bodies}
    before = len(os.listdir(descriptors))
    _break_file(broken, opens=opens)
    for _ in range(100):  # more than may be read at once
        status, why = refusal(daemon, "GET", "/log/read", **question)
        assert (status, why["message"]) == (503, "DISK_ERROR") and why["reason"]
    _mend_file(broken)
    assert daemon.get("/log/read", **question).status == 200
    assert [record.body for record in read_all(daemon, "t")] == published
    eventually(lambda: len(os.listdir(descriptors)) <= before)
    assert "Traceback" not in daemon.log


def test_a_range_is_refused_while_nsqd_has_no_descriptor_left(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    published = _publish(daemon, "t", 100)
    head = info(daemon, "t")["next"]
    connection = begin(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head})
    assert len(decode(connection.getresponse().read())) == 100
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)

    def refusal_of_it() -> tuple[str | None, bytes] | None:
        """Asks with no descriptor left, unless one was freed just now: of an answer or a connection that has ended."""
        lowest_free = next(number for number in itertools.count() if not (descriptors / str(number)).is_symlink())
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        connection.request("GET", f"/log/read?topic=t&from=0&to={head}")
        reply = connection.getresponse()
        body = reply.read()
        return (reply.headers["Retry-After"], body) if reply.status == 503 else None

    retry_after, body = eventually(refusal_of_it)
    assert retry_after == "1"
    assert "Too many open files" in json.loads(body)["reason"]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    connection.close()
    assert [record.body for record in read_all(daemon, "t")] == published


def test_a_fault_in_the_midst_of_a_range_cuts_its_answer(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    _publish(daemon, "t", 3000)
    files = sorted(daemon.data_path.glob("**/t.t/*.log"))
    assert len(files) > 18
    _break_file(files[17], opens=False)
    head = info(daemon, "t")["next"]
    one = begin(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head})
    document = json.dumps({"ranges": [{"topic": "t", "from": 0, "to": head}]})
    many = begin(daemon, "POST", "/log/read", document.encode())
    for connection in (one, many):
        reply = connection.getresponse()
        assert reply.status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            reply.read()
        connection.close()


def test_garbage_of_answers_that_were_cut_is_collected_at_any_moment(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    """Garbage is collected wherever Python makes an object, also where a lock is held."""
    tmp_path.joinpath("sitecustomize.py").write_text("import gc\ngc.set_threshold(1, 1, 1)\n")
    (tmp_path / "data").mkdir()
    with Nsqd(tmp_path / "data", *SMALL_FILES, environment={"PYTHONPATH": str(tmp_path)}) as daemon:
        _publish(daemon, "t", 3000)
        files = sorted(daemon.data_path.glob("**/t.t/*.log"))
        _break_file(files[17], opens=False)
        head = info(daemon, "t")["next"]
        document = json.dumps({"ranges": [{"topic": "t", "from": 0, "to": head}]})
        for _ in range(20):
            one = begin(daemon, "GET", "/log/read", topic="t", **{"from": 0, "to": head})
            many = begin(daemon, "POST", "/log/read", document.encode())
            for connection in (one, many):
                with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                    connection.getresponse().read()
                connection.close()
        _mend_file(files[17])
        assert len(read_all(daemon, "t")) == 3000


def test_reads_that_wait_behind_others_give_up_their_files_with_the_connection(
    make_nsqd: Callable[..., Nsqd],
) -> None:
    daemon = make_nsqd()
    _publish(daemon, "t", 2000, size=10_000, together=100)
    head = info(daemon, "t")["next"]
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    before = len(os.listdir(descriptors))
    request = f"GET /log/read?topic=t&from=0&to={head} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    for _ in range(5):
        connection = socket.create_connection(daemon.http)
        connection.sendall(50 * request)
        assert connection.recv(100)
        connection.close()
    eventually(lambda: len(os.listdir(descriptors)) <= before)
    assert len(read_all(daemon, "t")) == 2000, "all places are free again"


def _read_many(daemon: Nsqd, *topics: str) -> dict[str, tuple[bool, bytes]]:
    """Says whether the range of each topic, all of its log, was refused, and returns the bytes that came for it."""
    ranges = [{"topic": topic, "from": 0, "to": info(daemon, topic)["next"]} for topic in topics]
    reply = daemon.post("/log/read", json.dumps({"ranges": ranges}).encode())
    assert reply.status == 200, reply.text
    found = dict.fromkeys(topics, (False, b""))
    pos = 0
    while pos < len(reply.body):
        number, size = RANGE_PIECE.unpack_from(reply.body, pos)
        pos += RANGE_PIECE.size
        topic = topics[number & ~RANGE_REFUSED]
        found[topic] = (bool(number & RANGE_REFUSED), found[topic][1] + reply.body[pos : pos + size])
        pos += size
    return found


@pytest.mark.parametrize("opens", [False, True])
def test_of_many_ranges_only_those_that_cannot_be_read_are_refused(make_nsqd: Callable[..., Nsqd], opens: bool) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    bodies = {topic: _publish(daemon, topic, 500) for topic in ("before", "broken", "behind")}
    files = sorted(daemon.data_path.glob("**/t.broken/*.log"))
    _break_file(files[0] if opens else files[-1], opens=opens)
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    before = len(os.listdir(descriptors))
    for _ in range(5):
        found = _read_many(daemon, *bodies)
        assert {topic: refused for topic, (refused, _) in found.items()} == {
            "before": False,
            "broken": True,
            "behind": False,
        }
        for topic in ("before", "behind"):
            assert [record.body for record in decode(found[topic][1])] == bodies[topic]
        why = json.loads(found["broken"][1])
        assert (why["topic"], why["status"], why["message"]) == ("broken", 503, "DISK_ERROR")
    eventually(lambda: len(os.listdir(descriptors)) <= before)
    assert "Traceback" not in daemon.log
