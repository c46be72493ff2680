"""Checks nsqadmin as a program: its flags and config file, what it refuses, its paths, and how it ends."""

import json
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admin.event_stream import EventStream
from harness import StartError, eventually
from harness.nsqadmin import Nsqadmin
from nsquark.admin.options import SPEC, NsqadminOptions, normal_base_path

NOWHERE = "--nsqd-http-address=127.0.0.1:1"

NSQ_FLAGS = """
    acl-http-header admin-user allow-config-from-cidr base-path config dev-static-dir graphite-url http-address
    http-client-connect-timeout http-client-request-timeout http-client-tls-cert http-client-tls-insecure-skip-verify
    http-client-tls-key http-client-tls-root-ca-file log-level log-prefix lookupd-http-address
    notification-http-endpoint nsqd-http-address proxy-graphite statsd-counter-format statsd-gauge-format
    statsd-interval statsd-prefix verbose version
"""


@pytest.fixture(scope="module")
def admin() -> Iterator[Nsqadmin]:
    with Nsqadmin(NOWHERE) as daemon:
        yield daemon


def test_all_flags_of_nsq_are_there() -> None:
    assert set(NSQ_FLAGS.split()) <= {row.flag for row in SPEC}
    keys = {row.flag: row.key for row in SPEC}
    assert keys["lookupd-http-address"] == "nsqlookupd_http_addresses"
    assert keys["nsqd-http-address"] == "nsqd_http_addresses"
    assert keys["admin-user"] == "admin_users"


def test_defaults_are_those_of_nsq() -> None:
    options = NsqadminOptions()  # type: ignore[call-arg]
    assert options.http_address == "0.0.0.0:4171"
    assert options.statsd_counter_format == "stats.counters.%s.count"
    assert options.statsd_gauge_format == "stats.gauges.%s"
    assert (options.statsd_prefix, str(options.statsd_interval)) == ("nsq.%s", "1m0s")
    assert (str(options.http_client_connect_timeout), str(options.http_client_request_timeout)) == ("2s", "5s")
    assert (options.allow_config_from_cidr, options.acl_http_header) == ("127.0.0.1/8", "X-Forwarded-User")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--nsqd-http-address or --lookupd-http-address required"),
        ([NOWHERE, "--lookupd-http-address=h:1"], "use --nsqd-http-address or --lookupd-http-address not both"),
        ([NOWHERE, "--http-client-tls-cert=x"], "--http-client-tls-key must be specified with --http-client-tls-cert"),
        ([NOWHERE, "--http-client-tls-key=x"], "--http-client-tls-cert must be specified with --http-client-tls-key"),
        (["--nsqd-http-address=nonsense"], "failed to resolve --nsqd-http-address (nonsense)"),
        (["--lookupd-http-address=nonsense"], "failed to resolve --lookupd-http-address (nonsense)"),
        ([NOWHERE, "--allow-config-from-cidr=x"], "failed to parse --allow-config-from-cidr"),
        ([NOWHERE, "--proxy-graphite"], "failed to parse --graphite-url"),
        ([NOWHERE, "--http-client-tls-root-ca-file=/nowhere"], "failed to read TLS root CA file /nowhere"),
        ([NOWHERE, "--auth-secret-file=/nowhere"], "--auth-secret-file /nowhere"),
        ([NOWHERE, "--http-address=nonsense"], "listen (nonsense) failed"),
        ([NOWHERE, "--poll-interval=1ms"], "--poll-interval must be at least 100ms"),
    ],
)
def test_bad_options_end_it_with_a_reason(flags: list[str], reason: str) -> None:
    with pytest.raises(StartError) as failed:
        Nsqadmin(*flags).start()
    assert failed.value.exit_code == 1
    assert f"FATAL: failed to instantiate nsqadmin - {reason}" in failed.value.log


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(StartError) as failed:
        Nsqadmin("--nonsense").start()
    assert failed.value.exit_code == 2


