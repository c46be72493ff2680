"""Asks an nsqlookupd over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.lookup_answer import read_refusal

if TYPE_CHECKING:
    import ssl

ANSWER_BYTES_MAX: Final = 4 << 20
"""An answer has at most this many bytes: thousands of nsqds, or hundreds with a thousand topics each. Reading more
would block the event loop for too long.
"""
TOPIC_NOT_FOUND: Final = b"TOPIC_NOT_FOUND"

T = TypeVar("T")


class BadAnswer(FetchError):
    """Says that an answer is an error or cannot be read; the text says which."""

    def __init__(self, text: str, status: int = 200, *, is_topic_unknown: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.is_topic_unknown = is_topic_unknown


async def ask_lookupd(
    url: str,
    read: Callable[[bytes], T],
    *,
    connect_timeout: float,
    request_timeout: float,
    headers: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    answer_bytes_max: int = ANSWER_BYTES_MAX,
) -> T:
    """Returns what `read` makes of the answer to a GET; whatever goes wrong is a FetchError."""
    status, _, body = await fetch(
        url,
        headers=headers,
        connect_timeout=connect_timeout,
        request_timeout=request_timeout,
        ssl_context=ssl_context,
        response_bytes_max=answer_bytes_max,
    )
    if status != 200:
        is_unknown = status == 404 and TOPIC_NOT_FOUND in body
        raise BadAnswer(f"GET {url} failed - {status} {read_refusal(body)}", status, is_topic_unknown=is_unknown)
    try:
        return read(body)
    except ValueError as error:
        raise BadAnswer(f"GET {url} failed - {error}") from None
