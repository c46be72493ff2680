"""Keeps the nsqds of a consumer: given by address or found through nsqlookupd, connected, or
waiting for the next try.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from nsquark.client.backoff import retry_delay_s
from nsquark.client.config import Config
from nsquark.client.errors import Closed, NotConnected, NsqError
from nsquark.client.handshake import connect
from nsquark.client.logs import Log
from nsquark.client.lookupd import AddressFilter, Discovery
from nsquark.client.subscription import Subscription

RETRY_S_MIN: Final = 1.0
RETRY_S_MAX: Final = 60.0
STEADY_S: Final = 10.0
"""A connection that lasted so long was a good one: its loss is the first failure."""
DIALS_PER_TURN: Final = 16
"""So many connections are begun in a turn of the event loop: a thousand nsqds found at once must not hold it."""
NSQDS_MAX: Final = 1000
"""Limits the nsqds of a consumer: any cluster has fewer, and a hostile nsqlookupd would like to name more."""
FAILURES_MAX: Final = 10_000
START_CHECK_S: Final = 2.0
"""The start waits so long for an nsqlookupd, to tell whether one was meant by its address."""


class ConsumerNsqds:
    """Keeps connections. `subscriptions` has those that are connected and `_connecting` those that are about to be: an
    address is in one of them at most. `_given` are those a user named: they are tried again after a loss, without
    nsqlookupd too.
    """

    def __init__(
        self,
        subscribe: Callable[[str], Subscription],
        joined: Callable[[Subscription], None],
        topic: str,
        channel: str,
        config: Config,
        nsqds: list[str],
        lookupds: list[str],
        address_filter: AddressFilter | None,
        log: Log,
    ) -> None:
        self._subscribe = subscribe
        self._joined = joined
        self._topic = topic
        self._channel = channel
        self._config = config
        self._given = nsqds
        self._log = log
        self._discovery = Discovery(lookupds, topic, config, self._found, address_filter, log)
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._retries: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        """Counts the failures in a row, of nsqds that are not connected for long."""
        self._starting: list[asyncio.Task[None]] = []
        """Has the connections that `start` waits for."""
        self._is_start_over = self._is_closing = False
        self.subscriptions: dict[str, Subscription] = {}

    async def start(self) -> None:
        """Connects; fails if none of the given nsqds can be reached and there is no nsqlookupd to ask."""
        self._starting = tasks = [self._begin(address) for address in self._given]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        self._check_running()
        if self._is_start_over:
            return
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors and len(errors) == len(tasks) and not self._discovery.addresses:
            raise errors[0]
        for address, outcome in zip(list(self._given), outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._log.warning("%s", outcome)
                self._retry_later(address, is_refused=not isinstance(outcome, NotConnected))
        self._discovery.start()
        await self._discovery.check(START_CHECK_S)

    def end_start(self) -> None:
        """Lets `start` return with the nsqds that are connected by now: others may never answer."""
        self._is_start_over = True
        for task in self._starting:
            task.cancel()

    async def stop_finding(self) -> None:
        self._is_closing = True
        for timer in self._retries.values():
            timer.cancel()
        await self._discovery.close()  # first, since this may be cancelled: `end` ends the others
        connecting = list(self._connecting.values())
        for number, task in enumerate(connecting):
            task.cancel()
            if number % DIALS_PER_TURN == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*connecting, return_exceptions=True)

    async def close(self, reason: NsqError, timeout_s: float) -> None:
        subscriptions = list(self.subscriptions.values())
        await asyncio.gather(*(subscription.close(reason, timeout_s) for subscription in subscriptions))

    def end(self, reason: NsqError) -> None:
        """Lets all connections close by themselves; those that are about to be are not made."""
        for task in self._connecting.values():
            task.cancel()
        for subscription in self.subscriptions.values():
            subscription.begin_to_close(reason, 0)

    def lost(self, subscription: Subscription, reason: NsqError) -> None:
        address = subscription.address
        if self.subscriptions.get(address) is subscription:
            del self.subscriptions[address]
        if self._is_closing:
            return
        if isinstance(reason, Closed):
            self._log.info("%s", reason)
            return
        self._log.warning("connection lost - %s", reason)
        if subscription.is_accepted and self._loop.time() - subscription.began_at_s > STEADY_S:
            self._failures.pop(address, None)
        self._retry_later(address, is_refused=subscription.is_refused)
        self._discovery.poll_often()

    # -- by the user -------------------------------------------------------------------------------------

    async def connect_to_nsqd(self, address: str) -> None:
        self._check_running()
        if address in self.subscriptions or address in self._connecting:
            raise NsqError(f"{address}: already connected")
        if address in self._retries:
            self._retries.pop(address).cancel()
        connecting = self._begin(address)
        try:
            await asyncio.wait([connecting])
        except asyncio.CancelledError:
            connecting.cancel()
            self._retry_given(address, is_refused=False)
            raise
        if connecting.cancelled():
            raise Closed(f"{address}: disconnected before it was connected")
        if (error := connecting.exception()) is not None:
            self._retry_given(address, is_refused=not isinstance(error, NotConnected))
            raise error
        if address not in self._given:
            self._given.append(address)

    async def disconnect_from_nsqd(self, address: str, timeout_s: float) -> None:
        subscription = self.subscriptions.get(address)
        if subscription is None and address not in self._given and address not in self._connecting:
            raise NotConnected(f"{address}: not connected")
        if address in self._given:
            self._given.remove(address)
        if address in self._retries:
            self._retries.pop(address).cancel()
        if address in self._connecting:
            self._connecting[address].cancel()
        if subscription is not None:
            await subscription.close(Closed(f"{address}: disconnected"), timeout_s)

    def connect_to_nsqlookupd(self, address: str) -> None:
        self._check_running()
        self._discovery.add(address)

    def disconnect_from_nsqlookupd(self, address: str) -> None:
        self._check_running()
        self._discovery.remove(address)

    def _check_running(self) -> None:
        if self._is_closing:
            raise Closed(f"{self._topic}/{self._channel}: stopped")

    # -- connecting --------------------------------------------------------------------------------------

    def _begin(self, address: str) -> asyncio.Task[None]:
        """Begins to connect; the outcome is the caller's to deal with."""
        return self._run(address, self._connect(address))

    def _found(self, addresses: list[str]) -> None:
        """Connects to nsqds that were found; those that failed are left alone until their time has come."""
        begun = 0
        for address in addresses:
            is_known = address in self.subscriptions or address in self._connecting or address in self._retries
            if is_known or self._is_closing:
                continue
            if len(self.subscriptions) + len(self._connecting) >= NSQDS_MAX:
                self._log.error("more than %d nsqds were found: %s and others are not used", NSQDS_MAX, address)
                return
            self._run(address, self._try(address, begun // DIALS_PER_TURN))
            begun += 1

    def _run(self, address: str, connecting: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(_: asyncio.Task[None]) -> None:
            self._connecting.pop(address, None)

        task = self._loop.create_task(connecting, name=f"nsquark connect {address}")
        self._connecting[address] = task
        task.add_done_callback(ended)
        return task

    async def _try(self, address: str, turns: int) -> None:
        """Connects after so many turns of the loop."""
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            await self._connect(address)
        except NsqError as error:
            self._log.warning("%s", error)
            self._retry_later(address, is_refused=not isinstance(error, NotConnected))

    async def _connect(self, address: str) -> None:
        subscription = self._subscribe(address)
        connection, features = await connect(address, self._config, subscription)
        subscription.begin(connection, features, self._topic, self._channel)
        self.subscriptions[address] = subscription
        self._log.info("%s: connected", address)
        self._joined(subscription)

    def _retry_given(self, address: str, *, is_refused: bool) -> None:
        """Goes on with the tries to reach a lost nsqd that a user asked for in vain meanwhile."""
        if address in self._given:
            self._retry_later(address, is_refused=is_refused)

    def _retry_later(self, address: str, *, is_refused: bool) -> None:
        """Tries again ever more rarely while it fails. An nsqd that was lost comes back at the latest after
        lookupd_poll_interval; one that refuses us would do so again.
        """

        def retry() -> None:
            self._retries.pop(address, None)
            if address in self._given:
                self._found([address])
            else:
                self._discovery.poll_soon()

        if address in self._retries or self._is_closing:
            return
        failures = self._failures[address] = self._failures.pop(address, 0) + 1
        if len(self._failures) > FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        delay_s = retry_delay_s(failures, RETRY_S_MIN, RETRY_S_MAX)
        if not is_refused:
            delay_s = min(delay_s, self._config.lookupd_poll_interval.seconds)
        self._log.debug("%s: tried again in %.1f s", address, delay_s)
        self._retries[address] = self._loop.call_later(delay_s, retry)
