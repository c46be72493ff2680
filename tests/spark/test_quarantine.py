"""Checks `nsquark.spark.quarantine`: every row is in one of two parts, and a bad one can be found again."""

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd
from spark.source_rig import publish, reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours

RULES = {
    "not a JSON object": "_corrupt_record IS NOT NULL",
    "user's name is missing": "user IS NULL",
    "amount is negative": "amount < 0",
}


def test_bad_rows_go_to_a_topic_with_reason_and_origin_and_good_ones_on(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd]
) -> None:
    from nsquark.spark import parse_json, quarantine

    nsqd = make_nsqd()
    good = [b'{"user": "u%d", "amount": %d}' % (number, number) for number in range(50)]
    bad = {
        b"no json": "not a JSON object",
        b"\xff\xfe": "not a JSON object",
        b'{"amount": -1}': "user's name is missing",
        b'{"user": "a\\"b", "amount": -1}': "amount is negative",
    }
    publish(nsqd, "orders", [*good, *bad])
    orders = reader(spark, nsqd, "orders").load()
    parts = quarantine(parse_json(orders, "user STRING, amount BIGINT"), RULES)
    assert parts.good.columns == [*orders.columns, "user", "amount", "_corrupt_record"]
    assert sorted(bytes(row.body) for row in parts.good.collect()) == sorted(good)
    address = "{}:{}".format(*nsqd.http)
    parts.bad.write.format("nsq").mode("append").options(nsqd=address, topic="orders.rejected").save()
    rejected = [json.loads(row.body) for row in reader(spark, nsqd, "orders.rejected").load().collect()]
    found = {}
    for row in rejected:
        body = base64.b64decode(row["body_base64"]) if "body_base64" in row else row["body"].encode()
        found[body] = row["reason"]
        origin = json.dumps({f"{row['topic']}@{row['nsqd']}": row["seq"]})
        again = reader(spark, nsqd, row["topic"], startingOffsets=origin).load().where(f"seq = {row['seq']}")
        assert [bytes(message.body) for message in again.collect()] == [body]
    assert len(rejected) == len(bad)
    assert found == bad


def test_rows_are_judged_once_and_parted_later(spark: "SparkSession") -> None:
    from nsquark.spark import judge, quarantine

    rows = spark.sql(
        "SELECT 't' AS topic, 'n' AS nsqd, id AS seq, now() AS published, encode('x', 'UTF-8') AS body FROM range(10)"
    )
    judged = judge(rows, {"odd": "seq % 2 = 1", "large": "seq > 7"})
    assert [row.reason for row in judged.orderBy("seq").collect()] == [None, "odd"] * 4 + ["large", "odd"]
    parts = quarantine(judged, timestamp="published")
    assert (parts.good.count(), parts.bad.count()) == (4, 6)
    assert parts.good.columns == rows.columns
    with pytest.raises(ValueError, match="quarantine needs rules"):
        quarantine(rows, {})
