"""Checks the message browser on two nsqds: looking, filtering, following, downloading, publishing; and a channel
moved.
"""

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from admin.browser import Browser
from admin.conftest import PATIENT
from harness import Nsqd, Wire, eventually
from harness.nsqadmin import Nsqadmin
from nsquark.client.envelope import unwrap, wrap

NASTY = {
    "html": b"<script>alert(1)</script><img src=x onerror=alert(1)>",
    "terminal": b"\x1b[31mred\x1b]0;title\x07 \xc2\x9b31m",
    "no text": b"\xff\xfe\x00\x01",
    "long": b"x" * 1_000_000,
    "cut in a character": b"x" + "ö".encode() * 2000,
    "deep": b"[" * 100_000,
}


class BrowsedCluster:
    """Runs two nsqds and their nsqadmin; messages are spread over both in turn."""

    def __init__(self, nsqds: list[Nsqd], admin: Nsqadmin) -> None:
        self.nsqds = nsqds
        self.admin = admin

    def publish(self, topic: str, *bodies: bytes) -> None:
        for number, body in enumerate(bodies):
            assert self.nsqds[number % 2].post("/pub", body, topic=topic).status == 200
        self.knows(topic)

    def knows(self, topic: str) -> None:
        eventually(lambda: topic in self.admin.get("/api/topics").json()["topics"])
        eventually(lambda: self.admin.get(f"/messages/{topic}/found.json").status == 200)
        having = sum(topic in nsqd.topic_names() for nsqd in self.nsqds)
        eventually(lambda: len((self.page(topic)["newer"] or "").split(",")) == having)

    def page(self, topic: str, **query: Any) -> dict[str, Any]:
        reply = self.admin.get(f"/messages/{topic}/found.json", **query)
        assert reply.status == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def texts(self, topic: str, **query: Any) -> list[str]:
        return [message["text"] for message in self.page(topic, **query)["messages"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowsedCluster]:
    nsqds = [Nsqd(tmp_path_factory.mktemp("nsqd")) for _ in range(2)]
    with nsqds[0], nsqds[1]:
        flags = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in nsqds]
        with Nsqadmin(*flags, *PATIENT, "--poll-interval=200ms") as admin:
            yield BrowsedCluster(nsqds, admin)
            assert admin.is_running, admin.log


def numbered(count: int) -> list[bytes]:
    return [json.dumps({"n": number, "user": {"id": number % 10}}).encode() for number in range(count)]


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    return [json.loads(message["text"])["n"] for message in messages]


# -- looking ---------------------------------------------------------------------------------------------


def test_pages_go_back_from_the_newest_over_all_nsqds(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(60))
    first = cluster.page(topic, limit=25)
    assert numbers(first["messages"]) == list(range(59, 34, -1))
    assert first["searched"]["ended"] == "limit"
    second = cluster.page(topic, limit=25, older=first["older"])
    third = cluster.page(topic, limit=25, older=second["older"])
    assert numbers(second["messages"]) == list(range(34, 9, -1))
    assert numbers(third["messages"]) == list(range(9, -1, -1))
    assert (third["older"], third["searched"]["ended"]) == (None, "start")
    message = first["messages"][0]
    assert {message["node"] for message in first["messages"]} == {nsqd.http_address for nsqd in cluster.nsqds}
    assert (message["is_json"], message["is_text"], message["is_cut"], message["base64"]) == (True, True, False, None)
    assert message["bytes"] == len(message["text"])
    assert message["time"].endswith(f"{message['timestamp_ns'] % 10**9:09d}Z")


def test_pages_go_forward_from_the_oldest(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(30))
    seen, page = [], cluster.page(topic, at="oldest", limit=5)
    while page["messages"]:
        assert len(page["messages"]) <= 10
        seen += numbers(page["messages"])
        page = cluster.page(topic, newer=page["newer"], limit=5)
    assert sorted(seen) == list(range(30))
    before = cluster.page(topic, older=page["older"], limit=3)
    assert numbers(before["messages"]) == [29, 28, 27]


