"""Checks a disk whose syncs are slow: what was acknowledged is on it in time all the same, or publishers are slowed."""

import pytest

from faults.shim import DELAY, Rule, Shim
from harness import Nsqd, eventually

pytestmark = pytest.mark.ours

TOPICS = 100
SYNC_S = 0.1
"""A busy hard disk syncs as slowly as this."""


def test_many_topics_are_synced_together(shim: Shim) -> None:
    """One sync for each topic would take ten seconds a round, and a clean stop as long."""
    shim.set_rules(Rule("sync", "*", DELAY, delay_s=SYNC_S))
    with Nsqd(shim.root, "--sync-timeout=1s", environment=shim.environment) as daemon:
        with daemon.connect() as publisher:
            for _ in range(5):
                for number in range(TOPICS):
                    publisher.publish(f"topic{number}", b"body")
        eventually(lambda: _lag_s(daemon) == 0)
        assert "publishers are slowed" not in daemon.log
        assert daemon.stop() == 0
    syncs = sum(call.kind == "sync" for call in shim.trace())
    assert syncs < 8 * TOPICS, "each file was synced on its own, again and again"


def test_publishers_are_slowed_when_the_disk_cannot_keep_up(shim: Shim) -> None:
    with Nsqd(shim.root, "--sync-timeout=50ms", environment=shim.environment) as daemon:
        shim.set_rules(Rule("sync", "*", DELAY, delay_s=2.0))
        with daemon.connect() as publisher:
            publisher.publish("t", b"body")
            daemon.wait_for_log("publishers are slowed")
            shim.set_rules()
            for _ in range(20):
                publisher.publish("t", b"body")
        daemon.wait_for_log("the disk has caught up")
        assert daemon.stop() == 0


def _lag_s(daemon: Nsqd) -> float:
    line = next(line for line in daemon.get("/metrics").text.splitlines() if line.startswith("nsqd_sync_lag_seconds "))
    return float(line.split()[1])
