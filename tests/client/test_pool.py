"""Checks the pool: it balances over real nsqds, passes by those that fail, and gives every publish an outcome when it
ends.
"""

import asyncio
import contextlib
import gc
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from client.pool_rig import address_of, all_messages, messages_of, start_nsqds
from client.scripted import Peer, ScriptedNsqd, error_frame, say_ok
from harness import AuthServer, FaultProxy, Nsqd, eventually, nsqd_is_ours, until
from harness.holding import hold
from harness.lookupd import Nsqlookupd
from nsquark.client.consumer import Consumer
from nsquark.client.envelope import unwrap
from nsquark.client.errors import (
    AuthFailed,
    Closed,
    ConfigError,
    InvalidName,
    NotConnected,
    ServerError,
    TooMuchOutstanding,
)
from nsquark.client.placing import Publish
from nsquark.client.pool import RETRY_DEADLINE_S, ProducerPool

NOBODY = "127.0.0.1:1"
WAIT_S = 20.0
MESSAGE_BYTES_MAX = 5000
DELAY_BEYOND_NSQDS_MAX_S = 10 * 24 * 3600.0


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Nsqd]]:
    daemons = start_nsqds(tmp_path_factory.mktemp("trio"), 3, f"--max-msg-size={MESSAGE_BYTES_MAX}")
    yield daemons
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def proxies(trio: list[Nsqd]) -> Iterator[list[FaultProxy]]:
    opened = [FaultProxy(daemon.tcp) for daemon in trio]
    yield opened
    for proxy in opened:
        proxy.close()


def _addresses(daemons: list[Nsqd]) -> list[str]:
    return [address_of(daemon) for daemon in daemons]


def _proxied(proxies: list[FaultProxy]) -> list[str]:
    return ["{}:{}".format(*proxy.address) for proxy in proxies]


def _states(pool: ProducerPool) -> list[str]:
    return [status.state for status in pool.nsqds()]


def _may_repeat(caplog: pytest.LogCaptureFixture) -> bool:
    """Tells whether an nsqd answered nothing for so long, on a busy machine, that others were asked too."""
    return "answers nothing" in caplog.text


async def _fails_at_last(attempt: Callable[[], Awaitable[None]], text: str) -> None:
    """Tries until it fails with this text; each time it fails, but busy daemons may not have told all they know."""
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(NotConnected) as raised:
                await attempt()
            if re.search(text, str(raised.value)):
                return


# -- balance ---------------------------------------------------------------------------------------------


