"""This is the program nsq_to_file: it writes the messages of topics to files, a line for each."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import re2

from nsquark.base.durations import Duration
from nsquark.base.errors import EXIT_FATAL
from nsquark.base.flags import option, option_table
from nsquark.base.hosts import HOSTNAME
from nsquark.base.kinds import BOOLEAN, DURATION, INTEGER, STRING, STRINGS
from nsquark.base.logs import Level, Logger
from nsquark.client.config import parse_option
from nsquark.client.errors import ConfigError, NsqError
from nsquark.client.message import Message
from nsquark.tools.file_log import REV, FileFailed, FileLog, Settings
from nsquark.tools.program import Fatal, on_stop, parse_options_and_rest, run, say
from nsquark.tools.sources import CLIENT_OPTIONS, GATHER_S, ClientOption, ConsumeOptions, check_sources, make_consumer
from nsquark.tools.topics import check_topic_pattern, fetch_topics

EXAMPLE = "nsq_to_file --topic=orders --lookupd-http-address=127.0.0.1:4161 --output-dir=/var/log/orders --gzip"

THREADS_MAX: Final = 8
"""Files have at most this many threads, however many topics there are, since they mostly wait for the same disk."""
GIVE_BACK_S_MAX: Final = 5.0
"""After a failure the program gives messages back for at most this long, and then ends."""


def _lenient(text: str) -> list[ClientOption]:
    try:
        return [parse_option(text)]
    except ConfigError as error:
        say(f"ignoring --consumer-opt={text}: {error}")  # NSQ's tool ignores it too, silently
        return []


_LENIENT_CLIENT_OPTIONS: Final = dataclasses.replace(CLIENT_OPTIONS, from_flag=_lenient)


@option_table
class NsqToFileOptions(ConsumeOptions):
    consumer_opt: list[ClientOption] = option(
        _LENIENT_CLIENT_OPTIONS,
        [],
        "option for the consumer as key,value or key, repeatable (docs/client-reference.md)",
    )
    topic: list[str] = option(STRINGS, [], "topic to write, repeatable")
    topic_pattern: str = option(STRING, "", "write only topics that match; without --topic, all of nsqlookupd that do")
    topic_refresh: Duration = option(DURATION, Duration.parse("1m"), "how often nsqlookupd is asked for topics")
    channel: str = option(STRING, "nsq_to_file", "channel")
    output_dir: str = option(STRING, "/tmp", "directory of the files")
    work_dir: str = option(STRING, "", "directory of files that are being written; default: --output-dir")
    datetime_format: str = option(STRING, "%Y-%m-%d_%H", "strftime format of <DATETIME>")
    filename_format: str = option(
        STRING,
        "<TOPIC>.<HOST><REV>.<DATETIME>.log",
        "file name; <TOPIC>, <HOST>, <PID>, <DATETIME> and <REV>, which is raised while a name is taken, are replaced",
    )
    host_identifier: str = option(STRING, "", "what <HOST> stands for; may have <SHORT_HOST> and <HOSTNAME>")
    gzip: bool = option(BOOLEAN, False, "compress the files")
    gzip_level: int = option(INTEGER, 6, "1 = fastest to 9 = smallest")
    skip_empty_files: bool = option(BOOLEAN, False, "begin no file before there is a message for it")
    rotate_size: int = option(INTEGER, 0, "bytes after which a new file is begun; 0 = never")
    rotate_interval: Duration = option(DURATION, Duration(0), "time after which a new file is begun; 0 = never")
    sync_interval: Duration = option(DURATION, Duration.parse("30s"), "how long messages wait at most for their sync")
    http_client_connect_timeout: Duration = option(DURATION, Duration.parse("2s"), "timeout for connecting by HTTP")
    http_client_request_timeout: Duration = option(DURATION, Duration.parse("5s"), "timeout of an HTTP request")
    log_level: str = option(STRING, "info", "least level to log: debug, info, warn, error, fatal")
    log_prefix: str = option(STRING, "[nsq_to_file] ", "start of each log line")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run(_write_files(*parse_options_and_rest("nsq_to_file", NsqToFileOptions, argv, EXAMPLE)))


async def _write_files(options: NsqToFileOptions, rest: list[str]) -> int:
    if rest:
        raise Fatal(f"unknown arguments: [{' '.join(rest)}]")
    level = _check(options)
    logger = Logger(options.log_prefix, level)
    try:
        await Archive(options, logger).run()
    except FileFailed as error:
        logger.fatal(str(error))
        logger.flush()
        return EXIT_FATAL
    return 0


def _check(options: NsqToFileOptions) -> Level:
    """Checks the options and returns the log level, or raises Fatal, in NSQ's words where it has some."""
    try:
        level = Level.parse(options.log_level)
    except ValueError:
        raise Fatal("--log-level is invalid") from None
    if not options.channel:
        raise Fatal("--channel is required")
    for name in (
        "http_client_connect_timeout",
        "http_client_request_timeout",
        "sync_interval",
        "topic_refresh",
        "max_in_flight",
    ):
        if getattr(options, name) <= 0:
            raise Fatal(f"--{name.replace('_', '-')} should be positive")
    check_sources(options, ".")
    if not 1 <= options.gzip_level <= 9:
        raise Fatal(f"invalid --gzip-level value ({options.gzip_level}), should be 1-9")
    if not options.topic and not options.topic_pattern:
        raise Fatal("--topic or --topic-pattern required")
    if not options.topic and not options.lookupd_http_address:
        raise Fatal("--lookupd-http-address must be specified when no --topic specified")
    check_topic_pattern(options.topic_pattern)
    options.work_dir = options.work_dir or options.output_dir
    _settings(options, "")
    return level


