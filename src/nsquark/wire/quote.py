"""Quotes text as Go's %q does, since NSQ shows names so inside its error texts."""

from nsquark.base.printable import escaped

_QUOTED = {'"': '\\"', "\\": "\\\\"}


def quote(raw: bytes) -> str:
    """Puts a text in double quotes; what is not printable, or not UTF-8, becomes an escape."""
    return '"' + "".join(_QUOTED.get(char) or escaped(char) for char in raw.decode("utf-8", "surrogateescape")) + '"'
