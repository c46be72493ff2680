"""Checks the thread that does the work of `nsquark.sync`, where its users do not see it."""

import subprocess
import sys

PROGRAM = """
import sys, time
from nsquark import sync
from nsquark.client.loop_thread import process

with_nobody = sync.Producer("127.0.0.1:1")
try: with_nobody.ping()
except OSError: pass
thread = process._thread
thread._loop.call_soon_threadsafe(thread._loop._selector.close)
deadline = time.monotonic() + 60
while thread._ident in sys._current_frames() and time.monotonic() < deadline: time.sleep(0.001)
print(thread._ident in sys._current_frames())
"""


def test_a_loop_that_can_wait_no_more_ends_and_does_not_spin() -> None:
    """A program that becomes a daemon may close all descriptors, those of the loop too."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "False\n"
    assert "I/O operation on closed" in ended.stderr
