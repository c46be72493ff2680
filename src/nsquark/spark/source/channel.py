"""The query as a channel: on each nsqd it holds what the query has not yet read, and shows its lag."""

import time
from collections.abc import Mapping

import msgspec

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Refused, Unreachable
from nsquark.spark.nsqd_http import Nsqd, Seq
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.offsets import Key, Offset

log = library_log("nsquark.spark")

ALIVE_INTERVAL_S = 30.0
"""At least so often, or at a third of channelTtl, nsqd hears of the query even if nothing moves."""


class _Committed(msgspec.Struct):
    position: Seq


class ChannelHold:
    """Commits are idempotent and only go forward, so one that is lost is made up for by the next."""

    def __init__(self, options: SourceOptions):
        self._options = options
        self._committed: dict[Key, tuple[int, float]] = {}
        self._owner = ""
        ttl_s = options.channel_ttl_s
        self._alive_interval_s = min(ALIVE_INTERVAL_S, ttl_s / 3) if ttl_s else ALIVE_INTERVAL_S

    def commit(self, offset: Offset, nsqds: Mapping[str, Nsqd]) -> dict[Key, int]:
        """All below the offset is done. A channel that is not there is made, at the offset. Gives the first message
        that each channel still holds, as far as they were asked.
        """
        assert offset.query is not None
        self._owner = offset.query
        positions: dict[Key, int] = {}
        for key, span in offset.spans.items():
            nsqd = nsqds.get(key.nsqd_id)
            seq, at = self._committed.get(key, (-1, 0.0))
            if nsqd is None or (seq == span.next and time.monotonic() - at < self._alive_interval_s):
                continue
            positions[key] = self.hold(nsqd, key, offset.query, span.next)
        return positions

    def hold(self, nsqd: Nsqd, key: Key, owner: str, seq: int) -> int:
        """Commits one key; the first message that the channel now holds."""
        try:
            answer = nsqd.ask(
                "/channel/commit",
                "POST",
                topic=key.topic,
                channel=self._options.channel,
                owner=owner,
                seq=seq,
                start=seq,
                ttl=self._options.channel_ttl_s,
            )
        except Unreachable as error:
            log.warning("channel %s: %s; it is committed with the next batch", self._options.channel, error)
            return seq
        except Refused as refused:
            if refused.code == "TOPIC_NOT_FOUND":
                return seq
            raise self._explained(refused, key, owner) from None
        self._committed[key] = (seq, time.monotonic())
        return nsqd.read_as(answer, _Committed).position

    def keep_alive(self, nsqds: Mapping[str, Nsqd]) -> None:
        """For batches that take longer than channelTtl. Called in another thread, with connections of its own."""
        for key, (_, at) in list(self._committed.items()):
            nsqd = nsqds.get(key.nsqd_id)
            if nsqd is None or time.monotonic() - at < self._alive_interval_s:
                continue
            own = Nsqd(nsqd.address, self._options.access, nsqd.id)
            try:
                self._committed[key] = (self._committed[key][0], time.monotonic())
                own.ask(
                    "/channel/commit",
                    "POST",
                    topic=key.topic,
                    channel=self._options.channel,
                    owner=self._owner,
                    seq=0,
                    ttl=self._options.channel_ttl_s,
                )
            except NsqdError as error:
                log.warning("channel %s: %s", self._options.channel, error)
            finally:
                own.close()

    def _explained(self, refused: Refused, key: Key, owner: str) -> NsqdError:
        where = f"channel {self._options.channel} of topic {key.topic} on nsqd {key.nsqd_id}"
        if refused.code == "OWNED":
            return NsqdError(
                f"{where} belongs to query {refused.fields.get('owner')}, and this is query {owner}: give each query a "
                "channel of its own, or delete the channel if that query is gone for good"
            )
        if refused.code == "USED_BY_SUBSCRIBERS":
            return NsqdError(f"{where} has subscribers, which share its messages: give the query a channel of its own")
        return refused
