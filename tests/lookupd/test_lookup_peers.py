"""Checks nsqd's side of discovery alone: LookupPeers against real nsqlookupds, and against servers that are none."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from harness import FaultProxy, eventually
from harness.lookupd import Impostor, Nsqlookupd
from harness.waiting import until
from nsquark.base.logs import Level, LineWriter, Logger
from nsquark.broker import lookup_peers as lookup
from nsquark.broker.lookup_peers import LookupConnection, LookupPeers, Registration

TCP = ("10.0.0.7", 4150)
MAX_BODY_BYTES = 10_000
TURNS_MAX = 8
"""Replies to what was announced are handled within this many turns of the event loop."""


class Lines(LineWriter):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.text = ""

    def put(self, line: bytes) -> None:
        self.text += line.decode()


class Cluster:
    """Is the nsqd that LookupPeers speaks for, reduced to what it carries."""

    def __init__(self, **settings: float) -> None:
        self.http_port = 4151
        self.carried: dict[Registration, None] = {}
        self.lines = Lines()
        self.peers = LookupPeers(
            Logger("", Level.DEBUG, self.lines),
            lambda: {
                "version": "1.3.0",
                "tcp_port": TCP[1],
                "http_port": self.http_port,
                "hostname": "h",
                "broadcast_address": TCP[0],
            },
            lambda: self.carried,
            max_body_bytes=MAX_BODY_BYTES,
            **{"connect_timeout": 1.0, "request_timeout": 1.0, **settings},
        )

    def add(self, topic: str, channel: str | None = None) -> None:
        self.carried[topic, channel] = None
        self.peers.register(topic, channel)

    def remove(self, topic: str, channel: str | None = None) -> None:
        del self.carried[topic, channel]
        self.peers.unregister(topic, channel)


@pytest_asyncio.fixture
async def nsqd(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Has the settings that a test gives as the fixture's parameter."""
    cluster = Cluster(**getattr(request, "param", {}))
    yield cluster
    await cluster.peers.stop()


@pytest.fixture
def pair() -> Iterator[tuple[Nsqlookupd, Nsqlookupd]]:
    with Nsqlookupd() as first, Nsqlookupd() as second:
        yield first, second