def test_a_time_and_a_sequence_number_are_places(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(10))
    time.sleep(0.01)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.01)
    cluster.publish(topic, *[b'{"n": %d}' % number for number in range(10, 20)])
    assert numbers(cluster.page(topic, at=f"time:{between_ms}")["messages"]) == list(range(9, -1, -1))
    node = cluster.nsqds[0].http_address
    messages = cluster.page(topic, node=node)["messages"]
    assert numbers(messages) == [18, 16, 14, 12, 10, 8, 6, 4, 2, 0]
    at = cluster.page(topic, node=node, at=f"seq:{messages[3]['seq']}")
    assert numbers(at["messages"]) == [12, 10, 8, 6, 4, 2, 0]
    refused = cluster.admin.get(f"/messages/{topic}/found.json", at="seq:1")
    assert (refused.status, refused.json()["message"]) == (400, "INVALID_ARG_AT")


def test_a_deferred_message_stands_where_it_came_in_and_none_is_shown_twice(
    cluster: BrowsedCluster, topic: str
) -> None:
    """It keeps the time at which it was published, so the order of the log is not that of time."""
    cluster.nsqds[0].post("/pub", b'{"n": -1}', topic=topic, defer=300)
    cluster.publish(topic, *numbered(20))
    eventually(lambda: len(cluster.page(topic)["messages"]) == 21)
    seen, older = [], cluster.page(topic)["newer"]
    while older is not None:
        page = cluster.page(topic, older=older, limit=4)
        seen += page["messages"]
        older = page["older"]
    assert sorted(numbers(seen)) == list(range(-1, 20))
    for nsqd in cluster.nsqds:
        places = [message["seq"] for message in seen if message["node"] == nsqd.http_address]
        assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("kind", NASTY)
def test_whatever_is_in_a_body_comes_as_it_is_and_never_as_a_page(
    cluster: BrowsedCluster, topic: str, kind: str
) -> None:
    body = NASTY[kind]
    cluster.publish(topic, body)
    reply = cluster.admin.get(f"/messages/{topic}/found.json")
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    (message,) = reply.json()["messages"]
    shown = message["text"].encode() if message["is_text"] else base64.b64decode(message["base64"])
    assert body.startswith(shown)
    assert message["is_cut"] is (len(body) > len(shown))
    assert len(reply.body) < 20_000
    path = f"/messages/{topic}/{message['node']}/{message['seq']}"
    one = cluster.admin.get(path).json()
    whole = one["text"].encode() if one["is_text"] else base64.b64decode(one["base64"])
    assert body.startswith(whole)
    assert len(whole) >= min(len(body), 65_530)
    raw = cluster.admin.get(path, download=1)
    assert raw.body == body
    assert raw.headers["Content-Type"] == "application/octet-stream"
    assert raw.headers["Content-Disposition"] == f'attachment; filename="{topic}-{message["seq"]}.bin"'
    assert raw.headers["Content-Security-Policy"] == "sandbox"
    line = cluster.admin.get(f"/messages/{topic}/found.jsonl").body
    assert line.isascii()
    assert not any(byte < 32 or byte == 127 for byte in line[:-1])
    fields = json.loads(line)
    assert (fields["body"].encode() if "body" in fields else base64.b64decode(fields["body_base64"])) == body


def test_an_envelope_is_opened(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, wrap(b"k" * 16, b'{"n": 1}', {"trace": "abc"}))
    (message,) = cluster.page(topic, filter=".n == 1")["messages"]
    assert (message["text"], message["headers"], message["is_json"]) == ('{"n": 1}', {"trace": "abc"}, True)
    assert len(cluster.page(topic, filter="abc")["messages"]) == 1


