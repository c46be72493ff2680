"""Whatever happens to one batch of a damaged file, the others are found."""

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given
from xxhash import xxh32_intdigest

from nsquark.log.writer import encode_header
from nsquark.wire.batch_format import (
    HEADER_BYTES,
    MAGIC,
    NO_TOKEN,
    Damage,
    StoredBatch,
    find_header,
    read_header,
    scan,
)

FILE_OFFSET = 1_000_000


def encoded(first_seq: int, payload: bytes, flags: int = 0, token: bytes = NO_TOKEN) -> bytes:
    batch = StoredBatch(0, first_seq, 1, len(payload), 1, 2, flags, token)
    return encode_header(batch, payload) + payload


payloads = st.lists(st.one_of(st.binary(max_size=60), st.just(MAGIC * 3)), min_size=1, max_size=8)


def build(contents: list[bytes]) -> tuple[bytearray, list[StoredBatch]]:
    data = bytearray()
    batches = []
    for index, payload in enumerate(contents):
        batches.append(StoredBatch(FILE_OFFSET + len(data), 10 + index, 1, len(payload), 1, 2, 0, NO_TOKEN))
        data += encoded(10 + index, payload)
    return data, batches


def found_in(data: bytes | bytearray) -> list[StoredBatch | Damage]:
    return list(scan(memoryview(bytes(data)), FILE_OFFSET))


@given(payloads)
def test_all_intact_batches_are_found(contents: list[bytes]) -> None:
    data, batches = build(contents)
    assert found_in(data) == batches


@given(payloads, st.data())
def test_a_flipped_byte_costs_only_its_batch(contents: list[bytes], data: st.DataObject) -> None:
    raw, batches = build(contents)
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    hit = next(batch for batch in batches if batch.offset <= FILE_OFFSET + position < batch.end)
    found = found_in(raw)
    assert [item for item in found if isinstance(item, StoredBatch)] == [batch for batch in batches if batch != hit]
    damages = [(item.offset, item.end) for item in found if isinstance(item, Damage)]
    if hit is batches[-1]:
        assert damages in ([], [(hit.offset, hit.end)])
    else:
        assert damages == [(hit.offset, hit.end)]


@given(payloads, st.data())
def test_a_cut_costs_only_the_batch_it_goes_through(contents: list[bytes], data: st.DataObject) -> None:
    raw, batches = build(contents)
    cut = data.draw(st.integers(0, len(raw)))
    assert found_in(raw[:cut]) == [batch for batch in batches if batch.end <= FILE_OFFSET + cut]


@given(payloads, st.binary(min_size=1, max_size=200), st.data())
def test_garbage_between_batches_is_stepped_over(contents: list[bytes], garbage: bytes, data: st.DataObject) -> None:
    raw, batches = build(contents)
    at = data.draw(st.sampled_from([batch.offset - FILE_OFFSET for batch in batches]))
    found = found_in(bytes(raw[:at]) + garbage + bytes(raw[at:]))
    assert [item.first_seq for item in found if isinstance(item, StoredBatch)] == [batch.first_seq for batch in batches]


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_every_byte_of_a_header_is_checked(position: int) -> None:
    raw = bytearray(encoded(5, b"payload", flags=3, token=bytes(range(16))))
    for bit in range(8):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        found = read_header(damaged, 0, 0)
        if found is not None:  # the payload's check lies in the header, covered by its check as well
            pytest.fail(f"bit {bit} of byte {position} may change unnoticed")


def test_a_header_comes_back_as_it_was_written() -> None:
    batch = StoredBatch(77, 1 << 52, 3, 7, -1, 1 << 60, 5, bytes(range(16)))
    found = read_header(encode_header(batch, b"payload"), 0, 77)
    assert found is not None
    assert found[0] == batch
    assert (batch.end, batch.next_seq) == (77 + HEADER_BYTES + 7, (1 << 52) + 3)


def test_a_later_version_is_not_misread() -> None:
    raw = bytearray(encoded(5, b"payload"))
    raw[4] = 2
    assert read_header(raw, 0, 0) is None


def test_a_header_that_promises_more_than_there_is_ends_the_scan() -> None:
    raw, batches = build([b"a", b"b"])
    assert found_in(raw[:-1]) == batches[:1]


def test_find_header_passes_a_magic_without_a_header() -> None:
    raw = MAGIC + bytes(20) + MAGIC + encoded(5, b"payload")
    assert find_header(memoryview(raw), 0) == 28
    assert find_header(memoryview(raw), 29) == -1


def test_the_check_depends_on_the_flags() -> None:
    """Flags lie before the checked part; they are its seed."""
    raw = encoded(5, b"payload", flags=1)
    (check,) = struct.unpack_from("<I", raw, 8)
    assert check == xxh32_intdigest(raw[12:HEADER_BYTES], seed=1)
