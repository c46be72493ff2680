"""Checks nsqd on unix sockets, for TCP clients and for HTTP."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness import AuthServer, Nsqd, StartError, Wire
from harness.holding import hold
from harness.upgrades import make_certificate, trusting_anything

HTTP_TIMEOUT_S = 30


class _UnixHttp(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=HTTP_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _get(path: Path, target: str) -> Any:
    connection = _UnixHttp(path)
    connection.request("GET", target)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def _connect(path: Path) -> Wire:
    return Wire(str(path))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Makes a directory whose name is short enough for a socket."""
    with TemporaryDirectory(prefix="nsq") as directory:
        yield Path(directory)


def _nsqd(sockets: Path, tmp_path: Path, *flags: str) -> Nsqd:
    data_path = tmp_path / "data"
    data_path.mkdir(exist_ok=True)
    return Nsqd(data_path, f"--tcp-address={sockets}/tcp", f"--http-address={sockets}/http", *flags)


def test_both(sockets: Path, tmp_path: Path) -> None:
    with _nsqd(sockets, tmp_path) as nsqd:
        assert f"TCP: listening on {sockets}/tcp" in nsqd.log
        assert f"HTTP: listening on {sockets}/http" in nsqd.log
        with _connect(sockets / "tcp") as client:
            client.publish("t", b"x")
            client.subscribe("t", rdy=1)
            assert client.read_message().body == b"x"
            info = _get(sockets / "http", "/info")
            assert (info["tcp_port"], info["http_port"]) == (-1, -1)
            shown = _get(sockets / "http", "/stats?format=json")["topics"][0]["channels"][0]["clients"][0]
            assert (shown["remote_address"], shown["client_id"], shown["hostname"]) == ("@", "", "")
        assert nsqd.stop() == 0
    assert list(sockets.iterdir()) == []


@pytest.mark.ours
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_https(sockets: Path, tmp_path: Path) -> None:
    """On a unix socket too, the port for HTTPS answers in TLS only."""
    certificate, key = make_certificate(tmp_path)
    flags = (f"--tls-cert={certificate}", f"--tls-key={key}", f"--https-address={sockets}/https")
    with _nsqd(sockets, tmp_path, *flags):
        with pytest.raises((http.client.HTTPException, OSError)):
            _get(sockets / "https", "/info")
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(HTTP_TIMEOUT_S)
            plain.connect(str(sockets / "https"))
            with trusting_anything().wrap_socket(plain) as client:
                client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_remote_ip_of_auth_is_empty(sockets: Path, tmp_path: Path) -> None:
    with AuthServer() as server, _nsqd(sockets, tmp_path, f"--auth-http-address={server.address}"):
        with _connect(sockets / "tcp") as client:
            client.AUTH("s")
            client.read_frame()
        assert server.queries == [{"common_name": "", "remote_ip": "", "secret": "s", "tls": "false"}]


@pytest.mark.ours
def test_what_a_crash_left_behind_is_replaced(sockets: Path, tmp_path: Path) -> None:
    with _nsqd(sockets, tmp_path) as nsqd:
        nsqd.kill()
        assert sorted(path.name for path in sockets.iterdir()) == ["http", "tcp"]
        nsqd.start()
        with _connect(sockets / "tcp") as client:
            client.assert_usable()
        assert _get(sockets / "http", "/info")["tcp_port"] == -1


@pytest.mark.parametrize("taken", ["tcp", "http"])
def test_a_socket_in_use_is_not(sockets: Path, tmp_path: Path, taken: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(sockets / taken))
        other.listen()
        with pytest.raises(StartError) as failure:
            _nsqd(sockets, tmp_path).start()
        assert failure.value.exit_code == 1
        assert f"failed to instantiate nsqd - listen ({sockets}/{taken}) failed - " in failure.value.log
        assert (sockets / taken).is_socket()


def test_another_file_is_left_alone(sockets: Path, tmp_path: Path) -> None:
    (sockets / "tcp").write_text("precious")
    with pytest.raises(StartError):
        _nsqd(sockets, tmp_path).start()
    assert (sockets / "tcp").read_text() == "precious"


def test_a_port_that_is_none_is_no_path(tmp_path: Path) -> None:
    """What has the form of `host:port` is an address, whatever the port."""
    with pytest.raises(StartError) as failure:
        Nsqd(tmp_path, "--tcp-address=localhost:nonsense").start()
    assert "listen (localhost:nonsense) failed" in failure.value.log


@pytest.mark.ours
def test_a_thousand_clients_may_knock_at_once(sockets: Path, tmp_path: Path) -> None:
    """Clients wait in the socket's backlog, here while nsqd does not run at all; without room they would be refused."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with _nsqd(sockets, tmp_path) as nsqd, contextlib.ExitStack() as stack:
        hold(nsqd.pid)
        stack.callback(os.kill, nsqd.pid, signal.SIGCONT)
        for _ in range(min(1000, most)):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(f"{sockets}/tcp")
        os.kill(nsqd.pid, signal.SIGCONT)
        with _connect(sockets / "tcp") as late:
            late.publish("t", b"x")
