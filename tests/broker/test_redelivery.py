"""Messages that fail again and again and messages that do not all get their turn."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from harness import Nsqd, Wire
from harness.wire import MESSAGE, Message

GOOD = 20
GIVEN_UP = 4 * GOOD
"""After this many deliveries a test gives up: where redeliveries come first there is no end to them."""


def deliveries(consumers: Sequence[Wire], good: int, answer: Callable[[Wire, Message], None]) -> list[Message]:
    """Returns what the consumers are sent until so many good messages were among it."""
    found: list[Message] = []
    for wire in itertools.cycle(consumers):
        with contextlib.suppress(TimeoutError):
            found.append(wire.read_message(20 if len(consumers) == 1 else 0.02))
            good -= found[-1].body.startswith(b"good")
            answer(wire, found[-1])
        if not good or len(found) == GIVEN_UP:
            break
    return found


def requeue_the_bad(wire: Wire, message: Message) -> None:
    if message.body.startswith(b"good"):
        wire.FIN(message.id)
    else:
        wire.REQ(message.id, 0)


def shares(found: list[Message]) -> tuple[int, int]:
    redelivered = sum(message.attempts > 1 for message in found)
    return redelivered, len(found) - redelivered


@pytest.mark.parametrize("bad", [1, 5])
@pytest.mark.parametrize(("consumers", "rdy"), [(1, 1), (1, 2), (1, 3), (3, 1), (2, 10)])
def test_bad_messages_leave_half_of_the_turns_to_new_ones(
    connect: Callable[..., Wire], topic: str, bad: int, consumers: int, rdy: int
) -> None:
    bodies = [b"bad %d" % number for number in range(bad)] + [b"good %d" % number for number in range(GOOD)]
    wires = [connect().subscribe(topic) for _ in range(consumers)]
    connect().publish(topic, *bodies)
    for wire in wires:
        wire.RDY(rdy)
    found = deliveries(wires, GOOD, requeue_the_bad)
    redelivered, new = shares(found)
    assert new == bad + GOOD, f"{redelivered} redeliveries and {new} new messages"
    assert redelivered <= new + consumers * rdy
    counted = Counter(message.body for message in found if message.attempts > 1)
    if redelivered >= 2 * bad + consumers * rdy:
        assert len(counted) == bad, f"only {counted} came again"


def test_a_redelivery_is_not_kept_waiting_by_new_messages(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic)
    connect().publish(topic, b"bad", *[b"good"] * 50)
    consumer.RDY(1)
    consumer.REQ(consumer.read_message().id, 0)
    coming = [consumer.read_messages(1, finish=True)[0].body for _ in range(2)]
    assert coming == [b"good", b"bad"]


def test_a_message_that_times_out_comes_behind_one_that_waited(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    """Nothing is finished, which this process might do too late: the second times out as well."""
    consumer = connect(make_nsqd("--msg-timeout=1s"))
    consumer.publish("t", b"first")
    consumer.publish("t", b"second")
    consumer.subscribe("t", rdy=1)
    coming = [(message.body, message.attempts) for message in consumer.read_messages(3)]
    assert coming == [(b"first", 1), (b"second", 1), (b"first", 2)]


def test_a_message_that_times_out_for_ever_starves_nobody(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    consumer = connect(make_nsqd("--msg-timeout=500ms"))
    consumer.publish("t", b"bad", *[b"good"] * 6)
    consumer.subscribe("t", rdy=1)
    found: list[Message] = []
    while shares(found)[1] < 7 and len(found) < 20:
        frame = consumer.read_frame()
        if frame.kind == MESSAGE:
            found.append(Message.parse(frame.data))
            if found[-1].body == b"good":
                consumer.FIN(found[-1].id)
        else:  # this process was held up: the message comes again, in its turn
            assert frame.data.startswith(b"E_FIN_FAILED")
    redelivered, new = shares(found)
    assert (new, redelivered <= 7) == (7, True)


def test_redeliveries_take_turns_among_themselves(connect: Callable[..., Wire], topic: str) -> None:
    """The lowest redelivery, given back each time, must not be the only one that comes."""
    consumer = connect().subscribe(topic)
    connect().publish(topic, *[b"%d" % number for number in range(10)])
    consumer.RDY(10)
    for message in consumer.read_messages(10):
        consumer.REQ(message.id, 0)
    # All are in the window again at once: keep it, and let the next come one by one.
    held = consumer.read_messages(10)
    consumer.RDY(1)
    for message in held:
        consumer.REQ(message.id, 0)
    counted: Counter[bytes] = Counter()
    for _ in range(40):
        message = consumer.read_message()
        counted[message.body] += 1
        consumer.REQ(message.id, 0)
    assert set(counted.values()) == {4}, counted


def test_a_sampled_consumer_gets_new_messages_too(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, sample_rate=90)
    bodies = [b"bad %d" % number for number in range(30)] + [b"good %d" % number for number in range(200)]
    connect().publish(topic, *bodies)
    consumer.RDY(1)
    found: list[Message] = []
    while sum(message.body.startswith(b"good") for message in found) < GOOD:
        assert len(found) < 30 + GIVEN_UP
        found.append(consumer.read_message())
        requeue_the_bad(consumer, found[-1])
    redelivered, new = shares(found)
    assert redelivered <= new


@pytest.mark.ours
def test_with_topology_too(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd(
        "--enable-experiment=topology-aware-consumption", "--topology-region=here", "--topology-zone=here-1"
    )
    near = connect(daemon).subscribe("t", topology_zone="here-1", topology_region="here")
    far = connect(daemon).subscribe("t", topology_zone="there-1", topology_region="there")
    connect(daemon).publish("t", b"bad", *[b"good"] * GOOD)
    near.RDY(1)
    far.RDY(1)
    redelivered, new = shares(deliveries([near, far], GOOD, requeue_the_bad))
    assert new == 1 + GOOD
    assert redelivered <= new + 1
