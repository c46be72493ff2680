"""Checks nsqd behind a network that cuts, delays, stalls, garbles and half-closes."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from harness import ClosedError, FaultProxy, Nsqd, Wire, eventually
from harness.wire import MESSAGE

NSQD_FLAGS = ("--msg-timeout=3s",)


@pytest.fixture
def proxy(nsqd: Nsqd) -> Iterator[FaultProxy]:
    with FaultProxy(nsqd.tcp) as running:
        yield running


@pytest.fixture
def through(proxy: FaultProxy) -> Iterator[Callable[[], Wire]]:
    """Opens connections that go through the proxy."""
    wires: list[Wire] = []

    def open_one() -> Wire:
        wires.append(Wire(proxy.address))
        return wires[-1]

    yield open_one
    for wire in wires:
        wire.close()


def _read_until_closed(wire: Wire) -> None:
    with contextlib.suppress(ClosedError):
        while True:
            wire.read_frame()


def test_cut_consumer_loses_nothing(
    nsqd: Nsqd, connect: Callable[..., Wire], proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    consumer = through().subscribe(topic, rdy=3)
    connect().publish(topic, b"a", b"b", b"c", b"d")
    first = consumer.read_messages(3)

    def finished() -> bool:
        """Finishes it once more if it timed out before: this process may be held up."""
        if nsqd.channel(topic)["clients"][0]["finish_count"] == 1:
            return True
        consumer.FIN(first[0].id)
        return False

    eventually(finished)
    proxy.cut()
    _read_until_closed(consumer)
    eventually(lambda: nsqd.channel(topic)["client_count"] == 0)
    again = connect().subscribe(topic, rdy=10, msg_timeout=60_000)
    # The fourth may or may not have been on its way to the consumer that was cut off.
    bodies = {message.body for message in again.read_messages(3, finish=True)}
    assert bodies == {b"a", b"b", b"c", b"d"} - {first[0].body}


def test_publisher_cut_in_the_middle_of_a_body(
    nsqd: Nsqd, proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    publisher = through()
    publisher.publish(topic, b"whole")
    publisher.send(f"PUB {topic}\n".encode() + (1000).to_bytes(4, "big") + b"x" * 999)
    time.sleep(0.05)  # lets the proxy pass it on
    proxy.cut()
    assert nsqd.get("/ping").body == b"OK"
    assert nsqd.topic(topic)["message_count"] == 1


def test_publisher_whose_side_is_half_closed_is_let_go(
    nsqd: Nsqd, proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    publisher = through()
    publisher.publish(topic, b"one")
    proxy.half_close("up")
    publisher.expect_closed()
    assert nsqd.topic(topic)["message_count"] == 1


@pytest.mark.parametrize("chunk_bytes", [1, 7])
def test_bytes_that_trickle(proxy: FaultProxy, through: Callable[[], Wire], topic: str, chunk_bytes: int) -> None:
    proxy.up.chunk_bytes = proxy.down.chunk_bytes = chunk_bytes
    proxy.up.bytes_per_s = proxy.down.bytes_per_s = 20_000
    client = through()
    client.identify(client_id="trickle")
    client.publish(topic, b"one", b"two", b"three")
    client.subscribe(topic, rdy=10)
    assert {message.body for message in client.read_messages(3, finish=True)} == {b"one", b"two", b"three"}


def test_stalled_consumer_does_not_hold_up_others(
    nsqd: Nsqd, connect: Callable[..., Wire], proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    through().subscribe(topic, rdy=2000)
    healthy = connect().subscribe(topic, "healthy", rdy=100, msg_timeout=60_000)
    proxy.stall()
    publisher = connect()
    for _ in range(10):
        publisher.publish(topic, *[b"x" * 5000] * 100)
    assert len(healthy.read_messages(1000, finish=True)) == 1000
    assert nsqd.get("/ping").body == b"OK"


def test_stall_and_resume(
    connect: Callable[..., Wire], proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    consumer = through().subscribe(topic, rdy=1)
    consumer.assert_usable()
    proxy.stall()
    connect().publish(topic, b"x")
    consumer.expect_silence(0.2)
    proxy.resume()
    assert consumer.read_message().body == b"x"


def test_delayed_fin_arrives_too_late(
    nsqd: Nsqd, connect: Callable[..., Wire], proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    consumer = through().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    message = consumer.read_message()
    consumer.RDY(0)
    consumer.PUB("still_usable#ephemeral", b"x")
    while consumer.read_frame().kind == MESSAGE:  # again, if this process was held up
        continue
    proxy.up.stalled = True
    consumer.FIN(message.id)
    eventually(lambda: (shown := nsqd.channel(topic))["depth"] == 1 and shown["in_flight_count"] == 0)
    assert nsqd.channel(topic)["timeout_count"] >= 1
    proxy.resume()
    consumer.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight", fatal=False)
    consumer.assert_usable()


@pytest.mark.parametrize("seed", range(5))
def test_garbled_bytes_hurt_only_their_connection(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str, seed: int
) -> None:
    with FaultProxy(nsqd.tcp, seed=seed) as proxy:
        proxy.up.garble_every_bytes = 50
        for _ in range(10):
            client = Wire(proxy.address)
            with contextlib.suppress(ClosedError, TimeoutError, OSError):
                client.send(f"PUB {topic}_garbled#ephemeral\n".encode() + (100).to_bytes(4, "big") + b"x" * 100)
                client.read_frame(0.05)
            client.close()
    bystander = connect()
    bystander.publish(topic, b"unharmed")
    assert bystander.subscribe(topic, rdy=1).read_message().body == b"unharmed"
    assert nsqd.get("/ping").body == b"OK"


def test_refused_connections_can_be_tried_again(proxy: FaultProxy, through: Callable[[], Wire]) -> None:
    proxy.refusing = True
    with pytest.raises((ClosedError, OSError)):
        through().assert_usable()
    proxy.heal()
    through().assert_usable()


def test_many_reconnects_leave_no_clients_behind(
    nsqd: Nsqd, proxy: FaultProxy, through: Callable[[], Wire], topic: str
) -> None:
    for _ in range(30):
        through().subscribe(topic, rdy=1)
        proxy.cut()
    eventually(lambda: nsqd.channel(topic)["client_count"] == 0)