def _settings(options: NsqToFileOptions, topic: str) -> Settings:
    """Makes the settings for the files of a topic from the flags."""
    form = options.filename_format
    is_rotated = options.rotate_size > 0 or options.rotate_interval > 0
    if options.gzip or is_rotated or options.work_dir != options.output_dir:
        if REV not in form:
            raise Fatal(f"missing {REV} in --filename-format when gzip, rotation, or work dir enabled")
    else:
        form = form.replace(REV, "")
    short_host = HOSTNAME.partition(".")[0]
    host = options.host_identifier.replace("<SHORT_HOST>", short_host).replace("<HOSTNAME>", HOSTNAME) or short_host
    form = form.replace("<TOPIC>", topic).replace("<HOST>", host).replace("<PID>", str(os.getpid()))
    if options.gzip and not form.endswith(".gz"):
        form += ".gz"
    return Settings(
        label=f"[{topic}/{options.channel}]",
        filename_format=form,
        datetime_format=options.datetime_format,
        output_dir=options.output_dir,
        work_dir=options.work_dir,
        gzip=options.gzip,
        gzip_level=options.gzip_level,
        rotate_size=options.rotate_size,
        rotate_interval_s=options.rotate_interval.seconds,
    )


class Archive:
    """Writes all topics. Each round begins those that are new, or that could not be begun before."""

    def __init__(self, options: NsqToFileOptions, logger: Logger) -> None:
        self._options = options
        self._logger = logger
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="files")
        self._topics: dict[str, TopicWriter] = {}
        self._skipped: set[str] = set()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A signal or the first failure sets this."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT, and returns when everything is on the disk. It raises FileFailed as soon as
        something cannot be written.
        """
        on_stop(self._stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._close_files)
        refreshing = asyncio.create_task(self._refresh())
        refreshing.add_done_callback(self._ended)
        try:
            await self._end
        except FileFailed:
            await asyncio.wait([asyncio.create_task(self._give_back())], timeout=GIVE_BACK_S_MAX)
            raise
        refreshing.cancel()
        for topic in self._topics.values():
            topic.stop()
        await asyncio.gather(*self._tasks)

    async def _give_back(self) -> None:
        """Gives messages back, so that they are delivered again now, not when they time out."""
        await asyncio.gather(*(topic.give_back() for topic in self._topics.values()))

    def _stop(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    def _close_files(self) -> None:
        for topic in self._topics.values():
            self._spawn(topic.close_file())

    async def _refresh(self) -> None:
        while True:
            for name in await self._wanted():
                if name not in self._topics:
                    await self._begin(name)
            await asyncio.sleep(self._options.topic_refresh.seconds)

    async def _wanted(self) -> list[str]:
        options = self._options
        names = list(dict.fromkeys(options.topic))
        if not names:
            try:
                names = await fetch_topics(
                    options.lookupd_http_address,
                    options.http_client_connect_timeout.seconds,
                    options.http_client_request_timeout.seconds,
                )
            except NsqError as error:
                self._logger.error(f"could not retrieve topic list: {error}")
        return [name for name in names if self._is_matching(name)]

    def _is_matching(self, name: str) -> bool:
        pattern = self._options.topic_pattern
        if not pattern or re2.search(pattern, name):
            return True
        if name not in self._skipped:
            self._skipped.add(name)
            self._logger.warning(f"skipping topic {name} (doesn't match pattern {pattern})")
        return False

    async def _begin(self, name: str) -> None:
        try:
            topic = TopicWriter(name, self._options, self._threads, self._logger)
            await topic.start()
        except NsqError as error:
            self._logger.error(f"couldn't create logger for new topic {name}: {error}")
        else:
            self._topics[name] = topic
            self._spawn(topic.run())


class TopicWriter:
    """Writes one topic: it has its consumer, its files, and the messages between them.

    `_unsynced` has the messages that were written and not synced, at most max-in-flight; a message is finished when the
    sync after its write has returned, never before.
    """

    def __init__(self, topic: str, options: NsqToFileOptions, threads: ThreadPoolExecutor, logger: Logger) -> None:
        self._options = options
        self._threads = threads
        self._logger = logger
        settings = _settings(options, topic)
        self._label = settings.label
        self._files = FileLog(settings, logger)
        self._consumer = make_consumer(
            "nsq_to_file",
            options,
            topic,
            options.channel,
            # Nothing is wrong with a message that comes often, so it must be written and never given up.
            max_attempts="0",
            auto_touch=True,
        )
        self._unsynced: list[Message] = []
        self._using_files = asyncio.Lock()
        self._failure: FileFailed | None = None

    async def start(self) -> None:
        await self._in_thread(self._files.recover)
        await self._consumer.start()

    async def run(self) -> None:
        """Writes until `stop`, and then until all that was written is synced, finished and closed."""
        ticking = asyncio.create_task(self._tick())
        consuming = asyncio.create_task(self._consume())
        done, _ = await asyncio.wait([ticking, consuming], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        ticking.cancel()
        await self.close_file()
        await self._consumer.close()

    def stop(self) -> None:
        self._consumer.stop()

    async def give_back(self) -> None:
        await self._consumer.close(0)

    async def close_file(self) -> None:
        """Syncs and closes the current file; the next message opens one."""
        async with self._using_files:
            await self._sync()
            await self._in_thread(self._files.close)

    async def _consume(self) -> None:
        in_flight_max = self._options.max_in_flight
        async for batch in self._consumer.batches(in_flight_max, GATHER_S):
            async with self._using_files:
                if len(self._unsynced) + len(batch) >= in_flight_max or self._consumer.is_starved:
                    await self._in_thread(self._append_and_sync, batch.bodies)
                    self._unsynced += batch
                    self._finish()
                else:
                    await self._in_thread(self._files.append, batch.bodies)
                    self._unsynced += batch

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._options.sync_interval.seconds)
            async with self._using_files:
                await self._sync()
                await self._in_thread(self._files.rotate_if_due, self._options.skip_empty_files)

    async def _sync(self) -> None:
        if self._unsynced:
            await self._in_thread(self._files.sync)
            self._finish()

    def _append_and_sync(self, bodies: list[bytes]) -> None:
        self._files.append(bodies)
        self._files.sync()

    def _finish(self) -> None:
        self._logger.info(f"{self._label} syncing {len(self._unsynced)} records to disk")
        for message in self._unsynced:
            message.finish()
        self._unsynced.clear()

    async def _in_thread(self, work: Callable[..., None], *args: Any) -> None:
        """Runs work in a thread. After a failure it does nothing any more, since a second sync would succeed although
        the first one has lost something.
        """
        if self._failure is not None:
            raise self._failure
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        except FileFailed as error:
            self._failure = error
            raise


if __name__ == "__main__":
    main()
