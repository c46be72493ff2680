"""The program nsq_tail: prints the messages of topics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NoReturn

from nsquark.base.flags import option, option_table
from nsquark.base.kinds import BOOLEAN, INTEGER, STRING, STRINGS
from nsquark.client.consumer import Consumer
from nsquark.tools.output import Output
from nsquark.tools.program import Fatal, parse_options, run, say
from nsquark.tools.sources import GATHER_S, SourceOptions, check_sources, make_consumer, stop_on_signals

EXAMPLE = "nsq_tail --topic=orders --lookupd-http-address=127.0.0.1:4161"


@option_table
class Options(SourceOptions):
    topic: list[str] = option(STRINGS, [], "topic to print, repeatable")
    channel: str = option(STRING, "", "channel; without it an ephemeral one that ends with this program")
    n: int = option(INTEGER, 0, "messages of a topic after which to end; 0 = never")
    print_topic: bool = option(BOOLEAN, False, "print the topic before each message")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_tail(parse_options("nsq_tail", Options, argv, EXAMPLE)))


async def _tail(options: Options) -> None:
    check_sources(options)
    if not options.topic:
        raise Fatal("--topic required")
    channel = options.channel or f"tail{random.randrange(1_000_000):06d}#ephemeral"
    in_flight = min(options.max_in_flight, options.n) if options.n > 0 else options.max_in_flight
    consumers = [make_consumer("nsq_tail", options, topic, channel, in_flight) for topic in options.topic]
    output = Output()
    stop_on_signals(consumers)
    for consumer in consumers:
        say(f"Adding consumer for topic: {consumer.topic}")
        await consumer.start()
    printing = [asyncio.create_task(_print(consumer, output, options)) for consumer in consumers]
    try:
        done, _ = await asyncio.wait(printing, return_when=asyncio.FIRST_COMPLETED)
        if not any(task.result() for task in done):
            await asyncio.gather(*printing)
    finally:
        await asyncio.gather(*(consumer.close() for consumer in consumers))


async def _print(consumer: Consumer, output: Output, options: Options) -> bool:
    """Prints until the consumer is stopped, or -n messages are printed: True then."""
    prefix = f"{consumer.topic} | ".encode() if options.print_topic else b""
    left = options.n or float("inf")
    async for batch in consumer.batches(options.max_in_flight, GATHER_S):
        shown = batch[: min(len(batch), int(left))] if options.n else batch
        await output.write(b"".join([b"%b%b\n" % (prefix, message.body) for message in shown]))
        for message in shown:
            message.finish()
        left -= len(shown)
        if left <= 0:
            return True
    return False


if __name__ == "__main__":
    main()
