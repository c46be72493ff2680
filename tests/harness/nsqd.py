"""Runs the nsqd under test: ours, or the one that NSQD names."""

import os
import sys
from pathlib import Path
from typing import Any

from harness.waiting import eventually
from harness.wire import Wire
from nsquark import testing
from nsquark.testing import HttpReply, StartError
from nsquark.testing.daemons import target

__all__ = ["HttpReply", "Nsqd", "StartError"]


def _own_program() -> Path:
    return Path(sys.executable).with_name("nsqd")


def nsqd_program() -> str:
    """Finds the nsqd under test: NSQD from the environment, else the one installed beside this Python."""
    return os.environ.get("NSQD") or str(_own_program())


def nsqd_is_ours() -> bool:
    return Path(nsqd_program()).resolve() == _own_program().resolve()


class Nsqd(testing.Nsqd):
    """Holds one data path and the processes that serve it, one after another, each on other ports."""

    keeps_ports = False

    def __init__(
        self, data_path: Path, *flags: str, program: str | None = None, environment: dict[str, str] | None = None
    ):
        super().__init__(data_path, *flags, program=program or nsqd_program(), environment=environment)

    def keep_ports(self) -> None:
        """Lets it listen where it does now when it is started again, as an operator's nsqd does."""
        self.flags += [f"--tcp-address={self.tcp_address}", f"--http-address={self.http_address}"]
        self._ports = {"tcp": self.tcp[1], "http": self.http[1]}
        self.keeps_ports = True

    def wait_for_log(self, text: str) -> None:
        eventually(lambda: text in self.log)

    def connect(self, **settings: Any) -> Wire:
        return Wire(self.tcp, **settings)

    def put(self, path: str, body: bytes = b"", **query: Any) -> HttpReply:
        return self.request("PUT", target(path, query), body)