async def soon(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Waits in a thread, so that the loop goes on serving the peers."""
    await asyncio.to_thread(eventually, condition, timeout_s)


def own(lookupd: Nsqlookupd, topic: str) -> bool:
    return lookupd.producers(topic) == {TCP}


async def test_all_is_announced_on_connecting(nsqd: Cluster, pair: tuple[Nsqlookupd, Nsqlookupd]) -> None:
    nsqd.carried = {(f"t{number}", "c" if number % 2 else None): None for number in range(350)}
    nsqd.peers.start([lookupd.tcp_address for lookupd in pair])
    assert nsqd.peers.addresses == [lookupd.tcp_address for lookupd in pair]
    await soon(lambda: all(own(lookupd, "t349") for lookupd in pair))
    for lookupd in pair:
        assert lookupd.topics() == {f"t{number}" for number in range(350)}
        assert lookupd.channels("t348") == set()
        assert lookupd.channels("t349") == {"c"}
        (node,) = lookupd.nodes()
        assert (node["hostname"], node["http_port"], node["version"]) == ("h", 4151, "1.3.0")


async def test_changes_are_told(nsqd: Cluster, lookupd: Nsqlookupd) -> None:
    nsqd.peers.start([lookupd.tcp_address])
    nsqd.add("told")
    nsqd.add("told", "c#ephemeral")
    await soon(lambda: lookupd.channels("told") == {"c#ephemeral"})
    nsqd.remove("told", "c#ephemeral")
    await soon(lambda: lookupd.channels("told") == set())
    assert own(lookupd, "told")
    nsqd.remove("told")
    await soon(lambda: not own(lookupd, "told"))


async def test_addresses_change_live(nsqd: Cluster, pair: tuple[Nsqlookupd, Nsqlookupd]) -> None:
    first, second = pair
    nsqd.carried["t", None] = None
    nsqd.peers.start([first.tcp_address, first.tcp_address])
    await soon(lambda: own(first, "t"))
    assert len(first.nodes()) == 1
    nsqd.peers.set_addresses([first.tcp_address, second.tcp_address])
    await soon(lambda: own(second, "t"))
    nsqd.peers.set_addresses([second.tcp_address])
    await soon(lambda: first.nodes() == [])
    assert own(second, "t")
    assert nsqd.peers.addresses == [second.tcp_address]


async def test_a_restarted_nsqlookupd_is_filled_again_unasked(
    nsqd: Cluster, make_lookupd: Callable[..., Nsqlookupd]
) -> None:
    lookupd = make_lookupd()
    nsqd.peers.start([lookupd.tcp_address])
    nsqd.add("t", "c")
    await soon(lambda: own(lookupd, "t"))
    lookupd.kill()
    nsqd.add("meanwhile")
    lookupd.start()
    await soon(lambda: own(lookupd, "meanwhile") and own(lookupd, "t"))


async def test_what_waits_for_a_stalled_nsqlookupd_is_bounded_and_all_is_told_in_the_end(
    nsqd: Cluster, lookupd: Nsqlookupd
) -> None:
    with FaultProxy(lookupd.tcp) as proxy:
        nsqd.peers.start([f"127.0.0.1:{proxy.address[1]}"])
        nsqd.add("first")
        await soon(lambda: own(lookupd, "first"))
        proxy.stall()
        for _ in range(lookup.COMMANDS_WAITING_MAX):
            nsqd.add("passing")
            nsqd.remove("passing")
        nsqd.add("last")
        (peer,) = nsqd.peers._peers.values()
        assert len(peer._commands) <= lookup.COMMANDS_WAITING_MAX
        assert "commands wait - connecting anew" in nsqd.lines.text
        proxy.resume()
        await soon(lambda: own(lookupd, "last") and own(lookupd, "first") and not own(lookupd, "passing"))


@pytest.mark.parametrize("nsqd", [{"retry_s_min": 0.01, "ping_interval_s": 0.05}], indirect=True)
async def test_too_many_commands_may_come_at_any_moment_of_announcing(nsqd: Cluster) -> None:
    """Commands are told `turns` turns of the event loop after the replies to the first announcements left."""
    nsqd.carried = {(f"t{number}", None): None for number in range(lookup.PIPELINE_COMMANDS_MAX + 1)}
    tried: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turns = len(tried)
        await reader.readuntil(b"IDENTIFY\n")
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
        writer.write(framed(b"{}"))
        for _ in range(lookup.PIPELINE_COMMANDS_MAX):
            await reader.readline()
        writer.write(framed(b"OK") * lookup.PIPELINE_COMMANDS_MAX)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(lookup.COMMANDS_WAITING_MAX + 1):
            nsqd.peers.register("t0", None)
        tried.append(turns)
        writer.close()

    nsqd.peers.logger.level = Level.ERROR
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        nsqd.peers.start([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        await soon(lambda: len(tried) >= TURNS_MAX)


async def test_a_command_tries_again_at_once(nsqd: Cluster, lookupd: Nsqlookupd) -> None:
    with FaultProxy(lookupd.tcp) as proxy:
        proxy.refusing = True
        nsqd.peers.start([f"127.0.0.1:{proxy.address[1]}"])
        await soon(lambda: nsqd.lines.text.count("ERROR") >= 1)
        # None is under way that would still succeed.
        await until(lambda: nsqd.lines.text.count("ERROR") == nsqd.lines.text.count("LOOKUP connecting"))
        proxy.refusing = False
        attempts = nsqd.lines.text.count("LOOKUP connecting")
        nsqd.add("at_once")
        await asyncio.sleep(0)
        await soon(lambda: own(lookupd, "at_once"))
        assert nsqd.lines.text.count("LOOKUP connecting") > attempts


@pytest.mark.parametrize("nsqd", [{"ping_interval_s": 0.1}], indirect=True)
async def test_pings_are_sent_while_idle(nsqd: Cluster, make_lookupd: Callable[..., Nsqlookupd]) -> None:
    lookupd = make_lookupd()
    nsqd.peers.start([lookupd.tcp_address])
    await soon(lambda: lookupd.log.count("pinged") >= 3)
    assert len(lookupd.nodes()) == 1


async def test_a_stalled_nsqlookupd_delays_nobody(nsqd: Cluster, pair: tuple[Nsqlookupd, Nsqlookupd]) -> None:
    stalls, works = pair
    with FaultProxy(stalls.tcp) as proxy:
        proxy.stall()
        nsqd.peers.start([f"127.0.0.1:{proxy.address[1]}", works.tcp_address])
        nsqd.add("t")
        await soon(lambda: own(works, "t"))
        assert not own(stalls, "t")
        await soon(lambda: "timed out" in nsqd.lines.text)
        proxy.resume()
        await soon(lambda: own(stalls, "t"))


@pytest.mark.parametrize("nsqd", [{"request_timeout": 60.0}], indirect=True)
async def test_stopping_leaves_and_waits_for_nobody(nsqd: Cluster, pair: tuple[Nsqlookupd, Nsqlookupd]) -> None:
    with FaultProxy(pair[0].tcp) as proxy:
        nsqd.peers.start([f"127.0.0.1:{proxy.address[1]}", pair[1].tcp_address])
        await soon(lambda: all(lookupd.nodes() for lookupd in pair))
        proxy.stall()
        nsqd.add("t")
        async with asyncio.timeout(20):
            await nsqd.peers.stop()
        await soon(lambda: pair[1].nodes() == [])
        assert nsqd.peers.addresses == []


# -- which channels a topic has --------------------------------------------------------------------------


@pytest.mark.parametrize("nsqd", [{"connect_timeout": 30.0, "request_timeout": 30.0}], indirect=True, ids=["patient"])
async def test_channels_are_those_any_nsqlookupd_knows(nsqd: Cluster, pair: tuple[Nsqlookupd, Nsqlookupd]) -> None:
    first, second = pair
    assert await nsqd.peers.channels_of("t") == set()
    first.post("/channel/create", topic="t#ephemeral", channel="a")
    first.post("/channel/create", topic="t#ephemeral", channel="b")
    second.post("/channel/create", topic="t#ephemeral", channel="b")
    second.post("/channel/create", topic="t#ephemeral", channel="c#ephemeral")
    second.post("/channel/create", topic="t", channel="of_another_topic")
    nsqd.peers.start([lookupd.tcp_address for lookupd in pair])
    await soon(lambda: all(f"LOOKUPD({known.tcp_address}): peer info" in nsqd.lines.text for known in pair))
    assert await nsqd.peers.channels_of("t#ephemeral") == {"a", "b"}
    first.kill()
    assert await nsqd.peers.channels_of("t#ephemeral") == {"b"}
    assert "failed to query nsqlookupd" in nsqd.lines.text


# -- servers that are no nsqlookupd ----------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


ANSWERS = {
    "negative size": struct.pack(">i", -1),
    "huge size": struct.pack(">i", MAX_BODY_BYTES + 1),
    "not JSON": framed(b"hello"),
    "JSON of another kind": framed(b'["a"]'),
    "a port that is none": framed(b'{"http_port":"x"}'),
    "deep JSON": framed(b'{"more":' + b"[" * 9_000),
    "an error": framed(b"E_INVALID"),
    "a reply too many": framed(b'{"http_port":1,"broadcast_address":"127.0.0.1"}') + framed(b"OK") * 2,
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("nsqd", [{"retry_s_min": 0.02}], indirect=True)
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_impostor_is_left_and_tried_again(nsqd: Cluster, lookupd: Nsqlookupd, kind: str) -> None:
    impostor = Impostor(ANSWERS[kind])
    try:
        nsqd.peers.start([impostor.address, lookupd.tcp_address])
        nsqd.add("beside_an_impostor")
        await soon(lambda: impostor.connections >= 2)
        await soon(lambda: own(lookupd, "beside_an_impostor"))
        assert f"ERROR: LOOKUPD({impostor.address}): " in nsqd.lines.text
    finally:
        impostor.close()


@pytest.mark.parametrize("address", ["", "nohost", "127.0.0.1:", "127.0.0.1:99999", "::1:4160", "a..b:1", "-:1"])
async def test_an_impossible_address_is_only_an_error_line(nsqd: Cluster, address: str) -> None:
    nsqd.peers.start([address])
    await soon(lambda: f"ERROR: LOOKUPD({address}): connect - " in nsqd.lines.text)
    nsqd.add("t")
    assert await nsqd.peers.channels_of("t") == set()


@pytest.mark.parametrize("nsqd", [{"retry_s_min": 0.2}], indirect=True)
@pytest.mark.parametrize("refused", ["IDENTIFY", "REGISTER"])
async def test_an_nsqlookupd_that_refuses_is_tried_again_less_and_less(
    nsqd: Cluster, lookupd: Nsqlookupd, refused: str
) -> None:
    if refused == "IDENTIFY":
        nsqd.http_port = 0  # as of an nsqd without HTTP
    else:
        nsqd.carried["no,name", None] = None
    began = time.monotonic()
    nsqd.peers.start([lookupd.tcp_address])
    await soon(lambda: nsqd.lines.text.count("LOOKUP connecting") >= 4)
    assert time.monotonic() - began >= 0.2 + 0.4 + 0.8
    assert f" - E_BAD_{'BODY' if refused == 'IDENTIFY' else 'TOPIC'}" in nsqd.lines.text


async def test_topics_that_come_do_not_flood_an_nsqlookupd_that_refuses(nsqd: Cluster, lookupd: Nsqlookupd) -> None:
    nsqd.http_port = 0
    began = time.monotonic()
    nsqd.peers.start([lookupd.tcp_address])
    for number in range(100):
        nsqd.add(f"t{number}")
        await asyncio.sleep(0.01)
    tries = nsqd.lines.text.count("LOOKUP connecting")
    assert tries <= 1 + (time.monotonic() - began) / lookup.COMMAND_RETRY_S_MIN


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_to_a_connection_that_was_lost_fails_as_one_that_is_lost_later(loop: str) -> None:
    async def ask_after_the_end() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: LookupConnection(MAX_BODY_BYTES, lambda: None), host, port
            )
            await until(lambda: connection.is_lost)
            for _ in range(2):
                with pytest.raises(OSError, match="connection closed"):
                    await connection.exchange([b"PING\n"])

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(ask_after_the_end())
