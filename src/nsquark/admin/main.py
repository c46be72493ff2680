"""This is the program nsqadmin: it reads its options, listens, and serves until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import Final

from nsquark.admin.options import NsqadminOptions, OptionsError, check_options, parse_options
from nsquark.base import event_loop
from nsquark.base.addresses import Listener, listen
from nsquark.base.errors import EXIT_FATAL
from nsquark.base.extras import needs
from nsquark.base.logs import Logger
from nsquark.base.version import version_line

with needs("admin"):
    from aiohttp import web

    from nsquark.admin.app import make_app, make_state

STOP_S_MAX: Final = 5.0
"""Requests that are being answered when nsqadmin is told to stop have this much time."""
LINE_BYTES_MAX: Final = 32 << 10
GC_THRESHOLD: Final = 50_000


def main() -> None:
    options = parse_options(sys.argv[1:])
    logger = Logger(options.log_prefix, options.log_level)
    logger.info(version_line("nsqadmin"))
    logging.getLogger("aiohttp").addHandler(_Passed(logger))
    # Snapshots are large, short-lived and free of cycles, so the garbage collector would find nothing in them.
    gc.set_threshold(GC_THRESHOLD)
    sys.exit(event_loop.run(serve(options, logger)))


class _Passed(logging.Handler):
    """Writes the log records of aiohttp to our own log."""

    def __init__(self, logger: Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.trace(f"HTTP: {self.format(record)}")


async def serve(options: NsqadminOptions, logger: Logger) -> int:
    """Serves until SIGINT or SIGTERM, and returns the exit code."""
    logger.report_failures(asyncio.get_running_loop())
    stopping = event_loop.stop_signal()
    try:
        check_options(options)
        state = make_state(options, logger)
        listener = _listen(options.http_address)
    except OptionsError as error:
        logger.fatal(f"failed to instantiate nsqadmin - {error}")
        return EXIT_FATAL
    runner = web.AppRunner(
        make_app(state),
        access_log=None,
        shutdown_timeout=STOP_S_MAX,
        handler_cancellation=True,
        max_line_size=LINE_BYTES_MAX,
    )
    await runner.setup()
    await web.SockSite(runner, listener.socket).start()
    logger.info(f"HTTP: listening on {listener.shown}")
    await stopping.wait()
    logger.info(f"HTTP: closing {listener.shown}")
    await runner.cleanup()
    return 0


def _listen(address: str) -> Listener:
    try:
        return listen(address)
    except (OSError, ValueError) as error:
        raise OptionsError(f"listen ({address}) failed - {error}") from None


if __name__ == "__main__":
    main()
