"""Runs several nsqds for the tests of the pool, and looks at what they hold."""

from collections.abc import Iterable
from pathlib import Path

from harness import Nsqd, eventually
from harness.wire import RESPONSE

LOOK_INTERVAL_S = 0.1
"""If no message comes for so long, nsqd is asked whether it has any."""


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
    bodies: list[bytes] = []
    with daemon.connect() as wire:
        wire.subscribe(topic, rdy=2000)

        def has_taken_all() -> bool:
            try:
                while True:
                    frame = wire.read_frame(LOOK_INTERVAL_S)
                    if frame.kind != RESPONSE:
                        bodies.append(frame.data[26:])
                        wire.FIN(frame.data[10:26])
            except TimeoutError:
                return _is_empty(daemon, topic)

        eventually(has_taken_all)
    return bodies


def _is_empty(daemon: Nsqd, topic: str) -> bool:
    """Tells whether no message waits, nor is in flight. NSQ's nsqd counts a message nowhere while it moves it from one
    to the other, so it is asked twice.
    """
    looks = [(daemon.topic(topic), daemon.channel(topic)) for _ in range(2)]
    return not any(of_topic["depth"] or of["depth"] or of["in_flight_count"] for of_topic, of in looks)


def all_messages(daemons: Iterable[Nsqd], topic: str) -> list[bytes]:
    return [body for daemon in daemons for body in messages_of(daemon, topic)]
