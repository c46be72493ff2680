"""Encodes commands from a client to nsqd as bytes, without I/O."""

import struct
from typing import Final

import msgspec

NOP: Final = b"NOP\n"
CLS: Final = b"CLS\n"

_SIZE = struct.Struct(">I")
_size = _SIZE.pack


class MpubBody(msgspec.Struct, frozen=True):
    """Has messages laid out as MPUB wants them: int32 count, then int32 size and bytes of each."""

    data: bytes | bytearray
    count: int


def identify(body: bytes) -> bytes:
    return b"IDENTIFY\n" + _size(len(body)) + body


def auth(secret: bytes) -> bytes:
    return b"AUTH\n" + _size(len(secret)) + secret


def sub(topic: str, channel: str) -> bytes:
    return f"SUB {topic} {channel}\n".encode()


def pub(topic: bytes, body: bytes) -> bytes:
    return b"PUB %b\n%b%b" % (topic, _size(len(body)), body)


def dpub(topic: bytes, delay_ms: int, body: bytes) -> bytes:
    return b"DPUB %b %d\n%b%b" % (topic, delay_ms, _size(len(body)), body)


def mpub(topic: bytes, body: MpubBody) -> bytes:
    return b"".join((b"MPUB ", topic, b"\n", _size(len(body.data)), body.data))


def rdy(count: int) -> bytes:
    return b"RDY %d\n" % count


def req(message_id: bytes, delay_ms: int) -> bytes:
    return b"REQ %b %d\n" % (message_id, delay_ms)


def req_uncounted(message_id: bytes, delay_ms: int) -> bytes:
    """Encodes a REQ for an nsqd that offers `requeue_uncounted`: the delivery does not count as an attempt."""
    return b"REQ %b %d uncounted\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    return b"TOUCH %b\n" % message_id


def fin_all(message_ids: list[bytes]) -> bytes:
    """Encodes a FIN for each message, in one piece: joining costs a third of formatting each."""
    return b"FIN " + b"\nFIN ".join(message_ids) + b"\n"
