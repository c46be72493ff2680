"""Checks that an answer that fails after its beginning is cut off: it holds no second answer, and no client takes it
for whole.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from admin.raw_http import RawAnswer
from harness import Nsqd, eventually
from harness.nsqadmin import Nsqadmin
from harness.waiting import until
from nsquark.admin.app import make_app, make_state
from nsquark.admin.events import Streams
from nsquark.admin.options import NsqadminOptions
from nsquark.admin.state import AdminState, Live
from nsquark.base.logs import Level, LineWriter, Logger

BEGUN = b"the first piece"
VERSIONS = ["1.0", "1.1"]
"""In 1.0 an answer ends with its connection: if that were merely closed, the answer would look whole."""


# -- /render ---------------------------------------------------------------------------------------------


class Graphite:
    """Begins every answer, and breaks it off in the middle when it is told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:{}".format(*self._listener.getsockname()[1:])
        self.breaks = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + BEGUN)
                    self.breaks.wait()

    def close(self) -> None:
        self.breaks.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def graphite() -> Iterator[Graphite]:
    running = Graphite()
    yield running
    running.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_graphite_fails_in_the_middle(make_admin: Callable[..., Nsqadmin], graphite: Graphite, version: str) -> None:
    flags = (f"--graphite-url={graphite.url}", "--proxy-graphite", "--http-client-request-timeout=60s")
    admin = make_admin("--nsqd-http-address=127.0.0.1:1", *flags)
    with RawAnswer.of(admin, "/render?target=x", version) as answer:
        answer.read_until(BEGUN)
        graphite.breaks.set()
        answer.read_to_the_end()
        answer.assert_cut_off()
    eventually(lambda: "200 GET /render?target=x" in admin.log)
    (told,) = [line for line in admin.log.splitlines() if "ERROR" in line]
    assert "GET /render was cut off" in told
    assert "unexpected EOF" in told


def test_graphite_is_not_there(make_admin: Callable[..., Nsqadmin]) -> None:
    admin = make_admin("--nsqd-http-address=127.0.0.1:1", "--graphite-url=http://127.0.0.1:1", "--proxy-graphite")
    answered = admin.get("/render", target="x")
    assert (answered.status, answered.body) == (502, b""), "nothing was sent yet, so the failure can be said"
    eventually(lambda: admin.log.count("graphite request failed") == 1)


# -- a download ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_an_nsqd_fails_in_the_middle_of_a_download(
    make_nsqd: Callable[..., Nsqd], make_admin: Callable[..., Nsqadmin], topic: str, version: str
) -> None:
    """24 MB are three pages of a download, of which the client has taken none when the nsqd goes."""
    nsqd = make_nsqd()
    for _ in range(24):
        assert nsqd.post("/pub", b"x" * 1_000_000, topic=topic).status == 200
    admin = make_admin(f"--nsqd-http-address={nsqd.http_address}")
    eventually(lambda: admin.get(f"/messages/{topic}").status == 200)  # the topic is known
    with RawAnswer.of(admin, f"/messages/{topic}/found.jsonl", version) as answer:
        answer.read_until(b'"body"')
        nsqd.kill()
        answer.read_to_the_end()
        answer.assert_cut_off()
    eventually(lambda: f"200 GET /messages/{topic}/found.jsonl" in admin.log)
    assert admin.log.count(f"GET /messages/{topic}/found.jsonl was cut off") == 1
    assert "Traceback" not in admin.log


# -- any streamed answer ---------------------------------------------------------------------------------


class Rig:
    """Runs an nsqadmin in this process, for handlers that fail as no real one should, with its log in a file."""

    def __init__(self, state: AdminState, port: int, log: Path) -> None:
        self.state = state
        self.address = ("127.0.0.1", port)
        self._log = log

    def log(self) -> str:
        self.state.logger.flush()
        return self._log.read_text()


OPTIONS: dict[str, Any] = {"nsqd_http_address": ["127.0.0.1:1"]}
Serve = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @contextlib.asynccontextmanager
    async def serving(**routes: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Rig]:
        path = tmp_path / "log"
        with path.open("wb", buffering=0) as file:
            logger = Logger("", Level.INFO, LineWriter(file.fileno()))
            state = make_state(NsqadminOptions(**OPTIONS), logger)
            app = make_app(state)
            for name, handler in routes.items():
                app.router.add_get(f"/test/{name}", handler)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
            await runner.setup()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                await web.SockSite(runner, listener).start()
                yield Rig(state, listener.getsockname()[1], path)
                await runner.cleanup()

    return serving


def second_answer() -> web.StreamResponse:
    return web.Response(status=502)


def refuse() -> web.StreamResponse:
    raise web.HTTPServiceUnavailable(text="too many")


def time_out() -> web.StreamResponse:
    raise TimeoutError


def lose() -> web.StreamResponse:
    raise ConnectionResetError("of somebody else")


def crash() -> web.StreamResponse:
    raise ZeroDivisionError


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fail", [second_answer, refuse, time_out, lose, crash])
async def test_whatever_fails_after_the_beginning(
    serve: Serve, fail: Callable[[], web.StreamResponse], version: str
) -> None:
    is_read = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(BEGUN)
        await is_read.wait()
        return fail()

    async with serve(broken=handler) as rig:
        with RawAnswer(rig.address, "/test/broken", version) as answer:
            await asyncio.to_thread(answer.read_until, BEGUN)
            is_read.set()
            await asyncio.to_thread(answer.read_to_the_end)
            answer.assert_cut_off()
        assert rig.log().count("GET /test/broken was cut off") == 1
        assert ("Traceback" in rig.log()) is (fail in (crash, second_answer)), (
            "a bug is told with the place where it is"
        )
        assert rig.log().count("200 GET /test/broken") == 1


async def test_an_nsqadmin_that_stops_cuts_off_what_it_cannot_finish(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(BEGUN)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError("was not cancelled")

    async with serve(cancelled=handler) as rig:
        with RawAnswer(rig.address, "/test/cancelled", "1.0") as answer:
            await asyncio.to_thread(answer.read_to_the_end)
            assert answer.was_reset


async def test_what_fails_before_the_beginning_is_answered(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise ZeroDivisionError

    async with serve(broken=handler) as rig:
        with RawAnswer(rig.address, "/test/broken", "1.0") as answer:
            await asyncio.to_thread(answer.read_to_the_end)
            head, _, body = answer.data.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 500 ")
            assert json.loads(body) == {"message": "INTERNAL_ERROR"}


async def test_a_tab_that_does_not_read_is_cut_off(serve: Serve) -> None:
    async with serve() as rig:
        rig.state.streams = Streams(lambda state, page: Live({"block:much": "x" * (16 << 20)}), write_s_max=0.2)
        with RawAnswer(rig.address, "/events?page=/") as answer:
            await asyncio.to_thread(answer.read_until, b"retry: ")
            await until(lambda: rig.state.streams.count == 0)
            await asyncio.to_thread(answer.read_to_the_end)
            answer.assert_cut_off()
        assert rig.log().count("GET /events was cut off") == 1
