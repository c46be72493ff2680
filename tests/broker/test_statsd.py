"""Checks the push to a statsd, received by a real UDP socket."""

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from harness import Nsqd, eventually, nsqd_is_ours

INTERVAL = "--statsd-interval=300ms" if nsqd_is_ours() else "--statsd-interval=1100ms"
"""NSQ wants an interval of more than a second."""
RECEIVE_TIMEOUT_S = 30.0
MEMORY_KEYS = [
    "mem.heap_objects:g",
    "mem.heap_idle_bytes:g",
    "mem.heap_in_use_bytes:g",
    "mem.heap_released_bytes:g",
    "mem.gc_pause_usec_100:g",
    "mem.gc_pause_usec_99:g",
    "mem.gc_pause_usec_95:g",
    "mem.next_gc_bytes:g",
    "mem.gc_runs:c",
]
TOPIC_KEYS = ["message_count:c", "message_bytes:c", "depth:g", "backend_depth:g"]
CHANNEL_KEYS = [
    "message_count:c",
    "depth:g",
    "backend_depth:g",
    "in_flight_count:g",
    "deferred_count:g",
    "requeue_count:c",
    "timeout_count:c",
    "clients:g",
]


class Line(NamedTuple):
    key: str
    value: int
    kind: str

    @classmethod
    def parse(cls, line: str) -> "Line":
        key, _, rest = line.rpartition(":")
        value, _, kind = rest.partition("|")
        return cls(key, int(value), kind)


