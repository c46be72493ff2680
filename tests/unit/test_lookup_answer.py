"""Checks what nsqlookupd may answer at most."""

import json

import pytest

from nsquark.wire.lookup_answer import CHANNELS_MAX, PRODUCERS_MAX, read_channels, read_producers


def test_as_many_channels_as_any_topic_has() -> None:
    names = [f"c{number}" for number in range(CHANNELS_MAX)]
    assert read_channels(json.dumps({"channels": names}).encode()) == names
    with pytest.raises(ValueError, match="more than"):
        read_channels(json.dumps({"channels": [*names, "one"]}).encode())


def test_as_many_nsqds_as_any_cluster_has() -> None:
    nsqds = [{"broadcast_address": "a", "tcp_port": number, "topics": ["t"]} for number in range(PRODUCERS_MAX)]
    assert len(read_producers(json.dumps({"producers": nsqds}).encode())) == PRODUCERS_MAX
    with pytest.raises(ValueError, match="more than"):
        read_producers(json.dumps({"producers": [*nsqds, nsqds[0]]}).encode())
