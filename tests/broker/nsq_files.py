"""Writes by hand, from their format, the files that NSQ's nsqd leaves in its data path."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMESTAMP_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Stored:
    """Is a message in a disk queue."""

    body: bytes
    attempts: int = 0
    timestamp_ns: int = TIMESTAMP_NS
    id: bytes = b"0123456789abcdef"

    @property
    def record(self) -> bytes:
        payload = struct.pack(">qH16s", self.timestamp_ns, self.attempts, self.id) + self.body
        return struct.pack(">i", len(payload)) + payload


def records(bodies: Sequence[bytes], **fields: Any) -> bytes:
    return b"".join(Stored(body, **fields).record for body in bodies)


def write_queue(
    directory: Path,
    base: str,
    files: Sequence[bytes],
    *,
    depth: int,
    first_number: int = 0,
    read: tuple[int, int] | None = None,
    write: tuple[int, int] | None = None,
) -> None:
    """Writes data files with this content, and the meta file; positions are (file number, offset)."""
    last = first_number + len(files) - 1
    for number, content in enumerate(files, first_number):
        (directory / f"{base}.diskqueue.{number:06d}.dat").write_bytes(content)
    read_file, read_position = read or (first_number, 0)
    write_file, write_position = write or (last, len(files[-1]))
    (directory / f"{base}.diskqueue.meta.dat").write_text(
        f"{depth}\n{read_file},{read_position}\n{write_file},{write_position}\n"
    )


def write_messages(directory: Path, base: str, messages: Sequence[Stored]) -> None:
    write_queue(directory, base, [b"".join(message.record for message in messages)], depth=len(messages))


def write_metadata(directory: Path, topics: dict[str, dict[str, bool]], paused: Sequence[str] = ()) -> None:
    """Writes nsqd.dat: for each topic its channels and whether they are paused; `paused` names paused topics."""
    entries = [
        {
            "name": topic,
            "paused": topic in paused,
            "channels": [{"name": name, "paused": stopped} for name, stopped in channels.items()] or None,
        }
        for topic, channels in topics.items()
    ]
    (directory / "nsqd.dat").write_text(json.dumps({"topics": entries, "version": "1.3.0"}))
