"""Checks that a damaged memory of a deleted topic is none, and keeps nobody from deleting the next one."""

from pathlib import Path

import pytest

from nsquark.kernel.extents import Extents
from nsquark.log.deleted_topics import DeletedTopics


@pytest.mark.parametrize("damage", [b"", b"\xff", b'{"id":"\xff","ranges":[]}', b'{"id":1}', b"[" * 100_000])
def test_a_damaged_file_remembers_nothing(tmp_path: Path, damage: bytes) -> None:
    deleted = DeletedTopics(tmp_path)
    deleted.remember("t", "first", Extents())
    assert deleted.count_from("t", "first", 0) == 0
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert deleted.count_from("t", "first", 0) is None
    deleted.remember("t", "second", Extents())
    assert deleted.count_from("t", "second", 0) == 0
