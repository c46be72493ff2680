"""Stores a topic and its channels in the slots of the topic's cursor file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from nsquark.log.cursors import ChannelState, CursorFile, Slot, TopicState, encode_state
from nsquark.log.services import LogShared
from nsquark.wire.names import is_ephemeral


class Slots:
    """Knows the slots of one topic. An ephemeral topic has no file: nothing is found, and no slot is made.

    * `own` is the topic's slot and `state` what it says; None, and an empty state, if it was not found.
    * `found` are the channels' slots, as the start finds them.
    """

    def __init__(self, topic_name: str, logs: LogShared, path: Path | None) -> None:
        self.own: Slot | None = None
        self.state = TopicState(topic_name)
        self.found: list[Slot] = []
        self._disk = logs.disk
        self._file = CursorFile(logs, path) if path is not None else None
        self._unfreed: list[Slot] = []
        """Has the slots of deleted channels that are still in the file."""
        if self._file is not None:
            try:
                self._load(self._file)
            except BaseException:
                self.abandon()
                raise

    def _load(self, file: CursorFile) -> None:
        self.found = file.load()
        if self.found and self.found[0].index == 0:
            self.own = self.found.pop(0)
            self.state = msgspec.msgpack.decode(self.own.state, type=TopicState)
            file.expect(self.state.slots)

    @property
    def are_incomplete(self) -> bool:
        """Tells whether there may have been channels of which the file has nothing."""
        return self._file is not None and (self._file.lost or self._file.is_new)

    @property
    def count(self) -> int:
        return self._file.slots if self._file is not None else 0

    def when_mended(self, callback: Callable[[], None]) -> None:
        """Calls back when the file can be written to again after a failed sync."""

        def mended() -> None:
            self.free_again()
            callback()

        if self._file is not None:
            self._file.file.on_mended = mended

    def make_own(self, position: int, deferred: int) -> None:
        """Makes the topic's slot."""
        assert self._file is not None
        self.own = self._file.topic_slot()
        self.own.position, self.own.deferred = position, deferred

    def new(self, state: ChannelState, position: int, deferred: int) -> Slot | None:
        """Makes a slot for a new channel, not stored yet; returns None if the channel is not to be stored."""
        if self._file is None or is_ephemeral(state.name):
            return None
        slot = self._file.new_slot()
        slot.position, slot.deferred = position, deferred
        slot.state, slot.brief = encode_state(state)
        return slot

    def store(self, slot: Slot) -> None:
        assert self._file is not None
        self._file.write(slot)

    def store_new(self, slot: Slot) -> None:
        """Stores a new channel before anybody is told of it, or frees its slot and raises."""
        try:
            self.store(slot)
        except OSError as error:
            self._disk.failed(error)
            self.free(slot)
            raise

    def move_on(self, slot: Slot, position: int) -> None:
        """Stores nothing but a new position."""
        assert self._file is not None
        self._file.move_on(slot, position)

    def free(self, slot: Slot) -> None:
        """Frees the slot of a channel that is gone; if the disk refuses that now, it is tried again."""
        assert self._file is not None
        try:
            self._file.free(slot)
        except OSError as error:
            self._unfreed.append(slot)
            self._disk.failed(error)

    def free_again(self) -> None:
        unfreed, self._unfreed = self._unfreed, []
        for slot in unfreed:
            self.free(slot)

    def repair(self) -> None:
        """Is told that all that was lost is made again, so that the file need not tell any more what was lost."""
        if self._file is not None:
            self._file.repair()

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Calls back once all that is stored by now is durable, as soon as possible."""
        assert self._file is not None
        self._file.file.hurry()
        self._file.file.when_synced(callback)

    def make_durable(self) -> None:
        """Syncs the file here and now, or raises; to be called when no thread uses it."""
        if self._file is not None:
            self._file.make_durable()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Lets go of a file that is about to be deleted, or cannot be used after all."""
        if self._file is not None:
            self._file.file.abandon()
