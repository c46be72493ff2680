"""Checks streams whose nsqds change at the worst moment: between two questions that one batch asks of them."""

import shutil
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from harness.http_server import LocalServer, QuietHandler
from spark.source_rig import SMALL_FILES, bodies, info, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.source.plan import DataLost
from spark.micro_batches import MakeQuery
from spark.test_source_history import put_back
from spark.test_source_offsets import drained

pytestmark = pytest.mark.ours


FAILURES = 2
"""A request on a kept connection is sent once more, so an nsqd is silent if it does not answer twice."""


def answer() -> bool:
    return True


def fall_silent() -> bool:
    return False


class Before:
    """Stands before an nsqd. It does the steps of a script, one before each request to a path: one that returns False
    leaves its request without an answer. All other requests are passed on.
    """

    def __init__(self, daemon: Nsqd) -> None:
        self._daemon = daemon
        self._path = ""
        self._steps: Iterator[Callable[[], bool]] = iter(())
        outer = self

        class Passing(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.pass_on(self)

            def do_POST(self) -> None:
                outer.pass_on(self)

        self.server = LocalServer(Passing)

    def go_over_to(self, daemon: Nsqd) -> None:
        self._daemon = daemon

    def before(self, path: str, *steps: Callable[[], bool]) -> None:
        self._path, self._steps = path, iter(steps)

    def pass_on(self, request: QuietHandler) -> None:
        if self._path and request.path.startswith(self._path) and not next(self._steps, answer)():
            request.close_connection = True
            return
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        connection = HTTPConnection(*self._daemon.http, timeout=10)
        try:
            connection.request(request.command, request.path, body)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        request.send_response(reply.status)
        request.send_header("Content-Length", str(len(content)))
        if nsqd_id := reply.headers["X-Nsquark-Id"]:
            request.send_header("X-Nsquark-Id", nsqd_id)
        request.end_headers()
        request.wfile.write(content)


@pytest.fixture
def before(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> Iterator[tuple[Before, Nsqd]]:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    proxy = Before(daemon)
    with proxy.server:
        yield proxy, daemon


@pytest.mark.parametrize("channel", [False, True], ids=["alone", "channel"])
@pytest.mark.parametrize("numbers", ["again", "above"])
def test_a_backup_put_back_between_two_batches_of_available_now_is_noticed(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, numbers: str, channel: bool
) -> None:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    publish(daemon, "t", bodies(0, 100))
    daemon.stop()
    shutil.copytree(daemon.data_path, tmp_path / "backup")
    if numbers == "above":
        (tmp_path / "backup" / "nsquark" / "sequence").write_bytes(b"damaged")
    daemon.start()
    publish(daemon, "t", bodies(100, 300))
    one = start(daemon, topic="t", maxMessagesPerTrigger=150, **({"channel": "spark"} if channel else {}))
    if channel:
        assert one.next() == []
    one.reader.prepareForTriggerAvailableNow()
    assert one.next() == bodies(0, 150)
    put_back(daemon, tmp_path / "backup")
    publish(daemon, "t", bodies(1000, 1300))
    with pytest.raises(DataLost, match="older state"):
        one.state()


def test_a_topic_made_again_before_anything_of_it_was_read_is_read_from_its_beginning(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery
) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    daemon.post("/topic/create", topic="t")
    one = start(daemon, topic="t", channel="spark")
    assert one.next() == []
    daemon.post("/topic/delete", topic="t")
    for low in range(0, 1000, 50):
        publish(daemon, "t", bodies(low, low + 50))
    drained(daemon, "t")
    publish(daemon, "t", bodies(1000, 1050))
    left = 1050 - info(daemon, "t")["count"]
    assert left
    assert one.restarted().state() == bodies(left, 1050)


def test_a_backup_put_back_while_a_batch_is_planned_is_noticed_by_the_next(
    before: tuple[Before, Nsqd], make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery
) -> None:
    """The nsqd with the backup is started beforehand: to start one takes longer than a query waits for an answer."""
    proxy, daemon = before
    publish(daemon, "t", bodies(0, 100))
    daemon.stop()
    shutil.copytree(daemon.data_path, tmp_path / "backup")
    daemon.start()
    publish(daemon, "t", bodies(100, 300))
    one = start(nsqd=proxy.server.address, topic="t", maxMessagesPerTrigger=150)
    assert one.next() == bodies(0, 150)
    older = make_nsqd(data_path=tmp_path / "backup")
    publish(older, "t", bodies(1000, 1300))

    def put_back_now() -> bool:
        proxy.go_over_to(older)
        return True

    proxy.before("/log/plan", put_back_now)
    assert one.next()
    with pytest.raises(DataLost, match="older state"):
        one.plan()


@pytest.mark.parametrize("path", ["/log/plan", "/log/runs", "/log/info", "/channel/commit"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_an_nsqd_that_falls_silent_at_any_question_is_left_out_for_now(
    before: tuple[Before, Nsqd], start: MakeQuery, path: str, skipped: int
) -> None:
    proxy, daemon = before
    publish(daemon, "t", bodies(0, 200))
    one = start(nsqd=proxy.server.address, topic="t", maxMessagesPerTrigger=50, channel="spark")
    assert one.next() == []
    assert one.next() == bodies(0, 50)
    daemon.restart()  # so that the query asks for its runs

    proxy.before(path, *[answer] * skipped, *[fall_silent] * FAILURES)
    found: list[bytes] = []

    def all_read() -> bool:
        found.extend(one.next())
        return sorted(found) == bodies(50, 200)

    eventually(all_read, 30)


def test_a_deleted_topic_of_an_nsqd_that_falls_silent_is_told_when_it_is_back(
    before: tuple[Before, Nsqd], start: MakeQuery
) -> None:
    proxy, daemon = before
    publish(daemon, "t", bodies(0, 200))
    one = start(nsqd=proxy.server.address, topic="t", maxMessagesPerTrigger=50)
    assert one.next() == bodies(0, 50)
    daemon.post("/topic/delete", topic="t")

    def planned() -> bool:
        one.plan()
        return False

    proxy.before("/log/plan", *[fall_silent] * FAILURES)
    with pytest.raises(DataLost, match="150 messages"):
        eventually(planned, 20)
