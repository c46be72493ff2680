"""Runs the example pipeline twice on a real nsqd with new messages in between, against the same sums done in Python."""

import argparse
import base64
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness import Nsqd
from spark.report_pages import ReportPage
from spark.source_rig import address, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

import pyarrow.dataset

from nsquark.base.errors import UserError
from nsquark.spark.jobs import pipeline
from nsquark.spark.jobs.progress import Progress, Terminal, reports_in
from nsquark.spark.jobs.server import ConnectServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"
COMMAND = str(Path(sys.executable).with_name("nsquark"))
MINUTE = timedelta(minutes=1)
WATERMARK_DELAY = timedelta(seconds=10)
# A server that lives for a minute or two gains nothing from Java's second compiler, and waits for it.
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

pytestmark = pytest.mark.timeout(900)  # two updates on a busy machine


@dataclass
class Event:
    id: str
    time: datetime
    user: str
    kind: str
    amount: Decimal | None = None

    def body(self) -> bytes:
        fields: dict[str, Any] = {"id": self.id, "time": self.time.isoformat(), "user": self.user, "kind": self.kind}
        if self.amount is not None:
            fields["amount"] = float(self.amount)
        return json.dumps(fields).encode()

    @property
    def minute(self) -> datetime:
        return self.time.replace(second=0, microsecond=0)


def events(prefix: str, start: datetime, count: int, step_s: float) -> list[Event]:
    made = []
    for number in range(count):
        is_order = number % 3 == 0
        amount = Decimal(number * 7 % 1000) / 4 if is_order else None
        time = start + timedelta(seconds=number * step_s)
        made.append(Event(f"{prefix}{number}", time, f"user{number % 11}", "order" if is_order else "click", amount))
    return made


@dataclass
class Expected:
    """Holds what the pipeline should have made of the rounds given to it so far."""

    events: list[Event] = field(default_factory=list)
    minutes: dict[tuple[datetime, str], tuple[int, Decimal | None]] = field(default_factory=dict)
    _watermark: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    _open: dict[str, Event] = field(default_factory=dict)

    def add(self, round_events: list[Event]) -> None:
        """Takes one update's events: late ones are judged by the watermark that the update before left."""
        self.events += round_events
        for event in round_events:
            if event.minute + MINUTE > self._watermark:
                self._open[event.id] = event
        self._watermark = max(event.time for event in self.events) - WATERMARK_DELAY
        closed = {id: event for id, event in self._open.items() if event.minute + MINUTE <= self._watermark}
        for event in closed.values():
            del self._open[event.id]
            count, amount = self.minutes.get((event.minute, event.kind), (0, None))
            total = (amount or Decimal()) + event.amount if event.amount is not None else amount
            self.minutes[event.minute, event.kind] = count + 1, total

    def customers(self) -> dict[str, tuple[int, int, Decimal, datetime]]:
        users: dict[str, tuple[int, int, Decimal, datetime]] = {}
        for event in {event.id: event for event in self.events}.values():
            orders, clicks, spent, seen = users.get(event.user, (0, 0, Decimal(), event.time))
            is_order = event.kind == "order"
            spent += event.amount if event.amount is not None and is_order else 0
            users[event.user] = (orders + is_order, clicks + (not is_order), spent, max(seen, event.time))
        return users


