"""Makes a tool a program: it handles the flags, the lines on stderr, the signals and the exit code.

    @option_table
    class Options(ConsumeOptions):
        topic: list[str] = option(STRINGS, [], "...")

    def main(argv: Sequence[str] | None = None) -> NoReturn:
        options = parse_options("nsq_tail", Options, argv, example="nsq_tail --topic=orders ...")
        run(work(options))

A tool reports an error by `raise Fatal(text)`, wherever it is; that prints one line on stderr, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NoReturn, TypeVar

from nsquark.base import event_loop, logs
from nsquark.base.errors import EXIT_FATAL, EXIT_INTERRUPTED
from nsquark.base.event_loop import SAME_STOP_S
from nsquark.base.flags import parse_with_rest
from nsquark.base.printable import printable
from nsquark.base.version import NSQ_VERSION
from nsquark.client.errors import NsqError
from nsquark.client.logs import client_log

OptionsT = TypeVar("OptionsT")

_LEVEL_WORDS: Final = {
    logging.DEBUG: "DBG",
    logging.INFO: "INF",
    logging.WARNING: "WRN",
    logging.ERROR: "ERR",
    logging.CRITICAL: "ERR",
}


class Fatal(Exception):
    """Ends the program with exit code 1, after printing its text."""


def parse_options(program: str, options: type[OptionsT], argv: Sequence[str] | None, example: str) -> OptionsT:
    """Reads the options of a tool. As in NSQ, arguments after the flags are ignored."""
    return parse_options_and_rest(program, options, argv, example)[0]


def parse_options_and_rest(
    program: str, options: type[OptionsT], argv: Sequence[str] | None, example: str
) -> tuple[OptionsT, list[str]]:
    """Reads options as `parse_options` does, but returns the arguments after the flags too."""
    version = f"{program} v{NSQ_VERSION}"
    return parse_with_rest(program, options, sys.argv[1:] if argv is None else argv, version, example)


def say(text: str) -> None:
    """Writes a line to stderr as Go's log package does."""
    now = time.strftime("%Y/%m/%d %H:%M:%S")
    logs.stderr.put(f"{now} {printable(text)}\n".encode("utf-8", "backslashreplace"))


class _ClientLines(logging.Handler):
    """Writes the client's log lines, with go-nsq's words for the levels."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{_LEVEL_WORDS.get(record.levelno, record.levelname)} {record.getMessage()}")


def show_client_lines() -> None:
    """Writes the client's log lines to stderr from now on."""
    client_log.setLevel(logging.INFO)
    client_log.propagate = False
    client_log.handlers[:] = [_ClientLines()]


def run(work: Coroutine[Any, Any, int | None]) -> NoReturn:
    """Runs a tool to its end, on uvloop if it is installed; what the tool returns is the exit code (None is 0).

    After `Fatal`, an error of the client or one of the system, such as a full disk, it prints a line and ends with exit
    code 1. When nobody reads stdout any more the program ends by SIGPIPE, as programs do.
    """
    show_client_lines()
    try:
        code = event_loop.run(work) or 0
    except BrokenPipeError:
        _end_by(signal.SIGPIPE)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (Fatal, NsqError, OSError) as error:
        say(str(error))
        code = EXIT_FATAL
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends the process at once, so that threads which wait for a terminal or a disk do not keep it alive."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    logs.stderr.flush(logs.FLUSH_AT_EXIT_SECONDS_MAX)
    os._exit(code)


def _end_by(number: signal.Signals) -> NoReturn:
    logs.stderr.flush(logs.FLUSH_AT_EXIT_SECONDS_MAX)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(EXIT_FATAL)  # reached only if the signal is blocked


def on_stop(stop: Callable[[], None]) -> None:
    """Makes SIGINT and SIGTERM call `stop` in the event loop; one that comes SAME_STOP_S later or more ends the program
    at once.
    """
    loop = asyncio.get_running_loop()
    is_stopping = False

    def first() -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            loop.call_later(SAME_STOP_S, end_at_the_next)
            stop()

    def end_at_the_next() -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)
