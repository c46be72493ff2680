"""Taps one topic of one nsqd: it stores each message of its channel once, and only then finishes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from nsquark.base.logs import Logger
from nsquark.broker.http.commits import settled
from nsquark.broker.topic import Topic
from nsquark.client.batches import Batch
from nsquark.client.consumer import Consumer
from nsquark.client.errors import NsqError
from nsquark.client.message import Message
from nsquark.tap.frames import FrameAppend, Numbers
from nsquark.tap.options import TapOptions
from nsquark.tap.tap_log import TapLog
from nsquark.tap.window import IdReader, IdWindow, window_start
from nsquark.tools.sources import GATHER_S, client_config

GROUP_BYTES_MAX: Final = 16 << 20
"""At most this many bytes of bodies are appended and synced together; a larger message goes alone."""
ROOM_CHECK_S: Final = 0.5
"""While the log cannot be written to, its disk is checked this often."""
CONSUMER_DEFAULTS: Final = (
    # A message is finished once it is stored, so none is ever given up, however often it was delivered.
    ("max_attempts", "0"),
    # This is short, so that what a killed tap had in flight comes again while the window still has its ids.
    ("msg_timeout", "5s"),
    # A lost nsqd is tried again at least this often; nsqlookupd is not asked here.
    ("lookupd_poll_interval", "15s"),
)


class TopicTap:
    """Consumes a topic into a log. Always: a message that is finished, or whose id the window has, was synced to it.

    `stored` counts the messages that were appended, `repeated` those that were dropped because the log had them.
    """

    def __init__(self, log: TapLog, address: str, topic: str, options: TapOptions, logger: Logger) -> None:
        self._log = log
        self._logger = logger
        self._name = topic
        self._label = f"TAP({address}/{topic})"
        self._window = IdWindow(options.window)
        self._group_messages_max = max(1, options.max_in_flight // 2)
        """It is half of what may be in flight, so that more comes while a group is synced."""
        config = client_config("nsquark_tap", [*CONSUMER_DEFAULTS, *options.consumer_opt])
        self._consumer = Consumer(
            topic,
            options.channel,
            nsqd=address,
            config=config.replace(max_in_flight=options.max_in_flight),
            auto_touch=True,
        )
        self._is_stopping = False
        self.stored = self.repeated = 0

    @property
    def is_connected(self) -> bool:
        return bool(self._consumer.connections)

    @property
    def is_paused(self) -> bool:
        """Tells whether no messages are taken, because the log cannot be written to."""
        return self._consumer.is_paused

    async def run(self) -> None:
        """Runs until `stop`; raises NsqError if the nsqd cannot be reached at first, or is not an nsqd."""
        topic = self._log.topic(self._name)
        await self._read_window(topic)
        numbers = Numbers(self._log.logs.sequences)
        try:
            await self._consumer.start()
            async for batch in self._consumer.batches(self._group_messages_max, GATHER_S):
                for group in _groups(batch):
                    await self._store(topic, numbers, group)
        finally:
            await self._consumer.close()

    def stop(self) -> None:
        self._is_stopping = True
        self._consumer.stop()

    async def _read_window(self, topic: Topic) -> None:
        """Fills the window from the end of the log, nearly as it was when the last tap of this topic ended."""
        reader = IdReader(topic.log, self._window.messages_min)
        self._window.add(await self._log.loop.run_in_executor(None, reader.ids))
        self._guard_window(topic)
        if len(self._window):
            self._logger.info(f"{self._label}: the log has the ids of the last {len(self._window)} messages")

    async def _store(self, topic: Topic, numbers: Numbers, group: Sequence[Message]) -> None:
        """Stores the new messages of a group and finishes all; if the log fails, gives all back and waits for room."""
        new: dict[bytes, Message] = {}
        for message in group:
            if not message.id.isalnum():
                raise NsqError(f"{message.nsqd_address}: {message.id!r} is no message id of NSQ")
            if message.id not in self._window:
                new.setdefault(message.id, message)
        error = await self._append(topic, numbers, list(new.values())) if new else None
        if error is not None:
            await self._wait_for_room(group, error)
            return
        self._window.add(new)
        self._guard_window(topic)
        self.stored += len(new)
        self.repeated += len(group) - len(new)
        for message in group:
            message.finish()

    async def _append(self, topic: Topic, numbers: Numbers, messages: list[Message]) -> Exception | None:
        """Appends and syncs messages; returns the error if that fails."""
        try:
            work = FrameAppend(messages, numbers.next(len(messages)))
        except OSError as error:  # sequence numbers are reserved on the disk too
            self._log.logs.disk.failed(error, len(messages))
            return error
        commit = topic.log.append_threaded(work, messages[-1].timestamp)
        await settled(commit)
        return commit.error

    def _guard_window(self, topic: Topic) -> None:
        """Keeps the messages of the window in the log, even if all channels are done with them."""
        topic.retention.guarded_from = window_start(topic.log, self._window.messages_min)

    async def _wait_for_room(self, group: Sequence[Message], error: Exception) -> None:
        """Sends RDY 0, gives back the messages at hand, and waits until the log can be written to."""
        self._consumer.pause()
        self._logger.warning(f"{self._label}: no more is taken (RDY 0) - {error}")
        # Memory has the windows, so their messages on the disk may make room for new ones.
        for topic in self._log.topics.values():
            topic.retention.guarded_from = None
        for message in group:
            message.give_back()
        while self._log.logs.disk.error is not None:
            # This is repeated, since messages that nsqd sent before it saw RDY 0 may still come.
            while (more := await self._consumer.get(timeout=0)) is not None:
                more.give_back()
            if self._is_stopping:
                return
            await asyncio.sleep(ROOM_CHECK_S)
        self._logger.info(f"{self._label}: messages are taken again")
        self._consumer.unpause()


def _groups(batch: Batch) -> Iterator[Sequence[Message]]:
    """Splits a batch into parts of at most GROUP_BYTES_MAX bytes; a larger message is a part by itself."""
    start, size = 0, 0
    for index, message in enumerate(batch):
        size += len(message.body)
        if size > GROUP_BYTES_MAX and index > start:
            yield batch[start:index]
            start, size = index, len(message.body)
    yield batch[start:]
