import asyncio
import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from client.scripted import HEARTBEAT, Peer, ScriptedNsqd, message_frame, say_ok
from harness import Nsqd, eventually, until
from tools.http_endpoint import HttpEndpoint
from tools.rig import Cluster, Tool, is_full, numbered_lines, run_tool


def http_flags(cluster: Cluster) -> list[str]:
    return [f"--nsqd-http-address={nsqd.http_address}" for nsqd in cluster.nsqds]


@pytest.mark.parametrize("by", ["lookupd", "nsqd"])
def test_prints_what_both_nsqds_have(cluster: Cluster, topic: str, start: Callable[..., Tool], by: str) -> None:
    lines = numbered_lines(10_000)
    cluster.create(topic, "ch")
    cluster.publish(topic, lines)
    source = [cluster.lookupd_flag] if by == "lookupd" else cluster.nsqd_flags
    tail = start("nsq_tail", f"--topic={topic}", "--channel=ch", "-n=10000", *source)
    assert tail.wait() == 0, tail.log
    assert sorted(tail.lines) == sorted(lines)
    assert f"Adding consumer for topic: {topic}" in tail.log
    cluster.wait_until_finished(topic, "ch")


def test_ends_after_n_and_leaves_the_rest(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "ch")
    nsqd = cluster.nsqds[0]
    nsqd.post("/mpub", b"\n".join(b"%d" % number for number in range(10)), topic=topic)
    flags = (f"--topic={topic}", "--channel=ch", "-n", "3", f"--nsqd-tcp-address={nsqd.tcp_address}")
    assert run_tool("nsq_tail", *flags).out == b"0\n1\n2\n"
    assert run_tool("nsq_tail", *flags).out == b"3\n4\n5\n"
    eventually(lambda: nsqd.channel(topic)["depth"] == 4)


def test_an_ephemeral_channel_sees_what_comes_and_leaves_nothing(
    cluster: Cluster, topic: str, start: Callable[..., Tool]
) -> None:
    cluster.create(topic)
    other = f"{topic}_other"
    cluster.create(other)
    tail = start("nsq_tail", f"--topic={topic}", f"--topic={other}", "--print-topic", *cluster.nsqd_flags)
    for name in (topic, other):
        for nsqd in cluster.nsqds:
            eventually(lambda nsqd=nsqd, name=name: nsqd.topic(name)["channels"])
    cluster.publish(topic, [b"\x00\xff raw", b"two"])
    cluster.publish(other, [b"three"])
    wanted = [f"{topic} | ".encode() + b"\x00\xff raw", f"{topic} | two".encode(), f"{other} | three".encode()]
    eventually(lambda: sorted(bytes(tail.out).split(b"\n")[:-1]) == sorted(wanted))
    assert tail.stop(signal.SIGINT) == 0
    eventually(lambda: not any(nsqd.topic(topic)["channels"] for nsqd in cluster.nsqds))


def test_json(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "ch")
    nsqd = cluster.nsqds[0]
    for body in ("grüße".encode(), b"\xff\x00"):
        nsqd.post("/pub", body, topic=topic)
    flags = (f"--topic={topic}", "--channel=ch", "-n=2", "--json", f"--nsqd-tcp-address={nsqd.tcp_address}")
    text, binary = map(json.loads, run_tool("nsq_tail", *flags).out.splitlines())
    assert (text["topic"], text["attempts"], text["body"], len(text["id"])) == (topic, 1, "grüße", 16)
    assert abs(text["timestamp"] / 1e9 - time.time()) < 3600
    assert base64.b64decode(binary["body_base64"]) == b"\xff\x00"


def test_a_reader_who_leaves_ends_it_by_sigpipe(cluster: Cluster, topic: str, start: Callable[..., Tool]) -> None:
    cluster.create(topic, "ch")
    reading, writing = os.pipe()
    tail = start("nsq_tail", f"--topic={topic}", "--channel=ch", *cluster.nsqd_flags, stdout=writing)
    os.close(writing)
    cluster.publish(topic, [b"one", b"two"])
    assert os.read(reading, 100)
    os.close(reading)
    cluster.publish(topic, [b"three", b"four"])
    assert tail.wait() == -signal.SIGPIPE  # as NSQ's, and any program in a pipe
    assert cluster.depth(topic, "ch") >= 1  # what could not be printed is not finished


