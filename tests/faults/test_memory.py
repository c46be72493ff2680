"""Checks that memory stays bounded whatever clients do, and that other clients are served meanwhile."""

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.flood import MIB, Probe, disk_mib, finish_many, memory_mib, publish_many, requeue_many
from faults.greedy import cpu_ms
from harness import Nsqd, Wire, eventually

pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]

Make = Callable[..., Nsqd]

NSQUARK = Path(sys.executable).with_name("nsquark")
MEMORY_MIB_MAX = 200
"""nsqd has at most this much: the interpreter, 64 MiB of the newest messages, and what passing through takes."""
PROBE_P99_S_MAX = 1.0
REQUEUED_BYTES_MAX = 64
"""Each message that waits to be delivered again costs at most this."""
DISK_MIB_MAX = 100
"""64 blocks of 4096 messages may lie between a held message and the floor; of 234 bytes they are 60 MiB."""
BLOCKS_REPEATED_MAX = 64 + 1
BLOCK_MESSAGES = 4096
REQ_DELAY_MS = 600_000
LONG_TIMEOUT_S = 3600
RARE_HEARTBEATS = 60_000
HELD_FOR_LONG: dict[str, Any] = {"msg_timeout": 600_000, "heartbeat_interval": RARE_HEARTBEATS}
"""Millions of messages pass meanwhile, for as long as the machine needs."""

long = [pytest.mark.long, pytest.mark.timeout(LONG_TIMEOUT_S)]


@pytest.fixture
def daemon(make_nsqd: Make) -> Nsqd:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return make_nsqd()


@pytest.fixture
def wires() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _check(daemon: Nsqd, probe: Probe, what: str, limit_mib: float = MEMORY_MIB_MAX) -> None:
    now, highest = memory_mib(daemon)
    p99_ms, longest_ms = probe.p99_s * 1000, max(probe.latencies_s) * 1000
    print(
        f"\n{what}: {now:.0f} MiB, at most {highest:.0f} MiB (limit {limit_mib:.0f}); "
        f"others: p99 {p99_ms:.1f} ms, at most {longest_ms:.0f} ms; disk {disk_mib(daemon):.0f} MiB"
    )
    assert highest < limit_mib
    assert probe.p99_s < PROBE_P99_S_MAX
    assert daemon.is_running
    assert "INTERNAL" not in daemon.log


