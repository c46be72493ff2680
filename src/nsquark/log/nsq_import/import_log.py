"""Writes the files of a log outside of any topic, for messages that come in bulk, with times of their own."""

from pathlib import Path

from nsquark.kernel.records import Chunk
from nsquark.log.cache import chunk_records
from nsquark.log.durable import sync_data
from nsquark.log.files import sync_directory
from nsquark.log.nsq_import.diskqueue import Piece
from nsquark.log.segment import Segment
from nsquark.log.sequences import LEASE_SEQS_MAX, LEASE_SEQS_MIN
from nsquark.log.services import LogShared
from nsquark.log.writer import BatchWriter
from nsquark.wire.batch_format import HEADER_BYTES, NO_TOKEN, StoredBatch
from nsquark.wire.record import RECORD_OVERHEAD_BYTES

BATCH_BYTES = 64 << 10
"""A batch has at most this size, unless one message is larger: one cold read brings in several of them."""


class LogImport:
    """Writes segments in a directory of their own. It blocks, so it is only for the time before clients are served."""

    def __init__(self, directory: Path, shared: LogShared) -> None:
        self.directory = directory
        self.messages = 0
        self._shared = shared
        self._lease = (0, 0)
        self._lease_seqs = LEASE_SEQS_MIN
        self._chunk: Chunk | None = None
        self._times = (0, 0)
        self._segment: Segment | None = None
        self._errors: list[Exception] = []

    def next_seq(self) -> int:
        """Returns the number the next message gets."""
        if self._chunk is not None:
            self._write()
        if self._lease[0] == self._lease[1]:
            self._lease = self._shared.sequences.lease(self._lease_seqs)
            self._lease_seqs = min(self._lease_seqs * 2, LEASE_SEQS_MAX)
        return self._lease[0]

    def append(self, piece: Piece) -> list[tuple[int, int]]:
        """Adds the messages; returns those that were attempted before, as (sequence number, attempts)."""
        attempted: list[tuple[int, int]] = []
        chunk, data = self._chunk, piece.data
        earliest_ns, latest_ns = self._times
        for pos, size, timestamp_ns, attempts in piece.records:
            if chunk is None or not chunk.append(data, pos, size, timestamp_ns):
                self._times = earliest_ns, latest_ns
                chunk = self._new_chunk(size)
                chunk.append(data, pos, size, timestamp_ns)
                earliest_ns = latest_ns = timestamp_ns
            elif timestamp_ns > latest_ns:
                latest_ns = timestamp_ns
            elif timestamp_ns < earliest_ns:
                earliest_ns = timestamp_ns
            if attempts:
                attempted.append((chunk.first_seq + chunk.count - 1, attempts))
        self._times = earliest_ns, latest_ns
        self.messages += len(piece.records)
        return attempted

    def finish(self) -> int:
        """Writes the rest, so that everything is on disk; returns the number after the last message's."""
        end = self.next_seq()
        self._seal()
        self._shared.drain()
        if self._errors:
            raise self._errors[0]
        sync_directory(self.directory)
        return end

    def _new_chunk(self, body_bytes: int) -> Chunk:
        first = self.next_seq()
        size = max(BATCH_BYTES - HEADER_BYTES, body_bytes + RECORD_OVERHEAD_BYTES)
        self._chunk = Chunk(self._shared.node_id, first, size, min(chunk_records(size), self._lease[1] - first))
        return self._chunk

    def _write(self) -> None:
        """Writes the chunk as a batch."""
        chunk, self._chunk = self._chunk, None
        assert chunk is not None
        self._lease = (chunk.first_seq + chunk.count, self._lease[1])
        payload = chunk.view[: chunk.used]
        segment = self._segment_for(chunk.first_seq, HEADER_BYTES + len(payload))
        with BatchWriter(segment.fd, segment.size) as writer:
            writer.add(StoredBatch(0, chunk.first_seq, chunk.count, len(payload), *self._times, 0, NO_TOKEN), payload)
        segment.add(writer.batches[0])

    def _segment_for(self, first_seq: int, size: int) -> Segment:
        segment = self._segment
        if segment is not None and segment.size + size > self._shared.settings.max_bytes_per_file:
            self._seal()
        if self._segment is None:
            self._segment = Segment(self._shared.syncer, self.directory, first_seq)
            self._segment.create()
        return self._segment

    def _seal(self) -> None:
        """Syncs a finished segment in a thread, while the next one is being filled."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        segment.sealed = True
        content = segment.index_content()

        def work() -> None:
            sync_data(segment.fd)
            segment.store_index(content)
            segment.close()

        self._shared.run(work, lambda error: self._errors.append(error) if error is not None else None)