def test_a_config_file_is_read(tmp_path: Path) -> None:
    config = tmp_path / "nsqadmin.toml"
    config.write_text(
        'nsqlookupd_http_addresses = ["127.0.0.1:1"]\nadmin_users = "ann,bob"\nbase_path = "/nsq"\n'
        "statsd_interval = 30000\nunknown = 1\n"
    )
    with Nsqadmin(f"--config={config}", "--admin-user=eve") as daemon:
        assert daemon.get("/nsq/ping").text == "OK"
        assert daemon.get("/nsq/config/nsqlookupd_http_addresses").json() == ["127.0.0.1:1"]
        assert daemon.get("/nsq/config/admin_users").json() == ["eve"]
        assert daemon.get("/nsq/config/statsd_interval").json() == 30_000_000_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_although_a_page_is_open(number: int) -> None:
    with Nsqadmin(NOWHERE) as daemon, EventStream(daemon, "/"):
        assert daemon.stop(number) == 0, daemon.log


def test_paths_of_nsqs_router(admin: Nsqadmin) -> None:
    answer = admin.get("/nowhere")
    assert (answer.status, answer.json()) == (404, {"message": "NOT_FOUND"})
    answer = admin.request("PUT", "/api/topics")
    assert (answer.status, answer.json()) == (405, {"message": "METHOD_NOT_ALLOWED"})
    assert answer.headers["Allow"] == "GET, OPTIONS, POST"
    answer = admin.request("OPTIONS", "/api/topics")
    assert (answer.status, answer.body, answer.headers["Allow"]) == (200, b"", "GET, OPTIONS, POST")
    assert admin.request("HEAD", "/ping").status == 405
    for path, corrected in (
        ("/api/topics/", "/api/topics"),
        ("//api//topics?x=1", "/api/topics?x=1"),
        ("/API/Topics", "/api/topics"),
        ("/api/TOPICS/CamelCase/", "/api/topics/CamelCase"),
    ):
        answer = admin.request("GET", path)
        assert (answer.status, answer.headers["Location"]) == (301, corrected)
    answer = admin.request("POST", "/api/topics/")
    assert (answer.status, answer.headers["Location"]) == (308, "/api/topics")


def test_all_is_below_the_base_path() -> None:
    with Nsqadmin(NOWHERE, "--base-path=sub/path/") as daemon:
        assert daemon.get("/sub/path/ping").text == "OK"
        assert daemon.get("/ping").status == 404
        assert daemon.get("/sub/path/api/topics").status == 502
        answer = daemon.get("/sub/path/")
        assert (answer.status, answer.headers["Location"]) == (301, "/sub/path")


def test_base_paths_are_made_normal() -> None:
    shown = {text: normal_base_path(text) for text in ("", "/", "a", "/a", "a/", "/a/b/")}
    assert shown == {"": "", "/": "", "a": "/a", "/a": "/a", "a/": "/a", "/a/b/": "/a/b"}


def test_config_can_be_read_and_set(admin: Nsqadmin) -> None:
    assert admin.get("/config/log_level").json() == 2
    assert admin.request("PUT", "/config/log_level", b"warn").json() == 3
    assert admin.request("PUT", "/config/log_level", b"info").json() == 2
    assert admin.get("/config/acl_http_header").text == "X-Forwarded-User"
    assert admin.get("/config/base_path").text == "/"
    assert admin.get("/config/proxy_graphite").json() is False
    answer = admin.get("/config/graphite_url")
    assert (answer.body, answer.headers.get("Content-Type")) == (b"", None)
    for method, name, body, status, code in (
        ("GET", "nonsense", None, 400, "INVALID_OPTION"),
        ("GET", "version", None, 400, "INVALID_OPTION"),
        ("PUT", "base_path", b"/x", 400, "INVALID_OPTION"),
        ("PUT", "log_level", b"", 413, "INVALID_VALUE"),
        ("PUT", "log_level", b"x" * (1 << 20), 400, "INVALID_VALUE"),
        ("PUT", "log_level", b"x" * ((1 << 20) + 1), 413, "INVALID_VALUE"),
        ("PUT", "nsqlookupd_http_addresses", b"x", 400, "INVALID_VALUE"),
        ("PUT", "nsqlookupd_http_addresses", b"[" * 100_000, 400, "INVALID_VALUE"),
    ):
        answer = admin.request(method, f"/config/{name}", body)
        assert (name, answer.status, answer.json()) == (name, status, {"message": code})


