"""This is the clock for due times that are stored: it counts evenly, over restarts of nsqd and settings
of the wall clock.
"""

import time
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from nsquark.base.clock import now_ms, wall_ms
from nsquark.base.durations import NS_PER_MS
from nsquark.log.files import write_atomically
from nsquark.wire.documents import decode_json

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_READS_MAX = 10
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _Anchor(msgspec.Struct):
    """Says how many milliseconds to add to the time since a boot, to get the steady clock's."""

    boot: str
    offset_ms: int
    check: str = ""

    def checksum(self) -> str:
        return xxh3_64_hexdigest(f"{self.boot} {self.offset_ms}".encode())


class SteadyClock:
    """Counts milliseconds since about 1970, evenly: for due times that outlive this process.

    It starts with the wall clock and then counts by itself, whether that is set or not. The file at `path` remembers
    the start, so that it goes on through restarts of nsqd on one boot of the machine. After a boot it starts anew, and
    may differ from before by as much as the wall clock was wrong.
    """

    def __init__(self, path: Path) -> None:
        boot = _boot_id()
        anchor = _load(path)
        if anchor is None or not boot or anchor.boot != boot:
            anchor = _Anchor(boot, wall_ms() - _since_boot_ms())
            anchor.check = anchor.checksum()
            try:
                # Not synced: it is of no use after the machine went down.
                write_atomically(path, msgspec.json.encode(anchor), sync=False)
            except OSError:
                path.unlink(missing_ok=True)
        self._offset_ms = anchor.offset_ms

    def now_ms(self) -> int:
        return _since_boot_ms() + self._offset_ms

    def offset_ms(self) -> int:
        """Returns what to add to a deadline of the monotonic clock.

        The clocks are read until that takes no time: a process that lost its CPU in between would be wrong by as much,
        and so would every delay it notes.
        """
        best_ms, offset_ms = 1 << 62, 0
        for _ in range(_READS_MAX):
            before = now_ms()
            offset = self.now_ms() - before
            took_ms = now_ms() - before
            if took_ms < best_ms:
                best_ms, offset_ms = took_ms, offset
            if took_ms == 0:
                break
        return offset_ms


def _since_boot_ms() -> int:
    return time.clock_gettime_ns(_SINCE_BOOT) // NS_PER_MS


def _boot_id() -> str:
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def _load(path: Path) -> _Anchor | None:
    try:
        anchor = decode_json(path.read_bytes(), _Anchor)
    except (OSError, ValueError):
        return None
    return anchor if anchor.check == anchor.checksum() else None
