"""Batches are appended to a file as a whole, or the file stays as it was."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsquark.log.writer import PIECES_PER_WRITE_MAX, BatchWriter
from nsquark.wire.batch_format import NO_TOKEN, StoredBatch, scan

BEFORE = b"what was there"


def batch(first_seq: int, payload: bytes) -> tuple[StoredBatch, bytes]:
    return StoredBatch(0, first_seq, 1, len(payload), 1, 2, 0, NO_TOKEN), payload


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, BEFORE)
    yield fd
    os.close(fd)


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0)


@pytest.mark.parametrize("unwritten_bytes_max", [0, 1, 1000])
@pytest.mark.parametrize("count", [0, 1, 3, PIECES_PER_WRITE_MAX])
def test_batches_are_found_where_the_writer_says(fd: int, count: int, unwritten_bytes_max: int) -> None:
    with BatchWriter(fd, len(BEFORE), unwritten_bytes_max=unwritten_bytes_max) as writer:
        for seq in range(count):
            writer.add(*batch(seq, b"payload %d" % seq))
    assert list(scan(memoryview(content(fd))[len(BEFORE) :], len(BEFORE))) == writer.batches
    assert [found.first_seq for found in writer.batches] == list(range(count))


def test_an_error_inside_leaves_the_file_as_it_was(fd: int) -> None:
    def write_and_fail() -> None:
        with BatchWriter(fd, len(BEFORE)) as writer:
            writer.add(*batch(1, b"one"))
            writer.flush()
            assert len(content(fd)) > len(BEFORE)
            raise RuntimeError("a sync failed")

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert content(fd) == BEFORE


def test_a_write_that_is_cut_short_leaves_the_file_as_it_was(fd: int) -> None:
    """A process may write only so far, as on a full disk, and gets less than it asked for."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(BEFORE) + 100, limits[1]))
    try:
        with pytest.raises(OSError) as refused, BatchWriter(fd, len(BEFORE)) as writer:  # noqa: PT011  (errno is below)
            writer.add(*batch(1, b"x" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.ENOSPC
    assert content(fd) == BEFORE
