"""This is `nsquark up`, which runs nsqlookupd, nsqds and nsqadmin together, for trying out and tests, not production.

The table KINDS says what runs. All of a kind start together, after the kinds above it are listening; they stop in
the opposite order, so that an nsqd can still tell nsqlookupd that it goes.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nsquark.base.addresses import PORT_MAX
from nsquark.base.errors import UserError
from nsquark.base.event_loop import SAME_STOP_S
from nsquark.base.logs import STDERR_FD, Level, LineWriter
from nsquark.base.printable import printable
from nsquark.tool.processes import Child

DEFAULT_DIR: Final = "nsquark-data"
DEFAULT_BASE_PORT: Final = 4150
LOOKUPD_PORT_OFFSET: Final = 10
ADMIN_PORT_OFFSET: Final = 21
"""The offsets are NSQ's own: nsqd has 4150 and 4151, nsqlookupd 4160 and 4161, nsqadmin 4171."""
NSQD_PORT_STEP: Final = 100
"""The next nsqd has 4250."""
NAME_WIDTH: Final = 10
FLUSH_SECONDS_MAX: Final = 1.0

_LEVEL: Final = re.compile(r"\d (DEBUG|INFO|WARNING|ERROR|FATAL): ")
_COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass(frozen=True)
class ProgramKind:
    """Describes a program of which `count` processes run; `ports` and `flags` get the number of a process, from 1."""

    program: str
    entry: str
    count: Callable[[argparse.Namespace], int]
    ports: Callable[[argparse.Namespace, int], dict[str, int]]
    flags: Callable[["Fleet", int], list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nsqd", type=int, default=1, metavar="N", help="how many nsqds (default 1)")
    parser.add_argument(
        "--dir", type=Path, default=Path(DEFAULT_DIR), metavar="D", help=f"data of the nsqds (default ./{DEFAULT_DIR})"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="listen there (default 127.0.0.1; 0.0.0.0 opens it to the network)",
    )
    parser.add_argument(
        "--base-port",
        type=int,
        default=DEFAULT_BASE_PORT,
        metavar="P",
        help=f"the first nsqd has P and P+1, each further one {NSQD_PORT_STEP} more (default {DEFAULT_BASE_PORT}; "
        "0: any free ports, for the others too)",
    )
    parser.add_argument("--lookupd-tcp-port", type=int, metavar="P", help="default: base port + 10; 0: any free port")
    parser.add_argument("--lookupd-http-port", type=int, metavar="P", help="default: base port + 11; 0: any free port")
    parser.add_argument("--nsqadmin-port", type=int, metavar="P", help="default: base port + 21; 0: any free port")
    parser.add_argument("--no-nsqadmin", action="store_true", help="do not start nsqadmin")
    parser.add_argument(
        "--nsqd-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for every nsqd, as in --nsqd-flag=--sync-every=1",
    )
    parser.add_argument("--ports-file", type=Path, metavar="F", help="write addresses and process ids there, as JSON")
    parser.add_argument(
        "--log-level", type=Level.parse, default=Level.INFO, metavar="L", help="debug, info (default), warn, error"
    )


def run(args: argparse.Namespace) -> int:
    _validate(args)
    return asyncio.run(_serve(args))


def _validate(args: argparse.Namespace) -> None:
    if args.nsqd < 1:
        raise UserError("--nsqd must be at least 1")
    for ports in (kind.ports(args, number) for kind in KINDS for number in range(1, kind.count(args) + 1)):
        for port in ports.values():
            if not 0 <= port <= PORT_MAX:
                raise UserError(f"{port} is not a port: choose a lower --base-port, or 0 for any free ports")
    if args.ports_file is not None:
        # A file that a crash left behind names processes that are gone.
        with contextlib.suppress(OSError):
            args.ports_file.unlink()
    try:
        args.dir = args.dir.resolve()
        args.dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot use {args.dir} for data ({error.strerror}): choose another --dir") from None


async def _serve(args: argparse.Namespace) -> int:
    fleet = Fleet(args, Console(args.log_level))
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[bool]] = []
    stopping_since_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopping_since_s
        if not stops:
            fleet.say("up", f"{number.name}: stopping all")
            stops.append(asyncio.create_task(fleet.stop()))
            stopping_since_s = loop.time()
        elif loop.time() - stopping_since_s >= SAME_STOP_S:
            fleet.say("up", "told twice: killing what still runs")
            fleet.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await fleet.start()
        await fleet.keep()
    finally:
        stopped = await (stops[0] if stops else fleet.stop())
        fleet.console.flush()
    return 0 if stopped else 1


