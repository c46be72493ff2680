"""This is `nsquark pipeline`: it runs one update of a Spark Declarative Pipeline, so that a second can follow."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nsquark.base.errors import UserError
from nsquark.base.printable import printable_lines
from nsquark.spark.jobs.home import WAREHOUSE, PipelineHome
from nsquark.spark.jobs.home_check import check_home
from nsquark.spark.jobs.progress import Progress, Terminal, reports_in
from nsquark.spark.jobs.server import ConnectServer
from nsquark.spark.nsq_arguments import settings_of

SPEC_NAMES = ("spark-pipeline.yml", "spark-pipeline.yaml")
OUTPUT_LINES_KEPT = 400
STOP_TIMEOUT_S = 30.0
LOG_POLL_S = 0.2
DEFAULT_DIRECTORY = "pipeline-data"

SHOWN_STATES = (" is RUNNING.", " has COMPLETED.", " has FAILED.", " is EXCLUDED.", " is SKIPPED.", ": Run is ")
"""Only these of the states that a flow goes through are shown."""

ERROR_MARKS = ("FAILED", "Error", "Exception", "Traceback", "error:")
"""The part of Spark's output that is about an error begins in a line with one of these."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("run", "dry-run"), help="run one update, or only check the definitions")
    parser.add_argument("--spec", type=Path, default=Path(), help="the pipeline's directory or spec file (default: .)")
    parser.add_argument(
        "--dir",
        type=Path,
        help=f"where tables, checkpoints and catalog are (default: ./{DEFAULT_DIRECTORY}; with --remote: the server's)",
    )
    parser.add_argument("--remote", metavar="sc://HOST:PORT", help="run on this Spark Connect server")
    parser.add_argument(
        "--master", help="where Spark runs without --remote (default: local[*], all cores of this machine)"
    )
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
    settings = settings_of(args.conf, "--conf")
    of_spark: dict[str, str] = {}
    terminal = Terminal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupted())
        if args.remote:
            url, log, storage = args.remote, args.server_log, None
            if args.dir is not None:
                home = PipelineHome(args.dir)
                stack.enter_context(_checked(args, home, has_all_tables=False))
                storage = home.checkpoints.as_uri()
        else:
            # Spark's own local mode takes only the last few settings of a command line, runs on one core, and listens
            # on one port for everyone on this machine. A server of our own does none of this.
            terminal.say("starting Spark")
            of_spark = {name: value for name, value in settings.items() if name.startswith("spark.")}
            server = stack.enter_context(_own_server(args, of_spark))
            url, log, storage = server.url, server.log, server.home.checkpoints.as_uri()
        spec = stack.enter_context(_effective_spec(spec_path, storage, settings, of_spark))
        return _Update(_command(args, spec), url, log, terminal, args.verbose).run()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Lets SIGTERM end a run as Ctrl-C does, so that no Spark is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _own_server(args: argparse.Namespace, settings: Mapping[str, str]) -> Iterator[ConnectServer]:
    home = PipelineHome(args.dir or Path(DEFAULT_DIRECTORY))
    with (
        home.locked(),
        _checked(args, home, has_all_tables=WAREHOUSE not in settings),
        ConnectServer(home.directory, master=args.master or "local[*]", settings=settings) as server,
    ):
        yield server


@contextlib.contextmanager
def _checked(args: argparse.Namespace, home: PipelineHome, *, has_all_tables: bool) -> Iterator[None]:
    """Refuses a directory whose parts do not fit together, before an update and, if the update made it so, after."""
    if args.action != "run":
        yield
        return
    anew = None if args.full_refresh_all else (args.full_refresh or "").split(",")
    check_home(home.warehouse, home.checkpoints, anew=anew, has_all_tables=has_all_tables)
    yield
    check_home(home.warehouse, home.checkpoints, has_all_tables=has_all_tables)


def _find_spec(place: Path) -> Path:
    if place.is_file():
        return place.resolve()
    for name in SPEC_NAMES:
        if (place / name).is_file():
            return (place / name).resolve()
    raise UserError(f"there is no {SPEC_NAMES[0]} in {place.resolve()}: name the pipeline's directory with --spec")


@contextlib.contextmanager
def _effective_spec(
    path: Path, storage: str | None, settings: Mapping[str, str], of_server: Collection[str]
) -> Iterator[Path]:
    """Writes the user's spec with our storage and their --conf, in a directory that otherwise looks like theirs.

    Spark takes neither from its command line, and looks for definitions beside the spec it is given. Settings that the
    server was started with are left out: many of Spark's cannot be changed later, and it would refuse them.
    """
    spec = _load(path)
    if storage is not None:
        spec["storage"] = storage
    configuration = {**(spec.get("configuration") or {}), **settings}
    spec["configuration"] = {name: value for name, value in configuration.items() if name not in of_server}
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


def _command(args: argparse.Namespace, spec: Path) -> list[str]:
    """Returns the command that `spark-pipelines` would run, without the Java that it starts only to start Python."""
    command = [sys.executable, "-m", "pyspark.pipelines.cli", args.action, "--spec", str(spec)]
    if args.action == "run":
        command += ["--refresh", args.refresh] if args.refresh else []
        command += ["--full-refresh", args.full_refresh] if args.full_refresh else []
        command += ["--full-refresh-all"] if args.full_refresh_all else []
    return command


class _Update:
    """Runs one process of Spark's pipeline client, and reads its output to the end."""

    def __init__(
        self, command: list[str], url: str, server_log: Path | None, terminal: Terminal, verbose: bool
    ) -> None:
        self._command = command
        self._url = url
        self._server_log = server_log
        self._terminal = terminal
        self._verbose = verbose
        self._last_lines: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        self._ended = threading.Event()

    def run(self) -> int:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "SPARK_REMOTE": self._url, "PYTHONUNBUFFERED": "1"},
        )
        follower = self._follow_server_log()
        try:
            self._read(process)
            code = process.wait()
        except KeyboardInterrupt:
            self._stop(process)
            raise
        finally:
            self._ended.set()
            if follower is not None:
                follower.join()
        if code != 0:
            print(printable_lines(self._what_went_wrong()), file=sys.stderr, flush=True)
        return 1 if code else 0

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._last_lines.append(line)
            if self._verbose:
                print(printable_lines(line), end="", flush=True)
            elif any(state in line for state in SHOWN_STATES):
                self._terminal.say(line.partition(": ")[2].rstrip().replace("spark_catalog.default.", ""))

    def _follow_server_log(self) -> threading.Thread | None:
        """Shows progress from what is added to the server's log from now on: the client does not tell the rates."""
        if self._server_log is None or not self._terminal.is_shown:
            return None
        try:
            start = self._server_log.stat().st_size
        except OSError as error:
            raise UserError(f"--server-log {self._server_log} cannot be read: {error.strerror}") from None
        thread = threading.Thread(target=self._show_progress, args=(self._lines_added(self._server_log, start),))
        thread.start()
        return thread

    def _show_progress(self, lines: Iterator[str]) -> None:
        for report in reports_in(lines):
            if report["numInputRows"]:
                self._terminal.say(Progress.from_report(report))

    def _lines_added(self, path: Path, start: int) -> Iterator[str]:
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
        """Interrupts the client too: Ctrl-C in a terminal reaches both, but a signal only the process it is sent to."""
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _what_went_wrong(self) -> str:
        """Returns Spark's output from the first sign of an error on, or all that is kept if there is no sign."""
        lines = list(self._last_lines)
        marked = [place for place, line in enumerate(lines) if any(mark in line for mark in ERROR_MARKS)]
        return "".join(lines[marked[0] if marked else 0 :]).rstrip()
