# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Encodes the header of a batch (`wire/batch_format.py`), which one write appends to a log, and does that write."""

import errno
import os
from array import array

import cython
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from nsquark.wire.batch_format import HEAD, HEADER_BYTES, MAGIC, NO_TOKEN, TAIL, VERSION

if cython.compiled:
    from cython.cimports.nsquark.kernel.extents import Extents
    from cython.cimports.nsquark.kernel.records import Chunk
else:
    from nsquark.kernel.extents import Extents
    from nsquark.kernel.records import Chunk

_HEADER_BYTES = cython.declare(cython.longlong, HEAD.size + TAIL.size)
INDEX_EVERY_BYTES = cython.declare(cython.longlong, 32 << 10)

_pack_head = cython.declare(object, HEAD.pack)
_pack_tail = cython.declare(object, TAIL.pack)


def encode_header(
    payload: object,
    first_seq: cython.longlong,
    messages: cython.longlong,
    time_min_ns: cython.longlong,
    time_max_ns: cython.longlong,
    flags: cython.int,
    token: bytes,
) -> bytes:
    check: object = xxh3_64_intdigest(payload)
    tail: bytes = _pack_tail(messages, len(payload), 0, first_seq, time_min_ns, time_max_ns, check, token)
    return _pack_head(MAGIC, VERSION, flags, HEADER_BYTES, xxh32_intdigest(tail, flags)) + tail


class BatchFile:
    """Writes batches to a file in order of sequence number, and knows its `size` and what is in it.

    `seqs`, `offsets` and `times` are a sparse index: the batch at `offsets[i]` starts with `seqs[i]`, and `times[i]` is
    the latest publish time of all records before it. A batch at `index_at` or beyond gets the next entry.
    """

    def forget(self) -> None:
        """Forgets what is known of the file."""
        self.size = 0
        self.extents = Extents()
        self.time_min_ns = 0
        self.time_max_ns = 0
        self.seqs = array("Q")
        self.offsets = array("Q")
        self.times = array("q")
        self.index_at = 0

    def append(
        self,
        fd: cython.int,
        chunk: Chunk,
        start: cython.longlong,
        size: cython.longlong,
        time_min_ns: cython.longlong,
        time_max_ns: cython.longlong,
    ) -> cython.longlong:
        """Writes the records of a chunk from record `start` on, which have `size` bytes; returns how many they are. If
        it raises, the file is as it was.
        """
        payload: object = chunk.view[chunk.offset(start) : chunk.used]
        first_seq: cython.longlong = chunk.first_seq + start
        messages: cython.longlong = chunk.count - start
        header: bytes = encode_header(payload, first_seq, messages, time_min_ns, time_max_ns, 0, NO_TOKEN)
        try:
            if os.pwritev(fd, [header, payload], self.size) != len(header) + size:
                raise OSError(errno.ENOSPC, "no space left on device: the write was cut short")
        except OSError:
            os.ftruncate(fd, self.size)
            raise
        self.grown(self.size, first_seq, messages, size, time_min_ns, time_max_ns)
        return messages

    def reindex(self) -> None:
        """Sets which batch gets the next entry, after the index was loaded."""
        self.index_at = self.offsets[len(self.offsets) - 1] + INDEX_EVERY_BYTES if self.offsets else 0

    def grown(
        self,
        offset: cython.longlong,
        first_seq: cython.longlong,
        messages: cython.longlong,
        payload_bytes: cython.longlong,
        time_min_ns: cython.longlong,
        time_max_ns: cython.longlong,
    ) -> cython.void:
        """Adds a batch that was written at the end to what is known of the file."""
        if offset >= self.index_at:
            self.seqs.append(first_seq)
            self.offsets.append(offset)
            self.times.append(self.time_max_ns)
            self.index_at = offset + INDEX_EVERY_BYTES
        self.extents.add(first_seq, messages)
        if time_min_ns < self.time_min_ns or self.time_min_ns == 0:
            self.time_min_ns = time_min_ns
        if time_max_ns > self.time_max_ns:
            self.time_max_ns = time_max_ns
        self.size = offset + _HEADER_BYTES + payload_bytes
