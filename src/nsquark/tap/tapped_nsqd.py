"""Ties together what belongs to one tapped nsqd: its log, and a consumer for each of its topics."""

from __future__ import annotations

import asyncio

from nsquark.base.addresses import split_address
from nsquark.base.logs import Logger
from nsquark.client.errors import NsqError
from nsquark.tap.options import PROGRAM, TapOptions
from nsquark.tap.tap_log import TapLog
from nsquark.tap.topic_tap import TopicTap


class TappedNsqd:
    """Taps the topics of one nsqd. `taps` has the taps that run; one that failed is missing until it is begun again."""

    def __init__(self, address: str, number: int, options: TapOptions) -> None:
        """Makes the log, which listens on the tap's own port plus `number`, counted from 1."""
        self.address = address
        self._options = options
        self._logger = Logger(f"[{PROGRAM} {address}] ", options.log_level)
        port = split_address(options.http_address)[1]
        self.log = TapLog(address, port + number if port else 0, options, self._logger)
        self.taps: dict[str, TopicTap] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        try:
            await self.log.start()
        except BaseException:
            await self.log.stop()
            raise

    def tap(self, topic: str) -> None:
        """Begins to consume a topic, unless it is being consumed."""
        if topic not in self.taps:
            self.taps[topic] = TopicTap(self.log, self.address, topic, self._options, self._logger)
            task = asyncio.get_running_loop().create_task(self._run(topic), name=f"tap {self.address} {topic}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, topic: str) -> None:
        try:
            await self.taps[topic].run()
        except (NsqError, OSError) as error:
            self._logger.error(f"TAP({self.address}/{topic}): {error}; tried again later")
        except Exception as error:
            self._logger.failure(f"TAP({self.address}/{topic}): failed; tried again later", error)
        finally:
            del self.taps[topic]

    async def stop(self) -> None:
        """Stops consuming: finishes what was appended, gives back what was not, and closes the log."""
        for tap in self.taps.values():
            tap.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.log.stop()
