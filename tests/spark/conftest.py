"""Has one Spark session for all tests of Spark: starting a JVM costs more than most of them."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark.micro_batches import MakeQuery, MicroBatches

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.driver.memory": "1g",
}


TIMEOUT_S = 300
"""Limits a test, unless it says otherwise: the first one also waits for the JVM, and Spark is slow on a busy machine.
"""


WORKER_TOO_LATE = "Python worker failed to connect back"
"""Spark gives a Python process ten seconds to start, which no setting changes; on a busy machine one may need more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=[WORKER_TOO_LATE]))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def java() -> None:
    """Sets the environment that Spark needs, for this process and those it starts."""
    pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")
    from nsquark.spark.java import spark_environment

    os.environ.update(spark_environment())


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """Starts Spark as local[2], in UTC, with its warehouse in a directory of this run."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    directory = tmp_path_factory.mktemp("spark")
    builder = builder.config("spark.sql.warehouse.dir", str(directory / "warehouse"))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def early_whole_lists(spark: "SparkSession") -> Iterator[None]:
    """Lets Spark's sink and source list all their files anew with the third batch already, not with the tenth."""
    names = [f"spark.sql.streaming.{part}.log.compactInterval" for part in ("fileSink", "fileSource")]
    for name in names:
        spark.conf.set(name, "3")
    yield
    for name in names:
        spark.conf.unset(name)


@pytest.fixture
def start() -> "Iterator[MakeQuery]":
    """Makes queries, and ends their threads after the test."""
    from spark.micro_batches import query

    made: list[MicroBatches] = []

    def make(*daemons: Nsqd, **options: object) -> "MicroBatches":
        made.append(query(*daemons, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
