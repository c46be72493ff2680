"""Checks the form of log lines, and that a reader who does not read never holds the daemon up."""

import asyncio
import io
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness import eventually
from nsquark.base.logs import Level, LineWriter, Logger, library_log
from nsquark.base.printable import TEXT_CHARS_MAX

FLUSH_S = 30.0
"""The thread that writes may be held up for longer than programs wait for it at their end."""
LINE = re.compile(r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (DEBUG|INFO|WARNING|ERROR|FATAL): (.*)")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def lines_of(read_fd: int) -> list[str]:
    return os.read(read_fd, 1 << 20).decode().splitlines()


def test_line_form_and_levels(pipe: tuple[int, int]) -> None:
    logger = Logger("[nsqd] ", Level.DEBUG, LineWriter(pipe[1]))
    for say in (logger.debug, logger.info, logger.warning, logger.error, logger.fatal):
        say("a text \udcff")
    assert logger.flush(FLUSH_S)
    matches = [LINE.fullmatch(line) for line in lines_of(pipe[0])]
    assert [match and match[1] for match in matches] == ["DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]
    assert all(match and match[2] == "a text \\xff" for match in matches)


FORGED = "x\n[nsqd] 2026/01/01 00:00:00.000000 INFO: forged\r\x1b[2J\x9b1m\u202e\u2028\x00"


def test_a_text_is_one_line_and_moves_no_cursor(pipe: tuple[int, int]) -> None:
    logger = Logger("[nsqd] ", Level.INFO, LineWriter(pipe[1]))
    logger.error(FORGED)
    logger.info("y" * 1_000_000)
    assert logger.flush(FLUSH_S)
    first, second = lines_of(pipe[0])
    assert first.isprintable()
    assert first.endswith(r"ERROR: x\n[nsqd] 2026/01/01 00:00:00.000000 INFO: forged\r\x1b[2J\u009b1m\u202e\u2028\x00")
    assert len(second) < TEXT_CHARS_MAX + 200
    assert second.endswith(f"... ({1_000_000 - TEXT_CHARS_MAX} more characters)")


def test_the_lines_of_a_traceback_are_not_taken_for_others(pipe: tuple[int, int]) -> None:
    logger = Logger("[nsqd] ", Level.INFO, LineWriter(pipe[1]))
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        logger.failure("GET /\n failed", error)
    assert logger.flush(FLUSH_S)
    head, *trace = lines_of(pipe[0])
    assert head.endswith(r"ERROR: GET /\n failed")
    assert trace[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


def test_what_fails_in_the_loop_is_logged_as_all_else(pipe: tuple[int, int]) -> None:
    logger = Logger("[nsqd] ", Level.INFO, LineWriter(pipe[1]))

    def fail() -> None:
        raise ValueError(FORGED)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        logger.report_failures(loop)
        loop.call_soon(fail)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert logger.flush(FLUSH_S)
    head, *trace = lines_of(pipe[0])
    assert "ERROR: LOOP: Exception in callback" in head
    assert trace and all(line.startswith("    ") and line.isprintable() for line in trace)


def test_the_libraries_say_printable_things_to_any_handler() -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    log = library_log("nsquark.client")
    log.addHandler(handler)
    try:
        log.error("%s: %s", "127.0.0.1:4150", FORGED)
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            log.exception("failed")
    finally:
        log.removeHandler(handler)
    first, *rest = said.getvalue().splitlines()
    assert first.startswith("127.0.0.1:4150: x\\n[nsqd]")
    assert rest[-1] == "ValueError: \\x1b[2J"
    assert all(line.isprintable() for line in (first, *rest))


def test_time_is_local_and_current(pipe: tuple[int, int]) -> None:
    before = time.strftime("%Y/%m/%d %H:%M:%S")
    logger = Logger("", Level.INFO, LineWriter(pipe[1]))
    logger.info("now")
    after = time.strftime("%Y/%m/%d %H:%M:%S")
    assert logger.flush(FLUSH_S)
    assert before <= lines_of(pipe[0])[0][:19] <= after


def test_level_can_be_changed_live(pipe: tuple[int, int]) -> None:
    logger = Logger("[nsqd] ", Level.ERROR, LineWriter(pipe[1]))
    logger.info("hidden")
    logger.level = Level.DEBUG
    logger.debug("shown")
    assert logger.flush(FLUSH_S)
    assert [line.rpartition(": ")[2] for line in lines_of(pipe[0])] == ["shown"]


def test_unread_stderr_drops_lines_and_says_so_afterwards(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, queue_bytes_max=64 * 1024)
    logger = Logger("", Level.INFO, writer)

    def is_stuck() -> bool:
        """What was dropped is told, and forgotten, as long as the pipe takes it."""
        for _ in range(3000):
            logger.info("x" * 200)
        return not logger.flush(0.05) and writer.dropped > 0

    eventually(is_stuck)
    while not logger.flush(0.05):
        if select.select([read_fd], [], [], 0)[0]:  # the writer's thread may be about to say that it is done
            os.read(read_fd, 1 << 16)
    logger.info("again")
    assert logger.flush(FLUSH_S)
    last = lines_of(read_fd)[-2:]
    assert re.search(r"WARNING: LOG: \d+ lines dropped", last[0])
    assert last[1].endswith("INFO: again")


def test_a_closed_reader_does_not_stop_the_program() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    logger = Logger("", Level.INFO, LineWriter(write_fd))
    logger.info("to nobody")
    assert logger.flush(FLUSH_S)
    os.close(write_fd)


def test_last_lines_are_written_at_exit() -> None:
    script = (
        "from nsquark.base import logs\n"
        f"logs.FLUSH_AT_EXIT_SECONDS_MAX = {FLUSH_S}\n"
        "logger = logs.Logger('', logs.Level.INFO)\n"
        "for n in range(500): logger.info(f'line {n}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert [line.rpartition(" ")[2] for line in done.stderr.splitlines()] == [str(n) for n in range(500)]


def test_exit_does_not_wait_long_for_a_reader_that_never_reads() -> None:
    script = (
        "from nsquark.base.logs import Level, Logger\n"
        "logger = Logger('', Level.INFO)\n"
        "for n in range(5000): logger.info('x' * 100)\n"
    )
    read_fd, write_fd = os.pipe()
    try:
        subprocess.run([sys.executable, "-c", script], stderr=write_fd, timeout=30, check=True)
    finally:
        os.close(read_fd)
        os.close(write_fd)


@pytest.mark.parametrize("word", ["debug", "info", "warn", "error", "fatal"])
def test_level_words(word: str) -> None:
    assert Level.parse(word.upper()).word == word


@pytest.mark.parametrize("word", ["", "warning", "verbose", "2"])
def test_other_level_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="invalid log level"):
        Level.parse(word)
