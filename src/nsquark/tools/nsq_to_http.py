"""This is the program nsq_to_http: it sends the messages of a topic to HTTP endpoints."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from nsquark.base.durations import Duration
from nsquark.base.flags import option, option_table
from nsquark.base.kinds import DURATION, FLOAT, INTEGER, STRING, STRINGS
from nsquark.client.message import Message
from nsquark.tools.forwarding import KEEP_TRYING, Failures, NotAccepted, StatusLines
from nsquark.tools.hostpool import make_pool
from nsquark.tools.program import Fatal, parse_options, run
from nsquark.tools.sources import ConsumeOptions, check_sources, make_consumer, stop_on_signals

if TYPE_CHECKING:
    from nsquark.tools.http_sender import HttpSender

EXAMPLE: Final = "nsq_to_http --topic=orders --lookupd-http-address=127.0.0.1:4161 --post=http://127.0.0.1:8080/orders"
CONTENT_TYPE: Final = "application/octet-stream"
ONE_OF_THEM: Final = ("hostpool", "round-robin", "epsilon-greedy")
"""In these modes one endpoint gets a message; in any other mode all of them do."""


@option_table
class NsqToHttpOptions(ConsumeOptions):
    topic: str = option(STRING, "", "topic to send")
    channel: str = option(STRING, "nsq_to_http", "channel to consume")
    n: int = option(INTEGER, 100, "requests at once")
    post: list[str] = option(STRINGS, [], "URL to POST messages to, repeatable")
    get: list[str] = option(STRINGS, [], "URL to GET, with the message in the place of %s, repeatable")
    mode: str = option(STRING, "hostpool", "which URL is next: hostpool, round-robin, epsilon-greedy; other words: all")
    sample: float = option(FLOAT, 1.0, "share of the messages that are sent, 0 to 1")
    content_type: str = option(STRING, CONTENT_TYPE, "Content-Type of a POST")
    header: list[str] = option(STRINGS, [], "header of the requests as 'Name: value', repeatable")
    status_every: int = option(INTEGER, 250, "requests between status lines; 0 = none")
    http_client_connect_timeout: Duration = option(DURATION, Duration.parse("2s"), "for connecting")
    http_client_request_timeout: Duration = option(DURATION, Duration.parse("20s"), "for a whole request")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_forward(parse_options("nsq_to_http", NsqToHttpOptions, argv, EXAMPLE)))


async def _forward(options: NsqToHttpOptions) -> None:
    sender = checked(options)
    failures = Failures(options)
    consumer = make_consumer(
        "nsq_to_http", options, options.topic, options.channel, auto_touch=True, max_attempts=KEEP_TRYING
    )
    stop_on_signals([consumer])
    async with sender, consumer:
        handler = HttpForwarder(options, sender, failures)
        await consumer.run(handler.handle, min(options.n, max(options.max_in_flight, 1)))


def checked(options: NsqToHttpOptions) -> HttpSender:
    """Checks that the options fit together, in NSQ's order, and makes the sender."""
    try:
        from nsquark.tools.http_sender import HttpSender, check_urls, parse_headers
    except ImportError as error:
        raise Fatal(f"nsq_to_http needs {error.name}: pip install 'nsquark[tools]'") from None
    headers = parse_headers(options.header)
    if not options.topic or not options.channel:
        raise Fatal("--topic and --channel are required")
    if options.content_type != CONTENT_TYPE and not options.post:
        raise Fatal("--content-type only used with --post")
    if not options.content_type:
        raise Fatal("--content-type requires a value when used")
    check_sources(options)
    if not options.get and not options.post:
        raise Fatal("--get or --post required")
    if options.get and options.post:
        raise Fatal("use --get or --post not both")
    if any(address.count("%s") != 1 for address in options.get):
        raise Fatal("invalid GET address - must be a printf string")
    check_urls("post" if options.post else "get", options.post or options.get)
    if not 0 <= options.sample <= 1:
        raise Fatal("ERROR: --sample must be between 0.0 and 1.0")
    if options.n < 1:
        raise Fatal("-n should be positive")
    return HttpSender(
        headers=headers,
        content_type=options.content_type if options.post else "",
        connect_timeout=options.http_client_connect_timeout,
        request_timeout=options.http_client_request_timeout,
    )


class HttpForwarder:
    """Sends each message to the endpoint that the pool chooses, or to all."""

    def __init__(self, options: NsqToHttpOptions, sender: HttpSender, failures: Failures) -> None:
        self._addresses = options.post or options.get
        self._pool = make_pool(options.mode, self._addresses)
        self._sends_to_all = options.mode not in ONE_OF_THEM
        self._sample = options.sample
        self._sender = sender
        self._failures = failures
        self._status = StatusLines(options.status_every, self._addresses)

    async def handle(self, message: Message) -> None:
        if self._sample < 1 and random.random() >= self._sample:
            return
        began_s = time.monotonic()
        try:
            for address in self._addresses if self._sends_to_all else (self._pool.choose(),):
                await self._send(address, message.body)
        except NotAccepted as error:
            self._failures.conclude([message], error)
        else:
            self._status.took_in_all(time.monotonic() - began_s)

    async def _send(self, address: str, body: bytes) -> None:
        began_s = time.monotonic()
        try:
            await self._sender.send(address, body)
        except NotAccepted:
            self._pool.mark(address, False)
            raise
        took_s = time.monotonic() - began_s
        self._pool.mark(address, True, took_s)
        self._status.took(address, took_s)


if __name__ == "__main__":
    main()
