"""Checks `nsquark sql`, for which topics are tables of DuckDB."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from harness import Nsqd, eventually, mpub_messages
from harness.lookupd import Nsqlookupd

pytest.importorskip("duckdb", reason="DuckDB is not installed: pip install 'nsquark[sql]'")
pytestmark = pytest.mark.ours

ORDERS = [json.dumps({"user": number % 3, "amount": number}).encode() for number in range(300)]


def address(daemon: Nsqd) -> str:
    return "{}:{}".format(*daemon.http)


def publish(daemon: Nsqd, topic: str, *messages: bytes) -> None:
    assert daemon.post("/mpub", mpub_messages(messages), topic=topic, binary="true").status == 200


def nsquark(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "nsquark.tool.main", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"TZ": "Asia/Tokyo"},
    )


def sql(daemon: Nsqd, query: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return nsquark("sql", f"--nsqd-http-address={address(daemon)}", query, *flags)


def rows(daemon: Nsqd, query: str, *flags: str) -> list[dict[str, object]]:
    result = sql(daemon, query, "--format=json", *flags)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def orders(make_nsqd: Callable[..., Nsqd]) -> Nsqd:
    nsqd = make_nsqd()
    publish(nsqd, "orders", *ORDERS)
    return nsqd


def test_json_in_bodies_is_summed_up(orders: Nsqd) -> None:
    query = "SELECT (body->>'user')::INT AS who, sum((body->>'amount')::INT) AS total FROM orders GROUP BY 1 ORDER BY 1"
    assert rows(orders, query) == [{"who": n, "total": sum(range(n, 300, 3))} for n in range(3)]
    table = sql(orders, query).stdout.splitlines()
    assert [line.split() for line in table] == [
        ["who", "total"], ["---", "-----"], *([str(n), str(sum(range(n, 300, 3)))] for n in range(3))
    ]  # fmt: skip
    found = list(csv.reader(io.StringIO(sql(orders, query, "--format=csv").stdout)))
    assert found == [["who", "total"], *([str(n), str(sum(range(n, 300, 3)))] for n in range(3))]


def test_times_are_in_utc_and_choose_what_is_read(orders: Nsqd) -> None:
    (found,) = rows(orders, "SELECT count(*) AS n, max(timestamp) AS newest, max(seq) AS last FROM orders")
    assert found["n"] == 300
    assert rows(orders, f"SELECT body FROM orders WHERE timestamp > '{found['newest']}'") == []
    assert rows(orders, f"SELECT count(*) AS n FROM orders WHERE timestamp <= '{found['newest']}'") == [{"n": 300}]
    assert rows(orders, f"SELECT body->>'amount' AS a FROM orders WHERE seq = {found['last']}") == [{"a": "299"}]
    assert str(found["newest"]).endswith(("Z", "+00:00"))


def test_topics_are_joined_whatever_their_names_are(orders: Nsqd) -> None:
    publish(orders, "users.v2-eu", b'{"user": 1, "name": "Ada"}')
    query = """SELECT u.body->>'name' AS name, count(*) AS n FROM orders o
        JOIN "users.v2-eu" u ON o.body->>'user' = u.body->>'user' GROUP BY 1"""
    assert rows(orders, query) == [{"name": "Ada", "n": 100}]


def test_of_topics_that_differ_in_case_the_one_written_is_meant(orders: Nsqd) -> None:
    publish(orders, "Orders", b"{}")
    assert rows(orders, "SELECT count(*) AS n FROM Orders") == [{"n": 1}]
    assert rows(orders, "SELECT count(*) AS n FROM orders") == [{"n": 300}]


def test_bodies_that_are_no_text_are_shown_and_kept(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    publish(nsqd, "t", b"\xff\x1b[2J")
    assert rows(nsqd, "SELECT body, hex(raw) AS raw FROM t") == [{"body": "\ufffd\x1b[2J", "raw": "FF1B5B324A"}]
    assert "\x1b" not in sql(nsqd, "SELECT body, raw FROM t").stdout


def test_nsqds_are_found_by_nsqlookupd(make_nsqd: Callable[..., Nsqd]) -> None:
    lookupd = Nsqlookupd().start()
    try:
        nsqd = make_nsqd("--lookupd-tcp-address={}:{}".format(*lookupd.tcp), "--broadcast-address=127.0.0.1")
        publish(nsqd, "t", b"m")
        eventually(lambda: lookupd.producers("t"))
        result = nsquark("sql", "SELECT body FROM t", "--lookupd-http-address={}:{}".format(*lookupd.http))
        assert (result.returncode, result.stdout) == (0, "body\n----\nm\n"), result.stderr
    finally:
        lookupd.kill()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT * FROM nix", 'topics are tables; a name with . or - is "quoted"'),
        ("SELEC 1", "syntax error"),
        ("SELECT body->>'x' FROM words", "not every body is JSON: add WHERE json_valid(body)"),
    ],
)
def test_mistakes_are_told_in_a_sentence(orders: Nsqd, query: str, said: str) -> None:
    publish(orders, "words", b"{}", b"no json")
    result = sql(orders, query)
    assert result.returncode == 1
    assert result.stderr.startswith("nsquark sql: ") and said in result.stderr
    assert "Traceback" not in result.stderr
    assert rows(orders, "SELECT body->>'x' AS x FROM words WHERE json_valid(body)") == [{"x": None}]


def test_an_nsqd_that_does_not_answer_is_named(orders: Nsqd) -> None:
    orders.keep_ports()  # so that no other nsqd listens there when it is gone
    orders.stop()
    result = sql(orders, "SELECT 1")
    assert result.returncode == 1
    assert f"{address(orders)} does not answer" in result.stderr and "Traceback" not in result.stderr
