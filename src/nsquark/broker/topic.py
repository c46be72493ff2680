"""This is a topic: its log, the pump that says how far channels may read, and the channels."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nsquark.broker.channel import Channel, journal_of
from nsquark.broker.data_path import ListedChannel
from nsquark.broker.deferrals import Deferrals
from nsquark.broker.retention import Retention
from nsquark.broker.slots import Slots
from nsquark.kernel.commits import Commit
from nsquark.log.cursors import ChannelState, TopicState, encode_state
from nsquark.log.segment import Segment
from nsquark.log.tokens import Tokens
from nsquark.log.topic_log import TopicLog
from nsquark.wire.names import is_ephemeral, is_valid_name
from nsquark.wire.record import Bytes

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

DIRECTORY_PREFIX = "t."
"""Stands before the topic's name in a directory's: `.` and `..` are valid topic names."""

MEMORY_CHUNKS_MAX = 32
"""A topic without files looks for what it can forget once it has this many chunks, and every second."""


class TopicExiting(Exception):
    """Says that the topic is being deleted."""

    def __str__(self) -> str:
        return "exiting"


class Topic:
    """Owns a log and its channels. Messages below `pump` are the channels', those from it on the topic's own.

    The pump follows the log's head while the topic has channels, is not paused and knows its channels from nsqlookupd;
    otherwise it stands still. So the first channel gets the backlog, and one made during a pause gets what came during
    it.
    """

    def __init__(self, nsqd: Nsqd, name: str, opened: list[Segment] | None = None) -> None:
        """Opens the topic or makes it; its segments may be `opened` already."""
        self.nsqd = nsqd
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.directory: Path | None = None if self.ephemeral else nsqd.topics_path / f"{DIRECTORY_PREFIX}{name}"
        self.log = TopicLog(nsqd.logs, self.directory, nsqd.turn.write, opened)
        self.log.tail.on_committed = self._on_committed
        self.channels: dict[str, Channel] = {}
        self.listening: dict[Channel, None] = {}
        """Has the channels that a commit has to wake."""
        self.id = secrets.token_hex(8)
        """Names this incarnation: a topic that is deleted and made again has another id."""
        self.paused = False
        self.is_exiting = False
        self.message_count = 0
        self.message_bytes = 0
        self.head_waiters: list[Callable[[], None]] = []
        """Has functions that are called once when the head has moved, or the topic goes."""
        self.pumped = 0
        """Counts the messages that entered the channels since the start."""
        self.pump = self.log.head
        self.is_pump_following = False
        self._deleted_meanwhile: set[str] | None = None
        """Has the channels deleted since nsqlookupd was asked for this topic's, or None while no answer is awaited."""
        self._tokens: Tokens | None = None
        self._is_stored = True
        """Tells whether the cursor file has the topic as it is, or at least was not asked to store it in vain."""
        # A topic that cannot be opened keeps no file open, and none known to the syncer: it will be opened again.
        with contextlib.ExitStack() as undo:
            undo.callback(self.log.discard)
            self.retention = Retention(self)
            undo.callback(self.retention.close)
            self.slots = Slots(name, nsqd.logs, self.directory / "cursors" if self.directory is not None else None)
            undo.callback(self.slots.abandon)
            own = [self.slots.own] if self.slots.own is not None else []
            self.deferrals = Deferrals(self, self.slots.state, [slot.deferred for slot in self.slots.found + own])
            undo.callback(self.deferrals.abandon)
            if self.log.segments is not None:
                self.log.segments.before_remove = self._segment_goes
            if self.directory is not None:
                self.slots.when_mended(self._cursors_mended)
                undo.callback(self._abandon_channels)
                self._restore()
            undo.pop_all()
        self.deferrals.started()

    # -- start and state ---------------------------------------------------------------------------------

    def _abandon_channels(self) -> None:
        for channel in self.channels.values():
            channel.abandon()

    def _restore(self) -> None:
        """Makes the channels as the files have them, and lets the pump stand where it stood."""
        self.id = self.slots.state.id or self.id
        head, first = self.log.head, self.log.extents.first
        slots, state = self.slots, self.slots.state
        listed = self.nsqd.listed_topics.get(self.name)
        self.paused = state.paused if slots.own is not None or listed is None else listed.paused
        for slot in slots.found:
            channel_state = msgspec.msgpack.decode(slot.state, type=ChannelState)
            awaited = self.deferrals.found_from(slot.deferred)
            self.channels[channel_state.name] = Channel(self, slot, channel_state, min(slot.position, head), awaited)
        if slots.are_incomplete and listed is not None:
            self._make_again(listed.channels or [])
        follows = state.follows
        # Nothing may be lost: the channels know themselves how far they are, and without one all is the topic's.
        if slots.own is None:
            follows = bool(self.channels)
            slots.make_own(head if follows else first, self.deferrals.number if follows else 0)
        assert slots.own is not None
        if follows and slots.are_incomplete and not self.channels:  # a new one can be lost before nsqd.dat names it
            follows = False
            slots.own.position, slots.own.deferred = first, 0
        self.deferrals.restore_own(slots.own.deferred)
        # A cursor may be ahead of a log that lost its end with the power; new messages come above both.
        self.pump = head if follows else max(first, min(slots.own.position, head))
        try:
            self._follow()
            slots.repair()
        except OSError as error:  # a full disk: what is there is served all the same
            self.nsqd.logs.disk.failed(error)

    def _make_again(self, listed: list[ListedChannel]) -> None:
        """Makes the channels of which nothing is left, at the oldest message: some come again, none is lost."""
        for entry in listed:
            if entry.name in self.channels or not is_valid_name(entry.name) or is_ephemeral(entry.name):
                continue
            self.nsqd.logger.warning(
                f"TOPIC({self.name}): the position of channel {entry.name} is lost: it is made again at the oldest"
                " message, so messages that were finished come again"
            )
            state = ChannelState(entry.name, entry.paused, entry.owner, had_subscribers=not entry.owner)
            slot = self.slots.new(state, self.log.extents.first, 0)
            awaited = self.deferrals.found_from(0)
            self.channels[entry.name] = Channel(self, slot, state, self.log.extents.first, awaited)
            if slot is not None:
                with contextlib.suppress(OSError):  # on a full disk it is stored with the next thing to note
                    self.slots.store(slot)

    @property
    def listed_channels(self) -> list[ListedChannel]:
        """Returns what nsqd.dat says of the channels."""
        channels = [channel for channel in self.channels.values() if not channel.ephemeral]
        return [ListedChannel(channel.name, channel.paused, channel.owner) for channel in channels]

    @property
    def highest_named(self) -> int:
        """Returns the highest sequence number this topic's files name."""
        positions = [self.log.head, self.slots.own.position if self.slots.own is not None else 0]
        return max(positions + [channel.stored_position for channel in self.channels.values()])

    def _store(self) -> None:
        """Stores the topic's own slot, if it has one."""
        slot, deferrals = self.slots.own, self.deferrals
        if slot is not None:
            slot.position = self.pump
            slot.deferred = deferrals.stored_first
            voided, count = tuple(deferrals.voided), self.slots.count
            follows, removed = self.is_pump_following, deferrals.removed_append
            state = TopicState(self.name, self.paused, follows, voided, removed, count, self.id)
            slot.state, slot.brief = encode_state(state)
            self._is_stored = False
            self.slots.store(slot)
            self._is_stored = True

    def _store_again(self) -> None:
        """Stores what the disk refused: a topic that seems to have channels would lose its messages with a crash."""
        if not self._is_stored:
            try:
                self._store()
            except OSError as error:
                self.nsqd.logs.disk.failed(error)

    @property
    def tokens(self) -> Tokens:
        """Returns the tokens of the appends that happen once; they are read when they are needed first."""
        if self._tokens is None:
            assert self.directory is not None and self.log.segments is not None
            self._tokens = Tokens(self.nsqd.logs, self.directory / "tokens", self.log.segments.tokens)
        return self._tokens

    def _segment_goes(self, segment: Segment) -> None:
        """Remembers elsewhere what goes with a segment: the log tells which deferred messages and appends it has.

        An OSError keeps the segment.
        """
        if segment.tokens:
            self.tokens.store_of(segment)
        if self.deferrals.segment_goes(segment):
            self._store()

    def _cursors_mended(self) -> None:
        """Stores what could not be stored while the cursor file could not be written to."""
        self._store_again()
        for channel in self.channels.values():
            channel.wake()

    # -- publishing --------------------------------------------------------------------------------------

    def publish(self, source: Bytes, pos: int, size: int) -> Commit:
        if self.is_exiting:
            raise TopicExiting
        return self.log.append(source, pos, size, time.time_ns())

    def publish_sized(self, source: Bytes, pos: int, end: int, count: int) -> Commit:
        """Publishes messages that each stand behind their size."""
        if self.is_exiting:
            raise TopicExiting
        return self.log.append_sized(source, pos, end, count, time.time_ns())

    def publish_deferred(self, body: bytes, delay_ms: int) -> Commit:
        if self.is_exiting:
            raise TopicExiting
        return self.deferrals.publish(body, delay_ms)

    def _on_committed(self, messages: int, body_bytes: int) -> None:
        self.nsqd.logs.commit_messages.observe(messages)
        if self.deferrals.appending is None:  # those were counted when they were published
            self.message_count += messages
            self.message_bytes += body_bytes
        if self.is_pump_following:
            self.pumped += messages
            self.pump = self.log.head
            for channel in self.listening:
                self.nsqd.turn.wake(channel)
        elif self.directory is None:
            self._drop_excess()
        if self.directory is None and self.log.chunk_count > MEMORY_CHUNKS_MAX:
            self.collect()
        if self.head_waiters:
            self._wake_head_waiters()

    def _wake_head_waiters(self) -> None:
        waiters, self.head_waiters = self.head_waiters, []
        for waiter in waiters:
            waiter()

    def _drop_excess(self) -> None:
        """Keeps the newest --mem-queue-size messages of an ephemeral topic that nobody reads."""
        extents = self.log.extents
        excess = extents.between(self.pump, self.log.head) - self.nsqd.options.mem_queue_size
        if excess > 0:
            self.pump = extents.nth(extents.ordinal(self.pump) + excess)

    # -- the pump ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Lets the pump follow the head or stand still, as the topic's state asks."""
        follows = bool(self.channels) and not self.paused and self._deleted_meanwhile is None
        if follows and not self.is_pump_following:  # else it is at the head, and thousands would be woken for nothing
            self.pumped += self.log.extents.between(self.pump, self.log.head)
            self.pump = self.log.head
            for channel in self.channels.values():
                channel.pump_follows()
                self.nsqd.turn.wake(channel)
        if not follows and self.is_pump_following:
            self.deferrals.pump_stopped()
        self.is_pump_following = follows
        self._store()

    def await_channels(self) -> None:
        """Keeps messages in a new topic until `bring_channels`, while nsqlookupd is asked for its channels."""
        self._deleted_meanwhile = set()
        self._follow()

    def bring_channels(self, names: Iterable[str]) -> None:
        """Makes the channels that nsqlookupd named, but for those that were deleted since it was asked."""
        try:
            for name in names:
                if name not in (self._deleted_meanwhile or ()):
                    self.channel(name)
        finally:
            self._deleted_meanwhile = None  # not before: the first channel would let the pump go
            self._follow()

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._follow()

    @property
    def depth(self) -> int:
        return self.log.extents.between(self.pump, self.log.head)

    @property
    def backend_depth(self) -> int:
        if self.log.segments is None or self.is_pump_following:
            return 0
        return self.log.extents.between(self.pump, self.log.resident_from)

    def empty(self) -> None:
        """Drops what is the topic's own; what the channels have stays."""
        low, self.pump = self.pump, self.log.head
        self.deferrals.void_own()
        for channel in self.channels.values():
            channel.skip_range(low, self.pump)
        self._store()
        self.collect_emptied(keep_none=self.retention.floor >= self.log.head)

    # -- channels ----------------------------------------------------------------------------------------

    def channel(self, name: str, start: int | None = None) -> Channel:
        """Returns the channel of this name, made if it is not there; `start` is for a new one."""
        found = self.channels.get(name)
        if found is not None:
            return found
        if self.is_exiting:
            raise TopicExiting
        position = self.pump if start is None else min(start, self.log.head)
        awaited = self.deferrals.own.copy()
        state = ChannelState(name)
        if self.directory is not None:
            journal_of(self.nsqd.logs, self.directory, name).delete_leftover()
        slot = self.slots.new(state, position, awaited.first)
        if slot is not None:
            self.slots.store_new(slot)
        channel = self.channels[name] = Channel(self, slot, state, position, awaited)
        if channel.is_trimmed:
            self.listening[channel] = None
        self.nsqd.channel_changed(self, name, created=True)
        self._follow()
        return channel

    def delete_channel(self, name: str) -> bool:
        """Deletes a channel; returns False if there is none. While nsqlookupd is asked for channels, this one is not
        made from its answer.
        """
        if self._deleted_meanwhile is not None:
            self._deleted_meanwhile.add(name)
        channel = self.channels.pop(name, None)
        if channel is None:
            return False
        self.listening.pop(channel, None)
        channel.delete()
        self.nsqd.channel_changed(self, name, created=False)
        if not self.channels:
            self._follow()
            if self.ephemeral:
                self.nsqd.delete_topic(self.name)
        return True

    # -- the end -----------------------------------------------------------------------------------------

    def collect(self, *, newest_too: bool = False, keep_none: bool = False) -> None:
        """Removes what nobody needs, the newest file too if `newest_too`, and what retention keeps if `keep_none`."""
        self.slots.free_again()
        self._store_again()
        self.retention.collect(newest_too=newest_too, keep_none=keep_none)

    def collect_emptied(self, *, keep_none: bool = False) -> None:
        """Removes what was emptied, the newest file too, unless an ephemeral channel still has messages in it."""
        fleeting = [channel for channel in self.channels.values() if channel.ephemeral]
        is_read = any(channel.depth or channel.ledger.in_flight or channel.ledger.deferred for channel in fleeting)
        self.collect(newest_too=not is_read, keep_none=keep_none and not is_read)

    def make_durable(self) -> None:
        """Makes the topic and its channels durable here and now, or raises; to be called when no
        thread uses its files.
        """
        self.slots.make_durable()

    def delete(self) -> None:
        self.is_exiting = self.log.tail.is_closed = True
        self._wake_head_waiters()
        for name in list(self.channels):
            channel = self.channels.pop(name)
            channel.delete()
            self.nsqd.channel_changed(self, name, created=False)
        self.listening.clear()
        self.log.write()  # what was published before gets its OK
        if self.directory is not None:
            self.nsqd.deleted_topics.remember(self.name, self.id, self.log.extents)
        self.log.discard()
        self.deferrals.abandon()
        self.retention.close()
        self.slots.abandon()
        if self.directory is not None:
            self._remove_directory(self.directory)

    def _remove_directory(self, directory: Path) -> None:
        """Renames the topic's directory to one that is to go, and lets a thread make that durable and delete it."""
        logs, doomed = self.nsqd.logs, self.nsqd.doomed_path(directory)
        directory.rename(doomed)
        topics = logs.syncer.forget_directory(directory)

        def work() -> None:
            topics.sync()
            shutil.rmtree(doomed)

        logs.run(work, lambda error: None)  # the next start deletes what is left

    def close(self) -> None:
        """Stops cleanly: everything is written, synced and indexed; a step that fails does not prevent the others."""
        errors: list[OSError] = []
        for step in (*(channel.close for channel in self.channels.values()), self.log.close, self._close_files):
            try:
                step()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _close_files(self) -> None:
        try:
            self.slots.free_again()
            self._store()
            self.deferrals.make_durable()
            self.make_durable()
        finally:
            self.deferrals.close()
            self.retention.close()
            self.slots.close()