def test_a_message_that_is_not_there(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"x")
    node = cluster.nsqds[0].http_address
    seq = cluster.page(topic)["messages"][0]["seq"]
    for place in (f"{node}/{seq + 1}", f"{node}/{seq - 1}", f"{node}/0", f"{node}/{2**63}", f"{node}/x", f"{node}/-1"):
        reply = cluster.admin.get(f"/messages/{topic}/{place}")
        assert (reply.status, reply.json()["message"]) == (404, "MESSAGE_NOT_FOUND"), place
    reply = cluster.admin.get(f"/messages/nowhere/{node}/{seq}")
    assert reply.status == 404


def test_nobody_makes_nsqadmin_ask_another_host(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"x")
    with Stranger() as stranger:
        for path in (f"found.json?node={stranger.address}", f"{stranger.address}/1"):
            assert cluster.admin.get(f"/messages/{topic}/{path}").json()["message"] == "NODE_NOT_FOUND"
        cluster.admin.get(f"/messages/{topic}/found.json?older={stranger.address}~5")
        cluster.admin.post(f"/messages/{topic}?node={stranger.address}", b"x")
        cluster.admin.post(f"/messages/{topic}/{stranger.address}/1/republish")
        assert not stranger.was_asked


class Stranger:
    """Is a port that notices who connects."""

    def __enter__(self) -> "Stranger":
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        return self

    @property
    def was_asked(self) -> bool:
        try:
            self._listening.accept()
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *args: object) -> None:
        self._listening.close()


# -- filtering -------------------------------------------------------------------------------------------


def test_a_filter_finds_what_it_names_and_says_what_was_searched(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(100), b"no json", b"\xff7")
    page = cluster.page(topic, filter=".user.id == 7 && .n > 50", limit=100)
    assert numbers(page["messages"]) == [97, 87, 77, 67, 57]
    searched = page["searched"]
    assert (searched["messages"], searched["ended"], page["older"]) == (102, "start", None)
    assert searched["bytes"] > 102 * 30
    assert [message["is_text"] for message in cluster.page(topic, filter="7", limit=1)["messages"]] == [False]
    assert cluster.page(topic, filter=".nothing")["messages"] == []
    refused = cluster.admin.get(f"/messages/{topic}/found.json", filter=".user.id ==")
    assert (refused.status, refused.json()["message"], refused.json()["at"]) == (400, "INVALID_ARG_FILTER", 11)


def test_a_search_that_finds_nothing_ends_and_can_be_gone_on_with(cluster: BrowsedCluster, topic: str) -> None:
    """80 MB on each nsqd are more than one search reads."""
    block = b"".join(len(b).to_bytes(4) + b for b in [b"y" * 1000] * 1000)
    body = (1000).to_bytes(4) + block
    for number in range(80):
        for nsqd in cluster.nsqds:
            if number == 0:
                nsqd.post("/pub", b"needle", topic=topic)
            assert nsqd.post("/mpub", body, topic=topic, binary="true").status == 200
    cluster.knows(topic)
    found, pages, older = [], 0, None
    while pages == 0 or older is not None:
        page = cluster.page(topic, filter="needle", **({"older": older} if older else {}))
        found += page["messages"]
        assert page["searched"]["bytes"] < 200 << 20
        assert page["searched"]["ended"] in ("bytes", "time", "start")
        older, pages = page["older"], pages + 1
    assert [message["text"] for message in found] == ["needle", "needle"]
    assert pages >= 2


# -- following -------------------------------------------------------------------------------------------


def test_a_live_tail_gets_what_comes(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"before", b"before")
    newer = cluster.page(topic)["newer"]
    publishing = threading.Timer(0.3, lambda: cluster.publish(topic, b"one", b"two"))
    publishing.start()
    seen: list[str] = []
    while len(seen) < 2:
        page = cluster.page(topic, newer=newer, wait=20)
        assert page["messages"], "an answer without news before the time was over"
        seen += [message["text"] for message in page["messages"]]
        newer = page["newer"]
    publishing.join()
    assert sorted(seen) == ["one", "two"]
    assert cluster.page(topic, newer=newer, wait=1)["messages"] == []