class Statsd:
    """Datagrams as they come. A push ends where the memory's last key comes, or the topics begin anew."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(RECEIVE_TIMEOUT_S)

    @property
    def flag(self) -> str:
        return f"--statsd-address=127.0.0.1:{self.socket.getsockname()[1]}"

    def packet(self) -> bytes:
        return self.socket.recv(65536)

    def push(self, end: str = "mem.gc_runs") -> list[Line]:
        """Returns the lines of one push, up to that of this key."""
        lines: list[Line] = []
        while not lines or not lines[-1].key.endswith(end):
            lines += [Line.parse(line) for line in self.packet().decode().splitlines()]
        return lines


@pytest.fixture
def statsd() -> Iterator[Statsd]:
    server = Statsd()
    yield server
    server.socket.close()


def as_keys(lines: list[Line], prefix: str) -> list[str]:
    assert all(line.key.startswith(prefix) for line in lines)
    return [f"{line.key.removeprefix(prefix)}:{line.kind}" for line in lines]


def prefix_of(daemon: Nsqd) -> str:
    return f"nsq.127_0_0_1_{daemon.http[1]}."


def test_names_values_and_their_order(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL)
    with daemon.connect() as consumer:
        consumer.publish("b", b"1", b"22", b"333")
        consumer.publish("a", b"xy")
        consumer.subscribe("b", "ch", rdy=2)
        for _ in range(2):
            message = consumer.read_message()
        consumer.RDY(1)  # before REQ, or that makes room for the third message
        consumer.REQ(message.id, 60_000)
        consumer.publish("c", b"x")
        prefix = prefix_of(daemon)
        lines = statsd.push()
        while f"{prefix}topic.c.depth" not in {line.key for line in lines}:
            lines = statsd.push()
        assert as_keys(lines, prefix) == [
            *[f"topic.a.{key}" for key in TOPIC_KEYS],
            *[f"topic.b.{key}" for key in TOPIC_KEYS],
            *[f"topic.b.channel.ch.{key}" for key in CHANNEL_KEYS],
            *[f"topic.c.{key}" for key in TOPIC_KEYS],
            *MEMORY_KEYS,
        ]
        values = {line.key.removeprefix(prefix): line.value for line in lines}
        channel = {key: values[f"topic.b.channel.ch.{key}"] for key in ("depth", "in_flight_count", "clients")}
        assert channel == {"depth": 1, "in_flight_count": 1, "clients": 1}
        assert values["topic.b.channel.ch.deferred_count"] == 1
        assert values["topic.a.depth"] == 1
        assert values["mem.heap_objects"] > 0


def test_counters_tell_what_they_rose(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL)
    totals: dict[str, int] = {}

    def told(end: int) -> bool:
        for line in statsd.push():
            if line.kind == "c":
                key = line.key.removeprefix(prefix_of(daemon))
                totals[key] = totals.get(key, 0) + line.value
        return totals.get("topic.t.message_count", 0) >= end

    with daemon.connect() as client:
        client.publish("t", b"1", b"22", b"333")
        eventually(lambda: told(3))
        assert (totals["topic.t.message_count"], totals["topic.t.message_bytes"]) == (3, 6)
        client.publish("t", b"4444", b"55555")
        eventually(lambda: told(5))
        assert (totals["topic.t.message_count"], totals["topic.t.message_bytes"]) == (5, 15)
        assert not told(6)
        assert totals["topic.t.message_count"] == 5


@pytest.mark.ours
def test_a_topic_made_anew_counts_from_zero(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    """NSQ sends a negative count where a topic was made anew."""
    daemon = make_nsqd(statsd.flag, INTERVAL, "--statsd-mem-stats=false")
    key = f"{prefix_of(daemon)}topic.t.message_count"
    with daemon.connect() as client:
        client.publish("t", b"1", b"2", b"3")

        def count() -> int:
            return next(line.value for line in statsd.push("topic.t.backend_depth") if line.key == key)

        assert count() == 3
        daemon.post("/topic/delete", topic="t")
        client.publish("t", b"x")
        pushed = count()
        while pushed == 0:  # from before the topic was deleted
            pushed = count()
        assert pushed == 1


@pytest.mark.parametrize("size", [508, 200])
def test_packets_hold_whole_lines_and_keep_to_their_size(
    make_nsqd: Callable[..., Nsqd], statsd: Statsd, size: int
) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, f"--statsd-udp-packet-size={size}")
    for number in range(20):
        daemon.post("/topic/create", topic=f"topic_{number}")
    packets: list[bytes] = []
    while not packets or b"mem.gc_runs" not in packets[-1] or b"topic_9." not in b"".join(packets):
        packets.append(statsd.packet())
    assert all(packet.endswith(b"\n") and len(packet) <= size for packet in packets)
    # None could have held the first line of the next one too.
    for packet, following in itertools.pairwise(packets):
        if b"mem.gc_runs" not in packet:
            assert len(packet) + following.index(b"\n") + 1 > size


def test_a_line_longer_than_a_packet_is_sent_alone(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, "--statsd-udp-packet-size=10")
    daemon.post("/topic/create", topic="t")
    assert statsd.packet().count(b"\n") == 1


def test_packets_are_spread_over_the_interval(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, "--statsd-interval=2s", "--statsd-udp-packet-size=100")
    with daemon.connect() as client:
        for number in range(10):
            client.publish(f"topic_{number}", b"x")
    statsd.push()

    def is_spread() -> bool:
        """A push takes a second, of which no gap takes the most; on a busy machine not every one does."""
        times: list[float] = []
        done = False
        while not done:
            packet = statsd.packet()
            times.append(time.monotonic())
            done = b"mem.gc_runs" in packet
        assert len(times) > 20
        whole = times[-1] - times[0]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return 0.5 < whole < 1.9 and max(gaps) < whole / 2

    eventually(is_spread, timeout_s=60)


@pytest.mark.parametrize(
    ("option", "start"),
    [
        ("", "topic."),
        ("x", "x.topic."),
        ("x.", "x.topic."),
        ("a.%s.b.%s", "a.HOST.b.HOST.topic."),
        ("%s", "HOST.topic."),
    ],
)
def test_prefix(make_nsqd: Callable[..., Nsqd], statsd: Statsd, option: str, start: str) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, f"--statsd-prefix={option}", "--broadcast-address=my.host")
    daemon.post("/topic/create", topic="t")
    host = f"my_host_{daemon.http[1]}"
    lines = statsd.push("mem.gc_runs")
    while "topic.t." not in lines[0].key:
        lines = statsd.push("mem.gc_runs")
    assert lines[0].key == start.replace("HOST", host) + "t.message_count"


def test_broadcast_port_is_in_the_prefix(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    make_nsqd(statsd.flag, INTERVAL, "--broadcast-http-port=99")
    assert statsd.push()[0].key.startswith("nsq.127_0_0_1_99.")


def _with_ephemeral(daemon: Nsqd) -> None:
    for topic in ("lasting", "passing#ephemeral"):
        daemon.post("/topic/create", topic=topic)
        daemon.post("/channel/create", topic=topic, channel="ch")
        daemon.post("/channel/create", topic=topic, channel="ch#ephemeral")


def test_ephemeral_names_are_sent_as_they_are(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, "--statsd-mem-stats=false")
    _with_ephemeral(daemon)
    lines = statsd.push("passing#ephemeral.channel.ch#ephemeral.clients")
    keys = as_keys(lines, prefix_of(daemon))
    assert "topic.lasting.channel.ch#ephemeral.depth:g" in keys
    assert "topic.passing#ephemeral.channel.ch.depth:g" in keys


def test_ephemeral_ones_can_be_left_out(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, "--statsd-exclude-ephemeral")
    _with_ephemeral(daemon)
    daemon.post("/topic/create", topic="the_last")
    keys = as_keys(statsd.push(), prefix_of(daemon))
    while "topic.the_last.depth:g" not in keys:
        keys = as_keys(statsd.push(), prefix_of(daemon))
    assert keys == [
        *[f"topic.lasting.{key}" for key in TOPIC_KEYS],
        *[f"topic.lasting.channel.ch.{key}" for key in CHANNEL_KEYS],
        *[f"topic.the_last.{key}" for key in TOPIC_KEYS],
        *MEMORY_KEYS,
    ]


def test_without_memory(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(statsd.flag, INTERVAL, "--statsd-mem-stats=false")
    daemon.post("/topic/create", topic="t")
    prefix = prefix_of(daemon)
    assert as_keys(statsd.push("backend_depth"), prefix) == [f"topic.t.{key}" for key in TOPIC_KEYS]
    assert as_keys(statsd.push("backend_depth"), prefix) == [f"topic.t.{key}" for key in TOPIC_KEYS]


def test_latency(make_nsqd: Callable[..., Nsqd], statsd: Statsd) -> None:
    daemon = make_nsqd(
        statsd.flag, INTERVAL, "--statsd-mem-stats=false", "--e2e-processing-latency-percentile=0.5,1.0,0.999"
    )
    names = ["e2e_processing_latency_100", "e2e_processing_latency_100", "e2e_processing_latency_50"]
    with daemon.connect() as client:
        client.subscribe("t", rdy=1)
        client.publish("t", b"x")
        message = client.read_message()
        time.sleep(0.05)  # so that the latency has a least value worth asserting
        client.FIN(message.id)
        prefix = f"{prefix_of(daemon)}topic.t."
        lines = statsd.push("channel.ch.e2e_processing_latency_50")
        while lines[-1].value == 0:  # from before the message was finished
            lines = statsd.push("channel.ch.e2e_processing_latency_50")
        assert as_keys(lines, prefix) == [
            *TOPIC_KEYS,
            *[f"{name}:g" for name in names],
            *[f"channel.ch.{key}" for key in CHANNEL_KEYS],
            *[f"channel.ch.{name}:g" for name in names],
        ]
        assert 40e6 < lines[-1].value < 30e9


@pytest.mark.ours
@pytest.mark.parametrize("interval", ["1s", "200ms", "0s"])
def test_short_intervals_work(make_nsqd: Callable[..., Nsqd], statsd: Statsd, interval: str) -> None:
    daemon = make_nsqd(statsd.flag, f"--statsd-interval={interval}")
    for _ in range(3):
        statsd.push()
    assert daemon.get("/ping").text == "OK"


@pytest.mark.ours
@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-port", "nowhere.invalid:8125"])
def test_what_cannot_be_reached_is_logged_once(make_nsqd: Callable[..., Nsqd], address: str) -> None:
    daemon = make_nsqd(f"--statsd-address={address}", "--statsd-interval=200ms")
    eventually(lambda: daemon.log.count("STATSD: pushing stats to") >= 5, timeout_s=60)
    daemon.wait_for_log("STATSD: failed to push")  # only then is it known, for a name that must be resolved
    assert daemon.log.count("STATSD: failed to push") == 1
    assert f"STATSD: failed to push stats to {address}" in daemon.log
    with daemon.connect() as client:
        client.assert_usable()
    assert daemon.stop() == 0
