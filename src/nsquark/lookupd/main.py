"""This is the program nsqlookupd: options, listen, serve until a signal, stop."""

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from nsquark.base.logs import Logger
from nsquark.base.version import version_line
from nsquark.lookupd.daemon import ListenError, Nsqlookupd
from nsquark.lookupd.options import LookupdOptions, parse_options

EXIT_FATAL = 1


def main() -> None:
    options = parse_options(sys.argv[1:])
    logger = Logger(options.log_prefix, options.log_level)
    logger.info(version_line("nsqlookupd"))
    allow_connections()
    sys.exit(run(serve(options, logger)))


def allow_connections() -> None:
    """Allows as many files as the system does: the usual soft limit of 1,024 is less than a large cluster."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


async def serve(options: LookupdOptions, logger: Logger) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    loop = asyncio.get_running_loop()
    logger.report_failures(loop)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    daemon = Nsqlookupd(options, logger)
    try:
        await daemon.start()
        await stopping.wait()
    except ListenError as error:
        logger.fatal(f"failed to start nsqlookupd: {error}")
        return EXIT_FATAL
    finally:
        await daemon.stop()
    return 0


def run(work: Coroutine[Any, Any, int]) -> int:
    """Runs nsqlookupd on uvloop where it is installed, which halves the cost of a request."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as loop_factory
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
