"""Go's %q, in which NSQ shows names inside its error texts."""

from nsquark.base.printable import escaped

_QUOTED = {'"': '\\"', "\\": "\\\\"}


def quote(raw: bytes) -> str:
    """Double-quoted; what is not printable, or not UTF-8, as an escape."""
    return '"' + "".join(_QUOTED.get(char) or escaped(char) for char in raw.decode("utf-8", "surrogateescape")) + '"'
