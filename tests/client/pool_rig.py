"""Runs several nsqds for the tests of the pool, and looks at what they hold."""

from collections.abc import Iterable
from pathlib import Path

from harness import Nsqd, Wire
from harness.wire import RESPONSE

QUIET_S = 0.3
"""If two messages are less than this apart, more are to come."""


def address_of(daemon: Nsqd) -> str:
    return "{}:{}".format(*daemon.tcp)


def start_nsqds(directory: Path, count: int, *flags: str) -> list[Nsqd]:
    daemons = []
    for number in range(count):
        data_path = directory / f"nsqd{number}"
        data_path.mkdir()
        daemons.append(Nsqd(data_path, *flags).start())
        daemons[-1].keep_ports()
    return daemons


def messages_of(daemon: Nsqd, topic: str) -> list[bytes]:
    """Takes and finishes all that the topic holds."""
    if topic not in daemon.topic_names():
        return []
    with daemon.connect() as wire:
        return _drained(wire.subscribe(topic, rdy=2000))


def _drained(wire: Wire) -> list[bytes]:
    bodies: list[bytes] = []
    while True:
        try:
            # The first may take a while: nsqd copies a topic's messages to a channel that is new.
            frame = wire.read_frame(QUIET_S if bodies else 2 * QUIET_S)
        except TimeoutError:
            return bodies
        if frame.kind != RESPONSE:
            bodies.append(frame.data[26:])
            wire.FIN(frame.data[10:26])


def all_messages(daemons: Iterable[Nsqd], topic: str) -> list[bytes]:
    return [body for daemon in daemons for body in messages_of(daemon, topic)]
