"""Checks what HTTP clients see when the disk, or the part of it nsqd may use, is full."""

from collections.abc import Callable

import pytest

from harness import HttpReply, Nsqd

pytestmark = pytest.mark.ours

MESSAGE = b"x" * 1000
FULL = (503, b'{"message":"DISK_ERROR: [Errno 122] --max-disk-bytes=100000 is reached"}')
TAKEN_MAX = 200
"""Fewer messages than this fit."""


def _shown(reply: HttpReply) -> tuple[int, bytes]:
    return reply.status, reply.body


@pytest.fixture
def full(make_nsqd: Callable[..., Nsqd]) -> tuple[Nsqd, int]:
    """Runs an nsqd that takes no more; says how many messages it took."""
    daemon = make_nsqd("--max-disk-bytes=100000")
    for taken in range(TAKEN_MAX):
        if _shown(daemon.post("/pub", MESSAGE, topic="t")) == FULL:
            return daemon, taken
    raise AssertionError("the limit does not hold")


def test_publishing_is_refused(full: tuple[Nsqd, int]) -> None:
    daemon, taken = full
    assert 50 < taken < 100
    assert _shown(daemon.post("/mpub", MESSAGE + b"\n" + MESSAGE, topic="t")) == FULL
    assert daemon.topic("t")["message_count"] == taken
    assert daemon.topic("t")["depth"] == taken


def test_health_says_so(full: tuple[Nsqd, int]) -> None:
    daemon, _ = full
    reply = daemon.get("/ping")
    assert reply.status == 500
    assert reply.text.startswith("NOK - ")
    assert "--max-disk-bytes" in reply.text
    assert daemon.stats()["health"] == reply.text
    assert f"\nHealth: {reply.text}\n" in daemon.get("/stats").text


def test_the_rest_goes_on(full: tuple[Nsqd, int]) -> None:
    daemon, taken = full
    with daemon.connect() as consumer:
        consumer.subscribe("t", rdy=100)
        assert len(consumer.read_messages(taken, finish=True)) == taken
