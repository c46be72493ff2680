"""Says what a program of one library is asked to do, and how it reports."""

import json
import sys
from dataclasses import dataclass

BODY = b"x" * 200
BATCH = [BODY] * 200
OUTSTANDING = 1000
BATCHES_OUTSTANDING = 8
MAX_IN_FLIGHT = 2500


@dataclass(frozen=True)
class Arguments:
    task: str
    address: str
    topic: str
    channel: str
    seconds: float
    wanted: int
    """At most this many messages are consumed."""


def arguments() -> Arguments:
    task, address, topic, channel, seconds, wanted = sys.argv[1:]
    return Arguments(task, address, topic, channel, float(seconds), int(wanted))


def is_batch(task: str) -> bool:
    return task.startswith("mpub")


def outstanding_max(task: str) -> int:
    return {"pipe": OUTSTANDING, "mpubpipe": BATCHES_OUTSTANDING}.get(task, 1)


def report(messages: int, seconds: float) -> None:
    print(json.dumps([messages, seconds]))


def cannot() -> None:
    """Reports that the library has no such way."""
    report(0, 1.0)
