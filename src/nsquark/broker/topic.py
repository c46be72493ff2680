"""A topic: its log, the pump that says how far channels may read, and the channels."""

from __future__ import annotations

import contextlib
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nsquark.broker.channel import Channel
from nsquark.broker.data_path import ListedChannel
from nsquark.kernel.commits import Commit
from nsquark.log.cursors import ChannelState, CursorFile, Slot, TopicState, encode_state
from nsquark.log.deferred import DeferredMessages, Due
from nsquark.log.deferred_appends import Appends
from nsquark.log.outliving import KEPT_MESSAGES_MAX, Generation, KeptInMemory, KeptMessages
from nsquark.log.segment import Segment
from nsquark.log.segments import Segments, read_records
from nsquark.log.tokens import Tokens
from nsquark.log.topic_log import TopicLog
from nsquark.wire.batch_format import DEFERRED
from nsquark.wire.names import is_ephemeral, is_valid_name

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

DIRECTORY_PREFIX = "t."
"""`.` and `..` are valid topic names."""

MEMORY_CHUNKS_MAX = 32
"""A topic without files looks for what it can forget once it has this many chunks, and every second."""

Buffer = bytes | bytearray | memoryview


class TopicExiting(Exception):
    """The topic is being deleted."""

    def __str__(self) -> str:
        return "exiting"


