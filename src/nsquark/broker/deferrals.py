"""Carries out DPUB: a topic's messages wait until they are due, and then enter its log."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsquark.kernel.commits import Commit
from nsquark.log.deferred import DeferredMessages, Due
from nsquark.log.deferred_appends import Appends
from nsquark.wire.batch_format import DEFERRED

if TYPE_CHECKING:
    from nsquark.broker.topic import Topic
    from nsquark.log.cursors import TopicState
    from nsquark.log.segment import Segment


class Awaited:
    """Knows the deferred messages that one channel waits for, or the topic itself while its pump stands still.

    They have the number `first` or a higher one; `count` of them wait.
    """

    __slots__ = ("count", "first")

    def __init__(self, first: int, count: int = 0) -> None:
        self.first = first
        self.count = count

    def copy(self) -> Awaited:
        return Awaited(self.first, self.count)

    def are_gone(self, numbers: Sequence[int]) -> None:
        """Forgets messages that wait no more."""
        self.count -= sum(number >= self.first for number in numbers)


class Deferrals:
    """Owns the deferred messages of one topic.

    * Messages are numbered as they come; `number` is the next one's. Channels and the topic remember numbers.
    * What is due is moved into the log in portions, one at a time: `appending` is the one on its way.
    * The ranges of numbers in `voided` were dropped by /topic/empty and never enter the log.
    """

    def __init__(self, topic: Topic, state: TopicState, first_numbers: Sequence[int]) -> None:
        segments = topic.log.segments
        self.voided = list(state.voided_deferred)
        self.removed_append = state.deferred_append
        """Is the last append of deferred messages that was in a segment which is gone."""
        appends = segments.deferred_appends if segments is not None else Appends()
        appends.add_durable(state.deferred_append)
        self._topic = topic
        self._clock = topic.nsqd.clock
        self._messages = DeferredMessages(
            topic.nsqd.logs,
            topic.directory / "deferred" if topic.directory is not None else None,
            appends,
            max([1, *first_numbers, *(high for _, high in state.voided_deferred)]),
            self._clock.now_ms(),
        )
        if segments is not None:
            self._messages.when_log_synced = segments.when_synced
        self._messages.on_missing = self._are_missing
        self._own = Awaited(1)
        self.appending: tuple[Due, list[int], list[int]] | None = None
        """Has the messages on their way into the log, with their numbers and sequence numbers."""

    @property
    def number(self) -> int:
        return self._messages.number

    @property
    def count(self) -> int:
        """Tells how many messages wait, voided ones too."""
        return self._messages.count

    @property
    def own(self) -> Awaited:
        """Returns what waits and belongs to no channel yet: nothing, while the pump follows the head."""
        return Awaited(self.number) if self._topic.is_pump_following else self._own

    @property
    def stored_first(self) -> int:
        """Returns the number that the topic's slot remembers; it counts only when the pump stands still."""
        return self._own.first

    # -- start -------------------------------------------------------------------------------------------

    def found_from(self, first: int) -> Awaited:
        """Returns what waited at the start and has this number or a higher one, less what was dropped."""
        found = self._messages.found
        start = bisect_left(found, first)
        dropped = sum(
            max(0, bisect_left(found, high) - max(start, bisect_left(found, low))) for low, high in self.voided
        )
        return Awaited(first, len(found) - start - dropped)

    def restore_own(self, first: int) -> None:
        self._own = self.found_from(first)

    def started(self) -> None:
        """Is told that the start has made all channels: what it found need not be known one by one any more."""
        self._messages.found.clear()

    # -- publishing --------------------------------------------------------------------------------------

    def publish(self, body: bytes, delay_ms: int) -> Commit:
        """Stores a message until it is due; the commit has an error if that was not possible."""
        topic, commit = self._topic, Commit()
        try:
            bucket = self._messages.add(body, time.time_ns(), self._clock.now_ms(), delay_ms)
        except OSError as error:
            topic.nsqd.logs.disk.failed(error, 1)
            commit.settle(error)
            return commit
        topic.message_count += 1
        topic.message_bytes += len(body)
        self._own.count += 1
        for channel in topic.channels.values():
            channel.deferred.count += 1
        topic.nsqd.deferring[topic] = None
        if topic.nsqd.options.sync_every == 1 and topic.directory is not None:
            bucket.when_durable(commit.settle)
        else:
            commit.settle()
        return commit

    # -- into the log ------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Moves what is due into the log; returns False if nothing waits any more."""
        now = self._clock.now_ms()
        self._messages.load_near(now)
        due_ms = self._messages.next_due_ms(now)
        if due_ms is not None and due_ms <= now:
            self._append_due()
        return due_ms is not None

    def _append_due(self) -> None:
        """Moves some of what is due into the log, and comes back for more when the event loop has turned."""
        topic, nsqd = self._topic, self._topic.nsqd
        if self.appending is not None or topic.is_exiting or nsqd.is_exiting:
            return
        try:
            due = self._messages.next_due(self._clock.now_ms())
        except OSError as error:
            nsqd.logs.disk.failed(error)
            return
        if due is None:
            return
        self._own.are_gone(due.lost)
        for channel in topic.channels.values():
            channel.deferred.are_gone(due.lost)
        messages = [message for message in due.messages if not self._is_voided(message[0])]
        if not messages:
            self._messages.confirm(due)
            nsqd.loop.call_soon(self._append_due)
            return
        token = self._messages.appends.token(due.append_number)
        try:
            commit, seqs = topic.log.append_apart([message[1:] for message in messages], DEFERRED, token)
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # if the log is only busy, the next tick tries again
                nsqd.logs.disk.failed(error)
            self._messages.put_back(due)
            return
        self.appending = (due, [message[0] for message in messages], seqs)
        commit.waiters.append(self)
        topic.log.write()

    def settled(self, commit: Commit) -> None:
        """Is told whether what was due is in the log."""
        assert self.appending is not None
        due, numbers, seqs = self.appending
        self.appending = None
        if commit.error is not None:
            self._messages.put_back(due)
            return
        self._messages.confirm(due)
        self._own.are_gone(numbers)
        for channel in self._topic.channels.values():
            channel.deferred_came(zip(numbers, seqs, strict=True), pumped=self._topic.is_pump_following)
        self._topic.nsqd.loop.call_soon(self._append_due)

    def _are_missing(self, number: int, count: int) -> None:
        """Is told that a file proved to be damaged: `count` messages, from `number` on, are gone, or back if negative.

        A channel that waits only for later ones cannot tell whether they are among these; its count is right after a
        restart.
        """
        for awaited in (self._own, *(channel.deferred for channel in self._topic.channels.values())):
            if number >= awaited.first:
                awaited.count -= count

    # -- the pump ----------------------------------------------------------------------------------------

    def pump_stopped(self) -> None:
        """Is told that the pump stands still: what waits is the channels', what comes later is the topic's own."""
        self._own = Awaited(self.number)

    def void_own(self) -> None:
        """Drops what is the topic's own, if the pump stands still."""
        if not self._topic.is_pump_following and self.number > self._own.first:
            first, entering = self._own.first, self.appending[1] if self.appending is not None else []
            self.voided.append((first, self.number))
            self._own.are_gone(entering)  # the log has them, or they come back when that fails
            for channel in self._topic.channels.values():
                if channel.deferred.first <= first:
                    channel.deferred.count -= self._own.count
                else:  # it was emptied since the pump stopped
                    channel.deferred.count = sum(number >= channel.deferred.first for number in entering)
            self._own = Awaited(self.number)

    def _is_voided(self, number: int) -> bool:
        return any(low <= number < high for low, high in self.voided)

    # -- files -------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields the messages that wait for their time, as (number, timestamp in ns, body)."""
        return (message for message in self._messages.waiting() if not self._is_voided(message[0]))

    def segment_goes(self, segment: Segment) -> bool:
        """Remembers which appends happened, when their segment goes; returns True if that has to be stored."""
        if segment.deferred.last <= self.removed_append:
            return False
        self.removed_append = segment.deferred.last
        return True

    def make_durable(self) -> None:
        self._messages.make_durable()

    def close(self) -> None:
        self._messages.close()

    def abandon(self) -> None:
        self._messages.abandon()
