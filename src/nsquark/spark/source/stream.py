"""Runs a streaming query: decides which range each batch reads, and tells nsqd what is done.

Spark calls `latestOffset(start)` for the end of the next batch, which it logs before the batch runs, and then
`partitions(start, end)`. All below `start` is done when `latestOffset(start)` is called, and it is called once more
after the last batch of AvailableNow: so the channel is committed there. (`commit()` comes a batch late, and `stop()` is
not called when a query ends by an error.)
"""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.nsqd_http import RangeNsqd
from nsquark.spark.options import COUNT_MAX, EARLIEST, LATEST, SourceOptions
from nsquark.spark.source.admission import Admission
from nsquark.spark.source.channel import SourceChannel
from nsquark.spark.source.cluster import Cluster, Head, Heads
from nsquark.spark.source.history import LogHistory
from nsquark.spark.source.offsets import INITIAL, Key, KnownNsqd, Offset, Range, ReadSpan, ranges
from nsquark.spark.source.packed_rows import read_partition
from nsquark.spark.source.plan import Asked, DataLost, Partition, Planner, RangePlan, ask_plans
from nsquark.spark.source.positions import at_times, check_named, resolve
from nsquark.spark.source.schema import as_arrow, check_schema

if TYPE_CHECKING:
    import pyarrow as pa

log = library_log("nsquark.spark")


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Answers Spark's calls for a stream. It is pickled to the tasks, which only read, so what has connections is made
    only when it is used.
    """

    def __init__(self, options: SourceOptions, schema: StructType):
        options.check_stream()
        check_schema(schema, options)
        self._options = options
        self._schema = schema
        self._made: Query | None = None

    @property
    def _query(self) -> "Query":
        if self._made is None:
            self._made = Query(self._options)
        return self._made

    def initialOffset(self) -> dict[str, Any]:
        return INITIAL.fields()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Returns a limit that stands for all of ours, if there are any: Spark's own for Python cannot be combined."""
        return ReadMaxRows(self._options.messages_max or COUNT_MAX) if self._options.has_limits else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        is_limited = not isinstance(limit, ReadAllAvailable)
        return self._query.end_of_next_batch(Offset.parse(start), limited=is_limited).fields()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._query.lag()

    def prepareForTriggerAvailableNow(self) -> None:
        self._query.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(part) for part in self._query.partitions(Offset.parse(start), Offset.parse(end))]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        return read_partition(self._options, as_arrow(self._schema), partition.value)

    def stop(self) -> None:
        if self._made is not None:
            self._made.stop()


