"""Checks nsq_to_http as a process, between a real cluster and real HTTP servers."""

import re
import signal
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable

import pytest

from harness import eventually
from tools.http_endpoint import HttpEndpoint, Request, held_port, slowly
from tools.rig import Cluster, Tool, numbered_lines

CHANNEL = "nsq_to_http"
QUICK = (
    "--consumer-opt=default_requeue_delay,50ms",
    "--consumer-opt=backoff_multiplier,20ms",
    "--consumer-opt=max_backoff_duration,40ms",
    "--consumer-opt=rdy_redistribute_interval,50ms",
    "--consumer-opt=low_rdy_idle_timeout,1s",
)
"""A failed message comes again soon."""
STATUS = re.compile(
    r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d \[aggregate\]: finished 250"
    r" - 99th: \d+\.\d\dms - 95th: \d+\.\d\dms - avg: \d+\.\d\dms$",
    re.MULTILINE,
)
Start = Callable[..., Tool]
PATIENT = ("--http-client-connect-timeout=1m", "--http-client-request-timeout=1m")


@pytest.fixture
def start(start: Start) -> Start:
    """Starts a tool that waits for a busy machine, unless flags say otherwise: what it gives up is sent once more."""
    return lambda tool, *flags: start(tool, *PATIENT, *flags)


def taken(*endpoints: HttpEndpoint) -> list[bytes]:
    return [request.body for endpoint in endpoints for request in endpoint.taken]


def wait_until_taken(bodies: list[bytes], *endpoints: HttpEndpoint) -> None:
    eventually(lambda: set(taken(*endpoints)) == set(bodies), 60)


def test_ten_thousand_messages_arrive(cluster: Cluster, start: Start, topic: str) -> None:
    lines = numbered_lines(10_000)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    with HttpEndpoint() as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", cluster.lookupd_flag, f"--post={endpoint.url}/in?a=1")
        eventually(lambda: len(endpoint.taken) >= 10_000, 60)
        cluster.wait_until_finished(topic, CHANNEL)
        assert tool.stop() == 0, tool.log
        assert sorted(taken(endpoint)) == sorted(lines)
        assert {request.target for request in endpoint.requests} == {"/in?a=1"}
    assert len(STATUS.findall(tool.log)) == 39


def test_the_head_of_a_post(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"\x00body\xff", b"other"])
    with HttpEndpoint() as endpoint:
        flags = ("--content-type=text/x", "--header", "x-one: 1", "--header=X-Two:  a:b ", "-header=user-agent: me")
        start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"-post={endpoint.url}/", *flags)
        wait_until_taken([b"\x00body\xff", b"other"], endpoint)
        request = next(request for request in endpoint.taken if request.body == b"other")
    assert (request.method, request.target) == ("POST", "/")
    assert sorted(request.headers) == [
        ("Accept-Encoding", "gzip"),
        ("Content-Length", "5"),
        ("Content-Type", "text/x"),
        ("Host", f"127.0.0.1:{endpoint.port}"),
        ("User-Agent", "me"),
        ("X-One", "1"),
        ("X-Two", "a:b"),
    ]


def test_a_get_has_the_message_in_its_url(cluster: Cluster, start: Start, topic: str) -> None:
    bodies = [b"a b&c=d/%s%?#", "größe €".encode(), b"\x00\xff~-_.*"]
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, bodies)
    with HttpEndpoint() as endpoint:
        start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--get={endpoint.url}/100%%25?q=%s&z=é")
        eventually(lambda: len(endpoint.taken) == 3)
        request = endpoint.taken[0]
    targets = {one.target for one in endpoint.taken}
    assert "/100%25?q=a+b%26c%3Dd%2F%25s%25%3F%23&z=%C3%A9" in targets
    found = {urllib.parse.unquote_to_bytes(target[10:].partition("&")[0].replace("+", " ")) for target in targets}
    assert found == set(bodies)
    assert request.method == "GET"
    assert request.header("User-Agent") == "nsq_to_http v1.3.0"
    assert not request.header("Content-Type")


@pytest.mark.parametrize(("kind", "status", "is_taken"), [("post", 204, True), ("get", 204, False)])
def test_what_is_a_success(cluster: Cluster, start: Start, topic: str, kind: str, status: int, is_taken: bool) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(lambda _: status) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--{kind}={endpoint.url}/?%s")
        if is_taken:
            cluster.wait_until_finished(topic, CHANNEL)
        else:
            tool.wait_for_log("got status code 204")
            assert cluster.depth(topic, CHANNEL) == 2
        assert tool.stop() == 0, tool.log


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000 + b"\r\nConnection: close\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK, and more than it said\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\nsome content\r\n",
    ],
    ids=["a body that breaks off", "a long header", "a body longer than its length", "a body where none can be"],
)
def test_a_good_status_counts_whatever_comes_with_it(cluster: Cluster, start: Start, topic: str, answer: bytes) -> None:
    """The endpoint has taken the message: to send it again would double it, each time."""
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(lambda _: answer) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", *QUICK)
        cluster.wait_until_finished(topic, CHANNEL)
        assert tool.stop() == 0, tool.log
        assert sorted(request.body for request in endpoint.requests) == [b"one", b"two"]