def test_a_full_disk_ends_it(cluster: Cluster, topic: str, start: Callable[..., Tool]) -> None:
    cluster.create(topic, "ch")
    cluster.publish(topic, [b"one", b"two"])
    with open("/dev/full", "wb") as full:
        tail = start("nsq_tail", f"--topic={topic}", "--channel=ch", *cluster.nsqd_flags, stdout=full)
        assert tail.wait() == 1
    assert "ERROR: failed to write to os.Stdout - No space left on device" in tail.log
    assert cluster.depth(topic, "ch") == 2


def test_a_reader_who_pauses_stops_nothing(cluster: Cluster, topic: str, start: Callable[..., Tool]) -> None:
    """More than a pipe holds waits in nsqd."""
    lines = numbered_lines(5000)
    cluster.create(topic, "ch")
    cluster.publish(topic, lines)
    reading, writing = os.pipe()
    flags = ("--channel=ch", "-n=5000", "--consumer-opt=msg_timeout,10m")
    tail = start("nsq_tail", f"--topic={topic}", *flags, *cluster.nsqd_flags, stdout=writing)
    eventually(lambda: is_full(writing))
    os.close(writing)
    assert cluster.in_flight(topic, "ch") > 0
    received = b""
    while piece := os.read(reading, 1 << 16):
        received += piece
    os.close(reading)
    assert tail.wait() == 0, tail.log
    assert sorted(received.splitlines()) == sorted(lines)
    assert "lost" not in tail.log


async def test_heartbeats_are_answered_while_a_reader_pauses(start: Callable[..., Tool]) -> None:
    """nsqd closes a connection that has answered none for two intervals."""
    messages = [message_frame(b"x" * 1000, b"%016d" % number) for number in range(200)]  # more than a pipe holds

    def on_command(peer: Peer, line: bytes, body: bytes) -> bytes:
        return b"".join(messages) if line == b"RDY 200" else say_ok(peer, line, body)

    async with ScriptedNsqd() as nsqd:
        nsqd.on_command = on_command
        reading, writing = os.pipe()
        flags = ("--topic=x", "--channel=ch", "-n=200", f"--nsqd-tcp-address={nsqd.address}")
        tail = start("nsq_tail", *flags, stdout=writing)
        await until(lambda: is_full(writing))
        os.close(writing)
        assert not nsqd.peer.lines(b"NOP")
        nsqd.peer.send(HEARTBEAT)
        await until(lambda: nsqd.peer.lines(b"NOP"))
        with open(reading, "rb") as pipe:
            assert await asyncio.to_thread(pipe.read) == (b"x" * 1000 + b"\n") * 200
        assert await asyncio.to_thread(tail.wait) == 0, tail.log
        assert len(nsqd.peer.lines(b"FIN")) == 200


def test_no_nsqd_ends_it(topic: str) -> None:
    result = run_tool("nsq_tail", f"--topic={topic}", "--nsqd-tcp-address=127.0.0.1:1")
    assert result.code == 1
    assert "127.0.0.1:1: Connection refused" in result.log.splitlines()[-1]


# -- from the log ----------------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("by", ["lookupd", "nsqd"])
def test_the_whole_log_without_a_channel(cluster: Cluster, topic: str, start: Callable[..., Tool], by: str) -> None:
    lines = numbered_lines(10_000)
    cluster.create(topic)
    cluster.publish(topic, lines[:9000])
    source = [cluster.lookupd_flag] if by == "lookupd" else http_flags(cluster)
    tail = start("nsq_tail", f"--topic={topic}", "--from=oldest", "-n=10000", *source)
    eventually(lambda: len(tail.lines) == 9000)
    cluster.publish(topic, lines[9000:])  # it follows
    assert tail.wait() == 0, tail.log
    assert sorted(tail.lines) == sorted(lines)
    assert not any(nsqd.topic(topic)["channels"] for nsqd in cluster.nsqds)