class Query:
    """Does the driver's side of a query. With a channel, the first offset has only the query's id and positions, and
    reads nothing: the query can own the channel only once the checkpoint has its id. A batch that goes back to numbers
    which come again reads nothing either: it could not be told from one that goes on behind them.
    """

    def __init__(self, options: SourceOptions):
        self._options = options
        self._starting = options.starting or LATEST
        self._channel = SourceChannel(options) if options.channel else None
        self._cluster = Cluster(options, self._keep_alive)
        self._planner = Planner(options)
        self._history = LogHistory(self._planner)
        self._admission = Admission(options, self._cluster, self._planner)
        self._begun = Offset.begin()
        self._frozen: Heads | None = None
        self._end = INITIAL
        self._warned: set[str] = set()
        self._said_deleted: set[tuple[Key, ReadSpan]] = set()

    def stop(self) -> None:
        self._cluster.stop()

    def _keep_alive(self) -> None:
        if self._channel is not None:
            self._channel.keep_alive(self._cluster.nsqds())

    # -- latestOffset ------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Fixes the end of what AvailableNow reads: what comes after this moment is left to the next run."""
        self._frozen = self._cluster.heads(fresh=True)

    def end_of_next_batch(self, start: Offset, *, limited: bool) -> Offset:
        """Finds where the next batch ends. An nsqd that falls silent at any question is left out, and the rest asked
        again.
        """
        while True:
            try:
                return self._end_of_next_batch(start, limited=limited)
            except Unreachable as error:
                if not self._cluster.mark_silent(error):
                    raise

    def _end_of_next_batch(self, start: Offset, *, limited: bool) -> Offset:
        self._cluster.remember({nsqd_id: known.address for nsqd_id, known in start.nsqds.items()})
        # The nsqds are asked also when the end is fixed: their answers tell whether they are in another run by now.
        heads = self._cluster.heads()
        if self._frozen is not None:
            heads = self._frozen
        base = start if start.query else self._begun
        nsqds = self._cluster.nsqds()
        checked = {nsqd_id: KnownNsqd(nsqd.address, nsqd.run) for nsqd_id, nsqd in nsqds.items()}
        anew = self._history.begun_anew(start, heads, nsqds)
        deleted = self._check_missing(start, {*heads, *anew})
        spans = {**start.spans, **deleted, **anew}
        spans |= self._commit_channel(start, spans)
        spans |= self._entering(start, heads)
        self._end = _with_nsqds(base.with_spans(spans), start, heads, checked, anew)
        if (self._channel and not start.query) or any(span.next < start.spans[key].next for key, span in anew.items()):
            return self._end
        wanted = {
            key: Range(span.next, heads[key].next, span.topic_id)
            for key, span in spans.items()
            if _has_more(heads.get(key), span)
        }
        admitted = self._admission.admit(wanted, limited=limited, may_wait=self._frozen is None)
        if admitted is None:
            return start if start.query else self._end
        read_on = {key: spans[key]._replace(next=high) for key, high in admitted.items()}
        self._end = _with_nsqds(self._end.with_spans(read_on), start, heads, checked, anew)
        return self._end

    def _commit_channel(self, start: Offset, spans: Mapping[Key, ReadSpan]) -> dict[Key, ReadSpan]:
        """Commits the channel. Messages that retention removed before the channel held them are no loss: with
        `earliest`, those of the `spans` that are returned begin after them.
        """
        if not self._channel or not start.query:
            return {}
        # What begins anew is held from there: numbers that come again were done, the messages that have them now not.
        removed = self._channel.commit(start.with_spans(spans), self._cluster.nsqds())
        if self._starting != EARLIEST:
            return {}
        return {
            key: spans[key]._replace(start=removed[key], next=removed[key])
            for key, span in start.spans.items()
            if span.start == span.next < removed.get(key, 0)
        }

    def _entering(self, start: Offset, heads: dict[Key, Head]) -> dict[Key, ReadSpan]:
        """Finds the keys that are read from now on, and where each begins. With a channel, they are held from there."""
        nsqds = self._cluster.nsqds()
        new = {
            key: head
            for key, head in heads.items()
            if key not in start.spans and key.nsqd_id in nsqds and key.nsqd_id not in self._options.lost_nsqds
        }
        if not start.query:
            check_named("startingOffsets", self._starting, self._options, heads, nsqds)
        entering: dict[Key, ReadSpan] = {}
        for nsqd_id in {key.nsqd_id: None for key in new}:
            of_nsqd = {key: head for key, head in new.items() if key.nsqd_id == nsqd_id}
            try:
                firsts = self._firsts(of_nsqd, nsqds[nsqd_id], start)
                if self._channel and start.query:
                    self._channel.commit_keys(nsqds[nsqd_id], start.query, firsts)
            except Unreachable as error:
                self._cluster.mark_silent(error)
            else:
                entering |= {key: ReadSpan(low, low, heads[key].topic_id) for key, low in firsts.items()}
        return entering

    def _firsts(self, heads: dict[Key, Head], nsqd: RangeNsqd, start: Offset) -> dict[Key, int]:
        """Finds where keys of one nsqd begin. With `latest`, a topic made after the query began is read whole, and an
        nsqd that was not there then is read from that time on: by its own clock, which may differ from the driver's.
        """
        nsqds = {nsqd.id: nsqd}
        if self._starting == LATEST and start.query:
            if nsqd.id in start.nsqds:
                return resolve(EARLIEST, heads, nsqds, unnamed="earliest")
            return at_times(heads, nsqds, {"age_ms": start.age_ms})
        return resolve(self._starting, heads, nsqds, unnamed="earliest")

    # -- what is not there -------------------------------------------------------------------------------

    def _check_missing(self, start: Offset, there: Collection[Key]) -> dict[Key, ReadSpan]:
        """Looks for keys that are missing; returns those of deleted topics, as `_deleted` does. An unreachable nsqd is
        not lost: the query goes on with the others. But if all addresses answer and none is the nsqd that was read
        before, its data is gone.
        """
        deleted: dict[Key, ReadSpan] = {}
        missing = [key for key in start.spans if key not in there and key.nsqd_id not in self._options.lost_nsqds]
        if not missing:
            return deleted
        nsqds, silent = self._cluster.nsqds(), self._cluster.silent
        for key in missing:
            if key.nsqd_id in nsqds:
                deleted |= self._deleted(key, start.spans[key], nsqds[key.nsqd_id])
            elif other := self._cluster.replaced_by(key.nsqd_id):
                self._replaced(key, {other.id: other})
            elif silent or self._options.lookupd:
                self._warn_once(f"nsqd {key.nsqd_id} is not there now; topic {key.topic} goes on without it")
            else:
                self._replaced(key, nsqds)
        return deleted

    def _deleted(self, key: Key, span: ReadSpan, nsqd: RangeNsqd) -> dict[Key, ReadSpan]:
        """Reports a deleted topic once, as what was lost with it does not change any more. By the span that is returned
        the checkpoint knows of it.
        """
        if (key, span) in self._said_deleted or not span.topic_id or nsqd.head(key.topic) is not None:
            return {}  # it was reported before, its incarnation is not known, or it is there after all
        behind = self._history.replaced(key, span, nsqd, "deleted")
        self._said_deleted.add((key, span))
        return {key: behind} if behind != span else {}

    def _replaced(self, key: Key, there: dict[str, RangeNsqd]) -> None:
        answers = ", ".join(f"{nsqd.address} is {nsqd_id}" for nsqd_id, nsqd in there.items())
        text = (
            f"nsqd {key.nsqd_id}, of which this query read topic {key.topic}, answers at no address ({answers}): "
            "its disk was replaced, or its address left out"
        )
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}. If what it had is gone for good, set lostNsqds={key.nsqd_id}")
        self._warn_once(f"{text}; going on without it (failOnDataLoss=false)")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    # -- partitions and lag ------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> list[Partition]:
        wanted = {key: span for key, span in ranges(start, end).items() if key.nsqd_id not in self._options.lost_nsqds}
        deadline = time.monotonic() + self._options.read_timeout_s
        while True:
            nsqds = self._cluster.wait_for({key.nsqd_id for key in wanted})
            try:
                return self._planner.partitions(wanted, nsqds)
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                self._cluster.mark_silent(error)

    def lag(self) -> dict[str, Any] | None:
        """Returns the query's progress: the end of each log, and how many messages the last offset is behind it."""
        try:
            heads = self._cluster.heads()
            behind = self._behind(heads)
        except NsqdError as error:
            # This is only a report: an error that matters is raised where the query reads.
            log.info("no lag to report: %s", error)
            return None
        return {str(key): {"next": head.next, "behind": behind.get(key, 0)} for key, head in sorted(heads.items())}

    def _behind(self, heads: dict[Key, Head]) -> dict[Key, int]:
        nsqds = self._cluster.nsqds()
        asked: dict[str, list[Asked]] = {}
        for key, head in heads.items():
            span = self._end.spans.get(key)
            if span is not None and key.nsqd_id in nsqds and head.next > span.next:
                asked.setdefault(key.nsqd_id, []).append((key, Range(span.next, head.next, span.topic_id), {}))
        return {
            key: answer.count if isinstance(answer, RangePlan) else 0
            for nsqd_id, of_nsqd in asked.items()
            for (key, _, _), answer in zip(of_nsqd, ask_plans(nsqds[nsqd_id], of_nsqd), strict=True)
        }


def _with_nsqds(
    end: Offset, start: Offset, heads: Heads, checked: Mapping[str, KnownNsqd], anew: Collection[Key]
) -> Offset:
    """Adds address and run of the nsqds whose spans changed, or with keys that begin `anew`, if only where they were,
    and of new nsqds. Others stay as they were: an offset that differs only in them would be new data to Spark.

    `checked` has the runs whose history was checked. One that began since is left to the next batch: if it were noted
    here, nobody would ever find that its data path is an older one.
    """
    moved = {key.nsqd_id for key, span in end.spans.items() if key in anew or start.spans.get(key) != span}
    return end.with_nsqds(
        {
            nsqd_id: known
            for nsqd_id, known in checked.items()
            if nsqd_id in moved or (nsqd_id in heads.nsqds and nsqd_id not in start.nsqds)
        }
    )


def _has_more(head: Head | None, span: ReadSpan | None) -> bool:
    return head is not None and span is not None and head.next > span.next
