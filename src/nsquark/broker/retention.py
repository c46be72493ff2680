"""Decides what of a topic's log may go, and copies records that outlive it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nsquark.log.outliving import KEPT_MESSAGES_MAX, Generation, KeptInMemory, KeptMessages
from nsquark.log.segments import Segments, read_records

if TYPE_CHECKING:
    from nsquark.broker.topic import Topic


class Retention:
    """Removes from one topic's log what no channel needs, unless --retention-time or --retention-bytes asks for it.

    `kept` has the records of messages that are held for so long that their segment is gone. At most one thread at a
    time writes it anew.
    """

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._logger = topic.nsqd.logger
        self.kept: KeptMessages | KeptInMemory = KeptInMemory()
        if topic.directory is not None:
            self.kept = KeptMessages(topic.nsqd.logs, topic.directory / "kept")
        self._is_keeping = False
        self._error = ""
        self.guarded_from: int | None = None
        """Nothing from this sequence number on may go, whatever channels have done with it; the tap sets this."""

    def collect(self, *, newest_too: bool = False, keep_none: bool = False) -> None:
        """Removes what nobody needs, the newest file too if `newest_too`, and what retention keeps if `keep_none`."""
        segments = self._topic.log.segments
        if isinstance(self.kept, KeptInMemory):
            self._collect_memory(self.kept)
        elif segments is not None:
            try:
                self._collect_segments(segments, self.kept, newest_too, keep_none)
                self._error = ""
            except OSError as error:
                if self._error != str(error):  # it is tried again every second
                    self._error = str(error)
                    self._logger.warning(f"TOPIC({self._topic.name}): could not remove what is finished - {error}")

    @property
    def floor(self) -> int:
        """Returns the position below which no message is needed, but for those that channels have parked."""
        needed = [self._topic.pump, *(channel.floor_needed for channel in self._topic.channels.values())]
        return min(needed if self.guarded_from is None else [*needed, self.guarded_from])

    def _collect_memory(self, kept: KeptInMemory) -> None:
        """Forgets what was delivered of a log without files; what was delivered and is not finished is copied first."""
        log, channels = self._topic.log, self._topic.channels.values()
        cut = min([self._topic.pump, *(channel.ledger.next for channel in channels)])
        records: dict[int, bytearray] = {}
        for seq in self._unfinished_below(cut):
            record = kept.record(seq) or log.record(seq)
            if record is not None:
                records[seq] = record
        kept.replace(records)
        log.forget_below(cut)

    def _collect_segments(self, segments: Segments, kept: KeptMessages, newest_too: bool, keep_none: bool) -> None:
        now_ns, floor, head = time.time_ns(), self.floor, self._topic.log.head
        channels = self._topic.channels.values()
        if sum(channel.ledger.parked_count for channel in channels) > KEPT_MESSAGES_MAX:
            segments.remove_below(min([floor, *(channel.ledger.lowest() for channel in channels)]), now_ns)
            return
        if floor >= head and (newest_too or segments.is_newest_out_of_time(now_ns)):
            cut = head
        else:
            cut = segments.last_base_at_or_below(floor)
        held = sorted(self._unfinished_below(cut))
        missing = [seq for seq in held if seq not in kept]
        segments.remove_below(min([floor, *missing]), now_ns, newest_too=newest_too, keep_none=keep_none)
        if missing or kept.wants_rewrite(len(held)):
            self._keep(segments, kept, held, missing)

    def _unfinished_below(self, cut: int) -> set[int]:
        """Finds the messages below `cut` that some channel has not finished."""
        channels = self._topic.channels.values()
        return {seq for channel in channels for seq in channel.ledger.unfinished_below(cut)}

    def _keep(self, segments: Segments, kept: KeptMessages, held: list[int], missing: list[int]) -> None:
        """Copies the records that are held for long, in a thread, so that their segments can go the next time."""
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
            if self._topic.is_exiting:
                kept.close()
            elif error is not None:
                name = self._topic.name
                self._logger.warning(f"TOPIC({name}): could not set messages aside that are held - {error}")

        self._topic.nsqd.logs.run(work, done)

    def close(self) -> None:
        self.kept.close()
