"""Checks that work that several ask for at once is done once, and never for nobody."""

import asyncio

import pytest

from nsquark.broker.together import Together


class SharedWork:
    """Counts its runs; each ends when it is told to."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def _steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_ask_at_once_share_a_run() -> None:
    together, work = Together[int](), SharedWork()
    work.may_end.set()
    assert await asyncio.gather(*(together.get("key", work) for _ in range(10))) == [1] * 10


async def test_who_asks_later_gets_a_run_that_begins_later() -> None:
    together, work = Together[int](), SharedWork()
    first = asyncio.ensure_future(together.get("key", work))
    await _steps()
    later = [asyncio.ensure_future(together.get("key", work)) for _ in range(3)]
    await _steps()
    assert work.begun == 1
    work.may_end.set()
    assert await asyncio.gather(first, *later) == [1, 2, 2, 2]


async def test_other_keys_have_runs_of_their_own() -> None:
    together, work = Together[int](), SharedWork()
    asked = [asyncio.ensure_future(together.get(key, work)) for key in "ab"]
    await _steps()
    assert work.begun == 2
    work.may_end.set()
    assert sorted(await asyncio.gather(*asked)) == [1, 2]


@pytest.mark.parametrize("leaving", [1, 2])
async def test_a_run_ends_when_the_last_who_asked_has_left(leaving: int) -> None:
    together, work = Together[int](), SharedWork()
    asked = [asyncio.ensure_future(together.get("key", work)) for _ in range(2)]
    await _steps()
    for task in asked[:leaving]:
        task.cancel()
    await _steps()
    assert work.cancelled == (1 if leaving == 2 else 0)
    work.may_end.set()
    if leaving == 1:
        assert await asked[1] == 1
    assert await together.get("key", work) == 2


async def test_a_run_that_waited_for_another_is_forgotten_with_those_who_asked() -> None:
    together, work = Together[int](), SharedWork()
    first = asyncio.ensure_future(together.get("key", work))
    await _steps()
    second = asyncio.ensure_future(together.get("key", work))
    await _steps()
    second.cancel()
    await _steps()
    work.may_end.set()
    assert await first == 1
    assert await together.get("key", work) == 2


async def test_a_failure_is_everybodys() -> None:
    together: Together[int] = Together()

    async def fail() -> int:
        raise OSError("no")

    outcomes = await asyncio.gather(*(together.get("key", fail) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in outcomes] == ["no"] * 3
