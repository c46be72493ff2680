"""Encodes and decodes deflate and snappy as NSQ puts them on a connection, one endless stream for each direction,
without I/O.

An encoder turns bytes into encoded bytes that the other side can read at once. A decoder is fed encoded bytes as they
come and returns plain ones in portions of the caller's choice, so that input which grows a thousandfold costs no more
memory than any other.
"""

import threading
import zlib
from typing import Final, Protocol

import cramjam

Bytes = bytes | bytearray | memoryview

RAW_DEFLATE_WBITS: Final = -15
"""Asks zlib for the widest window and for neither zlib's nor gzip's header."""
DEFLATE_LEVEL_DEFAULT: Final = 6

SNAPPY_STREAM_START: Final = b"\xff\x06\x00\x00sNaPpY"
SNAPPY_HEAD_BYTES: Final = 4
SNAPPY_CHECKSUM_BYTES: Final = 4
SNAPPY_PLAIN_BYTES_MAX: Final = 65_536
SNAPPY_CHUNK_BYTES_MAX: Final = SNAPPY_CHECKSUM_BYTES + 76_490
"""65536 bytes become at most this many, when they do not compress at all."""
SNAPPY_LENGTH_BYTES_MAX: Final = 5
SNAPPY_CHUNKS_PER_READ_MAX: Final = 256
"""A chunk may be empty, so the number of chunks is bounded and not only what comes out of them."""

_COMPRESSED, _UNCOMPRESSED, _STREAM_START = 0x00, 0x01, 0xFF
_SKIPPABLE_FROM: Final = 0x80


class CorruptStream(Exception):
    """Says that what came is not the promised encoding; nothing after it can be read."""


class Encoder(Protocol):
    def encode(self, data: Bytes) -> bytes: ...


class Decoder(Protocol):
    @property
    def is_ended(self) -> bool:
        """Tells whether the other side has closed its stream."""

    def feed(self, data: Bytes) -> None:
        """Adds encoded bytes to those that wait to be read; feed again when `read` has nothing left."""

    @property
    def has_more(self) -> bool:
        """Tells whether the last read left something; if not, the next one returns nothing until more is fed."""

    def read(self, limit: int) -> bytes:
        """Returns at most `limit` plain bytes; if it returns none, more input is needed unless it `has_more`."""


class DeflateEncoder:
    def __init__(self, level: int = DEFLATE_LEVEL_DEFAULT) -> None:
        self._deflate = zlib.compressobj(level, zlib.DEFLATED, RAW_DEFLATE_WBITS)

    def encode(self, data: Bytes) -> bytes:
        return self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


class DeflateDecoder:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(RAW_DEFLATE_WBITS)
        self._input = b""
        self._has_more = False
        """Tells whether the last read was cut at its limit: then there may be plain bytes although no input is left."""

    @property
    def is_ended(self) -> bool:
        return self._inflate.eof

    @property
    def has_more(self) -> bool:
        return self._has_more

    def feed(self, data: Bytes) -> None:
        self._input += data

    def read(self, limit: int) -> bytes:
        if not self._input and not self._has_more:
            return b""
        try:
            plain = self._inflate.decompress(self._input, limit)
        except zlib.error as error:
            raise CorruptStream(f"deflate: {error}") from None
        self._input = b"" if self._inflate.eof else self._inflate.unconsumed_tail
        self._has_more = len(plain) == limit and not self._inflate.eof
        return plain


class _Compressors(threading.local):
    """Keeps one snappy compressor for each thread: it has 140 KB of buffers and no memory of what it did before, so all
    streams share it.
    """

    def __init__(self) -> None:
        self.compressor = cramjam.snappy.Compressor()
        self.compressor.compress(b"\0")
        self.compressor.flush()  # drops the stream start, which it writes once


_compressors = _Compressors()


class SnappyEncoder:
    def __init__(self) -> None:
        self._start = SNAPPY_STREAM_START

    def encode(self, data: Bytes) -> bytes:
        compressor = _compressors.compressor
        compressor.compress(bytes(data))
        start, self._start = self._start, b""
        return start + bytes(compressor.flush())


