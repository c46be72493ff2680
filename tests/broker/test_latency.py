"""Checks the end-to-end latency in /stats: what counts, from when on, and for how long."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Nsqd, Wire, eventually

PERCENTILES = "--e2e-processing-latency-percentile=1.0,0.5"
HELD_S = 0.2
"""Tests keep a message for this long, so that its latency has a least value worth asserting."""
HELD_NS = HELD_S * 1e9 * 0.98
"""Less what the estimate may be off."""


def latency(shown: dict[str, Any]) -> tuple[int, list[int]]:
    answer = shown["e2e_processing_latency"]
    return answer["count"], [entry["value"] for entry in answer["percentiles"]]


def finish_all(client: Wire, count: int) -> None:
    client.read_messages(count, finish=True)
    client.assert_usable()


def test_nothing_finished_is_zeros(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES)
    with daemon.connect() as client:
        client.publish("t", b"x")
        client.subscribe("t", rdy=1)
        client.read_message()
        assert daemon.channel("t")["e2e_processing_latency"] == {
            "count": 0,
            "percentiles": [{"quantile": 1.0, "value": 0}, {"quantile": 0.5, "value": 0}],
        }
        assert "e2e%: 0.0ns, 0.0ns\n" in daemon.get("/stats").text


def test_topic_without_channels_has_none(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES)
    daemon.post("/topic/create", topic="t")
    assert daemon.topic("t")["e2e_processing_latency"] == {"count": 0, "percentiles": None}


def test_only_FIN_counts_and_from_the_publish_on(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES)
    with daemon.connect() as client:
        client.publish("t", b"x")
        client.subscribe("t", rdy=1)
        first = client.read_message()
        time.sleep(HELD_S)
        client.REQ(first.id, 0)
        again = client.read_message()
        assert again.attempts == 2
        assert latency(daemon.channel("t"))[0] == 0
        client.FIN(again.id)
        client.assert_usable()
        count, (highest, middle) = latency(daemon.channel("t"))
        assert count == 1
        assert HELD_NS < middle <= highest < 30e9


def test_a_delayed_message_counts_its_delay(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES)
    with daemon.connect() as client:
        client.subscribe("t", rdy=1)
        client.DPUB("t", int(HELD_S * 1000), b"later")
        client.expect_ok()
        finish_all(client, 1)
        assert latency(daemon.channel("t"))[1][0] > HELD_NS


def test_topics_merge_their_channels(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES)
    with daemon.connect() as one, daemon.connect() as other, daemon.connect() as producer:
        one.subscribe("t", "quick", rdy=10)
        other.subscribe("t", "slow#ephemeral", rdy=10)
        producer.publish("t", *[b"x"] * 9)
        finish_all(one, 9)
        held = other.read_messages(9)
        time.sleep(HELD_S)
        other.FIN(held[0].id)
        other.assert_usable()
        topic = daemon.topic("t")
        quick, slow = topic["channels"]
        assert (latency(quick)[0], latency(slow)[0]) == (9, 1)
        count, (highest, middle) = latency(topic)
        assert count == 10
        assert highest == latency(slow)[1][0] > HELD_NS
        assert middle <= latency(quick)[1][0] * 1.03
        filtered = daemon.stats(topic="t", channel="quick")["topics"][0]
        assert latency(filtered)[0] == 10


def test_messages_of_an_earlier_process(make_nsqd: Callable[..., Nsqd]) -> None:
    """The message is delivered before a restart, requeued, and finished after it: its publish is long ago."""
    daemon = make_nsqd(PERCENTILES)
    with daemon.connect() as client:
        client.publish("t", b"1", b"2")
        client.subscribe("t", rdy=1)
        message = client.read_message()
        client.RDY(0)  # it must not come again here
        client.REQ(message.id, 0)
        client.assert_usable()
    time.sleep(HELD_S)
    daemon.restart()
    with daemon.connect() as client:
        client.subscribe("t", rdy=2)
        finish_all(client, 2)
        count, values = latency(daemon.channel("t"))
        assert count == 2
        assert all(HELD_NS < value < 60e9 for value in values)


def test_the_window_passes(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(PERCENTILES, "--e2e-processing-latency-window-time=5s")
    with daemon.connect() as client:
        client.subscribe("t", rdy=1)

        def is_counted() -> bool:
            """Tells whether a message just finished counts; not if this process is held up for the whole window."""
            client.publish("t", b"x")
            finish_all(client, 1)
            return latency(daemon.channel("t"))[0] > 0

        eventually(is_counted)
        eventually(lambda: latency(daemon.channel("t")) == (0, [0, 0]))
        assert latency(daemon.topic("t")) == (0, [0, 0])


def test_a_config_file_keeps_its_order(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    config = tmp_path / "nsqd.toml"
    config.write_text("e2e_processing_latency_percentiles = [0.5, 0.99, 0.75]\n")
    daemon = make_nsqd(f"--config={config}")
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    percentiles = daemon.channel("t")["e2e_processing_latency"]["percentiles"]
    assert [entry["quantile"] for entry in percentiles] == [0.5, 0.99, 0.75]
