"""This is `nsquark compact-archive`: it merges an archive's many small files into few, while others read and write it.

An archive has the files that Spark's list names (`sink_log`). Files are merged only with others of the same file of
that list, which is then replaced by one rename. So each file of the list stands for the same messages before and after,
a reader may see any mix of old and new ones, and an archive job that copies them into its next whole list copies the
same messages.

Only removing the old files needs care: no list may name them, not even one that is just being made from older lists. A
journal says what is under way before anything is done, and a run that was killed is cleared up by the next.
"""

import argparse
import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet

from nsquark.base.errors import UserError
from nsquark.log.files import sync_directory, write_atomically
from nsquark.spark.jobs.layout import COMPACTION, DELTA_LOG, SPARK_LOG
from nsquark.spark.jobs.progress import Terminal
from nsquark.spark.jobs.sink_log import (
    Listed,
    ListFile,
    checksum_of,
    live_files,
    live_lists,
    may_be_listing,
    remove_unfinished,
    with_merged,
)
from nsquark.wire.documents import decode_json

MIB: Final = 1 << 20
TARGET_MIB_DEFAULT: Final = 128
SMALL_FRACTION: Final = 0.75
"""A file is small, and worth merging, below this fraction of the target."""
STEP_FILES_MAX: Final = 50
"""At most this many merged files go into a list at a time: each time the whole list is written anew."""
ROW_GROUP_BYTES: Final = 64 << 20
"""This many bytes of rows are in memory before they are written."""
READ_ROWS: Final = 10_000
JOURNAL: Final = "journal.json"
LOCK: Final = "lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=Path, metavar="DIR", help="what `nsquark archive` wrote, on this machine")
    parser.add_argument(
        "--target-mib",
        type=int,
        default=TARGET_MIB_DEFAULT,
        metavar="N",
        help=f"size of the files that small ones are merged into (default: {TARGET_MIB_DEFAULT})",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="that of the archive, if it has one elsewhere")
    parser.epilog = (
        "Example: nsquark compact-archive /var/lib/archive. The archive job may go on meanwhile. If it is killed,"
        " nothing is lost or doubled, and the next run goes on."
    )


def run(args: argparse.Namespace) -> int:
    if args.target_mib < 1:
        raise UserError("--target-mib is below 1: write the size of merged files in MiB")
    archive = args.archive.resolve()
    if (archive / DELTA_LOG).is_dir():
        print(_optimize_delta(archive, args.target_mib * MIB))
        return 0
    if not (archive / SPARK_LOG).is_dir():
        raise UserError(f"{archive} is no archive: it has neither {SPARK_LOG} nor {DELTA_LOG}")
    done = Compaction(archive, args.target_mib * MIB, args.checkpoint).run()
    left = f"; {done.left:,} old files are removed by the next run" if done.left else ""
    print(f"{done.files:,} files of {done.messages:,} messages became {done.merged:,}{left}: {archive}")
    return 0


class Merge(msgspec.Struct, frozen=True):
    """Names files of one directory, and the one that takes their place."""

    merged: str
    originals: list[str]


@dataclass
class CompactDone:
    """Counts what a run has done."""

    files: int = 0
    merged: int = 0
    messages: int = 0
    left: int = 0
    """This many old files could not be removed yet."""


