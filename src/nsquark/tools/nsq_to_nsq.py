"""This is the program nsq_to_nsq: it publishes the messages of topics again, to other nsqds."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NoReturn

from nsquark.base.flags import option, option_table
from nsquark.base.kinds import INTEGER, STRING, STRINGS
from nsquark.client.batches import Batch
from nsquark.client.consumer import CLOSE_TIMEOUT_S, Consumer
from nsquark.client.errors import MessageTooBig, NotConnected, NsqError, ServerError
from nsquark.client.message import Message
from nsquark.client.producer import Producer
from nsquark.tools.forwarding import KEEP_TRYING, Failures, NotAccepted, StatusLines
from nsquark.tools.hostpool import make_pool
from nsquark.tools.json_filter import FieldMissing, JsonFilter, NotJson
from nsquark.tools.program import Fatal, parse_options, run, say
from nsquark.tools.sources import (
    CLIENT_OPTIONS,
    ClientOption,
    ConsumeOptions,
    check_sources,
    client_config,
    make_consumer,
    stop_on_signals,
)
from nsquark.wire.names import is_valid_name

EXAMPLE: Final = (
    "nsq_to_nsq --topic=orders --lookupd-http-address=127.0.0.1:4161 --destination-nsqd-tcp-address=10.0.0.5:4150"
)
BATCH_MESSAGES_MAX: Final = 1000
MPUB_BYTES_MAX: Final = 1 << 20
"""An MPUB has at most this many bytes, far below what an nsqd takes in one command; a larger message goes alone."""
REFUSED: Final = frozenset(("E_BAD_MESSAGE", "E_BAD_BODY"))
"""A message that nsqd refuses with one of these codes will be refused at another time too."""
SHOWN_BODY_BYTES_MAX: Final = 1000

Outgoing = tuple[Message, bytes]
"""This is a message and the body that is published for it."""


@option_table
class NsqToNsqOptions(ConsumeOptions):
    topic: list[str] = option(STRINGS, [], "topic to publish again, repeatable")
    channel: str = option(STRING, "nsq_to_nsq", "channel to consume")
    destination_nsqd_tcp_address: list[str] = option(STRINGS, [], "nsqd to publish to, repeatable")
    destination_topic: str = option(STRING, "", "topic to publish to (default: that of the source)")
    mode: str = option(STRING, "hostpool", "which destination is next: hostpool, round-robin, epsilon-greedy")
    status_every: int = option(INTEGER, 250, "messages between status lines; 0 = none")
    require_json_field: str = option(STRING, "", "pass only JSON objects with this field")
    require_json_value: str = option(STRING, "", "pass only those in which it has this value")
    whitelist_json_field: list[str] = option(STRINGS, [], "pass only this field of JSON objects, repeatable")
    producer_opt: list[ClientOption] = option(
        CLIENT_OPTIONS, [], "option for the producers as key,value or key, repeatable (docs/client-reference.md)"
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_forward(parse_options("nsq_to_nsq", NsqToNsqOptions, argv, EXAMPLE)))


async def _forward(options: NsqToNsqOptions) -> None:
    check(options)
    forwarder = NsqForwarder(options)
    consumers = [
        make_consumer("nsq_to_nsq", options, topic, options.channel, auto_touch=True, max_attempts=KEEP_TRYING)
        for topic in options.topic
    ]
    stop_on_signals(consumers)
    try:
        for consumer in consumers:
            await consumer.start()
        await asyncio.gather(*(forwarder.run(consumer) for consumer in consumers))
        await forwarder.end()
    finally:
        await asyncio.gather(*(consumer.close() for consumer in consumers))
        await forwarder.close()


def check(options: NsqToNsqOptions) -> None:
    """Checks that the options fit together, in NSQ's order."""
    if not options.topic or not options.channel:
        raise Fatal("--topic and --channel are required")
    if not all(map(is_valid_name, options.topic)):
        raise Fatal("--topic is invalid")
    if options.destination_topic and not is_valid_name(options.destination_topic):
        raise Fatal("--destination-topic is invalid")
    if not is_valid_name(options.channel):
        raise Fatal("--channel is invalid")
    check_sources(options)
    if not options.destination_nsqd_tcp_address:
        raise Fatal("--destination-nsqd-tcp-address required")


