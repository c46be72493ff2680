"""nsqlookupd itself: two listeners over one registry."""

import asyncio
import contextlib
from collections.abc import Iterator

from nsquark.base.addresses import BACKLOG, host_to_bind, join_address, listen, show_address, split_address
from nsquark.base.hosts import HOSTNAME
from nsquark.base.logs import Logger
from nsquark.base.version import NSQ_VERSION
from nsquark.lookupd.http import Api
from nsquark.lookupd.metrics import Metrics
from nsquark.lookupd.options import Options
from nsquark.lookupd.registry import Registry
from nsquark.lookupd.session import Sessions
from nsquark.web.browsers import BrowserGuard
from nsquark.web.messages import encode_json
from nsquark.web.server import HttpServer, Limits

STRANGER_SWEEP_INTERVAL_S = 5.0


class ListenError(Exception):
    """An address cannot be listened on, so nsqlookupd does not start."""


class Nsqlookupd:
    """`start` opens both ports, `stop` closes them and every connection."""

    def __init__(self, options: Options, logger: Logger) -> None:
        self._options = options
        self._logger = logger
        self._registry = Registry(options.inactive_producer_timeout, options.tombstone_lifetime)
        self._sessions = Sessions(self._registry, logger)
        api = Api(self._registry, Metrics(self._registry, self._sessions), logger)
        browsers = BrowserGuard("nsqlookupd", (options.broadcast_address, *options.http_allowed_hosts))
        self._http = HttpServer(api.router(), browsers, Limits(), logger)
        self._tcp: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.tcp_port = 0
        self.http_port = 0
        self._tcp_address = ""
        self._http_address = ""

    async def start(self) -> None:
        self.tcp_port = await self._listen_tcp(self._options.tcp_address)
        self.http_port = await self._listen_http(self._options.http_address)
        self._sessions.identity = encode_json(
            {
                "broadcast_address": self._options.broadcast_address,
                "hostname": HOSTNAME,
                "http_port": self.http_port,
                "tcp_port": self.tcp_port,
                "version": NSQ_VERSION,
            }
        )
        assert self._tcp is not None
        await self._tcp.start_serving()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        self._logger.info(f"TCP: listening on {self._tcp_address}")
        self._logger.info(f"HTTP: listening on {self._http_address}")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._tcp is not None:
            self._logger.info(f"TCP: closing {self._tcp_address}")
            self._tcp.close()
            self._sessions.close_all()
        if self._http_address:
            self._logger.info(f"HTTP: closing {self._http_address}")
        await self._http.close()

    async def _listen_tcp(self, address: str) -> int:
        """Binds without serving: the answer to IDENTIFY names the HTTP port, which is not known yet."""
        with listening_on(address):
            bound = listen(address)
            self._tcp = await asyncio.get_running_loop().create_server(
                self._sessions.new_session, sock=bound, start_serving=False, backlog=BACKLOG
            )
            self._tcp_address = show_address(bound.getsockname())
            return int(bound.getsockname()[1])

    async def _listen_http(self, address: str) -> int:
        with listening_on(address):
            host, port = split_address(address)
            host, port = await self._http.listen(host_to_bind(host), port)
            self._http_address = join_address(host, port)
            return port

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(STRANGER_SWEEP_INTERVAL_S)
            self._sessions.close_silent_strangers()


@contextlib.contextmanager
def listening_on(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ListenError(f"listen ({address}) failed - {error}") from error
