"""This is the program nsq_tail: it prints messages as they come or, from our nsqds, from a point in their logs on."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, NoReturn

import msgspec

from nsquark.base.addresses import join_address
from nsquark.base.flags import option, option_table
from nsquark.base.kinds import BOOLEAN, INTEGER, STRING, STRINGS
from nsquark.client.consumer import Consumer
from nsquark.client.errors import Closed, LookupFailed
from nsquark.client.lookupd import lookup
from nsquark.client.message import Message
from nsquark.tools.log_tail import LogTail, Record, Start
from nsquark.tools.output import Output
from nsquark.tools.program import Fatal, on_stop, parse_options, run, say
from nsquark.tools.sources import (
    GATHER_S,
    ConsumeOptions,
    check_sources,
    client_config,
    make_consumer,
    stop_on_signals,
)

PROGRAM: Final = "nsq_tail"
EXAMPLE: Final = "nsq_tail --topic=orders --lookupd-http-address=127.0.0.1:4161"


@option_table
class NsqTailOptions(ConsumeOptions):
    topic: list[str] = option(STRINGS, [], "topic to print, repeatable")
    channel: str = option(STRING, "", "channel; without it an ephemeral one that ends with this program")
    n: int = option(INTEGER, 0, "messages of a topic after which to end; 0 = never")
    print_topic: bool = option(BOOLEAN, False, "print the topic before each message")
    json: bool = option(BOOLEAN, False, "print a JSON object for each message")
    from_: str = option(
        STRING,
        "",
        "begin in the past: oldest, a sequence number, a time or -10m; reads logs of nsquark's nsqds, not a channel",
    )
    nsqd_http_address: list[str] = option(STRINGS, [], "nsqd HTTP address for --from, repeatable")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    options = parse_options(PROGRAM, NsqTailOptions, argv, EXAMPLE)
    run(_tail_logs(options) if options.from_ else _tail_channels(options))


class Printer:
    """Prints the messages of one topic to stdout, at most `-n` of them."""

    def __init__(self, topic: str, options: NsqTailOptions, output: Output) -> None:
        self._topic = topic
        self._prefix = f"{topic} | ".encode() if options.print_topic else b""
        self._is_json = options.json
        self._output = output
        self.left = options.n if options.n > 0 else None
        """This many messages are still to be printed; None means all that come."""
        self._printing = asyncio.Lock()

    @property
    def is_done(self) -> bool:
        return self.left == 0

    async def print_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Prints messages and returns those it printed; the others are given back when the consumer closes."""
        async with self._printing:
            shown: Sequence[Message] = self._within_count(messages)
            if self._is_json:
                await self._write(self._object(m.timestamp, m.attempts, m.id, m.body) for m in shown)
            else:
                await self._write(message.body for message in shown)
        return shown

    async def print_records(self, records: Sequence[Record]) -> None:
        async with self._printing:
            shown = self._within_count(records)
            if self._is_json:
                await self._write(self._object(*raw, seq=seq) for seq, *raw in shown)
            else:
                await self._write(record[-1] for record in shown)

    def _within_count(self, found: Sequence[Any]) -> Sequence[Any]:
        if self.left is None:
            return found
        shown = found[: self.left]
        self.left -= len(shown)
        return shown

    async def _write(self, lines: Iterable[bytes]) -> None:
        prefix = b"" if self._is_json else self._prefix
        data = b"".join([b"%b%b\n" % (prefix, line) for line in lines])
        if data:
            await self._output.write(data)

    def _object(self, timestamp: int, attempts: int, message_id: bytes, body: bytes, **more: int) -> bytes:
        """Writes a message as a JSON object, with its body as text if it is UTF-8, else as `body_base64`."""
        fields: dict[str, object] = {"topic": self._topic, "timestamp": timestamp, **more}
        fields |= {"id": message_id.decode("ascii", "backslashreplace"), "attempts": attempts}
        try:
            fields["body"] = body.decode()
        except UnicodeDecodeError:
            fields["body_base64"] = base64.b64encode(body).decode()
        return msgspec.json.encode(fields)


# -- channels --------------------------------------------------------------------------------------------


