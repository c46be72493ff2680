"""Finds nsqds through nsqlookupd: single questions, and the loop in which a consumer asks them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from nsquark.client.checks import check_address
from nsquark.client.config import Config
from nsquark.client.errors import ConfigError, LookupFailed, WrongPort
from nsquark.client.logs import Log, client_log
from nsquark.client.wrong_port import wrong_port
from nsquark.web.bearer import bearer
from nsquark.web.fetch import FetchError
from nsquark.web.lookupd import BadAnswer, ask_lookupd
from nsquark.wire.lookup_answer import Found, read_producers

TRIES_PER_ROUND_MAX: Final = 3
RECHECK_S_MIN: Final = 0.1
"""Is the least time between rounds that are asked for: an nsqd which closes every connection must not make us flood
nsqlookupd.
"""
SEEK_S_MIN: Final = 1.0
"""An nsqd that was lost is asked for again after so long, then ever more rarely: one that restarts is not known
meanwhile.
"""
TIMEOUT_S_MAX: Final = 3600.0
"""Is the timeout where the config sets none."""

T = TypeVar("T")
AddressFilter = Callable[[list[str]], Iterable[str]]


class TopicNotFound(LookupFailed):
    """Says that the nsqlookupd knows no nsqd with this topic; nobody may have published to it yet."""


async def lookup(address: str, topic: str, config: Config) -> list[Found]:
    """Asks one nsqlookupd for the nsqds that carry this topic."""
    return await ask(lookup_url(address, topic), read_producers, config)


async def nodes(address: str, config: Config) -> list[Found]:
    """Asks one nsqlookupd for all its nsqds."""
    return await ask(nodes_url(address), read_producers, config)


def lookup_url(address: str, topic: str) -> str:
    """Makes the URL of an nsqlookupd given as `host:port` or as a URL, whose path and query are kept: a proxy may need
    them.
    """
    scheme, netloc, path, query = _parts(address)
    arguments = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name != "topic"]
    return urlunsplit((scheme, netloc, path or "/lookup", urlencode([*arguments, ("topic", topic)]), ""))


def nodes_url(address: str) -> str:
    return _url(address, "/nodes")


def topics_url(address: str) -> str:
    return _url(address, "/topics")


def _url(address: str, question: str) -> str:
    scheme, netloc, path, query = _parts(address)
    return urlunsplit((scheme, netloc, path.removesuffix("/lookup") + question, query, ""))


def _parts(address: str) -> tuple[str, str, str, str]:
    """Splits a URL into scheme, host and port, path ('' for none), query."""
    hint = "give nsqlookupd's HTTP address as host:port or http://host:port"
    if not isinstance(address, str):
        raise ConfigError(f"nsqlookupd address {address!r}: {hint}")
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"nsqlookupd address {address}: {error}; {hint}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"nsqlookupd address {address}: {hint}")
    if not port:
        raise ConfigError(f"nsqlookupd address {address}: missing port; {hint}")
    return parts.scheme, parts.netloc, parts.path.rstrip("/"), parts.query


async def ask(url: str, read: Callable[[bytes], T], config: Config) -> T:
    """Returns what `read` makes of an nsqlookupd's answer; LookupFailed is all that can go wrong."""
    timeout_s = config.lookupd_poll_timeout.seconds
    timeout_s = min(timeout_s, TIMEOUT_S_MAX) if timeout_s > 0 else TIMEOUT_S_MAX
    try:
        return await ask_lookupd(
            url,
            read,
            headers=bearer(config.auth_secret) if config.skip_lookupd_authorization else {},
            connect_timeout=timeout_s,
            request_timeout=timeout_s,
            ssl_context=config.ssl_context() if url.startswith("https:") else None,
        )
    except BadAnswer as bad:
        if bad.is_topic_unknown:
            raise TopicNotFound(str(bad)) from None
        raise await wrong_port(url, bad) or LookupFailed(str(bad)) from None
    except FetchError as error:
        raise await wrong_port(url, error) or LookupFailed(str(error)) from None
    except ValueError as error:
        raise LookupFailed(str(error)) from None


class PollLoop:
    """Asks at once, then at every interval, whenever `poll_soon` is called, and for a while after `poll_often`, until
    closed.

    Between `start` and the end of `close` there is exactly one task, and it survives whatever a round raises.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]], config: Config, log: Log = client_log) -> None:
        self._ask = ask
        self._log = log
        self.has_asked = asyncio.Event()
        """The first round is over, or there will be none."""
        self._interval_s = config.lookupd_poll_interval.seconds
        self._jitter = config.lookupd_poll_jitter
        self._is_wanted = asyncio.Event()
        self._seek_s = math.inf
        """Is the longest time to the next round, while that is less than the interval."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="nsqlookupd poll")

    def poll_soon(self) -> None:
        """Asks for another round; any number of calls before the next one make one round."""
        self._is_wanted.set()

    def poll_often(self) -> None:
        """Asks soon, and again after a second, then ever more rarely, until that is no more often than always."""
        self._seek_s = SEEK_S_MIN
        self.poll_soon()

    async def close(self) -> None:
        task, self._task = self._task, None
        self.has_asked.set()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        # Once only: it spreads the clients that were started together, and they stay spread.
        delay_s = random.random() * self._jitter * self._interval_s
        while True:
            self._is_wanted.clear()
            try:
                await self._ask()
            except Exception:
                self._log.exception("a round of asking nsqlookupd failed")
            self.has_asked.set()
            await asyncio.sleep(min(RECHECK_S_MIN, self._interval_s))
            wait_s = delay_s + self._interval_s
            if self._seek_s < self._interval_s:
                wait_s = self._seek_s * random.uniform(0.5, 1.0)
                self._seek_s *= 2
            # Not wait_for, which in Python 3.11 loses a cancellation that comes together with what it waits for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_wanted.wait()
            delay_s = 0.0


