"""nsqlookupd bears connections that only take up room: strangers who say nothing, and more than there are files."""

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness import eventually
from harness.holding import hold
from harness.lookupd import MAGIC_V1, Nsqlookupd, identify_command, nsqlookupd_program
from nsquark.base.logs import Level, LineWriter, Logger
from nsquark.lookupd import daemon
from nsquark.lookupd.options import LookupdOptions
from nsquark.lookupd.session import LookupdLimits

FILES_MAX = 40

DEAF_S_MAX = 60
"""nsqlookupd may take this long to notice on a busy machine."""


class Port:
    """Is the TCP port of an nsqlookupd that runs in this process, so that its limits can be made small."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        self._writers.append(writer)
        writer.write(data)
        return reader

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest_asyncio.fixture
async def port(request: pytest.FixtureRequest) -> AsyncIterator[Port]:
    """Has the limits that a test gives as the fixture's parameter, where they are not these."""
    small: dict[str, Any] = {"stranger_idle_s": 0.3, "stranger_check_s": 0.05, "strangers": 3, "unread_s": 0.3}
    limits = LookupdLimits(**{**small, **getattr(request, "param", {})})
    options = LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")  # type: ignore[call-arg]
    lookupd = daemon.Nsqlookupd(options, Logger("", Level.FATAL, LineWriter(-1)), limits)
    await lookupd.start()
    port = Port(lookupd.tcp_port)
    yield port
    port.close()
    await lookupd.stop()


@pytest.mark.parametrize("said", [b"", b"  ", MAGIC_V1, MAGIC_V1 + b"PI", MAGIC_V1 + b"IDENTIFY\n\0\0\0\x10{"])
async def test_a_silent_stranger_is_closed(port: Port, said: bytes) -> None:
    reader = await port.connect(said)
    assert await reader.read() == b""


async def test_whoever_identified_may_be_silent(port: Port) -> None:
    nsqd = await port.connect(MAGIC_V1 + identify_command())
    await nsqd.readexactly(4)
    stranger = await port.connect(MAGIC_V1 + b"PING\n")
    assert (await stranger.read()).endswith(b"OK")
    assert not nsqd.at_eof()


async def test_who_does_not_read_the_answers_is_cut_off(port: Port) -> None:
    nsqd = await port.connect(MAGIC_V1 + identify_command())
    await nsqd.readexactly(4)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, ("127.0.0.1", port.number))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEAF_S_MAX):
                await asyncio.get_running_loop().sock_sendall(deaf, MAGIC_V1 + b"PING\n" * 20_000_000)
    assert not nsqd.at_eof()


@pytest.mark.parametrize("port", [{"stranger_idle_s": 60.0}], indirect=True, ids=["patient"])
async def test_too_many_strangers_push_out_the_most_silent(port: Port) -> None:
    nsqd = await port.connect(MAGIC_V1 + identify_command())
    await nsqd.readexactly(4)
    first, second, third = [await port.connect(MAGIC_V1) for _ in range(3)]
    fourth = await port.connect(MAGIC_V1 + b"PING\n")
    assert await first.read() == b""
    assert await fourth.readexactly(6) == b"\0\0\0\x02OK"
    assert not any(reader.at_eof() for reader in (nsqd, second, third))


@pytest.fixture
def short_of_files(tmp_path: Path) -> Iterator[Nsqlookupd]:
    """Runs an nsqlookupd that may open few files, as `ulimit` of its service would have it."""
    script = tmp_path / "nsqlookupd"
    script.write_text(f'#!/bin/sh\nulimit -n {FILES_MAX}\nexec "{nsqlookupd_program()}" "$@"\n')
    script.chmod(0o755)
    with Nsqlookupd(program=os.fspath(script)) as lookupd:
        yield lookupd


def _answers(lookupd: Nsqlookupd) -> bool:
    try:
        return lookupd.get("/ping").body == b"OK"
    except OSError:  # closed at once, until the files of the other connections are free again
        return False