async def test_those_who_await_each_publish_use_every_nsqd(
    trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ProducerPool(_addresses(trio)) as pool:
        for number in range(30):
            await pool.publish(topic, b"%d" % number)
        assert pool.outstanding == pool.outstanding_bytes == 0
    counts = [len(messages_of(daemon, topic)) for daemon in trio]
    assert sum(counts) == 30 or (sum(counts) > 30 and _may_repeat(caplog))
    assert min(counts) >= 1  # on a busy machine one may be slower than the others, and gets less


async def test_every_way_of_publishing_arrives(trio: list[Nsqd], topic: str) -> None:
    async with ProducerPool(_addresses(trio)) as pool:
        await pool.publish(topic, bytearray(b"one"))
        await pool.multi_publish(topic, [b"two", memoryview(b"three")])
        await pool.deferred_publish(topic, 0.2, b"four")
        await pool.publish_nowait(topic, b"five")
        await pool.multi_publish_nowait(topic, iter([b"six"]))
        await pool.deferred_publish_nowait(topic, 0.0, b"seven")
        await pool.ping()
    words: list[bytes] = []
    async with asyncio.timeout(30):
        while len(set(words)) < 7:  # one of them is deferred
            words += await asyncio.to_thread(all_messages, trio, topic)
    assert set(words) == {b"one", b"two", b"three", b"four", b"five", b"six", b"seven"}


async def test_a_slow_nsqd_gets_less_than_the_others(trio: list[Nsqd], proxies: list[FaultProxy], topic: str) -> None:
    async with ProducerPool(_proxied(proxies)) as pool:
        await pool.ping()
        proxies[0].stall()
        stuck = [pool.publish_nowait(topic, b"big" * 1000) for _ in range(3)]
        await asyncio.wait(stuck, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: sum(future.done() for future in stuck) >= 2)
        for _ in range(50):
            await pool.publish(topic, b"small")
        assert pool.nsqds()[0].outstanding == 1, "small ones went to the nsqd that still owes an answer"
        proxies[0].resume()
        await asyncio.gather(*stuck)


async def test_those_that_live_share_evenly_what_dead_ones_would_have_got() -> None:
    """On a busy machine one that lives may be slower than the other for a while, and gets less; not every time."""
    async with ScriptedNsqd() as one, ScriptedNsqd() as two:
        dead = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
        uneven = []
        for _ in range(10):
            before = [_publishes_to(server) for server in (one, two)]
            async with ProducerPool([*dead, one.address, two.address]) as pool:
                for _ in range(100):
                    await pool.publish("t", b"x")
            counts = [_publishes_to(server) - first for server, first in zip((one, two), before, strict=True)]
            assert sum(counts) == 100
            if min(counts) > 30:
                return
            uneven.append(counts)
    pytest.fail(f"always uneven: {uneven}")


def _publishes_to(server: ScriptedNsqd) -> int:
    return sum(len(peer.lines(b"PUB")) for peer in server.peers)


# -- failures --------------------------------------------------------------------------------------------


async def test_a_dead_nsqd_is_left_out(trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ProducerPool([NOBODY, *_addresses(trio)]) as pool:
        await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(100)))
        assert _states(pool) == ["down", "up", "up", "up"] or _may_repeat(caplog)
        assert _states(pool)[0] == "down"
        await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(100, 200)))
    numbers = sorted(map(int, all_messages(trio, topic)))
    assert numbers == list(range(200)) or (set(numbers) == set(range(200)) and _may_repeat(caplog))


async def test_what_a_lost_connection_left_unanswered_goes_elsewhere(
    trio: list[Nsqd], proxies: list[FaultProxy], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ProducerPool(_proxied(proxies)) as pool:
        await pool.ping()
        proxies[0].down.stalled = True
        futures = [pool.publish_nowait(topic, b"%d" % number) for number in range(300)]
        await until(lambda: all(status.outstanding == 0 for status in pool.nsqds()[1:]))
        assert pool.nsqds()[0].outstanding == 100
        proxies[0].cut()
        await asyncio.gather(*futures)
        downs = caplog.text.count(f"nsqd {pool.nsqds()[0].address} is down")
        assert downs == 1, "a hundred publishes of one connection are one failure"
    assert set(map(int, all_messages(trio, topic))) == set(range(300))


async def test_a_dead_nsqd_that_comes_back_is_used_again(
    tmp_path: Path, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemons = start_nsqds(tmp_path, 2)
    try:
        async with ProducerPool(_addresses(daemons)) as pool:
            await pool.publish(topic, b"before")
            daemons[0].kill()
            await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(10)))
            assert _states(pool) == ["down", "up"]
            daemons[0].start()
            await until(lambda: _states(pool)[0] != "down")
            await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(10, 20)))
            assert _states(pool) == ["up", "up"] or _may_repeat(caplog)
            await pool.publish(topic, b"after")
        assert daemons[0].topic(topic)["message_count"] > 0
        bodies = [b"before", *(b"%d" % number for number in range(20)), b"after"]
        if not nsqd_is_ours():
            bodies.remove(b"before")  # which NSQ's nsqd lost with its memory
        there = all_messages(daemons, topic)
        assert sorted(there) == sorted(bodies) or (set(there) == set(bodies) and _may_repeat(caplog))
    finally:
        for daemon in daemons:
            daemon.kill()


