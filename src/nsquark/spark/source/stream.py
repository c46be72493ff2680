"""A streaming query: which range each batch reads, and telling nsqd what is done.

Spark's order of calls: `latestOffset(start)` gives the end of the next batch, which Spark logs before it runs; then
`partitions(start, end)`. All below `start` is done when `latestOffset(start)` is called, and it is called once more
after the last batch of AvailableNow: so that is where the channel is committed. (`commit()` comes a batch late, and
`stop()` is not called when a query ends by an error.)
"""

import time
from collections.abc import Iterator
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
from nsquark.spark.nsqd_http import Nsqd
from nsquark.spark.options import COUNT_MAX, EARLIEST, LATEST, SourceOptions
from nsquark.spark.source.admission import Admission
from nsquark.spark.source.channel import ChannelHold
from nsquark.spark.source.cluster import Cluster, Head
from nsquark.spark.source.offsets import INITIAL, Key, Offset, Span, ranges
from nsquark.spark.source.plan import DataLost, Planner, RangePartition, ask_plan
from nsquark.spark.source.positions import at_time, resolve
from nsquark.spark.source.range_rows import RangeReader, check_schema

if TYPE_CHECKING:
    import pyarrow as pa

log = library_log("nsquark.spark")


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What Spark sees. It is pickled to the tasks, which only read: all that has connections is made on first use."""

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
        """A mark that our own limits hold: Spark's limits for Python cannot be combined."""
        return ReadMaxRows(self._options.messages_max or COUNT_MAX) if self._options.has_limits else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        is_limited = not isinstance(limit, ReadAllAvailable)
        return self._query.end_of_next_batch(Offset.parse(start), limited=is_limited).fields()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._query.lag()

    def prepareForTriggerAvailableNow(self) -> None:
        self._query.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangePartition]:
        return self._query.partitions(Offset.parse(start), Offset.parse(end))

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        assert isinstance(partition, RangePartition)
        return RangeReader(self._options, self._schema, partition).batches()

    def stop(self) -> None:
        if self._made is not None:
            self._made.stop()


class Query:
    """The driver's side of a query. With a channel, the first offset has only its identity and positions, and
    reads nothing: the channel can be taken only once the checkpoint knows who owns it.
    """

    def __init__(self, options: SourceOptions):
        self._options = options
        self._starting = options.starting or LATEST
        self._hold = ChannelHold(options) if options.channel else None
        self._cluster = Cluster(options, self._keep_alive)
        self._planner = Planner(options)
        self._admission = Admission(options, self._cluster, self._planner)
        self._begun = Offset.begin()
        self._frozen: dict[Key, Head] | None = None
        self._end = INITIAL
        self._warned: set[str] = set()

    def stop(self) -> None:
        self._cluster.stop()

    def _keep_alive(self) -> None:
        if self._hold is not None:
            self._hold.keep_alive(self._cluster.nsqds())

    # -- latestOffset ------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """AvailableNow: what comes after this moment is for the next run."""
        self._frozen = dict(self._cluster.heads(fresh=True))

    def end_of_next_batch(self, start: Offset, *, limited: bool) -> Offset:
        heads = self._frozen if self._frozen is not None else self._cluster.heads()
        self._check_missing(start, heads)
        base = start if start.query else self._begun
        spans = {**start.spans, **self._held(start), **self._entering(start, heads)}
        self._end = base.with_spans(spans)
        if self._hold and not start.query:
            return self._end
        wanted = {key: (span.next, heads[key].next) for key, span in spans.items() if _has_more(heads.get(key), span)}
        admitted = self._admission.admit(wanted, limited=limited, may_wait=self._frozen is None)
        if admitted is None:
            return start if start.query else self._end
        self._end = self._end.with_spans({key: Span(spans[key].start, high) for key, high in admitted.items()})
        return self._end

    def _held(self, start: Offset) -> dict[Key, Span]:
        """Commits the channel. What retention took before the channel was made is not this query's to lose: with
        `earliest` it begins where the channel does.
        """
        if not self._hold or not start.query:
            return {}
        positions = self._hold.commit(start, self._cluster.nsqds())
        if self._starting != EARLIEST:
            return {}
        unread = {
            key: position for key, position in positions.items() if start.spans[key].start == start.spans[key].next
        }
        return {key: Span(position, position) for key, position in unread.items() if position > start.spans[key].next}

    def _entering(self, start: Offset, heads: dict[Key, Head]) -> dict[Key, Span]:
        """Keys that are read from now on and, with a channel, held."""
        entering: dict[Key, Span] = {}
        nsqds = self._cluster.nsqds()
        for key, head in heads.items():
            nsqd = nsqds.get(key.nsqd_id)
            if nsqd is None or key in start.spans or key.nsqd_id in self._options.lost_nsqds:
                continue
            try:
                low = self._first(nsqd, key, head, start)
                if self._hold and start.query:
                    self._hold.hold(nsqd, key, start.query, low)
            except Unreachable as error:
                self._cluster.mark_silent(error)
            else:
                entering[key] = Span(low, low)
        return entering

    def _first(self, nsqd: Nsqd, key: Key, head: Head, start: Offset) -> int:
        if self._starting == LATEST and start.query:
            return at_time(nsqd, key, start.began_ms)
        return resolve(self._starting, nsqd, key, head, unnamed="earliest")

    # -- what is not there -------------------------------------------------------------------------------

    def _check_missing(self, start: Offset, heads: dict[Key, Head]) -> None:
        """Unreachable is not lost: the query goes on with the others. But where all addresses answer and none is the
        nsqd that was read before, its data is gone.
        """
        missing = [key for key in start.spans if key not in heads and key.nsqd_id not in self._options.lost_nsqds]
        if not missing:
            return
        there, silent = self._cluster.nsqds(), self._cluster.silent
        for key in missing:
            if key.nsqd_id in there:
                self._warn_once(f"topic {key.topic} is not there on nsqd {key.nsqd_id}: deleted, or not asked in time")
            elif silent or self._options.lookupd:
                self._warn_once(f"nsqd {key.nsqd_id} is not there now; topic {key.topic} goes on without it")
            else:
                self._replaced(key, there)

    def _replaced(self, key: Key, there: dict[str, Nsqd]) -> None:
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

    def partitions(self, start: Offset, end: Offset) -> list[RangePartition]:
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
        """For the query's progress: the end of each log, and how many messages the last offset is behind it."""
        found: dict[str, Any] = {}
        try:
            nsqds = self._cluster.nsqds()
            for key, head in self._cluster.heads().items():
                span = self._end.spans.get(key)
                behind = 0
                if span is not None and key.nsqd_id in nsqds and head.next > span.next:
                    behind = ask_plan(nsqds[key.nsqd_id], key, span.next, head.next).count
                found[str(key)] = {"next": head.next, "behind": behind}
        except NsqdError as error:
            # Only a report: what is wrong comes up where it matters.
            log.info("no lag to report: %s", error)
            return None
        return dict(sorted(found.items()))


def _has_more(head: Head | None, span: Span | None) -> bool:
    return head is not None and span is not None and head.next > span.next
