"""Does what nsqd does by the clock: timeouts, due messages, syncs, removal, and looking whether a fault is over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsquark.base.clock import now_ms
from nsquark.broker.topic import DIRECTORY_PREFIX
from nsquark.log.files import write_atomically
from nsquark.log.recovery import open_segments
from nsquark.log.segment import Segment

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

TICK_S = 0.1
"""Timeouts and delays are looked at this often, as in NSQ."""
COLLECT_S = 1.0
PROBE_BYTES = 64 << 10
OPEN_AGAIN_S = 5.0
ROOM_EVERY_S = 0.1
"""All topics are searched at most this often for files that can go while the disk is full."""


class Upkeep:
    """Does the housekeeping of one nsqd. Each step survives a fault in it."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._made_room_s = self._opened_again_s = float("-inf")
        self._is_probing = False
        self._to_open: list[str] = []
        """Has the topics that are being opened again, the one whose files are read now first."""

    async def run(self) -> None:
        """Does each step when it is due, until it is cancelled."""
        nsqd, collected_s = self._nsqd, 0.0
        while True:
            await asyncio.sleep(TICK_S)
            self.guard(self._expire)
            self.guard(self._append_due)
            self.guard(nsqd.logs.syncer.tick)
            elapsed = nsqd.loop.time()
            if elapsed - collected_s >= COLLECT_S:
                collected_s = elapsed
                self.guard(self._follow_clock)
                self.guard(self._collect)
                self.guard(self._probe_disk)
                self.guard(self._open_again)

    def guard(self, step: Callable[[], object]) -> None:
        """Does a step; a fault in it is logged, and the next one is done all the same."""
        try:
            step()
        except Exception as error:
            self._nsqd.logger.error(f"INTERNAL: {type(error).__name__}: {error}")

    def make_room(self, size: int) -> bool:
        """Makes room: finished files go, the newest too, and with --disk-policy=drop-oldest the oldest, read or not."""
        nsqd, now = self._nsqd, self._nsqd.loop.time()
        if now - self._made_room_s >= ROOM_EVERY_S:
            self._made_room_s = now
            for topic in nsqd.topics.values():
                topic.collect(newest_too=True)
        if nsqd.options.disk_policy == "drop-oldest":
            self._drop_oldest(size)
        return nsqd.logs.disk_bytes + size <= nsqd.options.max_disk_bytes

    def _drop_oldest(self, size: int) -> None:
        """Drops whole files, those that are no longer written to before any that is."""
        nsqd = self._nsqd
        found = (topic.log.segments for topic in nsqd.topics.values())
        candidates = [segments for segments in found if segments is not None and len(segments)]
        while candidates and nsqd.logs.disk_bytes + size > nsqd.options.max_disk_bytes:
            oldest = min(candidates, key=lambda segments: (len(segments) == 1, segments.oldest_ns))
            if not oldest.drop_oldest() or not len(oldest):
                candidates.remove(oldest)

    def _expire(self) -> None:
        now = now_ms()
        for topic in self._nsqd.topics.values():
            for channel in topic.channels.values():
                if channel.ledger.earliest <= now:
                    channel.expire(now)

    def _append_due(self) -> None:
        deferring = self._nsqd.deferring
        for topic in list(deferring):
            if not topic.deferrals.tick():
                del deferring[topic]

    def _follow_clock(self) -> None:
        """Follows the clock of due times, which runs on while the machine sleeps; the monotonic clock stands still."""
        offset = self._nsqd.clock.offset_ms()
        for topic in self._nsqd.topics.values():
            for channel in topic.channels.values():
                channel.ledger.wall_offset_ms = offset

    def _collect(self) -> None:
        is_short = self._is_space_short()
        for topic in list(self._nsqd.topics.values()):
            topic.collect(newest_too=is_short)
            for channel in list(topic.channels.values()):
                if channel.is_abandoned:
                    owner = channel.owner
                    self._nsqd.logger.info(f"CHANNEL({channel.name}): its owner {owner} is gone, deleting")
                    topic.delete_channel(channel.name)

    def _is_space_short(self) -> bool:
        """Tells whether files that are finished should go although they are the newest of their topics."""
        options, logs = self._nsqd.options, self._nsqd.logs
        limit = options.max_disk_bytes
        if logs.disk.error is not None or (limit and 2 * logs.disk_bytes > limit):
            return True
        room = os.statvfs(self._nsqd.data.path)
        return room.f_bavail * room.f_frsize < 2 * options.max_bytes_per_file

    def _probe_disk(self) -> None:
        """Finds out after a failed write when there is space again: /ping decides whether clients come."""
        logs, limit = self._nsqd.logs, self._nsqd.options.max_disk_bytes
        if logs.disk.error is None or self._is_probing or (limit and logs.disk_bytes + PROBE_BYTES > limit):
            return
        self._is_probing = True
        probe = self._nsqd.data.own / "probe"

        def work() -> None:  # in a thread, since a disk that is in trouble may take its time
            write_atomically(probe, bytes(PROBE_BYTES))
            probe.unlink()

        def done(error: Exception | None) -> None:
            self._is_probing = False
            try:
                if error is not None:
                    raise error
                logs.sequences.require()
            except Exception as reason:
                logs.disk.failed(reason)
            else:
                logs.disk.worked()

        logs.run(work, done)

    def _open_again(self) -> None:
        """Tries to open topics again, one after another: what kept one from being opened may be over."""
        nsqd, now = self._nsqd, self._nsqd.loop.time()
        if self._to_open or not nsqd.unopened_topics or now - self._opened_again_s < OPEN_AGAIN_S:
            return
        self._opened_again_s = now
        self._to_open = list(nsqd.unopened_topics)
        self._open_next()

    def _open_next(self) -> None:
        """Opens the next topic again. Its log is read in a thread: all of it, where there are no indexes."""
        nsqd, name = self._nsqd, self._to_open[0]
        directory = nsqd.topics_path / f"{DIRECTORY_PREFIX}{name}"
        nsqd.logs.syncer.directory(directory)  # known before the thread asks for it
        opened: list[Segment] = []

        def report(text: str) -> None:
            nsqd.logs.post(lambda: nsqd.logs.report(text))

        def work() -> None:
            if directory.exists():
                opened.extend(open_segments(nsqd.logs, directory, report))

        def segments(error: Exception | None) -> list[Segment]:
            if error is not None:
                raise error
            return opened

        def done(error: Exception | None) -> None:
            del self._to_open[0]
            if nsqd.is_exiting:
                return
            self.guard(lambda: self._opened(name, lambda: segments(error)))
            if self._to_open:
                self._open_next()

        nsqd.logs.run(work, done)

    def _opened(self, name: str, segments: Callable[[], list[Segment]]) -> None:
        nsqd = self._nsqd
        nsqd.load_topic(name, segments)
        if name in nsqd.topics:
            nsqd.logger.info(f"TOPIC({name}): opened")
            for registration in [(name, None), *((name, channel) for channel in nsqd.topics[name].channels)]:
                nsqd.lookup.register(*registration)