def test_without_files_for_more_connections_it_goes_on_with_those_it_has(short_of_files: Nsqlookupd) -> None:
    lookupd = short_of_files
    with contextlib.ExitStack() as stack, lookupd.connect() as nsqd:
        nsqd.identify()
        for _ in range(2 * FILES_MAX):
            stack.enter_context(socket.create_connection(lookupd.tcp))
        assert nsqd.ask(b"REGISTER t\n") == b"OK"
    eventually(lambda: _answers(lookupd))
    assert lookupd.is_running


def _reset_before_accepted(daemon: Nsqlookupd, address: tuple[str, int], count: int) -> None:
    """Connects while the daemon stands still, and resets; then lets it go on."""
    assert daemon.process is not None
    hold(daemon.process.pid)
    for _ in range(count):
        connection = socket.create_connection(address, timeout=20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    daemon.process.send_signal(signal.SIGCONT)


def _open_files(daemon: Nsqlookupd) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_connections_that_are_reset_at_once_leave_nothing(kind: str) -> None:
    with Nsqlookupd() as daemon:
        daemon.get("/ping")
        before = _open_files(daemon)
        _reset_before_accepted(daemon, daemon.tcp if kind == "tcp" else daemon.http, 50)
        eventually(lambda: _open_files(daemon) <= before)
        with daemon.connect() as wire:
            assert wire.ask(MAGIC_V1 + b"PING\n") == b"OK"
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_a_thousand_may_connect_at_once(kind: str) -> None:
    """While nsqlookupd is busy, nsqds wait to be accepted; with a short queue they would wait for a second or more."""
    with Nsqlookupd() as daemon:
        assert daemon.process is not None
        hold(daemon.process.pid)
        opened = []
        try:
            for _ in range(1000):
                address = daemon.tcp if kind == "tcp" else daemon.http
                opened.append(socket.create_connection(address, timeout=0.9))
        finally:
            daemon.process.send_signal(signal.SIGCONT)
            for connection in opened:
                connection.close()


def test_a_flood_of_pings_lets_others_through() -> None:
    with Nsqlookupd() as daemon, daemon.connect() as greedy, daemon.connect() as other:
        assert daemon.process is not None
        assert greedy.ask(MAGIC_V1 + b"PING\n") == other.ask(MAGIC_V1 + b"PING\n") == b"OK"
        schedstat = Path(f"/proc/{daemon.process.pid}/schedstat")
        done = threading.Event()

        def flood() -> None:
            greedy.socket.setblocking(False)
            while not done.is_set():
                with contextlib.suppress(BlockingIOError):
                    greedy.socket.send(b"PING\n" * 50_000)
                with contextlib.suppress(BlockingIOError):
                    greedy.socket.recv(1 << 20)

        def most_are_soon_let_through() -> bool:
            taken = []
            for _ in range(40):
                before = int(schedstat.read_text().split()[0])
                assert other.ask(b"PING\n") == b"OK"
                taken.append((int(schedstat.read_text().split()[0]) - before) / 1e6)
            assert sorted(taken)[35] < 25, f"ms of CPU: {taken}"
            return True

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            eventually(most_are_soon_let_through)  # while this process waits for its turn, nsqlookupd works on
        finally:
            done.set()
            thread.join()


def test_a_peer_that_does_not_read_is_not_listened_to() -> None:
    with Nsqlookupd() as daemon, daemon.connect() as greedy:
        greedy.send(MAGIC_V1)
        greedy.socket.setblocking(False)
        sent = 0
        while sent < 64 << 20 and select.select([], [greedy.socket], [], 1.0)[1]:
            sent += greedy.socket.send(b"PING\n" * 50_000)
        assert sent < 64 << 20


def test_as_many_files_are_allowed_as_the_system_permits(make_lookupd: Callable[..., Nsqlookupd]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        lookupd = make_lookupd()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(lookupd.pid, resource.RLIMIT_NOFILE) == (hard, hard)
