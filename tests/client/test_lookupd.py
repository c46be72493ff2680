"""Finds nsqds through real nsqlookupds, and through servers that answer as old or broken ones do."""

import asyncio
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from client.consumer_rig import is_done, publish
from client.scripted import Peer, ScriptedNsqd, error_frame, say_ok
from harness import Nsqd, eventually, until
from harness.http_server import LocalServer, QuietHandler
from harness.lookupd import Nsqlookupd
from nsquark import Consumer, ProducerPool, sync
from nsquark.base.addresses import split_address
from nsquark.client.config import Config
from nsquark.client.errors import Closed, ConfigError, LookupFailed, NotConnected
from nsquark.client.lookupd import Discovery, lookup, lookup_url, nodes, nodes_url

NO_POLL = Config(lookupd_poll_interval="5m", lookupd_poll_jitter=0.0)
FAST_POLL = Config(lookupd_poll_interval="50ms", lookupd_poll_jitter=0.0)
WAIT_S = 30.0


class AnswerServer:
    """Answers every GET with what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Answers(QuietHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.headers.append(dict(self.headers.items()))
                self.answer(server.status, server.body)

        self._server = LocalServer(Answers).start()
        self.address = self._server.address

    def names(self, *addresses: tuple[str, int]) -> None:
        producers = [{"broadcast_address": host, "tcp_port": port} for host, port in addresses]
        self.body = json.dumps({"channels": [], "producers": producers}).encode()

    def close(self) -> None:
        self._server.stop()


@pytest.fixture
def make_server() -> Iterator[Callable[[], AnswerServer]]:
    servers: list[AnswerServer] = []

    def make() -> AnswerServer:
        servers.append(AnswerServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: Callable[[], AnswerServer]) -> AnswerServer:
    return make_server()


# -- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:4161", "http://127.0.0.1:4161/lookup?topic=t%23ephemeral"),
        ("http://h:1/", "http://h:1/lookup?topic=t%23ephemeral"),
        ("https://h:1/proxy/lookup?zone=a&topic=old", "https://h:1/proxy/lookup?zone=a&topic=t%23ephemeral"),
        ("[::1]:4161", "http://[::1]:4161/lookup?topic=t%23ephemeral"),
    ],
)
def test_lookup_addresses(address: str, url: str) -> None:
    assert lookup_url(address, "t#ephemeral") == url


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("h:1", "http://h:1/nodes"),
        ("https://h:1/proxy/lookup?zone=a", "https://h:1/proxy/nodes?zone=a"),
        ("http://h:1/proxy/", "http://h:1/proxy/nodes"),
    ],
)
def test_nodes_addresses(address: str, url: str) -> None:
    assert nodes_url(address) == url


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("localhost", "missing port"),
        ("http://h/lookup", "missing port"),
        ("ftp://h:1", "host:port"),
        (":1", "host:"),
    ],
)
def test_addresses_that_are_none(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        lookup_url(address, "t")


# -- questions -------------------------------------------------------------------------------------------


async def test_a_real_nsqd_is_found(lookupd: Nsqlookupd, make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    nsqd.post("/topic/create", topic=topic)
    eventually(lambda: lookupd.producers(topic))
    (found,) = await lookup(lookupd.http_address, topic, Config())
    assert found.address == "{}:{}".format(*nsqd.tcp)
    assert (found.http_port, found.version) == (nsqd.http[1], "1.3.0")
    assert found.hostname
    assert found.address in [node.address for node in await nodes(f"http://{lookupd.http_address}/", Config())]


async def test_an_unknown_topic_is_an_error(lookupd: Nsqlookupd) -> None:
    with pytest.raises(LookupFailed, match="404 TOPIC_NOT_FOUND"):
        await lookup(lookupd.http_address, "nobody_has_this", Config())


async def test_nobody_there_is_an_error() -> None:
    with pytest.raises(LookupFailed, match=r"127\.0\.0\.1:1/lookup"):
        await lookup("127.0.0.1:1", "t", Config(lookupd_poll_timeout="2s"))


NO_ADDRESSES = (("http://x", 4150), ("/tmp/nsqd.sock", 4150), ("x", 70_000), ("x", -1), ("a b", 4150), ("a,b", 4150))


@pytest.mark.parametrize("is_first", [True, False])
async def test_what_cannot_be_an_address_is_left_out(
    server: AnswerServer, nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    server.names(*((*NO_ADDRESSES, nsqd.tcp) if is_first else (nsqd.tcp, *NO_ADDRESSES)))
    async with ProducerPool(lookupd=server.address) as pool:
        await pool.publish(topic, b"x")
        assert [status.address for status in pool.nsqds()] == ["{}:{}".format(*nsqd.tcp)]
    async with Consumer(topic, "ch", lookupd=server.address) as consumer:
        message = await consumer.get(WAIT_S)
        assert message is not None
        message.finish()
        assert consumer.connections == ["{}:{}".format(*nsqd.tcp)]
    for host, _ in NO_ADDRESSES:
        assert re.search(rf"nsqd '\[?{host}\]?:.*' that an nsqlookupd names is not used", caplog.text)


async def test_an_nsqd_that_came_back_gets_no_second_copy(server: AnswerServer, nsqd: Nsqd, topic: str) -> None:
    """An nsqd that has a copy may be missing from answers for a while, as one that registers anew is."""
    async with ScriptedNsqd() as other:
        other.on_command = lambda *_: error_frame("E_PUB_FAILED")
        server.names(nsqd.tcp, split_address(other.address))
        async with ProducerPool(lookupd=server.address, copies=2, lookupd_poll_interval="50ms") as pool:
            publish = pool.publish_nowait(topic, b"x")
            await until(lambda: topic in nsqd.topic_names())
            server.names(split_address(other.address))
            await until(lambda: len(pool.nsqds()) == 1, WAIT_S)
            server.names(nsqd.tcp, split_address(other.address))
            await until(lambda: len(pool.nsqds()) == 2, WAIT_S)
            refused_count = len(other.peers)
            await until(lambda: len(other.peers) > refused_count or publish.done(), WAIT_S)
            assert not publish.done() and nsqd.topic(topic)["message_count"] == 1
            other.on_command = say_ok
            await publish


async def test_a_pool_that_loses_an_nsqd_asks_at_once(server: AnswerServer) -> None:
    def close(peer: Peer, _: bytes, __: bytes) -> bytes:
        peer.close()
        return b""

    async with ScriptedNsqd() as one, ScriptedNsqd() as other:
        server.names(split_address(one.address))
        async with ProducerPool(lookupd=server.address, config=NO_POLL) as pool:
            await pool.publish("t", b"x")
            server.names(split_address(other.address))
            one.on_command = close
            await pool.publish("t", b"y")
            assert [line for peer in other.peers for line in peer.lines(b"PUB")] == [b"PUB t"]


async def test_a_close_does_not_wait_longer_for_an_nsqd_that_left(
    server: AnswerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsquark.client.pool.CLOSE_TIMEOUT_S", 600.0)
    async with ScriptedNsqd() as one, ScriptedNsqd() as other:
        server.names(split_address(one.address))
        pool = ProducerPool(lookupd=server.address, config=FAST_POLL)
        one.on_command = lambda *_: b""
        publish = pool.publish_nowait("t", b"x")
        await until(lambda: one.peers and one.peer.lines(b"PUB"), WAIT_S)
        server.names(split_address(other.address))
        await until(lambda: [status.address for status in pool.nsqds()] == [other.address], WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await pool.close(0.1)
        assert isinstance(publish.exception(), Closed)


def test_a_list_of_nsqds_can_be_made_while_some_come_and_go(server: AnswerServer, topic: str) -> None:
    """The list is made in another thread than the changes."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with sync.ProducerPool(lookupd=server.address, config=FAST_POLL, retry_deadline=0.1) as pool:
            with pytest.raises(NotConnected):
                pool.publish(topic, b"x")
            for number in range(12):
                server.names(*((f"h{number}", port) for port in range(1, 201)))
                asked = len(server.asked)
                eventually(lambda asked=asked: pool.nsqds() and len(server.asked) > asked + 1)
    finally:
        sys.setswitchinterval(interval_s)


