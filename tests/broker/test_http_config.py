"""Checks /config/<name>."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import HttpReply, Nsqd, eventually

NSQD_FLAGS = ("--max-msg-size=5000", "--node-id=7", "--log-prefix=[pre] ", "--statsd-prefix=stats.%s")


def assert_error(reply: HttpReply, status: int, code: str) -> None:
    assert (reply.status, reply.body) == (status, b'{"message":"%s"}' % code.encode())


VALUES: list[tuple[str, Any]] = [
    ("id", 7),
    ("max_msg_size", 5000),
    ("mem_queue_size", 10000),
    ("msg_timeout", 60_000_000_000),
    ("sync_timeout", 2_000_000_000),
    ("max_req_timeout", 3_600_000_000_000),
    ("snappy", True),
    ("deflate", True),
    ("statsd_mem_stats", True),
    ("max_deflate_level", 6),
    ("log_level", 2),
    ("tls_required", 0),
    ("tls_min_version", 769),
    ("max_channel_consumers", 0),
    ("broadcast_tcp_port", None),
    ("e2e_processing_latency_percentiles", []),
    ("nsqlookupd_tcp_addresses", []),
    ("auth_http_addresses", []),
]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_read(nsqd: Nsqd, name: str, value: Any) -> None:
    reply = nsqd.get(f"/config/{name}")
    assert reply.status == 200
    if name == "broadcast_tcp_port":
        assert reply.json() == nsqd.tcp[1]
    else:
        assert reply.json() == value
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"


def test_read_text(nsqd: Nsqd) -> None:
    reply = nsqd.get("/config/log_prefix")
    assert (reply.body, reply.headers["Content-Type"]) == (b"[pre] ", "text/plain; charset=utf-8")
    assert nsqd.get("/config/tcp_address").body == b"127.0.0.1:0"
    assert nsqd.get("/config/broadcast_address").body == b"127.0.0.1"
    assert nsqd.get("/config/data_path").body == str(nsqd.data_path).encode()
    assert nsqd.get("/config/statsd_prefix").body == b"stats.127_0_0_1_%d." % nsqd.http[1]


def test_read_empty_text(nsqd: Nsqd) -> None:
    reply = nsqd.get("/config/tls_cert")
    assert (reply.status, reply.body) == (200, b"")
    assert "Content-Type" not in reply.headers


@pytest.mark.parametrize(
    "name", ["nothing", "node_id", "lookupd_tcp_address", "version", "config", "max-msg-size", "a/b"]
)
def test_unknown_name(nsqd: Nsqd, name: str) -> None:
    reply = nsqd.get(f"/config/{name}")
    if "/" in name:
        assert_error(reply, 404, "NOT_FOUND")
    else:
        assert_error(reply, 400, "INVALID_OPTION")


def test_wrong_method(nsqd: Nsqd) -> None:
    reply = nsqd.post("/config/log_level", b"debug")
    assert_error(reply, 405, "METHOD_NOT_ALLOWED")
    assert reply.headers["Allow"] == "GET, OPTIONS, PUT"


@pytest.mark.parametrize(
    ("word", "level"),
    [("debug", b"1"), ("INFO", b"2"), ("Warn", b"3"), ("error", b"4"), ("fatal", b"5"), ("info", b"2")],
)
def test_set_log_level(nsqd: Nsqd, word: str, level: bytes) -> None:
    reply = nsqd.put("/config/log_level", word.encode())
    assert (reply.status, reply.body) == (200, level)
    assert nsqd.get("/config/log_level").body == level


def test_log_level_takes_effect(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    daemon.put("/config/log_level", b"error")
    daemon.post("/topic/create", topic="quiet")
    daemon.put("/config/log_level", b"info")
    daemon.post("/topic/create", topic="loud")
    daemon.wait_for_log("TOPIC(loud): created")
    assert "TOPIC(quiet): created" not in daemon.log


@pytest.mark.parametrize("value", [b"loud", b'"debug"', b"7", b" info"])
def test_bad_log_level(nsqd: Nsqd, value: bytes) -> None:
    assert_error(nsqd.put("/config/log_level", value), 400, "INVALID_VALUE")


def test_set_lookup_addresses(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    reply = daemon.put("/config/nsqlookupd_tcp_addresses", b'["127.0.0.1:1", "127.0.0.1:2"]')
    assert (reply.status, reply.json()) == (200, ["127.0.0.1:1", "127.0.0.1:2"])
    assert daemon.get("/config/nsqlookupd_tcp_addresses").json() == ["127.0.0.1:1", "127.0.0.1:2"]
    eventually(lambda: "LOOKUP(127.0.0.1:2): adding peer" in daemon.log)
    reply = daemon.put("/config/nsqlookupd_tcp_addresses", b"null")
    assert (reply.status, reply.json()) == (200, None)
    assert daemon.get("/ping").body == b"OK"


@pytest.mark.parametrize("value", [b"x", b'"127.0.0.1:1"', b"{}", b"[1]", b"[", b"127.0.0.1:1"])
def test_bad_lookup_addresses(nsqd: Nsqd, value: bytes) -> None:
    assert_error(nsqd.put("/config/nsqlookupd_tcp_addresses", value), 400, "INVALID_VALUE")


@pytest.mark.parametrize("name", ["log_level", "nsqlookupd_tcp_addresses", "max_msg_size", "nothing"])
def test_bad_size_of_value(nsqd: Nsqd, name: str) -> None:
    assert_error(nsqd.put(f"/config/{name}", b""), 413, "INVALID_VALUE")
    assert_error(nsqd.put(f"/config/{name}", b"x" * 5001), 413, "INVALID_VALUE")


@pytest.mark.parametrize("name", ["max_msg_size", "nothing", "data_path"])
def test_not_settable(nsqd: Nsqd, name: str) -> None:
    assert_error(nsqd.put(f"/config/{name}", b"1"), 400, "INVALID_OPTION")


def test_from_the_file(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    file = tmp_path / "nsqd.toml"
    file.write_text(
        'max_msg_size = 1234\nmsg_timeout = "7s"\nsync_timeout = 1500\nsnappy = false\n'
        'nsqlookupd_tcp_addresses = ["127.0.0.1:1"]\nid = 5\nmax_rdy_count = 9\nno_such_key = 1\n'
    )
    daemon = make_nsqd(f"--config={file}", "--max-rdy-count=11")
    assert daemon.get("/config/max_msg_size").json() == 1234
    assert daemon.get("/config/msg_timeout").json() == 7_000_000_000
    assert daemon.get("/config/sync_timeout").json() == 1_500_000_000
    assert daemon.get("/config/snappy").json() is False
    assert daemon.get("/config/nsqlookupd_tcp_addresses").json() == ["127.0.0.1:1"]
    assert daemon.get("/config/id").json() == 5
    assert daemon.get("/config/max_rdy_count").json() == 11