class Topic:
    """Messages below `pump` are the channels', those from it on the topic's own.

    The pump follows the log's head while the topic has channels, is not paused and knows its channels from nsqlookupd;
    otherwise it stands still. So the first channel gets the backlog, and one made during a pause what that held back.
    """

    def __init__(self, nsqd: Nsqd, name: str) -> None:
        self.nsqd = nsqd
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.directory: Path | None = None if self.ephemeral else nsqd.topics_path / f"{DIRECTORY_PREFIX}{name}"
        self.log = TopicLog(nsqd.logs, self.directory, nsqd.turn.write)
        self.log.tail.on_committed = self._on_committed
        self.channels: dict[str, Channel] = {}
        self.listening: dict[Channel, None] = {}
        """The channels that a commit has to visit."""
        self.paused = False
        self.is_exiting = False
        self.message_count = 0
        self.message_bytes = 0
        self.head_waiters: list[Callable[[], None]] = []
        """Called once when the head has moved, or the topic goes."""
        self.pumped = 0
        """Messages that entered the channels since the start."""
        self.pump = self.log.head
        self._pump_deferred = 0
        self._own_deferred = 0
        """Deferred messages that wait and belong to no channel yet."""
        self._follows = False
        self._deleted_meanwhile: set[str] | None = None
        """The channels deleted since nsqlookupd was asked for those of this topic; None while no answer is awaited."""
        self._appending: tuple[Due, list[int], list[int]] | None = None
        self.kept = KeptMessages(nsqd.logs, self.directory / "kept") if self.directory is not None else KeptInMemory()
        self._is_keeping = False
        self._cursors = CursorFile(nsqd.logs, self.directory / "cursors") if self.directory is not None else None
        self._slot: Slot | None = None
        self._unfreed: list[Slot] = []
        """Of deleted channels that are still in the file."""
        self._tokens: Tokens | None = None
        self._collect_error = ""
        self._load()

    # -- start and state ---------------------------------------------------------------------------------

    def _load(self) -> None:
        cursors, segments = self._cursors, self.log.segments
        slots = cursors.load() if cursors is not None else []
        slot = slots.pop(0) if slots and slots[0].index == 0 else None
        state = TopicState(self.name)
        if slot is not None and cursors is not None:
            state = msgspec.msgpack.decode(slot.state, type=TopicState)
            cursors.expect(state.slots)
        self._voided_deferred = list(state.voided_deferred)
        self._removed_append = state.deferred_append
        positions = [found.deferred for found in (*slots, slot) if found is not None]
        appends = segments.deferred_appends if segments is not None else Appends()
        appends.add_durable(state.deferred_append)
        self.deferred = DeferredMessages(
            self.nsqd.logs,
            self.directory / "deferred" if self.directory is not None else None,
            appends,
            max([1, *positions, *(high for _, high in state.voided_deferred)]),
            self.nsqd.clock.now_ms(),
        )
        if segments is not None:
            segments.before_remove = self._note_removed
            self.deferred.when_log_synced = segments.when_synced
        if cursors is not None:
            cursors.file.on_mended = self._cursors_mended
            self._restore(cursors, slot, state, slots)
        self.deferred.found.clear()

    def _restore(self, cursors: CursorFile, slot: Slot | None, state: TopicState, channel_slots: list[Slot]) -> None:
        head, first = self.log.head, self.log.extents.first
        listed = self.nsqd.listed_topics.get(self.name)
        self.paused = state.paused if slot is not None or listed is None else listed.paused
        for channel_slot in channel_slots:
            channel_state = msgspec.msgpack.decode(channel_slot.state, type=ChannelState)
            position = min(channel_slot.position, head)
            channel = Channel(self, channel_state.name, channel_slot, channel_state, position, channel_slot.deferred)
            self.channels[channel.name] = channel
        if (cursors.lost or cursors.is_new) and listed is not None:
            self._make_again(listed.channels or [])
        if slot is None:
            # Nothing may be lost: the channels know themselves how far they are, and without one all is the topic's.
            state = TopicState(self.name, follows=bool(self.channels))
            slot = cursors.topic_slot()
            slot.position = head if self.channels else first
            slot.deferred = self.deferred.number if self.channels else 0
        self._slot = slot
        self._pump_deferred = slot.deferred
        self._own_deferred = 0 if state.follows else self.deferred_found(slot.deferred)
        # A cursor may be ahead of a log that lost its end with the power; new messages come above both.
        self.pump = head if state.follows else max(first, min(slot.position, head))
        try:
            self._follow()
            cursors.repair()
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
            slot = self._new_slot(state, self.log.extents.first, 0)
            self.channels[entry.name] = Channel(self, entry.name, slot, state, self.log.extents.first, 0)
            if slot is not None:
                with contextlib.suppress(OSError):  # on a full disk it is stored with the next thing to note
                    self.store(slot)

    def _new_slot(self, state: ChannelState, position: int, deferred_from: int) -> Slot | None:
        """For a channel that is to be stored."""
        if self._cursors is None or is_ephemeral(state.name):
            return None
        slot = self._cursors.new_slot()
        slot.position, slot.deferred = position, deferred_from
        slot.state, slot.brief = encode_state(state)
        return slot

    @property
    def listed_channels(self) -> list[ListedChannel]:
        """What nsqd.dat says of the channels."""
        channels = [channel for channel in self.channels.values() if not channel.ephemeral]
        return [ListedChannel(channel.name, channel.paused, channel.owner) for channel in channels]

    @property
    def highest_named(self) -> int:
        """The highest sequence number this topic's files name."""
        positions = [self.log.head, self._slot.position if self._slot is not None else 0]
        return max(positions + [channel.stored_position for channel in self.channels.values()])

    def _store_topic(self) -> None:
        if self._slot is not None:
            self._slot.position = self.pump
            self._slot.deferred = self._pump_deferred
            voided, slots = tuple(self._voided_deferred), self._cursors.slots if self._cursors is not None else 0
            state = TopicState(self.name, self.paused, self._follows, voided, self._removed_append, slots)
            self._slot.state, self._slot.brief = encode_state(state)
            self.store(self._slot)

    @property
    def tokens(self) -> Tokens:
        """Of the appends that happen once; read when they are needed first."""
        if self._tokens is None:
            assert self.directory is not None and self.log.segments is not None
            self._tokens = Tokens(self.nsqd.logs, self.directory / "tokens", self.log.segments.tokens)
        return self._tokens

    def _note_removed(self, segment: Segment) -> None:
        """The log tells which deferred messages and appends it has; what goes with a segment is remembered elsewhere.

        An OSError keeps the segment.
        """
        if segment.tokens:
            self.tokens.store_of(segment)
        if segment.deferred.last > self._removed_append:
            self._removed_append = segment.deferred.last
            self._store_topic()

    def store(self, slot: Slot) -> None:
        assert self._cursors is not None
        self._cursors.write(slot)

    def move_on(self, slot: Slot, position: int) -> None:
        assert self._cursors is not None
        self._cursors.move_on(slot, position)

    def free(self, slot: Slot) -> None:
        """A channel is gone; if the disk does not take that now, it is tried again."""
        assert self._cursors is not None
        try:
            self._cursors.free(slot)
        except OSError as error:
            self._unfreed.append(slot)
            self.nsqd.logs.disk.failed(error)

    def _free_again(self) -> None:
        unfreed, self._unfreed = self._unfreed, []
        for slot in unfreed:
            self.free(slot)

    def _cursors_mended(self) -> None:
        """They can be written to again after a failed sync: what was not stored meanwhile is."""
        self._free_again()
        for channel in self.channels.values():
            channel.wake()

    def make_durable(self) -> None:
        """Syncs what it and its channels are, here and now, or raises; when no thread uses its files."""
        if self._cursors is not None:
            self._cursors.make_durable()

    # -- publishing --------------------------------------------------------------------------------------

    def publish(self, source: Buffer, pos: int, size: int) -> Commit:
        if self.is_exiting:
            raise TopicExiting
        return self.log.append(source, pos, size, time.time_ns())

    def publish_sized(self, source: Buffer, pos: int, end: int, count: int) -> Commit:
        """Messages that each stand behind their size."""
        if self.is_exiting:
            raise TopicExiting
        return self.log.append_sized(source, pos, end, count, time.time_ns())

    def publish_deferred(self, body: bytes, delay_ms: int) -> Commit:
        if self.is_exiting:
            raise TopicExiting
        commit = Commit()
        try:
            bucket = self.deferred.add(body, time.time_ns(), self.nsqd.clock.now_ms(), delay_ms)
        except OSError as error:
            self.nsqd.logs.disk.failed(error, 1)
            commit.settle(error)
            return commit
        self.message_count += 1
        self.message_bytes += len(body)
        if not self._follows:
            self._own_deferred += 1
        for channel in self.channels.values():
            channel.deferred_pending += 1
        self.nsqd.deferring[self] = None
        if self.nsqd.options.sync_every == 1 and self.directory is not None:
            bucket.when_durable(commit.settle)
        else:
            commit.settle()
        return commit

    def _on_committed(self, messages: int, body_bytes: int) -> None:
        self.nsqd.logs.commit_messages.observe(messages)
        if self._appending is None:
            self.message_count += messages
            self.message_bytes += body_bytes
        if self._follows:
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
        """An ephemeral topic that nobody reads keeps the newest --mem-queue-size messages."""
        extents = self.log.extents
        excess = extents.between(self.pump, self.log.head) - self.nsqd.options.mem_queue_size
        if excess > 0:
            self.pump = extents.nth(extents.ordinal(self.pump) + excess)

    # -- deferred messages -------------------------------------------------------------------------------

    def deferred_found(self, number: int) -> int:
        """How many of the deferred messages found at the start have this number or a higher one."""
        return len(self.deferred.found) - bisect_left(self.deferred.found, number)

    def append_due(self) -> None:
        """Moves some of what is due into the log, and comes back for more when the event loop has turned."""
        if self._appending is not None or self.is_exiting or self.nsqd.is_exiting:
            return
        try:
            due = self.deferred.take_due(self.nsqd.clock.now_ms())
        except OSError as error:
            self.nsqd.logs.disk.failed(error)
            return
        if due is None:
            return
        for channel in self.channels.values():
            channel.deferred_pending -= sum(number >= channel.deferred_from for number in due.lost)
        messages = [message for message in due.messages if not self._is_voided(message[0])]
        if not messages:
            self.deferred.confirm(due)
            self.nsqd.loop.call_soon(self.append_due)
            return
        token = self.deferred.appends.token(due.append_number)
        try:
            commit, seqs = self.log.append_apart([message[1:] for message in messages], DEFERRED, token)
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # the log is busy: the next tick tries again
                self.nsqd.logs.disk.failed(error)
            self.deferred.put_back(due)
            return
        self._appending = (due, [message[0] for message in messages], seqs)
        commit.waiters.append(self)
        self.log.write()

    def settled(self, commit: Commit) -> None:
        """The log took what was due, or not."""
        assert self._appending is not None
        due, numbers, seqs = self._appending
        self._appending = None
        if commit.error is not None:
            self.deferred.put_back(due)
            return
        self.deferred.confirm(due)
        if not self._follows:
            self._own_deferred -= sum(number >= self._pump_deferred for number in numbers)
        for channel in self.channels.values():
            channel.deferred_came(zip(numbers, seqs, strict=True), pumped=self._follows)
        self.nsqd.loop.call_soon(self.append_due)

    def deferred_waiting(self) -> Iterator[tuple[int, int, bytes]]:
        """The messages that wait for their time, as (number, timestamp in ns, body)."""
        return (message for message in self.deferred.waiting() if not self._is_voided(message[0]))

    @property
    def own_deferred_from(self) -> int:
        """Deferred messages with lower numbers are the channels', these and higher ones the topic's own."""
        return self.deferred.number if self._follows else self._pump_deferred

    def _is_voided(self, number: int) -> bool:
        return any(low <= number < high for low, high in self._voided_deferred)

    # -- the pump ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Lets the pump follow the head or stand still, as the topic's state asks."""
        follows = bool(self.channels) and not self.paused and self._deleted_meanwhile is None
        if follows:
            self.pumped += self.log.extents.between(self.pump, self.log.head)
            self.pump = self.log.head
            for channel in self.channels.values():
                channel.pump_follows()
                self.nsqd.turn.wake(channel)
        if not follows and self._follows:
            self._pump_deferred = self.deferred.number
            self._own_deferred = 0
        self._follows = follows
        self._store_topic()

    def await_channels(self) -> None:
        """nsqlookupd is asked for the channels of this new topic: messages stay in the topic until `bring_channels`."""
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
        if self.log.segments is None or self._follows:
            return 0
        return self.log.extents.between(self.pump, self.log.resident_from)

    def empty(self) -> None:
        """Drops what is the topic's own; what the channels have stays."""
        low, self.pump = self.pump, self.log.head
        if not self._follows and self.deferred.number > self._pump_deferred:
            self._voided_deferred.append((self._pump_deferred, self.deferred.number))
            self._pump_deferred = self.deferred.number
            self._own_deferred = 0
        for channel in self.channels.values():
            channel.skip_range(low, self.pump)
        self._store_topic()
        floor = min([self.pump, *(channel.floor_needed for channel in self.channels.values())])
        self.collect(newest_too=True, keep_none=floor >= self.log.head)

    # -- channels ----------------------------------------------------------------------------------------

    def channel(self, name: str, start: int | None = None) -> Channel:
        """The channel of this name, made if it is not there; `start` is for a new one."""
        found = self.channels.get(name)
        if found is not None:
            return found
        if self.is_exiting:
            raise TopicExiting
        deferred_from = self.deferred.number if self._follows else self._pump_deferred
        position = self.pump if start is None else min(start, self.log.head)
        state = ChannelState(name)
        slot = self._new_slot(state, position, deferred_from)
        if slot is not None:
            self._store_new(slot)
        channel = self.channels[name] = Channel(self, name, slot, state, position, deferred_from)
        channel.deferred_pending = 0 if self._follows else self._own_deferred
        if channel.is_trimmed:
            self.listening[channel] = None
        self.nsqd.channel_changed(self, name, created=True)
        self._follow()
        return channel

    def _store_new(self, slot: Slot) -> None:
        """A channel is in the file before anybody is told of it, or not there at all."""
        try:
            self.store(slot)
        except OSError as error:
            self.nsqd.logs.disk.failed(error)
            self.free(slot)
            raise

    def delete_channel(self, name: str) -> bool:
        """False if there is none; then none comes from nsqlookupd either, if that is being asked."""
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
        """Removes what nobody needs any more; the newest file too, and what retention holds, if that is asked for."""
        self._free_again()
        if isinstance(self.kept, KeptInMemory):
            self._collect_memory(self.kept)
        elif self.log.segments is not None:
            try:
                self._collect_segments(self.log.segments, self.kept, newest_too, keep_none)
                self._collect_error = ""
            except OSError as error:
                if self._collect_error != str(error):  # it is tried again every second
                    self._collect_error = str(error)
                    self.nsqd.logger.warning(f"TOPIC({self.name}): could not remove what is finished - {error}")

    def _collect_memory(self, kept: KeptInMemory) -> None:
        """Without files only what was never delivered stays in the log; what was, and is not finished, is copied."""
        channels = self.channels.values()
        cut = min([self.pump, *(channel.ledger.next for channel in channels)])
        held = {seq for channel in channels for seq in channel.ledger.unfinished_below(cut)}
        records: dict[int, bytearray] = {}
        for seq in held:
            record = kept.record(seq) or self.log.record(seq)
            if record is not None:
                records[seq] = record
        kept.replace(records)
        self.log.forget_below(cut)

    def _collect_segments(
        self, segments: Segments, kept: KeptMessages, newest_too: bool = False, keep_none: bool = False
    ) -> None:
        now_ns = time.time_ns()
        channels = self.channels.values()
        floor = min([self.pump, *(channel.floor_needed for channel in channels)])
        if sum(channel.ledger.parked_count for channel in channels) > KEPT_MESSAGES_MAX:
            segments.remove_below(min([floor, *(channel.ledger.lowest() for channel in channels)]), now_ns)
            return
        if floor >= self.log.head and (newest_too or segments.is_newest_out_of_time(now_ns)):
            cut = self.log.head
        else:
            cut = segments.last_base_at_or_below(floor)
        held = sorted({seq for channel in channels for seq in channel.ledger.unfinished_below(cut)})
        missing = [seq for seq in held if seq not in kept]
        segments.remove_below(min([floor, *missing]), now_ns, newest_too=newest_too, keep_none=keep_none)
        if missing or kept.wants_rewrite(len(held)):
            self._keep(segments, kept, held, missing)

    def _keep(self, segments: Segments, kept: KeptMessages, held: list[int], missing: list[int]) -> None:
        """Copies the records that are held for long, so that their segments can go."""
        if self._is_keeping:
            return
        self._is_keeping = True

        places = segments.places(missing)
        written: list[Generation] = []

        def work() -> None:
            written.append(kept.write(kept.content_with(read_records(places), held)))

        def done(error: Exception | None) -> None:
            self._is_keeping = False
            for generation in written:
                kept.adopt(generation)
            if self.is_exiting:
                kept.close()
            elif error is not None:
                self.nsqd.logger.warning(f"TOPIC({self.name}): could not set messages aside that are held - {error}")

        self.nsqd.logs.run(work, done)

    def delete(self) -> None:
        self.is_exiting = self.log.tail.is_closed = True
        self._wake_head_waiters()
        for name in list(self.channels):
            channel = self.channels.pop(name)
            channel.delete()
            self.nsqd.channel_changed(self, name, created=False)
        self.listening.clear()
        self.log.write()  # what was published before gets its OK
        self.log.discard()
        self.deferred.close()
        self.kept.close()
        if self._cursors is not None and self.directory is not None:
            self._cursors.close()
            doomed = self.nsqd.doomed_path(self.directory)
            self.directory.rename(doomed)
            self.nsqd.logs.run(lambda: shutil.rmtree(doomed), lambda error: None)

    def close(self) -> None:
        """At a clean stop: everything is written, synced and indexed; a step that fails does not prevent the others."""
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
            self._free_again()
            self._store_topic()
            self.deferred.make_durable()
            self.make_durable()
        finally:
            self.deferred.close()
            self.kept.close()
            if self._cursors is not None:
                self._cursors.close()
