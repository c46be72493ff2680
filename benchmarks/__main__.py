"""Measures our nsqd and, given one, a peer, and prints both side by side: `python -m benchmarks`."""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import nsquark.kernel.frames
from benchmarks import clients, lookupd, report, spark, upgrades
from benchmarks.broker import Broker
from benchmarks.measure import Measurement
from benchmarks.report import Result
from benchmarks.scenarios import ALL, TOPIC, Scenario
from benchmarks.wire import LoadError

SECONDS_DEFAULT = 3.0
SECONDS_MAX = 60.0
DISK_SHARE = 3
"""A peer on disk is several times slower: with a smaller backlog it does not take minutes."""
LOOKUPD = "lookupd"
CLIENTS = "clients"
SPARK = "spark"
"""These are not scenarios of nsqd alone."""
NAMES = (*(scenario.name for scenario in ALL), LOOKUPD, CLIENTS, SPARK)
CLIENTS_BACKLOG_MAX = 1_200_000


def main() -> int:
    options = _options()
    chosen = _chosen(options.only)
    if nsquark.kernel.frames.__file__.endswith(".py"):
        print(
            "warning: the kernel is not compiled, so the load generator is the limit; run `make build`",
            file=sys.stderr,
        )
    results: list[Result] = []
    discovery: dict[str, lookupd.LookupdMeasurement] = {}
    libraries: dict[str, list[clients.Rate]] = {}
    sparks: spark.SparkMeasurement | None = None
    name = ""
    try:
        for scenario in chosen:
            name = scenario.name
            if scenario.upgrade.tls and not upgrades.can_make_certificates():
                print(f"{name:14} skipped: the openssl program, to make a certificate, is missing", file=sys.stderr)
                continue
            results.append(_measure(scenario, options))
            _progress(results[-1])
        if not options.only or LOOKUPD in options.only.split(","):
            name = LOOKUPD
            discovery = _measure_lookupd(options)
        if not options.only or CLIENTS in options.only.split(","):
            name = CLIENTS
            libraries = _measure_clients(options)
        if not options.only or SPARK in options.only.split(","):
            name = SPARK
            sparks = _measure_spark(options)
    except LoadError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{report.machine()}\n")
    tables = report.tables(results) + ([lookupd.table(discovery)] if discovery else [])
    tables += [clients.table(f"Client libraries on {who}", rates) for who, rates in libraries.items()]
    tables += spark.tables(sparks) if sparks else []
    for table in tables:
        print(table.markdown() if options.markdown else table.plain(), end="\n\n")
    if options.json:
        figures = report.as_json(results)
        figures[LOOKUPD] = {who: lookupd.as_json(measured) for who, measured in discovery.items()}
        figures[SPARK] = spark.as_json(sparks) if sparks else None
        figures[CLIENTS] = {who: clients.as_json(rates) for who, rates in libraries.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    names = ", ".join(NAMES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=f"scenarios: {names}")
    parser.add_argument("--nsqd", type=_program, help="our nsqd (default: the one beside this Python)")
    parser.add_argument("--peer", type=_program, help="another nsqd, measured alternately (default: $PEER_NSQD)")
    parser.add_argument("--nsqlookupd", type=_program, help="our nsqlookupd (default: the one beside this Python)")
    parser.add_argument("--peer-nsqlookupd", type=_program, help="another nsqlookupd (default: $PEER_NSQLOOKUPD)")
    parser.add_argument("--only", metavar="NAME,NAME", default="", help="these scenarios only")
    parser.add_argument("--seconds", type=_seconds, default=SECONDS_DEFAULT, help="per scenario (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as well")
    options = parser.parse_args()
    try:
        options.nsqd = options.nsqd or _program(str(Path(sys.executable).parent / "nsqd"))
        options.nsqlookupd = options.nsqlookupd or _program(str(Path(sys.executable).parent / "nsqlookupd"))
        if not options.peer and os.environ.get("PEER_NSQD"):
            options.peer = _program(os.environ["PEER_NSQD"])
        if not options.peer_nsqlookupd and os.environ.get("PEER_NSQLOOKUPD"):
            options.peer_nsqlookupd = _program(os.environ["PEER_NSQLOOKUPD"])
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    unknown = set(filter(None, options.only.split(","))) - set(NAMES)
    if unknown:
        parser.error(f"no scenario is named {', '.join(sorted(unknown))}; there are: {names}")
    return options


def _program(text: str) -> Path:
    path = Path(text)
    if not os.access(path, os.X_OK) or not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a program that can be run")
    return path


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.5 to {SECONDS_MAX:.0f}")
    return seconds


def _chosen(only: str) -> list[Scenario]:
    names = set(filter(None, only.split(",")))
    return [scenario for scenario in ALL if not names or scenario.name in names]


def _measure(scenario: Scenario, options: argparse.Namespace) -> Result:
    """Measures ours and the peer right after one another, so that both see the machine in the same mood."""
    seconds = scenario.seconds or options.seconds
    ours = _run(scenario, options.nsqd, seconds, ())
    if not options.peer:
        return Result(scenario, ours)
    # The peer keeps its whole backlog in memory: that is its fastest way.
    in_memory = f"--mem-queue-size={int(scenario.messages_per_second * seconds) + 1000}"
    peer = _run(scenario, options.peer, seconds, (in_memory,))
    peer_default = peer_disk = None
    if scenario.disk_target:
        short_s = max(seconds / DISK_SHARE, 1.0)
        peer_default = _run(scenario, options.peer, short_s, ())
        peer_disk = _run(scenario, options.peer, short_s, ("--mem-queue-size=0",))
    return Result(scenario, ours, peer, peer_default, peer_disk)


def _run(scenario: Scenario, program: Path, seconds: float, flags: tuple[str, ...]) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="nsqd-bench-") as directory:
        if scenario.upgrade.tls:
            flags += upgrades.make_certificate(Path(directory))
        with Broker(program, flags) as broker:
            measurement = scenario.run(broker, seconds)
            # NSQ's nsqd would write its whole memory queue to disk at SIGTERM, for many seconds.
            broker.post(f"/topic/delete?topic={TOPIC}")
            return measurement


