"""Checks several nsqds and two nsqlookupds, all real processes, and what users see when parts of it fail.

NSQD and NSQLOOKUPD may name other programs: the tests hold for any mixture.
"""

import asyncio
import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import nsq
import pytest

from faults.shim import Rule, Shim
from harness import FaultProxy, Nsqd, eventually
from harness.holding import hold
from harness.lookupd import Nsqlookupd, nsqlookupd_is_ours

PING_INTERVAL_S = 15
"""Every nsqd pings this often; an nsqlookupd that lost its memory is filled again within that."""

_serial = itertools.count(1)

Pair = tuple[Nsqlookupd, Nsqlookupd]
Start = Callable[..., Nsqd]


@pytest.fixture
def lookupds() -> Iterator[Pair]:
    with Nsqlookupd() as first, Nsqlookupd() as second:
        yield first, second


@pytest.fixture
def start(tmp_path: Path, lookupds: Pair) -> Iterator[Start]:
    """Starts an nsqd that knows both nsqlookupds, or those at the addresses given."""
    nsqds: list[Nsqd] = []

    def run(*addresses: str, flags: tuple[str, ...] = ()) -> Nsqd:
        directory = tmp_path / f"nsqd{next(_serial)}"
        directory.mkdir()
        known = addresses or tuple(lookupd.tcp_address for lookupd in lookupds)
        nsqds.append(Nsqd(directory, *(f"--lookupd-tcp-address={address}" for address in known), *flags))
        return nsqds[-1].start()

    yield run
    for nsqd in nsqds:
        nsqd.kill()


def address_of(proxy: FaultProxy) -> str:
    return f"127.0.0.1:{proxy.address[1]}"


def create(nsqd: Nsqd, topic: str, *channels: str) -> None:
    assert nsqd.post("/topic/create", topic=topic).status == 200
    for channel in channels:
        assert nsqd.post("/channel/create", topic=topic, channel=channel).status == 200


def touch(nsqd: Nsqd) -> None:
    """Gives nsqd something to tell: a lost connection is opened again for it, without waiting for a ping."""
    create(nsqd, f"touch{next(_serial)}")


def wait_touching(nsqd: Nsqd, condition: Callable[[], bool]) -> None:
    """Waits for something that nsqd does once a lost connection is open again."""

    def is_so() -> bool:
        touch(nsqd)
        return condition()

    eventually(is_so, interval_s=0.2)


def wait_until_known(nsqd: Nsqd, lookupds: Pair) -> None:
    """Waits until nsqd has registered something with both: it knows then whom to ask for channels."""
    topic = f"known{next(_serial)}"
    create(nsqd, topic)
    eventually(lambda: all(known.producers(topic) == {nsqd.tcp} for known in lookupds))


def nodes_of(lookupd: Nsqlookupd) -> list[tuple[str, int]]:
    return [(node["broadcast_address"], node["tcp_port"]) for node in lookupd.nodes()]


def channels_of(nsqd: Nsqd, topic: str) -> set[str]:
    return {channel["channel_name"] for channel in nsqd.topic(topic)["channels"]}


def test_every_nsqlookupd_knows_every_nsqd(lookupds: Pair, start: Start) -> None:
    nsqds = [start() for _ in range(3)]
    for nsqd in nsqds:
        create(nsqd, "t", "c")
    everyone = {nsqd.tcp for nsqd in nsqds}
    eventually(lambda: all(known.producers("t") == everyone for known in lookupds))
    eventually(lambda: all(known.channels("t") == {"c"} for known in lookupds))
    assert all(set(nodes_of(lookupd)) == everyone for lookupd in lookupds)


def test_what_is_deleted_is_unregistered(lookupds: Pair, start: Start) -> None:
    lookupd, nsqd = lookupds[0], start()
    create(nsqd, "t", "keeps", "goes#ephemeral")
    eventually(lambda: lookupd.channels("t") == {"keeps", "goes#ephemeral"})
    nsqd.post("/channel/delete", topic="t", channel="goes#ephemeral")
    eventually(lambda: lookupd.channels("t") == {"keeps"})
    assert lookupd.producers("t") == {nsqd.tcp}
    nsqd.post("/topic/delete", topic="t")
    eventually(lambda: lookupd.producers("t") == set())
    assert lookupd.topics() == {"t"}


def test_a_killed_nsqd_vanishes_and_the_others_stay(lookupds: Pair, start: Start) -> None:
    dies, lives = start(), start()
    for nsqd in (dies, lives):
        create(nsqd, "t")
    eventually(lambda: all(len(known.producers("t")) == 2 for known in lookupds))
    dies.kill()
    eventually(lambda: all(known.producers("t") == {lives.tcp} for known in lookupds))
    assert all(nodes_of(lookupd) == [lives.tcp] for lookupd in lookupds)


