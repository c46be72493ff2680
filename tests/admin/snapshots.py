"""Makes pieces of a snapshot for tests, with whichever fields a test is about."""

from typing import Any

from nsquark.admin.snapshot import ChannelOnNode, ClusterChannel, ClusterTopic


def make_channel(depth: int = 0, **more: Any) -> ClusterChannel:
    fields: dict[str, Any] = {
        "topic": "t",
        "name": "c",
        "nodes": (ChannelOnNode(name="c", depth=depth),),
        "depth": depth,
        "backend_depth": 0,
        "in_flight": 0,
        "deferred": 0,
        "messages": 0,
        "requeued": 1,
        "timed_out": 0,
        "client_count": 1,
        "paused": False,
        "rate_out": 0.0,
        "rate_requeued": 0.0,
        "rate_timed_out": 0.0,
        "latency": (),
    }
    return ClusterChannel(**{**fields, **more})


def make_topic(*channels: ClusterChannel, depth: int = 0, **more: Any) -> ClusterTopic:
    fields: dict[str, Any] = {
        "name": "t",
        "nodes": (),
        "channels": {each.name: each for each in channels},
        "depth": depth,
        "backend_depth": 0,
        "total_depth": depth,
        "in_flight": 0,
        "deferred": 0,
        "messages": 0,
        "bytes": 0,
        "client_count": 0,
        "paused": False,
        "rate_in": None,
        "rate_bytes_in": None,
        "rate_out": None,
        "rate_requeued": None,
        "rate_timed_out": None,
        "latency": (),
    }
    return ClusterTopic(**{**fields, **more})
