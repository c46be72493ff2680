"""Runs a cluster under load, with an nsqadmin that watches it, for the tests here and for the pictures in docs/."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.nsqadmin import Nsqadmin
from harness.waiting import eventually
from nsquark import Consumer, Producer
from nsquark.testing import Nsqd, Nsqlookupd

ROUND_S = 0.2
MESSAGES_A_ROUND = {"orders": 6, "clicks": 14, "payments": 2, "emails": 3, "sensors.temperature": 5}
CONSUMERS = {
    ("orders", "billing"): 0.0,
    ("orders", "fraud"): 0.0,
    ("clicks", "sessions"): 0.0,
    ("clicks", "analytics"): 0.0,
    ("payments", "ledger"): 0.0,
    ("emails", "sender"): 0.08,
    ("sensors.temperature", "alerts"): 0.0,
}
"""Says of channels which part of its messages each requeues."""
UNREAD = [("orders", "audit")]
"""These channels have no consumer: they grow."""


class Cluster:
    """Runs 2 nsqlookupds, 3 nsqds, producers, consumers and an nsqadmin. Topics of tests have their own names."""

    def __init__(self, folder: Path, *admin_flags: str) -> None:
        self.lookupds = [Nsqlookupd() for _ in range(2)]
        self._folder = folder
        self._admin_flags = admin_flags
        self.nsqds: list[Nsqd] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for lookupd in self.lookupds:
                stack.enter_context(lookupd)
            for number in range(3):
                path = self._folder / f"nsqd{number}"
                path.mkdir()
                flags = [f"--lookupd-tcp-address={lookupd.tcp_address}" for lookupd in self.lookupds]
                percentiles = ["--e2e-processing-latency-percentile=0.99,0.5", "--retention-time=24h"]
                self.nsqds.append(stack.enter_context(Nsqd(path, *flags, *percentiles)))
            stack.enter_context(Load(self.nsqds))
            asking = [f"--lookupd-http-address={lookupd.http_address}" for lookupd in self.lookupds]
            # What nsqadmin knows of an nsqd stays on its pages for as long as a request to it may take.
            patient = ("--http-client-connect-timeout=1m", "--http-client-request-timeout=1m")
            self.admin = stack.enter_context(Nsqadmin(*asking, *patient, "--poll-interval=500ms", *self._admin_flags))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.admin.url

    def wait_until_shown(self, path: str, *texts: str) -> None:
        """Waits until nsqadmin has a page at this path, with these texts: an nsqd may be too late for a poll."""

        def is_shown() -> bool:
            page = self.admin.get(path)
            return page.status == 200 and all(text in page.text for text in texts)

        eventually(is_shown)

    def channels(self, topic: str, channel: str) -> Iterator[dict[str, Any]]:
        """Returns that channel in /stats of each nsqd that has it."""
        for nsqd in self.nsqds:
            for found in nsqd.stats(topic=topic)["topics"] or []:
                yield from (each for each in found["channels"] if each["channel_name"] == channel)

    def topics(self, topic: str) -> list[dict[str, Any]]:
        """Returns that topic in /stats of each nsqd that has it."""
        return [found for nsqd in self.nsqds for found in nsqd.stats(topic=topic)["topics"] or []]


class Load:
    """Runs producers and consumers in a thread of their own."""

    def __init__(self, nsqds: list[Nsqd]) -> None:
        self._addresses = [nsqd.tcp_address for nsqd in nsqds]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._stopping = asyncio.Event()
        for nsqd, (topic, channel) in itertools.product(nsqds, [*UNREAD, *CONSUMERS]):
            nsqd.post("/topic/create", topic=topic)
            nsqd.post("/channel/create", topic=topic, channel=channel)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    async def _run(self) -> None:
        consuming = [asyncio.create_task(self._consume(*channel, share)) for channel, share in CONSUMERS.items()]
        producing = [asyncio.create_task(self._produce(address)) for address in self._addresses]
        await self._stopping.wait()
        for task in (*consuming, *producing):
            task.cancel()
        await asyncio.gather(*consuming, *producing, return_exceptions=True)

    async def _consume(self, topic: str, channel: str, requeued_share: float) -> None:
        async with Consumer(
            topic, channel, nsqd=self._addresses, max_in_flight=30, user_agent=f"{channel}/2.1", dial_timeout="30s"
        ) as consumer:
            async for message in consumer:
                if random.random() < requeued_share:
                    message.requeue(delay=2, backoff=False)
                else:
                    message.finish()

    async def _produce(self, address: str) -> None:
        rounds = itertools.count(1)
        async with Producer(address, dial_timeout="30s") as producer:
            for number in rounds:
                swing = 1 + 0.5 * ((number // 40) % 3)
                for topic, count in MESSAGES_A_ROUND.items():
                    few = max(1, round(count * swing * random.uniform(0.6, 1.2) / len(self._addresses)))
                    await producer.multi_publish(topic, [body(topic, number) for _ in range(few)])
                await asyncio.sleep(ROUND_S)


_serial = itertools.count(1)


def body(topic: str, number: int) -> bytes:
    """Makes something that looks like what people send."""
    serial = next(_serial)
    value: dict[str, Any] = {
        "id": serial,
        "kind": topic.rstrip("s"),
        "user": {"id": serial % 50, "country": random.choice(["DE", "FR", "US", "JP", "BR"])},
        "status": random.choice(["new", "new", "paid", "failed"]),
        "amount": round(random.uniform(3, 400), 2),
        "items": [
            {"sku": f"A-{random.randint(100, 999)}", "count": random.randint(1, 4)} for _ in range(serial % 3 + 1)
        ],
    }
    return json.dumps(value).encode()
