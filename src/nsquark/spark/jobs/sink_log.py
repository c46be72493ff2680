"""Reads and replaces the list of an archive's files, which Spark's sink keeps, batch by batch, in `_spark_metadata`.

Each batch has a file `<number>`, and every tenth a file `<number>.compact` instead, which also has what all before it
had. Readers use the last `.compact` and the files after it. The first line of a file is a version; each other line
names a file of the archive.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from nsquark.base.errors import UserError
from nsquark.log.files import names_like, sync_directory
from nsquark.spark.jobs.layout import CHECKPOINT, LIST_EVERY_BATCHES, SPARK_LOG

VERSION: Final = "v1"
UNFINISHED: Final = ".nsquark.tmp"
"""Ends the names of new files of the list that are not yet in their place."""
READ_TRIES: Final = 5
_NAME = re.compile(r"(\d+)(\.compact)?")


@dataclass(frozen=True)
class Listed:
    """Holds a line of the list, which names a file of the archive."""

    fields: dict[str, Any]

    @property
    def path(self) -> Path:
        return Path(unquote(urlsplit(self.fields["path"]).path))

    @property
    def size(self) -> int:
        return int(self.fields["size"])


@dataclass(frozen=True)
class ListFile:
    """Reads and replaces one file of the list, for the batch `number`."""

    path: Path
    number: int
    is_whole: bool
    """It names all files of the archive up to its batch."""

    def read(self) -> list[Listed]:
        return entries_in(self.path)

    def write(self, entries: list[Listed]) -> None:
        """Replaces the file as a whole: a reader, also after a crash, finds the old list or the new one."""
        lines = [VERSION, *(json.dumps(entry.fields, separators=(",", ":")) for entry in entries)]
        mode = self.path.stat().st_mode & 0o777  # if Spark has removed the list, this raises before anything is made
        temporary = self.path.with_name(f".{self.path.name}{UNFINISHED}")
        with temporary.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write("\n".join(lines))
            file.flush()
            os.fsync(file.fileno())
        # The checksum of the old content goes first: with it, Hadoop would take the new content for damaged.
        checksum_of(self.path).unlink(missing_ok=True)
        sync_directory(self.path.parent)
        os.replace(temporary, self.path)
        sync_directory(self.path.parent)


def entries_in(path: Path) -> list[Listed]:
    """Returns the entries of one file of a list: of what a sink has written, or a source has read."""
    version, *lines = path.read_text(encoding="utf-8").splitlines()
    if version != VERSION:
        raise UserError(f"{path} has the version {version!r}, not {VERSION}: use a newer nsquark")
    return [Listed(json.loads(line)) for line in lines if line]


def remove_unfinished(archive: Path) -> None:
    """Removes what a run that was killed has left of the file of the list that it was writing."""
    for path in names_like(archive / SPARK_LOG, f".*{UNFINISHED}"):
        path.unlink()


def checksum_of(path: Path) -> Path:
    """Returns where Hadoop keeps the checksum of a file, if it has one."""
    return path.with_name(f".{path.name}.crc")


def live_lists(archive: Path) -> list[ListFile]:
    """Returns the files of the list that a reader which starts now uses."""
    found = _lists(archive)
    first = max((file.number for file in found if file.is_whole), default=-1)
    return sorted((file for file in found if file.number >= first), key=lambda file: file.number)


def last_batch(archive: Path) -> int:
    """Returns the last batch in the list, or -1."""
    found = _lists(archive) if (archive / SPARK_LOG).is_dir() else []
    return max((file.number for file in found), default=-1)


def _lists(archive: Path) -> list[ListFile]:
    matches = [(path, _NAME.fullmatch(path.name)) for path in (archive / SPARK_LOG).iterdir()]
    return [ListFile(path, int(match[1]), match[2] is not None) for path, match in matches if match is not None]


def live_files(archive: Path) -> set[Path]:
    """Returns the files of the archive that a reader which starts now sees."""
    for _ in range(READ_TRIES - 1):
        # Spark may just have removed a list that a newer one replaces.
        with contextlib.suppress(FileNotFoundError):
            return _named(archive)
    return _named(archive)


def _named(archive: Path) -> set[Path]:
    return {entry.path for file in live_lists(archive) for entry in file.read()}


def may_be_listing(archive: Path, checkpoint: Path | None) -> bool:
    """Tells whether an archive job may be writing the next whole list now, from lists that it has already read.

    A job does so only in the batch after the newest in the list, if that batch is a tenth one and has begun.
    """
    lists = _lists(archive)
    following = max((file.number for file in lists), default=-1) + 1
    # If whole lists come at other batches, Spark has other settings: then any batch may write the next one.
    is_tenth = all((file.number + 1) % LIST_EVERY_BATCHES == 0 for file in lists if file.is_whole)
    may_list = not is_tenth or (following + 1) % LIST_EVERY_BATCHES == 0
    return may_list and _has_begun(checkpoint or archive / CHECKPOINT, following)


def _has_begun(checkpoint: Path, batch: int) -> bool:
    """Tells whether a batch has begun and not ended; if the checkpoint is not known, it may have."""
    if not (checkpoint / "offsets").is_dir():
        return True
    return (checkpoint / "offsets" / str(batch)).exists() and not (checkpoint / "commits" / str(batch)).exists()


def with_merged(entries: list[Listed], merged: Mapping[Path, list[Path]], sizes: Mapping[Path, int]) -> list[Listed]:
    """Returns a list in which merged files take the place of those that they were made from."""
    into = {original: path for path, originals in merged.items() for original in originals}
    listed = [entry for entry in entries if entry.path not in into]
    gone: dict[Path, list[Listed]] = {}
    for entry in entries:
        if entry.path in into:
            gone.setdefault(into[entry.path], []).append(entry)
    for path, parts in gone.items():
        url = parts[0].fields["path"].rpartition("/")[0] + f"/{path.name}"
        newest = max(part.fields["modificationTime"] for part in parts)
        fields = {**parts[0].fields, "path": url, "size": sizes[path], "modificationTime": newest}
        listed.append(Listed(fields))
    return listed
