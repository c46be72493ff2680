"""Finds which topics of which nsqds are to be tapped: those of the flags, or those that nsqlookupds know now."""

from __future__ import annotations

import asyncio
import re
from typing import Final, NamedTuple

import re2

from nsquark.base.logs import Logger
from nsquark.client.errors import LookupFailed
from nsquark.client.lookupd import nodes
from nsquark.tap.options import TapOptions
from nsquark.tools.sources import client_config
from nsquark.wire.lookup_answer import Found
from nsquark.wire.names import is_ephemeral, is_valid_name

_ADDRESS: Final = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:%\[\]-]{0,253}:[0-9]{1,5}")
"""An address names a directory, and whoever registers at a nsqlookupd chooses it."""


class TappedTopic(NamedTuple):
    address: str
    topic: str


class TapDiscovery:
    """Asks all nsqlookupds in each round, or none where nsqds are given."""

    def __init__(self, options: TapOptions, logger: Logger) -> None:
        self._options = options
        self._logger = logger
        self._config = client_config("nsquark_tap", options.consumer_opt)
        self._said: set[str] = set()

    async def find(self) -> list[TappedTopic]:
        """Returns what is to be tapped now; nothing while no nsqlookupd answers, and what is tapped goes on."""
        options = self._options
        if options.nsqd_tcp_address:
            found = [TappedTopic(address, topic) for address in options.nsqd_tcp_address for topic in options.topic]
        else:
            found = [TappedTopic(nsqd.address, topic) for nsqd in await self._nodes() for topic in self._topics(nsqd)]
        return [wanted for wanted in dict.fromkeys(found) if self._is_address(wanted.address)]

    async def _nodes(self) -> list[Found]:
        async def ask(lookupd: str) -> list[Found]:
            try:
                return await nodes(lookupd, self._config)
            except LookupFailed as error:
                self._logger.error(f"nsqlookupd {lookupd} was not asked: {error}")
                return []

        answers = await asyncio.gather(*map(ask, self._options.lookupd_http_address))
        return [nsqd for answer in answers for nsqd in answer]

    def _topics(self, nsqd: Found) -> list[str]:
        topics = nsqd.topics or []
        tombstones = nsqd.tombstones or []
        return [
            topic
            for index, topic in enumerate(topics)
            if self._is_wanted(topic) and not (index < len(tombstones) and tombstones[index])
        ]

    def _is_wanted(self, topic: str) -> bool:
        if not is_valid_name(topic) or is_ephemeral(topic):
            return False
        pattern = self._options.topic_pattern
        return topic in self._options.topic or bool(pattern and re2.search(pattern, topic))

    def _is_address(self, address: str) -> bool:
        if _ADDRESS.fullmatch(address):
            return True
        if address not in self._said:
            self._said.add(address)
            self._logger.warning(f"an nsqd at {address!r} is not tapped: that is no address")
        return False
