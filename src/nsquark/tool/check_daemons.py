"""Checks whether nsqds and nsqlookupds answer, are healthy, agree on the time, know each other, and can be reached."""

import asyncio
import contextlib
import email.utils
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from nsquark.tool.findings import Finding, broken, ok, warning
from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.documents import decode_json
from nsquark.wire.lookup_answer import Found, read_producers

NSQD_HTTP_PORT: Final = 4151
LOOKUPD_HTTP_PORT: Final = 4161
CONNECT_SECONDS_MAX: Final = 3.0
REQUEST_SECONDS_MAX: Final = 10.0
CLOCK_SECONDS_WANTED: Final = 2.0
"""Times in HTTP headers are whole seconds, so smaller differences cannot be seen."""

_T = TypeVar("_T")
_EVERYWHERE: Final = ("", "0.0.0.0", "[::]")


class _NsqdInfo(msgspec.Struct):
    """Holds what is needed of the answer of an nsqd's /info."""

    version: str
    broadcast_address: str
    tcp_port: int
    http_port: int


class _Version(msgspec.Struct):
    version: str


@dataclass(frozen=True)
class _Lookupd:
    """Describes an nsqlookupd that answered, and the nsqds that it knows."""

    address: str
    nodes: list[Found]


async def findings(nsqds: Sequence[str], lookupds: Sequence[str], secret: str = "") -> list[Finding]:
    """Checks the daemons. The nsqds are shown `secret`, since some of them may want one."""
    found: list[Finding] = []
    answering: list[_Lookupd] = []
    for address, (result, findings) in zip(lookupds, await asyncio.gather(*map(_check_lookupd, lookupds)), strict=True):
        found += findings
        if result is not None:
            answering.append(_Lookupd(address, result))
    for findings in await asyncio.gather(*(_check_nsqd(address, answering, secret) for address in nsqds)):
        found += findings
    return found + await _check_nodes(answering)


# -- nsqlookupd ------------------------------------------------------------------------------------------


async def _check_lookupd(address: str) -> tuple[list[Found] | None, list[Finding]]:
    subject = f"nsqlookupd {address}"
    try:
        await _get(address, "/ping")
        version = _decoded(await _get(address, "/info"), _Version).version
        nodes = _read(await _get(address, "/nodes"), read_producers)
    except _Unusable as error:
        return None, [broken(subject, str(error), _advice("nsqlookupd", LOOKUPD_HTTP_PORT))]
    found = [ok(subject, f"version {version}, knows {len(nodes)} nsqds")]
    if not nodes:
        advice = f"start nsqds with --lookupd-tcp-address={address.rpartition(':')[0]}:4160"
        found = [warning(subject, f"version {version}, knows no nsqd", advice)]
    return nodes, found


async def _check_nodes(lookupds: list[_Lookupd]) -> list[Finding]:
    """Checks the addresses to which nsqlookupds send consumers, which may be names that only the nsqd's host knows."""
    nodes = {(node.broadcast_address, node.tcp_port) for lookupd in lookupds for node in lookupd.nodes}
    return list(await asyncio.gather(*(_check_way(host, port) for host, port in sorted(nodes))))


async def _check_way(host: str, port: int) -> Finding:
    subject = f"way to {host}:{port}"
    reason = await _why_not_connectable(host, port)
    if reason is None:
        return ok(subject, "consumers on this machine reach this nsqd")
    advice = "start that nsqd with a --broadcast-address that this machine can reach, or open the port"
    return broken(subject, f"nsqlookupd sends consumers there, but: {reason}", advice)


# -- nsqd ------------------------------------------------------------------------------------------------


async def _check_nsqd(address: str, lookupds: list[_Lookupd], secret: str) -> list[Finding]:
    subject = f"nsqd {address}"
    try:
        await _get(address, "/ping")
        info = _decoded(await _get(address, "/info", secret), _NsqdInfo)
    except _Unhealthy as error:
        advice = "look at its log and its disk: at a full disk it refuses publishes until there is room"
        return [broken(subject, f"is not healthy: {error}", advice)]
    except _Unusable as error:
        return [broken(subject, str(error), _advice("nsqd", NSQD_HTTP_PORT))]
    found = [ok(subject, f"version {info.version}, healthy")]
    host = address.rpartition(":")[0].strip("[]")
    reason = await _why_not_connectable(host, info.tcp_port)
    if reason is not None:
        found.append(broken(subject, f"TCP port {info.tcp_port}: {reason}", "open that port to clients"))
    found += await _check_clock(address, secret)
    found += await _check_openness(address, secret)
    return found + [_check_registration(subject, info, lookupd) for lookupd in lookupds]