def bad_messages(now: datetime) -> list[tuple[str, bytes]]:
    good = Event("x", now, "user1", "order", Decimal(1))

    def with_(**fields: Any) -> bytes:
        return json.dumps({**json.loads(good.body()), **fields}).encode()

    return [
        ("not UTF-8", b"\xff\xfe\x00order"),
        ("not a JSON object", b'{"id": "cut o'),
        ("not a JSON object", b"42"),
        ("no id", with_(id=None)),
        ("no id", b"{}"),
        ("no user", with_(user="")),
        ("kind is neither order nor click", with_(kind="refund")),
        ("time is not an ISO 8601 time", with_(time="yesterday")),
        ("time is in the future", with_(time="2099-01-01T00:00:00Z")),
        ("amount is not a number", with_(amount="much")),
        ("amount is negative", with_(amount=-1)),
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with ConnectServer(tmp_path_factory.mktemp("lake"), settings=SETTINGS) as running:
        yield running


def table(server: ConnectServer, name: str) -> list[dict[str, Any]]:
    """Reads a table from its files, not through Spark."""
    rows = pyarrow.dataset.dataset(server.home.directory / "warehouse" / name, format="parquet").to_table().to_pylist()
    # Spark's files have times without a zone, which are in UTC.
    return [{key: _in_utc(value) for key, value in row.items()} for row in rows]


def _in_utc(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value


def topic_bodies(nsqd: Nsqd, connect: Callable[..., Any], topic: str) -> list[dict[str, Any]]:
    """Returns all that is in a topic now, and leaves it there."""
    count = nsqd.get("/log/info", topic=topic).json()["count"]
    channel = f"test{count}#ephemeral"
    assert nsqd.post("/channel/create", topic=topic, channel=channel, start="oldest").status == 200
    messages = connect(nsqd).subscribe(topic, channel, rdy=1000).read_messages(count, finish=True)
    return [json.loads(message.body) for message in messages]


def update_command(server: ConnectServer, nsqd: Nsqd, topic: str) -> list[str]:
    command = [COMMAND, "pipeline", "run", "--spec", str(EXAMPLE), "--remote", server.url]
    command += ["--dir", str(server.home.directory), "--server-log", str(server.log)]
    return [*command, "--conf", f"events.nsqd=127.0.0.1:{nsqd.http[1]}", "--conf", f"events.topic={topic}"]


def update(server: ConnectServer, nsqd: Nsqd, topic: str) -> str:
    """Runs the real command once, as on a terminal; returns what it showed."""
    command = update_command(server, nsqd, topic)
    outside, inside = pty.openpty()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=inside, stderr=inside) as process:
        os.close(inside)
        shown = io.BytesIO()
        # Linux ends the reading of a terminal that nobody holds any more by an error.
        while chunk := _read_terminal(outside):
            shown.write(chunk)
        os.close(outside)
        text = shown.getvalue().decode()
        assert process.wait() == 0, text
    return text


def _read_terminal(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:
        return b""


def check(
    server: ConnectServer, nsqd: Nsqd, connect: Callable[..., Any], topic: str, expected: Expected, bad: list[Any]
) -> None:
    arrived = table(server, "arrivals")
    assert len(arrived) == nsqd.get("/log/info", topic=topic).json()["count"]
    assert sorted((row["reason"], row["body"]) for row in arrived if row["reason"]) == sorted(bad)

    got = table(server, "events")
    assert sorted((row["id"], row["time"], row["user"], row["kind"], row["amount"]) for row in got) == sorted(
        (event.id, event.time, event.user, event.kind, event.amount) for event in expected.events
    )
    assert {
        row["user"]: (row["orders"], row["clicks"], row["spent"], row["last_seen"])
        for row in table(server, "customers")
    } == (expected.customers())

    minutes = table(server, "per_minute")
    assert len(minutes) == len(expected.minutes)
    assert {(row["minute"], row["kind"]): (row["events"], row["amount"]) for row in minutes} == expected.minutes

    published = topic_bodies(nsqd, connect, "events.per_minute")
    assert len(published) == len(expected.minutes)
    assert {
        (datetime.fromisoformat(row["minute"]), row["kind"]): (row["events"], row.get("amount")) for row in published
    } == {key: (count, None if amount is None else float(amount)) for key, (count, amount) in expected.minutes.items()}

    rejected = topic_bodies(nsqd, connect, "events.rejected")
    assert sorted((row["reason"], _body_of(row)) for row in rejected) == sorted(bad)


def _body_of(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["body_base64"]) if "body_base64" in row else str(row["body"]).encode()


def test_two_updates_with_new_messages_in_between(
    server: ConnectServer, nsqd: Nsqd, connect: Callable[..., Any], topic: str
) -> None:
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=20)
    bad = bad_messages(start)
    expected = Expected()

    first = events("a", start, 300, 1.0)
    redelivered = [first[5], first[5], first[298]]
    round_1 = first + redelivered
    connect(nsqd).publish(topic, *[event.body() for event in round_1], *[body for _, body in bad])
    expected.add(round_1)
    shown = update(server, nsqd, topic)
    check(server, nsqd, connect, topic, expected, bad)
    assert "Run is COMPLETED." in shown
    assert f"{len(round_1) + len(bad):,} rows" in shown
    assert "lag 0" in shown
    checkpoints = server.home.checkpoints
    backup = shutil.copytree(checkpoints, checkpoints.with_name("backup"))

    # A minute that the first update left open goes on; a closed one stays as it was published.
    late = Event("late", start + timedelta(seconds=30), "user1", "click")
    again = [first[299], first[7]]
    round_2 = events("b", start + timedelta(seconds=295), 300, 1.5) + again + [late]
    connect(nsqd).publish(topic, *[event.body() for event in round_2], *[body for _, body in bad[:3]])
    expected.add(round_2)
    update(server, nsqd, topic)
    check(server, nsqd, connect, topic, expected, bad + bad[:3])
    assert late.id in {row["id"] for row in table(server, "events")}

    channel = nsqd.channel(topic, "pipeline")
    assert channel["depth"] == 0, "the channel is committed at the end of an update"

    shutil.rmtree(checkpoints)
    backup.rename(checkpoints)
    refused = subprocess.run(update_command(server, nsqd, topic), capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1
    assert "0 is older than" in refused.stderr
    assert "Put back the checkpoint that belongs to it" in refused.stderr


TWO_FLOWS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
dp.create_streaming_table("both")


def messages():
    reader = spark.readStream.format("nsq").option("nsqd", spark.conf.get("two.nsqd"))
    return reader.option("topic", spark.conf.get("two.topic")).option("startingOffsets", "earliest").load()


@dp.append_flow(target="both")
def one():
    return messages()


@dp.append_flow(target="both")
def two():
    return messages()
"""


def test_a_table_with_two_flows_is_not_half_written_without_a_word(
    nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    """Runs on a server of the command's own, with a setting of Spark's that is for its start alone."""
    connect(nsqd).publish(topic, b"one", b"two")
    spec = tmp_path / "spec"
    (spec / "definitions").mkdir(parents=True)
    (spec / "spark-pipeline.yml").write_text(
        "name: two\nstorage: file:///nowhere\nlibraries: [{glob: {include: definitions/**}}]\n"
    )
    (spec / "definitions" / "both.py").write_text(TWO_FLOWS)
    command = [COMMAND, "pipeline", "run", "--spec", str(spec), "--dir", str(tmp_path / "home"), "--master", "local[2]"]
    settings = {**SETTINGS, "two.nsqd": f"127.0.0.1:{nsqd.http[1]}", "two.topic": topic}
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1
    assert "table both is written by two flows" in result.stderr, result.stderr
    assert "UNION ALL" in result.stderr


@pytest.mark.long  # two Sparks; test_pipeline_backups.py has the rule without one
def test_a_moved_directory_with_nothing_but_views_is_refused(tmp_path: Path) -> None:
    """Spark finds a view by its path too, and would make it anew at the old one."""
    (tmp_path / "spark-pipeline.yml").write_text(
        "name: views\nstorage: file:///nowhere\nlibraries: [{glob: {include: definitions/**}}]\n"
    )
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "a.sql").write_text("CREATE MATERIALIZED VIEW a AS SELECT id FROM range(3)")
    home, moved = tmp_path / "home", tmp_path / "moved"
    settings = [part for name, value in SETTINGS.items() for part in ("--conf", f"{name}={value}")]

    def run(directory: Path, action: str = "run") -> "subprocess.CompletedProcess[str]":
        command = [COMMAND, "pipeline", action, "--spec", str(tmp_path), "--dir", str(directory), *settings]
        return subprocess.run([*command, "--master", "local[2]"], capture_output=True, text=True, timeout=300)

    result = run(home)
    assert (result.returncode, result.stderr) == (0, "")
    assert list((home / "warehouse" / "a").glob("*.parquet"))
    home.rename(moved)
    for action in ("run", "dry-run"):
        result = run(moved, action)
        assert result.returncode == 1
        assert f"{moved} was made as {home}: " in result.stderr and "Move --dir back" in result.stderr, result.stderr
    assert not home.exists()
    moved.rename(home)
    result = run(home)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_mistake_in_the_definitions_is_shown_without_the_rest_of_sparks_words(
    server: ConnectServer, tmp_path: Path
) -> None:
    (tmp_path / "spark-pipeline.yml").write_text(
        "name: broken\nstorage: file:///nowhere\nlibraries: [{glob: {include: definitions/**}}]\n"
    )
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "a.sql").write_text("CREATE MATERIALIZED VIEW a AS SELECT no_such_column FROM range(3)")
    command = [COMMAND, "pipeline", "dry-run", "--spec", str(tmp_path), "--remote", server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "no_such_column" in result.stderr
    assert "Registering graph elements" not in result.stdout + result.stderr


def test_the_report_command_writes_the_page_from_a_server(
    server: ConnectServer, make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    daemon = make_nsqd()
    publish(daemon, "orders", [b"x" * 200] * 1234)
    file = tmp_path / "report.html"
    command = [COMMAND, "report", "--topic", "orders", "--nsqd-http-address", address(daemon), "--html", str(file)]
    command += ["--remote", server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1].split()[:2] == ["orders", "1,234"]
    shown = ReportPage(file.read_text(encoding="utf-8"))
    assert shown.column("Topics", "messages") == {"orders": "1,234"}
    assert "None of the topics has a channel: nobody consumes them." in shown.text


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(arguments)


def test_mistakes_on_the_command_line_say_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no spark-pipeline\.yml in"):
        pipeline.run(parse("run", "--spec", str(tmp_path)))
    with pytest.raises(UserError, match=r"--conf 'events\.nsqd' is not NAME=VALUE"):
        pipeline.run(parse("run", "--spec", str(EXAMPLE), "--conf", "events.nsqd"))
    (tmp_path / "spark-pipeline.yml").write_text("- not\n- a spec\n")
    with pytest.raises(UserError, match="is not a pipeline spec"):
        pipeline.run(parse("run", "--spec", str(tmp_path), "--remote", "sc://127.0.0.1:1"))


def test_progress_is_read_from_sparks_log_and_shown_to_people_only() -> None:
    log = [
        "26/01/01 00:00:00 WARN Something: else\n",
        "26/01/01 00:00:01 INFO ProgressReporter: Streaming query made progress: {\n",
        '  "id" : "f3", "name" : "spark_catalog.default.arrivals", "batchId" : 7, "batchDuration" : 2500,\n',
        '  "numInputRows" : 12345, "processedRowsPerSecond" : 4938.0,\n',
        '  "sources" : [ {\n',
        '    "latestOffset" : {"orders@a":{"next":90,"behind":30},"orders@b":{"next":9,"behind":12}}\n',
        "  } ]\n",
        "}\n",
        "26/01/01 00:00:02 WARN Something: else\n",
    ]
    (progress,) = [Progress.from_report(report) for report in reports_in(log)]
    assert progress == Progress("arrivals", 7, 12345, 4938.0, 2500, lag=42)
    assert "12,345 rows" in str(progress)
    assert "lag 42" in str(progress)
    pipe = io.StringIO()
    Terminal(pipe).say(progress)
    assert pipe.getvalue() == ""
