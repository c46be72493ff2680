"""Checks that a pipeline's directory is refused when half of it was put back from a backup, or when it was moved.

The tables are written by Spark's own sink and source, in the places where a pipeline has them; `test_pipeline.py`
checks with a real pipeline that those are the places.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd
from spark.source_rig import QUERY_TIMEOUT_S, bodies, publish, read_bodies, stream_reader

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.base.errors import UserError
from nsquark.spark.jobs import pipeline
from nsquark.spark.jobs.home import PipelineHome
from nsquark.spark.jobs.home_check import check_home
from nsquark.spark.jobs.layout import SPARK_LOG
from spark.test_sink_again import forget_last_commit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


class Home:
    """Is the directory of a pipeline with two tables: `arrivals` of a topic, and `second` of `arrivals`."""

    def __init__(self, spark: "SparkSession", nsqd: Nsqd, topic: str, directory: Path) -> None:
        self._spark = spark
        self._nsqd = nsqd
        self._topic = topic
        self._published = 0
        self.directory = directory
        self.backup = directory.with_name("backup")

    def table(self, name: str) -> Path:
        return self.directory / "warehouse" / name

    def checkpoint(self, name: str) -> Path:
        return self.directory / "checkpoints" / "_checkpoints" / "spark_catalog" / "default" / name / name / "0"

    def update(self, count: int) -> None:
        """Publishes messages, and brings both tables up to date."""
        publish(self._nsqd, self._topic, bodies(self._published, self._published + count))
        self._published += count
        self._write("arrivals", stream_reader(self._spark, self._nsqd, self._topic, startingOffsets="earliest").load())
        arrived = self._spark.read.parquet(str(self.table("arrivals"))).schema
        self._write("second", self._spark.readStream.schema(arrived).parquet(str(self.table("arrivals"))))

    def _write(self, name: str, rows: "DataFrame") -> None:
        writer = rows.writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint(name)))
        query = writer.trigger(availableNow=True).start(str(self.table(name)))
        assert query.awaitTermination(QUERY_TIMEOUT_S), query.status

    def put_back(self, *parts: str) -> None:
        for part in parts:
            shutil.rmtree(self.directory / part)
            shutil.copytree(self.backup / part, self.directory / part)

    def check(self, *anew: str) -> None:
        check_home(self.directory / "warehouse", self.directory / "checkpoints", anew=anew)

    def run(self, *arguments: str) -> None:
        """Starts the command, which refuses the directory before it starts Spark."""
        parser = argparse.ArgumentParser()
        pipeline.add_arguments(parser)
        pipeline.run(parser.parse_args(["run", "--spec", str(EXAMPLE), "--dir", str(self.directory), *arguments]))


@pytest.fixture(scope="module")
def updated(spark: "SparkSession", nsqd: Nsqd, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Has seen two updates; the state between them is in `backup`, and the one after them in `copy`, beside it."""
    directory = tmp_path_factory.mktemp("updated")
    made = Home(spark, nsqd, "updated", directory / "home")
    made.update(100)
    shutil.copytree(made.directory, directory / "backup")
    made.update(50)
    shutil.copytree(made.directory, directory / "copy")
    return made


@pytest.fixture
def home(updated: Home) -> Iterator[Home]:
    """Is the updated directory, in its place for each test: Spark's files name each other by their paths."""
    yield updated
    updated.directory = updated.backup.with_name("home")
    shutil.rmtree(updated.directory)
    shutil.copytree(updated.backup.with_name("copy"), updated.directory)


@pytest.mark.usefixtures("early_whole_lists")
def test_a_directory_that_fits_is_used(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    home = Home(spark, nsqd, topic, tmp_path / "home")
    home.update(100)
    shutil.copytree(home.directory, home.backup)
    home.check()
    for _ in range(3):
        home.update(10)
    assert list(home.directory.rglob(f"{SPARK_LOG}/*.compact")), "beyond the first whole list of Spark's sink"
    assert list(home.checkpoint("second").rglob("sources/0/*.compact")), "and of its source"
    home.check()
    for name in ("arrivals", "second"):
        forget_last_commit(home.checkpoint(name))
    home.check()
    home.put_back("warehouse", "checkpoints")
    home.check()
    home.update(10)
    assert read_bodies(spark.read.parquet(str(home.table("second")))) == bodies(0, 140)


def test_checkpoints_that_are_older_than_the_tables_are_refused(home: Home) -> None:
    home.put_back("checkpoints")
    with pytest.raises(UserError, match=r"arrivals/0 is older than .*warehouse/arrivals.*--full-refresh arrivals"):
        home.run()
    with pytest.raises(UserError, match=r"second/0 is older than .*warehouse/second.*--full-refresh second"):
        home.run("--full-refresh", "arrivals")
    home.check("arrivals", "spark_catalog.default.second")


def test_tables_without_their_checkpoints_are_refused(home: Home) -> None:
    shutil.rmtree(home.directory / "checkpoints")
    with pytest.raises(UserError, match="or new: it knows no batch"):
        home.run()
    home.check("arrivals", "second")


@pytest.mark.parametrize("is_gone", [False, True])
def test_tables_that_are_older_than_their_checkpoints_are_refused(home: Home, is_gone: bool) -> None:
    home.put_back("warehouse")
    if is_gone:
        shutil.rmtree(home.directory / "warehouse")
    with pytest.raises(UserError, match=r"warehouse/arrivals is older than its checkpoint .*arrivals/0"):
        home.run()


def test_a_table_that_is_older_than_what_was_read_of_it_is_refused(home: Home) -> None:
    checkpoint = home.checkpoint("arrivals").relative_to(home.directory)
    home.put_back("warehouse/arrivals", str(checkpoint))
    with pytest.raises(UserError, match=r"second has read .* of table arrivals.*--full-refresh arrivals,second"):
        home.run()
    home.check("second")


def test_a_table_is_computed_anew_with_those_that_have_read_it(home: Home) -> None:
    with pytest.raises(UserError, match=r"second has read .* of table arrivals.*--full-refresh arrivals,second"):
        home.run("--full-refresh", "arrivals")
    home.check("arrivals", "second")
    home.check("second")


@pytest.mark.parametrize("arguments", [(), ("--full-refresh-all",)])
def test_a_directory_that_was_moved_is_refused(home: Home, arguments: tuple[str, ...]) -> None:
    home.directory = home.directory.rename(home.backup.with_name("moved"))
    with pytest.raises(UserError, match=r"moved/warehouse/.* was written as .*home/warehouse/.*Move --dir back"):
        home.run(*arguments)
    home.directory = home.directory.rename(home.backup.with_name("home"))
    home.check()


def test_a_directory_that_was_moved_is_refused_whatever_is_in_it(tmp_path: Path) -> None:
    """Spark finds views by their paths too, and would make them anew at the old ones."""
    home, moved = tmp_path / "home", tmp_path / "moved"
    PipelineHome(home).prepare({})
    PipelineHome(home).prepare({})
    home.rename(moved)
    PipelineHome(moved).prepare({})  # there is no catalog yet
    (moved / "metastore").mkdir()
    moved.rename(home)
    with pytest.raises(UserError, match=f"{home} was made as {moved}: .*Move --dir back"):
        PipelineHome(home).prepare({})
    PipelineHome(home).prepare({"spark.sql.warehouse.dir": "/elsewhere"})
    home.rename(moved)
    PipelineHome(moved).prepare({})
