"""Tells how far streaming queries are behind: in Python's log and, if prometheus_client is installed, as metrics.

    spark.streams.addListener(NsqListener())

Everything comes from the query's own progress, so no nsqd is asked: `behind` is from the source (`stream.Query.lag`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from nsquark.base.logs import library_log
from nsquark.spark.source.offsets import Key

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = library_log("nsquark.spark")

LABELS = ("query", "topic", "nsqd")


@dataclass(frozen=True)
class Standing:
    """Says how far a query has come in one topic on one nsqd."""

    key: Key
    next: int
    behind: int


class NsqListener(StreamingQueryListener):
    """Logs how far queries are behind and, if prometheus_client is installed, sets its metrics: in `registry`, or else
    in its default registry.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None):
        self._metrics = _metrics(registry)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        log.info("query %s started", event.name or event.id)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        log.info("query %s ended%s", event.id, f": {event.exception}" if event.exception else "")

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        name = progress.name or str(progress.id)
        for source in progress.sources:
            found = list(standings(source.endOffset, source.latestOffset))
            if not found:
                continue
            behind = sum(standing.behind for standing in found)
            log.info(
                "query %s batch %d: %d messages, %.0f/s, %d behind, offsets %s",
                name,
                progress.batchId,
                source.numInputRows,
                source.inputRowsPerSecond,
                behind,
                {str(standing.key): standing.next for standing in found},
            )
            self._set_metrics(name, source.numInputRows, source.inputRowsPerSecond, found)

    def _set_metrics(self, query: str, rows: int, rate: float, found: list[Standing]) -> None:
        if self._metrics is None:
            return
        self._metrics["rows"].labels(query).inc(rows)
        # The first batch of a query has no rate: Spark says NaN.
        self._metrics["rate"].labels(query).set(rate if rate == rate else 0)
        for standing in found:
            labels = (query, standing.key.topic, standing.key.nsqd_id)
            self._metrics["behind"].labels(*labels).set(standing.behind)
            self._metrics["next"].labels(*labels).set(standing.next)


def standings(end_offset: str | None, latest_offset: str | None) -> Iterator[Standing]:
    """Yields how far a query has come, from the progress of a source; nothing if the source is not ours."""
    end, latest = _offsets(end_offset), _offsets(latest_offset)
    for text, span in end.items():
        key = Key.parse(text)
        yield Standing(key, span["next"], latest.get(text, {}).get("behind", 0))


def _offsets(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return {key: span for key, span in fields.items() if "@" in key and isinstance(span, dict) and "next" in span}


def _metrics(registry: "CollectorRegistry | None") -> "dict[str, Any] | None":
    try:
        from prometheus_client import REGISTRY, Counter, Gauge
    except ImportError:
        return None
    where = registry if registry is not None else REGISTRY
    return {
        "behind": Gauge("nsquark_spark_behind_messages", "Messages not yet read by the query", LABELS, registry=where),
        "next": Gauge("nsquark_spark_next_seq", "First message not yet read by the query", LABELS, registry=where),
        "rate": Gauge("nsquark_spark_input_rows_per_second", "As Spark reports it", ("query",), registry=where),
        "rows": Counter("nsquark_spark_input_rows", "Messages read by the query", ("query",), registry=where),
    }
