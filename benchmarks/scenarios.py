"""Says what is measured, and what is to be reached beside NSQ's own nsqd.

Every scenario checks its counts against the broker's /stats: a lost or repeated message is an error, not a
figure.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import consumers, publishers
from benchmarks.broker import Broker
from benchmarks.measure import Measurement, Meter
from benchmarks.upgrades import PLAIN, Upgrade, events
from benchmarks.wire import LoadError, Unit, mpub, pipelined_pub, pub
from benchmarks.worker import Load, Worker

TOPIC = "bench"
CHANNEL = "ch"
BATCH_MESSAGES = 200
BATCH_CONNECTIONS, BATCH_WINDOW = 2, 1
"""Each batch waits for the OK of the one before, as in NSQ's own bench_writer on two cores."""
DEEP_CONNECTIONS, DEEP_WINDOW = 4, 4
"""So many batches are on their way that the broker never waits for the next."""
PIPELINE_MESSAGES = 100
RDY_MAX = 2500
LATENCY_BODY_BYTES = 100
"""At 500 msg/s NSQ's output buffer of 16 KiB then just does not fill, and so flush, before its timeout."""
MEMORY_SECONDS = 10.0
FILL_SECONDS_MAX = 60.0
DRAIN_SECONDS_MAX = 60.0

PUBLISH_RATE_MAX = 1_500_000
"""No more than these are published for each second of a scenario, so that disk and memory use stay bounded."""
BACKLOG_RATE = 400_000
"""A backlog has this many messages for each second of a scenario."""
UPGRADED_RATE = 250_000
"""Over TLS and with compression, a backlog has this many messages for each second of a scenario."""
UPGRADED_SECONDS = 2.0

Run = Callable[[Broker, float], Measurement]


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    run: Run
    messages_per_second: int
    """At most so many messages lie in the broker, per second of the scenario."""
    target: float | None = None
    disk_target: float | None = None
    """Is the target beside a peer with --mem-queue-size=0, where that is measured."""
    seconds: float | None = None
    """Its own duration, whatever --seconds says."""
    upgrade: Upgrade = PLAIN


def batch(body_bytes: int) -> Unit:
    return mpub(TOPIC, [b"x" * body_bytes] * BATCH_MESSAGES)


def _load(worker: Worker) -> Load:
    load = worker.result()
    if not isinstance(load, Load):
        raise LoadError(f"a load generator gave {load!r}")
    return load


def publishing(unit: Unit, connections: int, window: int, upgrade: Upgrade = PLAIN) -> Run:
    """Publishes without a channel: nothing but publishing costs the broker anything."""

    def run(broker: Broker, seconds: float) -> Measurement:
        limit = int(PUBLISH_RATE_MAX * seconds)
        args = (broker.tcp, upgrade, unit, connections, window, seconds, limit)
        with Worker(publishers.publish, *args) as publisher:
            meter = Meter(broker)
            publisher.go()
            load = _load(publisher)
            broker.settle(TOPIC, load.messages, {})
            return meter.read(load, publisher.busy, load.messages)

    return run


def publishing_http(connections: int) -> Run:
    def run(broker: Broker, seconds: float) -> Measurement:
        limit = int(PUBLISH_RATE_MAX * seconds)
        role = publishers.publish_http
        with Worker(role, broker.http, TOPIC, b"x" * 200, connections, seconds, limit) as publisher:
            meter = Meter(broker)
            publisher.go()
            load = _load(publisher)
            broker.settle(TOPIC, load.messages, {})
            return meter.read(load, publisher.busy, load.messages)

    return run


def consuming(unit: Unit, rdy: int, backlog_rate: int = BACKLOG_RATE, upgrade: Upgrade = PLAIN) -> Run:
    """Reads a backlog by two connections of one channel."""

    def run(broker: Broker, seconds: float) -> Measurement:
        backlog = fill(broker, unit, int(backlog_rate * seconds))
        args = (broker.tcp, upgrade, TOPIC, [CHANNEL], 2, rdy, backlog, seconds)
        with Worker(consumers.consume, *args) as consumer:
            meter = Meter(broker)
            consumer.go()
            load = _load(consumer)
            busy = consumer.busy
            finished = close(consumer)
            broker.settle(TOPIC, backlog, {CHANNEL: backlog - finished})
            return meter.read(load, busy, finished)

    return run