def test_a_live_tail_shows_the_newest_and_counts_the_rest(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"before", b"before")
    newer = cluster.page(topic)["newer"]
    cluster.publish(topic, *[b"%d" % number for number in range(100)])
    page = cluster.page(topic, newer=newer, wait=5, limit=10)
    assert [message["text"] for message in page["messages"]] == [str(number) for number in range(99, 89, -1)]
    assert page["skipped"] == 90
    assert cluster.page(topic, newer=page["newer"], wait=1)["messages"] == []


# -- files -----------------------------------------------------------------------------------------------


def test_a_download_has_every_message_of_both_nsqds(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(1500))
    reply = cluster.admin.get(f"/messages/{topic}/found.jsonl")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [json.loads(line["body"])["n"] for line in lines] == list(range(1499, -1, -1))
    assert {line["topic"] for line in lines} == {topic}
    assert reply.headers["Content-Disposition"] == f'attachment; filename="{topic}.jsonl"'
    some = cluster.admin.get(f"/messages/{topic}/found.jsonl", filter=".user.id == 3", limit=7).text
    assert [json.loads(json.loads(line)["body"])["n"] for line in some.splitlines()] == [
        1493, 1483, 1473, 1463, 1453, 1443, 1433,
    ]  # fmt: skip


# -- publishing ------------------------------------------------------------------------------------------


def test_a_message_is_published_as_it_is(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"first")
    node = cluster.nsqds[1].http_address
    browser = Browser(cluster.admin)
    answer = browser.post(f"/messages/{topic}?node={node}", b"\x00\xff binary", browser.token())
    assert (answer.status, answer.json()) == (200, {"message": "", "node": node, "bytes": 9})
    assert browser.post(f"/messages/{topic}", b"", browser.token()).json()["message"] == "MSG_EMPTY"
    cluster.knows(topic)
    newest = cluster.page(topic)["messages"][0]
    assert (newest["node"], base64.b64decode(newest["base64"])) == (node, b"\x00\xff binary")
    eventually(lambda: f"action=publish topic={topic} node={node} result=ok" in cluster.admin.log)


def test_a_publish_may_be_deferred(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"first")
    node = cluster.nsqds[0].http_address
    cluster.nsqds[0].post("/channel/create", topic=topic, channel="ch")
    assert cluster.admin.post(f"/messages/{topic}?node={node}&defer=3600000", b"later").status == 200
    assert cluster.nsqds[0].channel(topic)["deferred_count"] == 1
    assert cluster.admin.post(f"/messages/{topic}?defer=-1", b"x").json()["message"] == "INVALID_ARG_DEFER"


def test_what_nsqd_refuses_is_told(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"first")
    answer = cluster.admin.post(f"/messages/{topic}", b"x" * 2_000_000)
    assert answer.status == 502
    assert "MSG_TOO_BIG" in answer.json()["message"]
    eventually(lambda: f"action=publish topic={topic}" in cluster.admin.log and "MSG_TOO_BIG" in cluster.admin.log)
    for name in ("x" * 65, "a%20b", "%00", "..%2f..%2fping"):
        assert cluster.admin.post(f"/messages/{name}", b"x").status in (400, 404), name


def test_a_message_is_published_again_byte_for_byte(cluster: BrowsedCluster, topic: str) -> None:
    bodies = [b"\xff\x00" * 50_000, wrap(b"k" * 16, b"content", {"a": "b"})]
    cluster.publish(topic, bodies[0])
    cluster.nsqds[0].post("/pub", bodies[1], topic=topic)
    messages = cluster.page(topic)["messages"]
    for message in messages:
        path = f"/messages/{topic}/{message['node']}/{message['seq']}"
        assert cluster.admin.post(f"{path}/republish").status == 200
    newest = cluster.page(topic, limit=2)["messages"]
    raw = [cluster.admin.get(f"/messages/{topic}/{one['node']}/{one['seq']}", download=1).body for one in newest]
    assert raw[0] == bodies[0]
    opened = unwrap(raw[1])
    assert (opened.body, opened.headers) == (b"content", {"a": "b"})
    assert opened.key != b"k" * 16, "who leaves out copies would leave it out"


