"""`/metrics` in Prometheus' text form, written by hand: a library for it would double the start-up."""

from collections import Counter
from collections.abc import Iterable, Mapping

from nsquark.lookupd.registry import Registry
from nsquark.lookupd.session import Sessions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Reads what is there when asked; only HTTP requests are counted here."""

    def __init__(self, registry: Registry, sessions: Sessions) -> None:
        self._registry = registry
        self._sessions = sessions
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status."""

    def text(self) -> str:
        return "".join(
            f"# HELP nsqlookupd_{name} {help_text}\n# TYPE nsqlookupd_{name} {kind}\n{''.join(samples)}"
            for name, kind, help_text, samples in self._families()
        )

    def _families(self) -> list[tuple[str, str, str, Iterable[str]]]:
        registry, sessions = self._registry, self._sessions
        registrations = {"topic": 0, "channel": 0}
        for key in registry.all_keys():
            registrations[key.category] += len(key.producers)
        requests = (
            f'nsqlookupd_http_requests_total{{path="{path}",status="{status}"}} {count}\n'
            for (path, status), count in sorted(self.requests.items())
        )
        return [
            _one("topics", "gauge", "Topics known, with or without producers.", len(registry.topics)),
            _one("channels", "gauge", "Channels known.", sum(map(len, registry.channels.values()))),
            _one("producers", "gauge", "Identified nsqd connections.", len(registry.producers)),
            _one("producers_active", "gauge", "Producers heard of lately.", len(registry.active_producers())),
            _by("registrations", "gauge", "Producers of topics and of channels.", "category", registrations),
            _one("tcp_connections", "gauge", "Open TCP connections.", len(sessions.open)),
            _one("tcp_connections_total", "counter", "TCP connections accepted.", sessions.accepted),
            _by("tcp_commands_total", "counter", "Commands received.", "command", sessions.commands),
            _by("tcp_errors_total", "counter", "Errors answered.", "code", sessions.errors),
            ("http_requests_total", "counter", "HTTP requests answered.", requests),
        ]


def _one(name: str, kind: str, help_text: str, value: int) -> tuple[str, str, str, Iterable[str]]:
    return name, kind, help_text, [f"nsqlookupd_{name} {value}\n"]


def _by(
    name: str, kind: str, help_text: str, label: str, values: Mapping[str, int]
) -> tuple[str, str, str, Iterable[str]]:
    samples = (f'nsqlookupd_{name}{{{label}="{word}"}} {value}\n' for word, value in sorted(values.items()))
    return name, kind, help_text, samples
