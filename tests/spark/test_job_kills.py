"""Jobs whose driver is killed, each in the worst moment, go on with nothing lost and nothing doubled."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker.logs import read_all
from harness import Nsqd, eventually

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")
pytest.importorskip("deltalake", reason="it is not installed: pip install 'nsquark[delta]'")

from pyspark.sql import Row

from nsquark.base.errors import UserError
from nsquark.spark.jobs import replay
from nsquark.spark.jobs.replay_state import PendingReplay, ReplayKey, ReplayState
from nsquark.spark.jobs.session import read_messages
from nsquark.spark.sink.options import SinkOptions
from spark.jobs_driver import replay_arguments, start_delta, start_rollup
from spark.source_rig import address, publish
from spark.test_job_delta import table_bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

DRIVER = Path(__file__).with_name("jobs_driver.py")
DRIVER_TIMEOUT_S = 300
MESSAGES = 1200
COUNTRIES = ("at", "de", "fr")
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def orders() -> list[bytes]:
    """Makes ten orders a second, with amounts whose sum as floating point depends on the order of adding."""
    return [
        json.dumps(
            {
                "at": (START + timedelta(seconds=number / 10)).isoformat(),
                "user": {"country": COUNTRIES[number % 3]},
                "amount": number / 10,
            }
        ).encode()
        for number in range(MESSAGES)
    ]


def expected_windows() -> dict[tuple[datetime, str], tuple[int, float, float, float, float]]:
    """Returns all but the last window, which no younger message has closed."""
    found: dict[tuple[datetime, str], list[int]] = {}
    for number in range(MESSAGES - 100):
        start = START + timedelta(seconds=number // 100 * 10)
        found.setdefault((start, COUNTRIES[number % 3]), []).append(number)
    return {
        key: (len(tenths), sum(tenths) / 10, min(tenths) / 10, max(tenths) / 10, sum(tenths) / 10 / len(tenths))
        for key, tenths in found.items()
    }


def as_windows(rows: list[dict[str, Any]]) -> dict[tuple[datetime, str], tuple[Any, ...]]:
    names = ("count", "sum_amount", "min_amount", "max_amount", "avg_amount")
    return {(row["window_start"], row["user_country"]): tuple(row[name] for name in names) for row in rows}


def kill_at_the_worst_moment(nsqd: Nsqd, topic: str, directory: Path) -> None:
    state = directory / "replay" / "replay.json"
    # A session of its own, so that the kill reaches the JVM and its workers too.
    driver = subprocess.Popen([sys.executable, DRIVER, address(nsqd), topic, directory], start_new_session=True)

    def is_there() -> bool:
        if driver.poll() is not None:
            return True
        hang = (directory / "rollup.hangs").exists() and (directory / "delta.hangs").exists()
        return hang and state.exists() and json.loads(state.read_bytes())["messages"] >= 10

    try:
        eventually(is_there, DRIVER_TIMEOUT_S, 0.05)
        assert driver.returncode is None, "the driver ended by itself"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def test_each_job_goes_on_after_its_driver_was_killed(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    publish(nsqd, topic, orders())
    kill_at_the_worst_moment(nsqd, topic, tmp_path)
    published = read_all(nsqd, f"{topic}.again")
    assert 10 <= len(published) < MESSAGES, "killed in the middle"
    assert 0 < table_bodies(tmp_path / "table").total() < MESSAGES

    check_delta(spark, nsqd, topic, tmp_path)
    check_rollup(spark, nsqd, topic, tmp_path)
    check_replay(spark, nsqd, topic, tmp_path)


def check_delta(spark: "SparkSession", nsqd: Nsqd, topic: str, directory: Path) -> None:
    start_delta(spark, address(nsqd), topic, directory).awaitTermination()
    assert table_bodies(directory / "table") == Counter(orders())


def check_replay(spark: "SparkSession", nsqd: Nsqd, topic: str, directory: Path) -> None:
    publish(nsqd, topic, [b"after the replay began"])
    args = replay_arguments(address(nsqd), topic, directory, rate=100_000)
    options = SinkOptions.parse(replay._target(args))
    identity = replay.identity(args, options)
    with ReplayState.opened(args.checkpoint, identity, *replay._range(args)) as state:
        assert not state.is_done
        args.since, args.until = state.since, state.until
        done = replay.publish(read_messages(spark, args), options, args.rate, state)
    assert done.messages + done.before == MESSAGES and done.before >= 10
    assert [record.body for record in read_all(nsqd, f"{topic}.again")] == orders(), "each once, in order"
    assert replay.run(replay_arguments(address(nsqd), topic, directory, rate=1)) == 0, "there is nothing left"
    assert len(read_all(nsqd, f"{topic}.again")) == MESSAGES
    other = replay_arguments(address(nsqd), topic, directory, rate=1)
    other.to_topic = "elsewhere"
    with pytest.raises(UserError, match=rf"a replay with --to-topic {topic}\.again, and now it is elsewhere"):
        replay.run(other)


def test_a_piece_that_was_noted_and_not_appended_is_published(nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    options = SinkOptions.parse({"nsqd": address(nsqd), "topic": topic, "idempotent": "true"})
    rows = [Row(at_us=number, nsqd="n", topic="t", seq=number, body=b"%d" % number) for number in range(6)]

    def opened() -> AbstractContextManager[ReplayState]:
        return ReplayState.opened(tmp_path, {}, None, START)

    with opened() as state, replay._Appending(options, state) as writer:
        writer.write(rows[:2])
        last = ReplayKey(3, "n", "t", 3)
        state.intend(PendingReplay(state.token_of(last, 2), address(nsqd), last, 2))
    with opened() as state, replay._Appending(options, state) as writer:
        assert (state.messages, state.position) == (2, ReplayKey(1, "n", "t", 1))
        writer.write(rows[2:5])
    with opened() as state:
        assert state.pending is not None and state.messages == 2, "what is written last is known by nsqd"
        with replay._Appending(options, state) as writer:
            assert (state.messages, state.position) == (5, ReplayKey(4, "n", "t", 4))
            writer.write(rows[5:])
    assert [record.body for record in read_all(nsqd, topic)] == [row.body for row in rows]
    with opened(), pytest.raises(UserError, match="another replay uses"), opened():
        pass


def check_rollup(spark: "SparkSession", nsqd: Nsqd, topic: str, directory: Path) -> None:
    output = directory / "rollup"
    before = len(list(output.glob("batch=*")))
    assert before == 2, "one batch is noted, and one is written only"
    start_rollup(spark, address(nsqd), topic, directory).awaitTermination()
    in_files = [row.asDict() for row in spark.read.parquet(str(output)).collect()]
    in_topic = [json.loads(record.body) for record in read_all(nsqd, f"{topic}.rollup")]
    for rows in (in_files, in_topic):
        for row in rows:
            row["window_start"] = _in_utc(row["window_start"])
        assert len(rows) == 33 == len(expected_windows())
        assert as_windows(rows) == expected_windows()
    assert {row["topic"] for row in in_topic} == {topic}
    (directory / "rollup" / "_checkpoint" / "metadata").unlink()
    with pytest.raises(UserError, match="_checkpoint is gone"):
        start_rollup(spark, address(nsqd), topic, directory)


def _in_utc(moment: Any) -> datetime:
    return (datetime.fromisoformat(moment) if isinstance(moment, str) else moment).astimezone(UTC)