class SnappyDecoder:
    """Cuts the stream into chunks, which the library decodes and checks, as many at a time as the reader asks for."""

    def __init__(self) -> None:
        self._input = bytearray()
        self._plain = b""
        self._skip_bytes = 0
        self._has_started = False
        self._has_more = False

    @property
    def is_ended(self) -> bool:
        return False

    @property
    def has_more(self) -> bool:
        return self._has_more or bool(self._plain)

    def feed(self, data: Bytes) -> None:
        self._input += data

    def read(self, limit: int) -> bytes:
        plain, self._plain = self._plain, b""
        if not plain:
            plain = self._decode(limit)
        if len(plain) > limit:
            plain, self._plain = plain[:limit], plain[limit:]
        return plain

    def _decode(self, limit: int) -> bytes:
        """Decodes the whole chunks at the front, up to `limit` plain bytes but at least one chunk."""
        chunks: list[memoryview] = []
        pos = plain_bytes = 0
        self._has_more = True
        with memoryview(self._input) as view:
            for _ in range(SNAPPY_CHUNKS_PER_READ_MAX):
                skipped = min(self._skip_bytes, len(view) - pos)
                self._skip_bytes -= skipped
                pos += skipped
                if len(view) - pos < SNAPPY_HEAD_BYTES:
                    self._has_more = False
                    break
                kind = view[pos]
                end = pos + SNAPPY_HEAD_BYTES + int.from_bytes(view[pos + 1 : pos + SNAPPY_HEAD_BYTES], "little")
                self._check(kind, end - pos - SNAPPY_HEAD_BYTES)
                if kind >= _SKIPPABLE_FROM and kind != _STREAM_START:
                    self._skip_bytes = end - pos
                    continue
                if end > len(view):
                    self._has_more = False
                    break
                if kind == _STREAM_START:
                    self._start(bytes(view[pos:end]))
                else:
                    size = _plain_size(kind, view[pos + SNAPPY_HEAD_BYTES + SNAPPY_CHECKSUM_BYTES : end])
                    if chunks and plain_bytes + size > limit:
                        break
                    plain_bytes += size
                    chunks.append(view[pos:end])
                pos = end
            encoded = b"".join((SNAPPY_STREAM_START, *chunks)) if chunks else b""
            for chunk in chunks:
                chunk.release()
        del self._input[:pos]
        if not encoded:
            return b""
        try:
            return bytes(cramjam.snappy.decompress(encoded, output_len=plain_bytes))
        except cramjam.DecompressionError as error:
            raise CorruptStream(str(error)) from None

    def _check(self, kind: int, size: int) -> None:
        """Refuses a chunk by its type and size, before the whole of it is here."""
        if not self._has_started and kind != _STREAM_START:
            raise CorruptStream("snappy: the stream does not begin with its start chunk")
        if _UNCOMPRESSED < kind < _SKIPPABLE_FROM:
            raise CorruptStream(f"snappy: unknown chunk type {kind}")
        if kind <= _UNCOMPRESSED and not SNAPPY_CHECKSUM_BYTES <= size <= SNAPPY_CHUNK_BYTES_MAX:
            raise CorruptStream(f"snappy: chunk of {size} bytes")
        if kind == _STREAM_START and size != len(SNAPPY_STREAM_START) - SNAPPY_HEAD_BYTES:
            raise CorruptStream(f"snappy: start chunk of {size} bytes")

    def _start(self, chunk: bytes) -> None:
        if chunk != SNAPPY_STREAM_START:
            raise CorruptStream("snappy: bad start chunk")
        self._has_started = True


def _plain_size(kind: int, content: memoryview) -> int:
    """Returns how many plain bytes a chunk says it has; more than a chunk may have is refused before it is decoded."""
    size = len(content)
    if kind == _COMPRESSED:
        size = 0
        for index, byte in enumerate(content[:SNAPPY_LENGTH_BYTES_MAX]):
            size |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                break
        else:
            raise CorruptStream("snappy: a chunk without its size")
    if size > SNAPPY_PLAIN_BYTES_MAX:
        raise CorruptStream(f"snappy: a chunk of {size} plain bytes")
    return size
