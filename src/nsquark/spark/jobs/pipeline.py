"""`nsquark pipeline`: one update of a Spark Declarative Pipeline, with the settings that make a second one possible."""

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nsquark.cli.errors import UserError
from nsquark.spark.java import spark_environment
from nsquark.spark.jobs.home import PipelineHome, spark_program
from nsquark.spark.jobs.progress import Progress, Terminal, reports_in

SPEC_NAMES = ("spark-pipeline.yml", "spark-pipeline.yaml")
OUTPUT_LINES_KEPT = 400
STOP_TIMEOUT_S = 30.0
LOG_POLL_S = 0.2

#: With these the part of Spark's output begins that is about an error.
ERROR_MARKS = ("FAILED", "Error", "Exception", "Traceback", "error:")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("run", "dry-run"), help="run one update, or only check the definitions")
    parser.add_argument("--spec", type=Path, default=Path(), help="the pipeline's directory or spec file (default: .)")
    parser.add_argument(
        "--dir",
        type=Path,
        help="where tables, checkpoints and catalog are kept (default: ./pipeline-data; with --remote: the server's)",
    )
    parser.add_argument("--remote", metavar="sc://HOST:PORT", help="run on this Spark Connect server")
    parser.add_argument("--master", help="Spark master for a run without --remote (default: local[*])")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the pipeline or of Spark (repeat)",
    )
    parser.add_argument("--refresh", metavar="TABLES", help="update only these tables (separated by commas)")
    parser.add_argument("--full-refresh", metavar="TABLES", help="reset these tables and compute them anew")
    parser.add_argument("--full-refresh-all", action="store_true", help="reset all tables and compute them anew")
    parser.add_argument("--server-log", type=Path, help="the log of the --remote server, to show progress from")
    parser.add_argument("--verbose", action="store_true", help="show all that Spark says")


def run(args: argparse.Namespace) -> int:
    spec_path = _find_spec(args.spec)
    settings = _settings(args.conf)
    home = _home(args)
    with contextlib.ExitStack() as stack:
        if home is not None:
            home.prepare()
            stack.enter_context(home.locked())
        storage = None if home is None else home.checkpoints.as_uri()
        spec = stack.enter_context(_effective_spec(spec_path, storage, settings))
        return _Update(_command(args, spec, home, settings), args).run()


def _find_spec(place: Path) -> Path:
    if place.is_file():
        return place.resolve()
    for name in SPEC_NAMES:
        if (place / name).is_file():
            return (place / name).resolve()
    raise UserError(f"there is no {SPEC_NAMES[0]} in {place.resolve()}: name the pipeline's directory with --spec")


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"--conf {pair!r} is not NAME=VALUE")
        settings[name] = value
    return settings


def _home(args: argparse.Namespace) -> PipelineHome | None:
    if args.dir is None and args.remote:
        return None
    return PipelineHome(args.dir or Path("pipeline-data"))


@contextlib.contextmanager
def _effective_spec(path: Path, storage: str | None, settings: Mapping[str, str]) -> Iterator[Path]:
    """The user's spec with our storage and their --conf, in a directory that otherwise looks like theirs.

    Spark takes neither from its command line, and looks for definitions beside the spec it is given.
    """
    spec = _load(path)
    if storage is not None:
        spec["storage"] = storage
    spec["configuration"] = {**(spec.get("configuration") or {}), **settings}
    with tempfile.TemporaryDirectory(prefix="nsquark-pipeline-") as name:
        directory = Path(name)
        for entry in path.parent.iterdir():
            if entry.name not in SPEC_NAMES:
                (directory / entry.name).symlink_to(entry)
        effective = directory / SPEC_NAMES[0]
        effective.write_bytes(msgspec.yaml.encode(spec))
        yield effective


def _load(path: Path) -> dict[str, Any]:
    try:
        spec = msgspec.yaml.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if not isinstance(spec, dict):
        raise UserError(f"{path} is not a pipeline spec: it needs at least `name` and `libraries`")
    return spec


def _command(args: argparse.Namespace, spec: Path, home: PipelineHome | None, settings: Mapping[str, str]) -> list[str]:
    command = [spark_program("spark-pipelines")]
    if args.remote:
        command += ["--remote", args.remote]
    else:
        assert home is not None
        command += ["--master", args.master] if args.master else []
        # What the catalog and the JVM need is refused in a spec, and settings of Spark may be of that kind.
        of_spark = {name: value for name, value in settings.items() if name.startswith("spark.")}
        for name, value in {**home.settings(), **of_spark}.items():
            command += ["--conf", f"{name}={value}"]
    command += [args.action, "--spec", str(spec)]
    if args.action == "run":
        command += ["--refresh", args.refresh] if args.refresh else []
        command += ["--full-refresh", args.full_refresh] if args.full_refresh else []
        command += ["--full-refresh-all"] if args.full_refresh_all else []
    return command


class _Update:
    """One process of `spark-pipelines`, its output read to the end."""

    def __init__(self, command: list[str], args: argparse.Namespace) -> None:
        self._command = command
        self._verbose: bool = args.verbose
        self._server_log: Path | None = args.server_log
        self._terminal = Terminal()
        self._kept: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        self._ended = threading.Event()

    def run(self) -> int:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **spark_environment()},
        )
        follower = self._follow_server_log()
        try:
            self._show_progress(self._output_of(process))
            code = process.wait()
        except KeyboardInterrupt:
            self._stop(process)
            raise
        finally:
            self._ended.set()
            if follower is not None:
                follower.join()
        if code != 0:
            print(self._what_went_wrong(), flush=True)
        return 1 if code else 0

    def _output_of(self, process: "subprocess.Popen[str]") -> Iterator[str]:
        assert process.stdout is not None
        for line in process.stdout:
            self._kept.append(line)
            if self._verbose:
                print(line, end="", flush=True)
            elif ": Flow " in line or ": Run is " in line:
                self._terminal.say(line.partition(": ")[2].rstrip().replace("spark_catalog.default.", ""))
            yield line

    def _show_progress(self, lines: Iterator[str]) -> None:
        for report in reports_in(lines):
            if report["numInputRows"]:
                self._terminal.say(Progress.from_report(report))

    def _follow_server_log(self) -> threading.Thread | None:
        """A server elsewhere writes progress into its own log; from here on what is added to it is ours to show."""
        if self._server_log is None or not self._terminal.is_shown:
            return None
        try:
            start = self._server_log.stat().st_size
        except OSError as error:
            raise UserError(f"--server-log {self._server_log} cannot be read: {error.strerror}") from None
        thread = threading.Thread(
            target=lambda: self._show_progress(self._lines_added(self._server_log, start)), daemon=True
        )
        thread.start()
        return thread

    def _lines_added(self, path: Path | None, start: int) -> Iterator[str]:
        assert path is not None
        rest = ""
        with path.open(encoding="utf-8", errors="replace") as log:
            log.seek(start)
            while True:
                was_ended = self._ended.is_set()
                text = log.read()
                *lines, rest = (rest + text).split("\n")
                yield from lines
                if not text:
                    if was_ended:
                        return
                    time.sleep(LOG_POLL_S)

    def _stop(self, process: "subprocess.Popen[str]") -> None:
        """Ctrl-C reaches a whole terminal group; sent again here for who sends it to this process alone."""
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _what_went_wrong(self) -> str:
        """Spark's output from the first sign of an error on; all of what is kept if there is no sign."""
        lines = list(self._kept)
        marked = [place for place, line in enumerate(lines) if any(mark in line for mark in ERROR_MARKS)]
        return "".join(lines[marked[0] if marked else 0 :]).rstrip()