# -- a channel -------------------------------------------------------------------------------------------


def test_what_a_channel_has_under_way(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, *numbered(6))
    with cluster.nsqds[0].connect() as first, cluster.nsqds[1].connect() as second:
        for wire in (first, second):
            wire.subscribe(topic, "ch", 2)
        held = [wire.read_messages(2) for wire in (first, second)]
        first.REQ(held[0][1].id, 50_000)
        first.RDY(0)
        path = f"/topics/{topic}/ch/messages.json"
        eventually(lambda: cluster.admin.get(path).status == 200)
        eventually(lambda: cluster.admin.get(path, state="requeued").json()["count"] >= 1)
        in_flight = cluster.admin.get(path, state="in_flight").json()
        assert in_flight["failures"] == []
        assert in_flight["count"] == len(in_flight["messages"]) >= 3
        times = [message["for_ms"] for message in in_flight["messages"]]
        assert times == sorted(times, reverse=True)
        assert {message["node"] for message in in_flight["messages"]} == {nsqd.http_address for nsqd in cluster.nsqds}
        (requeued,) = cluster.admin.get(path, state="requeued").json()["messages"]
        assert (requeued["attempts"], requeued["node"]) == (1, cluster.nsqds[0].http_address)
        assert 0 < requeued["due_ms"] <= 50_000
        assert cluster.admin.get(path, state="x").json()["message"] == "INVALID_ARG_STATE"


def test_a_seek_does_what_its_preview_said(cluster: BrowsedCluster, topic: str, connect: Callable[..., Wire]) -> None:
    cluster.publish(topic, *numbered(20))
    wires = [connect(nsqd).subscribe(topic, "ch", 100) for nsqd in cluster.nsqds]
    for wire in wires:
        assert len(wire.read_messages(10, finish=True)) == 10
    path = f"/topics/{topic}/ch"
    eventually(lambda: cluster.admin.get(f"{path}/seek.json", to="oldest").json().get("again") == 20)
    preview = cluster.admin.get(f"{path}/seek.json", to="oldest").json()
    assert [(node["again"], node["passed"]) for node in preview["nodes"]] == [(10, 0), (10, 0)]
    browser = Browser(cluster.admin)
    assert browser.post(f"{path}/seek?to=oldest").status == 403
    answer = browser.post(f"{path}/seek?to=oldest", b"", browser.token()).json()
    assert [result["ok"] for result in answer["results"]] == [True, True]
    for wire in wires:
        assert len(wire.read_messages(10, finish=True)) == 10
    eventually(lambda: cluster.admin.log.count(f"action=seek topic={topic} channel=ch") == 2)
    refused = cluster.admin.get(f"{path}/seek.json", to="seq:5")
    assert refused.json()["message"] == "INVALID_ARG_TO"
    node = cluster.nsqds[0].http_address
    seq = cluster.page(topic, node=node)["messages"][3]["seq"]
    eventually(lambda: cluster.admin.get(f"{path}/seek.json", to=f"seq:{seq}", node=node).json().get("again") == 4)
    for to in ("", "yesterday", "time:x", "time:99999999999999999999", "seq:-1"):
        assert cluster.admin.get(f"{path}/seek.json", to=to).status == 400, to
    assert cluster.admin.get(f"/topics/{topic}/nowhere/seek.json", to="oldest").status == 404


# -- limits ----------------------------------------------------------------------------------------------


