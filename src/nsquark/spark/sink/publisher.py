"""Publishes from a Spark task, with a pool of producers in a thread beside the one that reads rows from Spark."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from nsquark.base.addresses import PORT_MAX, join_address, split_address
from nsquark.client.config import Config
from nsquark.client.errors import AuthFailed, NsqError
from nsquark.client.loop_thread import Call
from nsquark.client.pool import CLOSE_TIMEOUT_S, ProducerPool
from nsquark.spark.endpoint import Endpoint, Unreachable, WrongAddress
from nsquark.spark.options import Access
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.rows import Deferred
from nsquark.wire.commands import MpubBody

T = TypeVar("T")

OUTSTANDING_BYTES_MAX = 8 << 20
"""At most this many bytes are sent and not yet answered: enough that neither side waits for the other."""
OUTSTANDING_MAX = 4000
"""At most this many MPUBs and DPUBs are sent and not yet answered: however small they are, each is a task here."""
DEFERRED_AT_ONCE_MAX = 1000
"""DPUBs are sent in groups of at most this many."""

ASK_AGAIN_S = 0.2
_TOO_BIG = re.compile(r"message too big \d+ > (\d+)")


class PublishFailed(RuntimeError):
    """Says that nsqd refused messages, or that no nsqd could be reached; the text says which messages."""


class _Outstanding(NamedTuple):
    """Describes commands that are sent and not yet answered; `rows` says which rows they have."""

    answered: Call[None]
    commands: int
    size: int
    rows: str


class Publisher:
    """Publishes messages. When `flush` returns, every publish is answered; if one failed, it raises.

    The event loop has a thread of its own, so that heartbeats are answered however long Spark takes to compute the
    next rows.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="nsq-publisher", daemon=True)
        self._outstanding: deque[_Outstanding] = deque()
        self._outstanding_commands = 0
        self._outstanding_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._pool = self._run(_open(self._options, tcp_addresses(self._options)))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error the rest is not waited for: Spark runs the task again.
            self._run(self._pool.close(CLOSE_TIMEOUT_S if kind is None else 0))
        finally:
            self._stop()

    def _run_loop(self) -> None:
        """Runs the loop until it is stopped, then cancels what it still does and closes it."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return Call(self._loop, work).result()

    def publish(self, topic: str, messages: MpubBody, rows: str) -> None:
        """Publishes messages as soon as there is room for them; `rows` is for the text of an error."""
        send = partial(self._pool.multi_publish, topic, messages)
        self._submit(send, 1, len(messages.data), f"topic {topic}, {rows}")

    def defer(self, messages: list[Deferred], rows: str) -> None:
        for start in range(0, len(messages), DEFERRED_AT_ONCE_MAX):
            some = messages[start : start + DEFERRED_AT_ONCE_MAX]
            self._submit(partial(self._defer, some), len(some), sum(len(message.body) for message in some), rows)

    async def _defer(self, messages: list[Deferred]) -> None:
        async with asyncio.TaskGroup() as group:
            for message in messages:
                delay_s = message.delay_ms / 1000
                group.create_task(self._pool.deferred_publish(message.topic, delay_s, message.body))

    def _submit(self, send: Callable[[], Coroutine[Any, Any, None]], commands: int, size: int, rows: str) -> None:
        """Sends commands when there is room for them; those that are too much by themselves go alone."""
        while self._outstanding and (
            self._outstanding_commands + commands > OUTSTANDING_MAX
            or self._outstanding_bytes + size > OUTSTANDING_BYTES_MAX
        ):
            self._await_oldest()
        self._outstanding.append(_Outstanding(Call(self._loop, send()), commands, size, rows))
        self._outstanding_commands += commands
        self._outstanding_bytes += size

    def flush(self) -> None:
        while self._outstanding:
            self._await_oldest()

    def _await_oldest(self) -> None:
        oldest = self._outstanding.popleft()
        self._outstanding_commands -= oldest.commands
        self._outstanding_bytes -= oldest.size
        try:
            oldest.answered.result()
        except (NsqError, ExceptionGroup) as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            raise PublishFailed(f"messages were not published ({oldest.rows}): {cause}{_advice(cause)}") from error


def _advice(cause: Exception) -> str:
    if isinstance(cause, AuthFailed):
        return ". Give the option authSecretFile or authSecret"
    too_big = _TOO_BIG.search(str(cause))
    if too_big is not None:
        return f". Give the option maxMessageBytes={too_big[1]}, as nsqd has it, and the error names the row"
    return ""


async def _open(options: SinkOptions, addresses: list[str]) -> ProducerPool:
    return ProducerPool(
        addresses,
        lookupd=options.lookupd,
        config=_config(options),
        retry_deadline=options.write_timeout_s,
    )


def _config(options: SinkOptions) -> Config:
    settings: dict[str, Any] = {"auth_secret": options.auth_secret}
    if options.tls is not None:
        settings |= {
            "tls_v1": True,
            "tls_root_ca_file": options.tls.root_ca_file or "",
            "tls_cert": options.tls.cert_file or "",
            "tls_key": options.tls.key_file or "",
            "tls_insecure_skip_verify": options.tls.skip_verify,
        }
    return Config(**settings)


def tcp_addresses(options: SinkOptions) -> list[str]:
    """Returns the TCP addresses of the nsqds that answer now: each is asked at its HTTP address for its TCP port.

    An nsqd that does not answer is left out of this task. If none does, they are asked until writeTimeout is over.
    """
    deadline = time.monotonic() + options.write_timeout_s
    while options.nsqd:
        found: list[str] = []
        failures: list[str] = []
        for address in options.nsqd:
            try:
                found.append(_tcp_address(address, options.access))
            except Unreachable as error:
                failures.append(str(error))
        if found:
            return found
        if time.monotonic() + ASK_AGAIN_S > deadline:
            raise PublishFailed(f"no nsqd to publish to within {options.write_timeout_s:g} s: {'; '.join(failures)}")
        time.sleep(ASK_AGAIN_S)
    return []


def _tcp_address(address: str, access: Access) -> str:
    endpoint = Endpoint(address, access)
    try:
        port = endpoint.ask("/info").get("tcp_port")
    finally:
        endpoint.close()
    if not isinstance(port, int) or not 0 < port <= PORT_MAX:
        raise WrongAddress(f"{address} is not an nsqd: write the HTTP address of an nsqd, like 127.0.0.1:4151")
    host, _ = split_address(address.removeprefix("https://"))
    return join_address(host, port)
