"""What a command of `nsquark` raises for mistakes that its user can mend."""


class UserError(Exception):
    """One sentence that says what is wrong and what to do; it is shown without a traceback."""
