"""Keeps the query's channel, which holds on each nsqd what the query has not read yet, and shows its lag."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Refused, Unreachable
from nsquark.spark.nsqd_http import RangeNsqd, Seq
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.offsets import Key, Offset

log = library_log("nsquark.spark")

ALIVE_INTERVAL_S = 30.0
"""nsqd hears of the query at least this often, or at a third of channelTtl if that is less, even if nothing moves."""


class _Committed(msgspec.Struct):
    topic: str
    removed_to: Seq = 0


class SourceChannel:
    """Keeps messages that are not read yet from being removed. Commits are idempotent and only go forward, so the next
    one makes up for one that is lost.
    """

    def __init__(self, options: SourceOptions):
        self._options = options
        self._committed: dict[Key, tuple[int, float]] = {}
        self._owner = ""
        ttl_s = options.channel_ttl_s
        self._alive_interval_s = min(ALIVE_INTERVAL_S, ttl_s / 3) if ttl_s else ALIVE_INTERVAL_S

    def commit(self, offset: Offset, nsqds: Mapping[str, RangeNsqd]) -> dict[Key, int]:
        """Commits that all below the offset is done, which makes a channel that is not there. Returns, for each key
        that was committed, below which number messages were removed.
        """
        assert offset.query is not None
        removed: dict[Key, int] = {}
        for nsqd_id, nsqd in nsqds.items():
            due = {
                key: span.next
                for key, span in offset.spans.items()
                if key.nsqd_id == nsqd_id and self._is_due(key, span.next)
            }
            removed |= self.commit_keys(nsqd, offset.query, due)
        return removed

    def _is_due(self, key: Key, seq: int) -> bool:
        committed, at = self._committed.get(key, (-1, 0.0))
        return seq != committed or time.monotonic() - at >= self._alive_interval_s

    def commit_keys(self, nsqd: RangeNsqd, owner: str, seqs: Mapping[Key, int]) -> dict[Key, int]:
        """Commits keys of one nsqd together; returns, for each, below which number messages were removed."""
        self._owner = owner
        if not seqs:
            return {}
        try:
            answers = self._ask(
                nsqd, [{"topic": key.topic, "seq": seq, "start": str(seq)} for key, seq in seqs.items()]
            )
        except Unreachable as error:
            log.warning("channel %s: %s; it is committed with the next batch", self._options.channel, error)
            return {}
        removed: dict[Key, int] = {}
        for (key, seq), fields in zip(seqs.items(), answers, strict=True):
            if "message" in fields:
                if fields["message"] != "TOPIC_NOT_FOUND":
                    raise self._explained(nsqd.refusal("/channel/commit", fields), key, owner)
                continue
            self._committed[key] = (seq, time.monotonic())
            removed[key] = nsqd.read_as(fields, _Committed).removed_to
        return removed

    def _ask(self, nsqd: RangeNsqd, commits: list[dict[str, Any]]) -> list[dict[str, Any]]:
        options = self._options
        about = {"channel": options.channel, "owner": self._owner, "ttl": options.channel_ttl_s}
        return nsqd.ask_many("/channel/commit", "commits", commits, "commits", **about)

    def keep_alive(self, nsqds: Mapping[str, RangeNsqd]) -> None:
        """Keeps the channel during batches that take longer than channelTtl. It runs in another thread, so it makes its
        own connections.
        """
        now = time.monotonic()
        for nsqd_id, nsqd in nsqds.items():
            due = [
                (key, seq)
                for key, (seq, at) in list(self._committed.items())
                if key.nsqd_id == nsqd_id and now - at >= self._alive_interval_s
            ]
            if not due:
                continue
            self._committed |= {key: (seq, now) for key, seq in due}
            own = RangeNsqd(nsqd.address, self._options.access, nsqd.id)
            try:
                self._ask(own, [{"topic": key.topic, "seq": 0} for key, _ in due])
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
            return NsqdError(
                f"{where} has subscribers, or had some: messages that they finished are not in it any more. Give the "
                "query a channel of its own"
            )
        return refused
