"""Makes a whole nsqd in this process, without its listeners, for tests of a topic's parts. Time passes when the test
says.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from nsquark.base.logs import Level, Logger
from nsquark.broker.data_path import DataPath
from nsquark.broker.nsqd import Nsqd
from nsquark.broker.options import parse_options
from nsquark.broker.tcp.session import Session
from nsquark.broker.topic import Topic
from nsquark.wire.record import BODY_AT, message_id

START_MS = 1_800_000_000_000


class SetClock:
    """Is the clock of due times, set by the test."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms

    def offset_ms(self) -> int:
        return 0


class RawTransport(asyncio.Transport):
    """Is the other end of a session: it keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.received = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += bytes(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def bodies(self) -> list[bytes]:
        """Returns the bodies of the messages received since the last call; their attempts are in `attempts`."""
        received, self.received = self.received, b""
        bodies: list[bytes] = []
        self.attempts: list[int] = []
        while received:
            size = int.from_bytes(received[:4])
            if int.from_bytes(received[4:8]) == 2:
                self.attempts.append(int.from_bytes(received[16:18]))
                bodies.append(received[BODY_AT : 4 + size])
            received = received[4 + size :]
        return bodies


@contextlib.asynccontextmanager
async def opened(path: Path, *flags: str, ms: int = START_MS) -> AsyncIterator[Nsqd]:
    path.mkdir(exist_ok=True)
    options = parse_options([f"--data-path={path}", *flags])
    nsqd = Nsqd(options, Logger("", Level.FATAL), DataPath(options.data_path))
    clock: Any = SetClock(ms)
    nsqd.clock = clock
    nsqd.load()
    try:
        yield nsqd
    finally:
        await nsqd.stop()


def publish(topic: Topic, *bodies: bytes) -> None:
    """Publishes and commits; the channels are delivered to in the same turn."""
    for body in bodies:
        topic.publish(body, 0, len(body))
    topic.nsqd.turn.run()


def command(session: Session, data: bytes) -> None:
    session.get_buffer(-1)[: len(data)] = data
    session.buffer_updated(len(data))
    session.nsqd.turn.run()


def in_flight(topic: Topic, channel: str) -> list[bytes]:
    """Returns the ids of the messages that the channel's consumers have."""
    seqs = topic.channels[channel].ledger.unfinished_below(topic.log.head)
    return [message_id(topic.nsqd.options.node_id, seq) for seq in seqs]


def consumer(nsqd: Nsqd, topic: str, channel: str, rdy: int, **identity: str) -> tuple[Session, RawTransport]:
    """Makes a session that is subscribed and ready."""
    session, client = Session(nsqd), RawTransport()
    session.connection_made(client)
    command(session, b"  V2")
    for name, value in identity.items():
        setattr(session.settings, name, value)
    command(session, f"SUB {topic} {channel}\nRDY {rdy}\n".encode())
    return session, client
