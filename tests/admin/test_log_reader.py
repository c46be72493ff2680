"""Reads pieces of a log, as an answer of /log/read has them, also from an nsqd that lies about its log."""

import json
import time
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from harness import eventually
from harness.http_server import LocalServer, QuietHandler
from harness.nsqadmin import Nsqadmin
from nsquark.admin.filters import Everything, parse_filter
from nsquark.admin.log_reader import PIECE_BYTES, LogPart, Wanted, joined_parts, read_piece
from nsquark.log.writer import encode_header
from nsquark.wire.batch_format import StoredBatch
from nsquark.wire.record import RECORD_OVERHEAD_BYTES, message_id

ALL = Wanted(Everything(), 1000, 1000)


def record(seq: int, body: bytes) -> bytes:
    size = RECORD_OVERHEAD_BYTES - 4 + len(body)
    head = size.to_bytes(4) + (2).to_bytes(4) + (1000 + seq).to_bytes(8) + (1).to_bytes(2)
    return head + message_id(7, seq) + body


def batch(first: int, *bodies: bytes, said: int | None = None) -> bytes:
    payload = b"".join(record(first + place, body) for place, body in enumerate(bodies))
    count = len(bodies) if said is None else said
    return encode_header(StoredBatch(0, first, count, len(payload), 0, 0, 0, bytes(16)), payload) + payload


def seqs(data: bytes, low: int, high: int, wanted: Wanted = ALL) -> list[int]:
    return [message.seq for message in read_piece(data, "node", low, high, wanted).messages]


def test_a_piece_is_read_from_its_end_and_only_within_its_range() -> None:
    data = batch(10, b"a", b"b", b"c") + batch(20, b"d", b"e")
    assert seqs(data, 0, 100) == [21, 20, 12, 11, 10]
    assert seqs(data, 11, 21) == [20, 12, 11]
    assert seqs(data, 30, 40) == []
    newest = read_piece(data, "node", 0, 100, ALL).messages[0]
    assert (newest.body, newest.size, newest.timestamp_ns, newest.id) == (b"e", 1, 1021, message_id(7, 21).decode())


def test_it_stops_when_enough_was_found_and_says_where() -> None:
    data = batch(10, b"a", b"b", b"c") + batch(20, b"d", b"e")
    piece = read_piece(data, "node", 0, 100, Wanted(Everything(), 2, 1000))
    assert ([message.seq for message in piece.messages], piece.seq, piece.looked_at) == ([21, 20], 13, 2)
    piece = read_piece(data, "node", 0, 100, Wanted(parse_filter("a"), 2, 1000))
    assert ([message.seq for message in piece.messages], piece.seq, piece.looked_at) == ([10], 0, 5)


def test_damage_costs_its_batch_and_is_counted() -> None:
    broken = bytearray(batch(10, b"a", b"b"))
    broken[-1] ^= 1
    piece = read_piece(bytes(broken) + batch(20, b"c"), "node", 0, 100, ALL)
    assert ([message.seq for message in piece.messages], piece.damaged) == ([20], 1)
    assert seqs(b"garbage" * 100, 0, 100) == []


@pytest.mark.timeout(20)
def test_a_batch_that_claims_more_than_it_has() -> None:
    assert seqs(batch(10, b"a", said=4_000_000_000), 0, 100) == [10]


def test_small_parts_are_read_together() -> None:
    third = PIECE_BYTES // 3
    parts = [LogPart(place, place + 1, 1, third) for place in range(7)] + [
        LogPart(7, 8, 0, 0),
        LogPart(8, 9, 1, 5 * PIECE_BYTES),
    ]
    joined = joined_parts(parts)
    assert sum(part.count for part in joined) == 8
    assert joined[-1].high == 9
    assert all(part.size <= PIECE_BYTES for part in joined[:-1])


# -- an nsqd that lies -----------------------------------------------------------------------------------

LIES: dict[str, dict[str, Any]] = {
    "plans that never get smaller": {"parts": [{"from": 0, "to": 9, "count": 5, "bytes": 1 << 30}] * 64},
    "plans without an end": {"parts": [{"from": -5, "to": 1 << 62, "count": 1 << 62, "bytes": 1}]},
    "no plan at all": {"parts": "none"},
}


class Liar(QuietHandler):
    lie: dict[str, Any]

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        port = cast(tuple[str, int], self.server.server_address)[1]
        topic = {"topic_name": "t", "channels": [], "depth": 0, "backend_depth": 0, "message_count": 0, "paused": False}
        answers: dict[str, Any] = {
            "/info": {
                "version": "1",
                "broadcast_address": "127.0.0.1",
                "hostname": "h",
                "http_port": port,
                "tcp_port": 1,
            },
            "/stats": {"version": "1.3.0", "health": "OK", "start_time": 1, "topics": [topic]},
            "/log/plan": {"from": 0, "to": 9, "count": 5, "bytes": 1 << 40, **self.lie},
            "/log/read": {"no": "batches"},
        }
        if address.path == "/log/info":
            head = {"topic": "t", "first": 0, "next": 100, "count": 100}
            answer = head if "topic" in parse_qs(address.query) else {"topics": [head], "nsqd_id": "x"}
        else:
            answer = answers.get(address.path, {})
        self.answer(200, json.dumps(answer).encode())


@pytest.fixture(params=LIES)
def liar(request: pytest.FixtureRequest) -> Iterator[str]:
    with LocalServer(type("OneLiar", (Liar,), {"lie": LIES[request.param]})) as server:
        yield server.address


def test_an_nsqd_that_lies_about_its_log_is_an_answer_all_the_same(liar: str) -> None:
    with Nsqadmin(f"--nsqd-http-address={liar}") as admin:
        eventually(lambda: admin.get("/messages/t").status == 200)  # the topic is known
        began_s = time.monotonic()
        reply = admin.get("/messages/t/found.json")
        assert reply.status == 200, reply.text
        page = reply.json()
        assert page["messages"] == []
        assert time.monotonic() - began_s < 19  # nsqadmin's own limit is 8 s
        assert admin.get("/ping").text == "OK"
