"""This is the program `nsquark tap`: it copies what NSQ's nsqds deliver to a channel into logs that Spark reads.

`topic_tap.py` consumes a message from its nsqd, `frames.py` appends it to the log with its own id and time, `window.py`
recognises it when it is delivered again, and the log API of `tap_log.py` gives it to readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from nsquark.base.addresses import listen
from nsquark.base.logs import Logger
from nsquark.broker.data_path import DataPath, DataPathError
from nsquark.broker.nsqd import NsqdStartError
from nsquark.log.files import write_atomically
from nsquark.tap.directory import TapDirectory
from nsquark.tap.discovery import TapDiscovery
from nsquark.tap.options import EXAMPLE, PROGRAM, TapOptions, check
from nsquark.tap.tapped_nsqd import TappedNsqd
from nsquark.tools.program import Fatal, on_stop, parse_options, run
from nsquark.web.browsers import BrowserGuard
from nsquark.web.server import HttpLimits, HttpServer
from nsquark.wire.documents import decode_json

SOURCES_FILE: Final = "tap.json"
"""This file lists the addresses of all nsqds that were ever tapped; the place of an address decides its port."""
SOURCES_MAX: Final = 500
TOPICS_MAX: Final = 10_000
"""At most this many topics of all nsqds together are tapped: each needs a connection."""


def main(argv: Sequence[str] | None = None, topics_max: int = TOPICS_MAX) -> NoReturn:
    run(_tap(parse_options(PROGRAM, TapOptions, argv, EXAMPLE), topics_max))


async def _tap(options: TapOptions, topics_max: int) -> None:
    check(options)
    logger = Logger(f"[{PROGRAM}] ", options.log_level)
    logger.report_failures(asyncio.get_running_loop())
    data = DataPath(options.data_path)
    try:
        data.lock()
        await Tap(options, logger, topics_max).run()
    except (DataPathError, NsqdStartError) as error:
        raise Fatal(str(error)) from None
    finally:
        data.unlock()


class Tap:
    """Runs all tapped nsqds of one process. The logs of nsqds that are gone stay readable."""

    def __init__(self, options: TapOptions, logger: Logger, topics_max: int) -> None:
        self._options = options
        self._logger = logger
        self._topics_max = topics_max
        self._sources: dict[str, TappedNsqd] = {}
        self._known_file = Path(options.data_path or ".") / SOURCES_FILE
        self._known = self._read_known()
        self._discovery = TapDiscovery(options, logger)
        browsers = BrowserGuard(PROGRAM, (options.broadcast_address, *options.http_allowed_hosts))
        self._http = HttpServer(TapDirectory(self._sources, options).router(), browsers, HttpLimits(), logger)

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT."""
        stopping = asyncio.Event()
        on_stop(stopping.set)
        try:
            for address in list(self._known):
                await self._open(address)
            await self._listen()
            while not stopping.is_set():
                await self._round()
                await _wait(stopping, self._options.topic_refresh.seconds)
        finally:
            await self._http.close()
            await asyncio.gather(*(source.stop() for source in self._sources.values()))

    async def _listen(self) -> None:
        try:
            listener = listen(self._options.http_address)
            await self._http.serve(listener)
        except (OSError, ValueError) as error:
            raise Fatal(f"listen ({self._options.http_address}) failed - {error}") from None
        self._logger.info(f"HTTP: listening on {listener.shown}")

    async def _round(self) -> None:
        """Begins to tap the topics that are found and not tapped yet."""
        for address, topic in await self._discovery.find():
            source = self._sources.get(address)
            if source is not None and topic in source.taps:
                continue
            if sum(len(tapped.taps) for tapped in self._sources.values()) >= self._topics_max:
                self._logger.error(
                    f"more than {self._topics_max} topics: {topic} of {address} and others are not tapped"
                )
                return
            try:
                source = source or await self._open(address)
            except (DataPathError, NsqdStartError, OSError) as error:
                self._logger.error(f"nsqd {address} is not tapped: {error}")
            else:
                source.tap(topic)

    async def _open(self, address: str) -> TappedNsqd:
        """Opens the log of an nsqd, on the same port as in earlier runs."""
        if address not in self._known:
            if len(self._known) >= SOURCES_MAX:
                raise NsqdStartError(f"{SOURCES_MAX} nsqds have a log here already")
            known = [*self._known, address]
            write_atomically(self._known_file, msgspec.json.encode(known))
            self._known = known
        source = TappedNsqd(address, self._known.index(address) + 1, self._options)
        await source.start()
        self._sources[address] = source
        return source

    def _read_known(self) -> list[str]:
        try:
            return decode_json(self._known_file.read_bytes(), list[str])
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise Fatal(f"{self._known_file} is damaged ({error}): write it anew, a list of addresses") from None


async def _wait(event: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


if __name__ == "__main__":
    main()
