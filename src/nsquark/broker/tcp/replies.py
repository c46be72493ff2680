"""Replies in order: each waits for all earlier ones, whichever topic commits first."""

from collections.abc import Callable

from nsquark.kernel.publish import ReplyQueue
from nsquark.wire.errors import FatalClientError
from nsquark.wire.frames import OK, FrameType, frame


class Replies(ReplyQueue):
    """Frames of the TCP protocol; the session says what they are written to, and that may change."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__(OK, None, close)

    def refusal(self, word: str, error: Exception) -> bytes:
        return frame(FrameType.ERROR, FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}").payload())
