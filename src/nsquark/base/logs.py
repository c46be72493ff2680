"""Writes log lines to stderr, in NSQ's form, and never delays the daemon for them.

A line is handed to a thread that writes it. When nobody reads stderr (a full pipe, a stopped terminal) the
thread waits, the queue fills, and further lines are dropped and counted; the event loop goes on serving.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import threading
import time
import traceback
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Self

from nsquark.base.printable import printable, printable_lines

if TYPE_CHECKING:
    import asyncio

QUEUE_BYTES_MAX: Final = 4 * 1024 * 1024
"""At most this much waits for stderr: a few seconds of heavy logging, too little to matter for the daemon's memory."""
WRITE_BYTES_MAX: Final = 64 * 1024
"""One write has at most this much, so that a slow reader gets lines while others still wait."""
FLUSH_AT_EXIT_SECONDS_MAX: Final = 1.0
"""At exit the last lines are worth a short wait, but a reader that is gone must not keep the process alive."""
STDERR_FD: Final = 2


class Level(IntEnum):
    """Names the levels of log lines, numbered as `/config/log_level` shows them."""

    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5

    @property
    def word(self) -> str:
        """Returns the word of the `--log-level` option; the printed one is the member's name."""
        return "warn" if self is Level.WARNING else self.name.lower()

    @classmethod
    def parse(cls, word: str) -> Self:
        for level in cls:
            if level.word == word.lower():
                return level
        raise ValueError(f"invalid log level '{word}' (debug, info, warn, error, fatal)")


class LineWriter:
    """Writes lines to a file descriptor from its own thread; the queue in between is bounded in bytes.

    Always: `dropped` counts the lines lost and not yet announced; lines keep their order.
    """

    def __init__(self, fd: int, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._fd = fd
        self._queue_bytes_max = queue_bytes_max
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def put(self, line: bytes) -> None:
        """Queues a line; one that does not fit is dropped and counted."""
        with self._changed:
            if self._queued_bytes + len(line) > self._queue_bytes_max:
                self.dropped += 1
                return
            self._lines.append(line)
            self._queued_bytes += len(line)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all lines are written; returns False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_seconds)

    def reset_dropped(self) -> int:
        """Returns how many lines were lost since the last call, or 0 while the queue has no room to tell that."""
        with self._changed:
            if self._queued_bytes > self._queue_bytes_max // 2:
                return 0
            dropped, self.dropped = self.dropped, 0
            return dropped

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.flush, FLUSH_AT_EXIT_SECONDS_MAX)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                data = self._next_write()
                self._writing = True
            self._write(data)

    def _next_write(self) -> bytes:
        lines = [self._lines.popleft()]
        size = len(lines[0])
        while self._lines and size + len(self._lines[0]) <= WRITE_BYTES_MAX:
            lines.append(self._lines.popleft())
            size += len(lines[-1])
        self._queued_bytes -= size
        return b"".join(lines)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Another process that shares the terminal made it non-blocking.
                select.select([], [self._fd], [], 1.0)
            except OSError:
                # The reader is gone: there is nobody to tell.
                return


stderr = LineWriter(STDERR_FD)


class Logger:
    """Writes `<prefix>YYYY/MM/DD HH:MM:SS.micros LEVEL: text`, in local time. `level` may be changed at any time.

    A text is one line, whatever peers have put into it: see `printable`.
    """

    def __init__(self, prefix: str, level: Level, writer: LineWriter = stderr) -> None:
        self.prefix = prefix
        self.level = level
        self._writer = writer
        self._second = -1
        self._second_text = ""

    def debug(self, text: str) -> None:
        self._log(Level.DEBUG, text)

    def info(self, text: str) -> None:
        self._log(Level.INFO, text)

    def warning(self, text: str) -> None:
        self._log(Level.WARNING, text)

    def error(self, text: str) -> None:
        self._log(Level.ERROR, text)

    def always(self, text: str) -> None:
        """Writes a line that no level leaves out, such as who changed what."""
        self._log(Level.INFO, text, is_always=True)

    def fatal(self, text: str) -> None:
        """Writes a last line: the caller ends the program after it."""
        self._log(Level.FATAL, text)

    def failure(self, text: str, error: BaseException) -> None:
        """Writes an unexpected error with its traceback, which is indented: no line of it can pass for one of ours."""
        self.trace(f"{printable(text)}\n{''.join(traceback.format_exception(error))}")

    def trace(self, text: str) -> None:
        """Writes an error of several lines: the first is like any other, the rest is indented."""
        if self.level <= Level.ERROR:
            first, *others = text.rstrip().split("\n")
            self.error(first)
            for line in others:
                self._writer.put(_encoded(f"    {printable(line.expandtabs())}\n"))

    def report_failures(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the event loop report exceptions that nothing else catches to this log."""

        def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, BaseException):
                self.failure(f"LOOP: {context['message']}", error)
            else:
                self.error(f"LOOP: {context['message']}")

        loop.set_exception_handler(report)

    def flush(self, timeout_seconds: float = FLUSH_AT_EXIT_SECONDS_MAX) -> bool:
        return self._writer.flush(timeout_seconds)

    def _log(self, level: Level, text: str, *, is_always: bool = False) -> None:
        if level < self.level and not is_always:
            return
        if self._writer.dropped and (dropped := self._writer.reset_dropped()):
            self._put(Level.WARNING, f"LOG: {dropped} lines dropped because stderr was not read")
        self._put(level, text)

    def _put(self, level: Level, text: str) -> None:
        second, ns = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second_text = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(second))
            self._second = second
        line = f"{self.prefix}{self._second_text}.{ns // 1000:06d} {level.name}: {printable(text)}\n"
        self._writer.put(_encoded(line))


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace")


def library_log(name: str) -> logging.Logger:
    """Returns the logger of a part that runs in other programs: its lines are printable, wherever those write them."""
    log = logging.getLogger(name)
    if make_printable not in log.filters:
        log.addFilter(make_printable)
    return log


def make_printable(record: logging.LogRecord) -> bool:
    """Is a logging filter that lets every line through, with what peers have put into it made printable."""
    said = record.getMessage()
    shown = printable(said)
    if shown != said:
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True