async def test_old_answers_are_understood(server: AnswerServer) -> None:
    nsqd = {"broadcast_address": "::1", "tcp_port": 4150, "http_port": 4151, "hostname": "h", "version": "0.3.8"}
    server.body = json.dumps({"status_code": 200, "status_txt": "OK", "data": {"producers": [nsqd]}}).encode()
    (found,) = await lookup(server.address, "t", Config())
    assert (found.address, found.version) == ("[::1]:4150", "0.3.8")


async def test_topology_is_kept(server: AnswerServer) -> None:
    nsqd = {"broadcast_address": "h", "tcp_port": 1, "topology_region": "eu", "topology_zone": "eu-1", "more": {}}
    server.body = json.dumps({"producers": [nsqd]}).encode()
    (found,) = await lookup(server.address, "t", Config())
    assert (found.topology_region, found.topology_zone) == ("eu", "eu-1")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "no answer of an nsqlookupd"),
        (b"{}", "no producers in the answer"),
        (b'{"producers":[{"broadcast_address":"h","tcp_port":"x"}]}', "tcp_port"),
        (b'{"status_code":500,"status_txt":"INVALID_ARG_TOPIC","data":null}', "500 INVALID_ARG_TOPIC"),
        (b"\xff", "no answer of an nsqlookupd"),
    ],
)
async def test_broken_answers_are_errors(server: AnswerServer, body: bytes, reason: str) -> None:
    server.body = body
    with pytest.raises(LookupFailed, match=reason):
        await lookup(server.address, "t", Config())