def test_an_answer_that_does_not_end_is_not_waited_for(cluster: Cluster, start: Start, topic: str) -> None:
    is_over = threading.Event()

    def answer(request: Request) -> bytes:
        request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        assert is_over.wait(60)
        return b""

    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(answer) as endpoint:
        flags = (f"--post={endpoint.url}", "--http-client-request-timeout=200ms", *QUICK)
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        cluster.wait_until_finished(topic, CHANNEL)
        is_over.set()
        assert tool.stop() == 0, tool.log
        assert {request.body for request in endpoint.requests} == {b"one", b"two"}
        # On a busy machine a status may come too late; but where one came in time, nothing is sent again.
        assert len(endpoint.requests) <= 2 + tool.log.count("was not taken")


def test_cookies_are_not_kept(cluster: Cluster, start: Start, topic: str) -> None:
    """They would bind all messages to one server behind a balancer, and pile up until the requests are refused."""
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, numbered_lines(6))
    with HttpEndpoint(lambda _: b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nConnection: close\r\n\r\n") as endpoint:
        address = f"--post=http://localhost:{endpoint.port}"
        start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, address, "-n=1")
        cluster.wait_until_finished(topic, CHANNEL)
        assert [request.header("Cookie") for request in endpoint.requests] == [""] * 6


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 307 Go on\r\nLocation: /\r\nConnection: close\r\n\r\n", "more than 10 redirects"),
        (b"HTTP/1.1 302 Go on\r\nLocation: ftp://x/\r\n\r\n", "cannot follow to ftp://x/"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP answer: Bad status line"),
        (b"HTTP/1.1 200 OK\r\nX: y\r\n", "the connection was closed before an answer"),
    ],
)
def test_why_an_answer_was_none(cluster: Cluster, start: Start, topic: str, answer: bytes, reason: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(lambda _: answer) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", *QUICK)
        tool.wait_for_log(f"was not taken - {endpoint.url}: {reason}")
        assert cluster.depth(topic, CHANNEL) == 2


@pytest.mark.parametrize("pause_s", [0, 0.2], ids=["with the head", "after the head"])
def test_garbage_behind_a_good_status_neither_doubles_nor_delays(
    cluster: Cluster, start: Start, topic: str, pause_s: float
) -> None:
    """The endpoint has taken the message, as for NSQ's tool, and nothing more is to be waited for."""
    head, garbage = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"zzz garbage\r\n"
    leaves = threading.Event()

    def answer(request: Request) -> bytes:
        request.connection.sendall(head if pause_s else head + garbage)
        time.sleep(pause_s)
        if pause_s:
            request.connection.sendall(garbage)
        leaves.wait(60)
        return b""

    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(answer) as endpoint:
        flags = (f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", "--http-client-request-timeout=10m")
        tool = start("nsq_to_http", *flags)
        cluster.wait_until_finished(topic, CHANNEL)
        assert sorted(request.body for request in endpoint.requests) == [b"one", b"two"]
        leaves.set()
        assert tool.stop() == 0, tool.log


def shares(
    cluster: Cluster, start: Start, topic: str, mode: str, endpoints: list[HttpEndpoint], *more: str
) -> list[int]:
    """Counts how many of 300 messages, and of a first one, each endpoint got."""
    lines = numbered_lines(300)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    flags = [f"--mode={mode}", "--status-every=100", *(f"--post={endpoint.url}" for endpoint in endpoints), *more]
    tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    assert set(taken(*endpoints)) == set(lines)
    assert "[aggregate]: finished 100 - " in tool.log
    return [len(endpoint.taken) for endpoint in endpoints]


def test_modes_without_failures(cluster: Cluster, start: Start, topic: str) -> None:
    with HttpEndpoint() as one, HttpEndpoint() as two:
        assert shares(cluster, start, f"{topic}.robin", "round-robin", [one, two]) == [150, 150]
    with HttpEndpoint() as one, HttpEndpoint() as two:
        assert shares(cluster, start, f"{topic}.pool", "hostpool", [one, two]) == [150, 150]
    with HttpEndpoint() as one, HttpEndpoint() as two:
        assert shares(cluster, start, f"{topic}.every", "all", [one, two]) == [300, 300]


def test_epsilon_greedy_prefers_the_quick_one(cluster: Cluster, start: Start, topic: str) -> None:
    with HttpEndpoint() as quick, HttpEndpoint(slowly(0.3)) as slow:
        # With few requests at once, a moment in which the machine stands still spoils few of the times.
        one, two = shares(cluster, start, topic, "epsilon-greedy", [quick, slow], "-n=4")
        assert one > two


def test_the_lines_of_each_endpoint(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, numbered_lines(300))
    with HttpEndpoint() as one, HttpEndpoint() as two:
        flags = (f"--post={one.url}/a", f"--post={two.url}/b", "--status-every=100")
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        for endpoint in (f"{one.url}/a", f"{two.url}/b", "aggregate"):
            tool.wait_for_log(f"[{endpoint}]: finished 100 - 99th: ")


def test_a_sample(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, numbered_lines(2000))
    with HttpEndpoint() as endpoint:
        start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", "--sample=0.25")
        cluster.wait_until_finished(topic, CHANNEL)
        assert 350 < len(endpoint.taken) < 650


def test_as_many_requests_at_once_as_allowed(cluster: Cluster, start: Start, topic: str) -> None:
    lock, all_places_taken = threading.Lock(), threading.Event()
    now = most = 0

    def answer(request: Request) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == 5:
                all_places_taken.set()
        assert all_places_taken.wait(60)
        slowly(0.1)(request)
        with lock:
            now -= 1
        return 200

    cluster.create(topic, CHANNEL)
    cluster.publish(topic, numbered_lines(40))
    with HttpEndpoint(answer) as endpoint:
        start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", "-n", "5")
        cluster.wait_until_finished(topic, CHANNEL)
    assert most == 5


def test_no_message_is_lost_to_answers_of_500(cluster: Cluster, start: Start, topic: str) -> None:
    """Each message fails more often than go-nsq's five attempts."""
    lines = numbered_lines(20)
    seen: Counter[bytes] = Counter()

    def answer(request: Request) -> int:
        seen[request.body] += 1
        return 200 if seen[request.body] > 6 else 500

    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    with HttpEndpoint(answer) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", *QUICK)
        wait_until_taken(lines, endpoint)
        tool.wait_for_log(f"was not taken - {endpoint.url}: got status code 500")
        assert tool.stop() == 0, tool.log


def test_no_message_is_lost_to_a_dead_endpoint(cluster: Cluster, start: Start, topic: str) -> None:
    lines = numbered_lines(20)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    with held_port() as port:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post=http://127.0.0.1:{port}", *QUICK)
        tool.wait_for_log("(attempt 7) was not taken")
        with HttpEndpoint(port=port) as endpoint:
            wait_until_taken(lines, endpoint)
            assert tool.stop() == 0, tool.log


def test_a_dead_endpoint_is_left_out(cluster: Cluster, start: Start, topic: str) -> None:
    """Of several endpoints the others get what the dead one fails to take."""
    lines = numbered_lines(500)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    with held_port() as port, HttpEndpoint() as endpoint:
        flags = (f"--post=http://127.0.0.1:{port}", f"--post={endpoint.url}", "-n=4", *QUICK)
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        wait_until_taken(lines, endpoint)
        cluster.wait_until_finished(topic, CHANNEL)
        assert tool.log.count("was not taken") <= 4, "once for each handler"


def test_a_slow_endpoint_is_not_waited_for(cluster: Cluster, start: Start, topic: str) -> None:
    is_slow = True
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(lambda request: slowly(1.0)(request) if is_slow else 200) as endpoint:
        flags = (f"--post={endpoint.url}", "--http-client-request-timeout=200ms", *QUICK)
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        tool.wait_for_log("(attempt 2) was not taken")
        is_slow = False
        cluster.wait_until_finished(topic, CHANNEL)
        assert tool.stop() == 0, tool.log


def test_what_the_endpoint_refuses_five_times_is_given_up(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"good", b"bad"])
    with HttpEndpoint(lambda request: 400 if request.body == b"bad" else 200) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", *QUICK)
        cluster.wait_until_finished(topic, CHANNEL)
        tool.wait_for_log("was refused 5 times, giving up")
        assert Counter(request.body for request in endpoint.requests) == {b"good": 1, b"bad": 5}


def test_max_attempts_is_go_nsqs_rule(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, [b"one", b"two"])
    with HttpEndpoint(lambda _: 500) as endpoint:
        flags = (f"--post={endpoint.url}", "--consumer-opt=max-attempts,2", *QUICK)
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        cluster.wait_until_finished(topic, CHANNEL)
        eventually(lambda: tool.log.count("attempted 2 times, giving up") == 2)
        assert Counter(request.body for request in endpoint.requests) == {b"one": 2, b"two": 2}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end(cluster: Cluster, start: Start, topic: str, number: int) -> None:
    is_asked, go_on = threading.Event(), threading.Event()

    def answer(_: Request) -> int:
        is_asked.set()
        assert go_on.wait(60)
        return 200

    cluster.create(topic, CHANNEL)
    cluster.publish(topic, numbered_lines(100))
    with HttpEndpoint(answer) as endpoint:
        tool = start("nsq_to_http", f"--topic={topic}", *cluster.nsqd_flags, f"--post={endpoint.url}", "-n=3")
        assert is_asked.wait(60)
        eventually(lambda: len(endpoint.requests) == 3)
        tool.send_signal(number)
        eventually(lambda: all(nsqd.channel(topic, CHANNEL)["in_flight_count"] <= 3 for nsqd in cluster.nsqds))
        go_on.set()
        assert tool.wait() == 0
        assert len(endpoint.taken) == 3, "what was asked is finished, and nothing else was begun"
        eventually(lambda: cluster.depth(topic, CHANNEL) == 97)  # nsqd may still have to read the last FINs
