"""This is the client for code that blocks: scripts, notebooks, Spark tasks.

The classes have the names and methods of the asyncio client, which does their work in a thread with an event loop, one
per process. Any thread may use them. After a fork, the child has a thread of its own, and its producers have their own
connections.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar, Unpack

from nsquark.client import consumer as consumers
from nsquark.client import pool as pools
from nsquark.client import producer as producers
from nsquark.client.batches import Batch, Batches
from nsquark.client.checks import check_addresses, checked_bodies, is_async, seconds_of
from nsquark.client.config import Config, Options
from nsquark.client.dedupe import DedupeStore
from nsquark.client.documented import documented_like
from nsquark.client.errors import Closed, ConfigError, NsqError, WrongHandler
from nsquark.client.handlers import check_handler, stopped_by_signals
from nsquark.client.lookupd import AddressFilter
from nsquark.client.loop_thread import called, process
from nsquark.client.message import Message
from nsquark.client.packing import Packing
from nsquark.client.stats import Stats
from nsquark.wire.commands import MpubBody

__all__ = ["Consumer", "Message", "Producer", "ProducerPool"]

Result = TypeVar("Result")


class _Closable(Protocol):
    async def close(self, timeout: float = ...) -> None: ...


Inner = TypeVar("Inner", bound=_Closable)


class _Face(Generic[Inner]):
    """Puts blocking methods in front of an asyncio object, which is made anew in a forked child."""

    def __init__(self, make: Callable[[], Inner]) -> None:
        self._make = make
        self._inner = make()
        self._pid = os.getpid()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"a {kind} cannot be copied, or sent to another process: make a {kind} there")

    def close(self, timeout: float | None = None) -> None:
        """Closes the connections of this process; those that a forked child inherited are for its parent to close.

        timeout: seconds to wait for publishes that are outstanding, or messages that are being handled.
        """
        if timeout is not None:
            seconds_of("timeout", timeout)
        self._is_closed = True
        if self._pid == os.getpid() and not sys.is_finalizing():  # which closes them, and runs no thread that could
            self._call(self._inner.close() if timeout is None else self._inner.close(timeout))

    def _own(self) -> Inner:
        if self._pid != os.getpid():
            if self._is_closed:
                raise Closed("stopped")
            with process.lock:
                if self._pid != os.getpid():
                    process.keep(self._inner)
                    self._inner = self._make()
                    self._renew()
                    self._pid = os.getpid()  # at last: other threads look at it without the lock
        return self._inner

    def _renew(self) -> None:
        """Makes anew, in a forked child, what another thread may have been using at the moment of the fork."""

    @staticmethod
    def _call(work: Coroutine[Any, Any, Result], undo: Callable[[Result], None] | None = None) -> Result:
        return process.call(work, undo)


class _AsyncPublisher(_Closable, Protocol):
    """Declares what Producer and ProducerPool have in common."""

    @property
    def outstanding(self) -> int: ...
    @property
    def outstanding_bytes(self) -> int: ...
    async def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None: ...
    async def multi_publish(self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> None: ...
    async def deferred_publish(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> None: ...
    def _pub(self, topic: str, body: Any, packing: Packing) -> Any: ...
    def _mpub(self, topic: str, bodies: Iterable[Any] | MpubBody, packing: Packing) -> Any: ...
    def _dpub(self, topic: str, delay: float | timedelta, body: Any, packing: Packing) -> Any: ...
    def _size_of(self, prepared: Any) -> int: ...
    def _check_room(self, size: int, count: int = 1) -> None: ...
    def _send_when_room(self, prepared: Any) -> asyncio.Future[None]: ...
    async def ping(self) -> None: ...


Publishing = TypeVar("Publishing", bound=_AsyncPublisher)


class _Publisher(_Face[Publishing]):
    """Publishes in the loop's thread. `_handed_count` and `_handed_bytes` count what was handed over to the loop, and
    `_taken_count` and `_taken_bytes` what it has taken over of that.
    """

    def __init__(self, make: Callable[[], Publishing]) -> None:
        super().__init__(make)
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may publish, too
        self._handed_count = self._handed_bytes = self._taken_count = self._taken_bytes = 0

    def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None:
        self._call(self._own().publish(topic, body, **packing))

    def multi_publish(self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> None:
        self._call(self._own().multi_publish(topic, _listed(bodies), **packing))

    def deferred_publish(self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]) -> None:
        self._call(self._own().deferred_publish(topic, delay, body, **packing))

    def publish_nowait(self, topic: str, body: Any, **packing: Unpack[Packing]) -> concurrent.futures.Future[None]:
        inner = self._own()
        return self._hand_over(inner, inner._pub(topic, body, packing))

    def multi_publish_nowait(
        self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]
    ) -> concurrent.futures.Future[None]:
        inner = self._own()
        return self._hand_over(inner, inner._mpub(topic, bodies, packing))

    def deferred_publish_nowait(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> concurrent.futures.Future[None]:
        inner = self._own()
        return self._hand_over(inner, inner._dpub(topic, delay, body, packing))

    def _hand_over(self, inner: Publishing, prepared: Any) -> concurrent.futures.Future[None]:
        size = inner._size_of(prepared)
        outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        outcome.set_running_or_notify_cancel()
        outcome.add_done_callback(process.unanswered.discard)

        def answered(answer: asyncio.Future[None]) -> None:
            error = answer.exception()
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

        def send() -> None:
            self._taken_count += 1  # without the lock: who holds it may wait for the loop, in a signal handler
            self._taken_bytes += size
            process.unanswered.add(outcome)
            try:
                # There was room when the caller published; if others were faster since, this publish waits.
                inner._send_when_room(prepared).add_done_callback(answered)
            except BaseException as error:
                outcome.set_exception(error)

        # An interrupt (Ctrl-C) may come anywhere. What is not handed over must not take up room; and the lock of an
        # outcome that the loop knows is not touched here, since the interrupt may leave it taken.
        with self._lock:
            count, handed_bytes = self._handed_count - self._taken_count, self._handed_bytes - self._taken_bytes
            inner._check_room(handed_bytes + size, count + 1)
            process.hand_over(send)
            self._handed_count += 1
            self._handed_bytes += size
        return outcome

    def ping(self) -> None:
        self._call(self._own().ping())

    @property
    def outstanding(self) -> int:
        return self._own().outstanding

    @property
    def outstanding_bytes(self) -> int:
        return self._own().outstanding_bytes


@documented_like(producers.Producer)
class Producer(_Publisher[producers.Producer]):
    """This is the blocking form of `nsquark.Producer`.

    address: `host:port` of nsqd's TCP port, or the path of a unix socket.
    config: options of the client, which `options` override.
    envelope: puts each message into an envelope, which has room for headers.
    outstanding_bytes_max: limits the bytes of publishes that wait for their answer.
    outstanding_max: limits the number of publishes that wait for their answer.
    logger: gets the log lines, instead of `nsquark.client`.
    """

    def __init__(
        self,
        address: str,
        config: Config | None = None,
        *,
        envelope: bool = False,
        outstanding_bytes_max: int = producers.OUTSTANDING_BYTES_MAX,
        outstanding_max: int = producers.OUTSTANDING_MAX,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            lambda: producers.Producer(
                address,
                config,
                envelope=envelope,
                outstanding_bytes_max=outstanding_bytes_max,
                outstanding_max=outstanding_max,
                logger=logger,
                **options,
            )
        )

    @property
    def address(self) -> str:
        """Returns the address as it was given."""
        return self._inner.address

    @property
    def is_connected(self) -> bool:
        return self._own().is_connected


@documented_like(pools.ProducerPool)
class ProducerPool(_Publisher[pools.ProducerPool]):
    """This is the blocking form of `nsquark.ProducerPool`.

    addresses: one or several `host:port` of nsqds.
    lookupd: HTTP addresses of nsqlookupds; all nsqds that they know are used.
    lookupd_topic: limits the nsqds that nsqlookupds know to those that have this topic.
    config: options of the client, which `options` override.
    copies: the number of different nsqds that must have each message before its publish returns.
    envelope: puts each message into an envelope, which has room for headers.
    retry_deadline: seconds after which a publish that no nsqd took fails.
    outstanding_bytes_max: limits the bytes of publishes that wait for their answer.
    outstanding_max: limits the number of publishes that wait for their answer.
    logger: gets the log lines, instead of `nsquark.client`.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] = (),
        *,
        lookupd: str | Iterable[str] = (),
        lookupd_topic: str | None = None,
        config: Config | None = None,
        copies: int = 1,
        envelope: bool = False,
        retry_deadline: float | timedelta = pools.RETRY_DEADLINE_S,
        outstanding_bytes_max: int = pools.OUTSTANDING_BYTES_MAX,
        outstanding_max: int = pools.OUTSTANDING_MAX,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        nsqds = check_addresses("nsqd", addresses)
        lookupds = check_addresses("lookupd", lookupd)
        super().__init__(
            lambda: pools.ProducerPool(
                nsqds,
                lookupd=lookupds,
                lookupd_topic=lookupd_topic,
                config=config,
                copies=copies,
                envelope=envelope,
                retry_deadline=retry_deadline,
                outstanding_bytes_max=outstanding_bytes_max,
                outstanding_max=outstanding_max,
                logger=logger,
                **options,
            )
        )

    def nsqds(self) -> list[pools.NsqdStatus]:
        return self._own().nsqds()


