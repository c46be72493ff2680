"""Checks that logs are still those that the query has read: a topic may be made again, or a data path be put back.

Sequence numbers of one nsqd rise for ever, so a new incarnation of a topic has higher ones, and a query that goes on
from where it was reads all of it. Only after a data path was put back to an older state may numbers come again; the
runs of the nsqd tell which of them are new (docs/log-api.md).
"""

from collections.abc import Mapping

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import Refused
from nsquark.spark.nsqd_http import NsqdRun, RangeNsqd
from nsquark.spark.source.cluster import Head
from nsquark.spark.source.offsets import Key, Offset, Range, ReadSpan
from nsquark.spark.source.plan import Planner, ask_plans

log = library_log("nsquark.spark")

SEQ_MAX = (1 << 63) - 1
RUNS_MAX = 1000
"""An nsqd remembers this many runs: one that tells as many may have forgotten earlier ones."""


class LogHistory:
    """Compares the logs as they are now with what the query knows of them."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self._forks: dict[str, tuple[tuple[str, str], NsqdRun | None]] = {}
        """By nsqd id, this has the two runs that were compared, and the first run that differs, if there is one."""

    def begun_anew(
        self, start: Offset, heads: Mapping[Key, Head], nsqds: Mapping[str, RangeNsqd]
    ) -> dict[Key, ReadSpan]:
        """Finds the keys whose log is not the one that was read, and where each is read on. A loss is an error, or a
        warning with failOnDataLoss=false. Keys whose incarnation is now known for the first time are among them, and go
        on as before.
        """
        found: dict[Key, ReadSpan] = {}
        for key, span in start.spans.items():
            head, nsqd = heads.get(key), nsqds.get(key.nsqd_id)
            if nsqd is None:
                continue
            if fork := self._fork(start, nsqd):
                found[key] = self._put_back(key, span, head, fork)
            elif head is not None and (low := self._low(key, span, head, nsqd)) is not None:
                found[key] = ReadSpan(low, low, head.topic_id)
            elif head is not None and span.topic_id != head.topic_id and head.next > span.next:
                found[key] = span._replace(topic_id=head.topic_id)
        return found

    def _put_back(self, key: Key, span: ReadSpan, head: Head | None, fork: NsqdRun) -> ReadSpan:
        """Reports that a data path was put back, whatever became of the topic since; returns where it is read on. There
        may be no such topic now: one that is made later has its messages behind the first number of the fork.
        """
        # Numbers begin above the clock, so a much later run has only numbers above all that the query has read.
        what = (
            f"this query read topic {key.topic} up to {span.next - 1}, and messages from {fork.first_seq} on are "
            "others now"
            if fork.first_seq < span.next
            else f"what it had taken of topic {key.topic} from {span.next} on, and this query had not read, is gone"
        )
        self._planner.give_up(f"nsqd {key.nsqd_id} was put back to an older state of its data path: {what}")
        low = min(fork.first_seq, span.next)
        if head is None:
            return ReadSpan(low, low)
        return ReadSpan(min(low, head.next), min(low, head.next), head.topic_id)

    def _low(self, key: Key, span: ReadSpan, head: Head, nsqd: RangeNsqd) -> int | None:
        """Returns where a key whose log has changed is read on, or None if it has not changed."""
        if span.topic_id and head.topic_id and span.topic_id != head.topic_id:
            self.replaced(key, span, nsqd, f"deleted and made again (it was {span.topic_id} and is {head.topic_id})")
            return min(span.next, head.next)
        if head.next < span.next:
            self._planner.give_up(
                f"the log of topic {key.topic} on nsqd {key.nsqd_id} ends at {head.next}, before {span.next}, up to "
                "which this query has read it: its data path was put back to an older state, or lost its end"
            )
            return head.next
        return None

    def replaced(self, key: Key, span: ReadSpan, nsqd: RangeNsqd, how: str) -> ReadSpan:
        """Reports that a topic which was read is gone. That is a loss only if it had messages that were not read.
        Returns the span with which the checkpoint knows of the loss: it lies behind what was lost or, if nsqd cannot
        tell how much that was, is of no incarnation, so that there is nothing to compare any more.
        """
        count = _lost(key, span, span.next, nsqd)
        if count == 0:
            log.warning("topic %s on nsqd %s was %s; the query had read all of it", key.topic, key.nsqd_id, how)
            return span
        unread = f"{count} messages" if count is not None else "an unknown number of messages"
        self._planner.give_up(
            f"topic {key.topic} on nsqd {key.nsqd_id} was {how}, with {unread} from {span.next} on that this query "
            "had not read"
        )
        if count is None:
            return ReadSpan(span.next, span.next)
        low, high = span.next, SEQ_MAX
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _lost(key, span, middle, nsqd) else (low, middle)
        return ReadSpan(high, high, span.topic_id)

    def _fork(self, start: Offset, nsqd: RangeNsqd) -> NsqdRun | None:
        """Finds the first run after the data path was put back to before the run that the query knows, or None."""
        known = start.nsqds.get(nsqd.id)
        if known is None or not known.run or not nsqd.run or known.run == nsqd.run:
            return None
        asked = (known.run, nsqd.run)
        if nsqd.id not in self._forks or self._forks[nsqd.id][0] != asked:
            self._forks[nsqd.id] = (asked, _fork_of(known.run, nsqd.runs()))
        return self._forks[nsqd.id][1]


def _lost(key: Key, span: ReadSpan, seq: int, nsqd: RangeNsqd) -> int | None:
    """Asks how many messages from `seq` on went with deleted incarnations of a topic, from the span's on, if that is
    known.
    """
    [answer] = ask_plans(nsqd, [(key, Range(seq, seq, span.topic_id), {})])
    count = answer.fields.get("lost") if isinstance(answer, Refused) else None
    return count if isinstance(count, int) else None


def _fork_of(known: str, runs: list[NsqdRun]) -> NsqdRun | None:
    if not runs or any(run.id == known for run in runs) or (len(runs) >= RUNS_MAX and runs[0].id > known):
        return None
    return next((run for run in runs if run.id > known), runs[-1])
