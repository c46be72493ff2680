"""Asks our nsqadmin and NSQ's own the same of one cluster: the answers are the same.

PEER_TOOLS names a directory with NSQ's nsqadmin; without it nothing runs.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from admin.conftest import Cluster
from harness import HttpReply
from harness.nsqadmin import Nsqadmin

pytestmark = pytest.mark.skipif("PEER_TOOLS" not in os.environ, reason="PEER_TOOLS names no programs of NSQ")

HEADERS = ("Content-Type", "X-Nsq-Content-Type", "Allow", "Location")
TOPIC = "compared"
NODE = "<node>"

READS = [
    "/ping",
    "/api/topics",
    "/api/topics?inactive=true",
    "/api/topics?a;b",
    "/api/topics?a=%zz",
    f"/api/topics/{TOPIC}",
    "/api/topics/nowhere",
    f"/api/topics/{TOPIC}/ch",
    f"/api/topics/{TOPIC}/nobody",
    "/api/nodes",
    f"/api/nodes/{NODE}",
    "/api/nodes/x:1",
    "/api/counter",
    "/api/graphite",
    "/api/graphite?metric=rate",
    "/nowhere",
    "/api/topics/",
    "/api/TOPICS",
    "//api//topics",
    "/api/topics/a/b/c",
    "/config/nowhere",
    "/config/nsqlookupd_http_addresses",
    "/config/nsqd_http_addresses",
    "/config/statsd_interval",
    "/config/base_path",
    "/config/graphite_url",
    "/config/admin_users",
    "/config/proxy_graphite",
    "/config/acl_http_header",
]
CHANGES = [
    ("OPTIONS", "/api/topics", ""),
    ("HEAD", "/ping", ""),
    ("PUT", "/api/topics", ""),
    *(
        ("POST", "/api/topics", body)
        for body in ("", "{", "x", "{}", '{"topic":1}', "[1]", '"x"', "null", '{"topic":"a b"}', '{"TOPIC":"a b"}')
    ),
    ("POST", "/api/topics", f'{{"topic":"{TOPIC}","channel":"b c"}}'),
    *(
        ("POST", f"/api/topics/{TOPIC}", body)
        for body in ('{"action":"x"}', '{"Action":"pause"}', '{"action":"unpause"}', '{"action" "x"}', "{action:1}")
    ),
    ("POST", "/api/topics/nowhere", '{"action":"pause"}'),
    ("POST", f"/api/topics/{TOPIC}/nobody", '{"action":"pause"}'),
    ("DELETE", "/api/topics/nowhere", ""),
    ("DELETE", f"/api/topics/{TOPIC}/nobody", ""),
    ("DELETE", "/api/nodes/127.0.0.1:1", f'{{"topic":"{TOPIC}"}}'),
    ("DELETE", f"/api/nodes/{NODE}", '{"topic":"nowhere"}'),
    ("DELETE", f"/api/nodes/{NODE}", "{"),
    ("DELETE", f"/api/nodes/{NODE}", '{"topic":" "}'),
    ("PUT", "/config/log_level", ""),
    ("PUT", "/config/log_level", "nonsense"),
    ("PUT", "/config/base_path", "/x"),
    ("PUT", "/config/nsqlookupd_http_addresses", "x"),
]


class Peer(Nsqadmin):
    """Runs NSQ's own nsqadmin."""

    def __init__(self, *flags: str):
        super().__init__(*flags)
        self.program = str(Path(os.environ["PEER_TOOLS"]) / "nsqadmin")


@pytest.fixture(scope="module", params=["lookupd", "direct"])
def pair(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[tuple[Nsqadmin, Nsqadmin]]:
    """Runs our nsqadmin and NSQ's beside the same daemons."""
    cluster.make(TOPIC, "ch", count=2)
    ours = cluster.admin if request.param == "lookupd" else cluster.direct
    with Peer(*ours.flags) as peer:
        yield ours, peer


@pytest.mark.parametrize("target", READS)
def test_reads(cluster: Cluster, pair: tuple[Nsqadmin, Nsqadmin], target: str) -> None:
    ours, theirs = (admin.request("GET", _target(target, cluster)) for admin in pair)
    assert _shown(ours) == _shown(theirs)


@pytest.mark.parametrize(("method", "target", "body"), CHANGES)
def test_changes(cluster: Cluster, pair: tuple[Nsqadmin, Nsqadmin], method: str, target: str, body: str) -> None:
    ours, theirs = (admin.request(method, _target(target, cluster), body.encode()) for admin in pair)
    assert _shown(ours) == _shown(theirs)


def _target(target: str, cluster: Cluster) -> str:
    return target.replace(NODE, cluster.nsqds[0].http_address)


def _shown(answer: HttpReply) -> tuple[int, dict[str, str | None], Any]:
    headers = {name: answer.headers.get(name) for name in HEADERS}
    try:
        body = _ordered(json.loads(answer.body))
    except ValueError:
        body = answer.body
    return answer.status, headers, body


def _ordered(value: Any) -> Any:
    """Leaves out what is by chance: NSQ lists nsqds of one host as they answer, and sums them up in the first."""
    if isinstance(value, dict):
        left_out = ("node", "nodes", "channels", "connected")
        return [(name, None if name in left_out else _ordered(each)) for name, each in value.items()]
    if isinstance(value, list):
        return sorted((_ordered(item) for item in value), key=repr)
    return value