@documented_like(consumers.Consumer)
class Consumer(_Face[consumers.Consumer]):
    """This is the blocking form of `nsquark.Consumer`: `with Consumer(...) as consumer: for message in consumer: ...`.

    It does not survive a fork, since only one of the two processes could get the messages: make it in the child.

    topic: the name of the topic.
    channel: the name of the channel; consumers of the same channel share its messages.
    nsqd: one or several `host:port` of nsqds.
    lookupd: HTTP addresses of nsqlookupds, which know the nsqds of the topic.
    config: options of the client, which `options` override.
    dedupe: handles copies of a message once: True for the memory of this process, or a store that processes share.
    envelope: opens envelopes, as `dedupe` does, so that messages have headers.
    auto_touch: touches messages that are being handled until they are answered.
    on_give_up: gets a message that failed max_attempts times or cannot be decoded, before it is finished.
    address_filter: is given the addresses that nsqlookupds know, and returns those to be used; it must not block.
    logger: gets this consumer's log lines, instead of `nsquark.client`.
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
        on_give_up: Callable[[Message], object] | None = None,
        address_filter: AddressFilter | None = None,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Makes a consumer. `on_give_up` is called in a thread of `run`, or in one like it, and may publish.
        `address_filter` is called in the event loop's thread, and must not block.
        """
        if on_give_up is not None and (is_async(on_give_up) or not callable(on_give_up)):
            raise ConfigError(f"on_give_up is a plain function here, not {on_give_up!r}: see nsquark.Consumer")

        def make() -> consumers.Consumer:
            inner = consumers.Consumer(
                topic,
                channel,
                nsqd=nsqd,
                lookupd=lookupd,
                config=config,
                dedupe=dedupe,
                envelope=envelope,
                auto_touch=auto_touch,
                on_give_up=on_give_up,
                address_filter=address_filter,
                logger=logger,
                **options,
            )
            inner.calls_hook_off_loop = True
            return inner

        super().__init__(make)

    def __enter__(self) -> Self:
        try:
            self._call(self._own().start())
        except BaseException as error:
            if not isinstance(error, NsqError):  # an interrupt (Ctrl-C): there will be no end of a `with` to close it
                self.close()
            raise
        return self

    @property
    def topic(self) -> str:
        """Returns the topic's name."""
        return self._inner.topic

    @property
    def channel(self) -> str:
        """Returns the channel's name."""
        return self._inner.channel

    def _own(self) -> consumers.Consumer:
        if self._pid != os.getpid():
            raise NsqError(f"this consumer belongs to process {self._pid}: make one after the fork")
        return self._inner

    def __iter__(self) -> Iterator[Message]:
        """Yields messages until the consumer is closed, by another thread or by leaving its `with`."""
        return self

    def __next__(self) -> Message:
        message = self.get()
        if message is None:
            raise StopIteration
        return message

    def get(self, timeout: float | timedelta | None = None) -> Message | None:
        return self._call(self._own().get(timeout), _give_back)

    def batches(self, max_messages: int = 500, max_wait: float | timedelta = 0.2) -> Iterator[Batch]:
        batches = self._own().batches(max_messages, max_wait)
        return iter(lambda: self._call(_next_batch(batches), _give_back), None)

    def stop(self, timeout: float = consumers.CLOSE_TIMEOUT_S) -> None:
        self._own().stop(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Ends in order, as `nsquark.Consumer.close` does. In a handler or hook, which it would wait for, it is `stop`.

        timeout: seconds that handlers have.
        """
        if self._inner.is_called_by_own_thread:
            self.stop() if timeout is None else self.stop(timeout)
        else:
            super().close(timeout)

    def run(self, handler: Callable[[Message], object], threads: int = 1, *, stop_on_signals: bool = True) -> None:
        """Handles messages in threads until the consumer is closed. A message is finished when the handler returns, and
        requeued when it raises.

        handler: a plain function.
        threads: the number of messages that are handled at once.
        stop_on_signals: makes SIGTERM end it in order: handlers finish what they have, the rest goes back, and `run`
            returns. It works in the main thread, of a program that does not handle SIGTERM itself.
        """
        inner = self._own()
        if is_async(handler):
            raise WrongHandler("nsquark.sync runs plain functions: give an async handler to nsquark.Consumer")
        if threads == 0:
            raise ValueError("threads is 1 or more")
        check_handler(handler, 1, threads)
        numbers = [signal.SIGTERM] if stop_on_signals and _is_sigterm_ours() else []
        with stopped_by_signals(inner.stop, numbers):
            self._call(inner.handle(handler, 1, threads, stop_on_signals=False))

    def connect_to_nsqd(self, address: str) -> None:
        self._call(self._own().connect_to_nsqd(address))

    def disconnect_from_nsqd(self, address: str) -> None:
        self._call(self._own().disconnect_from_nsqd(address))

    def connect_to_nsqlookupd(self, address: str) -> None:
        self._call(called(self._own().connect_to_nsqlookupd, address))

    def disconnect_from_nsqlookupd(self, address: str) -> None:
        self._call(called(self._own().disconnect_from_nsqlookupd, address))

    def change_max_in_flight(self, count: int) -> None:
        self._call(called(self._own().change_max_in_flight, count))

    def pause(self) -> None:
        self._call(called(self._own().pause))

    def unpause(self) -> None:
        self._call(called(self._own().unpause))

    @property
    def is_paused(self) -> bool:
        return self._own().is_paused

    @property
    def is_starved(self) -> bool:
        consumer = self._own()
        return self._call(called(lambda: consumer.is_starved))

    @property
    def connections(self) -> list[str]:
        consumer = self._own()
        return self._call(called(lambda: consumer.connections))

    def stats(self) -> Stats:
        return self._call(called(self._own().stats))


def _is_sigterm_ours() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _listed(bodies: Iterable[Any] | MpubBody) -> list[Any] | MpubBody:
    """Collects the bodies in the caller's thread, since the iterable may block and the loop must not."""
    return bodies if isinstance(bodies, MpubBody) else checked_bodies(bodies)


def _give_back(taken: Message | Batch | None) -> None:
    """Gives back what an interrupt kept from its caller."""
    for message in (taken,) if isinstance(taken, Message) else taken or ():
        message.give_back()


async def _next_batch(batches: Batches) -> Batch | None:
    return await anext(batches, None)
