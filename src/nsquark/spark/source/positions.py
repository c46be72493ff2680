"""What `startingOffsets` and its like mean for a key: a sequence number."""

from nsquark.spark.endpoint import NsqdError
from nsquark.spark.nsqd_http import Nsqd
from nsquark.spark.options import Position
from nsquark.spark.source.cluster import Head
from nsquark.spark.source.offsets import Key


def resolve(position: Position, nsqd: Nsqd, key: Key, head: Head, *, unnamed: str) -> int:
    """`unnamed` is for a key that a JSON object does not name: earliest or latest."""
    if position.kind == "time":
        return at_time(nsqd, key, position.time_ms)
    place: int | str = position.kind
    if position.kind == "places":
        place = dict(position.places).get(str(key), unnamed)
    if place == "earliest":
        return head.first
    if place == "latest":
        return head.next
    seq = int(place)
    if seq > head.next:
        raise NsqdError(f"offset {seq} of {key} is beyond the end of its log, which is {head.next}: write that or less")
    return seq


def at_time(nsqd: Nsqd, key: Key, time_ms: int) -> int:
    """The first message published at this time or later; the end of the log if there is none."""
    return nsqd.first_at(key.topic, time_ms)
