"""Files that cannot be opened are tried again and again, and no descriptor stays open."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from log.rig import make_shared
from nsquark.log.deferred import DeferredMessages
from nsquark.log.deferred_appends import Appends

NOW_MS = 1_700_000_000_000
MINUTE_MS = 60_000


def _open_files(directory: Path) -> list[str]:
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [target for target in targets if target.startswith(f"{directory}/") and os.path.isfile(target)]


@pytest.fixture
def fail_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Lets a file not be opened, for want of a descriptor."""
    real = os.open

    def fail(victim: Path) -> None:
        def refuse(path: Any, *args: Any, **more: Any) -> int:
            if Path(path) == victim:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *args, **more)

        monkeypatch.setattr(os, "open", refuse)

    return fail


def test_buckets_of_deferred_messages(tmp_path: Path, fail_open: Callable[[Path], None]) -> None:
    waiting = DeferredMessages(make_shared(), tmp_path, Appends(0), 1, NOW_MS)
    for minute in range(5):
        waiting.add(b"body", 1, NOW_MS, minute * MINUTE_MS)
    waiting.close()
    *_, last = sorted(tmp_path.glob("*.deferred"))
    fail_open(last)
    shared = make_shared()
    for _ in range(5):
        with pytest.raises(OSError, match="Too many open files"):
            DeferredMessages(shared, tmp_path, Appends(0), 1, NOW_MS)
    assert not _open_files(tmp_path)
    assert shared.disk_bytes == 0