@pytest.mark.ours
def test_from_a_number_or_a_time(cluster: Cluster, topic: str) -> None:
    nsqd = cluster.nsqds[0]
    nsqd.post("/mpub", b"a\nb\nc", topic=topic)
    flags = (f"--topic={topic}", f"--nsqd-http-address={nsqd.http_address}")
    objects = [
        json.loads(line) for line in run_tool("nsq_tail", *flags, "--from=oldest", "-n=3", "--json").out.splitlines()
    ]
    assert [entry["body"] for entry in objects] == ["a", "b", "c"]
    seq = objects[1]["seq"]
    assert run_tool("nsq_tail", *flags, f"--from={seq}", "-n=2").out == b"b\nc\n"
    assert run_tool("nsq_tail", *flags, "--from=-10m", "-n=1").out == b"a\n"
    assert run_tool("nsq_tail", *flags, "--from=2001-01-01T00:00:00Z", "-n=1").out == b"a\n"


@pytest.mark.ours
def test_the_log_of_an_nsqd_that_goes_away(
    make_nsqd: Callable[..., Nsqd], topic: str, start: Callable[..., Tool]
) -> None:
    nsqd = make_nsqd()
    nsqd.keep_ports()  # also while it is away: nobody else is to answer there
    nsqd.post("/pub", b"one", topic=topic)
    tail = start("nsq_tail", f"--topic={topic}", "--from=oldest", f"--nsqd-http-address={nsqd.http_address}")
    eventually(lambda: tail.lines == [b"one"])
    nsqd.kill()
    tail.wait_for_log("; trying again")
    nsqd.start()
    nsqd.post("/pub", b"two", topic=topic)
    eventually(lambda: tail.lines == [b"one", b"two"])
    assert tail.stop() == 0


@pytest.mark.ours
@pytest.mark.parametrize("status", [200, 404])
def test_what_is_no_nsqd_has_no_log(status: int) -> None:
    """Any HTTP server answers something at the path of the log."""
    with HttpEndpoint(lambda _: status) as other:
        result = run_tool("nsq_tail", "--topic=x", "--from=oldest", f"--nsqd-http-address=127.0.0.1:{other.port}")
    assert result.code == 1
    said = f"127.0.0.1:{other.port} has no log to read: --from needs an nsqd of nsquark"
    assert result.log.rstrip().endswith(said)
    assert result.log.count("\n") == 1


@pytest.mark.ours
def test_the_reason_of_an_nsqd_that_cannot_read_its_log_now(start: Callable[..., Tool]) -> None:
    body = json.dumps({"message": "DISK_ERROR", "reason": "Input/output error"}).encode()
    answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with HttpEndpoint(lambda _: answer) as nsqd:
        address = f"127.0.0.1:{nsqd.port}"
        tail = start("nsq_tail", "--topic=x", "--from=oldest", f"--nsqd-http-address={address}")
        tail.wait_for_log(f"{address}: DISK_ERROR (Input/output error); trying again")
        assert tail.stop() == 0


@pytest.mark.ours
def test_bad_beginnings() -> None:
    result = run_tool("nsq_tail", "--topic=x", "--from=yesterday", "--nsqd-http-address=127.0.0.1:1")
    assert result.code == 1
    assert "invalid --from yesterday" in result.log
    assert run_tool("nsq_tail", "--topic=x", "--from=oldest", "--nsqd-tcp-address=127.0.0.1:1").code == 1


def test_its_output_is_a_pipe_for_others(cluster: Cluster, topic: str, start: Callable[..., Tool]) -> None:
    """A pipe goes from to_nsq into nsqd, and from nsq_tail of it into to_nsq for another topic."""
    lines = numbered_lines(1000)
    other = f"{topic}_copy"
    cluster.create(topic, "ch")
    nsqd = cluster.nsqds[0]
    to = f"--nsqd-tcp-address={nsqd.tcp_address}"
    assert run_tool("to_nsq", f"--topic={topic}", to, "--batch=100", stdin=b"\n".join(lines)).code == 0
    copier = start("to_nsq", f"--topic={other}", to, "--batch=100", stdin=subprocess.PIPE)
    assert copier.process.stdin is not None
    tail = start("nsq_tail", f"--topic={topic}", "--channel=ch", "-n=1000", to, stdout=copier.process.stdin)
    copier.process.stdin.close()
    assert tail.wait() == 0, tail.log
    assert copier.wait() == 0, copier.log
    assert nsqd.topic(other)["message_count"] == 1000
