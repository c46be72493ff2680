"""Asks a nsqlookupd over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.lookup_answer import read_refusal

if TYPE_CHECKING:
    import ssl

ANSWER_BYTES_MAX: Final = 4 << 20
"""The longest answer: thousands of nsqds, or hundreds with a thousand topics each; to read more would hold the event
loop for too long.
"""
TOPIC_NOT_FOUND: Final = b"TOPIC_NOT_FOUND"

T = TypeVar("T")


class BadAnswer(FetchError):
    """Says that an answer is an error or cannot be read; the text says which."""

    def __init__(self, text: str, *, is_topic_unknown: bool = False) -> None:
        super().__init__(text)
        self.is_topic_unknown = is_topic_unknown


async def ask_lookupd(
    url: str,
    read: Callable[[bytes], T],
    *,
    connect_timeout: float,
    request_timeout: float,
    headers: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> T:
    """Returns what `read` makes of the answer to a GET; FetchError is all that can go wrong."""
    status, _, body = await fetch(
        url,
        headers=headers,
        connect_timeout=connect_timeout,
        request_timeout=request_timeout,
        ssl_context=ssl_context,
        response_bytes_max=ANSWER_BYTES_MAX,
    )
    if status != 200:
        is_unknown = status == 404 and TOPIC_NOT_FOUND in body
        raise BadAnswer(f"GET {url} failed - {status} {read_refusal(body)}", is_topic_unknown=is_unknown)
    try:
        return read(body)
    except ValueError as error:
        raise BadAnswer(f"GET {url} failed - {error}") from None