def test_an_nsqlookupd_that_lost_its_memory_is_filled_within_a_ping(lookupds: Pair, start: Start) -> None:
    dies, lives = lookupds
    nsqd = start()
    create(nsqd, "with_channel", "c")
    create(nsqd, "without")
    eventually(lambda: all(known.producers("without") == {nsqd.tcp} for known in lookupds))
    dies.kill()
    assert lives.producers("with_channel") == {nsqd.tcp}
    dies.start()
    eventually(lambda: dies.producers("without") == {nsqd.tcp}, 2 * PING_INTERVAL_S + 3)
    eventually(lambda: dies.producers("with_channel") == {nsqd.tcp})
    assert dies.channels("with_channel") == {"c"}


def test_a_new_topic_reopens_a_lost_connection_at_once(start: Start, lookupds: Pair) -> None:
    lookupd, _ = lookupds
    nsqd = start(lookupd.tcp_address)
    create(nsqd, "before", "c")
    eventually(lambda: lookupd.channels("before") == {"c"})
    lookupd.kill()
    lookupd.start()

    wait_touching(nsqd, lambda: lookupd.producers("before") == {nsqd.tcp})
    eventually(lambda: lookupd.channels("before") == {"c"})


def test_a_topic_on_a_new_nsqd_starts_with_the_channels_the_cluster_knows(lookupds: Pair, start: Start) -> None:
    old = start()
    create(old, "t", "c1", "c2", "gone#ephemeral")
    eventually(lambda: lookupds[0].channels("t") == {"c1", "c2", "gone#ephemeral"})
    new = start()
    wait_until_known(new, lookupds)
    assert new.post("/pub", b"for both", topic="t").status == 200
    eventually(lambda: channels_of(new, "t") == {"c1", "c2"})
    eventually(lambda: {channel["depth"] for channel in new.topic("t")["channels"]} == {1})
    eventually(lambda: lookupds[0].producers("t") == {old.tcp, new.tcp})


@pytest.mark.ours
def test_a_channel_deleted_while_nsqlookupd_is_asked_stays_deleted(lookupds: Pair, start: Start) -> None:
    old = start()
    create(old, "t", "stays", "goes", "unseen")
    eventually(lambda: all(known.channels("t") == {"stays", "goes", "unseen"} for known in lookupds))
    new = start(flags=("--http-client-request-timeout=60s",))  # until both go on, however busy the machine is
    wait_until_known(new, lookupds)
    for lookupd in lookupds:
        hold(lookupd.pid)
    try:
        create(new, "t", "goes")
        assert new.post("/channel/delete", topic="t", channel="goes").status == 200
        assert new.post("/channel/delete", topic="t", channel="unseen").status == 404
    finally:
        for lookupd in lookupds:
            os.kill(lookupd.pid, signal.SIGCONT)
    eventually(lambda: "stays" in channels_of(new, "t"))
    assert channels_of(new, "t") == {"stays"}
    create(new, "t", "goes")
    assert channels_of(new, "t") == {"stays", "goes"}


@pytest.mark.ours
def test_a_topic_whose_first_publish_found_the_disk_full_gets_its_channels_too(
    lookupds: Pair, start: Start, tmp_path: Path
) -> None:
    old = start()
    create(old, "t", "c")
    eventually(lambda: lookupds[0].channels("t") == {"c"})
    data_path = tmp_path / "full"
    data_path.mkdir()
    shim = Shim(tmp_path, data_path)
    shim.set_rules(Rule("write", "*/t.t/cursors", errno.ENOSPC, times=2))
    flags = (f"--lookupd-tcp-address={lookupd.tcp_address}" for lookupd in lookupds)
    with Nsqd(data_path, *flags, environment=shim.environment) as new:
        wait_until_known(new, lookupds)
        assert new.post("/pub", b"refused", topic="t").status == 503
        assert new.post("/pub", b"taken", topic="t").status == 200
        eventually(lambda: [channel["depth"] for channel in new.topic("t")["channels"]] == [1])


def test_the_channels_outlive_the_nsqd_that_had_them(lookupds: Pair, start: Start) -> None:
    old = start()
    create(old, "t", "c")
    eventually(lambda: lookupds[1].channels("t") == {"c"})
    old.kill()
    eventually(lambda: lookupds[1].nodes() == [])
    new = start()
    wait_until_known(new, lookupds)
    create(new, "t")
    eventually(lambda: channels_of(new, "t") == {"c"})