async def test_an_nsqd_that_hangs_is_passed_over_in_time(tmp_path: Path, topic: str) -> None:
    daemons = start_nsqds(tmp_path, 2)
    try:
        async with ProducerPool(_addresses(daemons), retry_deadline=20) as pool:
            await pool.ping()
            hold(daemons[0].pid)
            await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(10)))
            assert _states(pool) in (["down", "up"], ["silent", "up"])
        assert len(messages_of(daemons[1], topic)) == 10
    finally:
        for daemon in daemons:
            daemon.kill()


async def test_without_any_nsqd_a_publish_fails_at_its_deadline(topic: str) -> None:
    loop = asyncio.get_running_loop()
    async with ProducerPool([NOBODY], retry_deadline=0.5) as pool:
        start_s = loop.time()
        with pytest.raises(NotConnected, match=r"not taken within 0\.5 s - last error: .*127\.0\.0\.1:1"):
            await pool.publish(topic, b"x")
        assert 0.5 <= loop.time() - start_s < RETRY_DEADLINE_S
        with pytest.raises(NotConnected, match=r"not taken within 0\.5 s - 1 nsqds needed, 1 known, 0 of them usable"):
            await pool.publish(topic, b"x")
        with pytest.raises(NotConnected, match="1 known"):
            await pool.ping()


# -- refusals --------------------------------------------------------------------------------------------


