"""The data path: its lock, nsqd.dat as NSQ writes it, and this nsqd's identity."""

import errno
import fcntl
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from nsquark import NSQ_VERSION
from nsquark.log.files import DIRECTORY_MODE, write_atomically

METADATA_FILE = "nsqd.dat"
OWN_DIRECTORY = "nsquark"
TOPICS_DIRECTORY = "topics"
DOOMED_PREFIX = "x."
"""Directories of deleted topics, until they are gone."""


class DataPathError(Exception):
    """The data path cannot be used; the text says why."""


class ListedChannel(msgspec.Struct):
    name: str
    paused: bool = False
    owner: str = ""


class ListedTopic(msgspec.Struct):
    name: str
    paused: bool = False
    channels: list[ListedChannel] | None = None


class Metadata(msgspec.Struct):
    """nsqd.dat, NSQ's or ours."""

    topics: list[ListedTopic] | None = None
    nsquark: int = 0


class Node(msgspec.Struct):
    """Who this nsqd is, for as long as its data path lives."""

    id: str
    format: int = 1


class DataPath:
    """An existing directory, locked for this process."""

    def __init__(self, path: str) -> None:
        self.path = Path(path or ".")
        self.own = self.path / OWN_DIRECTORY
        self.topics = self.own / TOPICS_DIRECTORY
        self._lock_fd = -1

    def lock(self) -> None:
        """Takes the same lock as NSQ's nsqd, so that neither runs on the other's data."""
        try:
            self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            if error.errno in (errno.EAGAIN, errno.EACCES) and self._lock_fd >= 0:
                raise DataPathError(
                    f"failed to lock data-path: cannot flock directory {self.path} - resource temporarily unavailable"
                    " (possibly in use by another instance of nsqd)"
                ) from None
            raise DataPathError(f"failed to lock data-path: open {self.path}: {reason}") from None

    def prepare(self) -> Node:
        """Makes our own directories if they are missing; this nsqd's identity."""
        try:
            self.topics.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            node_file = self.own / "node.json"
            if node_file.exists():
                return msgspec.json.decode(node_file.read_bytes(), type=Node)
            node = Node(str(uuid.uuid4()))
            write_atomically(node_file, msgspec.json.encode(node))
            return node
        except (OSError, msgspec.MsgspecError) as error:
            raise DataPathError(f"data-path {self.path} cannot be used - {error}") from None

    def listed_topics(self) -> dict[str, ListedTopic]:
        """What nsqd.dat names, if it is ours and can be read: to make again what the topics' own files have lost."""
        try:
            metadata = msgspec.json.decode((self.path / METADATA_FILE).read_bytes(), type=Metadata)
        except (OSError, msgspec.MsgspecError):
            return {}
        return {topic.name: topic for topic in metadata.topics or ()} if metadata.nsquark else {}

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def encode_metadata(topics: Iterable[ListedTopic]) -> bytes:
    """nsqd.dat; `nsquark` marks it as ours and `owner` a channel that is read by range, which NSQ both ignores."""
    document: dict[str, Any] = {
        "topics": [
            {
                "name": topic.name,
                "paused": topic.paused,
                "channels": [_encode_channel(channel) for channel in topic.channels or ()] or None,
            }
            for topic in topics
        ],
        "version": NSQ_VERSION,
        "nsquark": 1,
    }
    return msgspec.json.encode(document) + b"\n"


def _encode_channel(channel: ListedChannel) -> dict[str, Any]:
    owner = {"owner": channel.owner} if channel.owner else {}
    return {"name": channel.name, "paused": channel.paused, **owner}
