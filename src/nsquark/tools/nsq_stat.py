"""This is the program nsq_stat: it prints the counters of a channel at intervals, or those of all in a live table."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NoReturn

from nsquark.base.durations import Duration
from nsquark.base.flags import option, option_table
from nsquark.base.kinds import BOOLEAN, DURATION, PARSE_ERROR, STRING, STRINGS, Kind, not_in_a_file
from nsquark.tools.cluster import ChannelCounters, StatCluster, Unanswered, together
from nsquark.tools.output import Output
from nsquark.tools.program import Fatal, parse_options, run

EXAMPLE: Final = "nsq_stat --watch --lookupd-http-address=127.0.0.1:4161"
LINES_PER_HEADER: Final = 25
COUNT_MAX: Final = 2**31 - 1
HEADER: Final = (
    "------rate------+----------------depth----------------+--------------metadata---------------\n"
    "ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients\n"
)


def _parse_count(text: str) -> int | None:
    if not re.fullmatch(r"[+-]?[0-9]{1,10}", text, re.ASCII) or abs(int(text)) > COUNT_MAX:
        raise ValueError(PARSE_ERROR)
    return int(text)


COUNT: Final[Kind[int | None]] = Kind("value", _parse_count, not_in_a_file)


@option_table
class NsqStatOptions:
    version: bool = option(BOOLEAN, False, "print the version and exit")
    topic: str = option(STRING, "", "topic")
    channel: str = option(STRING, "", "channel")
    nsqd_http_address: list[str] = option(STRINGS, [], "nsqd HTTP address, repeatable")
    lookupd_http_address: list[str] = option(STRINGS, [], "nsqlookupd HTTP address, repeatable")
    interval: Duration = option(DURATION, Duration.parse("2s"), "time between reports")
    count: int | None = option(COUNT, None, "number of reports (default: no end)")
    watch: bool = option(BOOLEAN, False, "show all topics and channels in a live table, or those given; q ends it")
    http_client_connect_timeout: Duration = option(DURATION, Duration.parse("2s"), "for connecting")
    http_client_request_timeout: Duration = option(DURATION, Duration.parse("5s"), "for a whole request")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_stat(parse_options("nsq_stat", NsqStatOptions, argv, EXAMPLE)))


async def _stat(options: NsqStatOptions) -> None:
    check(options)
    cluster = StatCluster(
        options.nsqd_http_address,
        options.lookupd_http_address,
        options.http_client_connect_timeout,
        options.http_client_request_timeout,
    )
    if not options.watch:
        await _until_signal(_report(cluster, options))
        return
    if not sys.stdout.isatty():
        raise Fatal("--watch needs a terminal")
    try:
        from nsquark.tools.stat_watch import watch
    except ImportError as error:
        raise Fatal(f"nsq_stat --watch needs {error.name}: pip install 'nsquark[tools]'") from None
    await _until_signal(watch(cluster, options.topic, options.channel, options.interval.seconds, options.count))


def check(options: NsqStatOptions) -> None:
    """Checks that the options fit together, in NSQ's order."""
    if not options.watch and (not options.topic or not options.channel):
        raise Fatal("--topic and --channel are required")
    if options.interval <= 0:
        raise Fatal("--interval should be positive")
    if options.http_client_connect_timeout <= 0:
        raise Fatal("--http-client-connect-timeout should be positive")
    if options.http_client_request_timeout <= 0:
        raise Fatal("--http-client-request-timeout should be positive")
    if options.count is not None and options.count <= 0:
        raise Fatal("--count should be positive")
    if not options.nsqd_http_address and not options.lookupd_http_address:
        raise Fatal("--nsqd-http-address or --lookupd-http-address required")
    if options.nsqd_http_address and options.lookupd_http_address:
        raise Fatal("use --nsqd-http-address or --lookupd-http-address not both")
    for flag, addresses in (("nsqd", options.nsqd_http_address), ("lookupd", options.lookupd_http_address)):
        if any(address.startswith("http") for address in addresses):
            raise Fatal(f"--{flag}-http-address error - address should not contain scheme")


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs the work until it ends, or until SIGHUP, SIGINT or SIGTERM ends it, which is no error."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _report(cluster: StatCluster, options: NsqStatOptions) -> None:
    """Prints a line for each interval. As in NSQ's tool, the first poll is only there to be compared with the next."""
    output = Output()
    before: ChannelCounters | None = None
    polls = 0
    while options.count is None or polls <= options.count:
        now = await _channel(cluster, options)
        if polls % LINES_PER_HEADER == 0:
            await output.write(HEADER.encode())
        if before is not None:
            await output.write(line(before, now, options.interval.seconds).encode())
        before = now
        polls += 1
        await asyncio.sleep(options.interval.seconds)


async def _channel(cluster: StatCluster, options: NsqStatOptions) -> ChannelCounters:
    """Adds up the channel's counters of all nsqds."""
    topic, channel = options.topic, options.channel
    try:
        nsqds = await cluster.nsqds_of(topic)
    except Unanswered as error:
        raise Fatal(f"ERROR: failed to get topic producers - {error}") from None
    try:
        answers = await together("nsqd", (cluster.stats(nsqd, topic) for nsqd in nsqds))
    except Unanswered as error:
        # NSQ's tool first asks the given nsqds whether they have the topic, so its error names that request.
        what = "nsqd stats" if options.lookupd_http_address else "topic producers"
        raise Fatal(f"ERROR: failed to get {what} - {error}") from None
    topics = [each for answer in answers for each in answer if each.topic_name == topic]
    if not topics:
        raise Fatal(f"ERROR: failed to get nsqd stats - failed to query any nsqd: none has topic({topic})")
    found = [each for stats in topics for each in stats.channels or () if each.channel_name == channel]
    if not found:
        raise Fatal(f"ERROR: failed to find channel({channel}) in stats metadata for topic({topic})")
    total = ChannelCounters(channel)
    for each in found:
        total.add(each)
    return total


def line(before: ChannelCounters, now: ChannelCounters, interval_s: float) -> str:
    """Writes a row as NSQ's tool does, with rates over the nominal interval and without fractions."""
    came = now.message_count - before.message_count
    went = came - (now.depth - before.depth)
    memory = now.depth - now.backend_depth
    return (
        f"{int(came / interval_s):7d} {int(went / interval_s):7d}"
        f" | {now.depth:7d} {memory:7d} {now.backend_depth:7d} {now.in_flight_count:5d} {now.deferred_count:5d}"
        f" | {now.requeue_count:7d} {now.timeout_count:7d} {now.message_count:12d} {now.client_count:7d}\n"
    )


if __name__ == "__main__":
    main()