async def test_a_refused_publish_is_not_tried_elsewhere_and_those_behind_it_are(
    trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ProducerPool(_addresses(trio)) as pool:
        await pool.ping()
        futures = [pool.publish_nowait(topic, b"%d" % number) for number in range(90)]
        poisoned = pool.deferred_publish_nowait(topic, DELAY_BEYOND_NSQDS_MAX_S, b"!")
        futures += [pool.publish_nowait(topic, b"%d" % number) for number in range(90, 180)]
        with pytest.raises(ServerError, match="E_INVALID") as error:
            await poisoned
        assert error.value.code == "E_INVALID"
        await asyncio.gather(*futures)
        assert _states(pool) == ["up", "up", "up"] or _may_repeat(caplog), "the message was wrong, not an nsqd"
    assert set(map(int, all_messages(trio, topic))) == set(range(180))


async def test_a_full_disk_is_not_the_publishs_fault(trio: list[Nsqd], topic: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # of one that only looked for it
            await reader.readuntil(b"IDENTIFY\n")
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(b"\0\0\0\6\0\0\0\0OK")
            await reader.readuntil(b"\nx")
            text = b"E_PUB_FAILED PUB failed write /data: no space left on device"
            writer.write((len(text) + 4).to_bytes(4, "big") + b"\0\0\0\1" + text)
        writer.close()

    full = await asyncio.start_server(refuse, "127.0.0.1", 0)
    address = f"127.0.0.1:{full.sockets[0].getsockname()[1]}"
    async with ProducerPool([address, address_of(trio[0])]) as pool:
        # A body that `refuse` finds whatever its size is.
        await asyncio.gather(*(pool.publish(topic, b"\nx%d" % number) for number in range(10)))
        assert [status.failures > 0 for status in pool.nsqds()] == [True, False]
    full.close()
    assert len(messages_of(trio[0], topic)) == 10


@pytest.fixture
def wants_secret(make_nsqd: Callable[..., Nsqd]) -> Iterator[str]:
    """Gives the address of an nsqd that wants a secret."""
    with AuthServer() as server:
        yield address_of(make_nsqd(f"--auth-http-address={server.address}"))


async def test_where_every_nsqd_wants_a_secret_the_error_comes_at_once(wants_secret: str, topic: str) -> None:
    async with ProducerPool([wants_secret], retry_deadline=60) as pool, asyncio.timeout(20):
        with pytest.raises(AuthFailed):
            await pool.publish(topic, b"x")
        with pytest.raises(AuthFailed):
            await pool.publish(topic, b"x")


async def test_thousands_that_wait_for_room_are_all_told_of_a_refusal(wants_secret: str, topic: str) -> None:
    async with ProducerPool([wants_secret], outstanding_max=1) as pool, asyncio.timeout(20):
        publishes = [pool.publish(topic, b"x") for _ in range(3000)]
        outcomes = await asyncio.gather(*publishes, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {AuthFailed}
        assert pool.outstanding == 0


async def test_mistakes_fail_before_anything_is_sent(trio: list[Nsqd], topic: str) -> None:
    async with ProducerPool(_addresses(trio)) as pool:
        with pytest.raises(InvalidName):
            pool.publish_nowait("no good", b"x")
        with pytest.raises(TypeError, match="encode it"):
            pool.publish_nowait(topic, "text")
        with pytest.raises(ValueError, match="empty"):
            await pool.publish(topic, b"")
        with pytest.raises(ValueError, match="at least one"):
            await pool.multi_publish(topic, [])
        with pytest.raises(ValueError, match="delay"):
            await pool.deferred_publish(topic, -1, b"x")
        assert pool.outstanding == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "a pool needs nsqds"),
        ({"addresses": ["h:1"], "copies": 2}, "copies=2 needs as many different nsqds; 1 given"),
        ({"addresses": ["h:1", "h:1"], "copies": 2}, "copies=2 needs as many different nsqds; 1 given"),
        ({"addresses": ["h:1"], "copies": 0}, "invalid copies ! 0 < 1"),
        ({"addresses": ["h"]}, "nsqd address h: give it as host:port"),
        ({"lookupd": ["h"]}, "missing port"),
        ({"addresses": ["h:1"], "retry_deadline": 0}, "invalid retry_deadline"),
        ({"addresses": ["h:1"], "dial_timeout": 1}, "dial_timeout"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ProducerPool(**arguments)  # type: ignore[arg-type]


# -- copies ----------------------------------------------------------------------------------------------


async def test_copies_are_on_different_nsqds(trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ProducerPool(_addresses(trio), copies=2) as pool:
        await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(60)))
        await pool.multi_publish(topic, [b"60", b"61"])
    held: list[set[bytes]] = []
    count: Counter[tuple[bytes | None, bytes]] = Counter()
    for daemon in trio:
        messages = [unwrap(body)[::2] for body in messages_of(daemon, topic)]
        held.append({body for _, body in messages})
        count.update(messages)
    is_exact = not _may_repeat(caplog)
    assert set(count.values()) == {2} if is_exact else min(count.values()) >= 2, "each key twice"
    assert {int(body) for _, body in count} == set(range(62)) and len(count) == 62, "each body under one key"
    assert sum(map(len, held)) == 124 if is_exact else sum(map(len, held)) >= 124, "no nsqd has both copies"
    assert all(held), "all nsqds are used"


async def test_copies_are_handled_once_where_the_consumer_remembers(trio: list[Nsqd], topic: str) -> None:
    handled: Counter[bytes] = Counter()
    options = {"nsqd": _addresses(trio), "max_in_flight": 50}
    async with (
        ProducerPool(_addresses(trio), copies=2) as pool,
        Consumer(topic, "ch", dedupe=True, **options) as consumer,  # type: ignore[arg-type]
    ):
        running = asyncio.create_task(consumer.run(lambda message: handled.update([message.body])))
        await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(100)))
        await until(lambda: len(handled) == 100 and consumer.stats().finished >= 200)
        await consumer.close()
        await running
    assert set(map(int, handled)) == set(range(100))
    assert set(handled.values()) == {1}


async def test_copies_go_past_a_dead_nsqd(trio: list[Nsqd], topic: str) -> None:
    async with ProducerPool([NOBODY, *_addresses(trio[:2])], copies=2) as pool:
        await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(20)))
    for daemon in trio[:2]:
        assert {int(unwrap(body).body) for body in messages_of(daemon, topic)} == set(range(20))


