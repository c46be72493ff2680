"""Measures what a turn of nsqd's event loop costs in CPU time when it takes publishes: `python -m benchmarks.turns`.

There are no sockets in it.

Steadier than a rate, since neither the client nor the system's network is in it: for judging a change on a machine that
others use too. Every batch is written to a file.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.wire import MAGIC_V2, http_pub, mpub, pub
from nsquark.base.logs import Logger
from nsquark.broker.data_path import DataPath
from nsquark.broker.nsqd import Nsqd
from nsquark.broker.options import parse_options
from nsquark.broker.tcp.session import Session
from nsquark.log.topic_log import TopicLog
from nsquark.web.connection import HttpConnection

ROUNDS = 40
"""The best of them counts: what others did meanwhile only makes a round slower."""
ROUND_UNITS = 600
TOPIC = "bench"
BODY = b"x" * 200
LEARNING_TURNS = 3
"""The first publishes of a client take a longer way."""


class Socket(asyncio.Transport):
    """Is a client that is always there and reads at once."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def tcp_feeders(nsqd: Nsqd, unit: bytes, clients: int) -> list[Callable[[], None]]:
    def feeder() -> Callable[[], None]:
        session = Session(nsqd)
        session.connection_made(Socket())

        def feed(data: bytes = unit) -> None:
            session.get_buffer(-1)[: len(data)] = data
            session.buffer_updated(len(data))

        feed(MAGIC_V2)
        return feed

    return [feeder() for _ in range(clients)]


def http_feeders(nsqd: Nsqd, request: bytes, clients: int) -> list[Callable[[], None]]:
    def feeder() -> Callable[[], None]:
        connection = HttpConnection(nsqd.http)
        connection.connection_made(Socket())
        return lambda: connection.data_received(request)

    return [feeder() for _ in range(clients)]


def measure(nsqd: Nsqd, title: str, feeders: list[Callable[[], None]]) -> None:
    def turn() -> None:
        for feed in feeders:
            feed()
        nsqd.turn.run()

    turns = max(1, ROUND_UNITS // len(feeders) // 4)
    for _ in range(LEARNING_TURNS):
        turn()
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(turns):
            turn()
        best_s = min(best_s, (time.thread_time() - started) / turns)
    print(f"{title:32} {best_s * 1e6:8.1f} us a turn {best_s * 1e6 / len(feeders):8.2f} us each", flush=True)


async def main(directory: str) -> None:
    flags = (f"--data-path={directory}", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--log-level=error")
    options = parse_options(flags)
    nsqd = Nsqd(options, Logger(options.log_prefix, options.log_level), DataPath(options.data_path))
    await nsqd.start()
    one, batch = pub(TOPIC, BODY).payload, mpub(TOPIC, [BODY] * 200).payload
    for clients in (1, 2, 20):
        measure(nsqd, f"PUB, {clients} clients", tcp_feeders(nsqd, one, clients))
    for clients in (1, 2):
        measure(nsqd, f"MPUB 200 x 200 B, {clients} clients", tcp_feeders(nsqd, batch, clients))
    measure(nsqd, "HTTP /pub, 8 clients", http_feeders(nsqd, http_pub(("127.0.0.1", 4151), TOPIC, BODY), 8))


def run() -> None:
    TopicLog.was_slow = lambda log, started_s: None  # on a busy machine writing would move to a thread, out of the turn
    loop_factory: Any = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as loop_factory
    directory = tempfile.mkdtemp(prefix="nsqd-bench-")
    try:
        asyncio.Runner(loop_factory=loop_factory).run(main(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # there is no client to say goodbye to


if __name__ == "__main__":
    run()