async def test_no_producers_is_an_answer(server: AnswerServer) -> None:
    server.body = b'{"channels":null,"producers":null}'
    assert await lookup(server.address, "t", Config()) == []


@pytest.mark.parametrize(
    ("config", "sent"),
    [
        (Config(auth_secret="s"), "Bearer s"),
        (Config(auth_secret="s", skip_lookupd_authorization=False), None),
        (Config(), None),
    ],
)
async def test_the_secret_goes_along_as_go_nsq_sends_it(server: AnswerServer, config: Config, sent: str | None) -> None:
    server.names()
    await lookup(server.address, "t", config)
    assert server.headers[0].get("Authorization") == sent
    assert server.headers[0]["Accept"] == "application/vnd.nsq; version=1.0"


# -- the loop --------------------------------------------------------------------------------------------


class Rounds:
    """Keeps what `on_found` was called with."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self._changed = asyncio.Event()

    def __call__(self, addresses: list[str]) -> None:
        self.found.append(addresses)
        self._changed.set()

    async def number(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.found) < count:
                self._changed.clear()
                await self._changed.wait()


async def test_the_first_question_comes_at_once_and_the_next_when_an_nsqd_is_lost(server: AnswerServer) -> None:
    server.names(("h", 1), ("h", 2), ("h", 1))
    rounds = Rounds()
    discovery = Discovery([server.address], "t", NO_POLL, rounds)
    discovery.start()
    await rounds.number(1)
    assert rounds.found == [["h:1", "h:2"]]
    for _ in range(5):
        discovery.poll_soon()
    await rounds.number(2)
    await asyncio.sleep(0.3)
    await discovery.close()
    assert server.asked == ["/lookup?topic=t"] * 2, "five losses at once are one question"


async def test_an_nsqd_that_is_lost_is_found_again_soon_after_it_is_known_again(
    server: AnswerServer, start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    """It is not known while it restarts; the lookupd_poll_interval is the default, which is a minute."""
    nsqd = start_nsqd()
    publish(nsqd, topic, b"before")
    server.names(nsqd.tcp)
    async with Consumer(topic, "ch", lookupd=server.address) as consumer:
        async with await asyncio.wait_for(anext(consumer), WAIT_S) as message:
            assert message.body == b"before"
        await until(lambda: is_done(nsqd, topic))
        server.names()
        asked = len(server.asked)
        await asyncio.to_thread(nsqd.stop)
        await until(lambda: len(server.asked) >= asked + 4, WAIT_S)
        await asyncio.to_thread(nsqd.start)
        publish(nsqd, topic, b"after")
        server.names(nsqd.tcp)
        async with await asyncio.wait_for(anext(consumer), WAIT_S) as message:
            assert message.body == b"after"


async def test_nsqlookupds_are_asked_in_turn(make_server: Callable[[], AnswerServer]) -> None:
    servers = [make_server() for _ in range(3)]
    for port, server in enumerate(servers):
        server.names(("h", port))
    rounds = Rounds()
    discovery = Discovery([server.address for server in servers], "t", FAST_POLL, rounds)
    discovery.start()
    await rounds.number(6)
    await discovery.close()
    assert rounds.found[:6] == [["h:0"], ["h:1"], ["h:2"]] * 2


async def test_a_broken_nsqlookupd_is_passed_over(
    make_server: Callable[[], AnswerServer], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [make_server() for _ in range(4)]
    servers[2].names(("h", 2))
    rounds = Rounds()
    discovery = Discovery([server.address for server in servers], "t", NO_POLL, rounds)
    with caplog.at_level(logging.ERROR):
        discovery.start()
        await rounds.number(1)
    await discovery.close()
    assert rounds.found == [["h:2"]]
    assert [len(server.asked) for server in servers] == [1, 1, 1, 0]
    assert caplog.text.count("error querying nsqlookupd") == 2


async def test_a_round_tries_three_at_most(make_server: Callable[[], AnswerServer]) -> None:
    servers = [make_server() for _ in range(4)]
    servers[3].names(("h", 3))
    rounds = Rounds()
    discovery = Discovery([server.address for server in servers], "t", NO_POLL, rounds)
    discovery.start()
    await until(lambda: servers[2].asked, WAIT_S)
    await asyncio.sleep(0.2)
    assert not rounds.found and not servers[3].asked
    discovery.poll_soon()
    await rounds.number(1)
    await discovery.close()
    assert rounds.found == [["h:3"]]


async def test_the_filter_chooses_and_its_mistake_does_not_end_the_loop(server: AnswerServer) -> None:
    server.names(("a", 1), ("b", 1))
    calls = 0

    def only_a(addresses: list[str]) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a mistake")
        return [address for address in addresses if address.startswith("a")]

    rounds = Rounds()
    discovery = Discovery([server.address], "t", FAST_POLL, rounds, only_a)
    discovery.start()
    await rounds.number(1)
    await discovery.close()
    assert rounds.found[0] == ["a:1"]


@pytest.mark.parametrize("outcome", ["127.0.0.1:4150", None, [4150], [("127.0.0.1", 4150)]])
async def test_a_filter_that_returns_no_addresses_is_told(
    server: AnswerServer, caplog: pytest.LogCaptureFixture, outcome: object
) -> None:
    """A text was taken for a list of addresses of one letter each."""
    server.names(("127.0.0.1", 4150))
    rounds = Rounds()
    discovery = Discovery([server.address], "t", NO_POLL, rounds, lambda _: outcome)  # type: ignore[arg-type, return-value]
    discovery.start()
    await until(lambda: "address_filter returned" in caplog.text, WAIT_S)
    await discovery.close()
    assert rounds.found == []


async def test_nsqlookupds_come_and_go(make_server: Callable[[], AnswerServer]) -> None:
    first, second = make_server(), make_server()
    first.names(("h", 1))
    second.names(("h", 2))
    rounds = Rounds()
    discovery = Discovery([], "t", NO_POLL, rounds)
    discovery.start()
    discovery.add(first.address)
    await rounds.number(1)
    with pytest.raises(ConfigError, match="the last one"):
        discovery.remove(first.address)
    discovery.add(second.address)
    discovery.add(second.address)
    await rounds.number(2)
    assert rounds.found == [["h:1"], ["h:2"]]
    discovery.remove(first.address)
    assert discovery.addresses == [second.address]
    with pytest.raises(ConfigError, match="not among"):
        discovery.remove(first.address)
    with pytest.raises(ConfigError, match="missing port"):
        discovery.add("h")
    discovery.poll_soon()
    await rounds.number(3)
    await discovery.close()
    assert rounds.found[2] == ["h:2"]


async def test_close_ends_a_question_that_gets_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        others = set(threading.enumerate())  # those that earlier tests have left end whenever they like
        discovery = Discovery([f"127.0.0.1:{port}"], "t", NO_POLL, Rounds())
        discovery.start()
        await until(lambda: set(threading.enumerate()) - others, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await discovery.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await until(lambda: not set(threading.enumerate()) - others, WAIT_S)


async def test_the_first_ping_of_a_pool_waits_for_nsqlookupd(nsqd: Nsqd, server: AnswerServer) -> None:
    server.names(nsqd.tcp)
    async with ProducerPool(lookupd=server.address) as pool, asyncio.timeout(WAIT_S):
        await pool.ping()
        assert [status.address for status in pool.nsqds()] == ["{}:{}".format(*nsqd.tcp)]


async def test_an_nsqlookupd_without_the_topic_names_no_nsqd(make_server: Callable[[], AnswerServer]) -> None:
    """Its 404 is an answer: what the other names no longer is gone."""
    knows, knows_nothing = make_server(), make_server()
    knows.names(("127.0.0.1", 1), ("127.0.0.1", 2))
    knows_nothing.status, knows_nothing.body = 404, b'{"message":"TOPIC_NOT_FOUND"}'
    lookupd = [knows.address, knows_nothing.address]
    async with ProducerPool(lookupd=lookupd, lookupd_topic="t", config=FAST_POLL) as pool, asyncio.timeout(WAIT_S):
        await until(lambda: len(pool.nsqds()) == 2)
        knows.names(("127.0.0.1", 2))
        await until(lambda: [status.address for status in pool.nsqds()] == ["127.0.0.1:2"])


async def test_a_ping_that_waits_for_nsqlookupd_ends_with_its_pool() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = ProducerPool(lookupd="{}:{}".format(*silent.getsockname()))
        pinging = asyncio.create_task(pool.ping())
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S / 2):
            await pool.close()
            with pytest.raises(Closed):
                await pinging
