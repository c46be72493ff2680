"""Checks a disk whose syncs are slow: what was acknowledged is on it in time all the same, or publishers are slowed."""

import pytest

from faults.script import sync_lag_s
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
        eventually(lambda: sync_lag_s(daemon) == 0)
        # Whether publishers were slowed would tell as much, but a busy machine slows them too.
        assert _syncs(shim) < TOPICS, "each file was synced on its own"
        assert daemon.stop() == 0
    assert _syncs(shim) < 8 * TOPICS, "each file was synced on its own, again and again"


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


def _syncs(shim: Shim) -> int:
    return sum(call.kind == "sync" for call in shim.trace())