def fill(broker: Broker, unit: Unit, messages: int) -> int:
    broker.post(f"/topic/create?topic={TOPIC}")
    args = (broker.tcp, PLAIN, unit, DEEP_CONNECTIONS, DEEP_WINDOW, FILL_SECONDS_MAX, messages)
    with Worker(publishers.publish, *args) as publisher:
        publisher.go()
        published = _load(publisher).messages
    broker.post(f"/channel/create?topic={TOPIC}&channel={CHANNEL}")
    broker.settle(TOPIC, published, {CHANNEL: published})
    return published


def close(consumer: Worker) -> int:
    """Lets the consumer say CLS; gives all it has finished."""
    consumer.go()
    finished = consumer.result()
    if not isinstance(finished, int):
        raise LoadError(f"a load generator gave {finished!r}")
    return finished


def both_at_once(body_bytes: int) -> Run:
    """Publishes and consumes at full rate; the figure is what was read."""

    def run(broker: Broker, seconds: float) -> Measurement:
        limit = int(PUBLISH_RATE_MAX * seconds)
        with ExitStack() as stack:
            consumer = stack.enter_context(
                Worker(consumers.consume, broker.tcp, PLAIN, TOPIC, [CHANNEL], 2, RDY_MAX, limit, seconds)
            )
            publisher = stack.enter_context(
                Worker(
                    publishers.publish,
                    broker.tcp,
                    PLAIN,
                    batch(body_bytes),
                    BATCH_CONNECTIONS,
                    BATCH_WINDOW,
                    seconds,
                    limit,
                )
            )
            meter = Meter(broker)
            consumer.go()
            publisher.go()
            read, written = _load(consumer), _load(publisher)
            busy = max(consumer.busy, publisher.busy)
            finished = close(consumer)
            broker.settle(TOPIC, written.messages, {CHANNEL: written.messages - finished})
            return meter.read(read, busy, written.messages + finished)

    return run


def fanning_out(channel_count: int) -> Run:
    """Publishes a fixed number of messages while every channel is read; the figure is all deliveries."""

    def run(broker: Broker, seconds: float) -> Measurement:
        channels = [f"{CHANNEL}{number}" for number in range(channel_count)]
        batches = int(BACKLOG_RATE * seconds) // (channel_count * BATCH_MESSAGES) + 1
        messages = batches * BATCH_MESSAGES
        expected = messages * channel_count
        with ExitStack() as stack:
            consumer = stack.enter_context(
                Worker(consumers.consume, broker.tcp, PLAIN, TOPIC, channels, 1, RDY_MAX, expected, DRAIN_SECONDS_MAX)
            )
            publisher = stack.enter_context(
                Worker(publishers.publish, broker.tcp, PLAIN, batch(200), 1, DEEP_WINDOW, FILL_SECONDS_MAX, messages)
            )
            meter = Meter(broker)
            consumer.go()
            publisher.go()
            written, read = _load(publisher), _load(consumer)
            busy = consumer.busy
            finished = close(consumer)
            if (written.messages, finished) != (messages, expected):
                raise LoadError(f"{finished} of {expected} deliveries in {DRAIN_SECONDS_MAX:.0f} s")
            broker.settle(TOPIC, messages, dict.fromkeys(channels, 0))
            return meter.read(Load(read.messages, written.started, read.ended), busy, finished)

    return run


def latency(rate: int) -> Run:
    def run(broker: Broker, seconds: float) -> Measurement:
        expected = int(rate * seconds)
        with ExitStack() as stack:
            collector = stack.enter_context(
                Worker(consumers.collect_latencies, broker.tcp, TOPIC, CHANNEL, RDY_MAX, expected, seconds + 10)
            )
            publisher = stack.enter_context(
                Worker(publishers.publish_paced, broker.tcp, TOPIC, LATENCY_BODY_BYTES, rate, seconds)
            )
            meter = Meter(broker)
            collector.go()
            publisher.go()
            written, read = _load(publisher), _load(collector)
            broker.settle(TOPIC, written.messages, {CHANNEL: 0})
            return meter.read(read, publisher.busy, written.messages + read.messages)

    return run


_SMALL, _LARGE = 200, 1024
_ONE = pub(TOPIC, b"x" * _SMALL)
_MPUB = publishing(batch(_SMALL), BATCH_CONNECTIONS, BATCH_WINDOW)
_DEEP_MPUB = publishing(batch(_SMALL), DEEP_CONNECTIONS, DEEP_WINDOW)

