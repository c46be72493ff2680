"""Finds and changes the files of a topic, for tests that damage them."""

from pathlib import Path

from nsquark.log.cache import ChunkCache
from nsquark.log.cursors import CursorFile, Slot
from nsquark.log.services import LogSettings, LogShared


def topic_directory(data_path: Path, topic: str) -> Path:
    return data_path / "nsquark" / "topics" / f"t.{topic}"


def segments(data_path: Path, topic: str) -> list[Path]:
    """Lists the topic's data files, oldest first."""
    return sorted(topic_directory(data_path, topic).glob("*.log"))


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def cursor_slots(data_path: Path, topic: str) -> list[Slot]:
    """Returns what the topic's cursor file says now: the topic's slot, then those of its channels."""
    shared = LogShared(
        LogSettings(), 0, ChunkCache(0), lambda call: None, lambda seconds, call: None, lambda text: None
    )
    return CursorFile(shared, topic_directory(data_path, topic) / "cursors").load()
