"""Remembers each start of an nsqd on its data path, and with which sequence number it began.

A reader that remembers the run in which it read last can tell two things that the data alone does not show: that two
nsqds run on copies of one data path, and that a data path was put back to an older state. In the second case its run is
not among those that the nsqd remembers, and everything from the first number of the runs since then is new to it, even
if the reader had other messages of the same numbers.
"""

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from nsquark.base.clock import wall_ms
from nsquark.log.files import read_surviving, write_atomically
from nsquark.wire.documents import decode_json

RUNS_MAX = 1000


class Run(msgspec.Struct, frozen=True):
    id: str
    """Names the run; names sort by the time at which runs began."""
    began_ms: int
    first_seq: int
    """No message of an earlier run has this number or a higher one."""


def begin_run(path: Path, first_seq: int, report: Callable[[str], None]) -> list[Run]:
    """Stores a run that begins now, durably, before anything is published in it; returns all runs, it last."""
    runs = _load(path, report)[-RUNS_MAX + 1 :]
    began_ms = wall_ms()
    runs.append(Run(f"{began_ms:012x}{secrets.token_hex(4)}", began_ms, first_seq))
    try:
        write_atomically(path, msgspec.json.encode(runs))
    except OSError as error:  # a full disk: readers by range will not recognise this run
        report(f"RUNS({path}): could not be written: {error}")
    return runs


def _load(path: Path, report: Callable[[str], None]) -> list[Run]:
    try:
        raw, _ = read_surviving(path, report)
        return decode_json(bytes(raw), list[Run])
    except FileNotFoundError:
        return []
    except ValueError as error:
        report(f"RUNS({path}): damaged ({error}); readers that remember an earlier run will ask what became of it")
        return []
