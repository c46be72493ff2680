"""Waiting for commits, for those that cannot be called back."""

import asyncio

from nsquark.kernel.commits import Commit


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
