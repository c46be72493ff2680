"""Shows how fast a streaming query goes, from the progress that Spark reports: on a terminal, but not in a pipe."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from nsquark.base.printable import printable

MARKER = "Streaming query made progress: {"


@dataclass(frozen=True)
class Progress:
    """Describes one micro-batch of one query."""

    query: str
    batch: int
    rows: int
    rows_per_s: float
    duration_ms: int
    lag: int | None
    """The source knew of this many messages that no batch had read yet; it is None if the source does not tell."""

    @classmethod
    def from_report(cls, report: dict[str, Any]) -> "Progress":
        """Reads Spark's JSON, as in the server's log and in `StreamingQuery.lastProgress`."""
        lags = [_lag(source) for source in report.get("sources", ())]
        known = [lag for lag in lags if lag is not None]
        return cls(
            query=(report.get("name") or report["id"]).rpartition(".")[2],
            batch=report["batchId"],
            rows=report["numInputRows"],
            rows_per_s=report.get("processedRowsPerSecond") or 0.0,
            duration_ms=report["batchDuration"],
            lag=sum(known) if known else None,
        )

    def __str__(self) -> str:
        lag = "" if self.lag is None else f"  lag {self.lag:,}"
        return (
            f"{self.query:12}  batch {self.batch:<4} {self.rows:>11,} rows {self.rows_per_s:>11,.0f} rows/s "
            f"{self.duration_ms / 1000:>7.1f} s{lag}"
        )


def _lag(source: dict[str, Any]) -> int | None:
    """Returns how many messages a query is behind, as our source reports it; None for other sources."""
    latest = source.get("latestOffset")
    if isinstance(latest, str):
        latest = json.loads(latest) if latest.startswith("{") else None
    if not isinstance(latest, dict):
        return None
    behind = [log["behind"] for log in latest.values() if isinstance(log, dict) and "behind" in log]
    return sum(behind) if behind else None


def reports_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the progress reports in a log of Spark's, whose JSON goes over many lines; other lines are left out."""
    collected: list[str] = []
    for line in lines:
        if MARKER in line:
            collected = ["{"]
        elif collected:
            collected.append(line)
            # Nested braces are indented, so the one at the start of a line ends the report.
            if line.startswith("}"):
                yield json.loads("".join(collected))
                collected = []


class Terminal:
    """Tells a person what happens while it happens. In a pipe it says nothing."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_shown = self._stream.isatty()

    def say(self, line: object) -> None:
        if self.is_shown:
            print(printable(str(line)), file=self._stream, flush=True)
