"""Checks the event loop of every program."""

import asyncio
import sys

import pytest
import uvloop

from nsquark.base.event_loop import run


async def _own_loop() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_it_is_uvloops() -> None:
    assert run(_own_loop()) is uvloop.Loop


def test_without_uvloop_it_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert issubclass(run(_own_loop()), asyncio.BaseEventLoop)
