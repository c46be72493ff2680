"""Checks `nsquark rollup`: what its TOML file may say, and what is counted of messages that are not as it says."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.base.errors import UserError
from nsquark.spark.jobs import rollup
from nsquark.spark.jobs.rollup_spec import read_spec
from spark.source_rig import address, publish, reader
from spark.test_jobs import arguments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours

GOOD = 'topics = ["orders"]\nwindow = "1m"\n'
OUTPUT = '[output]\nparquet = "out"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topics = [", "is no TOML"),
        ("", r"\[output\] says where results go"),
        (GOOD + "[output]\nparquet = 3", r"\[output\] says where results go"),
        (f'window = "1m"\n{OUTPUT}', "topics says what is read"),
        (f'topics = ["a b"]\nwindow = "1m"\n{OUTPUT}', "'a b' in topics is no name of a topic"),
        (f'topics = ["orders"]\n{OUTPUT}', 'window is a time in quotes: write window = "1m"'),
        (f'topics = ["orders"]\nwindow = 60\n{OUTPUT}', "window is a time in quotes"),
        (f'topics = ["orders"]\nwindow = "60"\n{OUTPUT}', "window: missing unit in duration"),
        (f'topics = ["orders"]\nwindow = "0"\n{OUTPUT}', "window '0' is too short"),
        (f'{GOOD}watermark = "-1s"\n{OUTPUT}', "watermark '-1s' is too short"),
        (f'{GOOD}key = ["country"]\n{OUTPUT}', "there is no setting key: known are topics, window"),
        (f'{GOOD}{OUTPUT}topics = "x"\n', "there is no setting output.topics"),
        (f'{GOOD}sum = "amount"\n{OUTPUT}', r'sum has fields of the body: write sum = \["amount"\]'),
        (f'{GOOD}sum = ["a b"]\n{OUTPUT}', "'a b' in sum is no field"),
        (f"{GOOD}time = 3\n{OUTPUT}", "time has fields of the body"),
        (f'{GOOD}keys = ["count"]\n{OUTPUT}', "two columns would be called count"),
        (f'{GOOD}keys = ["a.b", "a_b"]\n{OUTPUT}', "two columns would be called a_b"),
        (f'{GOOD}keys = ["user", "user.id"]\n{OUTPUT}', "user is used as a value, and user.id as a field inside of it"),
        (f'{GOOD}keys = ["User", "user.id"]\n{OUTPUT}', "User is used as a value, and user.id as a field inside of it"),
        (f'{GOOD}keys = ["User.id"]\nsum = ["user.age"]\n{OUTPUT}', "User and user differ only in case"),
        (f'{GOOD}keys = ["a.B.c", "a.b.d"]\n{OUTPUT}', "a.B and a.b differ only in case"),
        (f'{GOOD}{OUTPUT}topic = "orders"\n', "output.topic 'orders' is read too"),
        (f'{GOOD}{OUTPUT}topic = "x#ephemeral"\n', "is no topic with a log"),
    ],
)
def test_mistakes_in_the_file_are_told_with_what_to_write(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rollup.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_spec(path)
    assert str(caught.value).startswith(str(path))


def test_mistakes_in_the_arguments_are_told_before_spark_starts(tmp_path: Path) -> None:
    path = tmp_path / "rollup.toml"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        rollup.run(arguments(rollup, str(path), "--nsqd-http-address", "127.0.0.1:4151"))
    path.write_text(f'{GOOD}{OUTPUT}topic = "per_minute"\n')
    with pytest.raises(UserError, match="needs a fixed list of nsqds"):
        rollup.run(arguments(rollup, str(path), "--lookupd-http-address", "127.0.0.1:4161"))


def test_messages_that_are_not_as_expected_are_counted_too(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "rollup.toml"
    path.write_text(
        f'topics = ["{topic}"]\nwindow = "24h"\ntime = "at"\nkeys = ["k"]\nsum = ["n"]\navg = ["n"]\n{OUTPUT}'
    )
    future = (datetime.now(UTC) + timedelta(days=3)).isoformat()
    messages: list[Any] = [
        {"at": "2026-01-31T12:00:00Z", "k": "a", "n": 0.1},
        {"at": "2026-01-31T12:00:00Z", "k": "a", "n": 0.2},
        {"at": "2026-01-31T12:00:00+01:00", "k": "a", "n": "0.3"},
        {"at": "2026-01-31T12:00:00Z", "k": "a", "n": "many"},
        {"at": "2026-01-31T12:00:00Z", "k": 7, "n": 12},
        {"k": "no time"},
        {"at": future, "k": "from the future", "n": 1},
    ]
    publish(nsqd, topic, [b"no JSON", *(json.dumps(message).encode() for message in messages)])
    rows = rollup.rolled_up(reader(spark, nsqd, topic).load(), read_spec(path)).collect()
    day = datetime(2026, 1, 31, tzinfo=UTC)
    found = {row.k: (row.window_start.astimezone(UTC) == day, row["count"], row.sum_n, row.avg_n) for row in rows}
    assert found == {
        "a": (True, 4, 0.6, 0.6 / 3),
        "7": (True, 1, 12.0, 12.0),
        "no time": (False, 1, None, None),
        "from the future": (False, 1, 1.0, 1.0),
        None: (False, 1, None, None),
    }
    assert all(row.window_start.astimezone(UTC) <= datetime.now(UTC) for row in rows)


def test_another_rollup_in_the_same_place_is_refused(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    publish(nsqd, topic, [b"{}"])
    path = tmp_path / "rollup.toml"
    path.write_text(GOOD.replace("orders", topic) + OUTPUT)
    spec = read_spec(path)
    output = str(tmp_path / "out")
    options = {"nsqd": address(nsqd), "topic": topic}
    rollup.check_identity(spark, spec, output)
    rollup.start(spark, spec, options, output, None, None).awaitTermination()
    rollup.check_identity(spark, spec, output)
    path.write_text(GOOD.replace("orders", topic).replace("1m", "5m") + OUTPUT)
    with pytest.raises(UserError, match="has the results of another rollup"):
        rollup.check_identity(spark, read_spec(path), output)
