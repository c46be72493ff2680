"""Answers GET /metrics of nsqlookupd, for Prometheus. docs/metrics.md tells what each name means."""

from collections import Counter
from collections.abc import Mapping

from nsquark.base.exposition import Family, labelled, single
from nsquark.lookupd.registry import Registry
from nsquark.lookupd.session import LookupdSessions


class Metrics:
    """Reads the numbers where they are when it is asked; only HTTP requests are counted here."""

    def __init__(self, registry: Registry, sessions: LookupdSessions) -> None:
        self._registry = registry
        self._sessions = sessions
        self.requests: Counter[tuple[str, int]] = Counter()
        """Counts requests by path and status."""

    def text(self) -> str:
        return "".join(family.text for family in self._families())

    def _families(self) -> list[Family]:
        registry, sessions = self._registry, self._sessions
        registrations = {"topic": 0, "channel": 0}
        for key in registry.all_keys():
            registrations[key.category] += len(key.producers)
        channels = sum(map(len, registry.channels.values()))
        requests = Family("nsqlookupd_http_requests_total", "counter", "HTTP requests answered.")
        for (path, status), count in sorted(self.requests.items()):
            requests.add(count, f'path="{path}",status="{status}"')
        return [
            _gauge("topics", "Topics known, with or without producers.", len(registry.topics)),
            _gauge("channels", "Channels known.", channels),
            _gauge("producers", "Identified nsqd connections.", len(registry.producers)),
            _gauge("producers_active", "Producers heard of lately.", len(registry.active_producers())),
            _by("registrations", "gauge", "Producers of topics and of channels.", "category", registrations),
            _gauge("tcp_connections", "Open TCP connections.", len(sessions.open)),
            single("nsqlookupd_tcp_connections_total", "counter", "TCP connections accepted.", sessions.accepted),
            _by("tcp_commands_total", "counter", "Commands received.", "command", sessions.commands),
            _by("tcp_errors_total", "counter", "Errors answered.", "code", sessions.errors),
            requests,
        ]


def _gauge(name: str, help_text: str, value: int) -> Family:
    return single(f"nsqlookupd_{name}", "gauge", help_text, value)


def _by(name: str, kind: str, help_text: str, label: str, values: Mapping[str, int]) -> Family:
    return labelled(f"nsqlookupd_{name}", kind, help_text, label, values)
