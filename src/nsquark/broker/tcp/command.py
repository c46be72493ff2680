"""Reads one command as a client sent it: the words of its line, and the body behind the line."""

from __future__ import annotations

from collections.abc import Container

from nsquark.wire.errors import FatalClientError
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote
from nsquark.wire.record import SIZE_BYTES

STATE_INIT, STATE_SUBSCRIBED, STATE_CLOSING = 0, 3, 4
"""These are a session's states by NSQ's numbers, which /stats shows: not subscribed, subscribed, and after CLS."""
UINT64_MAX = (1 << 64) - 1
DIGITS_THAT_COUNT = 64


class Command:
    """Reads the command whose line has come; `data[pos:end]` has what has arrived behind the line.

    * `next` is where the following command starts, as far as is known: reading a body moves it behind that body.
    * A body that has not arrived as a whole is read as nothing. With `at_eof` it never will: then it is an error.

    The function of a command tells whether it was carried out; if not, it is looked at again later.
    """

    __slots__ = ("at_eof", "data", "end", "next", "params", "pos")

    def __init__(self, line: bytes, data: bytearray, pos: int, end: int, at_eof: bool) -> None:
        self.params = line.split(b" ")
        self.data = data
        self.pos = self.next = pos
        self.end = end
        self.at_eof = at_eof

    @property
    def word(self) -> str:
        """Returns the command's name, which is the first word of its line."""
        return text_of(self.params[0])

    def require_params(self, count: int) -> None:
        """Refuses a line that has fewer words than `count`."""
        if len(self.params) < count:
            raise FatalClientError("E_INVALID", f"{self.word} insufficient number of parameters")

    def topic_name(self, known: Container[str], said: str = "") -> str:
        """Returns the topic that the second word names; an error begins with `said`, or with the command's name."""
        raw = self.params[1]
        name = text_of(raw)
        if name not in known and not is_valid_name(name):
            raise FatalClientError("E_BAD_TOPIC", f"{said or self.word} topic name {quote(raw)} is not valid")
        return name

    def number(self, index: int, what: str) -> int:
        """Reads the word at `index` as a number; `what` names it in the error if it is none."""
        number = decimal_of(self.params[index])
        if number is None:
            raise FatalClientError("E_INVALID", f"{self.word} could not parse {what} {text_of(self.params[index])}")
        return number

    def i32(self, pos: int, code: str, what: str) -> int | None:
        """Reads the signed number at `pos`; returns None if it has not arrived."""
        if pos + SIZE_BYTES > self.end:
            self.missing(code, what)
            return None
        return int.from_bytes(self.data[pos : pos + SIZE_BYTES], "big", signed=True)

    def size(self, limit: int, code: str, what: str, what_size: str) -> int | None:
        """Reads the size of what follows the line, from 1 to `limit`; returns None if it has not arrived."""
        size = self.i32(self.pos, code, what_size)
        if size is None:
            return None
        if size <= 0:
            raise FatalClientError(code, f"{self.word} invalid {what_size} {size}")
        if size > limit:
            raise FatalClientError(code, f"{self.word} {what} too big {size} > {limit}")
        return size

    def body(self, limit: int) -> bytes | None:
        """Returns the body, of at most `limit` bytes, of a command that is no publish, or None until it has arrived."""
        size = self.size(limit, "E_BAD_BODY", "body", "body size")
        if size is None:
            return None
        start = self.pos + SIZE_BYTES
        if start + size > self.end:
            self.missing("E_BAD_BODY", "body")
            return None
        self.next = start + size
        return bytes(memoryview(self.data)[start : self.next])

    def message(self, limit: int) -> int | None:
        """Reads the size of the message of a PUB or DPUB, at most `limit`; returns None if the message has not all
        arrived.

        Its bytes are those before `next`.
        """
        size = self.size(limit, "E_BAD_MESSAGE", "message", "message body size")
        if size is None:
            return None
        after = self.pos + SIZE_BYTES + size
        if after > self.end:
            self.missing("E_BAD_MESSAGE", "message body")
            return None
        self.next = after
        return size

    def missing(self, code: str, what: str) -> None:
        """Says that something has not arrived: it may still come, or the client is told with this code."""
        if self.at_eof:
            raise FatalClientError(code, f"{self.word} failed to read {what}")


def failed(word: str, error: Exception) -> FatalClientError:
    """Makes the error for a command that nsqd understood and could not carry out."""
    return FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}")


def text_of(raw: bytes) -> str:
    """Reads a client's bytes, whatever they are, as text that can be turned back into the same bytes."""
    return raw.decode("utf-8", "surrogateescape")


def decimal_of(raw: bytes) -> int | None:
    """Reads decimal digits as NSQ does: no digits are 0, and more than 64 bits wrap around into a signed number."""
    if not raw:
        return 0
    if not raw.isdigit():
        return None
    # Ten to the power of 64 is a multiple of two to the power of 64: digits before those change nothing.
    value = int(raw[-DIGITS_THAT_COUNT:]) & UINT64_MAX
    return value - (1 << 64) if value >= 1 << 63 else value
