"""This is nsqlookupd itself: two listeners over one registry."""

import asyncio
import contextlib
from collections.abc import Iterator

from nsquark.base.addresses import Listener, listen
from nsquark.base.hosts import HOSTNAME
from nsquark.base.logs import Logger
from nsquark.base.version import NSQ_VERSION
from nsquark.lookupd.http import LookupdApi
from nsquark.lookupd.metrics import Metrics
from nsquark.lookupd.options import LookupdOptions
from nsquark.lookupd.registry import Registry
from nsquark.lookupd.session import LookupdLimits, LookupdSessions
from nsquark.web.browsers import BrowserGuard
from nsquark.web.messages import encode_json
from nsquark.web.server import HttpLimits, HttpServer


class ListenError(Exception):
    """Says that an address cannot be listened on, so that nsqlookupd does not start."""


class Nsqlookupd:
    """Runs nsqlookupd: `start` opens both ports, `stop` closes them and every connection."""

    def __init__(self, options: LookupdOptions, logger: Logger, limits: LookupdLimits | None = None) -> None:
        self._options = options
        self._logger = logger
        self._registry = Registry(options.inactive_producer_timeout, options.tombstone_lifetime)
        self._sessions = LookupdSessions(self._registry, logger, limits or LookupdLimits())
        api = LookupdApi(self._registry, Metrics(self._registry, self._sessions), logger)
        browsers = BrowserGuard("nsqlookupd", (options.broadcast_address, *options.http_allowed_hosts))
        self._http = HttpServer(api.router(), browsers, HttpLimits(), logger)
        self._tcp: asyncio.AbstractServer | None = None
        self._closer: asyncio.Task[None] | None = None
        self._listeners: list[tuple[str, Listener]] = []
        self.tcp_port = 0
        self.http_port = 0

    async def start(self) -> None:
        # TCP is bound and not served yet: the answer to IDENTIFY names the HTTP port, which is not known yet.
        with listening_on(self._options.tcp_address):
            tcp = listen(self._options.tcp_address)
            self._tcp = await tcp.serve(self._sessions.new_session, start=False)
            self._listeners.append(("TCP", tcp))
        with listening_on(self._options.http_address):
            http = listen(self._options.http_address)
            await self._http.serve(http)
            self._listeners.append(("HTTP", http))
        self.tcp_port, self.http_port = tcp.port, http.port
        self._sessions.identity = encode_json(
            {
                "broadcast_address": self._options.broadcast_address,
                "hostname": HOSTNAME,
                "http_port": self.http_port,
                "tcp_port": self.tcp_port,
                "version": NSQ_VERSION,
            }
        )
        await self._tcp.start_serving()
        self._closer = asyncio.get_running_loop().create_task(self._close_silent())
        for kind, listener in self._listeners:
            self._logger.info(f"{kind}: listening on {listener.shown}")

    async def stop(self) -> None:
        if self._closer is not None:
            self._closer.cancel()
        for kind, listener in self._listeners:
            self._logger.info(f"{kind}: closing {listener.shown}")
        if self._tcp is not None:
            self._tcp.close()
            self._sessions.close_all()
        await self._http.close()

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(self._sessions.limits.stranger_check_s)
            self._sessions.close_silent_strangers()


@contextlib.contextmanager
def listening_on(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ListenError(f"listen ({address}) failed - {error}") from error
