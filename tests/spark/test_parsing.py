"""Checks `nsquark.spark.parse_json`: the fields of messages become columns, by an inferred schema."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import nsquark
from harness import Nsqd
from spark.source_rig import address, publish, reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours


def test_every_row_has_its_fields_or_its_text(spark: "SparkSession", make_nsqd: Callable[..., Nsqd]) -> None:
    from nsquark.spark import parse_json

    nsqd = make_nsqd()
    good = [b'{"user": %d, "tags": ["a"], "at": {"x": 1.5}}' % number for number in range(30)]
    publish(nsqd, "orders", [*good, b"no json", b'{"user": "x"}'])
    schema = nsquark.infer_schema("orders", nsqd=address(nsqd))
    assert (schema.fitting, schema.rows) == (30, 32)
    rows = parse_json(reader(spark, nsqd, "orders").load(), schema.ddl).orderBy("seq").collect()
    assert [row.user for row in rows] == [*range(30), None, None]
    assert rows[0].at.x == 1.5 and rows[0].tags == ["a"]
    assert [row._corrupt_record for row in rows] == [None] * 30 + ["no json", '{"user": "x"}']
    assert {"topic", "nsqd", "seq", "body"} < set(rows[0].asDict())
