"""Checks IDENTIFY: what may be asked for, what is answered, and what is shown afterwards."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from harness import Frame, Nsqd, Wire, body_of
from harness.wire import RESPONSE

ANSWER_KEYS = [
    "max_rdy_count",
    "version",
    "max_msg_timeout",
    "msg_timeout",
    "tls_v1",
    "deflate",
    "deflate_level",
    "max_deflate_level",
    "snappy",
    "sample_rate",
    "auth_required",
    "output_buffer_size",
    "output_buffer_timeout",
]

DEFAULTS = (
    b'{"max_rdy_count":2500,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,"tls_v1":false,'
    b'"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
    b'"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250}'
)


def test_without_negotiation_the_answer_is_ok(client: Wire) -> None:
    client.IDENTIFY(client_id="me", hostname="here", tls_v1=True, snappy=True, deflate=True)
    client.expect_ok()
    client.assert_usable()


def test_with_negotiation_the_answer_is_exactly_this(client: Wire) -> None:
    client.IDENTIFY(feature_negotiation=True)
    assert client.read_frame() == Frame(RESPONSE, DEFAULTS)


def test_identify_is_optional(client: Wire, topic: str) -> None:
    client.publish(topic, b"hello")
    client.subscribe(topic, rdy=1)
    assert client.read_message().body == b"hello"


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"heartbeat_interval": 1000}, {}),
    ({"heartbeat_interval": 60000}, {}),
    ({"heartbeat_interval": 0}, {}),
    ({"heartbeat_interval": -1}, {}),
    ({"output_buffer_size": 64}, {"output_buffer_size": 64, "output_buffer_timeout": 250}),
    ({"output_buffer_size": 65536}, {"output_buffer_size": 65536}),
    ({"output_buffer_size": 0}, {"output_buffer_size": 16384}),
    ({"output_buffer_size": -1}, {"output_buffer_size": 1, "output_buffer_timeout": 0}),
    (
        {"output_buffer_size": -1, "output_buffer_timeout": 500},
        {"output_buffer_size": 1, "output_buffer_timeout": 0},
    ),
    ({"output_buffer_timeout": 25}, {"output_buffer_timeout": 25}),
    ({"output_buffer_timeout": 30000}, {"output_buffer_timeout": 30000}),
    ({"output_buffer_timeout": 0}, {"output_buffer_timeout": 250}),
    ({"output_buffer_timeout": -1}, {"output_buffer_timeout": 0, "output_buffer_size": 16384}),
    ({"sample_rate": 0}, {"sample_rate": 0}),
    ({"sample_rate": 99}, {"sample_rate": 99}),
    ({"msg_timeout": 0}, {"msg_timeout": 60000}),
    ({"msg_timeout": 1000}, {"msg_timeout": 1000}),
    ({"msg_timeout": 900000}, {"msg_timeout": 900000}),
    ({"tls_v1": True}, {"tls_v1": False}),
    ({"deflate_level": 3}, {"deflate_level": 6, "deflate": False}),
    ({"short_id": "s", "long_id": "l", "no_such_key": [1]}, {}),
    ({"Msg_Timeout": 1500, "SAMPLE_RATE": 5}, {"msg_timeout": 1500, "sample_rate": 5}),
    ({"client_id": None, "heartbeat_interval": None}, {}),
]


@pytest.mark.parametrize(("asked", "granted"), ACCEPTED, ids=repr)
def test_accepted(client: Wire, asked: dict[str, Any], granted: dict[str, Any]) -> None:
    answer = client.identify(**asked)
    assert list(answer) == ANSWER_KEYS
    assert answer == {**json.loads(DEFAULTS), **granted}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"heartbeat_interval": 100}, "heartbeat interval (100) is invalid"),
    ({"heartbeat_interval": 999}, "heartbeat interval (999) is invalid"),
    ({"heartbeat_interval": 60001}, "heartbeat interval (60001) is invalid"),
    ({"heartbeat_interval": -2}, "heartbeat interval (-2) is invalid"),
    ({"output_buffer_size": 63}, "output buffer size (63) is invalid"),
    ({"output_buffer_size": 65537}, "output buffer size (65537) is invalid"),
    ({"output_buffer_size": -2}, "output buffer size (-2) is invalid"),
    ({"output_buffer_timeout": 24}, "output buffer timeout (24) is invalid"),
    ({"output_buffer_timeout": 30001}, "output buffer timeout (30001) is invalid"),
    ({"output_buffer_timeout": -2}, "output buffer timeout (-2) is invalid"),
    ({"sample_rate": -1}, "sample rate (-1) is invalid"),
    ({"sample_rate": 100}, "sample rate (100) is invalid"),
    ({"msg_timeout": 999}, "msg timeout (999) is invalid"),
    ({"msg_timeout": 900001}, "msg timeout (900001) is invalid"),
    ({"msg_timeout": -1}, "msg timeout (-1) is invalid"),
    ({"msg_timeout": 1, "heartbeat_interval": 1}, "heartbeat interval (1) is invalid"),
    ({"msg_timeout": 1, "sample_rate": 100}, "sample rate (100) is invalid"),
    ({"sample_rate": 100, "output_buffer_size": 1}, "output buffer size (1) is invalid"),
    ({"output_buffer_size": 1, "output_buffer_timeout": 1}, "output buffer timeout (1) is invalid"),
    ({"output_buffer_timeout": 1, "heartbeat_interval": 1}, "heartbeat interval (1) is invalid"),
]


@pytest.mark.parametrize(("asked", "reason"), REFUSED, ids=repr)
@pytest.mark.parametrize("negotiation", [True, False])
def test_refused(client: Wire, asked: dict[str, Any], reason: str, negotiation: bool) -> None:
    client.IDENTIFY(feature_negotiation=negotiation, **asked)
    client.expect_error(f"E_BAD_BODY IDENTIFY {reason}")


@pytest.mark.parametrize(
    "document",
    [
        b"x",
        b"{",
        b"[]",
        b"[1]",
        b"7",
        b'"text"',
        b"true",
        b'{"client_id":1}',
        b'{"heartbeat_interval":"1000"}',
        b'{"heartbeat_interval":1000.5}',
        b'{"heartbeat_interval":1e3}',
        b'{"feature_negotiation":"true"}',
        b'{"feature_negotiation":1}',
        b'{"tls_v1":null,"snappy":0}',
        b'{"sample_rate":99999999999999999999}',
        b'{"sample_rate":2147483648}',
        b'{"msg_timeout":9223372036854775808}',
        b'{"msg_timeout":"5000","msg_timeout":5000}',
        b'{"unknown":NaN}',
        b'{"client_id":"a",}',
        b"{'client_id':'a'}",
        b"{} {}",
        b"{}x",
        b"\x00\x01\x02\x03",
    ],
    ids=repr,
)
def test_bad_document(client: Wire, document: bytes) -> None:
    client.command("IDENTIFY", document)
    client.expect_error("E_BAD_BODY IDENTIFY failed to decode JSON body")


@pytest.mark.parametrize(
    "document",
    [
        b"null",
        b"{}",
        b" {} \n",
        b"\t{\r\n}\n ",
        b'{"client_id":"\xff"}',
        b'{"client_id":"\\ud83d"}',
        b'{"unknown":"\\ude00\\ud83d"}',
        b'{"unknown":1e400}',
        b'{"unknown":' + b"9" * 5_000 + b"}",
        b'{"show_limits":"yes","requeue_uncounted":1}',
    ],
    ids=lambda document: repr(document[:32]),
)
def test_odd_but_good_document(client: Wire, document: bytes) -> None:
    client.command("IDENTIFY", document)
    client.expect_ok()
    client.assert_usable()


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        (b'{"client_id":"cut \\ud83d","feature_negotiation":true}', "cut \ufffd"),
        (b'{"client_id":"kept","client_id":null,"feature_negotiation":true}', "kept"),
        (b'{"client_id":"first","CLIENT_ID":"last","feature_negotiation":true}', "last"),
    ],
)
def test_a_document_is_read_as_go_reads_it(nsqd: Nsqd, client: Wire, topic: str, document: bytes, shown: str) -> None:
    client.command("IDENTIFY", document)
    assert client.read_frame() == Frame(RESPONSE, DEFAULTS)
    client.subscribe(topic)
    assert nsqd.channel(topic)["clients"][0]["client_id"] == shown


def test_shown_in_stats(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.subscribe(
        topic,
        client_id="me",
        hostname="here.example",
        user_agent="tester/1",
        sample_rate=42,
        heartbeat_interval=50_000,
    )
    shown = nsqd.channel(topic)["clients"][0]
    assert shown["client_id"] == "me"
    assert shown["hostname"] == "here.example"
    assert shown["user_agent"] == "tester/1"
    assert shown["sample_rate"] == 42


def test_names_default_to_the_address_only_without_identify(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    plain = connect().subscribe(topic, "plain")
    silent = connect()
    silent.IDENTIFY()
    silent.expect_ok()
    silent.subscribe(topic, "silent")
    shown = nsqd.channel(topic, "plain")["clients"][0]
    assert (shown["client_id"], shown["hostname"], shown["user_agent"]) == ("127.0.0.1", "127.0.0.1", "")
    assert shown["remote_address"] == f"127.0.0.1:{plain.local_port}"
    shown = nsqd.channel(topic, "silent")["clients"][0]
    assert (shown["client_id"], shown["hostname"]) == ("", "")


def test_again_before_sub(client: Wire) -> None:
    assert client.identify(msg_timeout=2000)["msg_timeout"] == 2000
    assert client.identify(msg_timeout=3000)["msg_timeout"] == 3000
    client.IDENTIFY()
    client.expect_ok()


def test_after_publishing_is_fine(client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.identify(client_id="late")


def test_limits_follow_the_flags(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd(
        "--max-rdy-count=7",
        "--msg-timeout=5s",
        "--max-msg-timeout=10s",
        "--max-heartbeat-interval=3s",
        "--max-output-buffer-size=1024",
        "--max-output-buffer-timeout=2s",
        "--min-output-buffer-timeout=100ms",
        "--output-buffer-timeout=150ms",
        "--max-deflate-level=4",
        "--deflate=false",
        "--snappy=false",
    )
    answer = connect(daemon).identify(deflate=True, snappy=True)
    assert answer == {
        **json.loads(DEFAULTS),
        "max_rdy_count": 7,
        "msg_timeout": 5000,
        "max_msg_timeout": 10000,
        "deflate_level": 4,
        "max_deflate_level": 4,
        "output_buffer_timeout": 150,
    }
    for field, value, reason in [
        ("heartbeat_interval", 3001, "heartbeat interval (3001) is invalid"),
        ("output_buffer_size", 1025, "output buffer size (1025) is invalid"),
        ("output_buffer_timeout", 2001, "output buffer timeout (2001) is invalid"),
        ("output_buffer_timeout", 99, "output buffer timeout (99) is invalid"),
        ("msg_timeout", 10001, "msg timeout (10001) is invalid"),
    ]:
        client = connect(daemon)
        client.IDENTIFY(**{field: value})
        client.expect_error(f"E_BAD_BODY IDENTIFY {reason}")


def test_body_may_arrive_late(client: Wire) -> None:
    sent = b"IDENTIFY\n" + body_of(b'{"feature_negotiation":true}')
    client.send(sent[:12])
    client.expect_silence(0.05)
    client.send(sent[12:])
    assert client.read_frame() == Frame(RESPONSE, DEFAULTS)


LONG = {"unknown": "x" * 100_000}
"""Makes a body too long to be read in one turn."""


@pytest.mark.ours
def test_a_long_document_is_read_as_a_short_one(nsqd: Nsqd, client: Wire, topic: str) -> None:
    answer = client.identify(client_id="long", msg_timeout=2000, heartbeat_interval=None, **LONG)
    assert answer["msg_timeout"] == 2000
    client.SUB(topic, "ch")
    client.expect_ok()
    assert nsqd.channel(topic)["clients"][0]["client_id"] == "long"


@pytest.mark.parametrize(
    "asked", [{"client_id": 1}, {"client_id": [1]}, {"tls_v1": {"a": 1}}, {"heartbeat_interval": 1000.5}], ids=repr
)
def test_a_long_document_that_is_wrong_is_refused(client: Wire, asked: dict[str, Any]) -> None:
    client.IDENTIFY(**asked, **LONG)
    client.expect_error("E_BAD_BODY IDENTIFY failed to decode JSON body")


def test_commands_behind_a_long_document_wait_for_it(client: Wire, topic: str) -> None:
    client.IDENTIFY(**LONG)
    client.PUB(topic, b"x")
    client.expect_ok(2)


@pytest.mark.ours
@pytest.mark.parametrize("depth", [2_000, 20_000, 1_000_000])
def test_a_deep_document_is_refused(nsqd: Nsqd, client: Wire, depth: int) -> None:
    """NSQ reads 10,000 levels, and no more; how many fewer are read here depends on the version of Python."""
    refusal = b"E_BAD_BODY IDENTIFY failed to decode JSON body"
    client.command("IDENTIFY", b'{"x":' + b"[" * depth + b"]" * depth + b"}")
    assert client.read_frame().data in ((b"OK", refusal) if depth <= 10_000 else (refusal,))
    assert "Traceback" not in nsqd.log


@pytest.mark.ours
def test_strings_are_cut_off_at_1024_characters(nsqd: Nsqd, client: Wire, topic: str) -> None:
    names = ("client_id", "hostname", "user_agent")
    long: dict[str, Any] = dict.fromkeys(names, "é" * 5000)
    client.subscribe(topic, **long)
    shown = nsqd.channel(topic)["clients"][0]
    assert [len(shown[name]) for name in names] == [1024, 1024, 1024]


@pytest.mark.parametrize("filling", [10, 16 << 10, 200_000])
def test_names_count_in_any_case_however_long_the_body_is(nsqd: Nsqd, client: Wire, topic: str, filling: int) -> None:
    """A name is read as in NSQ: one within a string is none, and the last of several wins."""
    body = (
        '{"Client_ID" : "first", "x": "' + "y" * filling + '", "HOSTNAME":"\\"Client_Id\\":", '
        '"USER_AGENT":"Client_ID","CLIENT_ID":"me","Feature_Negotiation":true}'
    )
    client.send(b"IDENTIFY\n" + body_of(body.encode()))
    assert client.read_frame() == Frame(RESPONSE, DEFAULTS)
    client.SUB(topic, "ch")
    client.expect_ok()
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["client_id"], shown["hostname"], shown["user_agent"]) == ("me", '"Client_Id":', "Client_ID")
