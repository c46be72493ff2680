"""Reads what the sink's tests look at: the messages in an nsqd's log."""

from collections import Counter
from typing import Any

from harness import Nsqd
from nsquark.kernel.frames import FrameScanner
from nsquark.wire.batch_format import HEADER_BYTES, StoredBatch, scan


def log_bodies(nsqd: Nsqd, topic: str) -> list[bytes]:
    """Returns all bodies of a topic in the order of its log; there are none if there is no such topic."""
    info = nsqd.get("/log/info", topic=topic)
    if info.status == 404:
        return []
    fields: dict[str, Any] = info.json()
    if not fields["count"]:
        return []
    data = nsqd.get("/log/read", topic=topic, **{"from": fields["first"], "to": fields["next"]}).body
    bodies: list[bytes] = []
    for batch in scan(memoryview(data), 0):
        assert isinstance(batch, StoredBatch), batch
        start = batch.offset + HEADER_BYTES
        _, messages, _ = FrameScanner().scan(data, start, start + batch.payload_bytes)
        bodies += [body for *_, body in messages]
    return bodies


def differences(nsqds: list[Nsqd], topic: str, wanted: list[bytes]) -> tuple[int, int]:
    """Counts the wanted messages that are missing, and those that are there and should not be, doubles included."""
    found = Counter(body for nsqd in nsqds for body in log_bodies(nsqd, topic))
    expected = Counter(wanted)
    return (expected - found).total(), (found - expected).total()


def http_address(nsqd: Nsqd) -> str:
    host, port = nsqd.http
    return f"{host}:{port}"
