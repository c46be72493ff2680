"""Runs the two sides of the topic that need no Spark: producers on a pool of nsqds, and consumers that find them."""

import asyncio
import contextlib
import re
import time
from collections import Counter

from examples.demo.events import Event, Shop
from nsquark import Consumer, Message, ProducerPool
from nsquark.errors import NsqError

TOPIC = "events"
CHANNEL = "workers"
TICK_S = 0.05
PUBLISH_S_MAX = 120.0
"""On a machine that is too busy the rest takes longer, but the shop's fast clock must not reach the future."""
_ID = re.compile(rb'"id": ?"([^"]+)"')


def id_in(body: bytes) -> str:
    """Finds the id in a body, also in one that is no JSON any more."""
    found = _ID.search(body)
    return found[1].decode() if found else ""


class Producers:
    """Publishes the shop's events at a rate, and knows of each whether nsqd has it."""

    def __init__(self, shop: Shop, nsqds: list[str], per_second: int) -> None:
        self._shop = shop
        self._nsqds = nsqds
        self._per_second = per_second
        self._stop = asyncio.Event()
        self.sent: dict[str, Event] = {}
        self.acknowledged: set[str] = set()
        self.failed: dict[str, str] = {}
        """Says why by id: nsqd may have it all the same."""

    async def run(self) -> None:
        started = time.monotonic()
        async with ProducerPool(self._nsqds) as pool, asyncio.TaskGroup() as publishing:
            while not self._stop.is_set() and (elapsed_s := time.monotonic() - started) < PUBLISH_S_MAX:
                while len(self.sent) < elapsed_s * self._per_second:
                    event = self._shop.event(elapsed_s)
                    self.sent[event.id] = event
                    publishing.create_task(self._publish(pool, event))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_S)

    async def _publish(self, pool: ProducerPool, event: Event) -> None:
        try:
            await pool.publish(TOPIC, event.body)
        except NsqError as error:
            self.failed[event.id] = str(error)
        else:
            self.acknowledged.add(event.id)

    def stop(self) -> None:
        """Stops publishing; `run` ends when every publish has its outcome."""
        self._stop.set()


class Consumers:
    """Runs workers that share one channel; each counts the ids it handles."""

    def __init__(self, lookupd: str, count: int) -> None:
        self._consumers = [
            Consumer(TOPIC, CHANNEL, lookupd=lookupd, max_in_flight=200, lookupd_poll_interval="500ms")
            for _ in range(count)
        ]
        self.handled: Counter[str] = Counter()

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as running:
            for consumer in self._consumers:
                await stack.enter_async_context(consumer)
                running.create_task(consumer.run(self._handle))

    def _handle(self, message: Message) -> None:
        self.handled[id_in(message.body)] += 1

    async def stop(self) -> None:
        await asyncio.gather(*(consumer.close() for consumer in self._consumers))

    @property
    def connections(self) -> int:
        return sum(consumer.stats().connections for consumer in self._consumers)

    @property
    def deliveries(self) -> int:
        return self.handled.total()
