"""Runs nsqadmin as its users have it: a process with a command line, an HTTP port and a log on stderr."""

from nsquark.testing.daemons import Daemon


class Nsqadmin(Daemon):
    """Runs one nsqadmin; started again, it keeps its port."""

    MODULE = "nsquark.admin.main"

    def __init__(self, *flags: str, environment: dict[str, str] | None = None):
        super().__init__(*flags, environment=environment)
        self._ports = {"http": 0}

    def _addresses(self) -> list[str]:
        return [f"--http-address=127.0.0.1:{self._ports['http']}"]

    def _is_listening(self) -> bool:
        return bool(self._listening("http"))

    @property
    def url(self) -> str:
        return f"http://{self.http_address}"
