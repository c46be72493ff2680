"""This is the program nsqd: it reads options, locks the data path, and serves until a signal."""

import asyncio
import os
import sys
from collections.abc import Sequence

from nsquark import kernel
from nsquark.base.errors import EXIT_FATAL
from nsquark.base.event_loop import run, stop_signal
from nsquark.base.logs import Logger
from nsquark.base.version import version_line
from nsquark.broker.data_path import DataPath, DataPathError
from nsquark.broker.nsqd import Nsqd, NsqdStartError
from nsquark.broker.options import NsqdOptions, NsqdOptionsError, parse_options, validate


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    logger = Logger(options.log_prefix, options.log_level)
    logger.info(version_line("nsqd"))
    logger.info(f"ID: {options.node_id}")
    if not kernel.is_compiled():
        logger.warning("the kernel runs interpreted, which is slow: reinstall with a C compiler to compile it")
    data = DataPath(options.data_path)
    try:
        data.lock()
        validate(options)
        run(_serve(options, logger, data))
    except (NsqdOptionsError, DataPathError, NsqdStartError, OSError) as error:
        logger.fatal(f"failed to instantiate nsqd - {error}")
        logger.flush()
        sys.exit(EXIT_FATAL)
    logger.flush()
    # Threads that wait for a disk must not keep a stopped nsqd alive: all that matters is synced.
    os._exit(0)


async def _serve(options: NsqdOptions, logger: Logger, data: DataPath) -> None:
    logger.report_failures(asyncio.get_running_loop())
    stopping = stop_signal()
    nsqd = Nsqd(options, logger, data)
    try:
        await nsqd.start()
        await stopping.wait()
    finally:
        await nsqd.stop()