class Compaction:
    """Merges the files of an archive. Always: its list names each message once, whatever happens to this process."""

    def __init__(self, archive: Path, target_bytes: int, checkpoint: Path | None) -> None:
        self._archive = archive
        self._target_bytes = target_bytes
        self._checkpoint = checkpoint
        self._journal = archive / COMPACTION / JOURNAL
        self._terminal = Terminal()

    def run(self) -> CompactDone:
        with _locked(self._archive):
            remove_unfinished(self._archive)
            done = CompactDone(left=self._clear_up())
            # A merged file whose originals are still there must not be merged again: the journal would forget them.
            if not done.left:
                for file in live_lists(self._archive):
                    self._compact(file, done)
                done.left = self._clear_up()
            return done

    def _compact(self, file: ListFile, done: CompactDone) -> None:
        try:
            entries = file.read()
        except FileNotFoundError:
            # Spark has replaced the file by a newer list, which is left to the next run.
            return
        merges = list(self._plan(entries))
        for first in range(0, len(merges), STEP_FILES_MAX):
            if file not in live_lists(self._archive):
                return
            step = merges[first : first + STEP_FILES_MAX]
            self._store([*self._waiting(), *step])
            messages = {merge.merged: self._merge(merge) for merge in step}
            by_path = {self._archive / merge.merged: self._paths(merge.originals) for merge in step}
            entries = with_merged(entries, by_path, {path: path.stat().st_size for path in by_path})
            # If Spark has removed the list, no list names the merged files, and `_clear_up` removes them.
            with contextlib.suppress(FileNotFoundError):
                file.write(entries)
            self._clear_up()
            named = live_files(self._archive)
            for merge in step:
                if self._archive / merge.merged in named:
                    done.merged += 1
                    done.files += len(merge.originals)
                    done.messages += messages[merge.merged]
            self._terminal.say(f"{done.files:,} files of {done.messages:,} messages became {done.merged:,}")

    def _plan(self, entries: list[Listed]) -> Iterator[Merge]:
        """Yields what to merge: neighbours in one directory and of one schema, up to the target size."""
        groups: dict[tuple[Path, str], list[Listed]] = {}
        for entry in entries:
            if not entry.path.is_relative_to(self._archive):
                raise UserError(
                    f"the list of {self._archive} names {entry.path}: the archive was moved, and Spark does not find "
                    "its files either. Move it back"
                )
            if entry.size < self._target_bytes * SMALL_FRACTION:
                groups.setdefault((entry.path.parent, _schema_text(entry.path)), []).append(entry)
        for (directory, _), small in groups.items():
            for part in _filled(small, self._target_bytes):
                merged = directory / f"part-compact-{uuid.uuid4()}.parquet"
                yield Merge(self._relative(merged), [self._relative(entry.path) for entry in part])

    def _merge(self, merge: Merge) -> int:
        """Writes the merged file under its name, durable, and returns how many messages it has."""
        merged = self._archive / merge.merged
        temporary = _temporary(merged)
        messages = _write_merged(self._paths(merge.originals), temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, merged)
        sync_directory(merged.parent)
        return messages

    def _clear_up(self) -> int:
        """Removes files that the journal has and the list no longer names; returns how many have to wait."""
        waiting = self._waiting()
        if not waiting:
            return 0
        # The order matters: a list that is finished between the two calls is then among those that are read.
        is_listing = may_be_listing(self._archive, self._checkpoint)
        named = live_files(self._archive)
        postponed = []
        for merge in waiting:
            merged, originals = self._archive / merge.merged, self._paths(merge.originals)
            if merged not in named:
                _remove([_temporary(merged), merged])
            elif is_listing:
                postponed.append(merge)
            else:
                _remove([path for path in originals if path not in named])
        self._store(postponed)
        return sum(len(merge.originals) for merge in postponed)

    def _waiting(self) -> list[Merge]:
        try:
            return decode_json(self._journal.read_bytes(), list[Merge])
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise UserError(
                f"{self._journal} is damaged ({error}): remove it. The files that it names stay on disk, and those who"
                " read the archive by its list do not see them"
            ) from None

    def _store(self, merges: list[Merge]) -> None:
        write_atomically(self._journal, msgspec.json.encode(merges))

    def _paths(self, names: list[str]) -> list[Path]:
        return [self._archive / name for name in names]

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._archive))


def _filled(entries: list[Listed], target_bytes: int) -> Iterator[list[Listed]]:
    """Yields files in groups of about the target size; a group of one would only be copied."""
    group: list[Listed] = []
    for entry in entries:
        group.append(entry)
        if sum(member.size for member in group) >= target_bytes:
            yield group
            group = []
    if len(group) > 1:
        yield group


def _schema_text(path: Path) -> str:
    try:
        return str(pa.parquet.read_schema(path).remove_metadata())
    except FileNotFoundError:
        raise UserError(f"{path} is in the list of the archive and not on disk: put it back, from a backup") from None


def _write_merged(originals: list[Path], path: Path) -> int:
    """Writes messages in row groups of a good size, however small their files are; returns how many there are."""
    written = 0
    group: list[pa.RecordBatch] = []
    with pa.parquet.ParquetWriter(path, pa.parquet.read_schema(originals[0])) as writer:
        for original in originals:
            with pa.parquet.ParquetFile(original) as file:
                written += file.metadata.num_rows
                for batch in file.iter_batches(READ_ROWS):
                    group.append(batch)
                    if sum(member.nbytes for member in group) >= ROW_GROUP_BYTES:
                        writer.write_table(pa.Table.from_batches(group))
                        group = []
        if group:
            writer.write_table(pa.Table.from_batches(group))
    if pa.parquet.read_metadata(path).num_rows != written:
        raise UserError(f"{path} has not the {written:,} messages that were written to it: see to the disk")
    return written


def _temporary(merged: Path) -> Path:
    """Returns where a merged file is written: readers of Parquet pass over names that begin with a dot."""
    return merged.with_name(f".{merged.name}.tmp")


def _remove(paths: list[Path]) -> None:
    """Removes files and their checksums for good: what a power cut brought back would be in no journal."""
    for path in paths:
        path.unlink(missing_ok=True)
        checksum_of(path).unlink(missing_ok=True)
    for directory in {path.parent for path in paths}:
        with contextlib.suppress(FileNotFoundError):
            sync_directory(directory)


@contextlib.contextmanager
def _locked(archive: Path) -> Iterator[None]:
    (archive / COMPACTION).mkdir(exist_ok=True)
    sync_directory(archive)  # or a power cut loses the journal with it
    with (archive / COMPACTION / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another compact-archive is at work on {archive}: wait for it") from None
        yield


def _optimize_delta(archive: Path, target_bytes: int) -> str:
    """Merges files in Delta's own way, which is as safe: a commit takes files out of the table and puts others in."""
    try:
        from deltalake import DeltaTable
    except ModuleNotFoundError:
        raise UserError(f"{archive} is a Delta table and needs deltalake: pip install 'nsquark[delta]'") from None
    done = DeltaTable(str(archive)).optimize.compact(target_size=target_bytes)
    return (
        f"{done['numFilesRemoved']:,} files became {done['numFilesAdded']:,}: {archive}"
        " (Delta keeps the old ones for readers of earlier versions until a vacuum)"
    )
