"""Checks GET /metrics, read as Prometheus does."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.prometheus_lint import complaints
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "contrib" / "grafana" / "nsqd.json"
DOCUMENT = ROOT / "docs" / "metrics.md"
ROWS_MAX = 1000
UNKNOWN_ID = b"0123456789abcdef"
ALL_FEATURES = ("--e2e-processing-latency-percentile=0.5,0.99", "--enable-experiment=topology-aware-consumption")
NAMES_OF_METRICS = re.compile(r"\b(?:nsqd|process)_[a-z_]+\b")


class Metrics:
    """Holds the samples of one scrape."""

    def __init__(self, daemon: Nsqd) -> None:
        answer = daemon.get("/metrics")
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.text = answer.text
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        return (name, frozenset(labels.items())) in self._values

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """Runs an nsqd with everything on: of 5 messages one is finished, one requeued, one deferred, two timed out."""
    for _ in range(5):
        with Nsqd(tmp_path_factory.mktemp("nsqd"), *ALL_FEATURES) as daemon, daemon.connect() as client:
            client.publish("t", *[b"12345"] * 5)
            client.subscribe("t", "ch", rdy=5, msg_timeout=4000)
            messages = client.read_messages(5)
            client.RDY(0)
            client.FIN(messages[0].id)
            client.REQ(messages[1].id, 0)
            client.REQ(messages[2].id, 600_000)
            client.TOUCH(messages[3].id)
            client.TOUCH(UNKNOWN_ID)
            if client.read_frame().data != b"E_TOUCH_FAILED TOUCH %b failed ID not in flight" % UNKNOWN_ID:
                continue  # this process was held up until some had timed out already
            eventually(lambda: daemon.channel("t")["timeout_count"] == 2)
            daemon.post("/channel/create", topic="t", channel="idle")
            daemon.post("/channel/pause", topic="t", channel="idle")
            yield daemon
            return
    pytest.fail("held up each time")


@pytest.fixture(scope="module")
def scraped(busy: Nsqd) -> Metrics:
    return Metrics(busy)


def test_lint(scraped: Metrics) -> None:
    assert complaints(scraped.text) == []


def test_lint_of_an_empty_nsqd(make_nsqd: Callable[..., Nsqd]) -> None:
    assert complaints(Metrics(make_nsqd()).text) == []


@pytest.mark.parametrize(
    "text",
    [
        "# HELP x_total Help.\n# TYPE x_total gauge\nx_total 1\n",
        "# HELP x Help.\n# TYPE x counter\nx 1\n",
        "# TYPE x gauge\nx 1\n",
        "# HELP x_ms Help.\n# TYPE x_ms gauge\nx_ms 1\n",
        "# HELP x Help.\n# TYPE x gauge\nx 1\nx 2\n",
        '# HELP x Help.\n# TYPE x gauge\nx{quantile="1"} 1\n',
        "# HELP x Help.\n# TYPE x gauge\nx 1\n# HELP x_total Help.\n# TYPE x_total counter\nx_total 1\n",
        "x 1\n",
    ],
)
def test_the_lint_finds_faults(text: str) -> None:
    assert complaints(text)


def test_topic(scraped: Metrics) -> None:
    assert scraped.value("nsqd_topic_messages_total", topic="t") == 5
    assert scraped.value("nsqd_topic_message_bytes_total", topic="t") == 25
    assert scraped.value("nsqd_topic_depth", topic="t") == 0
    assert scraped.value("nsqd_topic_log_segments", topic="t") == 1
    assert scraped.value("nsqd_topic_log_bytes", topic="t") > 5 * (34 + 5)
    assert scraped.value("nsqd_topic_paused", topic="t") == 0


def test_channel(scraped: Metrics) -> None:
    values = {
        name: scraped.value(f"nsqd_channel_{name}", topic="t", channel="ch")
        for name in ("depth", "in_flight", "deferred", "messages_total", "requeues_total", "timeouts_total", "clients")
    }
    assert values == {
        "depth": 3,
        "in_flight": 0,
        "deferred": 1,
        "messages_total": 5,
        "requeues_total": 2,
        "timeouts_total": 2,
        "clients": 1,
    }
    assert scraped.value("nsqd_channel_paused", topic="t", channel="idle") == 1
    assert scraped.value("nsqd_channel_global_messages_total", topic="t", channel="ch") == 5


def test_latency(scraped: Metrics) -> None:
    labels = {"topic": "t", "channel": "ch"}
    assert scraped.value("nsqd_channel_latency_seconds_count", **labels) == 1
    total = scraped.value("nsqd_channel_latency_seconds_sum", **labels)
    assert 0 < total < 30
    assert scraped.value("nsqd_channel_latency_seconds", quantile="0.99", **labels) == pytest.approx(total, rel=0.011)
    assert scraped.value("nsqd_topic_latency_seconds", quantile="0.5", topic="t") == pytest.approx(total, rel=0.011)
    assert math.isnan(scraped.value("nsqd_channel_latency_seconds", topic="t", channel="idle", quantile="0.5"))


def test_latency_is_left_out_when_not_measured(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    with daemon.connect() as client:
        client.subscribe("t")
        assert not any("latency" in name for name in Metrics(daemon).names)


def test_broker(busy: Nsqd, scraped: Metrics) -> None:
    assert scraped.value("nsqd_topics") == 1
    assert scraped.value("nsqd_channels") == 2
    assert scraped.value("nsqd_connections", kind="tcp") == 1
    assert scraped.value("nsqd_connections", kind="http") >= 1
    assert scraped.value("nsqd_connections_admitted_total") == 1
    assert scraped.value("nsqd_producers") == 1
    assert scraped.value("nsqd_healthy") == 1
    assert scraped.value("nsqd_cache_bytes") > 0
    assert scraped.value("nsqd_cache_limit_bytes") == 64 << 20
    assert 0 < scraped.value("nsqd_uptime_seconds") < 600
    assert scraped.value("nsqd_commit_messages_count") == 1
    assert scraped.value("nsqd_commit_messages_sum") == 5
    assert scraped.value("nsqd_commit_messages_bucket", le="5") == 1
    assert scraped.value("nsqd_commit_messages_bucket", le="2") == 0
    assert scraped.value("nsqd_log_bytes") == scraped.value("nsqd_topic_log_bytes", topic="t")


def test_process(busy: Nsqd, scraped: Metrics) -> None:
    assert scraped.value("process_cpu_seconds_total") > 0
    status = Path(f"/proc/{busy.pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    assert scraped.value("process_resident_memory_bytes") == pytest.approx(resident, rel=0.3)
    assert 5 < scraped.value("process_open_fds") < scraped.value("process_max_fds")
    assert scraped.value("process_threads") >= 1


def test_event_loop_delay_is_measured_all_the_time(busy: Nsqd) -> None:
    before = Metrics(busy).value("nsqd_loop_delay_seconds_count")
    eventually(lambda: Metrics(busy).value("nsqd_loop_delay_seconds_count") > before)


@pytest.mark.parametrize("flag", ["--sync-every=1", "--sync-every=2"])
def test_fsyncs_are_counted(make_nsqd: Callable[..., Nsqd], flag: str) -> None:
    daemon = make_nsqd(flag)
    with daemon.connect() as client:
        client.publish("t", b"1", b"2")
        eventually(lambda: Metrics(daemon).value("nsqd_fsync_seconds_count") >= 1)
        assert Metrics(daemon).value("nsqd_fsync_seconds_sum") > 0


def _publish_to_many(client: Wire, names: list[str]) -> None:
    for name in names:
        client.PUB(name, b"x")
    client.expect_ok(len(names))


def test_topics_beyond_the_limit_are_summed_up(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*ALL_FEATURES)
    with daemon.connect() as client:
        client.identify(heartbeat_interval=-1)
        client.publish("_other", b"x", b"y")  # a topic may have that name
        _publish_to_many(client, [f"topic_{number}#ephemeral" for number in range(ROWS_MAX + 50)])
        metrics = Metrics(daemon)
        assert complaints(metrics.text) == []
        shown = len(re.findall(r"^nsqd_topic_messages_total\{", metrics.text, re.MULTILINE))
        assert shown == ROWS_MAX + 1
        assert metrics.value("nsqd_topic_messages_total", topic="_other") == 50 + 2
        assert metrics.value("nsqd_topic_depth", topic="_other") == 50 + 2
        assert metrics.value("nsqd_folded_topics") == 50 + 1
        assert metrics.value("nsqd_folded_channels") == 0
        assert metrics.value("nsqd_topics") == ROWS_MAX + 51
        assert metrics.has("nsqd_topic_depth", topic="topic_0#ephemeral")


def test_channels_beyond_the_limit_are_summed_up(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(*ALL_FEATURES)
    daemon.post("/topic/create", topic="t#ephemeral")
    for number in range(ROWS_MAX + 7):
        daemon.post("/channel/create", topic="t#ephemeral", channel=f"channel_{number}#ephemeral")
    with daemon.connect() as client:
        client.publish("t#ephemeral", b"x")
        metrics = Metrics(daemon)
    assert complaints(metrics.text) == []
    assert metrics.value("nsqd_folded_channels") == 7
    assert metrics.value("nsqd_channel_messages_total", topic="_other", channel="_other") == 7
    assert metrics.value("nsqd_channel_latency_seconds_count", topic="_other", channel="_other") == 0
    first = {"topic": "t#ephemeral", "channel": "channel_0#ephemeral"}
    assert metrics.value("nsqd_channel_messages_total", **first) == 1


def _expressions(node: object) -> Iterator[str]:
    """Finds every query in a dashboard, its variables' too."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for item in node:
            yield from _expressions(item)


def test_the_dashboard_names_only_what_is_there(scraped: Metrics) -> None:
    named = {
        name for text in _expressions(json.loads(DASHBOARD.read_text())) for name in NAMES_OF_METRICS.findall(text)
    }
    assert len(named) > 30
    assert named - scraped.names == set()


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                assert x < 24
                taken.add((x, y))


def test_the_document_names_what_is_there_and_all_of_it(scraped: Metrics) -> None:
    declared = set(re.findall(r"^# TYPE (\S+)", scraped.text, re.MULTILINE))
    documented = set(re.findall(r"^\| `([a-z_]+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == declared
