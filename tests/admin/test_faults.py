"""Checks what is shown beside an nsqd or nsqlookupd that is down, stalls or answers garbage, and that it is named."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from admin.conftest import Cluster
from harness import eventually
from harness.http_server import LocalServer, QuietHandler
from harness.lookupd import Impostor, LookupWire
from harness.nsqadmin import Nsqadmin
from nsquark.admin.app import make_state
from nsquark.admin.options import NsqadminOptions
from nsquark.admin.snapshot import Snapshot
from nsquark.admin.state import AdminState
from nsquark.base.durations import Duration
from nsquark.base.logs import Level, Logger

NO_HTTP = b"\x00\x01garbage\r\n\r\n"


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


NO_JSON = _answer(b"garbage")
OTHER_JSON = _answer(b'{"topics":"abc"}'[:-1])
WRONG_TYPES = _answer(b'{"topics":[{"topic_name":["x",1]}],"producers":1}')
NO_UTF8 = _answer(b'{"topics":["\xff"],"producers":[{"hostname":"\xff"}],"health":"\xff"}')
NO_UTF8_IN_A_TOPIC = _answer(b'{"topics":[{"topic_name":"\xff","depth":1}],"producers":1}')
NO_INT64 = _answer(b'{"start_time":%d,"producers":[{"http_port":%d}]}' % (10**400, 1 << 63))
TOO_DEEP = _answer(b'{"x":' + b"[" * 100_000)
CUT_OFF = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5000\r\n\r\n{"topics":['
ENDLESS_HEADER = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000
REFUSED = b'HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbo"\n'
STALLED = b""
PATIENCE = "60s"
"""None of these tests takes nearly as long: who waits for a stalled one fails them."""

FAULTS = {
    "no HTTP": NO_HTTP,
    "no JSON": NO_JSON,
    "other JSON": OTHER_JSON,
    "wrong types": WRONG_TYPES,
    "no UTF-8": NO_UTF8,
    "no UTF-8 in a topic": NO_UTF8_IN_A_TOPIC,
    "no int64": NO_INT64,
    "too deep": TOO_DEEP,
    "cut off": CUT_OFF,
    "endless header": ENDLESS_HEADER,
    "500": REFUSED,
    "stalled": STALLED,
}


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], str]]:
    """Returns the address of somebody who gives this answer to everything."""
    with contextlib.ExitStack() as stack:

        def make(answer: bytes) -> str:
            found = Impostor(answer)
            stack.callback(found.close)
            return found.address

        yield make


@pytest.fixture
def cut_off() -> Iterator[str]:
    """Runs one that closes the connection in the middle of every answer; an impostor would wait for the client."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.wfile.write(CUT_OFF)

    with LocalServer(Handler) as server:
        yield server.address


@pytest.fixture
def closed_address() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        yield "127.0.0.1:{}".format(*taken.getsockname()[1:])


@contextlib.asynccontextmanager
async def polling(**options: Any) -> AsyncIterator[AdminState]:
    """Yields the state of an nsqadmin that asks these."""
    waits = {"http_client_request_timeout": Duration.parse(PATIENCE), "poll_interval": Duration.parse("200ms")}
    state = make_state(NsqadminOptions(**{**waits, **options}), Logger("", Level.FATAL))
    state.poller.start()
    try:
        yield state
    finally:
        await state.poller.stop()
        await state.cluster.close()


async def first_snapshot(**options: Any) -> Snapshot:
    async with polling(**options) as state, asyncio.timeout(30):
        return await state.fresh_snapshot()


async def snapshot_with(topic: str, messages: int, **options: Any) -> Snapshot:
    """Returns the first one with all messages of the topic in which only one fails: who is slow to answer is left out
    of those before, or named too.
    """
    async with polling(**options) as state, asyncio.timeout(30):
        with state.poller.watching():
            snapshot = await state.fresh_snapshot()
            while (
                topic not in snapshot.topics
                or snapshot.topics[topic].messages != messages
                or len(snapshot.failures) != 1
            ):
                snapshot = await state.poller.next(snapshot.at)
            return snapshot


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_the_rest_is_shown_beside_a_bad_nsqd(
    cluster: Cluster, topic: str, impostor: Callable[[bytes], str], fault: bytes
) -> None:
    cluster.make(topic, count=1)
    bad = impostor(fault)
    good = cluster.nsqds[0].http_address
    snapshot = await snapshot_with(topic, 1, nsqd_http_address=[good, bad])
    assert snapshot.nodes[good].answered and not snapshot.nodes[good].failure
    assert not snapshot.nodes[bad].answered and snapshot.nodes[bad].failure
    assert [(failure.kind, failure.address) for failure in snapshot.failures] == [("nsqd", bad)]
    assert snapshot.totals.nodes_answering == 1


