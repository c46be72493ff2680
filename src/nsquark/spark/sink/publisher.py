"""Publishes from a Spark task: a pool of producers in a thread beside the one that takes rows from Spark."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from nsquark.base.addresses import join_address, split_address
from nsquark.client.config import Config
from nsquark.client.errors import AuthFailed, NsqError
from nsquark.client.pool import CLOSE_TIMEOUT_S, ProducerPool
from nsquark.spark.endpoint import PORT_MAX, Endpoint, Unreachable, WrongAddress
from nsquark.spark.options import Access
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.rows import Deferred
from nsquark.wire.commands import MpubBody

T = TypeVar("T")

OUTSTANDING_BYTES_MAX = 8 << 20
"""So many bytes may be sent and not yet answered: enough that neither side waits for the other."""
DEFERRED_AT_ONCE_MAX = 1000
"""So many DPUBs are sent before the first of them is answered."""

ASK_AGAIN_S = 0.2
_TOO_BIG = re.compile(r"message too big \d+ > (\d+)")


class PublishFailed(RuntimeError):
    """Says that nsqd refused messages, or none could be reached; the text says which messages."""


class Publisher:
    """Publishes messages; every publish is answered before `flush` returns, or it raises.

    The event loop has a thread of its own, so that heartbeats are answered however long Spark takes to compute the
    next rows.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nsq-publisher", daemon=True)
        self._outstanding: deque[tuple[Future[None], int, str]] = deque()
        self._outstanding_bytes = 0

    def __enter__(self) -> Self:
        addresses = tcp_addresses(self._options)
        self._thread.start()
        try:
            self._pool = self._run(_open(self._options, addresses))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits for the rest: the task is run again.
        self._run(self._pool.close(CLOSE_TIMEOUT_S if kind is None else 0))
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def publish(self, topic: str, messages: MpubBody, rows: str) -> None:
        """Returns when there is room for more; `rows` is for the text of an error."""
        self._submit(self._pool.multi_publish(topic, messages), len(messages.data), f"topic {topic}, {rows}")

    def defer(self, messages: list[Deferred], rows: str) -> None:
        for start in range(0, len(messages), DEFERRED_AT_ONCE_MAX):
            some = messages[start : start + DEFERRED_AT_ONCE_MAX]
            self._submit(self._defer(some), sum(len(message.body) for message in some), rows)

    async def _defer(self, messages: list[Deferred]) -> None:
        async with asyncio.TaskGroup() as group:
            for message in messages:
                delay_s = message.delay_ms / 1000
                group.create_task(self._pool.deferred_publish(message.topic, delay_s, message.body))

    def _submit(self, work: Coroutine[Any, Any, None], size: int, rows: str) -> None:
        self._outstanding.append((asyncio.run_coroutine_threadsafe(work, self._loop), size, rows))
        self._outstanding_bytes += size
        while self._outstanding_bytes > OUTSTANDING_BYTES_MAX:
            self._await_oldest()

    def flush(self) -> None:
        while self._outstanding:
            self._await_oldest()

    def _await_oldest(self) -> None:
        future, size, rows = self._outstanding.popleft()
        self._outstanding_bytes -= size
        try:
            future.result()
        except (NsqError, ExceptionGroup) as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            raise PublishFailed(f"messages were not published ({rows}): {cause}{_advice(cause)}") from error


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
    """Returns the TCP addresses of the nsqds that answer now; their HTTP addresses are given, and each tells its TCP
    port.

    One that does not answer is left out of this task. If none does, they are asked again until the time is over.
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
