"""Declares the options of nsqlookupd."""

from collections.abc import Sequence
from typing import Final

from nsquark.base.durations import Duration
from nsquark.base.flags import Option, option, option_table, parse, table
from nsquark.base.hosts import HOSTNAME
from nsquark.base.kinds import BOOLEAN, DURATION, LOG_LEVEL, STRING, STRINGS
from nsquark.base.logs import Level
from nsquark.base.version import version_line


@option_table
class LookupdOptions:
    version: bool = option(BOOLEAN, False, "print the version and exit", in_config=False)
    config: str = option(STRING, "", "path of a TOML config file", in_config=False)
    verbose: bool = option(BOOLEAN, False, "deprecated, no effect: use --log-level", in_config=False)
    log_level: Level = option(LOG_LEVEL, Level.INFO, "least level to log: debug, info, warn, error, fatal")
    log_prefix: str = option(STRING, "[nsqlookupd] ", "start of each log line")
    tcp_address: str = option(STRING, "0.0.0.0:4160", "host:port for nsqd connections")
    http_address: str = option(STRING, "0.0.0.0:4161", "host:port for HTTP clients")
    broadcast_address: str = option(STRING, HOSTNAME, "host of this nsqlookupd, told to nsqds")
    inactive_producer_timeout: Duration = option(
        DURATION, Duration.parse("5m"), "silence after which an nsqd is no longer listed"
    )
    tombstone_lifetime: Duration = option(DURATION, Duration.parse("45s"), "time a tombstoned producer stays hidden")

    # -- ours: NSQ has none of them ----------------------------------------------------------------------
    http_allowed_hosts: list[str] = option(
        STRINGS,
        [],
        "name HTTP clients may use for this nsqlookupd besides addresses, names without a dot, its host name and "
        "broadcast address, repeatable or with commas; *.x = all below x, * = any",
    )


SPEC: Final[tuple[Option, ...]] = table(LookupdOptions)


def parse_options(argv: Sequence[str]) -> LookupdOptions:
    return parse("nsqlookupd", LookupdOptions, argv, version_line("nsqlookupd"))