class NsqForwarder:
    """Publishes batches by MPUB, without waiting for one before the next.

    A message is finished when its destination has acknowledged it, and requeued when that failed. The consumers'
    max_in_flight limits how many are under way.
    """

    def __init__(self, options: NsqToNsqOptions) -> None:
        addresses = list(dict.fromkeys(options.destination_nsqd_tcp_address))
        config = client_config("nsq_to_nsq", options.producer_opt)
        self._producers = {
            address: Producer(address, config, outstanding_bytes_max=sys.maxsize) for address in addresses
        }
        self._pool = make_pool(options.mode, addresses)
        self._filter = JsonFilter(options.require_json_field, options.require_json_value, options.whitelist_json_field)
        self._topic = options.destination_topic
        self._failures = Failures(options)
        self._status = StatusLines(options.status_every, addresses)
        self._publishing: set[asyncio.Task[None]] = set()

    async def run(self, consumer: Consumer) -> None:
        """Forwards until the consumer is stopped."""
        topic = self._topic or consumer.topic
        async for batch in consumer.batches(BATCH_MESSAGES_MAX, 0):
            for address, messages in self._dealt(self._wanted(batch)):
                for part in _parts(messages):
                    task = asyncio.create_task(self._publish(address, topic, part))
                    self._publishing.add(task)
                    task.add_done_callback(self._publishing.discard)

    async def end(self) -> None:
        """Waits for the publishes that are under way."""
        if self._publishing:
            await asyncio.wait(self._publishing, timeout=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        await asyncio.gather(*(producer.close() for producer in self._producers.values()))

    def _wanted(self, batch: Batch) -> list[Outgoing]:
        """Returns the messages that the filter lets through, and answers the others."""
        if not self._filter.is_used:
            return [(message, message.body) for message in batch]
        wanted = []
        for message in batch:
            try:
                body = self._filter.apply(message.body)
            except NotJson:
                say(f"ERROR: Unable to decode json: {message.body[:SHOWN_BODY_BYTES_MAX].decode(errors='replace')}")
                message.finish()
            except FieldMissing as error:
                self._failures.conclude([message], NotAccepted(str(error), is_refused=True))
            else:
                if body is None:
                    message.finish()
                else:
                    wanted.append((message, body))
        return wanted

    def _dealt(self, outgoing: list[Outgoing]) -> Iterable[tuple[str, list[Outgoing]]]:
        """Deals messages to destinations, and chooses one for each message."""
        if len(self._producers) == 1:
            return [(next(iter(self._producers)), outgoing)]
        dealt: dict[str, list[Outgoing]] = {}
        for each in outgoing:
            dealt.setdefault(self._pool.choose(), []).append(each)
        return dealt.items()

    async def _publish(self, address: str, topic: str, part: list[Outgoing]) -> None:
        began_s = time.monotonic()
        error = await self._send(self._producers[address], topic, [body for _, body in part])
        is_refused = _is_refused(error)
        if is_refused and len(part) > 1:
            for each in part:  # perhaps only one of them is to blame
                await self._publish(address, topic, [each])
            return
        took_s = time.monotonic() - began_s
        self._pool.mark(address, error is None, took_s, len(part))
        if error is None:
            for message, _ in part:
                message.finish()
        else:
            reason = NotAccepted(f"{address}: {str(error).removeprefix(f'{address}: ')}", is_refused=is_refused)
            self._failures.conclude([message for message, _ in part], reason)
        self._status.took(address, took_s, len(part))
        self._status.took_in_all(took_s, len(part))

    @staticmethod
    async def _send(producer: Producer, topic: str, bodies: list[bytes]) -> NsqError | None:
        """Publishes, and returns the error if there was one.

        After a lost connection it tries a second time: nsqd closes the connection when it refuses a message, and so
        fails those that were sent after it.
        """
        error: NsqError | None = None
        for _ in range(2):
            try:
                if len(bodies) == 1:
                    await producer.publish(topic, bodies[0])
                else:
                    await producer.multi_publish(topic, bodies)
                return None
            except NotConnected as lost:
                error = lost
            except NsqError as other:
                return other
        return error


def _is_refused(error: NsqError | None) -> bool:
    return isinstance(error, MessageTooBig) or (isinstance(error, ServerError) and error.code in REFUSED)


def _parts(outgoing: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
    """Yields the messages in lists that each fit into one MPUB."""
    part: list[Outgoing] = []
    size = 0
    for each in outgoing:
        size += len(each[1])
        if part and size > MPUB_BYTES_MAX:
            yield part
            part, size = [], len(each[1])
        part.append(each)
    if part:
        yield part


if __name__ == "__main__":
    main()
