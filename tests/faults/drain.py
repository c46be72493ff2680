"""Takes everything out of an nsqd: the last step of every check, and the one that counts."""

import contextlib
import itertools
import select
import time
from collections.abc import Iterable

from faults.fates import COSTS_NOTHING, Accident, Book, Deliveries, Received, Tally
from harness import ClosedError, Nsqd, StartError, Wire, mpub_messages
from nsquark.kernel.frames import FrameScanner

RDY = 500
DRAIN_TIMEOUT_S = 60.0
POLL_S = 0.05
APPENDS_REPEATED_MAX = 30
HEARTBEAT = b"_heartbeat_"
WAITING = ("depth", "in_flight_count", "deferred_count")


class NotDrained(Exception):
    """Says that something is left that does not come."""

    def __init__(self, text: str, received: Deliveries) -> None:
        super().__init__(text)
        self.received = received


class _Tap:
    """Empties one channel."""

    def __init__(self, daemon: Nsqd, topic: str, channel: str) -> None:
        self.received: list[Received] = []
        self.wire: Wire = daemon.connect()
        self.wire.subscribe(topic, channel, rdy=RDY, msg_timeout=60_000)
        self._scanner = FrameScanner()
        self._rest = self.wire.take_pending()
        self._take(b"")

    def fileno(self) -> int:
        return self.wire.socket.fileno()

    def read(self) -> None:
        self._take(self.wire.receive())

    def _take(self, new: bytes) -> None:
        data = self._rest + new
        consumed, messages, others = self._scanner.scan(data, 0, len(data))
        self._rest = data[consumed:]
        for _, text in others:
            assert text == HEARTBEAT, text
            self.wire.NOP()
        self.received += [Received(message_id, body) for _, _, message_id, body in messages]
        self.wire.send(b"".join(b"FIN %b\n" % message[2] for message in messages))


def drain(daemon: Nsqd, channels: Iterable[tuple[str, str]], timeout_s: float = DRAIN_TIMEOUT_S) -> Deliveries:
    """Returns everything these channels have, deferred messages included."""
    wanted = list(channels)
    for topic, channel in wanted:
        daemon.post("/channel/unpause", topic=topic, channel=channel)
        daemon.post("/topic/unpause", topic=topic)
    deadline = time.monotonic() + timeout_s
    taps: dict[tuple[str, str], _Tap] = {}
    with contextlib.ExitStack() as stack:
        try:
            for key in wanted:
                taps[key] = _Tap(daemon, *key)
                stack.callback(taps[key].wire.close)
            while True:
                ready, _, _ = select.select(taps.values(), [], [], POLL_S)
                for tap in ready:
                    tap.read()
                if not ready and not waiting(daemon, wanted):
                    return _received(taps)
                if time.monotonic() > deadline:
                    raise NotDrained(f"not drained in {timeout_s:.0f} s: {waiting(daemon, wanted)}", _received(taps))
        except (ClosedError, OSError, AssertionError) as error:
            raise NotDrained(f"{type(error).__name__}: {str(error)[:300]}", _received(taps)) from error


def _received(taps: dict[tuple[str, str], _Tap]) -> Deliveries:
    return {key: tap.received for key, tap in taps.items()}


def waiting(daemon: Nsqd, channels: list[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Returns what /stats says is still to come, by channel."""
    left = {}
    for topic in daemon.stats(include_clients="false", include_mem="false")["topics"]:
        for channel in topic["channels"] or []:
            counts = {name: channel[name] for name in WAITING}
            counts["in the topic"] = topic["depth"]
            key = (topic["topic_name"], channel["channel_name"])
            if key in channels and any(counts.values()):
                left[":".join(key)] = counts
    return left


def start_and_judge(daemon: Nsqd, book: Book, accident: Accident = COSTS_NOTHING) -> Tally:
    """Starts nsqd on whatever is there and takes everything out of it. It is stopped cleanly at the end."""
    try:
        daemon.start()
        forgotten = append_again(daemon, book, accident)
        tally = drain_and_judge(daemon, book, accident)
        tally.faults += forgotten
        return tally
    except StartError as error:
        return refused_start(error)
    finally:
        daemon.kill()


def append_again(daemon: Nsqd, book: Book, accident: Accident) -> list[str]:
    """Writers that start again repeat their last appends; those that were answered must be known."""
    faults = []
    for one in [one for one in book.appends if one.answered_s <= accident.at_s][-APPENDS_REPEATED_MAX:]:
        try:
            reply = daemon.post("/log/stage", mpub_messages(one.bodies), topic=one.topic, token=one.token, part=0)
            if reply.status == 200 and not reply.json()["duplicate"]:
                reply = daemon.post("/log/append", topic=one.topic, token=one.token)
            if reply.status != 200 or not reply.json()["duplicate"]:
                faults.append(f"{one.topic}: the token {one.token} of an answered append is not known: {reply.text}")
        except OSError as error:
            faults.append(f"{one.topic}: the append with the token {one.token} cannot be repeated: {error}")
    return faults


def drain_and_judge(daemon: Nsqd, book: Book, accident: Accident = COSTS_NOTHING) -> Tally:
    trouble: list[str] = []
    wanted = [(one.topic, one.name) for one in book.channels_at(accident)]
    try:
        received = drain(daemon, wanted)
    except NotDrained as error:
        received = error.received
        trouble.append(str(error))
    tally = book.judge(received, accident)
    tally.faults += trouble
    if daemon.is_running and daemon.stop() != 0:
        tally.faults.append("SIGTERM ends in " + " / ".join(daemon.log.splitlines()[-3:]))
    tally.faults += bad_lines(daemon.log)
    return tally


def bad_lines(log: str) -> list[str]:
    """Finds lines that no accident excuses: errors that nobody thought of."""
    found = []
    lines = log.splitlines()
    for index, line in enumerate(lines):
        if "Traceback" in line or "INTERNAL" in line:
            rest = itertools.takewhile(lambda one: one.startswith(" "), lines[index + 1 :])
            found.append(f"in the log: {line.strip()[:200]} " + " / ".join(one.strip() for one in list(rest)[-3:]))
    return found


def refused_start(error: StartError) -> Tally:
    """Judges a start that fails: it must say why in a sentence; a traceback is none."""
    last = error.log.splitlines()[-1] if error.log else "(nothing)"
    says_why = "Traceback" not in error.log and "FATAL" in error.log
    tally = Tally(rounds=1, faults=[f"does not start, exit code {error.exit_code}: {last[:300]}"])
    tally.refused = 0 if says_why else 1
    return tally
