"""Defines the errors of asking nsqds and nsqlookupds."""

from collections.abc import Iterable


class UpstreamError(Exception):
    """Says that an nsqd or nsqlookupd gave no usable answer, in the words of NSQ's nsqadmin."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        """This is the HTTP status of the answer, or 0 if there was none."""
        self.body = body
        self.address = ""
        """This is the address that was asked, or empty if it is not known."""


class AllFailed(Exception):
    """Says that none of the nsqds or nsqlookupds that were asked gave an answer, so that there is nothing to show."""

    def __init__(self, kind: str, errors: Iterable[UpstreamError]) -> None:
        super().__init__(f"failed to query any {kind}: " + joined(errors))


def joined(errors: Iterable[UpstreamError]) -> str:
    return "\n".join(map(str, errors))