THROUGHPUT = (
    Scenario("mpub", "MPUB 200 x 200 B", _MPUB, PUBLISH_RATE_MAX, 1.8, 8.0),
    Scenario("mpubdeep", "MPUB 200 x 200 B, 16 on their way", _DEEP_MPUB, PUBLISH_RATE_MAX, 1.8),
    Scenario("pub2", "PUB, 2 connections, 1 outstanding", publishing(_ONE, 2, 1), 100_000, 1.0),
    Scenario("pub20", "PUB, 20 connections, 1 outstanding", publishing(_ONE, 20, 1), 200_000, 1.0),
    Scenario(
        "pubpipe",
        "PUB pipelined, 2 connections",
        publishing(pipelined_pub(TOPIC, b"x" * _SMALL, PIPELINE_MESSAGES), 2, 2),
        PUBLISH_RATE_MAX,
        1.0,
    ),
    Scenario("sub2500", "consume backlog, RDY 2500", consuming(batch(_SMALL), 2500), BACKLOG_RATE, 1.8, 6.0),
    Scenario("sub100", "consume backlog, RDY 100", consuming(batch(_SMALL), 100), BACKLOG_RATE, 1.8),
    Scenario("sub5", "consume backlog, RDY 5", consuming(batch(_SMALL), 5, BACKLOG_RATE // 4), BACKLOG_RATE, 1.8),
    Scenario("both", "MPUB and consume at once: read", both_at_once(_SMALL), PUBLISH_RATE_MAX, 1.7),
    Scenario(
        "mpub1k",
        "MPUB 200 x 1 KiB",
        publishing(batch(_LARGE), BATCH_CONNECTIONS, BATCH_WINDOW),
        PUBLISH_RATE_MAX,
        1.8,
        8.0,
    ),
    Scenario(
        "sub1k",
        "consume 1 KiB backlog, RDY 2500",
        consuming(batch(_LARGE), 2500, BACKLOG_RATE // 2),
        BACKLOG_RATE,
        1.8,
        6.0,
    ),
    Scenario("both1k", "both at once, 1 KiB: read", both_at_once(_LARGE), PUBLISH_RATE_MAX, 1.7),
    Scenario("http", "HTTP /pub, 8 connections", publishing_http(8), 200_000, 2.0),
    Scenario("chan1", "publish and consume, 1 channel", fanning_out(1), BACKLOG_RATE),
    Scenario("chan8", "publish and consume, 8 channels", fanning_out(8), BACKLOG_RATE),
    Scenario("chan64", "publish and consume, 64 channels", fanning_out(64), BACKLOG_RATE // 16, 3.0),
)
MEMORY = Scenario("memory", "MPUB for 10 s, no consumer", _DEEP_MPUB, 100_000, seconds=MEMORY_SECONDS)
"""A peer gets a memory queue of a million, as in NSQ's own bench script; all of it would take gigabytes."""
LATENCY = (
    Scenario("latency500", "500 msg/s", latency(500), 10_000),
    Scenario("latency5000", "5,000 msg/s", latency(5000), 10_000),
)
_EVENTS = mpub(TOPIC, events(BATCH_MESSAGES, _SMALL))


def _upgraded(name: str, title: str, upgrade: Upgrade) -> tuple[Scenario, Scenario]:
    publish = publishing(_EVENTS, BATCH_CONNECTIONS, BATCH_WINDOW, upgrade)
    consume = consuming(_EVENTS, RDY_MAX, UPGRADED_RATE, upgrade)
    return (
        Scenario(
            f"mpub{name}",
            f"{title}: MPUB",
            publish,
            PUBLISH_RATE_MAX,
            seconds=UPGRADED_SECONDS,
            upgrade=upgrade,
        ),
        Scenario(
            f"sub{name}",
            f"{title}: consume",
            consume,
            UPGRADED_RATE,
            seconds=UPGRADED_SECONDS,
            upgrade=upgrade,
        ),
    )


UPGRADED = (
    *_upgraded("tls", "TLS", Upgrade(tls=True)),
    *_upgraded("snappy", "snappy", Upgrade(compression="snappy")),
    *_upgraded("deflate", "deflate", Upgrade(compression="deflate")),
    *_upgraded("tlssnappy", "TLS and snappy", Upgrade(tls=True, compression="snappy")),
)
ALL = (*THROUGHPUT, *UPGRADED, MEMORY, *LATENCY)
