"""Consumes a channel from many nsqds, as go-nsq does it.

A message's way: `Subscription` makes it of what the connection brought, it waits in the `Inbox`, an iteration or one of
the `Handlers` of `run` gets it by `Taking`, and its answer goes back through its subscription, which tells the
`Outcomes`. `Flow` decides how many come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Final, Self, Unpack

from nsquark.client.batches import Batches
from nsquark.client.checks import (
    check_address,
    check_addresses,
    check_count,
    check_dedupe,
    check_flag,
    check_name,
    is_async,
    seconds_of,
    wait_seconds_of,
)
from nsquark.client.config import Config, Options
from nsquark.client.copies import Copies
from nsquark.client.dedupe import Dedupe, DedupeStore
from nsquark.client.errors import ANOTHER_LOOP, NOT_STARTED, Closed, ConfigError, NsqError
from nsquark.client.giving_up import GivingUp, Hook
from nsquark.client.handlers import Handler, Handlers, check_handler, stopped_by_signals
from nsquark.client.inbox import FRESH_FRACTION, Inbox
from nsquark.client.keepalive import KeepAlive, Pace, Rounds
from nsquark.client.logs import NamedLog
from nsquark.client.lookupd import AddressFilter, lookup_url
from nsquark.client.message import Message
from nsquark.client.nsqds import ConsumerNsqds
from nsquark.client.outcomes import Outcomes
from nsquark.client.rdy import Flow
from nsquark.client.stats import Stats
from nsquark.client.subscription import Subscription
from nsquark.client.taking import Taking
from nsquark.client.tasks import OwnThreads, ThreadExit, check_function

CLOSE_TIMEOUT_S: Final = 30.0
BLOCKED_S_MIN: Final = 0.5
"""A loop that was blocked for less is not worth a word, nor for less than half a heartbeat interval."""


class Consumer:
    """Brings the messages of one channel, for an iteration or for the handlers of `run`.

    topic: its name.
    channel: its name; consumers of the same channel share its messages.
    nsqd: one or several `host:port`.
    lookupd: HTTP addresses of nsqlookupds, which know the nsqds of the topic.
    config: options, which `options` override.
    dedupe: handles copies of a message once: True for the memory of this process, or a store that processes share.
    envelope: opens envelopes, as `dedupe` does, so that messages have headers.
    auto_touch: touches messages that are being handled until they are answered.
    on_give_up: gets a message that failed max_attempts times or cannot be decoded, before it is finished; may be async.
    address_filter: is given the addresses that nsqlookupds know, and returns those to be used.
    logger: for this consumer's lines, instead of `nsquark.client`.
    """

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
        on_give_up: Hook | None = None,
        address_filter: AddressFilter | None = None,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_name("topic", topic)
        check_name("channel", channel)
        check_dedupe(dedupe)
        check_flag("envelope", envelope)
        check_flag("auto_touch", auto_touch)
        self.topic = topic
        self.channel = channel
        self.config = Config.merge(config, options)
        self.log = NamedLog(logger, f"{topic}/{channel}")
        self._given_nsqds = check_addresses("nsqd", nsqd)
        self._lookupds = check_addresses("lookupd", lookupd)
        for address in self._lookupds:
            lookup_url(address, topic)
        store: DedupeStore | None = Dedupe() if dedupe is True else None if dedupe is False else dedupe
        self._copies = None if store is None else Copies(store, topic, channel, self.log)
        self._opens_envelopes = envelope or store is not None
        self._auto_touch = auto_touch
        if on_give_up is not None:
            check_function(on_give_up, "on_give_up", ConfigError)
        if address_filter is not None:
            check_function(address_filter, "address_filter", ConfigError, "a list of addresses")
            if is_async(address_filter):
                raise ConfigError(f"address_filter is a plain function, which nobody awaits, not {address_filter!r}")
        self._threads = threads = OwnThreads()
        self._inbox = Inbox()
        self._giving_up = GivingUp(
            self.config.max_attempts, on_give_up, self._is_hook_off_loop, self._inbox.wake_all, threads, self.log
        )
        self.calls_hook_off_loop = False
        """The hook is called off the event loop, for `nsquark.sync`, whose hooks may block."""
        self._filter = address_filter
        self._taking = Taking(self._inbox, self._copies, self._giving_up, self._subscriptions, f"{topic}/{channel}")
        self._next_now = self._taking.next_now
        self._outcomes = Outcomes(self._taking, self._inbox, self._copies, self._giving_up)
        self._handlers = Handlers(self._taking.next, self._next_now, threads, topic, self.log)
        self._paused_at: int | None = None
        self._is_started = self._is_closing = False
        self._stopping: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    # -- life --------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connects, as `async with` does.

        Fails if there is no nsqlookupd and none of the given nsqds can be reached; one that cannot is tried again.
        """
        if self._is_started:
            raise NsqError("the consumer was started before: make a new one")
        if self._taking.is_stopped:
            raise Closed(f"{self.topic}/{self.channel}: stopped")
        if not self._given_nsqds and not self._lookupds:
            raise ConfigError("give the consumer an nsqd (host:4150) or an nsqlookupd (host:4161)")
        self._loop = asyncio.get_running_loop()
        self._taking.begin()
        self._nsqds = ConsumerNsqds(
            self._new_subscription,
            self._joined,
            self.topic,
            self.channel,
            self.config,
            self._given_nsqds,
            self._lookupds,
            self._filter,
            self.log,
        )
        self._flow = Flow(self.config, self.log)
        self._outcomes.begin(self._flow)
        self._keep_alive = KeepAlive(self._inbox, self._auto_touch)
        self._pace = Pace(self._flow, self._inbox)
        self._rounds = Rounds(self._round, max(self.config.heartbeat_interval.seconds / 2, BLOCKED_S_MIN), self.log)
        self._is_started = True
        try:
            await self._nsqds.start()
        except BaseException:
            await self.close()
            raise
        return self

    def stop(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends iterations and `run` when they have dealt with the messages they have. Returns at once.

        For signal handlers and other threads; it is `close` (or the end of the `with` block) that then disconnects.

        timeout: seconds after which what is still being handled is cancelled and given back.
        """
        timeout_s = seconds_of("timeout", timeout)
        self._taking.is_stopped = True
        self._inbox.turn_loop_first()
        if self._is_started and not self._is_closing:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all of this with it
                self._loop.call_soon_threadsafe(self._stop, timeout_s)

    def _stop(self, timeout_s: float) -> None:
        if self._stopping is None and not self._is_closing:
            self._stopping = self._loop.call_later(timeout_s, self._end_late)
            self._nsqds.end_start()
            self._hand_out_no_more()

    def _end_late(self) -> None:
        self._closing = self._loop.create_task(self.close(0), name=f"nsquark close {self.topic}")

    def _hand_out_no_more(self) -> None:
        self._taking.is_stopped = True
        self._flow.change_max_in_flight(0)
        self._inbox.give_back()
        self._inbox.wake_all()
        if self._copies is not None:
            self._copies.claim_no_more()

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends in order: handlers of `run` finish the message they have; what was prefetched, and what an iteration
        took and did not answer, goes back to nsqd; then the connections are closed. A handler that calls this answers
        its message first, or calls `stop` instead.

        timeout: seconds that handlers have.
        """
        timeout_s = seconds_of("timeout", timeout)
        reason = Closed(f"{self.topic}/{self.channel}: stopped")
        if self._is_closing or not self._is_started:
            self._is_closing = self._taking.is_stopped = True
            if self._closed is not None and not (self._handlers.is_one_of_them or self._giving_up.is_one_of_them):
                await asyncio.shield(self._closed)
                await self._nsqds.close(reason, timeout_s)
            return
        if asyncio.get_running_loop() is not self._loop:
            raise NsqError(f"{self.topic}/{self.channel}: {ANOTHER_LOOP}")
        self._is_closing = True
        self._closed = self._loop.create_future()
        try:
            await self._close_in_order(reason, timeout_s)
        finally:  # whoever cancels this wants an end, and no connection that stays open
            self._nsqds.end(reason)
            self._flow.close()
            self._closed.set_result(None)

    async def _close_in_order(self, reason: Closed, timeout_s: float) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        self._hand_out_no_more()
        try:
            await self._nsqds.stop_finding()
            deadline_s = self._loop.time() + timeout_s
            await self._handlers.end(timeout_s)
            await self._giving_up.end(max(0.0, deadline_s - self._loop.time()))
        except asyncio.CancelledError:
            self._handlers.cancel()
            raise
        finally:
            self._giving_up.cancel()
            self._rounds.close()
            for subscription in self._nsqds.subscriptions.values():
                for message in list(subscription.in_flight):
                    message.give_back()
        await self._nsqds.close(reason, timeout_s)
        if self._copies is not None:
            await self._copies.end(timeout_s)

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
        message = self._next_now() or await self._taking.next_by(None)
        if message is None:
            raise StopAsyncIteration
        return message

    async def get(self, timeout: float | timedelta | None = None) -> Message | None:
        """Returns the next message; None if there was none in time, or the consumer was stopped.

        timeout: seconds to wait; 0 takes what is here already, None waits for ever.
        """
        self._check_started()
        if timeout is None or timeout == math.inf:
            return await self._taking.next_by(None)
        return await self._taking.next_by(self._loop.time() + wait_seconds_of(timeout))

    def batches(self, max_messages: int = 500, max_wait: float | timedelta = 0.2) -> Batches:
        """Iterates over batches, a `Batch` each time: `async for batch in consumer.batches():`, or in `nsquark.sync`
        `for batch in consumer.batches():`.

        max_messages: at most so many in a batch. As many must be allowed by max_in_flight to come together.
        max_wait: seconds that the first message of a batch waits for others.
        """
        return Batches(self._taking, max_messages, max_wait)

    async def run(
        self, handler: Handler, concurrency: int = 1, threads: int = 0, *, stop_on_signals: bool = False
    ) -> None:
        """Handles messages until the consumer is closed: finished when the handler returns, requeued when it raises.

        handler: async, or a plain function, which runs in the event loop, where it is alone while it runs.
        concurrency: so often an async handler runs at once.
        threads: so many threads for a plain function that blocks.
        stop_on_signals: ends in order on SIGTERM and SIGINT, and closes the consumer: for programs that are only this,
            with one consumer or several.
        """
        try:
            await self.handle(handler, concurrency, threads, stop_on_signals=stop_on_signals)
        except ThreadExit as thread_exit:
            raise thread_exit.reason from None

    async def handle(self, handler: Handler, concurrency: int, threads: int, *, stop_on_signals: bool) -> None:
        """Does what `run` does. A SystemExit of a handler in a thread comes as ThreadExit, which does not end the event
        loop that it comes through.
        """
        self._check_started()
        check_handler(handler, concurrency, threads)
        check_flag("stop_on_signals", stop_on_signals)
        count = threads or concurrency
        if count > self.config.max_in_flight > 0:
            self.log.warning(
                "%d handlers share max_in_flight=%d, so most of them wait: set max_in_flight to %d or more",
                count,
                self.config.max_in_flight,
                count,
            )
        if stop_on_signals:
            with stopped_by_signals(self.stop):
                await self._handlers.run(handler, concurrency, threads)
            await self.close()
        else:
            await self._handlers.run(handler, concurrency, threads)

    # -- connections -------------------------------------------------------------------------------------

    def _new_subscription(self, address: str) -> Subscription:
        return Subscription(address, self.config, self._outcomes, self._lost, self._opens_envelopes, self.log)

    def _joined(self, subscription: Subscription) -> None:
        self._flow.join(subscription)
        self._rounds.every(self._timeout_s())
        self._inbox.fresh_s = FRESH_FRACTION * max(joined.timeout_s for joined in self._subscriptions())

    def _round(self) -> None:
        subscriptions = self._subscriptions()
        is_late = self._keep_alive.make_round(subscriptions)
        if self._copies is not None:
            self._copies.end_claims(self._loop.time())
        in_flight = sum(len(subscription.in_flight) for subscription in subscriptions)
        if not self._taking.is_stopped:
            self._pace.measure(is_late, in_flight, self._timeout_s())

    def _timeout_s(self) -> float:
        return min((subscription.timeout_s for subscription in self._subscriptions()), default=60.0)

    def _lost(self, subscription: Subscription, reason: NsqError) -> None:
        for message in self._inbox.forget(subscription):
            self._giving_up.did_not_fail(message, is_counted=True)
        self._flow.leave(subscription)
        self._nsqds.lost(subscription, reason)

    # -- at run time -------------------------------------------------------------------------------------

    async def connect_to_nsqd(self, address: str) -> None:
        """Adds an nsqd, or raises what went wrong; after a later loss the connection is made again.

        address: `host:port`.
        """
        self._check_started()
        check_address(address, "a call for each")
        await self._nsqds.connect_to_nsqd(address)

    async def disconnect_from_nsqd(self, address: str) -> None:
        """Leaves an nsqd when what is being handled from there is answered; what was prefetched goes back. A handler
        that calls this answers its message first.

        address: as it was given, or found.
        """
        self._check_started()
        check_address(address, "a call for each")
        subscription = self._nsqds.subscriptions.get(address)
        if subscription is not None:
            self._flow.leave(subscription)
            subscription.is_leaving = True
            subscription.set_rdy(0)  # else nsqd sends again at once what it gets back
            self._inbox.give_back(subscription)
        await self._nsqds.disconnect_from_nsqd(address, CLOSE_TIMEOUT_S)

    def connect_to_nsqlookupd(self, address: str) -> None:
        """Asks one more nsqlookupd from now on.

        address: of its HTTP port.
        """
        self._check_started()
        self._nsqds.connect_to_nsqlookupd(address)

    def disconnect_from_nsqlookupd(self, address: str) -> None:
        """Asks an nsqlookupd no more; the last one cannot be removed.

        address: as it was given.
        """
        self._check_started()
        self._nsqds.disconnect_from_nsqlookupd(address)

    def change_max_in_flight(self, count: int) -> None:
        """Lets so many messages be unanswered from now on.

        count: over all connections; 0 pauses.
        """
        self._check_started()
        check_count("max_in_flight", count, 0)
        self._paused_at = None
        if not self._taking.is_stopped:
            self._flow.change_max_in_flight(count)

    def pause(self) -> None:
        """Lets what is in flight be dealt with, and no more come until `unpause`."""
        self._check_started()
        if self._paused_at is None:
            self._paused_at = self._flow.wanted
            self._flow.change_max_in_flight(0)

    def unpause(self) -> None:
        """Goes on after `pause`."""
        if self._paused_at is not None:
            count, self._paused_at = self._paused_at, None
            self.change_max_in_flight(count)

    @property
    def is_called_by_own_thread(self) -> bool:
        """Tells whether this is asked from a handler or hook that runs in a thread."""
        return self._threads.is_one_of_them

    def _is_hook_off_loop(self) -> bool:
        return self.calls_hook_off_loop or self._handlers.use_threads

    def _check_started(self) -> None:
        if not self._is_started:
            raise NsqError(NOT_STARTED)

    @property
    def is_paused(self) -> bool:
        """Tells whether `pause` was called."""
        return self._paused_at is not None

    @property
    def is_starved(self) -> bool:
        """Tells whether some connection waits for answers before it sends more: who gathers messages should answer
        some.
        """
        return any(subscription.is_starved for subscription in self._subscriptions())

    @property
    def connections(self) -> list[str]:
        """Returns the addresses of the nsqds that are connected."""
        return [subscription.address for subscription in self._subscriptions()]

    def _subscriptions(self) -> list[Subscription]:
        return list(self._nsqds.subscriptions.values()) if self._is_started else []

    def stats(self) -> Stats:
        """Returns what the consumer did and has now."""
        return Stats(
            received=self._outcomes.received,
            finished=self._outcomes.finished,
            requeued=self._outcomes.requeued,
            expired=self._inbox.expired_count,
            given_up=self._giving_up.count,
            duplicates=0 if self._copies is None else self._copies.count,
            connections=len(self._subscriptions()),
            in_flight=sum(len(subscription.in_flight) for subscription in self._subscriptions()),
            backoff_level=self._flow.level if self._is_started else 0,
        )
