"""Runs something in a thread, beside what is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs `work` as long as the block; it is to end when the event that it gets is set."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
