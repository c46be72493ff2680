"""Defines how a program ends, and the error that a command of `nsquark` raises for a mistake that its user can mend."""

from typing import Final

EXIT_FATAL: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""Is what a shell says of a program that SIGINT ended."""


class UserError(Exception):
    """Says in one sentence what is wrong and what to do; it is shown without a traceback."""