async def test_the_rest_is_shown_beside_an_nsqd_that_is_down(cluster: Cluster, topic: str, closed_address: str) -> None:
    cluster.make(topic, count=1)
    good = cluster.nsqds[0].http_address
    snapshot = await snapshot_with(topic, 1, nsqd_http_address=[good, closed_address])
    assert "connection refused" in snapshot.nodes[closed_address].failure


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_the_rest_is_shown_beside_a_bad_nsqlookupd(
    cluster: Cluster, topic: str, impostor: Callable[[bytes], str], fault: bytes
) -> None:
    cluster.make(topic, count=1)
    bad = impostor(fault)
    snapshot = await snapshot_with(topic, 2, lookupd_http_address=[cluster.lookupd.http_address, bad])
    assert [(lookupd.address, bool(lookupd.failure)) for lookupd in snapshot.lookupds] == [
        (cluster.lookupd.http_address, False),
        (bad, True),
    ]
    assert [(failure.kind, failure.address) for failure in snapshot.failures] == [("nsqlookupd", bad)]


async def test_an_nsqd_that_is_registered_with_nonsense_is_one_that_fails(cluster: Cluster, topic: str) -> None:
    cluster.make(topic, count=1)
    with LookupWire(cluster.lookupd.tcp) as wire:
        wire.identify(broadcast_address="not a host\n", http_port=70000)
        eventually(lambda: len(cluster.lookupd.nodes()) == 3)
        snapshot = await snapshot_with(topic, 2, lookupd_http_address=[cluster.lookupd.http_address])
    assert [node.answered for node in snapshot.nodes.values()].count(True) == 2
    assert len(snapshot.failures) == 1
    eventually(lambda: len(cluster.lookupd.nodes()) == 2)


async def test_nobody_answers(impostor: Callable[[bytes], str], closed_address: str) -> None:
    stalled = impostor(STALLED)
    snapshot = await first_snapshot(lookupd_http_address=[stalled, closed_address])
    assert snapshot.at > 0 and snapshot.nodes == {} and snapshot.topics == {}
    assert {failure.address for failure in snapshot.failures} == {stalled, closed_address}


async def test_a_failure_has_a_beginning_and_an_end(cluster: Cluster, topic: str, impostor: Any) -> None:
    cluster.make(topic)
    stalled = impostor(STALLED)
    async with polling(nsqd_http_address=[cluster.nsqds[0].http_address, stalled]) as state, asyncio.timeout(30):
        with state.poller.watching():
            first = await state.fresh_snapshot()
            second = await state.poller.next(first.at)
    # On a busy machine the other one may fail too, for a moment.
    began, went_on = (
        next(failure.since for failure in each.failures if failure.address == stalled) for each in (first, second)
    )
    assert began == went_on <= first.at
    assert any(each.text.startswith(f"nsqd {stalled} does not answer") for each in state.attention())


def test_the_page_of_nsqlookupds_does_not_wait_for_one_that_stalls(
    cluster: Cluster, topic: str, impostor: Callable[[bytes], str], make_admin: Callable[..., Nsqadmin]
) -> None:
    cluster.lookupd.post("/topic/create", topic=topic)
    patience = f"--http-client-request-timeout={PATIENCE}"
    good, stalled = cluster.lookupd.http_address, impostor(STALLED)
    admin = make_admin(f"--lookupd-http-address={good}", f"--lookupd-http-address={stalled}", patience)
    eventually(lambda: f"Delete topic {topic}" in admin.get("/lookup").text)  # no nsqd has it
    admin = make_admin(f"--nsqd-http-address={impostor(STALLED)}", patience)
    assert "No nsqlookupd is configured" in admin.get("/lookup").text


