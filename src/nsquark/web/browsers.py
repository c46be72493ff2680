"""Refuses requests that a browser sends for a page of another site: its user may do more here than that page should."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final

from nsquark.base.hosts import HOSTNAME
from nsquark.web.messages import Response, error, json

KNOWN_HOSTS_MAX: Final = 1024
ANY_HOST: Final = "*"

FOREIGN_ORIGIN: Final = error(403, "FOREIGN_ORIGIN", close=True)


class BrowserGuard:
    """Applies two rules, which only browsers notice.

    A page may ask only the host it came from (`Origin`, `Sec-Fetch-Site`). And a request must name this host: an
    attacker's own name, pointed at our address, would make the attacker's page one of ours (DNS rebinding).
    """

    def __init__(self, program: str, hosts: Iterable[str]) -> None:
        """Allows the names `hosts` besides this machine's; `*.x` is every name below x, `*` any."""
        names = [name.strip().lower() for listed in hosts for name in listed.split(",")]
        self._program = program
        self._names = {HOSTNAME.lower(), *names}
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._is_any = ANY_HOST in names
        self.known_hosts: set[bytes | None] = {None, b""}
        """Has the values of `Host` that were found good; hot paths read it directly, to save a call. A client may leave
        the header out.
        """

    def refusal(self, headers: Mapping[bytes, bytes], *, checks_host: bool) -> Response | None:
        """Returns the answer to a request that is refused, or None. A client of a unix socket may name any host."""
        host = headers.get(b"host")
        origin = headers.get(b"origin")
        if headers.get(b"sec-fetch-site", b"").lower() == b"cross-site":
            return FOREIGN_ORIGIN
        if origin is not None and (not host or origin.lower().partition(b"://")[2] != host.lower()):
            return FOREIGN_ORIGIN
        if host is None or not checks_host or host in self.known_hosts:
            return None
        name = host.decode("latin-1")
        if not self.is_ours(name):
            return self._unknown_host(_name_of(name))
        if len(self.known_hosts) < KNOWN_HOSTS_MAX:
            self.known_hosts.add(host)
        return None

    def is_ours(self, host: str) -> bool:
        """Tells whether `Host` names this daemon.

        An address always does: rebinding needs a name. So does a name without a dot, which no attacker can own.
        """
        name = _name_of(host)
        if self._is_any or "." not in name or name in self._names or name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _unknown_host(self, name: str) -> Response:
        reason = f"if {name} is this {self._program}, start it with --http-allowed-hosts={name}"
        return json({"message": "HOST_NOT_ALLOWED", "reason": reason}, 403, close=True)


def _name_of(host: str) -> str:
    """Returns `Host` without port and brackets, as names are compared."""
    text = host.lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")