async def _tail_channels(options: NsqTailOptions) -> None:
    check_sources(options)
    if not options.topic:
        raise Fatal("--topic required")
    channel = options.channel or f"tail{random.randrange(1_000_000):06d}#ephemeral"
    in_flight = min(options.max_in_flight, options.n) if options.n > 0 else options.max_in_flight
    consumers = [make_consumer(PROGRAM, options, topic, channel, in_flight) for topic in options.topic]
    stop_on_signals(consumers)
    output = Output()
    try:
        for consumer in consumers:
            say(f"Adding consumer for topic: {consumer.topic}")
            await consumer.start()
        printers = [Printer(consumer.topic, options, output) for consumer in consumers]
        await _until_one_is_done(
            [
                _print_channel(consumer, printer, in_flight)
                for consumer, printer in zip(consumers, printers, strict=True)
            ]
        )
    except Closed:
        pass  # a signal came while it was starting
    finally:
        await asyncio.gather(*(consumer.close() for consumer in consumers))


async def _print_channel(consumer: Consumer, printer: Printer, in_flight: int) -> bool:
    """Prints a channel; it returns True when -n messages are printed, and False when the consumer was stopped."""
    async for batch in consumer.batches(max(in_flight, 1), GATHER_S):
        shown = await printer.print_messages(batch)
        if printer.left is not None and printer.left < in_flight:
            # This comes before the FINs, so that nsqd does not send messages that would only be given back.
            consumer.change_max_in_flight(printer.left)
        for message in shown:
            message.finish()
        if printer.is_done:
            return True
    return False


async def _until_one_is_done(works: Sequence[Coroutine[Any, Any, bool]]) -> None:
    """Returns when one of the works returns True, or all have ended. It raises the first error of any."""
    tasks = {asyncio.create_task(work) for work in works}
    try:
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                return
    finally:
        for task in tasks:
            task.cancel()


# -- logs ------------------------------------------------------------------------------------------------


async def _tail_logs(options: NsqTailOptions) -> None:
    start = Start.parse(options.from_)
    if not options.topic:
        raise Fatal("--topic required")
    if not options.nsqd_http_address and not options.lookupd_http_address:
        raise Fatal("--nsqd-http-address or --lookupd-http-address required with --from")
    stopped = asyncio.get_running_loop().create_future()
    on_stop(lambda: stopped.set_result(None))
    output = Output()
    topics = [LogTopic(topic, start, options, Printer(topic, options, output)) for topic in options.topic]
    tailing = asyncio.create_task(_until_one_is_done([topic.run() for topic in topics]))
    await asyncio.wait([tailing, stopped], return_when=asyncio.FIRST_COMPLETED)
    if tailing.done():
        tailing.result()


class LogTopic:
    """Prints a topic of all its nsqds: those that were given, and those that nsqlookupds know, which are asked again
    and again.
    """

    def __init__(self, topic: str, start: Start, options: NsqTailOptions, printer: Printer) -> None:
        self._topic = topic
        self._start = start
        self._options = options
        self._printer = printer
        self._config = client_config(PROGRAM, options.consumer_opt)
        self._tasks: dict[str, asyncio.Task[bool]] = {}

    async def run(self) -> bool:
        """Prints without end, or until -n messages are printed, and then returns True."""
        try:
            while True:
                for address in await self._addresses():
                    if address not in self._tasks:
                        self._tasks[address] = asyncio.create_task(self._print(address))
                interval_s = self._config.lookupd_poll_interval.seconds
                if not self._tasks:
                    await asyncio.sleep(min(interval_s, 1.0))
                    continue
                done, _ = await asyncio.wait(
                    self._tasks.values(), timeout=interval_s, return_when=asyncio.FIRST_COMPLETED
                )
                if any(task.result() for task in done):
                    return True
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _addresses(self) -> list[str]:
        found = list(self._options.nsqd_http_address)
        for lookupd in self._options.lookupd_http_address:
            try:
                nsqds = await lookup(lookupd, self._topic, self._config)
            except LookupFailed as error:
                say(f"error querying nsqlookupd ({lookupd}) - {error}")
            else:
                found += [join_address(nsqd.broadcast_address, nsqd.http_port) for nsqd in nsqds]
        return list(dict.fromkeys(found))

    async def _print(self, address: str) -> bool:
        async for records in LogTail(address, self._topic, self._start, self._config).records():
            await self._printer.print_records(records)
            if self._printer.is_done:
                return True
        return False


if __name__ == "__main__":
    main()
