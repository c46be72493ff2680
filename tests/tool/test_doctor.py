"""Checks `nsquark doctor`: what it finds, what it advises, how it exits."""

import email.utils
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, cast

import pytest

from harness import AuthServer, Nsqd, eventually
from harness.http_server import LocalServer, QuietHandler
from harness.lookupd import Nsqlookupd

from .conftest import nsquark


@pytest.fixture
def lookupd(make_lookupd: Callable[..., Nsqlookupd]) -> Nsqlookupd:
    """Runs an nsqlookupd for each test."""
    return make_lookupd()


def line(output: str, verdict: str, subject: str) -> str:
    """Returns the text of the only finding of this kind."""
    found = re.findall(rf"^(?:{verdict}) +{re.escape(subject)} +(.*(?:\n +-> .*)?)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return str(found[0])


def test_a_sound_machine(tmp_path: Path) -> None:
    result = nsquark("doctor", "--dir", str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert re.search(r"^0 broken, \d+ warnings?, \d+ ok$", result.stdout.splitlines()[-1])
    assert "GiB free" in line(result.stdout, "ok|warning", "disk space")
    assert line(result.stdout, "ok|warning", f"disk at {tmp_path}").startswith("writable; a sync took")
    for subject in (
        "Python",
        "msgspec",
        "kernel",
        "clock",
        "open files",
        "port 4150 (nsqd TCP)",
        "port 4171 (nsqadmin HTTP)",
    ):
        assert f" {subject} " in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_finding_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    result = nsquark("doctor", "--dir", str(tmp_path / "missing"), "--nsqd", "127.0.0.1:1", NSQUARK_PURE="1")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    for number, text in enumerate(lines[:-1]):
        assert lines[number + 1].startswith("         -> ") == text.startswith(("warning", "broken")), result.stdout
    assert "unset NSQUARK_PURE" in line(result.stdout, "warning", "kernel")
    assert "mkdir -p" in line(result.stdout, "broken", f"disk at {tmp_path / 'missing'}")
    assert "does not answer" in line(result.stdout, "broken", "nsqd 127.0.0.1:1")


AS_ANYONE = ("setpriv", "--bounding-set=-dac_override") if os.getuid() == 0 else ()
"""Takes root's right to write anywhere."""


@pytest.mark.skipif(bool(AS_ANYONE) and shutil.which("setpriv") is None, reason="root may write anywhere")
def test_a_directory_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = nsquark("doctor", "--dir", str(tmp_path), before=AS_ANYONE)
    assert result.returncode == 1
    assert "not writable" in line(result.stdout, "broken", f"disk at {tmp_path}")


def test_a_healthy_cluster(tmp_path: Path, lookupd: Nsqlookupd, make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    eventually(lambda: json.loads(lookupd.get("/nodes").body)["producers"])
    http_address = "{}:{}".format(*nsqd.http)
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", http_address, "--lookupd", lookupd.http_address)
    assert result.returncode == 0, result.stdout
    assert line(result.stdout, "ok", f"nsqlookupd {lookupd.http_address}") == "version 1.3.0, knows 1 nsqds"
    for text in ("version 1.3.0, healthy", "its clock agrees with this one", "is registered at nsqlookupd"):
        assert re.search(rf"^ok +nsqd {http_address} +{text}", result.stdout, re.MULTILINE), result.stdout
    line(result.stdout, "ok", "way to {}:{}".format(*nsqd.tcp))


def test_an_nsqd_that_consumers_do_not_find(
    tmp_path: Path, lookupd: Nsqlookupd, make_nsqd: Callable[..., Nsqd]
) -> None:
    http_address = "{}:{}".format(*make_nsqd().http)
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", http_address, "--lookupd", lookupd.http_address)
    assert result.returncode == 1
    assert "--lookupd-tcp-address=127.0.0.1:4160" in line(result.stdout, "broken", f"nsqd {http_address}")
    assert "knows no nsqd" in line(result.stdout, "warning", f"nsqlookupd {lookupd.http_address}")


def test_an_nsqd_that_sends_consumers_to_where_it_is_not(
    tmp_path: Path, lookupd: Nsqlookupd, make_nsqd: Callable[..., Nsqd]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = taken.getsockname()[1]
        make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}", f"--broadcast-tcp-port={port}")
        eventually(lambda: json.loads(lookupd.get("/nodes").body)["producers"])
        result = nsquark("doctor", "--dir", str(tmp_path), "--lookupd", lookupd.http_address)
    assert result.returncode == 1
    assert "--broadcast-address" in line(result.stdout, "broken", f"way to 127.0.0.1:{port}")


class FakeNsqd(QuietHandler):
    """Is an nsqd on another machine: its disk fails, or its clock is an hour behind."""

    ping = (200, b"OK")
    config: ClassVar[dict[str, bytes]] = {}
    date: Callable[[], str] = staticmethod(lambda: "Wed, 01 Jan 2020 00:00:00 GMT")
    pause_s = 0.0
    """So long after it has told the time it ends its answer."""

    def do_GET(self) -> None:
        tcp_port = cast(tuple[str, int], self.server.server_address)[1]
        info = {"version": "1.3.0", "broadcast_address": "x", "tcp_port": tcp_port, "http_port": 1}
        answers = {"/ping": self.ping, "/info": (200, json.dumps(info).encode())}
        answers |= {f"/config/{name}": (200, value) for name, value in self.config.items()}
        status, body = answers.get(self.path, (404, b""))
        self.send_response_only(status)
        self.send_header("Date", self.date())
        time.sleep(self.pause_s if self.path == "/metrics" else 0.0)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake_nsqd() -> Iterator[str]:
    with LocalServer(FakeNsqd) as server:
        yield server.address


def test_a_clock_that_differs(tmp_path: Path, fake_nsqd: str) -> None:
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", fake_nsqd)
    assert result.returncode == 0
    assert re.match(
        r"its clock is \d+\.\d s behind\n +-> run an NTP", line(result.stdout, "warning", f"nsqd {fake_nsqd}")
    )


def test_a_slow_answer_says_nothing_of_the_clock(
    tmp_path: Path, fake_nsqd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNsqd, "date", staticmethod(lambda: email.utils.formatdate(usegmt=True)))
    monkeypatch.setattr(FakeNsqd, "pause_s", 4.2)
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", fake_nsqd)
    assert "its clock agrees with this one" in result.stdout, result.stdout


def test_an_nsqd_that_is_not_healthy(tmp_path: Path, fake_nsqd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNsqd, "ping", (500, b"NOK - no space left on device"))
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", fake_nsqd)
    assert result.returncode == 1
    assert "no space left on device" in line(result.stdout, "broken", f"nsqd {fake_nsqd}")


def test_what_daemons_say_of_themselves_moves_no_cursor(
    tmp_path: Path, fake_nsqd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNsqd, "ping", (500, b"NOK\nok       forged\x1b[2J" + b"y" * 100_000))
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", fake_nsqd)
    assert r"NOK\nok       forged\x1b[2Jyyy" in line(result.stdout, "broken", f"nsqd {fake_nsqd}")
    assert all(text.isprintable() and len(text) < 5000 for text in result.stdout.split("\n"))


OPEN = {"tcp_address": b"0.0.0.0:4150", "http_address": b":4151", "tls_required": b"0", "auth_http_addresses": b"[]"}


@pytest.mark.parametrize(
    ("changed", "is_warned"),
    [
        ({}, True),
        ({"tcp_address": b"127.0.0.1:4150"}, True),
        ({"http_address": b"[::]:4151", "tcp_address": b"/run/nsqd/tcp"}, True),
        ({"tcp_address": b"10.0.0.5:4150", "http_address": b"/run/nsqd/http"}, False),
        ({"tls_required": b"2"}, False),
        ({"tls_required": b"1"}, False),
        ({"auth_http_addresses": b'["10.0.0.9:80"]'}, False),
        ({"tls_required": b"what"}, False),
    ],
    ids=str,
)
def test_an_nsqd_that_is_open_to_all(
    tmp_path: Path, fake_nsqd: str, monkeypatch: pytest.MonkeyPatch, changed: dict[str, bytes], is_warned: bool
) -> None:
    monkeypatch.setattr(FakeNsqd, "config", {**OPEN, **changed})
    result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", fake_nsqd)
    assert ("with neither TLS nor AUTH" in result.stdout) == is_warned, result.stdout
    assert ("-> bind it to an address inside" in result.stdout) == is_warned


def test_an_nsqd_that_wants_a_secret(tmp_path: Path, make_nsqd: Callable[..., Nsqd]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush-hush\n")
    with AuthServer() as server:
        nsqd = make_nsqd(f"--auth-http-address={server.address}", "--http-auth=required")
        http_address = "{}:{}".format(*nsqd.http)
        without = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", http_address)
        assert "give --auth-secret-file" in line(without.stdout, "broken", f"nsqd {http_address}")
        result = nsquark("doctor", "--dir", str(tmp_path), "--nsqd", http_address, "--auth-secret-file", str(secret))
    assert re.search(rf"^ok +nsqd {http_address} +version 1.3.0, healthy", result.stdout, re.MULTILINE), result.stdout
    assert {query["secret"] for query in server.queries} == {"hush-hush"}
    assert "hush-hush" not in result.stdout + result.stderr


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb", b"\xff", b"x" * 5000, None])
def test_secret_files_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    result = nsquark("doctor", "--auth-secret-file", str(secret))
    assert result.returncode == 1
    assert result.stderr.startswith(f"nsquark doctor: --auth-secret-file {secret} ")
