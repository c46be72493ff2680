"""Consuming a channel from many nsqds, as go-nsq does it.

A message's way: `Subscription` makes it of what the connection brought, it waits in the `Inbox`, an iteration or one of
the `Handlers` of `run` takes it, and its answer goes back through its subscription. `Flow` decides how many come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Final, Self, Unpack

from nsquark.cli.logs import library_log
from nsquark.client.batches import Batches
from nsquark.client.checks import check_name
from nsquark.client.config import Config, Options
from nsquark.client.dedupe import Dedupe, DedupeStore, settled
from nsquark.client.errors import Closed, ConfigError, NsqError
from nsquark.client.flow import Flow
from nsquark.client.handlers import Handler, Handlers
from nsquark.client.inbox import LOOP_TURN_S, Inbox
from nsquark.client.lookup import AddressFilter
from nsquark.client.members import Members
from nsquark.client.message import Message
from nsquark.client.subscription import Subscription

CLOSE_TIMEOUT_S: Final = 30.0
BUSY_COPY_DELAY_S: Final = 1.0
"""When a copy comes again whose twin is being worked on."""
TOUCHES_PER_TIMEOUT: Final = 3
TOUCH_TIMEOUT_S_MAX: Final = 60.0

log = library_log("nsquark.client")


@dataclass(frozen=True)
class Stats:
    """Totals since the start, and what is now."""

    received: int
    finished: int
    requeued: int
    expired: int
    """Not handled: they waited here until nsqd had taken them back."""
    given_up: int
    duplicates: int
    connections: int
    in_flight: int
    backoff_level: int


class Consumer:
    """Everything in the inbox is in flight on a subscription that is connected."""

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd: Iterable[str] | str = (),
        lookupd: Iterable[str] | str = (),
        config: Config | None = None,
        dedupe: DedupeStore | bool = False,
        envelope: bool = False,
        auto_touch: bool = False,
        on_give_up: Callable[[Message], object] | None = None,
        address_filter: AddressFilter | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_name("topic", topic)
        check_name("channel", channel)
        self.topic = topic
        self.channel = channel
        self.config = Config.merge(config, options)
        self._nsqds = [nsqd] if isinstance(nsqd, str) else list(dict.fromkeys(nsqd))
        self._lookupds = [lookupd] if isinstance(lookupd, str) else list(lookupd)
        self._dedupe: DedupeStore | None = Dedupe() if dedupe is True else None if dedupe is False else dedupe
        self.opens_envelopes = envelope or self._dedupe is not None
        """Others see them in front of the body: a body that only looks like one must arrive as it is."""
        self._key_prefix = f"{topic}/{channel}/".encode()
        """Every channel gets each key, and two of them may share a store."""
        self._auto_touch = auto_touch
        self._on_give_up = on_give_up
        self._filter = address_filter
        self._noting: set[asyncio.Future[None]] = set()
        """What a store of keys still has to write."""
        self._inbox = Inbox()
        self._handlers = Handlers(self._next, topic)
        self._touch_timer: asyncio.TimerHandle | None = None
        self._paused_at: int | None = None
        self._is_started = self._is_stopped = self._is_closing = False
        self._stopping: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None
        self._received = self._finished = self._requeued = self._expired = self._given_up = self._duplicates = 0

    # -- life --------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connects, as `async with` does.

        Fails if there is no nsqlookupd and none of the given nsqds can be reached; one that cannot is tried again.
        """
        if self._is_started:
            raise NsqError("the consumer was started before: make a new one")
        if self._is_stopped:
            raise Closed(f"{self.topic}/{self.channel}: stopped")
        if not self._nsqds and not self._lookupds:
            raise ConfigError("give the consumer an nsqd (host:4150) or an nsqlookupd (host:4161)")
        self._loop = asyncio.get_running_loop()
        self._members = Members(
            lambda address: Subscription(self, address),
            self._joined,
            self.topic,
            self.channel,
            self.config,
            self._nsqds,
            self._lookupds,
            self._filter,
        )
        self._flow = Flow(self.config)
        self._is_started = True
        try:
            await self._members.start()
        except BaseException:
            await self.close()
            raise
        return self

    def stop(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends iterations and `run` when they have dealt with the messages they have. Returns at once.

        For signal handlers and other threads; it is `close` (or the end of `async with`) that then disconnects.

        timeout: seconds after which what is still being handled is cancelled and given back.
        """
        self._is_stopped = True
        if self._is_started and not self._is_closing:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all of this with it
                self._loop.call_soon_threadsafe(self._stop, timeout)

    def _stop(self, timeout_s: float) -> None:
        if self._stopping is None and not self._is_closing:
            self._stopping = self._loop.call_later(timeout_s, self._end_late)
            self._stop_taking()

    def _end_late(self) -> None:
        self._closing = self._loop.create_task(self.close(0), name=f"nsquark close {self.topic}")

    def _stop_taking(self) -> None:
        self._is_stopped = True
        self._flow.change_max_in_flight(0)
        self._give_back(self._inbox.ready)
        self._inbox.wake_all()

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends in order: handlers of `run` finish the message they have, within `timeout` seconds; what was prefetched,
        and what an iteration took and did not answer, goes back to nsqd; then the connections are closed.
        """
        if self._is_closing or not self._is_started:
            self._is_closing = self._is_stopped = True
            if self._closed is not None and not self._handlers.is_one_of_them:
                await asyncio.shield(self._closed)
            return
        self._is_closing = True
        self._closed = self._loop.create_future()
        reason = Closed(f"{self.topic}/{self.channel}: stopped")
        try:
            await self._close_in_order(reason, timeout)
        finally:  # whoever cancels this wants an end, not open connections
            self._members.end(reason)
            self._flow.close()
            self._closed.set_result(None)

    async def _close_in_order(self, reason: Closed, timeout_s: float) -> None:
        for timer in (self._touch_timer, self._stopping):
            if timer is not None:
                timer.cancel()
        self._stop_taking()
        try:
            await self._members.stop_finding()
            await self._handlers.end(timeout_s)
        finally:
            for subscription in self._members.subscriptions.values():
                self._give_back(subscription.in_flight)
        await self._members.close(reason, timeout_s)
        if self._noting:
            await asyncio.wait(self._noting, timeout=timeout_s)

    def _give_back(self, messages: Iterable[Message]) -> None:
        for message in list(messages):
            message.requeue(0, backoff=False)
        self._inbox.ready = deque(message for message in self._inbox.ready if not message.is_answered)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- taking messages ---------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def get(self, timeout: float | None = None) -> Message | None:
        """The next message; None if there was none in time, or the consumer was stopped.

        timeout: seconds to wait; 0 takes what is here already, None waits for ever.
        """
        self._check_started()
        return await self._next(None if timeout is None else self._loop.time() + timeout)

    def batches(self, max_messages: int = 500, max_wait: float | timedelta = 0.2) -> Batches:
        """An iteration that brings a `Batch` each time: `async for batch in consumer.batches():`.

        max_messages: at most so many in a batch. As many must be allowed by max_in_flight to come together.
        max_wait: seconds that the first message of a batch waits for others.
        """
        return Batches(self._next, self._has_all, max_messages, max_wait)

    def _has_all(self) -> bool:
        """No more can come before something is answered."""
        return not self._inbox.ready and all(len(nsqd.in_flight) >= nsqd.rdy for nsqd in self._subscriptions())

    async def _next(self, deadline_s: float | None = None) -> Message | None:
        """The next message, for whom the loop's clock does not reach the deadline; None then, and at the end."""
        self._check_started()
        while True:
            if time.monotonic() - self._inbox.loop_turn_at_s > LOOP_TURN_S:
                await self._inbox.let_loop_turn()
            message = self._take()
            if message is None:
                if self._is_stopped or (deadline_s is not None and self._loop.time() >= deadline_s):
                    return None
                await self._inbox.wait(deadline_s)
            elif self._dedupe is None or message.key is None or await self._is_first_copy(message, message.key):
                return message

    async def run(self, handler: Handler, concurrency: int = 1, threads: int = 0) -> None:
        """Handles messages until the consumer is closed: finished when the handler returns, requeued when it raises.

        An async handler runs `concurrency` times at once. A plain function runs in the event loop, where it is alone
        while it runs; one that blocks needs `threads`, in which case that many run at once.
        """
        self._check_started()
        await self._handlers.run(handler, concurrency, threads)

    def _take(self) -> Message | None:
        """The next message that is still worth handling."""
        ready = self._inbox.ready
        attempts_max = self.config.max_attempts or 65_536
        now_s = self._loop.time() if ready else 0.0
        while ready:
            message = ready.popleft()
            if message.deadline_s < now_s:
                self._expired += 1
                message.subscription.drop(message)
            elif message.attempts > attempts_max:
                self._give_up(message)
            else:
                return message
        return None

    def _give_up(self, message: Message) -> None:
        log.warning("message %s attempted %d times, giving up", message.id.decode(), message.attempts - 1)
        self._given_up += 1
        if self._on_give_up is not None:
            try:
                self._on_give_up(message)
            except Exception:
                log.exception("on_give_up failed for message %s", message.id.decode())
        message.finish()

    async def _is_first_copy(self, message: Message, key: bytes) -> bool:
        assert self._dedupe is not None
        try:
            claim = await settled(self._dedupe.claim(self._key_prefix + key))
        except BaseException as error:
            message.key = None
            if not message.settle(error):
                raise
            return False
        if claim == "new":
            return True
        self._duplicates += 1
        message.key = None  # the claim is another's
        if claim == "seen":
            message.finish()
        else:
            message.requeue(BUSY_COPY_DELAY_S, backoff=False)
        return False

    def _note(self, outcome: Awaitable[None] | None) -> None:
        """A store that needs time to write gets it, without holding the message's answer back."""
        if outcome is not None:
            noting: asyncio.Future[None] = asyncio.ensure_future(outcome)
            self._noting.add(noting)
            noting.add_done_callback(self._noted)

    def _noted(self, noting: asyncio.Future[None]) -> None:
        self._noting.discard(noting)
        if not noting.cancelled() and (error := noting.exception()) is not None:
            log.error("the store of keys failed: a copy may be handled again", exc_info=error)

    # -- what subscriptions report -----------------------------------------------------------------------

    def messages_received(self, messages: list[Message]) -> None:
        self._received += len(messages)
        if self._is_stopped or messages[0].subscription.is_leaving:
            self._give_back(messages)
            return
        self._inbox.put(messages)

    def message_finished(self, message: Message, is_sent: bool) -> None:
        """Not sent means that the connection was lost meanwhile: nsqd will deliver the message again."""
        if message.key is not None and self._dedupe is not None:
            self._note(self._dedupe.done(self._key_prefix + message.key))
        if is_sent:
            self._finished += 1
        if self._flow.level:
            self._flow.succeeded()

    def message_requeued(self, message: Message, is_sent: bool, backoff: bool) -> None:
        if message.key is not None and self._dedupe is not None:
            self._note(self._dedupe.release(self._key_prefix + message.key))
        if is_sent:
            self._requeued += 1
        if backoff:
            self._flow.failed()
        elif self._flow.level:
            self._flow.went_on()

    def requeue_delay_s(self, attempts: int) -> float:
        config = self.config
        return min(config.default_requeue_delay.seconds * attempts, config.max_requeue_delay.seconds)

    def _joined(self, subscription: Subscription) -> None:
        self._flow.join(subscription)
        if self._auto_touch:
            self._touch_all()

    def subscription_lost(self, subscription: Subscription, reason: NsqError) -> None:
        self._inbox.ready = deque(message for message in self._inbox.ready if message.subscription is not subscription)
        self._flow.leave(subscription)
        self._members.lost(subscription, reason)

    # -- at run time -------------------------------------------------------------------------------------

    async def connect_to_nsqd(self, address: str) -> None:
        """Raises what went wrong; after a later loss the connection is made again."""
        self._check_started()
        await self._members.connect_to_nsqd(address)

    async def disconnect_from_nsqd(self, address: str) -> None:
        """Returns when what is being handled from there is answered; what was prefetched goes back."""
        self._check_started()
        subscription = self._members.subscriptions.get(address)
        if subscription is not None:
            self._flow.leave(subscription)
            subscription.is_leaving = True
            subscription.set_rdy(0)  # else nsqd sends again at once what it gets back
            self._give_back(message for message in self._inbox.ready if message.subscription is subscription)
        await self._members.disconnect_from_nsqd(address, CLOSE_TIMEOUT_S)

    def connect_to_nsqlookupd(self, address: str) -> None:
        self._check_started()
        self._members.connect_to_nsqlookupd(address)

    def disconnect_from_nsqlookupd(self, address: str) -> None:
        """The last one cannot be removed."""
        self._check_started()
        self._members.disconnect_from_nsqlookupd(address)

    def change_max_in_flight(self, count: int) -> None:
        """0 pauses."""
        self._check_started()
        if count < 0:
            raise ConfigError(f"invalid max_in_flight ! {count} < 0")
        self._paused_at = None
        if not self._is_stopped:
            self._flow.change_max_in_flight(count)

    def pause(self) -> None:
        """What is in flight is dealt with, and no more comes until `unpause`."""
        self._check_started()
        if self._paused_at is None:
            self._paused_at = self._flow.max_in_flight
            self._flow.change_max_in_flight(0)

    def unpause(self) -> None:
        if self._paused_at is not None:
            count, self._paused_at = self._paused_at, None
            self.change_max_in_flight(count)

    def _check_started(self) -> None:
        if not self._is_started:
            raise NsqError("the consumer is not started: use `async with`, or await its `start` first")

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    @property
    def is_starved(self) -> bool:
        """Some connection waits for answers before it sends more: who gathers messages should work off what it has."""
        return any(subscription.is_starved for subscription in self._subscriptions())

    @property
    def connections(self) -> list[str]:
        return [subscription.address for subscription in self._subscriptions()]

    def _subscriptions(self) -> list[Subscription]:
        return list(self._members.subscriptions.values()) if self._is_started else []

    def stats(self) -> Stats:
        return Stats(
            received=self._received,
            finished=self._finished,
            requeued=self._requeued,
            expired=self._expired,
            given_up=self._given_up,
            duplicates=self._duplicates,
            connections=len(self._subscriptions()),
            in_flight=sum(len(subscription.in_flight) for subscription in self._subscriptions()),
            backoff_level=self._flow.level if self._is_started else 0,
        )

    def _touch_all(self) -> None:
        """Before its timeout, everything that someone works on."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
        timeout_s = TOUCH_TIMEOUT_S_MAX
        waiting = set(self._inbox.ready)
        for subscription in self._subscriptions():
            timeout_s = min(timeout_s, subscription.timeout_s)
            for message in subscription.in_flight - waiting:
                message.touch()
        self._touch_timer = self._loop.call_later(timeout_s / TOUCHES_PER_TIMEOUT, self._touch_all)
