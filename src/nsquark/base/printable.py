"""Makes text that strangers wrote fit for a log or a terminal: it can neither begin a line nor move the cursor."""

from typing import Final

TEXT_CHARS_MAX: Final = 4096
"""A line has at most this many characters: more than honest peers send, too few to fill a disk by one command."""


def printable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Returns one line of at most about `chars_max` characters; what is not printable becomes an escape."""
    if len(text) > chars_max:
        text = f"{text[:chars_max]}... ({len(text) - chars_max} more characters)"
    return text if text.isprintable() else "".join(map(escaped, text))


def printable_lines(text: str) -> str:
    """Makes text printable that may have several lines, such as an error's text on a terminal."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def escaped(char: str) -> str:
    """Escapes a character as Go's %q does, without the quotes."""
    if char.isprintable():
        return char
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_NAMED: Final = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