async def test_a_consumer_finds_a_new_nsqd(lookupds: Pair, start: Start) -> None:
    received: list[bytes] = []

    def handle(message: nsq.Message) -> bool:
        received.append(message.body)
        return True

    async def arrives(body: bytes) -> None:
        async with asyncio.timeout(30):
            while body not in received:
                await asyncio.sleep(0.01)

    first = start()
    first.post("/pub", b"first", topic="t")
    eventually(lambda: lookupds[0].producers("t") == {first.tcp})
    reader = nsq.Reader(
        topic="t",
        channel="c",
        message_handler=handle,
        lookupd_http_addresses=[lookupd.http_address for lookupd in lookupds],
        lookupd_poll_interval=1,
        lookupd_poll_jitter=0.0,
        max_in_flight=10,
    )
    try:
        await arrives(b"first")
        second = start()
        second.post("/pub", b"second", topic="t")
        await arrives(b"second")
        lookupds[0].kill()
        third = start()
        third.post("/pub", b"third", topic="t")
        await arrives(b"third")
    finally:
        reader.close()


# -- A network that misbehaves ---------------------------------------------------------------------------


def test_a_cut_connection_is_opened_again(start: Start, lookupds: Pair) -> None:
    lookupd, _ = lookupds
    with FaultProxy(lookupd.tcp) as proxy:
        nsqd = start(address_of(proxy))
        create(nsqd, "t")
        eventually(lambda: lookupd.producers("t") == {nsqd.tcp})
        proxy.refusing = True
        proxy.cut()
        eventually(lambda: lookupd.producers("t") == set())
        touch(nsqd)
        proxy.heal()

        def back() -> bool:
            touch(nsqd)
            return lookupd.producers("t") == {nsqd.tcp}

        eventually(back, interval_s=0.2)
        assert len(lookupd.nodes()) == 1


def test_a_slow_network_delays_and_breaks_nothing(start: Start, lookupds: Pair) -> None:
    lookupd, _ = lookupds
    with FaultProxy(lookupd.tcp) as proxy:
        proxy.up.delay_s = proxy.down.delay_s = 0.15
        nsqd = start(address_of(proxy))
        create(nsqd, "t", "c1", "c2")
        eventually(lambda: lookupd.channels("t") == {"c1", "c2"})

        def goes_undisturbed() -> bool:
            connecting, topic = nsqd.log.count("LOOKUP connecting"), f"more{next(_serial)}"
            create(nsqd, topic)
            eventually(lambda: lookupd.producers(topic) == {nsqd.tcp})
            return nsqd.log.count("LOOKUP connecting") == connecting

        # Where a process stood still for a while, a reply was late; not every time.
        assert nsqd.log.count("LOOKUP connecting") == 1 or eventually(goes_undisturbed)


def test_a_stalled_nsqlookupd_keeps_nobody_from_the_other(start: Start, lookupds: Pair) -> None:
    stalls, works = lookupds
    with FaultProxy(stalls.tcp) as proxy:
        nsqd = start(address_of(proxy), works.tcp_address)
        create(nsqd, "before")
        eventually(lambda: stalls.producers("before") == {nsqd.tcp})
        proxy.stall()
        create(nsqd, "t", "c")
        nsqd.post("/pub", b"published all the same", topic="t")
        eventually(lambda: works.channels("t") == {"c"})
        eventually(lambda: nsqd.channel("t", "c")["depth"] == 1)
        proxy.resume()
        proxy.cut()
        wait_touching(nsqd, lambda: stalls.producers("t") == {nsqd.tcp})


@pytest.mark.ours
def test_garbled_replies_never_kill_an_nsqd(start: Start, lookupds: Pair) -> None:
    garbled, works = lookupds
    with FaultProxy(garbled.tcp, seed=3) as proxy:
        proxy.down.garble_every_bytes = 4
        nsqd = start(address_of(proxy), works.tcp_address)
        for _ in range(5):
            touch(nsqd)
        create(nsqd, "t", "c")
        eventually(lambda: works.channels("t") == {"c"}, 20)
        assert nsqd.is_running


@pytest.mark.skipif(not nsqlookupd_is_ours(), reason="a garbled size may well crash NSQ's nsqlookupd")
def test_garbled_commands_never_kill_an_nsqlookupd(start: Start, lookupds: Pair) -> None:
    lookupd, _ = lookupds
    with FaultProxy(lookupd.tcp, seed=5) as proxy:
        proxy.up.garble_every_bytes = 50
        nsqd = start(address_of(proxy))
        for _ in range(5):
            touch(nsqd)
        assert lookupd.get("/ping").body == b"OK"
        proxy.heal()
        proxy.cut()

        def told() -> bool:
            touch(nsqd)
            return nodes_of(lookupd) == [nsqd.tcp]

        eventually(told, interval_s=0.2)
