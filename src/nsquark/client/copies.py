"""Uses a consumer's store of keys: claims each message, and tells the store how it ended."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, get_args

from nsquark.client.dedupe import Claim, DedupeStore
from nsquark.client.errors import NsqError
from nsquark.client.logs import Log, shown_id
from nsquark.client.message import Message
from nsquark.client.tasks import is_cancelled

BUSY_COPY_DELAY_S: Final = 1.0
"""A copy whose twin is being worked on comes again after this delay."""
CLAIMS: Final = get_args(Claim)
CLAIM_AND_RELEASE: Final = 2
"""Counts the writes that a message may cost the store, one after the other."""

WRITES_MAX: Final = 10_000
"""While a store has so many writes to end, no more messages are claimed: one that hangs would gather them for ever."""


class Copies:
    """Claims messages. Invariant: a message is in `_claimed` only while the store's claim is this message's: its copies
    have the same key, and the claim of another, perhaps in another process, is not ours to release.

    A message that `run` will answer when its handler ends keeps its claim until then. Others may never be answered:
    those that an iteration or `get` took, or whose handler disabled the answer. Their claim ends with their timeout, or
    with the consumer; if they are finished later, they count as seen all the same.
    """

    def __init__(self, store: DedupeStore, topic: str, channel: str, log: Log) -> None:
        self._store = store
        self._log = log
        self._prefix = f"{topic}/{channel}/".encode()
        """Stands before each key: every channel gets each key, and two of them may share a store."""
        self._claimed: dict[Message, bool] = {}
        """Has the messages with a claim; True for those that an iteration or `get` took."""
        self._writes: set[asyncio.Future[Any]] = set()
        """Has the writes that the store still has to end."""
        self._asking: set[asyncio.Future[Claim]] = set()
        """Has what those wait for who asked the store for a claim."""
        self._has_room = asyncio.Event()
        """Is set until these are WRITES_MAX, then again when half of them are left, and from the end on."""
        self._has_room.set()
        self._is_ending = False
        self.count = 0
        """Counts the copies that were found and not handled again."""

    async def is_first(self, message: Message) -> bool:
        """Tells whether the message is to be handled; if not, it is answered, perhaps while the store was asked."""
        message.key = message.key or f"{message.nsqd_address}/".encode() + message.id
        key = self._prefix + message.key
        try:
            if not self._has_room.is_set() and not await self._is_room_made(message):
                return False
            claim = await self._claim(key)
            if claim not in CLAIMS:
                raise NsqError(f"the store's claim returned {claim!r}, not one of {CLAIMS}")
        except Exception as error:
            self._log.error(
                "the store of keys failed: message %s of %s comes again",
                shown_id(message.id),
                message.nsqd_address,
                exc_info=error,
            )
            message.give_back(None, backoff=True)
            return False
        except BaseException:
            message.give_back()
            raise
        if claim == "new":
            message.claim = key
            self._claimed[message] = False
            if message.is_answered:
                self.requeued(message)
            return not message.is_answered
        self.count += 1
        if claim == "seen":
            message.finish()
        else:
            message.give_back(BUSY_COPY_DELAY_S)
        return False

    def finished(self, message: Message) -> None:
        if message.claim is not None:
            self._claimed.pop(message, None)
            self._tell_store(self._store.done, message.claim)

    def requeued(self, message: Message) -> None:
        self._release(message)
        message.claim = None

    def taken(self, message: Message) -> None:
        """Is told that an iteration or `get` took a message."""
        self._claimed[message] = True

    def end_claims(self, now_s: float) -> None:
        """Releases the claims of messages that were not answered in time and that `run` will not answer."""
        for message, is_taken in list(self._claimed.items()):
            if message.deadline_s <= now_s and (is_taken or not message.auto_response):
                self._release(message)

    def claim_no_more(self) -> None:
        """Lets those who wait for the store give their messages back."""
        self._is_ending = True
        self._has_room.set()

    async def end(self, timeout_s: float) -> None:
        """Releases what may never be answered, and waits for what the store still writes."""
        self.end_claims(math.inf)
        for asking in self._asking:  # or an iteration would wait for a store that hangs
            asking.cancel()
        late: set[asyncio.Future[Any]] = set()
        for _ in range(CLAIM_AND_RELEASE):
            if self._writes - late:
                _, late = await asyncio.wait(self._writes, timeout=timeout_s)
        if late:
            self._log.warning(
                "the store of keys had %d writes to end %g s after the stop: copies may be handled again",
                len(late),
                timeout_s,
            )

    async def _is_room_made(self, message: Message) -> bool:
        """Waits until the store has ended writes; False if the message is answered by then."""
        await self._has_room.wait()
        if self._is_ending:
            message.give_back()
        return not message.is_answered

    async def _claim(self, key: bytes) -> Claim:
        """Claims a key. Who is cancelled while the store works on it leaves no claim behind."""
        outcome = self._store.claim(key)
        if not inspect.isawaitable(outcome):
            return outcome
        claiming = asyncio.ensure_future(outcome)
        asking = asyncio.shield(claiming)
        self._asking.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            if claiming.cancelled() and not is_cancelled():
                raise NsqError("the store of keys was cancelled") from None
            self._begin_write(claiming)
            claiming.add_done_callback(lambda _: self._claimed_for_nobody(key, claiming))
            if asking.cancelled() and not is_cancelled():
                raise NsqError("the consumer ended before the store of keys answered") from None
            raise
        finally:
            self._asking.discard(asking)

    def _claimed_for_nobody(self, key: bytes, claiming: asyncio.Future[Claim]) -> None:
        self._is_written(claiming)
        if not claiming.cancelled() and claiming.exception() is None and claiming.result() == "new":
            self._tell_store(self._store.release, key)

    def _release(self, message: Message) -> None:
        if self._claimed.pop(message, None) is not None:
            assert message.claim is not None
            self._tell_store(self._store.release, message.claim)

    def _tell_store(self, method: Callable[[bytes], Awaitable[None] | None], key: bytes) -> None:
        """Lets a store that needs time write, without holding the message's answer back."""
        try:
            outcome = method(key)
        except Exception as error:
            self._failed(error)
            return
        if inspect.isawaitable(outcome):
            write: asyncio.Future[Any] = asyncio.ensure_future(outcome)
            self._begin_write(write)
            write.add_done_callback(self._is_written)

    def _begin_write(self, write: asyncio.Future[Any]) -> None:
        self._writes.add(write)
        if len(self._writes) >= WRITES_MAX and self._has_room.is_set() and not self._is_ending:
            self._has_room.clear()
            self._log.warning("the store of keys has %d writes to end: messages wait for it", len(self._writes))

    def _is_written(self, write: asyncio.Future[Any]) -> None:
        self._writes.discard(write)
        if len(self._writes) <= WRITES_MAX // 2:  # not earlier, or each message would wait, and be told of
            self._has_room.set()
        if not write.cancelled() and (error := write.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._log.error("the store of keys failed: a copy may be handled again", exc_info=error)
