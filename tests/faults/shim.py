"""Puts a layer between nsqd and its file system: it records what nsqd does there and makes single calls fail.

shim.c is compiled with the system's C compiler and loaded into nsqd by LD_PRELOAD:

    shim = Shim(tmp_path, data_path, record=True)
    daemon = Nsqd(data_path, environment=shim.environment)
    shim.set_rules(Rule("sync", "*.log", EIO, after=2, times=1))      # any time, also while nsqd runs
    shim.set_clock(3600)                                              # its wall clock, not its monotonic one
    trace = shim.trace()                                              # crash_states.py makes disks of it

A rule acts on calls of its kinds on paths that match its pattern (relative to the data path, as in fnmatch, where `*`
matches slashes too): after the first `after` of them, `times` times. Its action is an errno, or one of the constants.
"""

import atexit
import functools
import mmap
import shutil
import struct
import subprocess
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DELAY, SHORT_WRITE, KILL = 1000, 1001, 1002
"""Actions besides errnos: wait for `delay_s`, write only a part, SIGKILL before the call is made."""
ALWAYS = -1

KINDS = (
    "create",
    "open",
    "write",
    "truncate",
    "sync begins",
    "sync",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "link",
    "allocate",
    "read",
)
"""The kinds are in the order of shim.c, which counts from 1. `open` is any open, `create` one that makes a file."""
CHANGES = ("create", "write", "truncate", "sync", "rename", "unlink", "mkdir", "rmdir", "link", "allocate")

_CONTROL_BYTES = 65536
_HEADER = struct.Struct("<qqq")
"""Packs the clock's offset, how long the machine slept, and the number of rules."""
_RULE = struct.Struct("<iiqqqqqqq192s")
_RECORD = struct.Struct("<BBHHH Qqqq Q")
_MATCHED_AT, _FIRED_AT = 48, 56
_EVERYWHERE = (0, (1 << 63) - 1)


class NoCompiler(unittest.SkipTest):
    """Says that the shim cannot be built here. A test that needs it is skipped by that."""


@dataclass(frozen=True)
class Rule:
    kinds: str
    """Names of KINDS, separated by commas, or `change` for all that change something."""
    pattern: str
    action: int
    after: int = 0
    times: int = ALWAYS
    delay_s: float = 0.0
    span: tuple[int, int] = _EVERYWHERE
    """Only reads and writes that touch these bytes are meant."""

    def encode(self) -> bytes:
        names = CHANGES if self.kinds == "change" else self.kinds.split(",")
        kinds = sum(1 << (KINDS.index(name) + 1) for name in names)
        delay_us = int(self.delay_s * 1e6)
        return _RULE.pack(kinds, self.action, self.after, self.times, *self.span, delay_us, 0, 0, self.pattern.encode())


@dataclass(frozen=True, slots=True)
class Call:
    """Is a call that succeeded, or a sync that may have failed."""

    kind: str
    time_s: float
    inode: int
    path: str
    other_path: str
    offset: int
    size: int
    flags: int
    error: int
    data: bytes


@functools.cache
def library() -> Path:
    """Returns the compiled shim, made once per process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no C compiler (cc, gcc or clang) to build tests/faults/shim.c")
    directory = Path(tempfile.mkdtemp(prefix="shim"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    target, source = directory / "shim.so", Path(__file__).with_name("shim.c")
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-lpthread"], capture_output=True, text=True
    )
    if built.returncode:
        raise NoCompiler(f"{compiler} does not build tests/faults/shim.c: {built.stderr[-500:]}")
    return target


class Shim:
    """Has the control page and the trace of one data path, for the nsqds that serve it one after another."""

    def __init__(self, directory: Path, root: Path, *, record: bool = False) -> None:
        self.root = root.resolve()
        self._library = library()
        self._page_path = directory / "shim.control"
        self.trace_path = directory / "shim.trace" if record else None
        self._page_path.write_bytes(bytes(_CONTROL_BYTES))
        with self._page_path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _CONTROL_BYTES)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "SHIM_ROOT": str(self.root),
            "SHIM_CONTROL": str(self._page_path),
            "SHIM_TRACE": str(self.trace_path or ""),
        }

    def set_rules(self, *rules: Rule) -> None:
        """Replaces all rules; with none, nothing is disturbed any more. Counts start again."""
        self._page[16:24] = bytes(8)
        for number, rule in enumerate(rules):
            at = _HEADER.size + number * _RULE.size
            self._page[at : at + _RULE.size] = rule.encode()
        self._page[16:24] = len(rules).to_bytes(8, "little")

    def matched(self, rule: int = 0) -> int:
        """Returns how many calls the rule was for so far, those it let through included."""
        return self._count(rule, _MATCHED_AT)

    def fired(self, rule: int = 0) -> int:
        """Returns how many calls the rule changed so far."""
        return self._count(rule, _FIRED_AT)

    def _count(self, rule: int, field: int) -> int:
        at = _HEADER.size + rule * _RULE.size + field
        return int.from_bytes(self._page[at : at + 8], "little")

    def set_clock(self, offset_s: float = 0.0) -> None:
        """Moves the wall clock of nsqd, at once and for good."""
        self._page[0:8] = int(offset_s * 1e9).to_bytes(8, "little", signed=True)

    def set_slept(self, slept_s: float) -> None:
        """Lets the machine seem to have slept for so long: both its wall clock and the time since its boot are
        ahead.
        """
        self.set_clock(slept_s)
        self._page[8:16] = int(slept_s * 1e9).to_bytes(8, "little", signed=True)

    def trace(self) -> Iterator[Call]:
        """Yields what was done so far, in order. A record cut short by a kill ends it."""
        assert self.trace_path is not None
        raw = self.trace_path.read_bytes() if self.trace_path.exists() else b""
        at = 0
        while at + _RECORD.size <= len(raw):
            kind, flags, path_size, other_size, error, inode, offset, size, time_ns, data_size = _RECORD.unpack_from(
                raw, at
            )
            at += _RECORD.size
            if at + path_size + other_size + data_size > len(raw):
                return
            path, at = raw[at : at + path_size].decode(), at + path_size
            other, at = raw[at : at + other_size].decode(), at + other_size
            data, at = raw[at : at + data_size], at + data_size
            yield Call(KINDS[kind - 1], time_ns / 1e9, inode, path, other, offset, size, flags, error, data)
