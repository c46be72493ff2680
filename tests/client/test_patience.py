"""Checks how long a client is patient with others, on a loop whose clock a test moves."""

import asyncio

import pytest

from client.virtual_loop import VirtualLoop
from nsquark.client.patience import HELD_UP_MAX, within


async def wait(seconds: float) -> None:
    async with within(seconds):
        await asyncio.Event().wait()


@pytest.fixture
def waiting() -> tuple[VirtualLoop, asyncio.Task[None]]:
    """Begins to wait for a second."""
    loop = VirtualLoop()
    task = loop.create_task(wait(1))
    loop.advance(0)
    return loop, task


def hold_up(loop: VirtualLoop, seconds: float) -> None:
    """Computes for so long, and then lets the loop have two turns."""
    loop.hold_up(seconds)
    loop.advance(0)
    loop.advance(0)


def test_time_is_over(waiting: tuple[VirtualLoop, asyncio.Task[None]]) -> None:
    loop, task = waiting
    loop.advance(0.99)
    assert not task.done()
    loop.advance(0.01)
    loop.advance(0)
    with pytest.raises(TimeoutError):
        task.result()


def test_time_in_which_the_loop_was_held_up_is_added(waiting: tuple[VirtualLoop, asyncio.Task[None]]) -> None:
    loop, task = waiting
    hold_up(loop, 1.5)
    assert not task.done()
    loop.advance(0.49)
    assert not task.done()
    loop.advance(0.01)
    loop.advance(0)
    assert isinstance(task.exception(), TimeoutError)


def test_a_loop_that_is_always_held_up_comes_to_an_end(waiting: tuple[VirtualLoop, asyncio.Task[None]]) -> None:
    loop, task = waiting
    for _ in range(HELD_UP_MAX):
        hold_up(loop, 1000)
        assert not task.done()
    hold_up(loop, 10_000)
    assert isinstance(task.exception(), TimeoutError)
