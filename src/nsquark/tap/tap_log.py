"""Serves the log of one tapped nsqd as an nsqd of nsquark does, by the log API; only the tap can publish to it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest

from nsquark.base.durations import Duration
from nsquark.base.logs import Logger
from nsquark.broker.data_path import DataPath
from nsquark.broker.nsqd import Nsqd, NsqdStartError
from nsquark.broker.options import NsqdOptions, parse_options
from nsquark.log.files import DIRECTORY_MODE
from nsquark.tap.options import TapOptions
from nsquark.web.messages import Response, json
from nsquark.web.router import Router

ID_CHARS_MAX: Final = 64
"""The id of an nsqd has at most this many characters: Spark's source refuses longer ones."""
DIGEST_CHARS: Final = 16
CACHE_BYTES: Final = 1 << 20
"""The cache of a log's end is small: it is for consumers, of which there are none. Readers by range read files."""
READERS_MAY_POST: Final = frozenset(("/log/at", "/log/plan", "/log/read", "/channel/commit", "/channel/delete"))
"""Readers may POST to these paths: they send a document to ask, or move positions of their own."""

_READ_ONLY: Final = json(
    {"message": "READ_ONLY", "reason": "this is the log of a tapped nsqd: publish to that nsqd"}, status=403
)


class TapLog(Nsqd):
    """Holds the topics of one tapped nsqd. Its id is that nsqd's address, so that readers tell nsqds apart.

    It has no TCP listener: its messages have ids of another nsqd, so consumers could not finish them here.
    """

    def __init__(self, address: str, port: int, options: TapOptions, logger: Logger) -> None:
        directory = Path(options.data_path or ".") / address
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        data = DataPath(str(directory), identity_of(address))
        data.lock()
        super().__init__(_nsqd_options(options, port, directory), logger, data, Router(_refusal_of))

    def load(self) -> None:
        """Loads the logs as nsqd does and syncs their ends, which a killed tap may have left only in the page cache."""
        super().load()
        for topic in self.topics.values():
            try:
                for segment in list(topic.log.segments or ())[-1:]:
                    segment.file.make_durable()
            except OSError as error:
                raise NsqdStartError(f"{topic.directory}: its end cannot be synced - {error}") from None

    async def listen_for_clients(self, address: str) -> None:
        """Does nothing: a tap's log has no TCP clients."""
        await asyncio.sleep(0)


def identity_of(address: str) -> str:
    """Returns the id that readers see in the column `nsqd`: the address, or its beginning and a hash if it is long."""
    if len(address) <= ID_CHARS_MAX:
        return address
    return f"{address[: ID_CHARS_MAX - DIGEST_CHARS - 1]}~{xxh3_64_hexdigest(address.encode())}"


def _refusal_of(method: str, path: str) -> Response | None:
    """Returns the refusal of a request that publishes or changes topics; None for all others."""
    return None if method == "GET" or path in READERS_MAY_POST else _READ_ONLY


def _nsqd_options(options: TapOptions, port: int, directory: Path) -> NsqdOptions:
    host = options.http_address.rpartition(":")[0]
    return dataclasses.replace(
        parse_options([]),
        http_address=f"{host}:{port}",
        broadcast_address=options.broadcast_address,
        http_allowed_hosts=options.http_allowed_hosts,
        data_path=str(directory),
        max_bytes_per_file=options.max_bytes_per_file,
        max_disk_bytes=options.max_disk_bytes,
        disk_policy=options.disk_policy,
        retention_time=options.retention_time,
        retention_bytes=options.retention_bytes,
        cache_bytes=CACHE_BYTES,
        busy_poll=Duration(0),
    )
