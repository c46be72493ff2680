"""Asks a pool's nsqlookupds which nsqds it uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from nsquark.client.config import Config
from nsquark.client.errors import LookupFailed, WrongPort
from nsquark.client.logs import Log, client_log
from nsquark.client.lookupd import PollLoop, TopicNotFound, lookup, lookup_url, nodes, usable_addresses
from nsquark.wire.lookup_answer import Found

ROUNDS_ABSENT_MAX: Final = 2
"""An nsqd may be missing from so many answers: one that registers anew is missing now and then."""


class PoolDiscovery:
    """Asks every nsqlookupd in each round. `on_change` gets who is there, and who no longer is.

    An nsqd is gone when no nsqlookupd named it in several rounds in which all answered. If nobody is named at all, the
    nsqlookupds were restarted rather than all nsqds stopped: then nobody is gone.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        topic: str | None,
        config: Config,
        on_change: Callable[[list[str], list[str]], None],
        log: Log = client_log,
    ) -> None:
        self._log = log
        self._addresses = list(dict.fromkeys(addresses))
        for address in self._addresses:
            lookup_url(address, topic or "")
        self._topic = topic
        self._config = config
        self._on_change = on_change
        self._errors: dict[str, LookupFailed] = {}
        """Has what each nsqlookupd failed with that had no answer the last time."""
        self._known: set[str] = set()
        self._rounds_absent: Counter[str] = Counter()
        self._loop = PollLoop(self._round, config, log)

    def start(self) -> None:
        self._loop.start()

    async def asked(self, timeout_s: float) -> None:
        """Waits until all were asked once, for so long at the most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._loop.has_asked.wait()

    def poll_soon(self) -> None:
        self._loop.poll_soon()

    async def close(self) -> None:
        await self._loop.close()

    @property
    def wrong(self) -> WrongPort | None:
        """Returns an error if no address is that of an nsqlookupd's HTTP port."""
        wrong = [error for error in self._errors.values() if isinstance(error, WrongPort)]
        return wrong[0] if len(wrong) == len(self._addresses) else None

    @property
    def error(self) -> LookupFailed | None:
        """Returns what one of them failed with."""
        return next(iter(self._errors.values()), None)

    async def _round(self) -> None:
        answers = await asyncio.gather(*map(self._ask, self._addresses))
        present = usable_addresses((nsqd for answer in answers for nsqd in answer or ()), self._log)
        absent: list[str] = []
        if present and None not in answers:
            absent = self._absent(present)
        self._known.update(present)
        self._known.difference_update(absent)
        self._on_change(present, absent)

    async def _ask(self, address: str) -> list[Found] | None:
        try:
            if self._topic is None:
                found = await nodes(address, self._config)
            else:
                found = await lookup(address, self._topic, self._config)
        except TopicNotFound as error:
            self._errors[address] = error
            self._log.debug("nsqlookupd %s knows no nsqd with topic %s yet", address, self._topic)
            return []
        except LookupFailed as error:
            self._errors[address] = error
            self._log.error("error querying nsqlookupd (%s) - %s", address, error)
            return None
        self._errors.pop(address, None)
        return found

    def _absent(self, present: list[str]) -> list[str]:
        missing = self._known.difference(present)
        self._rounds_absent = Counter({address: self._rounds_absent[address] + 1 for address in missing})
        return [address for address, rounds in self._rounds_absent.items() if rounds >= ROUNDS_ABSENT_MAX]
