"""Finds which topics of which nsqds to tap: those that the flags name, or those that nsqlookupds know now."""

from __future__ import annotations

import asyncio
import re
from typing import Final, NamedTuple

import msgspec
import re2

from nsquark.base.logs import Logger
from nsquark.client.errors import LookupFailed
from nsquark.client.lookupd import ask, nodes_url
from nsquark.tap.options import TapOptions
from nsquark.tools.sources import client_config
from nsquark.wire.documents import decode_json
from nsquark.wire.lookup_answer import PRODUCERS_MAX, Found
from nsquark.wire.names import is_ephemeral, is_valid_name

LOOKUPD_TIMEOUT: Final = "10s"
"""An nsqlookupd has this long to answer, unless --consumer-opt says otherwise; the client's default is a minute."""
_ADDRESS: Final = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:%\[\]-]{0,253}:[0-9]{1,5}")
"""Addresses must match this: each names a directory, and anyone who registers at an nsqlookupd chooses one."""


class _Node(Found, frozen=True):
    """Describes an nsqd in the answer to /nodes, with its topics, and which of them are tombstoned."""

    topics: list[str] | None = None
    tombstones: list[bool] | None = None


class _Nodes(msgspec.Struct):
    producers: list[_Node] | None


def _read_nodes(body: bytes) -> list[_Node]:
    nodes = decode_json(body, _Nodes).producers or []
    if len(nodes) > PRODUCERS_MAX:
        raise ValueError(f"{len(nodes)} nsqds, more than {PRODUCERS_MAX}")
    return nodes


class TappedTopic(NamedTuple):
    """Names a topic on the nsqd at a TCP address."""

    address: str
    topic: str


class TapDiscovery:
    """Finds what to tap: asks all nsqlookupds each time, or none if the flags name nsqds."""

    def __init__(self, options: TapOptions, logger: Logger) -> None:
        self._options = options
        self._logger = logger
        self._config = client_config("nsquark_tap", [("lookupd_poll_timeout", LOOKUPD_TIMEOUT), *options.consumer_opt])
        self._said: set[str] = set()

    async def find(self) -> list[TappedTopic]:
        """Returns what to tap now. It is nothing while no nsqlookupd answers; topics that are tapped already go on."""
        options = self._options
        if options.nsqd_tcp_address:
            found = [TappedTopic(address, topic) for address in options.nsqd_tcp_address for topic in options.topic]
        else:
            found = [TappedTopic(nsqd.address, topic) for nsqd in await self._nodes() for topic in self._topics(nsqd)]
        return [wanted for wanted in dict.fromkeys(found) if self._is_address(wanted.address)]

    async def _nodes(self) -> list[_Node]:
        answers = await asyncio.gather(*map(self._ask, self._options.lookupd_http_address))
        return [nsqd for answer in answers for nsqd in answer]

    async def _ask(self, lookupd: str) -> list[_Node]:
        """Returns all nsqds that an nsqlookupd knows, by one request; none if it does not answer."""
        try:
            return await ask(nodes_url(lookupd), _read_nodes, self._config)
        except LookupFailed as error:
            self._logger.error(f"nsqlookupd {lookupd} does not tell its nsqds: {error}")
            return []

    def _topics(self, nsqd: _Node) -> list[str]:
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
