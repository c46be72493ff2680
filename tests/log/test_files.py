"""Checks that of a file on a failing disk everything is read that can be."""

import errno
import os
from pathlib import Path

import pytest

from log.rig import fail_reads, refuse_links
from nsquark.log.files import PAGE_BYTES, READ_BYTES, name_twice, read_surviving, set_aside, write_atomically


def fail_pages(monkeypatch: pytest.MonkeyPatch, bad_pages: set[int]) -> None:
    """Lets reads fail that touch one of these pages."""

    def is_bad(fd: int, size: int, offset: int) -> bool:
        return any(offset < (page + 1) * PAGE_BYTES and page * PAGE_BYTES < offset + size for page in bad_pages)

    fail_reads(monkeypatch, is_bad)


def test_a_file_that_can_be_read_stays_where_it_is(tmp_path: Path) -> None:
    path, reports = tmp_path / "file", list[str]()
    content = bytes(range(256)) * 5000
    path.write_bytes(content)
    found, is_whole = read_surviving(path, reports.append)
    assert (bytes(found), is_whole) == (content, True)
    assert path.exists()
    assert not reports


@pytest.mark.parametrize("size", [1, PAGE_BYTES, 3 * READ_BYTES + 100])
def test_pages_that_cannot_be_read_are_zeros_and_the_file_has_a_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path, reports = tmp_path / "file", list[str]()
    path.write_bytes(b"x" * size)
    bad = {0, size // 2 // PAGE_BYTES, (size - 1) // PAGE_BYTES}
    fail_pages(monkeypatch, bad)
    data, whole = read_surviving(path, reports.append)
    assert not whole
    for page in range(-(-size // PAGE_BYTES)):
        piece = data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        assert set(piece) == ({0} if page in bad else {ord("x")})
    assert len(data) == size
    assert path.stat().st_size == size, "until it is replaced, a start finds it again"
    write_atomically(path, b"new")
    assert (tmp_path / "file.bad").stat().st_size == size
    assert str(path) in reports[0]
    assert "Input/output error" in reports[0]


def test_a_file_that_cannot_be_opened_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reports = tmp_path / "file", list[str]()
    path.write_bytes(b"content")

    def fail(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(OSError, match="Input/output error"):
            read_surviving(path, reports.append)
    assert os.listdir(tmp_path) == ["file"] and not reports


def test_an_older_file_that_was_set_aside_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    fail_pages(monkeypatch, {0})
    for content in (b"first", b"second"):
        write_atomically(path, content)
        for _ in range(3):
            read_surviving(path, lambda text: None)
    assert (tmp_path / "file.bad").read_bytes() == b"first"
    assert (tmp_path / "file.2.bad").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_has_its_second_name_already_loses_the_first(tmp_path: Path) -> None:
    """rename(2) does nothing where both names are of one file."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    aside = name_twice(path)
    assert set_aside(path) == aside
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bad"]
    assert aside.read_bytes() == b"content"


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_hard_links_what_can_be_read_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    path, reports = tmp_path / "file", list[str]()
    content = b"x" * PAGE_BYTES + b"y" * READ_BYTES + b"z"
    path.write_bytes(content)
    refuse_links(monkeypatch, reason)
    with monkeypatch.context() as patch:
        fail_pages(patch, {0})
        for _ in range(2):
            data, _ = read_surviving(path, reports.append)
    write_atomically(path, b"new")
    assert (tmp_path / "file.bad").read_bytes() == data == bytes(PAGE_BYTES) + content[PAGE_BYTES:]
    assert sorted(os.listdir(tmp_path)) == ["file", "file.bad"], "one copy, and nothing unfinished"
    assert "it stays as file.bad" in reports[0]


def test_a_copy_is_durable_before_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reports = tmp_path / "file", list[str]()
    path.write_bytes(b"content")
    refuse_links(monkeypatch, errno.EPERM)

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        fail_pages(patch, {0})
        patch.setattr(os, "fsync", fail)
        read_surviving(path, reports.append)
    assert "could not be set aside" in reports[0]
    assert os.listdir(tmp_path) == ["file"]


def test_pages_of_a_disk_that_is_away_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reports = tmp_path / "file", list[str]()
    path.write_bytes(b"content")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        fail_pages(patch, {0})
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="cannot be read, and its disk cannot be written to") as raised:
            read_surviving(path, reports.append)
    assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == ["file"] and not reports
    assert read_surviving(path, reports.append) == (bytearray(b"content"), True)