def test_nsqlookupds_can_be_set() -> None:
    with Nsqadmin("--lookupd-http-address=127.0.0.1:1") as daemon:
        assert "127.0.0.1:1/topics" in daemon.get("/api/topics").json()["message"]
        answer = daemon.request("PUT", "/config/nsqlookupd_http_addresses", b'["127.0.0.1:2"]')
        assert answer.json() == ["127.0.0.1:2"]
        assert "127.0.0.1:2/topics" in daemon.get("/api/topics").json()["message"]


def test_config_is_for_a_network(make_admin: Callable[..., Nsqadmin]) -> None:
    answer = make_admin(NOWHERE, "--allow-config-from-cidr=10.0.0.0/8").get("/config/log_level")
    assert (answer.status, answer.json()) == (403, {"message": "FORBIDDEN"})
    assert make_admin(NOWHERE, "--allow-config-from-cidr=").get("/config/log_level").status == 200


def test_graphite_is_asked_for_rates(admin: Nsqadmin) -> None:
    for target, status, code in (
        ("/api/graphite", 400, "INVALID_ARG_METRIC"),
        ("/api/graphite?metric=rate", 400, "INVALID_ARG_TARGET"),
        ("/api/graphite?metric=rate&target=x", 500, "INTERNAL_ERROR"),
        ("/api/graphite?metric=rate&target=x;y", 400, "INVALID_REQUEST"),
    ):
        answer = admin.request("GET", target)
        assert (target, answer.status, answer.json()) == (target, status, {"message": code})
    assert admin.get("/render").status == 404


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [("gzip, deflate", "gzip"), ("deflate;q=1, gzip", "deflate"), ("br, gzip", "gzip"), ("br", None), ("", None)],
)
def test_answers_are_compressed_for_who_asks(admin: Nsqadmin, accepted: str, coding: str | None) -> None:
    answer = admin.request("GET", "/api/topics", headers={"Accept-Encoding": accepted})
    assert (answer.headers["Content-Encoding"], answer.headers["Vary"]) == (coding, "Accept-Encoding")
    body = zlib.decompress(answer.body, wbits=47) if coding else answer.body
    assert json.loads(body)["message"].startswith("UPSTREAM_ERROR: ")
    empty = admin.request("GET", "/config/graphite_url", headers={"Accept-Encoding": accepted})
    assert (empty.status, empty.body) == (200, b"")


def test_static_files_are_kept_by_their_tag(admin: Nsqadmin) -> None:
    answer = admin.get("/static/nowhere.js")
    assert (answer.status, answer.text) == (404, "NOT_FOUND")
    assert admin.request("GET", "/static/..%2fapp.py").status == 404
    answer = admin.get("/static/events.js")
    assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
    again = admin.request("GET", "/static/events.js", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")


def test_static_files_of_a_developer(tmp_path: Path, make_admin: Callable[..., Nsqadmin]) -> None:
    (tmp_path / "mine.css").write_text("a {}")
    admin = make_admin(NOWHERE, f"--dev-static-dir={tmp_path}")
    assert admin.get("/static/mine.css").text == "a {}"
    (tmp_path / "mine.css").write_text("b {}")
    assert admin.get("/static/mine.css").text == "b {}"


def test_requests_are_logged(admin: Nsqadmin) -> None:
    admin.get("/api/nowhere", x="1")
    eventually(lambda: " INFO: 404 GET /api/nowhere?x=1 (127.0.0.1" in admin.log)
