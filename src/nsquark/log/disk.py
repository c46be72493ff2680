"""Knows the state of the disk as publishers meet it: what is refused and why, for /ping and for the log."""

from collections.abc import Callable, Hashable


class DiskLimitReached(OSError):
    """Says that publishing would exceed --max-disk-bytes."""


class DiskState:
    """Knows whether the disk accepts what is written to it.

    Refused messages are counted; the first refusal is reported, and so is the end of refusals, with the count. Files
    that wait to be written anew after a failed sync keep `error` set, whatever else succeeds meanwhile.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._write_error: Exception | None = None
        self._unsafe: dict[Hashable, Exception] = {}
        self._refused = 0
        self.error: Exception | None = None
        """Says why the disk is not well, and is None while it is. Hot paths read it directly, to save a call."""

    def failed(self, error: Exception, refused: int = 0) -> None:
        """Is told that a write failed, and `refused` messages with it."""
        if self._write_error is None:
            self._report(f"DISK: publishes are refused - {error}")
        self._write_error = error.with_traceback(None)  # a traceback would keep alive all that was in use
        self._refused += refused
        self._judge()

    def worked(self) -> None:
        """Is told that a write succeeded."""
        if self._write_error is not None:
            self._report(f"DISK: publishes are accepted again, {self._refused} messages were refused")
            self._write_error = None
            self._refused = 0
        self._judge()

    def mark_unsafe(self, what: Hashable, error: Exception) -> None:
        """Is told that something on the disk is not safe until `mark_safe` says so."""
        self._unsafe[what] = error.with_traceback(None)
        self._judge()

    def mark_safe(self, what: Hashable) -> None:
        self._unsafe.pop(what, None)
        self._judge()

    def _judge(self) -> None:
        self.error = self._write_error or next(iter(self._unsafe.values()), None)
