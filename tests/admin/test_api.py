"""Checks NSQ's /api, field by field, on our daemons and, where they are given, on NSQ's own."""

import itertools
import json
import re
import socket
import time
from typing import Any

from admin.conftest import Cluster
from harness import HttpReply, Wire, eventually
from harness.nsqadmin import Nsqadmin
from nsquark.admin.app import PARTS
from nsquark.admin.format import UNKNOWN

TOPIC_FIELDS = [
    "node",
    "hostname",
    "topic_name",
    "depth",
    "memory_depth",
    "backend_depth",
    "message_count",
    "nodes",
    "channels",
    "paused",
    "e2e_processing_latency",
]
CHANNEL_FIELDS = [
    "node",
    "hostname",
    "topic_name",
    "channel_name",
    "depth",
    "memory_depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
    "client_count",
    "nodes",
    "clients",
    "paused",
    "e2e_processing_latency",
]
CLIENT_FIELDS = [
    "node",
    "remote_address",
    "version",
    "client_id",
    "hostname",
    "user_agent",
    "connect_ts",
    "connected",
    "in_flight_count",
    "ready_count",
    "finish_count",
    "requeue_count",
    "message_count",
    "sample_rate",
    "deflate",
    "snappy",
    "authed",
    "auth_identity",
    "auth_identity_url",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
]
NODE_FIELDS = [
    "remote_addresses",
    "remote_address",
    "hostname",
    "broadcast_address",
    "tcp_port",
    "http_port",
    "version",
    "topics",
    "out_of_date",
]


def act(admin: Nsqadmin, method: str, path: str, **fields: str) -> HttpReply:
    return admin.request(method, path, json.dumps(fields).encode())


def addresses(cluster: Cluster) -> list[str]:
    return sorted(nsqd.http_address for nsqd in cluster.nsqds)


# -- reads -----------------------------------------------------------------------------------------------


def test_answers_are_of_version_1(admin: Nsqadmin) -> None:
    answer = admin.get("/api/topics")
    assert answer.headers["X-Nsq-Content-Type"] == "nsq; version=1.0"
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert admin.get("/ping").text == "OK"


def test_topics_are_listed_once_and_in_order(cluster: Cluster, admin: Nsqadmin) -> None:
    cluster.make("list_b")
    cluster.make("list_a")
    answer = admin.get("/api/topics").json()
    assert list(answer) == ["topics", "message"]
    assert answer["message"] == ""
    assert answer["topics"] == sorted(set(answer["topics"]))
    assert {"list_a", "list_b"} <= set(answer["topics"])


def test_a_topic_is_summed_up(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, count=3)
    answer = admin.get(f"/api/topics/{topic}").json()
    assert list(answer) == [*TOPIC_FIELDS, "message"]
    assert (answer["node"], answer["hostname"], answer["topic_name"]) == ("*", "", topic)
    assert answer["depth"] == answer["message_count"] == 6
    assert answer["memory_depth"] == answer["depth"] - answer["backend_depth"]
    assert answer["channels"] is None
    assert answer["paused"] is False and answer["message"] == ""
    assert sorted(node["node"] for node in answer["nodes"]) == addresses(cluster)
    for node in answer["nodes"]:
        assert list(node) == TOPIC_FIELDS
        assert (node["depth"], node["message_count"], node["nodes"]) == (3, 3, None)
        assert node["hostname"] == socket.gethostname()


def test_channels_of_a_topic_are_summed_up(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "one", "two", count=2)
    eventually(lambda: cluster.topic_on(0, topic)["depth"] == 0 == cluster.topic_on(1, topic)["depth"])
    answer = admin.get(f"/api/topics/{topic}").json()
    assert [channel["channel_name"] for channel in answer["channels"]] == ["one", "two"]
    for channel in answer["channels"]:
        assert list(channel) == CHANNEL_FIELDS
        assert (channel["node"], channel["depth"], channel["clients"]) == ("*", 4, None)


