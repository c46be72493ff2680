"""Knows which names topics and channels may have."""

import re

NAME_LENGTH_MAX = 64
EPHEMERAL_SUFFIX = "#ephemeral"

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")


def is_valid_name(name: str) -> bool:
    """Tells whether a topic or a channel may have this name: both have the same rule."""
    return 1 <= len(name) <= NAME_LENGTH_MAX and _NAME.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    return name.endswith(EPHEMERAL_SUFFIX)
