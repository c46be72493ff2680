"""Finds the topics that nsqlookupds know, and checks the expressions that choose among them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import re2

from nsquark.client.errors import LookupFailed
from nsquark.client.lookupd import topics_url
from nsquark.tools.program import Fatal
from nsquark.web.fetch import FetchError
from nsquark.web.lookupd import ask_lookupd
from nsquark.wire.lookup_answer import read_topics

ANSWER_BYTES_MAX: Final = 16 << 20
"""An answer of this size has a hundred thousand topics with long names."""


async def fetch_topics(lookupds: Sequence[str], connect_timeout_s: float, request_timeout_s: float) -> list[str]:
    """Returns the names that any of the nsqlookupds knows, in order; LookupFailed if none of them answers."""

    async def ask(address: str) -> list[str] | FetchError:
        try:
            return await ask_lookupd(
                topics_url(address),
                read_topics,
                connect_timeout=connect_timeout_s,
                request_timeout=request_timeout_s,
                answer_bytes_max=ANSWER_BYTES_MAX,
            )
        except FetchError as error:
            return error

    answers = await asyncio.gather(*map(ask, lookupds))
    failures = [str(answer) for answer in answers if isinstance(answer, FetchError)]
    if len(failures) == len(answers):
        raise LookupFailed(f"failed to query any nsqlookupd: {', '.join(failures)}")
    return sorted({name for answer in answers if isinstance(answer, list) for name in answer})


def check_topic_pattern(pattern: str) -> None:
    """Raises Fatal if RE2 cannot read the expression."""
    options = re2.Options()
    options.log_errors = False  # RE2 would write lines of its own to stderr
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]  # which RE2 gives as bytes
        shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(error)
        raise Fatal(f"invalid --topic-pattern {pattern}: {shown}") from None
    except UnicodeEncodeError:
        raise Fatal(f"invalid --topic-pattern {pattern}: it is not UTF-8") from None
