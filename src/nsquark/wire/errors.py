"""Defines the errors of NSQ's protocols: one tree, in one place."""


class ClientError(Exception):
    """Says what a client did wrong, in an error frame; the connection stays usable."""

    fatal = False

    def __init__(self, code: str, description: str = "") -> None:
        super().__init__(code, description)
        self.code = code
        self.description = description

    def __str__(self) -> str:
        return f"{self.code} {self.description}" if self.description else self.code

    def payload(self) -> bytes:
        """Returns the data of the error frame. A description may end in a space: NSQ's does for an empty command."""
        return str(self).encode("utf-8", "surrogateescape")


class FatalClientError(ClientError):
    """Says what a client did wrong, in an error frame, after which the connection is closed."""

    fatal = True
