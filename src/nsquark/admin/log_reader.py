"""Reads one nsqd's log of a topic from the newest message back in pieces of bounded size.

`/log/plan` says where a range may be split, without reading it; the last part is split again until it is small
enough to read as a whole. So a few requests bring the newest messages of a log of any length.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import UpstreamError
from nsquark.admin.filters import NOT_JSON, Body, MessageFilter
from nsquark.client.envelope import NO_HEADERS, Headers, Opened, unwrap
from nsquark.wire.batch_format import HEADER_BYTES, Damage, scan
from nsquark.wire.documents import Int64
from nsquark.wire.record import BODY_AT, ID_AT, record_bytes, timestamp_of

T = TypeVar("T")

PIECE_BYTES: Final = 512 << 10
READ_BYTES_MAX: Final = 32 << 20
"""A piece is made of whole batches, so it may be longer than `PIECE_BYTES`, but not longer than this."""
RECEIVED_BYTES: Final = 256 << 10
PLAN_PARTS_MAX: Final = 64
SPLITS_MAX: Final = 16
"""A part is split at most this often. No log needs as many splits, so an nsqd whose plans do not get smaller is given
up.
"""


class LogMessage(NamedTuple):
    """Holds one message, without its envelope if it had one, and perhaps only the beginning of a long body."""

    node: str
    seq: int
    id: str
    timestamp_ns: int
    size: int
    body: bytes
    is_json: bool
    headers: Headers

    @property
    def is_cut(self) -> bool:
        return len(self.body) < self.size


class LogInfo(msgspec.Struct, kw_only=True):
    """Holds what is used of the answer of /log/info about a topic."""

    first: Int64
    next: Int64
    removed_to: Int64 = 0
    is_stored: bool = True


class LogPart(msgspec.Struct, rename={"low": "from", "high": "to", "size": "bytes"}):
    low: Int64
    high: Int64
    count: Int64
    size: Int64


class LogPlan(LogPart):
    parts: list[LogPart]


class Seq(msgspec.Struct):
    seq: Int64


class Wanted(NamedTuple):
    """Says what is looked for in a piece, and how much of it is kept."""

    filter: MessageFilter
    messages_max: int
    body_bytes_max: int
    opens_envelopes: bool = True


class LogPiece(NamedTuple):
    """Holds the messages found in a piece, newest first. The search went down to `seq`, where the piece begins or
    enough was found.
    """

    messages: list[LogMessage]
    seq: int
    looked_at: int
    oldest_ns: int | None
    damaged: int


def read_piece(data: bytes | bytearray, node: str, low: int, high: int, wanted: Wanted) -> LogPiece:
    """Looks through the batches of an answer of /log/read. It may take a while, so it is called in a thread."""
    view = memoryview(data)
    batches = list(scan(view, 0))
    found: list[LogMessage] = []
    looked_at, oldest_ns = 0, None
    for batch in reversed(batches):
        if isinstance(batch, Damage):
            continue
        starts = _record_starts(view, batch.offset + HEADER_BYTES, batch.end)
        for index in range(len(starts) - 1, -1, -1):
            seq = batch.first_seq + index
            if not low <= seq < high:
                continue
            if len(found) >= wanted.messages_max:
                return LogPiece(found, seq + 1, looked_at, oldest_ns, 0)
            looked_at += 1
            message = _match(view, starts[index], node, seq, wanted)
            oldest_ns = timestamp_of(view, starts[index])
            if message is not None:
                found.append(message)
    return LogPiece(found, low, looked_at, oldest_ns, sum(isinstance(batch, Damage) for batch in batches))


def _record_starts(view: memoryview, pos: int, end: int) -> list[int]:
    starts = []
    while pos + BODY_AT <= end:
        starts.append(pos)
        pos += record_bytes(view, pos)
    return starts


def _match(view: memoryview, pos: int, node: str, seq: int, wanted: Wanted) -> LogMessage | None:
    raw = bytes(view[pos + BODY_AT : pos + record_bytes(view, pos)])
    opened = unwrap(raw) if wanted.opens_envelopes else Opened(None, NO_HEADERS, raw)
    body = Body(raw, opened.body)
    if not wanted.filter.matches(body):
        return None
    return LogMessage(
        node,
        seq,
        bytes(view[pos + ID_AT : pos + BODY_AT]).decode("ascii", "replace"),
        timestamp_of(view, pos),
        len(opened.body),
        opened.body[: wanted.body_bytes_max],
        body.document is not NOT_JSON,
        opened.headers,
    )


class RemoteLog:
    """Asks one nsqd for its log of one topic. Its methods raise UpstreamError, whatever goes wrong."""

    def __init__(self, cluster: ClusterClient, node: str, topic: str) -> None:
        self.node = node
        self._cluster = cluster
        self._topic = quote(topic, safe="")

    async def info(self) -> LogInfo:
        return await self._get("info", "", LogInfo)

    async def at_time(self, time_ms: int) -> int:
        return (await self._get("at", f"&ts_ms={time_ms}", Seq)).seq

    async def plan(self, low: int, high: int, parts: int, limits: str = "") -> LogPlan:
        return await self._get("plan", f"&from={low}&to={high}&parts={parts}{limits}", LogPlan)

    async def read(self, low: int, high: int, wanted: Wanted) -> tuple[LogPiece, int]:
        """Returns what is wanted of a range, and the number of bytes that were read for it."""
        target = f"/log/read?topic={self._topic}&from={low}&to={high}"
        data = bytearray()
        async with self._cluster.request("GET", f"http://{self.node}{target}") as answer:
            if answer.status != 200:
                raise UpstreamError(f"the log cannot be read: {answer.status} {answer.reason}", answer.status)
            async for received in answer.content.iter_chunked(RECEIVED_BYTES):
                data += received
                if len(data) > READ_BYTES_MAX:
                    raise UpstreamError(f"messages from {low} on lie in a batch of more than {READ_BYTES_MAX} bytes")
        return await asyncio.to_thread(read_piece, data, self.node, low, high, wanted), len(data)

    async def _get(self, path: str, arguments: str, kind: type[T]) -> T:
        return await self._cluster.get(self.node, f"/log/{path}?topic={self._topic}{arguments}", kind)


class BackwardReader:
    """Goes back through the range `low <= seq < high` of a log, one piece with every `step`.

    At all times, everything from `seq` on was looked at, and what matched is in `found`, newest first.
    """

    def __init__(self, log: RemoteLog, low: int, high: int) -> None:
        self.log = log
        self.seq = high
        self.frontier_ns: int | None = None
        """This is when the oldest message that was looked at was published; it is None before the first."""
        self.found: list[LogMessage] = []
        self.looked_at = 0
        self.bytes_read = 0
        self.damaged = 0
        self._low = low
        self._parts: list[LogPart] = []
        """These parts lie before `seq`, the newest last."""
        self._is_planned = False

    @property
    def at_start(self) -> bool:
        return self.seq <= self._low or (self._is_planned and not self._parts)

    async def step(self, wanted: Wanted) -> None:
        part = await self._next_part()
        if part is None:
            return
        piece, size = await self.log.read(part.low, part.high, wanted)
        self.bytes_read += size
        self.looked_at += piece.looked_at
        self.damaged += piece.damaged
        self.found += piece.messages
        self.seq = piece.seq
        if piece.oldest_ns is not None:
            self.frontier_ns = piece.oldest_ns
        if piece.seq > part.low:  # enough was found before all of the part was looked at
            self._parts.append(LogPart(part.low, piece.seq, part.count, part.size))

    async def _next_part(self) -> LogPart | None:
        """Returns the newest part that is not read yet, split until it is small enough, or None if all are read."""
        if not self._is_planned:
            self._is_planned = True
            self._parts = await self._split(self._low, self.seq)
        for _ in range(SPLITS_MAX):
            if not self._parts:
                self.seq = self._low
                return None
            part = self._parts.pop()
            if part.size <= PIECE_BYTES or part.count <= 1:
                return part
            smaller = await self._split(part.low, part.high)
            if len(smaller) <= 1:
                return part
            self._parts += smaller
        raise UpstreamError("the log cannot be split into pieces that are small enough to read")

    async def _split(self, low: int, high: int) -> list[LogPart]:
        return joined_parts((await self.log.plan(low, high, PLAN_PARTS_MAX)).parts)


def joined_parts(parts: list[LogPart]) -> list[LogPart]:
    """Joins neighbouring parts as long as they are small enough to be read as one piece."""
    joined: list[LogPart] = []
    for part in reversed(parts):
        last = joined[-1] if joined else None
        if last is not None and last.size + part.size <= PIECE_BYTES:
            joined[-1] = LogPart(part.low, last.high, last.count + part.count, last.size + part.size)
        elif part.count:
            joined.append(part)
    joined.reverse()
    return joined