def test_a_topic_is_not_offered_for_deletion_where_nobody_tells_who_has_it(make_admin: Callable[..., Nsqadmin]) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(503 if self.path.startswith("/lookup?") else 200)
            self.end_headers()
            self.wfile.write(b'{"topics":["busy"],"channels":["c"],"producers":[]}')

    lookupd = LocalServer(Handler)
    lookupd.start()
    try:
        admin = make_admin(f"--lookupd-http-address=127.0.0.1:{lookupd.server_port}")
        eventually(lambda: "every topic that nsqlookupd knows is on some nsqd" in admin.get("/lookup").text)
        assert "busy" not in admin.get("/lookup").text
        assert "busy" not in admin.get("/api/topics?inactive=true").json()["topics"]
    finally:
        lookupd.stop()


# -- /api ------------------------------------------------------------------------------------------------


def test_the_api_and_the_pages_show_the_rest_beside_all_that_is_bad(
    cluster: Cluster, topic: str, impostor: Callable[[bytes], str], cut_off: str, make_admin: Callable[..., Nsqadmin]
) -> None:
    cluster.make(topic, "ch", count=1)
    good = cluster.nsqds[0].http_address
    bad = {impostor(fault): name for name, fault in FAULTS.items() if fault not in (STALLED, CUT_OFF)}
    bad[cut_off] = "cut off"
    admin = make_admin(*(f"--nsqd-http-address={address}" for address in (good, *bad)))
    about_topic = [f"{start}/{topic}{end}" for start in ("/topics", "/api/topics") for end in ("", "/ch")]

    def is_shown(path: str) -> bool:
        reply = admin.get(path)
        if reply.status not in (200, 404):  # not found is what no nsqd has told yet
            pytest.fail(f"{path}: {reply.status} {reply.text}")
        return reply.status == 200 and (topic in reply.text or path in ("/", "/nodes"))

    for path in ("/", "/topics", "/nodes", "/search.json", "/api/topics", "/api/counter", *about_topic):
        eventually(lambda path=path: is_shown(path))
    for address, name in bad.items():
        assert (name, admin.get(f"/nodes/{address}").status) == (name, 200)
        assert (name, admin.get(f"/api/nodes/{address}").status) == (name, 404)
    assert "Traceback" not in admin.log


def test_the_api_warns_of_what_is_missing(
    cluster: Cluster, topic: str, impostor: Any, closed_address: str, make_admin: Callable[..., Nsqadmin]
) -> None:
    cluster.make(topic, count=1)
    good = cluster.nsqds[0].http_address
    target = f"/stats?format=json&topic={topic}&include_clients=false"
    for bad, text in (
        (
            closed_address,
            f'Get "http://{closed_address}{target}": dial tcp {closed_address}: connect: connection refused',
        ),
        (impostor(NO_JSON), "invalid character 'g' looking for beginning of value"),
        (impostor(CUT_OFF), None),
        (impostor(REFUSED), r'got response 500 Internal Server Error "bo\"\n"'),
        (stalled := impostor(STALLED), f'Get "http://{stalled}{target}": context deadline exceeded '),
    ):
        admin = make_admin(
            f"--nsqd-http-address={good}", f"--nsqd-http-address={bad}", "--http-client-request-timeout=5s"
        )
        answer = admin.get(f"/api/topics/{topic}").json()
        assert [node["node"] for node in answer["nodes"]] == [good]
        assert answer["message_count"] == 1
        assert answer["message"].startswith("WARNING: " + (text or ""))
        admin.kill()


def test_the_api_says_that_nobody_answers(make_admin: Callable[..., Nsqadmin], closed_address: str) -> None:
    admin = make_admin(f"--lookupd-http-address={closed_address}")
    for path in ("/api/topics", "/api/topics/t", "/api/topics/t/c", "/api/nodes", "/api/nodes/h:1", "/api/counter"):
        answer = admin.get(path)
        assert answer.status == 502
        text = answer.json()["message"]
        assert text.startswith("UPSTREAM_ERROR: failed to query any nsqlookupd: Get ")
        assert text.endswith(f"dial tcp {closed_address}: connect: connection refused")
