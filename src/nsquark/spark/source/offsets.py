"""Encodes a query's offsets, as Spark logs them in the checkpoint.

    {"n": {"<nsqd id>": {"at": "10.0.0.1:4151", "run": "…"}},
     "orders@<nsqd id>": {"from": 17, "id": "…", "next": 42}, "q": "<uuid>", "t": 1794777198000, "v": 2}

A key is a topic on an nsqd; `from` is where the query began to read it, `next` the first message not yet read, and `id`
the incarnation of the topic. `n` has the nsqds that the query knows, where they were and in which run they were read.
`q` names the query to nsqd, as the owner of its channel. `t` is when the query began: with startingOffsets=latest an
nsqd that is found later is read from that time on.

Keys are always sorted. Spark compares the text of offsets: the same offset in another order would be new data to it.
Version 1 had neither `n` nor `id`; it can still be read, and both are added.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nsquark.base.clock import wall_ms

VERSION = 2
VERSIONS_READ = (1, VERSION)


class Key(NamedTuple):
    """Names a topic on one nsqd."""

    topic: str
    nsqd_id: str

    @classmethod
    def parse(cls, text: str) -> "Key":
        topic, _, nsqd_id = text.partition("@")
        return cls(topic, nsqd_id)

    def __str__(self) -> str:
        return f"{self.topic}@{self.nsqd_id}"


class ReadSpan(NamedTuple):
    """Says which part of a key's log a query has read. A new `start` means that the query began anew there."""

    start: int
    next: int
    topic_id: str = ""
    """This is the incarnation of the topic; it is empty if it is not known."""


class Range(NamedTuple):
    """Says which part of a key's log a batch reads: `low <= seq < high`."""

    low: int
    high: int
    topic_id: str = ""


class KnownNsqd(NamedTuple):
    """Says where an nsqd was, and in which run it was read."""

    address: str
    run: str


@dataclass(frozen=True)
class Offset:
    """Says how far a query has read each key."""

    query: str | None = None
    began_ms: int = 0
    spans: Mapping[Key, ReadSpan] = field(default_factory=dict)
    nsqds: Mapping[str, KnownNsqd] = field(default_factory=dict)

    @classmethod
    def begin(cls) -> "Offset":
        return cls(str(uuid.uuid4()), wall_ms())

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Offset":
        version = fields.get("v")
        if version not in VERSIONS_READ:
            raise ValueError(
                f"the checkpoint has offsets of version {version!r}, and this nsquark reads versions 1 to {VERSION}: "
                "use the version of nsquark that wrote it, or a new checkpoint"
            )
        spans = {
            Key.parse(text): ReadSpan(span["from"], span["next"], span.get("id", ""))
            for text, span in fields.items()
            if "@" in text
        }
        nsqds = {nsqd_id: KnownNsqd(known["at"], known["run"]) for nsqd_id, known in fields.get("n", {}).items()}
        return cls(fields.get("q"), fields.get("t", 0), spans, nsqds)

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            str(key): {"from": span.start, "id": span.topic_id, "next": span.next} for key, span in self.spans.items()
        }
        if self.query is not None:
            nsqds = {nsqd_id: {"at": known.address, "run": known.run} for nsqd_id, known in sorted(self.nsqds.items())}
            fields |= {"n": nsqds, "q": self.query, "t": self.began_ms}
        fields["v"] = VERSION
        return dict(sorted(fields.items()))

    @property
    def age_ms(self) -> int:
        """Returns how long ago the query began, by this machine's clock."""
        return max(wall_ms() - self.began_ms, 0)

    def with_spans(self, spans: Mapping[Key, ReadSpan]) -> "Offset":
        return replace(self, spans={**self.spans, **spans})

    def with_nsqds(self, nsqds: Mapping[str, KnownNsqd]) -> "Offset":
        return replace(self, nsqds={**self.nsqds, **nsqds})


INITIAL = Offset()
"""Spark takes this offset as the start of batch 0, also when it repeats a failed batch 0, so it depends on nothing."""


def ranges(start: Offset, end: Offset) -> dict[Key, Range]:
    """Finds what a batch reads. A key that is new in `end`, or began anew, is read from the start of its span; one that
    `end` lacks is not read.
    """
    found = {}
    for key, span in end.spans.items():
        done = start.spans.get(key)
        low = done.next if done and done.start == span.start else span.start
        if low < span.next:
            found[key] = Range(low, span.next, span.topic_id)
    return found
