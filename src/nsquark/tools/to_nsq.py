"""This is the program to_nsq: it publishes what it reads on stdin, a message for each line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

from nsquark.base.flags import option, option_table
from nsquark.base.kinds import INTEGER, STRING, STRINGS
from nsquark.client.errors import MessageTooBig
from nsquark.client.producer import Producer
from nsquark.tools.program import Fatal, on_stop, parse_options, run, say
from nsquark.tools.sources import CLIENT_OPTIONS, ClientOption, client_config

EXAMPLE = "tail -F access.log | to_nsq --topic=hits --nsqd-tcp-address=127.0.0.1:4150"

STDIN_FD: Final = 0
READ_BYTES_MAX: Final = 1 << 20
"""One look at stdin reads at most this many bytes, and an MPUB has no more, unless one line is longer."""
LINE_BYTES_MAX: Final = 256 << 20
PIPELINE_MESSAGES_MAX: Final = 1000
"""At most this many single publishes are sent together."""
OUTSTANDING_RUNS_MAX: Final = 8
"""This many runs may be without an answer; with more, reading waits."""
PROGRESS_S: Final = 0.25


@option_table
class ToNsqOptions:
    topic: str = option(STRING, "", "topic to publish to")
    nsqd_tcp_address: list[str] = option(STRINGS, [], "nsqd TCP address, repeatable: each gets every message")
    delimiter: str = option(STRING, "\n", "byte that ends a message")
    rate: int = option(INTEGER, 0, "messages per second at most; 0 = no limit")
    batch: int = option(INTEGER, 0, "messages to publish by one MPUB at most; 0 = one by one")
    producer_opt: list[ClientOption] = option(
        CLIENT_OPTIONS, [], "option for the producer as key,value or key, repeatable (docs/client-reference.md)"
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_publish_stdin(parse_options("to_nsq", ToNsqOptions, argv, EXAMPLE)))


async def _publish_stdin(options: ToNsqOptions) -> None:
    delimiter = os.fsencode(options.delimiter)
    if not options.topic:
        raise Fatal("--topic required")
    if len(delimiter) != 1:
        raise Fatal("--delimiter must be a single byte")
    if not options.nsqd_tcp_address:
        raise Fatal("--nsqd-tcp-address required")
    destinations = [Destination(address, options) for address in dict.fromkeys(options.nsqd_tcp_address)]
    feeding = _feed(Stdin(delimiter), destinations, options)
    works = [asyncio.create_task(work) for work in (feeding, *(each.count_answers() for each in destinations))]
    progress = asyncio.create_task(_show_progress(destinations)) if _is_watched() else None
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
    except Exception:
        say(f"{_published(destinations)} messages were published before this:")
        raise
    finally:
        for work in filter(None, (*works, progress)):
            work.cancel()
        await asyncio.wait([*works, *filter(None, [progress])])
        for destination in destinations:
            await destination.close()


async def _feed(stdin: Stdin, destinations: Sequence[Destination], options: ToNsqOptions) -> None:
    """Returns when all of stdin is published."""
    on_stop(stdin.stop)
    throttle = Throttle(options.rate)
    async for messages in stdin:
        for run_of_messages in _runs(messages, options.batch or PIPELINE_MESSAGES_MAX):
            await _publish(destinations, run_of_messages, throttle)
    for destination in destinations:
        await destination.all_answered()


async def _publish(destinations: Sequence[Destination], messages: list[bytes], throttle: Throttle) -> None:
    while messages:
        count = await throttle.wait(len(messages))
        now, messages = messages[:count], messages[count:]
        await asyncio.gather(*(destination.send(now) for destination in destinations))


def _published(destinations: Sequence[Destination]) -> int:
    """Returns how many messages every nsqd has acknowledged."""
    return min(destination.published for destination in destinations)


def _runs(messages: list[bytes], count_max: int) -> Iterator[list[bytes]]:
    """Yields messages in runs of at most `count_max`; a message that is longer than READ_BYTES_MAX has a run of its
    own.
    """
    start = 0
    if messages and len(messages[0]) > READ_BYTES_MAX:
        yield messages[:1]
        start = 1
    for at in range(start, len(messages), count_max):
        yield messages[at : at + count_max]


class Destination:
    """Sends every message to one nsqd, in the order of stdin, on one connection, on which nsqd answers in order.

    `published` counts the messages that nsqd has acknowledged, which are always the first of stdin.
    """

    def __init__(self, address: str, options: ToNsqOptions) -> None:
        config = client_config("to_nsq", options.producer_opt)
        self._producer = Producer(address, config, outstanding_bytes_max=sys.maxsize)
        self._topic = options.topic
        self._is_batched = options.batch > 0
        self._unanswered: asyncio.Queue[tuple[list[asyncio.Future[None]], int]] = asyncio.Queue(OUTSTANDING_RUNS_MAX)
        """Has the answers to come for each run, and how many messages they are for."""
        self._has_connected = False
        self.published = 0

    async def send(self, messages: list[bytes]) -> None:
        """Sends messages, and returns when they are on their way and there is room for more."""
        if not self._has_connected:
            await self._producer.ping()  # now the largest message that nsqd takes is known
            self._has_connected = True
        if self._is_batched:
            await self._send_batch(messages)
        else:
            await self._send_singly(messages)
        if len(messages[0]) > READ_BYTES_MAX:
            await self.all_answered()  # so that only one message this long is under way

    async def _send_singly(self, messages: list[bytes]) -> None:
        answers: list[asyncio.Future[None]] = []
        try:
            for message in messages:
                answers.append(self._producer.publish_nowait(self._topic, message))
        except MessageTooBig:
            await self._unanswered.put((answers, len(answers)))
            await self.all_answered()
            raise
        await self._unanswered.put((answers, len(answers)))

    async def _send_batch(self, messages: list[bytes]) -> None:
        """Sends a batch. One that is too big for an MPUB is halved, so that all messages before one that is too big by
        itself are published.
        """
        try:
            answer = self._producer.multi_publish_nowait(self._topic, messages)
        except MessageTooBig:
            if len(messages) == 1:
                await self.all_answered()
                raise
            middle = len(messages) // 2
            await self._send_batch(messages[:middle])
            await self._send_batch(messages[middle:])
        else:
            await self._unanswered.put(([answer], len(messages)))

    async def count_answers(self) -> NoReturn:
        """Counts the messages that nsqd acknowledges, and raises the first failure as soon as it is known."""
        while True:
            answers, count = await self._unanswered.get()
            try:
                for answer in answers:
                    await answer
            except Exception:
                self.published += sum(1 for answer in answers if answer.done() and answer.exception() is None)
                raise
            self.published += count
            self._unanswered.task_done()

    async def all_answered(self) -> None:
        await self._unanswered.join()

    async def close(self) -> None:
        await self._producer.close()
        while not self._unanswered.empty():
            for answer in self._unanswered.get_nowait()[0]:
                answer.exception()  # only the first failure is reported, and asyncio must not warn of the others


class Stdin:
    """Reads messages from stdin, as many at a time as are there, until its end or `stop`.

    The next piece is read, in a thread, while the last one is being published. What follows the last delimiter is a
    message too.
    """

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stdin")
        self._stopped = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Future[bytes] | None = None
        self._is_at_end = False

    def stop(self) -> None:
        """Stops reading. Whole messages that were read are still returned; the beginning of one is not."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def __aiter__(self) -> Stdin:
        return self

    async def __anext__(self) -> list[bytes]:
        while not self._is_at_end:
            messages = self._split(await self._piece())
            if messages:
                return messages
        raise StopAsyncIteration

    async def _piece(self) -> bytes:
        """Returns the next piece of stdin. It is empty at the end, and after a stop it has only whole messages."""
        loop = asyncio.get_running_loop()
        reading = self._reading or loop.run_in_executor(self._thread, self._read)
        self._reading = None
        await asyncio.wait([reading, self._stopped], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            self._is_at_end = True
            self._rest.clear()
            return b""
        piece = reading.result()
        self._is_at_end = not piece
        if self._stopped.done():
            self._is_at_end = True
            piece = piece[: piece.rfind(self._delimiter) + 1]
            if not piece:
                self._rest.clear()
            return piece
        if piece:
            self._reading = loop.run_in_executor(self._thread, self._read)
        return piece

    def _read(self) -> bytes:
        """Waits until there is something to read, and then reads all that is there."""
        try:
            pieces = [os.read(STDIN_FD, READ_BYTES_MAX)]
            size = len(pieces[0])
            while pieces[-1] and size < READ_BYTES_MAX and select.select([STDIN_FD], [], [], 0)[0]:
                pieces.append(os.read(STDIN_FD, READ_BYTES_MAX - size))
                size += len(pieces[-1])
        except OSError as error:
            raise Fatal(f"failed to read from stdin - {error.strerror}") from None
        return b"".join(pieces)

    def _split(self, piece: bytes) -> list[bytes]:
        """Returns the messages that end in this piece and, at the end of stdin, what is left. As in NSQ, empty ones are
        skipped.
        """
        if self._delimiter not in piece and not self._is_at_end:
            self._rest.append(piece)
            self._rest_bytes += len(piece)
            if self._rest_bytes > LINE_BYTES_MAX:
                raise Fatal(f"a message on stdin is longer than {LINE_BYTES_MAX} bytes: is --delimiter right?")
            return []
        messages = b"".join([*self._rest, piece]).split(self._delimiter)
        self._rest = [messages.pop()] if not self._is_at_end else []
        self._rest_bytes = sum(map(len, self._rest))
        return list(filter(None, messages))


class Throttle:
    """This is NSQ's token bucket: it begins with one token, gets one each 1/rate seconds, and saves at most `rate`."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._tokens = 1.0
        self._at_s = time.monotonic()

    async def wait(self, wanted: int) -> int:
        """Waits until at least one message may go, and returns how many may, at most `wanted`."""
        if self._rate < 1:
            return wanted
        while True:
            now_s = time.monotonic()
            self._tokens = min(float(self._rate), self._tokens + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
            if self._tokens >= 1:
                count = min(wanted, int(self._tokens))
                self._tokens -= count
                return count
            await asyncio.sleep((1 - self._tokens) / self._rate)


def _is_watched() -> bool:
    """Tells whether to show progress: stderr is a terminal, and the messages are not typed there."""
    return os.isatty(2) and not os.isatty(STDIN_FD)


async def _show_progress(destinations: Sequence[Destination]) -> None:
    started_s = time.monotonic()

    def show(end: str) -> None:
        count = _published(destinations)
        rate = count / max(time.monotonic() - started_s, 0.001)
        with contextlib.suppress(OSError):
            os.write(2, f"\r\x1b[K{count:,} messages published, {rate:,.0f}/s{end}".encode())

    try:
        while True:
            await asyncio.sleep(PROGRESS_S)
            show("")
    finally:
        show("\n")


if __name__ == "__main__":
    main()
