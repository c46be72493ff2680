"""Encodes frames from nsqd to a client: int32 size, int32 type, data; size counts the type and the data."""

import struct
from enum import IntEnum

from nsquark.wire.record import BODY_AT, HEAD, TIMESTAMP_AT

MAGIC_V1 = b"  V1"
MAGIC_V2 = b"  V2"

_PREFIX = struct.Struct(">ii")

MESSAGE_HEADER_BYTES = BODY_AT - TIMESTAMP_AT
"""Counts the bytes of timestamp, attempts and id, which stand before a message's body."""


class FrameType(IntEnum):
    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2


def frame(kind: FrameType, data: bytes) -> bytes:
    return _PREFIX.pack(4 + len(data), kind) + data


def message_frame(timestamp_ns: int, attempts: int, message_id: bytes, body: bytes) -> bytes:
    size = 4 + MESSAGE_HEADER_BYTES + len(body)
    return HEAD.pack(size, FrameType.MESSAGE, timestamp_ns, attempts, message_id) + body


OK = frame(FrameType.RESPONSE, b"OK")
CLOSE_WAIT = frame(FrameType.RESPONSE, b"CLOSE_WAIT")
HEARTBEAT = frame(FrameType.RESPONSE, b"_heartbeat_")
