"""Makes consumers for tests, quick in what takes its time by default."""

import asyncio
from typing import Any

from client.pool_rig import address_of
from harness import Nsqd, eventually, nsqd_is_ours, until
from nsquark import Consumer

AFTER_GIVING_BACK = 1 if nsqd_is_ours() else 2
"""A message that went back unhandled comes again as this attempt."""
HANDLE_TIMEOUT_S = 60.0
"""Some handlers take ten seconds for all their messages, and as long again if these time out on a busy machine."""
REST_TIMEOUT_S = 30.0
REST_LOOK_S = 0.01


def consumer_of(nsqd: Nsqd, topic: str, **settings: Any) -> Consumer:
    quick = {
        "max_in_flight": 10,
        "default_requeue_delay": "20ms",
        "backoff_multiplier": "10ms",
        "lookupd_poll_interval": "50ms",
        "output_buffer_timeout": "25ms",
    }
    return Consumer(topic, "ch", nsqd=address_of(nsqd), **{**quick, **settings})


def publish(nsqd: Nsqd, topic: str, *bodies: bytes) -> None:
    """Publishes, and returns when the messages are in the channel: NSQ's nsqd answers before, and the channel would
    seem to be done with.
    """
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    count = nsqd.channel(topic)["message_count"] + len(bodies)
    with nsqd.connect() as wire:
        wire.publish(topic, *bodies)
    eventually(lambda: nsqd.channel(topic)["message_count"] >= count)


def is_done(nsqd: Nsqd, topic: str) -> bool:
    """Tells whether nothing waits, nothing is in flight and nothing comes again. NSQ's nsqd counts a message nowhere
    while it moves it from one to the other, so it is asked twice.
    """
    looks = (nsqd.channel(topic) for _ in range(2))
    return not any(look["depth"] or look["in_flight_count"] or look["deferred_count"] for look in looks)


async def finish_rest(consumer: Consumer, nsqd: Nsqd, topic: str) -> list[tuple[bytes, int]]:
    """Finishes what still comes until nothing is left, and returns body and attempts of each: a message that was
    finished too late for its msg_timeout comes again.
    """
    came: list[tuple[bytes, int]] = []
    async with asyncio.timeout(REST_TIMEOUT_S):
        while not is_done(nsqd, topic):
            message = await consumer.get(REST_LOOK_S)
            if message is not None:
                came.append((message.body, message.attempts))
                message.finish()
    return came


async def handle_until(consumer: Consumer, handler: Any, condition: Any, **settings: Any) -> None:
    running = asyncio.create_task(consumer.run(handler, **settings))
    await until(lambda: condition() or running.done(), HANDLE_TIMEOUT_S)
    await consumer.close()
    await running