def _check_registration(subject: str, info: _NsqdInfo, lookupd: _Lookupd) -> Finding:
    if any(
        (node.broadcast_address, node.http_port) == (info.broadcast_address, info.http_port) for node in lookupd.nodes
    ):
        return ok(subject, f"is registered at nsqlookupd {lookupd.address}")
    host = lookupd.address.rpartition(":")[0]
    advice = f"start it with --lookupd-tcp-address={host}:4160, or look for LOOKUP in its log"
    return broken(subject, f"is not registered at nsqlookupd {lookupd.address}: consumers do not find it", advice)


async def _check_openness(address: str, secret: str) -> list[Finding]:
    """Warns of an nsqd that listens everywhere and asks nothing of clients. One that does not tell is not judged."""
    try:
        listening = [_decoded_text(await _config(address, f"{port}_address", secret)) for port in ("tcp", "http")]
        is_tls_required = _decoded(await _config(address, "tls_required", secret), int) > 0
        has_auth = bool(_decoded(await _config(address, "auth_http_addresses", secret), list[str]))
    except _Unusable:
        return []
    everywhere = [text for text in listening if text.rpartition(":")[0] in _EVERYWHERE and ":" in text]
    if not everywhere or is_tls_required or has_auth:
        return []
    text = f"listens on all addresses ({', '.join(everywhere)}) with neither TLS nor AUTH: open to all who reach it"
    advice = (
        "bind it to an address inside (--tcp-address, --http-address), or use --tls-required or --auth-http-address; "
        "docs/security.md says who can do what"
    )
    return [warning(f"nsqd {address}", text, advice)]


async def _check_clock(address: str, secret: str) -> list[Finding]:
    subject = f"nsqd {address}"
    difference_s = None
    with contextlib.suppress(_Unusable):
        difference_s = await _clock_difference(address, secret)
    if difference_s is None:
        return []
    if abs(difference_s) > CLOCK_SECONDS_WANTED:
        text = f"its clock is {abs(difference_s):.1f} s {'ahead' if difference_s > 0 else 'behind'}"
        return [warning(subject, text, "run an NTP service on both machines")]
    return [ok(subject, "its clock agrees with this one")]


async def _clock_difference(address: str, secret: str) -> float | None:
    """Returns the seconds by which a daemon's clock is ahead for sure, or None if it does not tell the time: it may
    have told it at any moment between the question and the answer, which can be far apart.
    """
    asked = time.time()
    headers, body = await _get(address, "/metrics", secret)
    told = _time_told(headers, body)
    return None if told is None else told - min(max(told, asked), time.time())


def _time_told(headers: dict[str, str], body: bytes) -> float | None:
    started = re.search(rb"^process_start_time_seconds ([0-9.e+]+)", body, re.MULTILINE)
    uptime = re.search(rb"^nsqd_uptime_seconds ([0-9.e+-]+)", body, re.MULTILINE)
    if started is not None and uptime is not None:
        return float(started[1]) + float(uptime[1])
    with contextlib.suppress(KeyError, ValueError):
        return email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    return None


# -- HTTP and TCP ----------------------------------------------------------------------------------------


class _Unusable(Exception):
    """Says that an address does not answer as a daemon would; the text says how."""


class _Unhealthy(_Unusable):
    """Says that a daemon answers that something is wrong with it."""


async def _config(address: str, name: str, secret: str) -> tuple[dict[str, str], bytes]:
    return await _get(address, f"/config/{name}", secret)


async def _get(address: str, path: str, secret: str = "") -> tuple[dict[str, str], bytes]:
    try:
        status, headers, body = await fetch(
            f"http://{address}{path}",
            secret=secret,
            connect_timeout=CONNECT_SECONDS_MAX,
            request_timeout=REQUEST_SECONDS_MAX,
        )
    except FetchError as error:
        raise _Unusable(f"does not answer: {error.reason}") from None
    if status == 500:
        raise _Unhealthy(body.decode("utf-8", "replace"))
    if status == 401:
        raise _Unusable("wants to know who asks: give --auth-secret-file")
    if status != 200 and path != "/metrics":
        raise _Unusable(f"answers {path} with status {status}")
    return headers, body


def _decoded_text(answer: tuple[dict[str, str], bytes]) -> str:
    """Returns a config value that is a string, which nsqd sends as it is and not as JSON."""
    return answer[1].decode("utf-8", "replace")


def _decoded(answer: tuple[dict[str, str], bytes], kind: type[_T]) -> _T:
    return _read(answer, lambda body: decode_json(body, kind))


def _read(answer: tuple[dict[str, str], bytes], read: Callable[[bytes], _T]) -> _T:
    try:
        return read(answer[1])
    except ValueError:
        raise _Unusable("answers, but not as this daemon would") from None


async def _why_not_connectable(host: str, port: int) -> str | None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer in {CONNECT_SECONDS_MAX:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None


def _advice(program: str, port: int) -> str:
    return f"start {program}, check the address (its HTTP port, usually {port}) and the firewall between"
