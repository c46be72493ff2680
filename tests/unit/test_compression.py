"""Checks deflate and snappy: what goes in comes out, whatever the portions; what is corrupt or a bomb is cut."""

import random
import zlib
from collections.abc import Callable

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsquark.wire.compression import (
    SNAPPY_PLAIN_BYTES_MAX,
    SNAPPY_STREAM_START,
    CorruptStream,
    Decoder,
    DeflateDecoder,
    DeflateEncoder,
    Encoder,
    SnappyDecoder,
    SnappyEncoder,
)

CODECS: list[tuple[Callable[[], Encoder], Callable[[], Decoder]]] = [
    (DeflateEncoder, DeflateDecoder),
    (SnappyEncoder, SnappyDecoder),
]
BOTH = pytest.mark.parametrize(("encoder", "decoder"), CODECS, ids=["deflate", "snappy"])
OK_FRAME = bytes.fromhex("00000006000000004f4b")


def _read_all(decoder: Decoder, limit: int = 1 << 20) -> bytes:
    plain = piece = decoder.read(limit)
    while piece or decoder.has_more:
        needs_no_more = decoder.has_more
        piece = decoder.read(limit)
        assert len(piece) <= limit
        assert needs_no_more or not piece, "without more input there is nothing to read, unless the decoder has more"
        plain += piece
    return plain


@BOTH
@given(
    pieces=st.lists(st.binary(max_size=300), max_size=8),
    repeats=st.integers(1, 2000),
    cut=st.integers(1, 5000),
    limit=st.integers(1, 100_000),
)
def test_round_trip(
    encoder: Callable[[], Encoder],
    decoder: Callable[[], Decoder],
    pieces: list[bytes],
    repeats: int,
    cut: int,
    limit: int,
) -> None:
    sending, receiving = encoder(), decoder()
    limit = max(limit, sum(map(len, pieces)) * repeats // 500)  # not too many turns
    plain = b""
    for piece in pieces:
        encoded = sending.encode(piece * repeats)
        for start in range(0, len(encoded), cut):
            receiving.feed(encoded[start : start + cut])
            plain += _read_all(receiving, limit)
        assert plain.endswith(piece * repeats), "each piece can be read as soon as it is sent"
    assert plain == b"".join(piece * repeats for piece in pieces)


@BOTH
def test_input_may_be_any_bytes(encoder: Callable[[], Encoder], decoder: Callable[[], Decoder]) -> None:
    sending, receiving = encoder(), decoder()
    receiving.feed(memoryview(sending.encode(memoryview(b"one two three")[4:7])))
    receiving.feed(bytearray(sending.encode(bytearray(b" four"))))
    assert _read_all(receiving) == b"two four"


def test_deflate_is_raw_and_flushed() -> None:
    encoder = DeflateEncoder(1)
    encoded = encoder.encode(OK_FRAME)
    assert encoded.endswith(b"\x00\x00\xff\xff")
    assert zlib.decompressobj(-15).decompress(encoded) == OK_FRAME


def test_deflate_tolerates_empty_blocks() -> None:
    decoder = DeflateDecoder()
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    decoder.feed(deflate.flush(zlib.Z_SYNC_FLUSH) + deflate.compress(b"x") + deflate.flush(zlib.Z_SYNC_FLUSH))
    assert _read_all(decoder) == b"x"
    decoder.feed(deflate.flush(zlib.Z_SYNC_FLUSH) + deflate.flush(zlib.Z_FULL_FLUSH))
    assert _read_all(decoder) == b""
    assert not decoder.is_ended


def test_deflate_says_that_a_stream_was_closed() -> None:
    decoder = DeflateDecoder()
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    decoder.feed(deflate.compress(b"last") + deflate.flush(zlib.Z_FINISH) + b"more")
    assert _read_all(decoder) == b"last"
    assert decoder.is_ended
    assert _read_all(decoder) == b""


def test_deflate_bomb_comes_in_portions() -> None:
    decoder = DeflateDecoder()
    decoder.feed(DeflateEncoder(9).encode(bytes(50 << 20)))
    for _ in range(10):
        assert decoder.read(4096) == bytes(4096)


def test_snappy_on_the_wire() -> None:
    encoder = SnappyEncoder()
    chunk = bytes.fromhex("010e000026982bcf") + OK_FRAME
    assert encoder.encode(OK_FRAME) == SNAPPY_STREAM_START + chunk
    assert encoder.encode(OK_FRAME) == chunk, "the stream starts once"
    assert SnappyEncoder().encode(OK_FRAME) == SNAPPY_STREAM_START + chunk, "and once for every stream"


def test_snappy_reads_what_others_write() -> None:
    data = random.Random(1).randbytes(200_000) + bytes(300_000)
    decoder = SnappyDecoder()
    decoder.feed(bytes(cramjam.snappy.compress(data)))
    assert _read_all(decoder, 70_000) == data
    assert bytes(cramjam.snappy.decompress(SnappyEncoder().encode(data))) == data


def test_snappy_skips_padding_without_keeping_it() -> None:
    decoder = SnappyDecoder()
    encoded = SnappyEncoder().encode(b"before")
    padding_bytes = 16_000_000
    decoder.feed(encoded + b"\xfe" + padding_bytes.to_bytes(3, "little"))
    assert _read_all(decoder) == b"before"
    for _ in range(padding_bytes // 100_000):
        decoder.feed(bytes(100_000))
        assert _read_all(decoder) == b""
        assert not decoder._input, "padding is let go at once"
    decoder.feed(encoded + b"\x80\x01\x00\x00?" + encoded[10:])
    assert _read_all(decoder) == b"beforebefore"


def _chunk(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + len(content).to_bytes(3, "little") + content


@pytest.mark.parametrize(
    "encoded",
    [
        b"GET / HTTP/1.1\r\n",
        SnappyEncoder().encode(b"x")[10:],
        SNAPPY_STREAM_START[:-1] + b"!",
        b"\xff\x07\x00\x00sNaPpY!",
        SNAPPY_STREAM_START + _chunk(0x02, b"reserved"),
        SNAPPY_STREAM_START + _chunk(0x01, b"abc"),
        SNAPPY_STREAM_START + _chunk(0x00, bytes(4) + b"\xff" * 9),
        SNAPPY_STREAM_START + _chunk(0x00, bytes(4) + b"\x81\x80\x04" + bytes(9)),
        SNAPPY_STREAM_START + _chunk(0x01, bytes(4 + SNAPPY_PLAIN_BYTES_MAX + 1)),
        SNAPPY_STREAM_START + b"\x00\xff\xff\xff",
        SNAPPY_STREAM_START + _chunk(0x01, b"\x00\x00\x00\x00wrong checksum"),
        SNAPPY_STREAM_START + _chunk(0x00, b"\x00\x00\x00\x00\x05garbage!"),
    ],
    ids=[
        "no snappy",
        "no start",
        "bad start",
        "long start",
        "reserved chunk",
        "short chunk",
        "endless size",
        "65537 plain bytes compressed",
        "65537 plain bytes",
        "chunk of 16 MB",
        "checksum",
        "garbage block",
    ],
)
def test_snappy_refuses(encoded: bytes) -> None:
    decoder = SnappyDecoder()
    decoder.feed(encoded)
    with pytest.raises(CorruptStream, match="snappy"):
        _read_all(decoder)


def test_deflate_refuses_garbage() -> None:
    decoder = DeflateDecoder()
    decoder.feed(b"\xff\xff not deflate")
    with pytest.raises(CorruptStream, match="deflate"):
        decoder.read(100)