async def test_too_few_nsqds_for_the_copies_is_an_error(trio: list[Nsqd], topic: str) -> None:
    async with ProducerPool([NOBODY, address_of(trio[0])], copies=2, retry_deadline=1) as pool:
        await _fails_at_last(lambda: pool.publish(topic, b"x"), "1 of 2 copies were taken within 1 s - ")
        await _fails_at_last(lambda: pool.publish(topic, b"x"), "2 nsqds needed, 2 known, 1 of them usable")


# -- discovery -------------------------------------------------------------------------------------------


async def test_nsqds_are_found_join_and_leave(tmp_path: Path, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    with Nsqlookupd() as lookupd:
        daemons = start_nsqds(tmp_path, 2, f"--lookupd-tcp-address={lookupd.tcp_address}")
        try:
            eventually(lambda: len(lookupd.nodes()) == 2)
            options = {"lookupd": lookupd.http_address, "lookupd_poll_interval": "100ms"}
            async with ProducerPool(**options) as pool:  # type: ignore[arg-type]
                await pool.publish(topic, b"found")
                assert {status.address for status in pool.nsqds()} == set(_addresses(daemons))
                daemons[0].stop()
                await until(lambda: [status.address for status in pool.nsqds()] == [address_of(daemons[1])])
                await pool.publish(topic, b"left")
                daemons[0].start()
                await until(lambda: len(pool.nsqds()) == 2)
                # Restarted nsqlookupds know nobody for a while; that is no reason to stop publishing.
                lookupd.kill()
                lookupd.start()
                await pool.publish(topic, b"still there")
                assert len(pool.nsqds()) == 2
            there = all_messages(daemons, topic)
            assert len(set(there)) == 3 and (len(there) == 3 or _may_repeat(caplog))
        finally:
            for daemon in daemons:
                daemon.kill()


async def test_only_nsqds_with_the_topic_are_used_if_so_asked(tmp_path: Path, topic: str) -> None:
    with Nsqlookupd() as lookupd:
        daemons = start_nsqds(tmp_path, 2, f"--lookupd-tcp-address={lookupd.tcp_address}")
        try:
            daemons[1].post("/topic/create", topic=topic)
            eventually(lambda: lookupd.producers(topic) and len(lookupd.nodes()) == 2)
            async with ProducerPool(lookupd=lookupd.http_address, lookupd_topic=topic) as pool:
                await pool.publish(topic, b"x")
                assert [status.address for status in pool.nsqds()] == [address_of(daemons[1])]
        finally:
            for daemon in daemons:
                daemon.kill()


async def test_with_no_nsqd_found_the_error_says_so(topic: str) -> None:
    with Nsqlookupd() as lookupd:
        async with ProducerPool(lookupd=[lookupd.http_address], retry_deadline=0.5) as pool:
            with pytest.raises(NotConnected, match="1 nsqds needed, 0 known"):
                await pool.publish(topic, b"x")


@pytest.mark.parametrize("lookupd_topic", [None, "nobody_has_it"])
async def test_with_no_nsqd_found_the_error_says_what_nsqlookupd_said(topic: str, lookupd_topic: str | None) -> None:
    with Nsqlookupd() as lookupd:
        if lookupd_topic is None:
            lookupd.kill()
        options = {"lookupd_topic": lookupd_topic, "retry_deadline": 1}
        async with ProducerPool(lookupd=lookupd.http_address, **options) as pool:  # type: ignore[arg-type]
            reason = "refused" if lookupd_topic is None else "TOPIC_NOT_FOUND"
            text = f"1 nsqds needed, 0 known, 0 of them usable - .*{reason}"
            await _fails_at_last(lambda: pool.publish(topic, b"x"), text)
            with pytest.raises(NotConnected, match=f"0 known, 0 of them usable - .*{reason}"):
                await pool.ping()


# -- bounds, cancelling and the end ----------------------------------------------------------------------


async def test_what_is_outstanding_is_bounded(trio: list[Nsqd], proxies: list[FaultProxy], topic: str) -> None:
    async with ProducerPool(_proxied(proxies[:1]), outstanding_max=3) as pool:
        await pool.ping()
        proxies[0].stall()
        futures = [pool.publish_nowait(topic, b"%d" % number) for number in range(3)]
        with pytest.raises(TooMuchOutstanding, match="3 publishes"):
            pool.publish_nowait(topic, b"3")
        waiting = asyncio.create_task(pool.publish(topic, b"3"))
        await asyncio.sleep(0)
        assert not waiting.done() and pool.outstanding == 3
        proxies[0].resume()
        await asyncio.gather(waiting, *futures)
    assert sorted(messages_of(trio[0], topic)) == [b"0", b"1", b"2", b"3"]


async def test_bytes_are_bounded_and_one_publish_always_fits(
    trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ProducerPool(_addresses(trio), outstanding_bytes_max=10) as pool:
        future = pool.publish_nowait(topic, b"x" * 100)
        with pytest.raises(TooMuchOutstanding, match="100 bytes"):
            pool.publish_nowait(topic, b"y")
        await asyncio.gather(future, *(pool.publish(topic, b"z" * 100) for _ in range(5)))
    count = len(all_messages(trio, topic))
    assert count == 6 or (count > 6 and _may_repeat(caplog))


async def test_a_cancelled_publish_leaves_the_others_alone(
    trio: list[Nsqd], proxies: list[FaultProxy], topic: str
) -> None:
    async with ProducerPool(_proxied(proxies[:1])) as pool:
        await pool.ping()
        proxies[0].stall()
        tasks = [asyncio.create_task(pool.publish(topic, b"%d" % number)) for number in range(3)]
        await until(lambda: pool.outstanding == 3)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert pool.outstanding == 3, "its answer is still to come"
        proxies[0].resume()
        await asyncio.gather(tasks[0], tasks[2])
        await until(lambda: pool.outstanding == 0)
        await pool.publish(topic, b"3")


async def test_a_cancelled_publish_makes_room_even_if_it_was_never_sent(topic: str) -> None:
    async with ProducerPool([NOBODY], outstanding_max=1) as pool:
        publishing = asyncio.create_task(pool.publish(topic, b"x"))
        await until(lambda: _states(pool) == ["down"])
        assert pool.outstanding == 1
        publishing.cancel()
        await asyncio.wait([publishing])
        assert pool.outstanding == 0


async def test_what_was_cancelled_while_there_was_no_nsqd_makes_room_when_there_is_one(
    tmp_path: Path, topic: str
) -> None:
    (daemon,) = start_nsqds(tmp_path, 1)
    try:
        async with ProducerPool(_addresses([daemon]), outstanding_max=2, retry_deadline=300) as pool:
            await pool.ping()
            daemon.kill()
            unsent = [pool.publish_nowait(topic, b"x") for _ in range(2)]
            await until(lambda: _states(pool) == ["down"])
            for answer in unsent:
                answer.cancel()
            daemon.start()
            async with asyncio.timeout(WAIT_S):
                await pool.publish(topic, b"y")
            assert pool.outstanding == 0
    finally:
        daemon.kill()


async def test_a_publish_that_is_cancelled_while_it_waits_for_room_holds_no_other(
    trio: list[Nsqd], proxies: list[FaultProxy], topic: str
) -> None:
    async with ProducerPool(_proxied(proxies[:1]), outstanding_bytes_max=1000) as pool:
        await pool.ping()
        proxies[0].stall()
        first = pool.publish_nowait(topic, b"x" * 400)
        big = asyncio.create_task(pool.publish(topic, b"y" * 700))
        await asyncio.sleep(0)
        small = asyncio.create_task(pool.publish(topic, b"z"))
        await asyncio.sleep(0)
        assert pool.outstanding == 1
        big.cancel()
        await until(lambda: pool.outstanding == 2)
        last = pool.publish_nowait(topic, b"there is room")
        proxies[0].resume()
        await asyncio.gather(first, small, last)
    assert len(messages_of(trio[0], topic)) == 3


@pytest.mark.parametrize("end", ["cancelled", "too late"])
async def test_nothing_is_kept_of_a_publish_that_found_no_nsqd(topic: str, end: str) -> None:
    """While all nsqds are down for hours, programs go on to publish."""
    before = {id(known) for known in gc.get_objects() if isinstance(known, Publish)}  # what a failed test has left
    async with ProducerPool([NOBODY], retry_deadline=60 if end == "cancelled" else 0.2) as pool:
        publishing = [asyncio.create_task(pool.publish(topic, b"x")) for _ in range(10)]
        await until(lambda: _states(pool) == ["down"])
        while publishing:
            task = publishing.pop()
            if end == "cancelled":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        del task
        await asyncio.sleep(0)  # what is waited for belongs to its turn of the loop
        gc.collect()
        assert not [kept for kept in gc.get_objects() if isinstance(kept, Publish) and id(kept) not in before]


async def test_close_waits_for_answers(trio: list[Nsqd], topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ProducerPool(_addresses(trio)) as pool:
        futures = [pool.publish_nowait(topic, b"%d" % number) for number in range(500)]
    assert all(future.done() and future.exception() is None for future in futures)
    there = all_messages(trio, topic)
    assert len(set(there)) == 500 and (len(there) == 500 or _may_repeat(caplog))
    with pytest.raises(Closed):
        await pool.publish(topic, b"x")
    with pytest.raises(Closed):
        await pool.ping()


async def test_close_settles_what_nobody_answers_and_leaves_nothing(
    trio: list[Nsqd], proxies: list[FaultProxy], topic: str
) -> None:
    pool = ProducerPool([NOBODY, *_proxied(proxies)], outstanding_max=20, copies=2)
    await asyncio.gather(pool.publish(topic, b"x"), pool.publish(topic, b"x"))
    for proxy in proxies:
        proxy.stall()
    futures = [pool.publish_nowait(topic, b"%d" % number) for number in range(20)]
    waiting = asyncio.create_task(pool.publish(topic, b"waits for room"))
    await asyncio.sleep(0.05)
    await pool.close(timeout=0.2)
    outcomes = await asyncio.gather(waiting, *futures, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Closed}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for proxy in proxies:
        proxy.resume()
    await until(lambda: not any(daemon.stats()["producers"] for daemon in trio))


async def test_a_cancelled_close_still_settles_everything(
    trio: list[Nsqd], proxies: list[FaultProxy], topic: str
) -> None:
    pool = ProducerPool(_proxied(proxies[:1]))
    await pool.ping()
    proxies[0].stall()
    future = pool.publish_nowait(topic, b"x")
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert isinstance(future.exception(), Closed)
    await pool.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_close_ends_quiet_connections(trio: list[Nsqd], topic: str) -> None:
    pool = ProducerPool(_addresses(trio))
    await pool.publish(topic, b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await pool.close()
    await until(lambda: not any(daemon.stats()["producers"] for daemon in trio))
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_publish_that_is_refused_by_an_nsqd_on_trial_holds_no_other() -> None:
    is_well = False

    def answer(peer: Peer, line: bytes, body: bytes) -> bytes:
        if not is_well:
            return error_frame("E_PUB_FAILED the disk is full")
        return error_frame("E_UNAUTHORIZED no") if line == b"PUB forbidden" else say_ok(peer, line, body)

    async with ScriptedNsqd() as server:
        server.on_command = answer
        async with ProducerPool([server.address], retry_deadline=20) as pool:
            refused, taken = pool.publish_nowait("forbidden", b"1"), pool.publish_nowait("fine", b"2")
            await until(lambda: _states(pool) == ["down"])
            is_well = True
            with pytest.raises(ServerError, match="E_UNAUTHORIZED"):
                await refused
            await taken
