"""Rebuilds from a recorded trace of calls what a disk may hold after the power was cut.

A `Disk` follows the calls one by one. It knows of every file what was surely on disk (`synced`) and what was done to it
since (`pending`), and the same of every directory and its names. At any point `rebuild` writes one possible state:

* journal: everything up to here, in order, as a journalling file system keeps it, and as kill -9 leaves it.
* posix: of what was not synced any part: pages of writes, sizes, and names, the names of one directory in order or not.
* posix-min: only what was synced, each name only by a sync of its directory.

A sync covers what was done before it began. Where one failed, what it should have covered is never covered by a later
one: the kernel has marked those pages clean.
"""

import errno
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.shim import Call

MODELS = ("journal", "posix", "posix-min")
PAGE_BYTES = 4096
FILE_MODE = 0o600
KEEP_SIZE = 1


@dataclass(slots=True, eq=False)
class _Change:
    """Is one step of a file's content: bytes at an offset, or a new size."""

    step: int
    offset: int
    data: bytes
    size: int | None = None
    is_doomed: bool = False

    def apply(self, content: bytearray) -> None:
        if self.size is not None:
            _resize(content, self.size)
            return
        if len(content) < self.offset:
            _resize(content, self.offset)
        content[self.offset : self.offset + len(self.data)] = self.data

    def pages(self) -> "list[_Change]":
        """Cuts a write into pieces that reach the disk independently."""
        pieces, at = [], 0
        while at < len(self.data):
            end = min(len(self.data), at + PAGE_BYTES - (self.offset + at) % PAGE_BYTES)
            pieces.append(_Change(self.step, self.offset + at, self.data[at:end]))
            at = end
        return pieces


def _resize(content: bytearray, size: int) -> None:
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    del content[size:]


@dataclass(slots=True, eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)

    def sync(self, before: int) -> None:
        left = []
        for change in self.pending:
            if change.step < before and not change.is_doomed:
                change.apply(self.synced)
            else:
                left.append(change)
        self.pending = left

    def fail_sync(self, before: int) -> None:
        for change in self.pending:
            change.is_doomed |= change.step < before

    def content(self, model: str, rng: random.Random) -> bytearray:
        content = bytearray(self.synced)
        if model == "journal":
            for change in self.pending:
                change.apply(content)
        elif model == "posix":
            share = rng.choice((0.0, 0.3, 0.7, 0.95, 1.0))
            for change in self.pending:
                for piece in [change] if change.size is not None else change.pages():
                    if rng.random() < share:
                        piece.apply(content)
        return content


@dataclass(slots=True, eq=False)
class _Renaming:
    """Is a step of a directory's names: each name and what it leads to from then on, or None."""

    step: int
    names: dict[str, "_Node | None"]


@dataclass(slots=True, eq=False)
class _Directory:
    now: dict[str, "_Node"] = field(default_factory=dict)
    synced: dict[str, "_Node"] = field(default_factory=dict)
    pending: list[_Renaming] = field(default_factory=list)

    def change(self, step: int, names: dict[str, "_Node | None"]) -> None:
        self.pending.append(_Renaming(step, names))
        _apply_names(self.now, names)

    def sync(self, before: int) -> None:
        while self.pending and self.pending[0].step < before:
            _apply_names(self.synced, self.pending.pop(0).names)

    def fail_sync(self, before: int) -> None:
        """Names are in the file system's journal: a later sync covers them."""

    def entries(self, model: str, rng: random.Random) -> dict[str, "_Node"]:
        if model == "journal":
            return self.now
        entries = dict(self.synced)
        if model == "posix":
            in_order = rng.random() < 0.5
            kept = rng.randint(0, len(self.pending))
            for index, renaming in enumerate(self.pending):
                if index < kept if in_order else rng.random() < 0.5:
                    _apply_names(entries, renaming.names)
        return entries


_Node = _File | _Directory