@pytest.mark.parametrize("count", [300_000, pytest.param(20_000_000, marks=long)])
def test_stalled_consumers(daemon: Nsqd, wires: contextlib.ExitStack, count: int) -> None:
    """Twenty consumers take all they may and never read, on the channel of one that works."""
    served = wires.enter_context(daemon.connect()).subscribe("t", rdy=2500)
    for _ in range(20):
        wires.enter_context(daemon.connect()).subscribe("t", rdy=2500)
    with Probe(daemon) as probe:
        publisher = threading.Thread(target=publish_many, args=(daemon, "t", count, 1000))
        publisher.start()
        assert finish_many(served, count - 20 * 2500 - 2500) >= count - 20 * 2500 - 2500
        publisher.join()
    _check(daemon, probe, f"20 stalled consumers while {count} messages pass")


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=long)])
def test_idle_connections(daemon: Nsqd, wires: contextlib.ExitStack, count: int) -> None:
    before, _ = memory_mib(daemon)
    with Probe(daemon) as probe:
        for number in range(count):
            wire = wires.enter_context(daemon.connect())
            if number % 2:
                # None answers a heartbeat: it would be cut off after two of them.
                wire.subscribe("t", f"ch{number % 10}", client_id=f"idle {number}", heartbeat_interval=RARE_HEARTBEATS)
        connected_ms = cpu_ms(daemon)
        publish_many(daemon, "t", 100_000)
        eventually(lambda: daemon.channel("t", "ch1")["client_count"] == count // 10)
        assert cpu_ms(daemon) - connected_ms < 90_000
    now, _ = memory_mib(daemon)
    print(f"\n{(now - before) * 1024 / count:.1f} KiB for each connection, the log's tail included")
    _check(daemon, probe, f"{count} idle connections")


def test_many_topics(daemon: Nsqd, wires: contextlib.ExitStack) -> None:
    count = 1_000
    with Probe(daemon) as probe:
        publisher = wires.enter_context(daemon.connect())
        for number in range(count):
            publisher.publish(f"topic{number}", b"1", b"2", b"3")
        consumer = wires.enter_context(daemon.connect()).subscribe("topic500", rdy=5)
        assert [message.body for message in consumer.read_messages(3, finish=True)] == [b"1", b"2", b"3"]
    _check(daemon, probe, f"{count} topics")
    daemon.restart(crash=True)
    assert len(daemon.topic_names() - {"probe"}) == count
    consumer = wires.enter_context(daemon.connect()).subscribe("topic999", rdy=5)
    assert [message.body for message in consumer.read_messages(3, finish=True)] == [b"1", b"2", b"3"]
    now, _ = memory_mib(daemon)
    print(f"after a crash: {now:.0f} MiB")
    assert now < MEMORY_MIB_MAX


def test_a_topic_in_memory_keeps_what_is_held_and_forgets_the_rest(daemon: Nsqd, wires: contextlib.ExitStack) -> None:
    """Neither a message in flight nor a channel that nobody reads may keep everything that comes after."""
    holder = wires.enter_context(daemon.connect()).subscribe("e#ephemeral", rdy=1, **HELD_FOR_LONG)
    assert daemon.post("/channel/create", topic="e#ephemeral", channel="unread").status == 200
    wires.enter_context(daemon.connect()).publish("e#ephemeral", b"held")
    held = holder.read_message()
    with Probe(daemon) as probe:
        publish_many(daemon, "e#ephemeral", 2_000_000)
    _check(daemon, probe, "2000000 messages pass a topic in memory")
    holder.REQ(held.id, 0)
    holder.RDY(1)
    message = holder.read_message()
    if message.body != b"held":  # new messages and redeliveries take turns
        holder.FIN(message.id)
        message = holder.read_message()
    assert message.body == b"held"


def test_idle_channels(daemon: Nsqd, wires: contextlib.ExitStack) -> None:
    topics, channels = 4, 500
    with Probe(daemon) as probe:
        for topic in range(topics):
            assert daemon.post("/topic/create", topic=f"t{topic}").status == 200
            for channel in range(channels):
                assert daemon.post("/channel/create", topic=f"t{topic}", channel=f"c{channel}").status == 200
        for topic in range(topics):
            publish_many(daemon, f"t{topic}", 50_000)
        consumer = wires.enter_context(daemon.connect()).subscribe("t0", "c0", rdy=2500)
        assert finish_many(consumer, 50_000) == 50_000
    _check(daemon, probe, f"{topics * channels} idle channels with a backlog")
    consumer.assert_usable()
    daemon.restart(crash=True)
    assert daemon.channel("t0", "c499")["depth"] == 50_000
    assert daemon.channel("t0", "c0")["depth"] == 0


@pytest.mark.parametrize("count", [2_000_000, pytest.param(100_000_000, marks=long)])
def test_one_message_held_while_many_pass(make_nsqd: Make, wires: contextlib.ExitStack, count: int) -> None:
    """It is touched again and again; neither memory nor what a crash repeats may grow with what passes."""
    daemon = make_nsqd("--max-bytes-per-file=16777216", "--msg-timeout=10s")
    holder = wires.enter_context(daemon.connect()).subscribe("t", rdy=1)
    wires.enter_context(daemon.connect()).publish("t", b"held")
    held = holder.read_message()
    stopping = threading.Event()
    toucher = threading.Thread(target=_touch, args=(holder, held.id, stopping))
    toucher.start()
    others = wires.enter_context(daemon.connect()).subscribe("t", rdy=2500, msg_timeout=60_000)
    with Probe(daemon) as probe:
        publisher = threading.Thread(target=publish_many, args=(daemon, "t", count))
        publisher.start()
        assert finish_many(others, count) == count
        publisher.join()
    eventually(lambda: daemon.channel("t")["in_flight_count"] == 1)
    counts = daemon.channel("t")
    assert (counts["depth"], counts["in_flight_count"], counts["timeout_count"]) == (0, 1, 0)
    _check(daemon, probe, f"one message held while {count} pass")
    stopping.set()
    toucher.join()
    daemon.restart(crash=True)
    depth = daemon.channel("t")["depth"]
    print(f"after a crash {depth} messages come again")
    assert 1 <= depth <= BLOCKS_REPEATED_MAX * BLOCK_MESSAGES
    again = wires.enter_context(daemon.connect()).subscribe("t", rdy=1)
    assert again.read_message().body == b"held"


def test_one_held_message_does_not_keep_all_files(make_nsqd: Make, wires: contextlib.ExitStack, tmp_path: Path) -> None:
    """A message that alone holds a file is copied aside, so that the file can go."""
    daemon, exported = make_nsqd("--max-bytes-per-file=4194304"), tmp_path / "exported"
    holder = wires.enter_context(daemon.connect()).subscribe("t", rdy=1, **HELD_FOR_LONG)
    wires.enter_context(daemon.connect()).publish("t", b"held")
    held = holder.read_message()
    others = wires.enter_context(daemon.connect()).subscribe("t", rdy=2500, heartbeat_interval=RARE_HEARTBEATS)
    publisher = threading.Thread(target=publish_many, args=(daemon, "t", 1_000_000))
    publisher.start()
    assert finish_many(others, 1_000_000) == 1_000_000
    publisher.join()
    eventually(lambda: disk_mib(daemon) < DISK_MIB_MAX)
    others.RDY(0)
    others.assert_usable()
    holder.REQ(held.id, 0)
    assert holder.read_message().body == b"held"
    daemon.restart(crash=True)
    again = wires.enter_context(daemon.connect()).subscribe("t", rdy=1)
    message = again.read_message()
    assert (message.body, message.attempts) == (b"held", 2)
    assert daemon.stop() == 0
    subprocess.run([NSQUARK, "export", "--data-path", daemon.data_path, "--to-nsq", exported], check=True)
    with Nsqd(exported) as taken_over:
        message = wires.enter_context(taken_over.connect()).subscribe("t", rdy=1).read_message()
        assert (message.body, message.attempts) == (b"held", 3)


def _touch(wire: Wire, message_id: bytes, stopping: threading.Event) -> None:
    while not stopping.wait(0.3):
        wire.TOUCH(message_id)


@pytest.mark.parametrize("count", [400_000, pytest.param(4_000_000, marks=long)])
def test_requeued_messages(daemon: Nsqd, wires: contextlib.ExitStack, count: int) -> None:
    limit_mib = MEMORY_MIB_MAX + count * REQUEUED_BYTES_MAX / MIB
    consumer = wires.enter_context(daemon.connect()).subscribe("t", rdy=2500)
    with Probe(daemon) as probe:
        publisher = threading.Thread(target=publish_many, args=(daemon, "t", count))
        publisher.start()
        requeue_many(consumer, count, REQ_DELAY_MS)
        publisher.join()
        eventually(lambda: daemon.channel("t")["deferred_count"] == count)
    wires.enter_context(daemon.connect()).assert_usable()  # the turn that noted the last of them is over
    _check(daemon, probe, f"{count} requeued messages", limit_mib)
    begun = time.monotonic()
    daemon.restart(crash=True)
    started_s = time.monotonic() - begun
    counts = daemon.channel("t")
    now, highest = memory_mib(daemon)
    print(f"after a crash: {now:.0f} MiB, at most {highest:.0f} MiB, started in {started_s:.1f} s")
    assert (counts["depth"], counts["deferred_count"]) == (0, count)
    assert highest < limit_mib


@pytest.mark.parametrize("count", [2_000_000, pytest.param(100_000_000, marks=long)])
def test_backlog_read_back(daemon: Nsqd, wires: contextlib.ExitStack, count: int) -> None:
    with Probe(daemon) as probe:
        begun = time.monotonic()
        publish_many(daemon, "t", count, 100)
        published_s = time.monotonic() - begun
    _check(daemon, probe, f"a backlog of {count}, published in {published_s:.1f} s")
    begun = time.monotonic()
    daemon.restart(crash=True)
    started_s = time.monotonic() - begun
    assert daemon.topic("t")["depth"] == count
    consumer = wires.enter_context(daemon.connect()).subscribe("t", rdy=2500)
    with Probe(daemon) as probe:
        begun = time.monotonic()
        assert finish_many(consumer, count) == count
        read_s = time.monotonic() - begun
    _check(daemon, probe, f"started in {started_s:.1f} s after a crash, {count} read back in {read_s:.1f} s")
    eventually(lambda: disk_mib(daemon) < 2 * 100 + 10)
