"""Uses the Log API as its tests need it: ranges are decoded by the log's own reader of batches."""

import http.client
import struct
import urllib.parse
from dataclasses import dataclass
from typing import Any

from harness import Nsqd, mpub_messages
from nsquark.wire.batch_format import HEADER_BYTES, StoredBatch, scan
from nsquark.wire.record import SEQ_MASK


@dataclass(frozen=True)
class Record:
    seq: int
    timestamp_ns: int
    body: bytes


def info(daemon: Nsqd, topic: str, **query: Any) -> dict[str, Any]:
    return answer(daemon, "GET", "/log/info", topic=topic, **query)


def plan(daemon: Nsqd, topic: str, low: int, high: int, **query: Any) -> dict[str, Any]:
    return answer(daemon, "GET", "/log/plan", topic=topic, **{"from": low, "to": high}, **query)


def answer(daemon: Nsqd, method: str, path: str, body: bytes = b"", /, **query: Any) -> dict[str, Any]:
    reply = daemon.request(method, f"{path}?{urllib.parse.urlencode(query)}", body)
    assert reply.status == 200, (reply.status, reply.text)
    fields: dict[str, Any] = reply.json()
    return fields


def refusal(daemon: Nsqd, method: str, path: str, body: bytes = b"", /, **query: Any) -> tuple[int, dict[str, Any]]:
    reply = daemon.request(method, f"{path}?{urllib.parse.urlencode(query)}", body)
    assert reply.status != 200, reply.text
    return reply.status, reply.json()


def read_raw(daemon: Nsqd, topic: str, low: int, high: int) -> bytes:
    reply = daemon.get("/log/read", topic=topic, **{"from": low, "to": high})
    assert reply.status == 200, (reply.status, reply.text)
    assert reply.headers["Content-Type"] == "application/octet-stream"
    return reply.body


def read_all(daemon: Nsqd, topic: str) -> list[Record]:
    return read(daemon, topic, 0, info(daemon, topic)["next"])


def read(daemon: Nsqd, topic: str, low: int, high: int) -> list[Record]:
    """Returns the messages of a range: what lies around it in the same batches is left out, as any reader must."""
    return [record for record in decode(read_raw(daemon, topic, low, high)) if low <= record.seq < high]


def decode(raw: bytes) -> list[Record]:
    """Returns all messages of a piece of the log, which must consist of intact batches and nothing else."""
    records: list[Record] = []
    end = 0
    for batch in scan(memoryview(raw), 0):
        assert isinstance(batch, StoredBatch), batch
        assert batch.offset == end
        end = batch.end
        found = _records(raw[batch.offset + HEADER_BYTES : batch.end])
        assert [record.seq for record in found] == list(range(batch.first_seq, batch.next_seq))
        records += found
    assert end == len(raw)
    return records


def _records(payload: bytes) -> list[Record]:
    records = []
    pos = 0
    while pos < len(payload):
        size, kind, timestamp_ns, attempts, message_id = struct.unpack_from(">IIqH16s", payload, pos)
        assert (kind, attempts) == (2, 1)
        records.append(Record(int(message_id, 16) & SEQ_MASK, timestamp_ns, payload[pos + 34 : pos + 4 + size]))
        pos += 4 + size
    return records


def stage(daemon: Nsqd, topic: str, token: str, part: int, bodies: list[bytes]) -> dict[str, Any]:
    return answer(daemon, "POST", "/log/stage", mpub_messages(bodies), topic=topic, token=token, part=part)


def append(daemon: Nsqd, topic: str, token: str, **query: Any) -> dict[str, Any]:
    return answer(daemon, "POST", "/log/append", topic=topic, token=token, **query)


def begin(daemon: Nsqd, method: str, path: str, body: bytes = b"", **query: Any) -> http.client.HTTPConnection:
    """Sends a request and leaves its answer to be read later."""
    connection = http.client.HTTPConnection(*daemon.http, timeout=20)
    connection.request(method, f"{path}?{urllib.parse.urlencode(query)}", body if method == "POST" else None)
    return connection