def _apply_names(entries: dict[str, _Node], names: dict[str, _Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """Is the file system beneath a data path, as far as calls on it were recorded."""

    def __init__(self, root: Path) -> None:
        """Begins with what was in `root` before the first call, all of it synced."""
        self.root = _Directory()
        self._by_inode: dict[int, _Node] = {}
        self._step = 0
        self._sync_begun: dict[int, int] = {}
        self._load(root, self.root)

    def _load(self, path: Path, directory: _Directory) -> None:
        self._by_inode[path.stat().st_ino] = directory
        for entry in path.iterdir():
            node: _Node
            if entry.is_dir():
                node = _Directory()
                self._load(entry, node)
            else:
                node = _File(bytearray(entry.read_bytes()))
                self._by_inode[entry.stat().st_ino] = node
            directory.now[entry.name] = directory.synced[entry.name] = node

    def apply(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._step += 1
            getattr(self, "_" + call.kind.replace(" ", "_"))(call)

    # -- what calls do -----------------------------------------------------------------------------------

    def _create(self, call: Call) -> None:
        self._add(call, _File())

    def _mkdir(self, call: Call) -> None:
        self._add(call, _Directory())

    def _add(self, call: Call, node: _Node) -> None:
        directory, name = self._place(call.path)
        self._by_inode[call.inode] = node
        directory.change(self._step, {name: node})

    def _write(self, call: Call) -> None:
        assert not call.flags, "writes that sync themselves are not modelled"
        self._file(call).pending.append(_Change(self._step, call.offset, call.data))

    def _truncate(self, call: Call) -> None:
        self._file(call).pending.append(_Change(self._step, 0, b"", call.size))

    def _allocate(self, call: Call) -> None:
        file = self._file(call)
        if not call.flags & KEEP_SIZE:
            end = max(call.offset + call.size, len(file.content("journal", random.Random(0))))
            file.pending.append(_Change(self._step, 0, b"", end))

    def _sync_begins(self, call: Call) -> None:
        self._sync_begun[call.size] = self._step

    def _sync(self, call: Call) -> None:
        before = self._sync_begun.pop(call.size)
        if call.error == errno.EINTR or (call.error and not call.inode):
            return  # nothing was tried; or some file failed, and its own next sync will tell which
        for node in [self._by_inode[call.inode]] if call.inode else self._by_inode.values():
            if call.error:
                node.fail_sync(before)
            else:
                node.sync(before)

    def _rename(self, call: Call) -> None:
        (source, old), (target, new) = self._place(call.path), self._place(call.other_path)
        node = source.now[old]
        if source is target:
            source.change(self._step, {old: None, new: node})
        else:
            target.change(self._step, {new: node})
            source.change(self._step, {old: None})

    def _link(self, call: Call) -> None:
        (source, old), (target, new) = self._place(call.path), self._place(call.other_path)
        target.change(self._step, {new: source.now[old]})

    def _unlink(self, call: Call) -> None:
        directory, name = self._place(call.path)
        directory.change(self._step, {name: None})

    _rmdir = _unlink

    def _file(self, call: Call) -> _File:
        node = self._by_inode[call.inode]
        assert isinstance(node, _File)
        return node

    def _place(self, path: str) -> tuple[_Directory, str]:
        *parents, name = path.split("/")
        directory = self.root
        for parent in parents:
            node = directory.now[parent]
            assert isinstance(node, _Directory)
            directory = node
        return directory, name

    # -- what is left of it ------------------------------------------------------------------------------

    def rebuild(self, target: Path, model: str, rng: random.Random) -> None:
        """Writes one state that this disk may be in after the power was cut now."""
        self._write_directory(self.root, target, model, rng)

    def _write_directory(self, directory: _Directory, target: Path, model: str, rng: random.Random) -> None:
        target.mkdir(exist_ok=True)
        for name, node in sorted(directory.entries(model, rng).items()):
            if isinstance(node, _Directory):
                self._write_directory(node, target / name, model, rng)
            else:
                path = target / name
                path.write_bytes(node.content(model, rng))
                path.chmod(FILE_MODE)
