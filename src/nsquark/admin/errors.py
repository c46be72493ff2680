"""Defines what goes wrong between nsqadmin and those it asks."""

from collections.abc import Iterable


class UpstreamError(Exception):
    """Says that an nsqd or nsqlookupd gave no usable answer. The text is what NSQ's nsqadmin would say of it."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        """The status of the answer, 0 if there was none."""
        self.body = body
        self.address = ""
        """The address of who gave it, as far as it is known."""


class AllFailed(Exception):
    """Says that nobody that was asked gave an answer, so that there is nothing to show."""

    def __init__(self, kind: str, errors: Iterable[UpstreamError]) -> None:
        super().__init__(f"failed to query any {kind}: " + joined(errors))


def joined(errors: Iterable[UpstreamError]) -> str:
    return "\n".join(map(str, errors))
