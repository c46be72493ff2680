"""Opens the data path: its lock, nsqd.dat as NSQ writes it, and this nsqd's identity."""

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from nsquark.base.version import NSQ_VERSION
from nsquark.log.files import DIRECTORY_MODE, read_surviving, sync_directory, write_atomically
from nsquark.wire.documents import decode_json

METADATA_FILE = "nsqd.dat"
OWN_DIRECTORY = "nsquark"
NODE_FILE = "node.json"
NODE_COPY = "node.json.copy"
FORMAT = 2
"""Numbers the format of all files below OWN_DIRECTORY together; docs/operations.md says what changed with each."""
TOPICS_DIRECTORY = "topics"
DOOMED_PREFIX = "x."
"""Begins the names of directories of deleted topics, until they are gone."""


class DataPathError(Exception):
    """Says that the data path cannot be used; the text says why."""


class ListedChannel(msgspec.Struct):
    name: str
    paused: bool = False
    owner: str = ""


class ListedTopic(msgspec.Struct):
    name: str
    paused: bool = False
    channels: list[ListedChannel] | None = None


class Metadata(msgspec.Struct):
    """Is the content of nsqd.dat, NSQ's or ours."""

    topics: list[ListedTopic] | None = None
    nsquark: int = 0


class NodeIdentity(msgspec.Struct):
    """Says who this nsqd is, for as long as its data path lives, and in which format its files are."""

    id: str
    format: int = FORMAT
    check: str = ""

    def checksum(self) -> str:
        return xxh3_64_hexdigest(f"{self.id} {self.format}".encode())


class DataPath:
    """Knows the directory of nsqd's files, which exists and is locked for this process."""

    def __init__(self, path: str, new_id: str = "") -> None:
        """Names the directory; an nsqd that has no id yet gets `new_id`, or one that is made up."""
        self.path = Path(path or ".")
        self._new_id = new_id
        self.own = self.path / OWN_DIRECTORY
        self.topics = self.own / TOPICS_DIRECTORY
        self._lock_fd = -1
        self.was_ours = False
        """Tells whether an nsqd of this kind has run here before."""

    def lock(self) -> None:
        """Locks the directory as NSQ's nsqd does, so that neither runs on the other's data."""
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

    def prepare(self, report: Callable[[str], None]) -> NodeIdentity:
        """Makes our own directories if they are missing; returns this nsqd's identity."""
        try:
            for directory in (self.own, self.topics):
                directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                sync_directory(directory.parent)
            with contextlib.suppress(PermissionError):
                sync_directory(self.path.resolve().parent)  # the data path itself may be new
            return self._load_node(report)
        except OSError as error:
            raise DataPathError(f"data-path {self.path} cannot be used - {error}") from None

    def _load_node(self, report: Callable[[str], None]) -> NodeIdentity:
        """Reads the node from its file or the copy; both are written anew if one is damaged or of an older format."""
        paths = [self.own / NODE_FILE, self.own / NODE_COPY]
        try:
            found = [_read_node(path, report) for path in paths]
        except OSError as error:
            raise DataPathError(f"{error}. If that lasts, move this file away: it is made anew from its copy") from None
        intact = [node for node in found if node is not None]
        self.was_ours = bool(intact)
        for node in intact:
            if node.format > FORMAT:
                raise DataPathError(
                    f"data-path {self.path} was written by a later version: its format is {node.format}, and this"
                    f" version knows up to {FORMAT}. Start that version again, or another that knows this format;"
                    ' docs/operations.md, "Upgrading", says what each format means'
                )
        if not intact and any(self.topics.iterdir()):
            raise DataPathError(
                f"{paths[0]} and its copy {paths[1].name} are damaged or gone: the id of this nsqd is lost, its"
                f" messages are not. Restore one of the two from a backup, or write a new id into {paths[0].name}:"
                f""" echo '{{"id": "'$(cat /proc/sys/kernel/random/uuid)'"}}' > {paths[0]} ."""
                " With a new id, Spark queries that read this nsqd take it for another one and begin at their start"
            )
        node = intact[0] if intact else NodeIdentity(self._new_id or str(uuid.uuid4()))
        current = NodeIdentity(node.id)
        current.check = current.checksum()
        for path, stored in zip(paths, found, strict=True):
            if stored != current:
                if stored is None and intact and path.exists():
                    report(f"NODE({path}): damaged; restored from its copy")
                try:
                    write_atomically(path, msgspec.json.encode(current))
                except OSError as error:
                    if not intact:
                        raise
                    report(f"NODE({path}): could not be written: {error}")
        return current

    def listed_topics(self) -> dict[str, ListedTopic]:
        """Returns what nsqd.dat names, if it is ours and readable: it replaces what topics' own files have lost."""
        try:
            metadata = decode_json((self.path / METADATA_FILE).read_bytes(), Metadata)
        except (OSError, ValueError):
            return {}
        return {topic.name: topic for topic in metadata.topics or ()} if metadata.nsquark else {}

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _read_node(path: Path, report: Callable[[str], None]) -> NodeIdentity | None:
    """Returns the node in a file, or None if it is damaged or not there.

    A node without a check is of format 1, or written by hand.
    """
    try:
        raw, _ = read_surviving(path, report)
        node = decode_json(bytes(raw), NodeIdentity)
    except (FileNotFoundError, ValueError):
        return None
    return node if node.id and node.check in ("", node.checksum()) else None


def encode_metadata(topics: Iterable[ListedTopic], *, ours: bool = True) -> bytes:
    """Encodes nsqd.dat; `nsquark` marks it as ours and `owner` a channel that is read by range; NSQ ignores both."""
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
    }
    if ours:
        document["nsquark"] = 1
    return msgspec.json.encode(document) + b"\n"


def _encode_channel(channel: ListedChannel) -> dict[str, Any]:
    owner = {"owner": channel.owner} if channel.owner else {}
    return {"name": channel.name, "paused": channel.paused, **owner}
