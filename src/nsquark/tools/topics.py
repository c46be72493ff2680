"""Finds the topics that nsqlookupds know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from nsquark.client.errors import LookupFailed
from nsquark.client.lookupd import topics_url
from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.documents import decode_json

ANSWER_BYTES_MAX: Final = 16 << 20
"""The longest answer: a hundred thousand topics with long names."""


class _Topics(msgspec.Struct):
    topics: list[str] | None


async def fetch_topics(lookupds: Sequence[str], connect_timeout_s: float, request_timeout_s: float) -> list[str]:
    """Returns the names that any of the nsqlookupds knows, in order; LookupFailed if none of them answers."""

    async def ask(address: str) -> list[str] | LookupFailed:
        url = topics_url(address)
        try:
            status, _, body = await fetch(
                url,
                connect_timeout=connect_timeout_s,
                request_timeout=request_timeout_s,
                response_bytes_max=ANSWER_BYTES_MAX,
            )
            if status != 200:
                return LookupFailed(f"GET {url} failed - {status}")
            return decode_json(body, _Topics).topics or []
        except (FetchError, ValueError) as error:
            return LookupFailed(str(error))

    answers = await asyncio.gather(*map(ask, lookupds))
    failures = [str(answer) for answer in answers if isinstance(answer, LookupFailed)]
    if len(failures) == len(answers):
        raise LookupFailed(f"failed to query any nsqlookupd: {', '.join(failures)}")
    return sorted({name for answer in answers if isinstance(answer, list) for name in answer})
