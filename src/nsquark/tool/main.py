"""This is the program nsquark, which loads the module of a command only when the command is called."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol, cast

from nsquark.base.errors import EXIT_FATAL, EXIT_INTERRUPTED, UserError
from nsquark.base.printable import printable_lines
from nsquark.base.version import NSQ_VERSION, __version__

COMMANDS: Final = {
    "up": ("nsquark.tool.up", "run nsqlookupd, nsqds and nsqadmin together, for trying out and development"),
    "doctor": ("nsquark.tool.doctor", "check this machine, and the nsqds and nsqlookupds given"),
    "export": ("nsquark.tool.export", "write the data of a stopped nsqd as the files of NSQ's nsqd, to go back to it"),
    "passwd": ("nsquark.tool.passwd", "set passwords and roles of those who may use nsqadmin"),
    "sql": ("nsquark.query.sql", "answer a question in SQL about topics, with DuckDB"),
    "schema": ("nsquark.query.schema", "infer the schema of a topic's JSON, as Spark's DDL"),
    "pipeline": ("nsquark.spark.jobs.pipeline", "run a Spark Declarative Pipeline over topics"),
    "archive": ("nsquark.spark.jobs.archive", "copy topics into files or a Delta table, with Spark"),
    "compact-archive": ("nsquark.spark.jobs.compact", "merge the small files of an archive"),
    "rollup": ("nsquark.spark.jobs.rollup", "count and sum topics by window and key, with Spark"),
    "replay": ("nsquark.spark.jobs.replay", "publish messages of a log or an archive again, with Spark"),
    "report": ("nsquark.spark.jobs.report", "count what is in topics or archives, with Spark"),
}
"""Each command has a module and a help text. The module has `add_arguments(parser)` and `run(args)`, which returns the
exit code.
"""

TOOLS: Final = {
    "tap": ("nsquark.tap.main", "keep what NSQ's nsqds deliver to a channel in logs that Spark reads"),
    "tail": (
        "nsquark.tools.nsq_tail",
        "print the messages of topics, as they come or from a point of their logs on (nsq_tail)",
    ),
    "to-file": ("nsquark.tools.nsq_to_file", "write the messages of topics to files (nsq_to_file)"),
    "to-http": ("nsquark.tools.nsq_to_http", "send the messages of a topic to HTTP endpoints (nsq_to_http)"),
    "to-nsq": ("nsquark.tools.nsq_to_nsq", "publish the messages of topics to other nsqds (nsq_to_nsq)"),
    "publish": ("nsquark.tools.to_nsq", "publish the lines of stdin (to_nsq)"),
    "stat": ("nsquark.tools.nsq_stat", "show rates and depths of a channel (nsq_stat)"),
}
"""Each tool has a module and a help text. The module has `main(argv)`, which reads flags as NSQ's programs do."""


class Subcommand(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = _choose(arguments)
    if name in TOOLS:
        importlib.import_module(TOOLS[name][0]).main(rest)
    try:
        code = _run(name, rest)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone, and flushing what is still buffered would fail at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FATAL
    except Exception as error:
        if not _is_for_users(error):
            raise
        print(f"nsquark {name}: {printable_lines(str(error))}", file=sys.stderr)
        code = EXIT_FATAL
    sys.exit(code)


def _choose(arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the command and the arguments for it. It ends the program for --help, --version and mistakes."""
    known = COMMANDS | TOOLS
    width = max(map(len, known))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in known.items())
    parser = argparse.ArgumentParser(
        prog="nsquark",
        usage="nsquark <command> [options]",
        description=f"NSQ in Python, on a log, with Spark as its data pipeline.\n\ncommands:\n{listing}",
        epilog="`nsquark <command> --help` explains a command. The daemons are nsqd, nsqlookupd and nsqadmin.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nsquark {__version__} (speaks NSQ {NSQ_VERSION})")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    # Only what stands before the command is ours: `nsquark up --help` is about `up`.
    ours = next((place for place, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    name = parser.parse_args(arguments[: ours + 1]).command
    if name is None:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if name not in known:
        parser.error(f"there is no command {name!r}: choose one of {', '.join(known)}")
    return name, arguments[ours + 1 :]


def _run(name: str, arguments: list[str]) -> int:
    command = _load(name)
    parser = argparse.ArgumentParser(
        prog=f"nsquark {name}",
        description=f"{COMMANDS[name][1][0].upper()}{COMMANDS[name][1][1:]}.",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def _load(name: str) -> Subcommand:
    module = COMMANDS[name][0]
    try:
        return cast(Subcommand, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("nsquark"):
            raise UserError(f"this installation has no {error.name}: reinstall nsquark") from None
        extra = "sql" if module.startswith("nsquark.query.") else "spark"
        raise UserError(f"it needs {error.name}: pip install 'nsquark[{extra}]'") from None


def _is_for_users(error: Exception) -> bool:
    """Tells whether an error is shown to users as a sentence; anything else is a bug and keeps its traceback."""
    if isinstance(error, UserError):
        return True
    client = sys.modules.get("nsquark.client.errors")
    return client is not None and isinstance(error, client.NsqError)


if __name__ == "__main__":
    main()
