"""Declares the flags of the tools that consume from nsqds or nsqlookupds, and makes their consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nsquark.base.flags import option, option_table
from nsquark.base.kinds import BOOLEAN, INTEGER, STRINGS, Kind, not_in_a_file
from nsquark.base.version import NSQ_VERSION, __version__
from nsquark.client.config import Config, parse_option
from nsquark.client.consumer import Consumer
from nsquark.tools.program import Fatal, on_stop

GATHER_S: Final = 0.001
"""Messages wait this long for others that are handled together with them, while more may come."""

ClientOption = tuple[str, str | bool]


CLIENT_OPTIONS: Final[Kind[list[ClientOption]]] = Kind(
    "value", lambda text: [parse_option(text)], not_in_a_file, lambda value: "", repeated=True
)
"""Reads `key,value` or `key`, as go-nsq names them. A mistake in one is a mistake in the flag, with exit code 2."""


@option_table
class ConsumeOptions:
    """Declares the flags of every tool that consumes."""

    version: bool = option(BOOLEAN, False, "print the version and exit")
    nsqd_tcp_address: list[str] = option(STRINGS, [], "nsqd TCP address, repeatable")
    lookupd_http_address: list[str] = option(STRINGS, [], "nsqlookupd HTTP address, repeatable")
    consumer_opt: list[ClientOption] = option(
        CLIENT_OPTIONS, [], "option for the consumer as key,value or key, repeatable (docs/client-reference.md)"
    )
    max_in_flight: int = option(INTEGER, 200, "messages that may be in flight")


def check_sources(options: ConsumeOptions, end: str = "") -> None:
    """Raises Fatal unless there are either nsqds or nsqlookupds; `end` is added to the message if there are neither."""
    if not options.nsqd_tcp_address and not options.lookupd_http_address:
        raise Fatal(f"--nsqd-tcp-address or --lookupd-http-address required{end}")
    if options.nsqd_tcp_address and options.lookupd_http_address:
        raise Fatal("use --nsqd-tcp-address or --lookupd-http-address not both")


def client_config(program: str, given: Sequence[ClientOption]) -> Config:
    """Makes the client's config from the options of a command line; its user agent names the tool."""
    return Config.from_options(dict(given)).replace(user_agent=f"{program}/{NSQ_VERSION} nsquark/{__version__}")


def make_consumer(
    program: str,
    options: ConsumeOptions,
    topic: str,
    channel: str,
    max_in_flight: int = 0,
    *,
    auto_touch: bool = False,
    **defaults: str,
) -> Consumer:
    """Makes a consumer of the tool's sources, and does not start it.

    The flag --max-in-flight wins over --consumer-opt, and that over the tool's own defaults.
    """
    config = client_config(program, [*defaults.items(), *options.consumer_opt])
    return Consumer(
        topic,
        channel,
        nsqd=options.nsqd_tcp_address,
        lookupd=options.lookupd_http_address,
        config=config.replace(max_in_flight=max_in_flight or options.max_in_flight),
        auto_touch=auto_touch,
    )


def stop_on_signals(consumers: Sequence[Consumer]) -> None:
    """Makes SIGINT and SIGTERM stop the consumers once they have handled the messages that they have."""

    def stop() -> None:
        for consumer in consumers:
            consumer.stop()

    on_stop(stop)
