"""A query's offsets, as Spark logs them in the checkpoint.

    {"orders@<nsqd id>": {"from": 17, "next": 42}, "q": "<uuid>", "t": 1794777198000, "v": 1}

A key is a topic on an nsqd; `from` is where the query began to read it and `next` the first message not yet read.
`q` names the query to nsqd, as the owner of its channel. `t` is when the query began: with startingOffsets=latest a key
that is found later is read from there.

Keys are always sorted. Spark compares the text of offsets: the same offset in another order would be new data to it.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

VERSION = 1


class Key(NamedTuple):
    topic: str
    nsqd_id: str

    @classmethod
    def parse(cls, text: str) -> "Key":
        topic, _, nsqd_id = text.partition("@")
        return cls(topic, nsqd_id)

    def __str__(self) -> str:
        return f"{self.topic}@{self.nsqd_id}"


class Span(NamedTuple):
    """What a query has read of a key."""

    start: int
    next: int


@dataclass(frozen=True)
class Offset:
    query: str | None = None
    began_ms: int = 0
    spans: Mapping[Key, Span] = field(default_factory=dict)

    @classmethod
    def begin(cls) -> "Offset":
        return cls(str(uuid.uuid4()), time.time_ns() // 1_000_000)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Offset":
        version = fields.get("v")
        if version != VERSION:
            raise ValueError(
                f"the checkpoint has offsets of version {version!r}, and this nsquark reads version {VERSION}: "
                "use the version of nsquark that wrote it, or a new checkpoint"
            )
        spans = {Key.parse(text): Span(span["from"], span["next"]) for text, span in fields.items() if "@" in text}
        return cls(fields.get("q"), fields.get("t", 0), spans)

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {str(key): {"from": span.start, "next": span.next} for key, span in self.spans.items()}
        if self.query is not None:
            fields |= {"q": self.query, "t": self.began_ms}
        fields["v"] = VERSION
        return dict(sorted(fields.items()))

    def with_spans(self, spans: Mapping[Key, Span]) -> "Offset":
        return replace(self, spans={**self.spans, **spans})


INITIAL = Offset()
"""What Spark takes as the start of batch 0. Asked for again after a failed batch 0, so it depends on nothing."""


def ranges(start: Offset, end: Offset) -> dict[Key, tuple[int, int]]:
    """What a batch reads. A key that is new in `end` begins at its own start; one that `end` lacks is not read."""
    found = {}
    for key, span in end.spans.items():
        done = start.spans.get(key)
        low = max(done.next, span.start) if done else span.start
        if low < span.next:
            found[key] = (low, span.next)
    return found
