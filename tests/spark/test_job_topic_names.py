"""Archives are right for topics whose names look like something else to Spark."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd
from spark.source_rig import QUERY_TIMEOUT_S, address, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")
pytest.importorskip("deltalake", reason="it is not installed: pip install 'nsquark[delta]'")

from deltalake import DeltaTable

from nsquark.spark.jobs import archive
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.session import read_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


@pytest.mark.parametrize("format_name", ["parquet", "delta"])
@pytest.mark.parametrize("topics", [["007", "7"], ["1e3"], ["2026-11-18"]])
def test_a_topic_keeps_its_name(
    spark: "SparkSession", nsqd: Nsqd, tmp_path: Path, topics: list[str], format_name: str
) -> None:
    for topic in topics:
        publish(nsqd, topic, [f"{topic} {format_name}".encode()])
    options = {"nsqd": address(nsqd), "topic": ",".join(topics)}
    output = tmp_path / "archive"
    query = archive.start(spark, options, str(output), str(tmp_path / CHECKPOINT), None, format_name)
    assert query.awaitTermination(QUERY_TIMEOUT_S), query.status
    rows = read_archive(spark, str(output)).select("topic", "body").collect()
    assert {row.topic for row in rows} == set(topics)
    assert all(bytes(row.body).startswith(f"{row.topic} ".encode()) for row in rows)
    if format_name == "delta":
        assert set(DeltaTable(output).to_pyarrow_table(columns=["topic"])["topic"].to_pylist()) == set(topics)
