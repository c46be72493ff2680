"""Puts three nsqds under load and kills one every second: what the pool said was published is there."""

import asyncio
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.pool_rig import address_of, all_messages, start_nsqds
from harness import Nsqd, StartError
from nsquark.client.envelope import unwrap
from nsquark.client.pool import ProducerPool

pytestmark = pytest.mark.ours

SHORT_S = 6.0
LONG_S = 30.0
KILL_INTERVAL_S = 1.0
KILLS_MIN = 3
PUBLISHES_PER_S_MIN = 100
BURST = 20
BURST_INTERVAL_S = 0.01
START_TRIES_MAX = 5
LOSES_DISK = 0
"""The disk of this nsqd is gone when it is killed, if any's is: two copies survive one lost disk, not two."""


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[list[Nsqd]]:
    daemons = start_nsqds(tmp_path, 3)
    yield daemons
    for daemon in daemons:
        daemon.kill()


class Load:
    """Publishes numbers until told to stop, and knows which of them got their OK."""

    def __init__(self, pool: ProducerPool, topic: str) -> None:
        self._pool = pool
        self._topic = topic
        self.acknowledged: set[int] = set()
        self.failed: list[BaseException] = []
        self.is_ending = False

    async def run(self) -> None:
        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            while not self.is_ending:
                for number in itertools.islice(numbers, BURST):
                    group.create_task(self._publish(number))
                await asyncio.sleep(BURST_INTERVAL_S)

    async def _publish(self, number: int) -> None:
        try:
            await self._pool.publish(self._topic, b"%d" % number)
        except Exception as error:
            self.failed.append(error)
        else:
            self.acknowledged.add(number)


async def _kill_in_turn(daemons: list[Nsqd], load: Load, duration_s: float, loses_disk: int | None) -> None:
    """Kills one nsqd after another, for longer than asked for where a busy machine got little done in that time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + duration_s
    kills = 0
    while loop.time() < end_s or kills < KILLS_MIN or len(load.acknowledged) < PUBLISHES_PER_S_MIN * duration_s:
        next_s = loop.time() + KILL_INTERVAL_S
        victim = kills % len(daemons)
        await asyncio.to_thread(_kill_and_start, daemons[victim], victim == loses_disk)
        kills += 1
        await asyncio.sleep(max(0.0, next_s - loop.time()))


def _kill_and_start(daemon: Nsqd, loses_disk: bool) -> None:
    daemon.kill()
    if loses_disk:
        shutil.rmtree(daemon.data_path)
        daemon.data_path.mkdir()
    for _ in range(START_TRIES_MAX - 1):
        try:
            daemon.start()
        except StartError:
            continue  # its port may be held for a moment by a connection that somebody else opened
        return
    daemon.start()


async def _run(daemons: list[Nsqd], topic: str, duration_s: float, *, copies: int, loses_disk: int | None) -> None:
    async with ProducerPool([address_of(daemon) for daemon in daemons], copies=copies) as pool:
        load = Load(pool, topic)
        publishing = asyncio.create_task(load.run())
        await _kill_in_turn(daemons, load, duration_s, loses_disk)
        load.is_ending = True
        await publishing
        assert not load.failed, f"{len(load.failed)} of {len(load.acknowledged)}: {load.failed[0]!r}"
    held = {int(unwrap(body).body) for body in await asyncio.to_thread(all_messages, daemons, topic)}
    assert not load.acknowledged - held, f"{len(load.acknowledged - held)} of {len(load.acknowledged)} lost"


async def test_what_was_published_survives_kills(trio: list[Nsqd], topic: str) -> None:
    await _run(trio, topic, SHORT_S, copies=1, loses_disk=None)


async def test_two_copies_survive_a_lost_disk(trio: list[Nsqd], topic: str) -> None:
    await _run(trio, topic, SHORT_S, copies=2, loses_disk=LOSES_DISK)


@pytest.mark.long
async def test_what_was_published_survives_kills_for_long(trio: list[Nsqd], topic: str) -> None:
    await _run(trio, topic, LONG_S, copies=1, loses_disk=None)


@pytest.mark.long
async def test_two_copies_survive_a_lost_disk_for_long(trio: list[Nsqd], topic: str) -> None:
    await _run(trio, topic, LONG_S, copies=2, loses_disk=LOSES_DISK)
