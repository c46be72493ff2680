"""Checks AUTH, and the commands it guards."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import AuthServer, Nsqd, Wire
from harness.auth import GRANT_ALL, granting
from harness.wire import RESPONSE


@pytest.fixture(scope="module")
def server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        yield running


@pytest.fixture(scope="module")
def nsqd(server: AuthServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    # The server is a thread of this process, which may be held up for longer than nsqd waits by default.
    flags = (f"--auth-http-address={server.address}", "--http-client-request-timeout=60s")
    with Nsqd(tmp_path_factory.mktemp("nsqd"), *flags) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _permissive(server: AuthServer) -> None:
    server.status = 200
    server.answer = granting(GRANT_ALL)
    server.queries.clear()


def _authorised(client: Wire) -> Wire:
    client.AUTH("secret")
    client.expect('{"identity":"kay","identity_url":"http://kay","permission_count":1}')
    return client


def test_answer_and_query(client: Wire, server: AuthServer) -> None:
    assert client.identify()["auth_required"] is True
    client.AUTH("s3cret &=")
    client.expect('{"identity":"kay","identity_url":"http://kay","permission_count":1}')
    assert server.queries == [{"common_name": "", "remote_ip": "127.0.0.1", "secret": "s3cret &=", "tls": "false"}]
    assert server.paths[-1] == "/auth"


def test_everything_works_once_authorised(nsqd: Nsqd, client: Wire, topic: str) -> None:
    _authorised(client)
    client.publish(topic, b"one")
    client.publish(topic, b"two", b"three")
    client.DPUB(topic, 0, b"four")
    client.expect_ok()
    client.subscribe(topic, rdy=4)
    assert len(client.read_messages(4, finish=True)) == 4
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["authed"], shown["auth_identity"], shown["auth_identity_url"]) == (
        True,
        "kay",
        "http://kay",
    )


@pytest.mark.parametrize("command", ["PUB", "MPUB", "DPUB", "SUB"])
def test_guarded_without_auth(nsqd: Nsqd, client: Wire, topic: str, command: str) -> None:
    _send(client, command, topic)
    client.expect_error(f"E_AUTH_FIRST AUTH required before {command}")
    assert topic not in nsqd.topic_names()


@pytest.mark.parametrize("command", ["PUB", "MPUB", "DPUB", "SUB"])
def test_not_permitted(nsqd: Nsqd, client: Wire, server: AuthServer, topic: str, command: str) -> None:
    server.answer = granting({"topic": "^other$", "channels": [".*"], "permissions": ["subscribe", "publish"]})
    _authorised(client)
    _send(client, command, topic)
    channel = "ch" if command == "SUB" else ""
    client.expect_error(f'E_UNAUTHORIZED AUTH failed for {command} on "{topic}" "{channel}"')
    assert topic not in nsqd.topic_names()


def _send(client: Wire, command: str, topic: str) -> None:
    if command == "PUB":
        client.PUB(topic, b"x")
    elif command == "MPUB":
        client.command(f"MPUB {topic}")  # refused before its body is read
    elif command == "DPUB":
        client.DPUB(topic, 5, b"x")
    else:
        client.SUB(topic, "ch")


def test_names_are_searched_not_matched_whole(client: Wire, server: AuthServer, topic: str) -> None:
    server.answer = granting({"topic": "pic_", "channels": ["h$", "^$"], "permissions": ["subscribe", "publish"]})
    _authorised(client)
    client.publish(topic, b"x")
    client.subscribe(topic, "ch", rdy=1)
    assert client.read_message().body == b"x"


def test_publishing_needs_a_channel_expression_that_matches_nothing(
    client: Wire, server: AuthServer, topic: str
) -> None:
    server.answer = granting({"topic": ".*", "channels": [], "permissions": ["subscribe", "publish"]})
    _authorised(client)
    client.PUB(topic, b"x")
    client.expect_error(f'E_UNAUTHORIZED AUTH failed for PUB on "{topic}" ""')


def test_permissions_are_separate(connect: Callable[..., Wire], server: AuthServer, topic: str) -> None:
    server.answer = granting({"topic": ".*", "channels": [".*"], "permissions": ["subscribe"]})
    reader, writer = _authorised(connect()), _authorised(connect())
    reader.subscribe(topic)
    writer.PUB(topic, b"x")
    writer.expect_error(f'E_UNAUTHORIZED AUTH failed for PUB on "{topic}" ""')


def test_second_auth(client: Wire) -> None:
    _authorised(client)
    client.AUTH("again")
    client.expect_error("E_INVALID AUTH already set")


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (403, granting(GRANT_ALL)),
        (500, b""),
        (200, b"not json"),
        (200, {**granting(GRANT_ALL), "ttl": 0}),
        (200, {**granting(GRANT_ALL), "ttl": -5}),
        (200, {**granting(GRANT_ALL), "ttl": 60.0}),
        (200, {**granting(GRANT_ALL), "ttl": True}),
        (200, granting({**GRANT_ALL, "permissions": ["own"]})),
        (200, granting({**GRANT_ALL, "topic": "("})),
        (200, granting({**GRANT_ALL, "channels": ["["]})),
    ],
    ids=repr,
)
def test_refused_by_the_server(client: Wire, server: AuthServer, status: int, answer: Any) -> None:
    server.status, server.answer = status, answer
    client.AUTH("secret")
    client.expect_error("E_AUTH_FAILED AUTH failed")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (b'{"TTL":60,"Identity":"kay","Authorizations":[GRANT]}', "kay"),
        (b'{"ttl":60,"identity":null,"identity_url":null,"authorizations":[GRANT]}', ""),
        (b'{"ttl":60,"identity":"cut \\ud83d","authorizations":[GRANT]}', "cut \ufffd"),
        (b'{"ttl":60,"identity":"cut \xc3","authorizations":[GRANT]}', "cut \ufffd"),
        (b'{"ttl":60,"identity":"kay","score":1e400,"authorizations":[GRANT]}', "kay"),
    ],
)
def test_an_answer_is_read_as_go_reads_it(
    client: Wire, server: AuthServer, topic: str, answer: bytes, shown: str
) -> None:
    """Auth servers that NSQ understands write names in any letter case, null for what they do not know, and more."""
    server.answer = answer.replace(b"GRANT", b'{"Topic":".*","CHANNELS":[".*"],"Permissions":["publish"]}')
    client.AUTH("secret")
    frame = client.read_frame()
    assert (frame.kind, json.loads(frame.data)["identity"]) == (RESPONSE, shown)
    client.publish(topic, b"x")


def test_no_authorizations(client: Wire, server: AuthServer) -> None:
    server.answer = granting()
    client.AUTH("secret")
    client.expect_error("E_UNAUTHORIZED AUTH no authorizations found")


def test_expired_grant_is_asked_for_again(connect: Callable[..., Wire], server: AuthServer, topic: str) -> None:
    lasting = _authorised(connect())
    lasting.publish(topic, b"x")
    assert len(server.queries) == 1
    server.answer = granting(GRANT_ALL, ttl=1)
    client = _authorised(connect())
    client.expect_silence(1.1)
    before = len(server.queries)
    client.publish(topic, b"x")
    assert len(server.queries) == before + 1
    server.status = 500
    client.expect_silence(1.1)
    lasting.publish(topic, b"x")
    client.PUB(topic, b"x")
    client.expect_error("E_AUTH_FAILED AUTH failed")


def test_server_given_as_a_url(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer
) -> None:
    daemon = make_nsqd(f"--auth-http-address=http://{server.address}/some/path")
    _authorised(connect(daemon))
    assert server.paths[-1] == "/some/path"


def test_no_server_there(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    client = connect(make_nsqd("--auth-http-address=127.0.0.1:1"))
    client.AUTH("secret")
    client.expect_error("E_AUTH_FAILED AUTH failed")


def test_http_is_not_guarded(nsqd: Nsqd, topic: str) -> None:
    assert nsqd.post("/pub", b"x", topic=topic).body == b"OK"