class Discovery:
    """Asks the nsqlookupds of a consumer in turn: one per round, and the next ones if it fails.

    `on_found` gets the addresses that the round found and that the filter let through. An nsqd that is no longer among
    them is not gone: its nsqlookupd may just have been restarted.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        topic: str,
        config: Config,
        on_found: Callable[[list[str]], None],
        address_filter: AddressFilter | None = None,
        log: Log = client_log,
    ) -> None:
        self._log = log
        self._wrong: WrongPort | None = None
        self._addresses: list[str] = []
        self._next_index = 0
        self._topic = topic
        self._config = config
        self._on_found = on_found
        self._filter = address_filter
        self._loop = PollLoop(self._round, config, log)
        for address in dict.fromkeys(addresses):
            lookup_url(address, topic)
            self._addresses.append(address)

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    def start(self) -> None:
        """Begins to ask; without an nsqlookupd nothing is asked until one is added."""
        self._loop.start()

    async def check(self, timeout_s: float) -> None:
        """Raises WrongPort if, in the first round, nobody was what its address says."""
        if self._addresses:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._loop.has_asked.wait()
            if self._wrong is not None:
                raise self._wrong

    def add(self, address: str) -> None:
        """Adds an nsqlookupd, which is asked next and, once started, at once; ConfigError for what is no address."""
        lookup_url(address, self._topic)
        if address in self._addresses:
            return
        self._next_index = min(self._next_index, len(self._addresses))
        self._addresses.insert(self._next_index, address)
        self._loop.poll_soon()

    def remove(self, address: str) -> None:
        """Removes an nsqlookupd. The last one stays: a consumer that finds nothing any more would be stuck for good."""
        if address not in self._addresses:
            raise ConfigError(f"nsqlookupd {address} is not among {', '.join(self._addresses) or 'those given (none)'}")
        if len(self._addresses) == 1:
            raise ConfigError(f"nsqlookupd {address} is the last one: add another before removing it")
        self._addresses.remove(address)

    def poll_soon(self) -> None:
        """Asks soon; to be called when it is time to try an nsqd again."""
        self._loop.poll_soon()

    def poll_often(self) -> None:
        """Asks soon, and more often for a while; to be called when an nsqd is lost."""
        self._loop.poll_often()

    async def close(self) -> None:
        await self._loop.close()

    async def _round(self) -> None:
        errors: list[LookupFailed] = []
        for _ in range(min(TRIES_PER_ROUND_MAX, len(self._addresses))):
            address = self._next()
            try:
                found = await lookup(address, self._topic, self._config)
            except TopicNotFound:
                self._log.debug("nsqlookupd %s knows no nsqd with topic %s yet", address, self._topic)
                continue
            except LookupFailed as error:
                self._log.error("error querying nsqlookupd (%s) - %s", address, error)
                errors.append(error)
                continue
            addresses = usable_addresses(found, self._log)
            self._on_found(addresses if self._filter is None else _chosen(self._filter(addresses)))
            return
        wrong = [error for error in errors if isinstance(error, WrongPort)]
        self._wrong = wrong[0] if wrong and len(wrong) == len(self._addresses) else None

    def _next(self) -> str:
        self._next_index %= len(self._addresses)
        address = self._addresses[self._next_index]
        self._next_index += 1
        return address


def _chosen(outcome: object) -> list[str]:
    """Lists what a user's filter returned."""
    addresses: list[Any] = list(outcome) if isinstance(outcome, Iterable) and not isinstance(outcome, str) else [None]
    if not all(isinstance(address, str) for address in addresses):
        raise ConfigError(f"address_filter returned {outcome!r}: it returns a list of those addresses that are used")
    return addresses


def usable_addresses(found: Iterable[Found], log: Log) -> list[str]:
    """Lists the addresses of nsqds that were found, each once. What a user could not give as one either is left out,
    and so is a path: an nsqlookupd that names it must not keep a client from the others.
    """
    usable = []
    for address in dict.fromkeys(nsqd.address for nsqd in found):
        try:
            check_address(address)
            if "/" in address:
                raise ValueError("an nsqlookupd names hosts")
        except ValueError as error:
            log.warning("nsqd %r that an nsqlookupd names is not used: %s", address, error)
        else:
            usable.append(address)
    return usable
