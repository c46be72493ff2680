"""Checks `nsquark schema`: what the JSON of a topic looks like, and how much of it does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'nsquark[sql]'")

import nsquark
from harness import Nsqd, mpub_messages
from nsquark.query.json_types import FIELDS_MAX, Seen, infer, misfits


def ddl(*values: Any) -> str:
    seen = Seen()
    for value in values:
        seen.add(value)
    return infer(seen).columns()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([{"a": 1, "b": "x", "c": True, "d": 1.5}], "a BIGINT, b STRING, c BOOLEAN, d DOUBLE"),
        ([{"a": 1}, {"a": 2.5}, {"b": None}], "a DOUBLE, b STRING"),
        ([{"a": 1 << 63}, {"a": 1}], "a DECIMAL(20,0)"),
        ([{"a": {"b": [1, 2]}, "c": []}], "a STRUCT<b: ARRAY<BIGINT>>, c ARRAY<STRING>"),
        ([{"a": [{"x": 1}, {"y": "s"}]}], "a ARRAY<STRUCT<x: BIGINT, y: STRING>>"),
        ([{"a": 1}, {"a": "x"}], "a STRING"),
        ([{"a": 1}] * 19 + [{"a": "x"}], "a BIGINT"),
        ([{"a-b": 1, "c`d": 2}], "`a-b` BIGINT, `c``d` BIGINT"),
        ([{"m": {f"k{n}": {"v": n} for n in range(FIELDS_MAX + 1)}}], "m MAP<STRING, STRUCT<v: BIGINT>>"),
        ([{"a": {}}], "a MAP<STRING, STRING>"),
        ([[{"a": 1}]], "ARRAY<STRUCT<a: BIGINT>>"),
    ],
)
def test_types(values: list[Any], expected: str) -> None:
    assert ddl(*values) == expected


def test_misfits_are_named_by_their_place() -> None:
    seen = Seen()
    for _ in range(20):
        seen.add({"a": {"b": [1]}, "c": 1.5})
    kind = infer(seen)
    assert list(misfits({"a": {"b": [1, None]}, "c": 2, "new": "x"}, kind)) == []
    assert list(misfits({"a": {"b": ["x"]}}, kind)) == ["a.b[] is a string, not a bigint"]
    assert list(misfits([], kind)) == ["the body is a array, not a struct"]


def publish(daemon: Nsqd, topic: str, *messages: bytes) -> None:
    assert daemon.post("/mpub", mpub_messages(messages), topic=topic, binary="true").status == 200


@pytest.mark.ours
def test_the_newest_messages_of_a_topic_are_the_sample(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    publish(nsqd, "orders", *[b'{"old": "shape"}'] * 500)
    # Sequence numbers have a gap here.
    nsqd.restart(crash=True)
    publish(nsqd, "orders", *[json.dumps({"user": n, "amount": n / 2}).encode() for n in range(97)])
    publish(nsqd, "orders", b"no json", b'{"user": "x"}', b'{"user": 1}')
    address = "{}:{}".format(*nsqd.http)
    found = nsquark.infer_schema("orders", nsqd=address, sample=100)
    assert found.ddl == "user BIGINT, amount DOUBLE"
    assert (found.rows, found.fitting) == (100, 98)
    assert dict(found.misfits) == {"the body is no JSON": 1, "user is a string, not a bigint": 1}
    assert nsquark.infer_schema("orders", nsqd=address).rows == 600
    result = schema(nsqd, "orders", "--sample=100")
    assert (result.returncode, result.stdout) == (0, "user BIGINT, amount DOUBLE\n")
    assert result.stderr.splitlines()[0] == "fits 98 of 100 messages (98.0%)"
    assert "1: the body is no JSON" in result.stderr


def schema(daemon: Nsqd, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "nsquark.tool.main", "schema", "--nsqd-http-address={}:{}".format(*daemon.http)]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ)
    )


@pytest.mark.ours
def test_a_topic_without_messages_is_told(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    assert nsqd.post("/topic/create", topic="empty").status == 200
    result = schema(nsqd, "empty")
    assert result.returncode == 1
    assert result.stderr == "nsquark schema: topic empty has no messages to infer a schema from\n"
    assert "there is no topic nix" in schema(nsqd, "nix").stderr
