"""Shows what flows where, once a second: a line on a terminal, every fifth in a pipe."""

import asyncio
import sys
import time
from typing import Any

import msgspec

from examples.demo.lake import Lake
from examples.demo.platform import Platform
from examples.demo.traffic import CHANNEL, TOPIC, Consumers, Producers
from nsquark.web.fetch import FetchError, fetch

INTERVAL_S = 1.0
LINES_PER_SHOWN_IN_PIPE = 5
HEADER_EVERY = 15
TIMEOUT_S = 1.0
HEADER = (
    f"{'':>5}  {'published/s':>11} {'waiting':>7}  {'depth nsqd-1':>12} {'nsqd-2':>7}  "
    f"{'consumed/s':>10} {'conns':>5}  {'Spark lag':>9}  last micro-batch"
)


class Board:
    def __init__(self, platform: Platform, producers: Producers, consumers: Consumers, lake: Lake) -> None:
        self._platform = platform
        self._producers = producers
        self._consumers = consumers
        self._lake = lake
        self._started = time.monotonic()
        self._lines = 0
        self._is_terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Shows that something happened."""
        print(f"{self._elapsed():>4.0f}s  * {text}", flush=True)

    async def run(self) -> None:
        acknowledged = handled = 0
        while True:
            await asyncio.sleep(INTERVAL_S)
            channels = await asyncio.gather(*map(self._channels, self._platform.nsqds("http")))
            before = acknowledged, handled
            acknowledged, handled = len(self._producers.acknowledged), self._consumers.deliveries
            self._show(acknowledged - before[0], handled - before[1], channels)

    def _show(self, published: int, consumed: int, channels: list[dict[str, int] | None]) -> None:
        self._lines += 1
        if not self._is_terminal and self._lines % LINES_PER_SHOWN_IN_PIPE:
            return
        if self._lines % HEADER_EVERY == (1 if self._is_terminal else 0) or self._lines == LINES_PER_SHOWN_IN_PIPE:
            print(HEADER)
        depths = ["down" if of is None else str(of.get(CHANNEL, 0)) for of in channels]
        lag = sum(of.get("pipeline", 0) for of in channels if of)
        waiting = len(self._producers.sent) - len(self._producers.acknowledged) - len(self._producers.failed)
        batch = next((batch for batch in reversed(self._lake.batches) if batch.rows), None)
        last = f"{batch.query} {batch.rows:,} rows in {batch.duration_ms / 1000:.1f} s" if batch else "-"
        print(
            f"{self._elapsed():>4.0f}s  {published:>11,} {waiting:>7,}  {depths[0]:>12} {depths[1]:>7}  "
            f"{consumed:>10,} {self._consumers.connections:>5}  {lag:>9,}  {last}",
            flush=True,
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    async def _channels(self, nsqd: str) -> dict[str, int] | None:
        """Returns the depth of each channel of the topic; None while the nsqd does not answer."""
        url = f"http://{nsqd}/stats?format=json&topic={TOPIC}"
        try:
            _, _, body = await fetch(url, connect_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
            stats: dict[str, Any] = msgspec.json.decode(body)
        except (FetchError, msgspec.MsgspecError):
            return None
        return {
            channel["channel_name"]: channel["depth"]
            for topic in stats["topics"]
            for channel in topic["channels"] or ()
        }
