"""Knows what becomes of every message: sent, acknowledged, delivered, finished, lost, or invented.

A `Book` is kept by whoever publishes and consumes, with times, so that it can be asked what was owed at any moment: at
a crash that moment is the last one the disk has seen. `judge` compares that with what came out afterwards. Every
message has a body that no other has.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

FAULTS_SHOWN_MAX = 20
NOT_COUNTED = b"not counted"
"""This is the body of messages that are only there to make others wait."""
NEVER_S = float("inf")
AFTER_ALL_S = 1e12
"""This time is later than anything that happens, and still before never."""
EVERYTHING_BEFORE_S = 0.0
"""Messages that were there before anything else happened were acknowledged at this time."""


def evidence_directory() -> str | None:
    """Says where data paths are kept on which a promise was broken: TORTURE_KEEP from the environment."""
    return os.environ.get("TORTURE_KEEP")


@dataclass
class Tally:
    """Counts what one kind of fault came to. `faults` are broken promises in words, losses among them."""

    rounds: int = 0
    acknowledged: int = 0
    lost: int = 0
    invented: int = 0
    repeated: int = 0
    """Deliveries of what was finished before. They are allowed after a crash."""
    refused: int = 0
    """Starts that nsqd refused without a sentence that says why."""
    excused: int = 0
    """Messages lost that the accident excuses."""
    faults: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Tally") -> "Tally":
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.invented or self.refused or self.faults)

    def __str__(self) -> str:
        counts = ", ".join(f"{each.name} {getattr(self, each.name)}" for each in fields(self) if each.name != "faults")
        return "\n  ".join([counts, *self.faults[:FAULTS_SHOWN_MAX]])


@dataclass(frozen=True, slots=True)
class Accident:
    """Says when an accident was, and what it may cost."""

    at_s: float = AFTER_ALL_S
    grace_s: float = 0.0
    """What was acknowledged less than this before the accident may be lost, unless the answer says that it is on
    disk.
    """
    channel_grace_s: float = 0.0
    """A channel that was made less than this before the accident may be lost."""
    may_double_deferred: bool = False
    """A deferred message that came due less than this before may be in the log twice: its file lost the note of
    that.
    """
    excused: frozenset[bytes] = frozenset()
    """Messages that may be lost because of it."""


COSTS_NOTHING = Accident()


@dataclass(slots=True)
class Fate:
    """Knows of a message when it was sent, when its OK came, and since when a channel may do without it."""

    topic: str
    sent_s: float
    acknowledged_s: float | None = None
    is_synced: bool = False
    """Its answer says that it is on disk, in any mode."""
    is_deferred: bool = False
    released_s: dict[str, float] = field(default_factory=dict)

    def is_owed_to(self, channel: "Channel", accident: Accident) -> bool:
        grace_s = 0.0 if self.is_synced else accident.grace_s
        if self.acknowledged_s is None or self.acknowledged_s > accident.at_s - grace_s:
            return False
        if not channel.is_first and self.sent_s < channel.made_s:
            return False
        return self.released_s.get(channel.name, NEVER_S) > accident.at_s


@dataclass(slots=True)
class Channel:
    topic: str
    name: str
    made_s: float
    is_first: bool
    """The first channel of a topic is owed what was there before it."""
    deleted_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Received:
    id: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """Is an append with a token that was answered."""

    topic: str
    token: str
    bodies: list[bytes]
    answered_s: float


Deliveries = dict[tuple[str, str], list[Received]]


class Book:
    """Has all messages by their bodies, and all channels."""

    def __init__(self) -> None:
        self.fates: dict[bytes, Fate] = {}
        self.channels: dict[tuple[str, str], Channel] = {}
        self.appends: list[Appended] = []

    # -- what clients tell it ----------------------------------------------------------------------------

    def send(self, topic: str, bodies: Iterable[bytes], *, deferred: bool = False) -> None:
        now = time.time()
        for body in bodies:
            self.fates.setdefault(body, Fate(topic, now, is_deferred=deferred))

    def acknowledge(self, bodies: Iterable[bytes], *, synced: bool = False) -> None:
        now = time.time()
        for body in bodies:
            fate = self.fates[body]
            if fate.acknowledged_s is None:
                fate.acknowledged_s, fate.is_synced = now, synced

    def append(self, topic: str, token: str, bodies: list[bytes]) -> None:
        """Is told that a staged append was answered: it is on disk in any mode, and so is its token."""
        self.acknowledge(bodies, synced=True)
        self.appends.append(Appended(topic, token, bodies, time.time()))

    def found(self, topic: str, bodies: Iterable[bytes]) -> None:
        """Is told of messages that were on disk before the first call."""
        for body in bodies:
            self.fates[body] = Fate(topic, EVERYTHING_BEFORE_S, EVERYTHING_BEFORE_S, True)

    def release(self, channel: str, body: bytes) -> None:
        """Is told before FIN is sent that a message may be finished from then on."""
        fate = self.fates.get(body)
        if fate is not None:
            fate.released_s.setdefault(channel, time.time())

    def empty(self, topic: str, channel: str) -> None:
        for body, fate in self.fates.items():
            if fate.topic == topic:
                self.release(channel, body)

    def add_channel(self, topic: str, name: str, made_s: float | None = None) -> None:
        if (topic, name) not in self.channels:
            is_first = not any(channel.topic == topic for channel in self.channels.values())
            self.channels[topic, name] = Channel(topic, name, time.time() if made_s is None else made_s, is_first)

    def delete_channel(self, topic: str, name: str) -> None:
        self.channels[topic, name].deleted_s = time.time()

    # -- what it says ------------------------------------------------------------------------------------

    def acknowledged(self, at_s: float = AFTER_ALL_S) -> int:
        return sum(fate.acknowledged_s is not None and fate.acknowledged_s <= at_s for fate in self.fates.values())

    def channels_at(self, accident: Accident) -> list[Channel]:
        """Returns the channels that are owed something: the only one of its topic, even if it was made too late to
        be kept.
        """
        there = [one for one in self.channels.values() if one.made_s <= accident.at_s < one.deleted_s]
        counts = Counter(one.topic for one in there)
        kept_s = accident.at_s - accident.channel_grace_s
        return [one for one in there if one.made_s <= kept_s or (counts[one.topic] == 1 and one.is_first)]

    def judge(self, received: Deliveries, accident: Accident = COSTS_NOTHING) -> Tally:
        """Gives a verdict on every message."""
        tally = Tally(rounds=1, acknowledged=self.acknowledged(accident.at_s))
        for channel in self.channels_at(accident):
            came = received.get((channel.topic, channel.name), [])
            bodies = {one.body for one in came}
            owed = {
                body
                for body, fate in self.fates.items()
                if fate.topic == channel.topic and fate.is_owed_to(channel, accident)
            }
            missing = owed - bodies
            tally.excused += len(missing & accident.excused)
            self._count_lost(tally, channel, missing - accident.excused, len(owed), accident.at_s)
            self._count_others(tally, channel, came, accident)
        return tally

    def _count_lost(self, tally: Tally, channel: Channel, lost: set[bytes], owed: int, at_s: float) -> None:
        if not lost:
            return
        tally.lost += len(lost)
        example = min(lost, key=lambda body: self.fates[body].acknowledged_s or 0.0)
        fate = self.fates[example]
        age = f", {at_s - (fate.acknowledged_s or 0.0):.2f} s after its OK" if at_s < AFTER_ALL_S else ""
        tally.faults.append(
            f"{channel.topic}:{channel.name}: {len(lost)} of {owed} acknowledged messages lost, e.g."
            f" {example[:30]!r}{', deferred' * fate.is_deferred}{age}"
        )

    def _count_others(self, tally: Tally, channel: Channel, came: list[Received], accident: Accident) -> None:
        ids: dict[bytes, bytes] = {}
        for one in came:
            fate = self.fates.get(one.body)
            if one.body == NOT_COUNTED:
                continue
            if fate is None or fate.topic != channel.topic or fate.sent_s > accident.at_s:
                tally.invented += 1
                tally.faults.append(f"{channel.topic}:{channel.name}: was never published here: {one.body[:50]!r}")
                continue
            is_double = ids.setdefault(one.body, one.id) != one.id
            if is_double and not (fate.is_deferred and accident.may_double_deferred):
                tally.invented += 1
                tally.faults.append(f"{channel.topic}:{channel.name}: is in the log twice: {one.body[:50]!r}")
            elif is_double or fate.released_s.get(channel.name, NEVER_S) <= accident.at_s:
                tally.repeated += 1
