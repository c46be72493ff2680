"""Turns the commit of a publish into the answer to a request."""

import asyncio
from typing import Final

from nsquark.kernel.commits import Commit
from nsquark.kernel.replies import ReplyQueue
from nsquark.web.messages import Pending, Response, error, text

OK: Final = text("OK")
EXITING: Final = error(503, "EXITING")
"""These two answers are always the same, so their bytes are made once."""


class PublishAnswer(Pending):
    """Answers a publish when the commit that it waits for is settled."""

    def settled(self, commit: Commit) -> None:
        self.resolve(_outcome(commit))


class LaneReplies(ReplyQueue):
    """Answers the publishes that go through a connection's lane."""

    def refusal(self, word: str, error: Exception) -> bytes:
        return not_stored(error).wire()


class _Waiter:
    def __init__(self, outcome: asyncio.Future[None]) -> None:
        self._outcome = outcome

    def settled(self, commit: Commit) -> None:
        if not self._outcome.done():
            self._outcome.set_result(None)


async def settled(commit: Commit) -> None:
    """Returns when the commit is settled, with an error or without."""
    if not commit.is_settled:
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        commit.waiters.append(_Waiter(outcome))
        await outcome


def answered_by(commit: Commit) -> Response | Pending:
    """Returns the answer to a publish: at once if its commit is settled, else when it is."""
    if commit.is_settled:
        return _outcome(commit)
    answer = PublishAnswer()
    commit.waiters.append(answer)
    return answer


def not_stored(failure: object) -> Response:
    """Says why nothing was stored: the disk refused it, or nsqd or the topic is exiting."""
    return error(503, f"DISK_ERROR: {failure}") if isinstance(failure, OSError) else EXITING


def _outcome(commit: Commit) -> Response:
    return OK if commit.error is None else not_stored(commit.error)
