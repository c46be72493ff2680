"""Finds what options like `startingOffsets` mean: a sequence number for each key, asked of the nsqds that have it."""

from collections.abc import Iterable, Mapping

from nsquark.spark.endpoint import NsqdError
from nsquark.spark.nsqd_http import RangeNsqd
from nsquark.spark.options import OptionError, Position, SourceOptions
from nsquark.spark.source.cluster import Head, is_wanted
from nsquark.spark.source.offsets import Key


def resolve(
    position: Position, heads: Mapping[Key, Head], nsqds: Mapping[str, RangeNsqd], *, unnamed: str
) -> dict[Key, int]:
    """Finds the sequence number for each key; `unnamed`, earliest or latest, is for keys that JSON does not name."""
    if position.kind == "time":
        return at_times(heads, nsqds, {"ts": position.time_ns})
    places = dict(position.places)
    found: dict[Key, int] = {}
    for key, head in heads.items():
        place = places.get(str(key), unnamed) if position.kind == "places" else position.kind
        found[key] = {"earliest": head.first, "latest": head.next}[place] if isinstance(place, str) else place
        if found[key] > head.next:
            raise NsqdError(
                f"offset {place} of {key} is beyond the end of its log, which is {head.next}: write that or less"
            )
    return found


def at_times(heads: Iterable[Key], nsqds: Mapping[str, RangeNsqd], when: Mapping[str, int | str]) -> dict[Key, int]:
    """Asks each nsqd, in one request, where a time lies in its logs. `when` has the arguments of `RangeNsqd.first_at`.

    A topic that is deleted meanwhile is left out.
    """
    by_nsqd: dict[str, list[str]] = {}
    for key in heads:
        by_nsqd.setdefault(key.nsqd_id, []).append(key.topic)
    found: dict[Key, int] = {}
    for nsqd_id, topics in by_nsqd.items():
        nsqd = nsqds[nsqd_id]
        found |= {Key(topic, nsqd_id): seq for topic, seq in nsqd.first_at(topics, **when).items()}
    return found


def check_named(
    name: str, position: Position, options: SourceOptions, heads: Mapping[Key, Head], nsqds: Mapping[str, RangeNsqd]
) -> None:
    """Raises if a position names a topic or an nsqd that is not there, or is not read: it would count for nothing."""
    for text, _ in position.places:
        key = Key.parse(text)
        if key in heads or key.nsqd_id in options.lost_nsqds:
            continue
        if not is_wanted(options, key.topic):
            why = f"topic {key.topic} is not among those to read"
        elif key.nsqd_id not in nsqds:
            there = ", ".join(f"{nsqd_id} at {nsqd.address}" for nsqd_id, nsqd in nsqds.items())
            why = f"there is no nsqd with this id ({there or 'none answers'})"
        else:
            why = f"there is no topic {key.topic} on this nsqd"
        raise OptionError(f"{name} names {text}, but {why}: leave it out, or write one that is there")
