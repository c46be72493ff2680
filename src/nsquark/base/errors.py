"""Defines the error that a command of `nsquark` raises for a mistake that its user can mend."""


class UserError(Exception):
    """Says in one sentence what is wrong and what to do; it is shown without a traceback."""
