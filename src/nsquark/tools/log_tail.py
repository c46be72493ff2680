"""Reads topics from our nsqds' logs, without a channel: from a point in the past to the end, and then what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from nsquark.base.durations import NS_PER_S, NS_PER_US, Duration
from nsquark.client.config import Config
from nsquark.client.errors import NsqError
from nsquark.kernel.frames import FrameScanner
from nsquark.tools.program import Fatal, say
from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.batch_format import HEADER_BYTES, Damage, scan
from nsquark.wire.documents import decode_json

READ_BYTES_MAX: Final = 4 << 20
"""An answer has about this size; a single message may be larger."""
ANSWER_BYTES_MAX: Final = 256 << 20
FOLLOW_S: Final = 30.0
"""nsqd waits this long for the next message before it answers that there is none."""
CONNECT_S_MAX: Final = 5.0
REQUEST_S_MAX: Final = 60.0
RETRY_S: Final = 1.0
OLDEST: Final = "oldest"
NO_LOG: Final = "has no log to read: --from needs an nsqd of nsquark"

T = TypeVar("T")
Record = tuple[int, int, int, bytes, bytes]
"""This is the sequence number, timestamp in ns, attempts, id and body of a message."""


class LogRefused(NsqError):
    """Says that an nsqd does not give its log, and that asking again will not help."""


class _Refusal(msgspec.Struct):
    message: str = ""
    reason: str = ""


class _TopicEnds(msgspec.Struct):
    first: int
    next: int


class _At(msgspec.Struct):
    seq: int


class _RemovedPart(msgspec.Struct):
    to: int


class _Plan(msgspec.Struct):
    from_: int = msgspec.field(name="from")
    to: int
    count: int
    removed: _RemovedPart | None = None


class Start:
    """Says where to begin, as `--from` does: `oldest`, a sequence number, a time, or how long ago (`-10m`)."""

    def __init__(self, text: str) -> None:
        self.seq: int | None = None
        self.time_ns: int | None = None
        if text == OLDEST:
            return
        if text.isascii() and text.isdecimal():
            self.seq = int(text)
        elif text.startswith("-"):
            self.time_ns = time.time_ns() + int(Duration.parse(text))
        else:
            self.time_ns = _time_ns(text)

    @classmethod
    def parse(cls, text: str) -> Start:
        """Reads the value of `--from`, or raises Fatal if it is none of these."""
        try:
            return cls(text)
        except ValueError as error:
            hint = "give oldest, a sequence number, a time (2026-01-31T12:00:00Z) or how long ago (-10m)"
            raise Fatal(f"invalid --from {text}: {error}; {hint}") from None


def _time_ns(text: str) -> int:
    at = datetime.fromisoformat(text)  # local time if it names no zone
    return int(at.timestamp()) * NS_PER_S + at.microsecond * NS_PER_US


class LogTail:
    """Reads one topic from the log of one nsqd, given by its HTTP address, without end."""

    def __init__(self, address: str, topic: str, start: Start, config: Config) -> None:
        self.address = address
        self._topic = topic
        self._start = start
        self._secret = config.auth_secret
        self._position: int | None = None

    async def records(self) -> AsyncIterator[list[Record]]:
        """Yields the records that are there, in lists, and then those that come. It waits for an nsqd that is away."""
        said = ""
        while True:
            try:
                if self._position is None:
                    self._position = await self._find_start()
                info = await self._ask("/log/info", _TopicEnds, after=self._position, wait=FOLLOW_S)
                while self._position < info.next:
                    if found := await self._read(info.next):
                        yield found
                said = ""
            except FetchError as error:
                if str(error) != said:
                    said = str(error)
                    say(f"{said}; trying again")
                await asyncio.sleep(RETRY_S)

    async def _find_start(self) -> int:
        if self._start.seq is not None:
            return self._start.seq
        if self._start.time_ns is not None:
            return (await self._ask("/log/at", _At, ts=max(self._start.time_ns, 0))).seq
        return (await self._ask("/log/info", _TopicEnds)).first

    async def _read(self, head: int) -> list[Record]:
        """Reads the next records, and moves the position behind them."""
        assert self._position is not None
        question = {"from": self._position, "to": head}
        plan = await self._ask("/log/plan", _Plan, **question, max_bytes=READ_BYTES_MAX)
        if plan.removed is not None:
            say(f"{self.address}: messages of {self._topic} from {self._position} to {plan.removed.to} were removed")
        found: list[Record] = []
        if plan.count:
            question = {"from": plan.from_, "to": plan.to}
            found = _parse(await self._fetch("/log/read", question), plan.from_, plan.to)
            if len(found) < plan.count:
                say(f"{self.address}: {plan.count - len(found)} messages of {self._topic} are damaged")
        self._position = plan.to
        return found

    async def _ask(self, path: str, kind: type[T], **question: Any) -> T:
        body = await self._fetch(path, question)
        try:
            return decode_json(body, kind)
        except ValueError:
            raise LogRefused(f"{self.address} {NO_LOG}") from None

    async def _fetch(self, path: str, question: dict[str, Any]) -> bytes:
        url = f"http://{self.address}{path}?{urlencode({'topic': self._topic, **question})}"
        status, _, body = await fetch(
            url,
            secret=self._secret,
            connect_timeout=CONNECT_S_MAX,
            request_timeout=FOLLOW_S + REQUEST_S_MAX,
            response_bytes_max=ANSWER_BYTES_MAX,
        )
        if status == 200:
            return body
        try:
            refusal = decode_json(body, _Refusal)
        except ValueError:
            refusal = _Refusal()
        reason = f" ({refusal.reason})" if refusal.reason else ""
        if status == 503 or refusal.message == "TOPIC_NOT_FOUND":
            raise FetchError(f"{self.address}: {refusal.message or status}{reason}")
        if status == 404:
            raise LogRefused(f"{self.address} {NO_LOG}")
        raise LogRefused(f"{self.address} refused {path} with {status} {refusal.message}{reason}")


def _parse(data: bytes, low: int, high: int) -> list[Record]:
    """Reads the records of a range, and drops those before and after it that its first and last batch have."""
    view = memoryview(data)
    found: list[Record] = []
    for batch in scan(view, 0):
        if isinstance(batch, Damage):
            continue
        payload = bytearray(view[batch.offset + HEADER_BYTES : batch.end])
        _, messages, _ = FrameScanner().scan(memoryview(payload), 0, len(payload))
        found += [(seq, *raw) for seq, raw in enumerate(messages, batch.first_seq) if low <= seq < high]
    return found