def _measure_lookupd(options: argparse.Namespace) -> dict[str, lookupd.LookupdMeasurement]:
    measured = {"ours": lookupd.run(options.nsqlookupd)}
    if options.peer_nsqlookupd:
        measured["peer"] = lookupd.run(options.peer_nsqlookupd)
    medians = [f"{who} {lookupd.quantile(of.lookup_ms, 0.5):.2f} ms" for who, of in measured.items()]
    print(f"{LOOKUPD:14} {', '.join(medians)} for a /lookup", file=sys.stderr, flush=True)
    return measured


def _measure_clients(options: argparse.Namespace) -> dict[str, list[clients.Rate]]:
    measured = {"our nsqd": clients.run(options.nsqd)}
    if options.peer:
        measured["the peer"] = clients.run(options.peer, (f"--mem-queue-size={CLIENTS_BACKLOG_MAX}",))
    return measured


def _measure_spark(options: argparse.Namespace) -> spark.SparkMeasurement | None:
    if importlib.util.find_spec("pyspark") is None:
        print(f"{SPARK:14} skipped: pip install 'nsquark[spark]'", file=sys.stderr)
        return None
    measured = spark.run(options.nsqd)
    print(f"{SPARK:14} {measured.rows[0].rate:,.0f} rows/s read", file=sys.stderr, flush=True)
    return measured


def _progress(result: Result) -> None:
    rates = [
        f"{who} {measured.rate:,.0f} msg/s (load {measured.load_busy:.0%})"
        for who, measured in (
            ("ours", result.ours),
            ("peer", result.peer),
            ("with its defaults", result.peer_default),
            ("on disk", result.peer_disk),
        )
        if measured
    ]
    print(f"{result.scenario.name:14} {', '.join(rates)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
