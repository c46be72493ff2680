"""Runs Taskiq on NSQ: `pip install nsquark[taskiq]`, then `broker = NsqBroker("127.0.0.1:4150")`.

A task is a message of one topic, and the workers share one channel of it. A message is finished when Taskiq
acknowledges its task, by default after the result was saved; until then it is touched. A task that takes longer than
nsqd's `--max-msg-timeout` (15 minutes by default) is begun again all the same, by this worker or another, while the
first one still works on it. If a worker dies, nsqd gives its tasks to another. The label `delay` defers a task by
seconds, at most nsqd's `--max-req-timeout` (an hour by default).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final, Unpack

from nsquark.base.extras import needs
from nsquark.client.checks import check_addresses, check_name
from nsquark.client.config import Config, Options
from nsquark.client.consumer import Consumer
from nsquark.client.errors import ConfigError, NsqError
from nsquark.client.pool import ProducerPool

with needs("taskiq"):
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage

DELAY_LABEL = "delay"
MAX_IN_FLIGHT: Final = 100


class NsqBroker(AsyncBroker):
    """This is a Taskiq broker. It publishes tasks to any of the nsqds, and takes them from all.

    nsqd: one or several `host:port` of nsqds.
    lookupd: HTTP addresses of nsqlookupds, instead of nsqds or beside them.
    topic: the topic of the tasks.
    channel: the channel that the workers share.
    config: options of the client, which `options` override; max_in_flight is 100 unless it is given.
    """

    def __init__(
        self,
        nsqd: Iterable[str] | str = (),
        *,
        lookupd: Iterable[str] | str = (),
        topic: str = "taskiq",
        channel: str = "workers",
        config: Config | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_name("topic", topic)
        check_name("channel", channel)
        self.topic = topic
        self.channel = channel
        self._config = Config.merge(config, options, {"max_in_flight": MAX_IN_FLIGHT})
        self._nsqds = check_addresses("nsqd", nsqd)
        self._lookupds = check_addresses("lookupd", lookupd)
        self._producer: ProducerPool | None = None
        self._consumer: Consumer | None = None

    async def startup(self) -> None:
        """Makes the producer of tasks and, in a worker, subscribes to them."""
        await super().startup()
        self._producer = ProducerPool(self._nsqds, lookupd=self._lookupds, config=self._config)
        if self.is_worker_process:
            self._consumer = await self._subscribed()

    async def shutdown(self) -> None:
        """Gives back the tasks that were not acknowledged, and disconnects."""
        await super().shutdown()
        consumer, self._consumer = self._consumer, None
        producer, self._producer = self._producer, None
        if consumer is not None:
            await consumer.close()
        if producer is not None:
            await producer.close()

    async def kick(self, message: BrokerMessage) -> None:
        """Publishes a task.

        message: the task as Taskiq wrote it.
        """
        if self._producer is None:
            raise NsqError("the broker is not started: await its `startup` first")
        delay: Any = message.labels.get(DELAY_LABEL)
        if delay is None:
            await self._producer.publish(self.topic, message.message)
        else:
            await self._producer.deferred_publish(self.topic, _seconds_of(delay), message.message)

    async def listen(self) -> AsyncGenerator[bytes | AckableMessage, None]:
        """Yields tasks until the broker is shut down."""
        if self._consumer is None:
            self._consumer = await self._subscribed()
        async for message in self._consumer:
            yield AckableMessage(data=message.body, ack=message.finish)

    async def _subscribed(self) -> Consumer:
        consumer = Consumer(
            self.topic,
            self.channel,
            nsqd=self._nsqds,
            lookupd=self._lookupds,
            config=self._config,
            auto_touch=True,
        )
        return await consumer.start()


def _seconds_of(delay: Any) -> float:
    """Reads a label, which Taskiq may have turned into a text."""
    try:
        return float(delay)
    except (TypeError, ValueError):
        raise ConfigError(f"the label {DELAY_LABEL} of a task is {delay!r}: give seconds") from None
