"""Declares and checks the options of `nsquark tap`."""

from __future__ import annotations

from typing import Final

from nsquark.base.addresses import split_address
from nsquark.base.durations import Duration
from nsquark.base.flags import option, option_table
from nsquark.base.hosts import HOSTNAME
from nsquark.base.kinds import DURATION, INTEGER, LOG_LEVEL, STRING, STRINGS
from nsquark.base.logs import Level
from nsquark.broker.options import DISK_POLICY
from nsquark.tools.program import Fatal
from nsquark.tools.sources import ConsumeOptions, check_sources
from nsquark.tools.topics import check_topic_pattern
from nsquark.wire.names import is_ephemeral, is_valid_name

PROGRAM: Final = "nsquark tap"
EXAMPLE: Final = (
    "nsquark tap --topic-pattern=. --lookupd-http-address=127.0.0.1:4161 --data-path=/var/lib/nsquark-tap"
    " --max-disk-bytes=50000000000"
)


@option_table
class TapOptions(ConsumeOptions):
    """Declares the flags of `nsquark tap`."""

    topic: list[str] = option(STRINGS, [], "topic to tap, repeatable")
    topic_pattern: str = option(STRING, "", "tap all topics of nsqlookupd that match, now and later")
    topic_refresh: Duration = option(
        DURATION,
        Duration.parse("15s"),
        "how often nsqlookupd is asked, and nsqds that were not reached are tried again",
    )
    channel: str = option(STRING, "nsquark_tap", "channel to consume, made on each nsqd if it is not there")
    max_in_flight: int = option(INTEGER, 1000, "messages in flight of each topic of each nsqd")
    data_path: str = option(STRING, "", "existing directory of the logs; empty = the current one")
    http_address: str = option(
        STRING, "0.0.0.0:4181", "host:port that Spark is given as lookupd; the log of each nsqd has a port above it"
    )
    broadcast_address: str = option(STRING, HOSTNAME, "host by which readers reach this one")
    http_allowed_hosts: list[str] = option(
        STRINGS, [], "name HTTP clients may use for this host besides addresses and its own names, repeatable"
    )
    window: int = option(INTEGER, 500000, "messages of each topic of each nsqd whose redelivery is recognised")
    max_bytes_per_file: int = option(INTEGER, 104857600, "bytes of a log file before the next is begun")
    max_disk_bytes: int = option(INTEGER, 0, "most bytes of the logs of each nsqd on disk; 0 = unlimited")
    disk_policy: str = option(
        DISK_POLICY, "reject", "at --max-disk-bytes: reject (take no more until there is room) or drop-oldest"
    )
    retention_time: Duration = option(DURATION, Duration(0), "keep what all channels have read this long; 0 = off")
    retention_bytes: int = option(INTEGER, 0, "keep this many bytes per topic of what all channels have read; 0 = off")
    log_level: Level = option(LOG_LEVEL, Level.INFO, "least level to log: debug, info, warn, error, fatal")


def check(options: TapOptions) -> None:
    """Raises Fatal if the options do not fit together."""
    check_sources(options)
    if not options.topic and not options.topic_pattern:
        raise Fatal("--topic or --topic-pattern required")
    if options.topic_pattern and not options.lookupd_http_address:
        raise Fatal("--topic-pattern needs --lookupd-http-address: an nsqd does not tell its topics by TCP")
    for topic in options.topic:
        if not is_valid_name(topic) or is_ephemeral(topic):
            raise Fatal(f"--topic={topic} is invalid, or ephemeral, of which nothing is kept")
    if not is_valid_name(options.channel) or is_ephemeral(options.channel):
        raise Fatal("--channel is invalid, or ephemeral, of which nothing waits while the tap is stopped")
    for name in ("topic_refresh", "max_in_flight", "window", "max_bytes_per_file"):
        if getattr(options, name) <= 0:
            raise Fatal(f"--{name.replace('_', '-')} should be positive")
    for name in ("max_disk_bytes", "retention_time", "retention_bytes"):
        if getattr(options, name) < 0:
            raise Fatal(f"--{name.replace('_', '-')} must not be negative")
    check_topic_pattern(options.topic_pattern)
    try:
        split_address(options.http_address)
    except ValueError as error:
        raise Fatal(f"--http-address: {error}") from None
