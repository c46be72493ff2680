"""Plans a batch read. Every nsqd must answer, since what it has would otherwise be missing without a word."""

import functools
from collections.abc import Callable, Mapping

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.nsqd_http import Finder, RangeNsqd
from nsquark.spark.options import EARLIEST, SourceOptions
from nsquark.spark.source.cluster import FOREIGN_SKIPPED, Head, is_wanted
from nsquark.spark.source.offsets import Key, Range
from nsquark.spark.source.plan import Partition, Planner, Ranges
from nsquark.spark.source.positions import check_named, resolve

log = library_log("nsquark.spark")


Narrow = Callable[[Ranges, Mapping[str, RangeNsqd]], Ranges]


def plan_batch(options: SourceOptions, narrow: Narrow = lambda ranges, _: ranges) -> list[Partition]:
    """Makes the partitions of a batch read; `narrow` leaves out ranges that a filter would drop anyway."""
    nsqds = _nsqds(options)
    try:
        heads = {
            Key(head.topic, nsqd.id): Head(head.first, head.next, head.id)
            for nsqd in nsqds.values()
            for head in nsqd.topics(functools.partial(is_wanted, options))
        }
        _check_topics(options, heads, nsqds)
        starting = options.starting or EARLIEST
        check_named("startingOffsets", starting, options, heads, nsqds)
        check_named("endingOffsets", options.ending, options, heads, nsqds)
        lows = resolve(starting, heads, nsqds, unnamed="earliest")
        highs = resolve(options.ending, heads, nsqds, unnamed="latest")
        ranges = {
            key: Range(lows[key], highs[key], heads[key].topic_id)
            for key in sorted(heads)
            if key in lows and key in highs and lows[key] < highs[key]
        }
        return Planner(options).partitions(narrow(ranges, nsqds), nsqds)
    finally:
        for nsqd in nsqds.values():
            nsqd.close()


def _nsqds(options: SourceOptions) -> dict[str, RangeNsqd]:
    finder = Finder(options)
    found = finder.find()
    if finder.unreachable:
        raise Unreachable(
            f"{'; '.join(finder.unreachable.values())}: a batch reads what all nsqds have; start it again, "
            "or leave its address out to read without it"
        )
    for address in finder.foreign:
        log.warning(FOREIGN_SKIPPED, address)
    nsqds = {nsqd_id: nsqd for nsqd_id, nsqd in found.items() if nsqd_id not in options.lost_nsqds}
    _check_expected(options, nsqds)
    return nsqds


def _check_expected(options: SourceOptions, nsqds: dict[str, RangeNsqd]) -> None:
    """Raises if an expected nsqd is missing, and warns if none is named: nsqlookupd forgets an nsqd that is down."""
    there = ", ".join(f"{nsqd_id} at {nsqd.address}" for nsqd_id, nsqd in nsqds.items()) or "none"
    expected = options.expected_nsqds
    if expected is None:
        if options.lookupd:
            log.warning(
                "the batch reads the nsqds that %s knows now: %s; set expectedNsqds, a count or ids, to be told when "
                "one is missing",
                ", ".join(options.lookupd),
                there,
            )
        return
    missing = sorted(set(expected.ids) - nsqds.keys())
    if missing or len(nsqds) < expected.count:
        which = f"nsqd {', '.join(missing)}" if missing else f"{expected.count - len(nsqds)} of {expected.count} nsqds"
        raise Unreachable(
            f"{which} cannot be found, of those that expectedNsqds names; there are {there}: a batch reads what all "
            "of them have; start it again, or leave it out of expectedNsqds"
        )


def _check_topics(options: SourceOptions, heads: dict[Key, Head], nsqds: dict[str, RangeNsqd]) -> None:
    asked = ", ".join(nsqd.address for nsqd in nsqds.values()) or f"those that {', '.join(options.lookupd)} knows"
    missing = set(options.topics) - {key.topic for key in heads}
    if missing:
        raise NsqdError(f"there is no topic {', '.join(sorted(missing))} on any nsqd ({asked}): check its name")
    if not heads:
        log.warning("topicPattern %s matches no topic on any nsqd (%s)", options.topic_pattern, asked)
