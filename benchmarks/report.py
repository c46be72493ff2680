"""Writes measurements as tables of ours beside the peer's, in plain text or Markdown."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Measurement
from benchmarks.scenarios import LATENCY, MEMORY, THROUGHPUT, UPGRADED, Scenario

CPU_RATIO_TARGET = 1 / 3
MEMORY_TARGET_MB = 150
LATENCY_P50_TARGET_MS = 1.0
LATENCY_P99_TARGET_MS = 10.0

NONE = "-"
_TARGET_COLUMNS = (4, 8)
"""These columns of a row of throughput have targets."""


@dataclass(frozen=True)
class Result:
    """Holds one scenario: ours and, where there is a peer, its default and its disk-only form."""

    scenario: Scenario
    ours: Measurement
    peer: Measurement | None = None
    peer_default: Measurement | None = None
    """Has a peer's figures with its default flags: NSQ keeps 10,000 messages in memory and writes the rest to disk."""
    peer_disk: Measurement | None = None


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]

    def plain(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in [self.header, *self.rows]]
        return "\n".join([self.title, "", lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        return "\n".join(
            [
                f"**{self.title}**",
                "",
                *("| " + " | ".join(row) + " |" for row in [self.header, rule, *self.rows]),
            ]
        )


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    first, *numbers = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return [first, *numbers]


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}"


def tables(results: list[Result]) -> list[Table]:
    made = [_throughput(results), _upgraded(results), _memory(results), _latency(results)]
    return [table for table in made if table.rows]


def _of(results: list[Result], scenarios: tuple[Scenario, ...]) -> list[Result]:
    return [result for result in results if result.scenario in scenarios]


def _throughput(results: list[Result]) -> Table:
    rows = []
    for result in _of(results, THROUGHPUT):
        scenario = result.scenario
        rows.append(_throughput_row(scenario.title, result.ours, result.peer, scenario.target, CPU_RATIO_TARGET))
        if result.peer_default:
            title = "... beside the peer with its default flags"
            rows.append(_throughput_row(title, result.ours, result.peer_default, None, None))
        if result.peer_disk:
            title = "... beside the peer with mem-queue-size=0"
            rows.append(_throughput_row(title, result.ours, result.peer_disk, scenario.disk_target, None))
    header = [
        "scenario",
        "msg/s",
        "peer",
        "ratio",
        "target",
        "CPU us/msg",
        "peer",
        "ratio",
        "target",
        "peak MB",
        "peer",
    ]
    return Table("Throughput, broker CPU per message, peak memory", header, rows)


def _upgraded(results: list[Result]) -> Table:
    """Shows rows without targets: how costly the algorithms are is not ours to change."""
    rows = []
    for result in _of(results, UPGRADED):
        row = _throughput_row(result.scenario.title, result.ours, result.peer, None, None)
        rows.append([cell for column, cell in enumerate(row) if column not in _TARGET_COLUMNS])
    header = ["scenario", "msg/s", "peer", "ratio", "CPU us/msg", "peer", "ratio", "peak MB", "peer"]
    return Table("TLS and compression, events of 200 B, MPUB by 200, RDY 2500", header, rows)


def _throughput_row(
    title: str, ours: Measurement, peer: Measurement | None, target: float | None, cpu_target: float | None
) -> list[str]:
    rates = _beside(ours, peer, lambda measured: measured.rate)
    costs = _beside(ours, peer, lambda measured: measured.cpu_us_per_message)
    return [
        title,
        f"{ours.rate:,.0f}",
        f"{peer.rate:,.0f}" if peer else NONE,
        _ratio(rates),
        _judged(rates, target, at_least=True),
        f"{ours.cpu_us_per_message:.2f}",
        f"{peer.cpu_us_per_message:.2f}" if peer else NONE,
        _ratio(costs),
        _judged(costs, cpu_target, at_least=False),
        _megabytes(ours.memory_peak_bytes),
        _megabytes(peer.memory_peak_bytes) if peer else NONE,
    ]


def _beside(ours: Measurement, peer: Measurement | None, value: Callable[[Measurement], float]) -> float | None:
    return value(ours) / value(peer) if peer and value(peer) else None


def _ratio(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def _judged(value: float | None, target: float | None, *, at_least: bool) -> str:
    if target is None:
        return NONE
    text = f"{'>=' if at_least else '<='} {round(target, 2):g}"
    if value is None:
        return text
    met = value >= target if at_least else value <= target
    return f"{text} {'met' if met else 'MISSED'}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _memory(results: list[Result]) -> Table:
    rows = [
        [
            f"{who}, {measured.messages:,} messages",
            _megabytes(measured.memory_end_bytes),
            _megabytes(measured.memory_peak_bytes),
            _judged(measured.memory_peak_bytes / 1e6, MEMORY_TARGET_MB, at_least=False) if who == "ours" else NONE,
        ]
        for result in _of(results, (MEMORY,))
        for who, measured in (("ours", result.ours), ("peer", result.peer))
        if measured
    ]
    return Table(
        "Memory after 10 s of full-rate publishing without a consumer, MB",
        ["", "at end", "peak", "target"],
        rows,
    )


def _latency(results: list[Result]) -> Table:
    rows = []
    for result in _of(results, LATENCY):
        for quantile, target in ((0.5, LATENCY_P50_TARGET_MS), (0.99, LATENCY_P99_TARGET_MS)):
            ours = result.ours.latency_ms(quantile)
            peer = f"{result.peer.latency_ms(quantile):.2f}" if result.peer else NONE
            name = f"{result.scenario.title}, p{quantile * 100:.0f}"
            rows.append([name, f"{ours:.2f}", peer, _judged(ours, target, at_least=False)])
    return Table("Publish to delivery, default client settings, ms", ["", "ours", "peer", "target"], rows)


def as_json(results: list[Result]) -> dict[str, object]:
    return {
        "machine": machine(),
        "results": [
            {
                "name": result.scenario.name,
                "title": result.scenario.title,
                "target_ratio": result.scenario.target,
                "ours": _plain_measurement(result.ours),
                "peer": _plain_measurement(result.peer),
                "peer_default_flags": _plain_measurement(result.peer_default),
                "peer_mem_queue_size_0": _plain_measurement(result.peer_disk),
            }
            for result in results
        ],
    }


def _plain_measurement(measured: Measurement | None) -> dict[str, float] | None:
    if measured is None:
        return None
    plain: dict[str, float] = {
        "messages": measured.messages,
        "seconds": measured.seconds,
        "messages_per_second": measured.rate,
        "cpu_us_per_message": measured.cpu_us_per_message,
        "memory_end_bytes": measured.memory_end_bytes,
        "memory_peak_bytes": measured.memory_peak_bytes,
        "load_generator_busy": measured.load_busy,
    }
    if measured.latencies_ns:
        plain |= {"latency_p50_ms": measured.latency_ms(0.5), "latency_p99_ms": measured.latency_ms(0.99)}
    return plain
