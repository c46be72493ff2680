"""This is the program nsqlookupd: it reads options, listens, serves until a signal, and stops."""

import asyncio
import sys

from nsquark.base.errors import EXIT_FATAL
from nsquark.base.event_loop import run, stop_signal
from nsquark.base.logs import Logger
from nsquark.base.version import version_line
from nsquark.lookupd.daemon import ListenError, Nsqlookupd
from nsquark.lookupd.options import LookupdOptions, parse_options


def main() -> None:
    options = parse_options(sys.argv[1:])
    logger = Logger(options.log_prefix, options.log_level)
    logger.info(version_line("nsqlookupd"))
    sys.exit(run(serve(options, logger)))


async def serve(options: LookupdOptions, logger: Logger) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    logger.report_failures(asyncio.get_running_loop())
    stopping = stop_signal()
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


if __name__ == "__main__":
    main()
