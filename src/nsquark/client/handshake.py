"""Brings an open socket to a connection ready for commands: IDENTIFY, then TLS, compression and AUTH as granted."""

from __future__ import annotations

import time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nsquark.client.config import Config
from nsquark.client.connection import HEARTBEAT, NsqdConnection, Receiver
from nsquark.client.errors import AuthFailed, IdentifyFailed, NotConnected, NsqError
from nsquark.client.patience import within
from nsquark.wire import commands
from nsquark.wire.compression import DeflateDecoder, DeflateEncoder, SnappyDecoder, SnappyEncoder
from nsquark.wire.documents import decode_json
from nsquark.wire.frames import MAGIC_V2, FrameType

RDY_COUNT_MAX_DEFAULT: Final = 2500
"""This is the highest RDY count of an nsqd that is too old to negotiate."""
MSG_TIMEOUT_DEFAULT_MS: Final = 60_000
MAX_MSG_TIMEOUT_DEFAULT_MS: Final = 900_000
RDY_COUNT_MAX: Final = (1 << 63) - 1
MSG_TIMEOUT_MS_MAX: Final = RDY_COUNT_MAX // 10**6
"""These are the largest that nsqd can be told: it counts time in ns, and has 63 bits for it."""
OK: Final = b"OK"


class Features(msgspec.Struct, frozen=True):
    """Holds what nsqd answered to IDENTIFY. What no honest nsqd answers is refused."""

    max_rdy_count: Annotated[int, Meta(ge=1, le=RDY_COUNT_MAX)] = RDY_COUNT_MAX_DEFAULT
    msg_timeout: Annotated[int, Meta(ge=1, le=MSG_TIMEOUT_MS_MAX)] = MSG_TIMEOUT_DEFAULT_MS
    max_msg_timeout: Annotated[int, Meta(ge=1, le=MSG_TIMEOUT_MS_MAX)] = MAX_MSG_TIMEOUT_DEFAULT_MS
    max_msg_size: int = 0
    max_body_size: int = 0
    """The largest message and the largest body are told by our nsqd alone; 0 means unknown."""
    requeue_uncounted: bool = False
    """Tells whether nsqd can take the attempt of a delivery back; ours alone can."""
    version: str = ""
    tls_v1: bool = False
    deflate: bool = False
    deflate_level: Annotated[int, Meta(ge=-1, le=9)] = 6
    snappy: bool = False
    auth_required: bool = False


async def connect(address: str, config: Config, receiver: Receiver) -> tuple[NsqdConnection, Features]:
    """Connects; raises an NsqError, whatever the peer answers: who connects tries again later, and would not after any
    other.
    """
    connection = NsqdConnection(address, config)
    seconds = config.read_timeout.seconds
    try:
        await connection.open()
        async with within(seconds):
            features = await _set_up(connection, config)
        connection.begin(receiver)
    except BaseException as error:
        reason: BaseException = error
        if isinstance(error, TimeoutError):
            reason = NotConnected(f"{address}: not set up within {seconds:g} s (read_timeout)")
        elif isinstance(error, Exception) and not isinstance(error, NsqError):
            reason = IdentifyFailed(f"{address}: failed to IDENTIFY - {error!r}")
        connection.abort(reason if isinstance(reason, NsqError) else NotConnected(f"{address}: {error!r}"))
        if reason is error:
            raise
        raise reason from error
    return connection, features


async def _set_up(connection: NsqdConnection, config: Config) -> Features:
    sent_s = time.monotonic()
    connection.send(MAGIC_V2 + commands.identify(config.identify_body()))
    answer = await _answer(connection, IdentifyFailed, "failed to IDENTIFY - ")
    connection.round_trip_s = time.monotonic() - sent_s
    try:
        features = decode_json(answer, Features) if answer.startswith(b"{") else Features()
    except ValueError as error:
        raise IdentifyFailed(f"{connection.address}: failed to IDENTIFY - {error}") from None
    if config.tls_v1 and not features.tls_v1:
        # go-nsq goes on in clear; who asked for TLS has a secret or data that must not be seen.
        raise IdentifyFailed(f"{connection.address}: TLS was asked for (tls_v1) and this nsqd offers none")
    if features.tls_v1:
        await connection.start_tls(config.ssl_context())
        await _expect_ok(connection, "TLS")
    if features.deflate:
        connection.compress(DeflateDecoder(), DeflateEncoder(features.deflate_level))
        await _expect_ok(connection, "Deflate")
    if features.snappy:
        connection.compress(SnappyDecoder(), SnappyEncoder())
        await _expect_ok(connection, "Snappy")
    if features.auth_required:
        await _authenticate(connection, config)
    return features


async def _authenticate(connection: NsqdConnection, config: Config) -> None:
    if not config.auth_secret:
        raise AuthFailed(f"{connection.address}: Auth Required - set auth_secret")
    connection.send(commands.auth(config.auth_secret.encode()))
    await _answer(connection, AuthFailed, "Error authenticating ")


async def _expect_ok(connection: NsqdConnection, step: str) -> None:
    if await _answer(connection, IdentifyFailed, f"{step} upgrade failed - ") != OK:
        raise IdentifyFailed(f"{connection.address}: invalid response from {step} upgrade")


async def _answer(connection: NsqdConnection, failure: type[NsqError], prefix: str) -> bytes:
    while True:
        kind, data = await connection.next_frame()
        if kind == FrameType.ERROR:
            raise failure(f"{connection.address}: {prefix}{data.decode('utf-8', 'replace')}")
        if data != HEARTBEAT:
            return data
        connection.send(commands.NOP)
