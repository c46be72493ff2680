"""The plan of a batch read: every nsqd must answer, since what it has would otherwise be missing without a word."""

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.nsqd_http import Finder, Nsqd
from nsquark.spark.options import EARLIEST, SourceOptions
from nsquark.spark.source.cluster import Head, is_wanted
from nsquark.spark.source.offsets import Key
from nsquark.spark.source.plan import Planner, RangePartition
from nsquark.spark.source.positions import resolve

log = library_log("nsquark.spark")


def plan_batch(options: SourceOptions) -> list[RangePartition]:
    nsqds = _nsqds(options)
    heads = {
        Key(topic, nsqd.id): Head(entry.first, entry.next)
        for nsqd in nsqds.values()
        for topic, entry in nsqd.topics().items()
        if is_wanted(options, topic)
    }
    _check_topics(options, heads, nsqds)
    ranges = {}
    for key, head in heads.items():
        nsqd = nsqds[key.nsqd_id]
        low = resolve(options.starting or EARLIEST, nsqd, key, head, unnamed="earliest")
        high = resolve(options.ending, nsqd, key, head, unnamed="latest")
        if low < high:
            ranges[key] = (low, high)
    try:
        return Planner(options).partitions(ranges, nsqds)
    finally:
        for nsqd in nsqds.values():
            nsqd.close()


def _nsqds(options: SourceOptions) -> dict[str, Nsqd]:
    finder = Finder(options)
    found = finder.find()
    if finder.unreachable:
        raise Unreachable(
            f"{'; '.join(finder.unreachable.values())}: a batch reads what all nsqds have; start it again, "
            "or leave its address out to read without it"
        )
    return {nsqd_id: nsqd for nsqd_id, nsqd in found.items() if nsqd_id not in options.lost_nsqds}


def _check_topics(options: SourceOptions, heads: dict[Key, Head], nsqds: dict[str, Nsqd]) -> None:
    asked = ", ".join(nsqd.address for nsqd in nsqds.values()) or f"those that {', '.join(options.lookupd)} knows"
    missing = set(options.topics) - {key.topic for key in heads}
    if missing:
        raise NsqdError(f"there is no topic {', '.join(sorted(missing))} on any nsqd ({asked}): check its name")
    if not heads:
        log.warning("topicPattern %s matches no topic on any nsqd (%s)", options.topic_pattern, asked)