def test_a_channel_has_its_nsqds_and_clients(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch", count=2)
    wires = [nsqd.connect().subscribe(topic, "ch", rdy=1, client_id="me", user_agent="ua/1") for nsqd in cluster.nsqds]
    for wire in wires:
        wire.read_message()
    answer = admin.get(f"/api/topics/{topic}/ch").json()
    assert list(answer) == [*CHANNEL_FIELDS, "message"]
    assert (answer["node"], answer["topic_name"], answer["channel_name"]) == ("*", topic, "ch")
    assert (answer["depth"], answer["in_flight_count"], answer["message_count"]) == (2, 2, 4)
    assert answer["client_count"] == len(answer["clients"]) == 2
    assert sorted(client["node"] for client in answer["clients"]) == addresses(cluster)
    for client in answer["clients"]:
        assert list(client) == CLIENT_FIELDS
        assert (client["client_id"], client["user_agent"], client["version"]) == ("me", "ua/1", "V2")
        assert (client["in_flight_count"], client["ready_count"], client["message_count"]) == (1, 1, 1)
        assert client["connected"] % 1_000_000_000 == 0
        assert abs(client["connect_ts"] - time.time()) < 60
    for node in answer["nodes"]:
        assert list(node) == CHANNEL_FIELDS
        assert (node["depth"], node["nodes"]) == (1, None)
        assert [list(client) for client in node["clients"]] == [CLIENT_FIELDS]
    _close(wires)


def test_latency_is_averaged_over_nsqds(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch", count=1)
    wires = [nsqd.connect().subscribe(topic, "ch", rdy=1) for nsqd in cluster.nsqds]
    for wire in wires:
        wire.read_messages(1, finish=True)

    def measured() -> Any:
        found = admin.get(f"/api/topics/{topic}/ch").json()["e2e_processing_latency"]
        return found if found["count"] == 2 else None

    total = eventually(measured)
    assert list(total) == ["count", "percentiles", "topic", "channel", "host"]
    assert (total["topic"], total["channel"], total["host"]) == (topic, "ch", "*")
    assert [entry["quantile"] for entry in total["percentiles"]] == [0.99, 0.5]
    for entry in total["percentiles"]:
        assert list(entry) == ["average", "count", "max", "min", "quantile"]
        assert 0 < entry["average"] <= entry["max"]
        assert entry["count"] == 2
    node = admin.get(f"/api/topics/{topic}/ch").json()["nodes"][0]["e2e_processing_latency"]
    assert list(node["percentiles"][0]) == ["average", "count", "max", "min", "quantile", "value"]
    assert (node["topic"], node["channel"], node["host"]) == ("", "", "")
    _close(wires)


def test_numbers_without_a_fraction_are_integers(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch", count=1)
    text = admin.get(f"/api/topics/{topic}").text
    assert '"quantile":0.99' in text and '"average":0,' in text
    assert ".0," not in text and ".0}" not in text


def test_an_unknown_topic_is_an_upstream_error(cluster: Cluster) -> None:
    answer = cluster.admin.get("/api/topics/nowhere")
    body = r'got response 404 Not Found "{\"message\":\"TOPIC_NOT_FOUND\"}"'
    assert answer.status == 502
    assert answer.json() == {"message": f"UPSTREAM_ERROR: failed to query any nsqlookupd: {body}"}
    answer = cluster.direct.get("/api/topics/nowhere")
    assert answer.status == 502
    assert answer.json() == {"message": "UPSTREAM_ERROR: failed to query any nsqd: "}


def test_an_unknown_channel_is_empty(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic)
    answer = admin.get(f"/api/topics/{topic}/nobody")
    assert (answer.status, answer.json()) == (200, {"message": ""})


def test_a_latency_that_was_not_measured_is_not_known(cluster: Cluster, topic: str) -> None:
    """Nothing was finished, and 0 would be the best of all latencies."""
    cluster.make(topic, "ch", count=1)
    for path in (f"/topics/{topic}", f"/topics/{topic}/ch"):
        # The page is found as soon as an nsqd has answered a poll.
        shown = eventually(
            lambda path=path: re.findall(r">(p\d+)</span> ([^<]+)</span>", cluster.direct.get(path).text)
        )
        assert set(shown) == {("p99", UNKNOWN), ("p50", UNKNOWN)}
    with Wire(cluster.nsqds[0].tcp) as wire:
        wire.subscribe(topic, "ch", rdy=1)
        wire.read_messages(1, finish=True)
        eventually(lambda: re.search(r">p99</span> \S+ .?s<", cluster.direct.get(f"/topics/{topic}/ch").text))


def test_inactive_topics_have_no_producers(cluster: Cluster, topic: str) -> None:
    cluster.make(topic, "ch")
    cluster.lookupd.post("/channel/create", topic="inactive", channel="c1")
    answer = cluster.admin.get("/api/topics", inactive="true").json()
    assert answer["topics"]["inactive"] == ["c1"]
    assert topic not in answer["topics"]
    assert cluster.direct.get("/api/topics", inactive="true").json() == {"topics": {}, "message": ""}


def test_nodes_by_nsqlookupd(cluster: Cluster, topic: str) -> None:
    cluster.make(topic)
    answer = cluster.admin.get("/api/nodes").json()
    assert list(answer) == ["nodes", "message"]
    assert len(answer["nodes"]) == 2
    for node in answer["nodes"]:
        assert list(node) == NODE_FIELDS
        (remote,) = node["remote_addresses"]
        assert remote == f"{cluster.lookupd.http_address}/{node['remote_address']}"
        assert {"topic": topic, "tombstoned": False} in node["topics"]
        assert node["version"] == "1.3.0" and node["out_of_date"] is False


def test_nodes_by_their_addresses(cluster: Cluster, topic: str) -> None:
    cluster.make(topic)
    for node in cluster.direct.get("/api/nodes").json()["nodes"]:
        assert list(node) == NODE_FIELDS
        assert (node["remote_addresses"], node["remote_address"]) == (None, "")
        assert {"topic": topic, "tombstoned": False} in node["topics"]


def test_a_node_has_its_topics_and_totals(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch", count=2)
    nsqd = cluster.nsqds[0]
    wire = nsqd.connect().subscribe(topic, "ch")
    answer = admin.get(f"/api/nodes/{nsqd.http_address}").json()
    assert list(answer) == ["node", "topics", "total_messages", "total_clients", "message"]
    assert answer["node"] == nsqd.http_address
    stats = nsqd.stats()["topics"]
    assert answer["total_messages"] == sum(each["message_count"] for each in stats)
    assert answer["total_clients"] >= 1
    found = next(each for each in answer["topics"] if each["topic_name"] == topic)
    assert list(found) == TOPIC_FIELDS and list(found["channels"][0]) == CHANNEL_FIELDS
    assert [client["node"] for client in found["channels"][0]["clients"]] == [nsqd.http_address]
    answer = admin.get("/api/nodes/10.0.0.1:1")
    assert (answer.status, answer.json()) == (404, {"message": "NODE_NOT_FOUND"})
    wire.close()


def test_counters_are_of_channels_on_nodes(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch", count=3)
    eventually(lambda: cluster.topic_on(0, topic)["depth"] == 0)
    answer = admin.get("/api/counter").json()
    assert list(answer) == ["stats", "message"]
    assert list(answer["stats"]) == sorted(answer["stats"])
    node = cluster.nsqds[0].http_address
    expected = {"node": node, "topic_name": topic, "channel_name": "ch", "message_count": 3}
    assert answer["stats"][f"{topic}:ch:{node}"] == expected


# -- changes ---------------------------------------------------------------------------------------------


def test_create(cluster: Cluster, topic: str) -> None:
    cluster.make(topic)
    assert act(cluster.admin, "POST", "/api/topics", topic=topic, channel="c").json() == {"message": ""}
    assert cluster.lookupd.channels(topic) == {"c"}
    for place in (0, 1):
        assert [channel["channel_name"] for channel in cluster.topic_on(place, topic)["channels"]] == ["c"]
    assert act(cluster.admin, "POST", "/api/topics", topic="registered").json() == {"message": ""}
    assert "registered" in cluster.lookupd.topics()


def test_create_without_nsqlookupds_makes_it_on_the_nsqds(cluster: Cluster) -> None:
    assert act(cluster.direct, "POST", "/api/topics", topic="made_here", channel="c").json() == {"message": ""}
    for place in (0, 1):
        assert [channel["channel_name"] for channel in cluster.topic_on(place, "made_here")["channels"]] == ["c"]


def test_pause_and_unpause(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch")
    for action, is_paused in (("pause", True), ("unpause", False)):
        assert act(admin, "POST", f"/api/topics/{topic}", action=action).json() == {"message": ""}
        assert act(admin, "POST", f"/api/topics/{topic}/ch", action=action).json() == {"message": ""}
        for place in (0, 1):
            found = cluster.topic_on(place, topic)
            assert found["paused"] is is_paused and found["channels"][0]["paused"] is is_paused
        assert admin.get(f"/api/topics/{topic}").json()["paused"] is is_paused


def test_empty(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, count=2)
    assert act(admin, "POST", f"/api/topics/{topic}", action="empty").json() == {"message": ""}
    assert admin.get(f"/api/topics/{topic}").json()["depth"] == 0
    for nsqd in cluster.nsqds:
        nsqd.post("/channel/create", topic=topic, channel="ch")
        nsqd.post("/pub", b"x", topic=topic)
    eventually(lambda: admin.get(f"/api/topics/{topic}/ch").json()["depth"] == 2)
    assert act(admin, "POST", f"/api/topics/{topic}/ch", action="empty").json() == {"message": ""}
    assert admin.get(f"/api/topics/{topic}/ch").json()["depth"] == 0


def test_delete(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic, "ch")
    assert admin.request("DELETE", f"/api/topics/{topic}/ch").json() == {"message": ""}
    assert all(not cluster.topic_on(place, topic)["channels"] for place in (0, 1))
    assert admin.request("DELETE", f"/api/topics/{topic}").json() == {"message": ""}
    assert all(cluster.topic_on(place, topic) is None for place in (0, 1))
    if admin is cluster.admin:
        assert topic not in cluster.lookupd.topics()


def test_tombstone(cluster: Cluster, topic: str) -> None:
    cluster.make(topic)
    nsqd = cluster.nsqds[0]
    answer = act(cluster.admin, "DELETE", f"/api/nodes/{nsqd.http_address}", topic=topic)
    assert (answer.status, answer.json()) == (200, {"message": ""})
    assert cluster.topic_on(0, topic) is None
    assert cluster.topic_on(1, topic) is not None
    assert cluster.lookupd.producers(topic) == {cluster.nsqds[1].tcp}


def test_what_is_wrong_with_a_change(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic)
    node = cluster.nsqds[0].http_address
    for method, path, body, code in (
        ("POST", "/api/topics", b"", "EOF"),
        ("POST", "/api/topics", b"x", "invalid character 'x' looking for beginning of value"),
        ("POST", "/api/topics", b'{"topic"', "unexpected EOF"),
        ("POST", "/api/topics", b'{"topic" 1}', "invalid character '1' after object key"),
        ("POST", "/api/topics", b"{topic}", "invalid character 't' looking for beginning of object key string"),
        ("POST", "/api/topics", b'{"topic":"a" 1}', "invalid character '1' after object key:value pair"),
        (
            "POST",
            "/api/topics",
            b'{"topic":1}',
            "json: cannot unmarshal number into Go struct field .topic of type string",
        ),
        ("POST", "/api/topics", b"{}", "INVALID_TOPIC"),
        ("POST", "/api/topics", b'{"topic":"a b"}', "INVALID_TOPIC"),
        ("POST", "/api/topics", b'{"topic":"a","channel":"b c"}', "INVALID_CHANNEL"),
        ("POST", f"/api/topics/{topic}", b'{"action":"explode"}', "INVALID_ACTION"),
        ("POST", f"/api/topics/{topic}", b'{"action":"delete"}', "INVALID_ACTION"),
        ("POST", f"/api/topics/{topic}/ch", b"null", "INVALID_ACTION"),
        ("DELETE", f"/api/nodes/{node}", b"{", "INVALID_BODY"),
        ("DELETE", f"/api/nodes/{node}", b'{"topic":" "}', "INVALID_TOPIC"),
    ):
        answer = admin.request(method, path, body)
        assert (path, body, answer.status, answer.json()) == (path, body, 400, {"message": code})


def make_channel_on_one(cluster: Cluster, topic: str) -> None:
    cluster.nsqds[0].post("/channel/create", topic=topic, channel="ch")
    # The other one may just have asked nsqlookupd for the channels of its new topic; what is deleted stays deleted.
    cluster.nsqds[1].post("/channel/create", topic=topic, channel="ch")
    cluster.nsqds[1].post("/channel/delete", topic=topic, channel="ch")


def test_a_change_that_some_refuse_is_a_warning(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic)
    make_channel_on_one(cluster, topic)
    answer = act(admin, "POST", f"/api/topics/{topic}/ch", action="pause")
    assert answer.status == 200
    assert answer.json() == {"message": r'WARNING: got response 404 Not Found "{\"message\":\"CHANNEL_NOT_FOUND\"}"'}
    assert cluster.topic_on(0, topic)["channels"][0]["paused"] is True


# -- pages' actions --------------------------------------------------------------------------------------


def test_an_action_tells_the_result_of_each(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    cluster.make(topic)
    make_channel_on_one(cluster, topic)
    answer = act(admin, "POST", "/action", action="pause", topic=topic, channel="ch")
    assert answer.status == 200
    results = {result["address"]: result for result in answer.json()["results"]}
    done, failed = (results[nsqd.http_address] for nsqd in cluster.nsqds)
    assert (done["ok"], done["text"]) == (True, "")
    assert failed["ok"] is False and "CHANNEL_NOT_FOUND" in failed["text"]
    assert answer.json()["ok"] is True


def test_an_action_that_nobody_does_is_502(cluster: Cluster, admin: Nsqadmin) -> None:
    answer = act(admin, "POST", "/action", action="delete", topic="nowhere")
    assert answer.status == 502
    assert answer.json()["ok"] is False and answer.json()["message"]
    assert act(admin, "POST", "/action", action="explode", topic="x").json() == {"message": "INVALID_ACTION"}


def _close(wires: list[Wire]) -> None:
    for wire in wires:
        wire.close()


def test_depths_of_a_topics_page_add_up(cluster: Cluster, admin: Nsqadmin, topic: str) -> None:
    """Depth is that of the topic and its channels, in the tile, on each nsqd and in their total."""
    cluster.make(topic, "ch", count=3)

    def shown() -> str:
        text = admin.get(f"/topics/{topic}").text
        return text if 'data-label="depth">6</td>' in text else ""

    page = eventually(shown)
    assert re.findall(r'<dd title="(\d+)">', page)[0] == "6"
    assert re.findall(r'<td data-label="depth">(\d+)</td>', page) == ["3", "3", "6"]


NAMES_LIKE_PATHS = ("messages", "messages.json", "messages.jsonl", "found.json", "seek", "seek.json", "api", "login")


def test_topics_and_channels_that_are_called_like_our_paths_have_pages(
    cluster: Cluster, admin: Nsqadmin, topic: str
) -> None:
    cluster.make(topic, *NAMES_LIKE_PATHS, count=1)
    for name in NAMES_LIKE_PATHS:
        path = f"/topics/{topic}/{name}"
        for page in (f"/topics/{topic}", f"/nodes/{cluster.nsqds[0].http_address}"):
            eventually(lambda page=page, path=path: f'href="{path}"' in admin.get(page).text)
        eventually(lambda path=path, name=name: f"<h1>{name}</h1>" in admin.get(path).text)
        cluster.make(name, name, count=1)
        for path in (f"/topics/{name}", f"/topics/{name}/{name}", f"/messages/{name}"):
            eventually(lambda path=path, name=name: f"<h1>{name}</h1>" in admin.get(path).text)


def test_no_path_is_that_of_two_routes() -> None:
    """Otherwise a topic, channel or nsqd whose name is a word of ours would be hidden by it."""
    routes = [(route.method, route.path.split("/")) for part in PARTS for route in part.routes]
    for (method, one), (other_method, other) in itertools.combinations(routes, 2):
        could_meet = method == other_method and len(one) == len(other)
        assert not (could_meet and all(map(_may_be_equal, one, other))), ("/".join(one), "/".join(other))


def _may_be_equal(one: str, other: str) -> bool:
    return one == other or "{" in one or "{" in other


def test_no_path_is_redirected_to_itself(admin: Nsqadmin) -> None:
    """Whatever characters a name has, the routes and the rules for what fits none of them agree on it."""
    for name in ("%7Bx%7D", "%7B", "a%2Fb%7D", "%25", "%3F", "%23", "%20", "%C3%A9", "%FF"):
        for path in ("/topics/{}", "/topics/{}/c", "/messages/{}", "/nodes/{}", "/api/topics/{}", "/api/nodes/{}"):
            reply = admin.request("GET", path.format(name))
            assert (path, name, reply.headers["Location"]) == (path, name, None)
            assert (path, name, reply.status < 500 or "UPSTREAM_ERROR" in reply.text) == (path, name, True)