def test_without_the_browser_there_are_no_messages(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"secret")
    node = cluster.nsqds[0].http_address
    with Nsqadmin(f"--nsqd-http-address={node}", "--no-message-browser") as admin:
        for path in ("found.json", "found.jsonl", f"{node}/1"):
            reply = admin.get(f"/messages/{topic}/{path}")
            assert (reply.status, reply.json()["message"]) == (404, "NO_MESSAGE_BROWSER")
        for path in (topic, f"{topic}/{node}/1/republish"):
            assert admin.post(f"/messages/{path}", b"x").status == 404


def test_bodies_are_shown_up_to_the_limit(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"abcdefghij")
    node = cluster.nsqds[0].http_address
    with Nsqadmin(f"--nsqd-http-address={node}", "--message-browser-max-bytes=4") as admin:
        eventually(lambda: admin.get(f"/messages/{topic}/found.json").status == 200)
        (message,) = admin.get(f"/messages/{topic}/found.json").json()["messages"]
        assert (message["text"], message["is_cut"], message["bytes"]) == ("abcd", True, 10)
        one = admin.get(f"/messages/{topic}/{node}/{message['seq']}").json()
        assert (one["text"], one["is_cut"]) == ("abcd", True)


def test_an_nsqd_that_is_down_does_not_hide_the_others(
    make_nsqd: Callable[..., Nsqd], cluster: BrowsedCluster, topic: str
) -> None:
    cluster.publish(topic, b"here")
    other = make_nsqd()
    other.keep_ports()  # also while it is down: nobody else is to answer there
    other.post("/pub", b"there", topic=topic)
    flags = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in (cluster.nsqds[0], other)]
    with Nsqadmin(*flags, "--poll-interval=60s") as admin:
        eventually(lambda: len(admin.get(f"/messages/{topic}/found.json").json().get("messages", [])) == 2)
        other.kill()
        page = admin.get(f"/messages/{topic}/found.json").json()
        assert [message["text"] for message in page["messages"]] == ["here"]
        assert [failure["node"] for failure in page["failures"]] == [other.http_address]


def test_an_nsqd_that_was_down_at_the_last_poll_is_named_too(
    make_nsqd: Callable[..., Nsqd], cluster: BrowsedCluster, topic: str
) -> None:
    """Whether that nsqd has the topic is not known."""
    cluster.publish(topic, b"here")
    here, other = cluster.nsqds[0].http_address, make_nsqd()
    other.keep_ports()  # also while it is down: nobody else is to answer there
    other.kill()
    with Nsqadmin(f"--nsqd-http-address={here}", f"--nsqd-http-address={other.http_address}") as admin:
        eventually(lambda: admin.get(f"/messages/{topic}").status == 200)  # the topic is known
        page = admin.get(f"/messages/{topic}/found.json").json()
        assert [message["text"] for message in page["messages"]] == ["here"]
        assert [failure["node"] for failure in page["failures"]] == [other.http_address]
        refused = admin.get(f"/messages/{topic}/found.jsonl")
        assert (refused.status, other.http_address in refused.text) == (502, True)
        assert '"here"' in admin.get(f"/messages/{topic}/found.jsonl", node=here).text


def test_unknown_topics_and_bad_arguments(cluster: BrowsedCluster, topic: str) -> None:
    cluster.publish(topic, b"x")
    for path, query, status in (
        ("/messages/nowhere/found.json", {}, 404),
        (f"/messages/{topic}/found.json", {"limit": 501}, 400),
        (f"/messages/{topic}/found.json", {"limit": "x"}, 400),
        (f"/messages/{topic}/found.json", {"older": "x"}, 400),
        (f"/messages/{topic}/found.json", {"newer": "~~"}, 400),
        (f"/messages/{topic}/found.json", {"at": "time:-5"}, 400),
        (f"/messages/{topic}/found.json", {"filter": "x" * 1001}, 400),
        ("/messages/a%20b/found.json", {}, 400),
        ("/messages/%3Cscript%3E/found.json", {}, 400),
    ):
        assert cluster.admin.get(path, **query).status == status, (path, query)