class Fleet:
    """Keeps all processes, in the order of their start."""

    def __init__(self, args: argparse.Namespace, console: "Console") -> None:
        self.args = args
        self.console = console
        self.say = console.say
        self.children: dict[str, list[Child]] = {kind.program: [] for kind in KINDS}
        self._stopping = False
        self._ready = False

    def addresses(self, program: str, kind: str) -> list[str]:
        """Returns the addresses at which this machine reaches the processes of a program."""
        return [f"{_reachable(self.args.host)}:{child.ports[kind]}" for child in self.children[program]]

    async def start(self) -> None:
        for kind in KINDS:
            if self._stopping:
                return
            started = [self._child(kind, number) for number in range(1, kind.count(self.args) + 1)]
            self.children[kind.program] = started
            results = await asyncio.gather(*(child.start() for child in started), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        if not self._stopping:
            self._ready = True
            self._write_ports_file()
            self._print_addresses()

    async def keep(self) -> None:
        await asyncio.gather(*(child.keep() for children in self.children.values() for child in children))

    async def stop(self) -> bool:
        """Stops all processes, and returns whether they ended without being killed."""
        self._stopping = True
        stopped = True
        for children in reversed(self.children.values()):
            stopped &= all(await asyncio.gather(*(child.stop() for child in children)))
        if self.args.ports_file is not None and self._ready:
            self.args.ports_file.unlink(missing_ok=True)
        return stopped

    def kill(self) -> None:
        for children in self.children.values():
            for child in children:
                child.kill()

    def _child(self, kind: ProgramKind, number: int) -> Child:
        name = f"{kind.program}-{number}" if kind.count is _nsqd_count else kind.program
        # Ports are read from lines of level INFO; Console leaves out the lines that the user does not want to see.
        flags = [*kind.flags(self, number), f"--log-level={min(self.args.log_level, Level.INFO).word}"]
        child = Child(name, kind.entry, _bracketed(self.args.host), kind.ports(self.args, number), flags, self.say)
        child.on_listening = self._restarted
        return child

    def _print_addresses(self) -> None:
        for program, children in self.children.items():
            for place, child in enumerate(children):
                ports = "  ".join(f"{kind} {self.addresses(program, kind)[place]}" for kind in child.ports)
                print(f"{child.name:{NAME_WIDTH}}  {ports}")
        for address in self.addresses("nsqadmin", "http"):
            print(f"see it all at http://{address}/")
        if not self.args.no_nsqadmin and not _has_nsqadmin():
            print("nsqadmin is not installed: pip install 'nsquark[admin]'")
        print(f"data in {self.args.dir}; Ctrl-C stops all", flush=True)

    def _restarted(self) -> None:
        """Writes the ports file again after process ids changed. If that fails the daemons go on, since they are worth
        more than a file about them.
        """
        if self._ready:
            try:
                self._write_ports_file()
            except UserError as error:
                self.say("up", str(error))

    def _write_ports_file(self) -> None:
        """Writes the file as a whole or not at all, so that a program that waits for it can read it."""
        if self.args.ports_file is None:
            return
        content: dict[str, Any] = {"pid": os.getpid(), "dir": str(self.args.dir)}
        for program, children in self.children.items():
            content[program] = [
                {"name": child.name, "pid": child.pid}
                | {kind: self.addresses(program, kind)[place] for kind in child.ports}
                for place, child in enumerate(children)
            ]
        unfinished = self.args.ports_file.with_name(self.args.ports_file.name + ".new")
        try:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")
            unfinished.replace(self.args.ports_file)
        except OSError as error:
            raise UserError(f"cannot write --ports-file {self.args.ports_file}: {error.strerror}") from None


class Console:
    """Writes the lines of all processes to stderr, each with the name of its process, in colour on a terminal."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._writer = LineWriter(STDERR_FD)
        self._is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._names: list[str] = []

    def say(self, name: str, line: str) -> None:
        level = _LEVEL.search(line)
        # A line without a level is ours or a traceback, and always shown.
        if level is not None and Level[level[1]] < self._level:
            return
        label = f"{name:{NAME_WIDTH}} |"
        if self._is_coloured:
            if name not in self._names:
                self._names.append(name)
            label = f"\x1b[{_COLOURS[self._names.index(name) % len(_COLOURS)]}m{label}\x1b[0m"
        self._writer.put(f"{label} {printable(line)}\n".encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        self._writer.flush(FLUSH_SECONDS_MAX)


# KINDS, at the end, says what runs. A further program is a line there, with a function for its ports and its flags.


def _one(args: argparse.Namespace) -> int:
    return 1


def _nsqd_count(args: argparse.Namespace) -> int:
    count: int = args.nsqd
    return count


def _has_nsqadmin() -> bool:
    """Tells whether the packages that nsqadmin needs are installed, since they are an extra."""
    return all(importlib.util.find_spec(name) is not None for name in ("aiohttp", "jinja2"))


def _admin_count(args: argparse.Namespace) -> int:
    return 0 if args.no_nsqadmin or not _has_nsqadmin() else 1


def _admin_ports(args: argparse.Namespace, number: int) -> dict[str, int]:
    usual = args.base_port + ADMIN_PORT_OFFSET if args.base_port else 0
    return {"http": usual if args.nsqadmin_port is None else args.nsqadmin_port}


def _admin_flags(fleet: Fleet, number: int) -> list[str]:
    return [f"--lookupd-http-address={address}" for address in fleet.addresses("nsqlookupd", "http")]


def _lookupd_ports(args: argparse.Namespace, number: int) -> dict[str, int]:
    first = args.base_port + LOOKUPD_PORT_OFFSET if args.base_port else 0
    tcp = first if args.lookupd_tcp_port is None else args.lookupd_tcp_port
    http = (first and first + 1) if args.lookupd_http_port is None else args.lookupd_http_port
    return {"tcp": tcp, "http": http}


def _lookupd_flags(fleet: Fleet, number: int) -> list[str]:
    return _broadcast(fleet.args.host)


def _nsqd_ports(args: argparse.Namespace, number: int) -> dict[str, int]:
    if not args.base_port:
        return {"tcp": 0, "http": 0}
    tcp = args.base_port + (number - 1) * NSQD_PORT_STEP
    return {"tcp": tcp, "http": tcp + 1}


def _nsqd_flags(fleet: Fleet, number: int) -> list[str]:
    data_path: Path = fleet.args.dir / f"nsqd-{number}"
    data_path.mkdir(mode=0o700, exist_ok=True)
    lookupds = [f"--lookupd-tcp-address={address}" for address in fleet.addresses("nsqlookupd", "tcp")]
    # NSQ derives the node id in message ids from the host name, which is the same for all nsqds of one machine.
    node = f"--node-id={number - 1}"
    return [f"--data-path={data_path}", node, *lookupds, *_broadcast(fleet.args.host), *fleet.args.nsqd_flag]


def _broadcast(host: str) -> list[str]:
    """Makes the flags that tell clients where we listen. There are none if that is everywhere, since the daemons'
    default is the host's name.
    """
    return [] if host in ("0.0.0.0", "::", "") else [f"--broadcast-address={host}"]


def _reachable(host: str) -> str:
    return _bracketed({"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


KINDS: Final = (
    ProgramKind("nsqlookupd", "nsquark.lookupd.main", _one, _lookupd_ports, _lookupd_flags),
    ProgramKind("nsqd", "nsquark.broker.main", _nsqd_count, _nsqd_ports, _nsqd_flags),
    ProgramKind("nsqadmin", "nsquark.admin.main", _admin_count, _admin_ports, _admin_flags),
)
