"""Counts orders per ten seconds by a continuous query, from one topic to another, for as long as it runs.

    python examples/streaming.py --nsqd 127.0.0.1:4151 --topic events --to-topic events.live --checkpoint /tmp/live

Stop it with Ctrl-C and start it again: it goes on where it was, and what was published meanwhile is counted. A pipeline
(examples/pipeline) computes the same kind of thing in updates; this one answers within seconds.
"""

import argparse
import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, expr, from_json, window
from pyspark.sql.streaming.query import StreamingQuery

from nsquark.spark.java import spark_environment

EVENT = "id STRING, time TIMESTAMP, kind STRING, amount DECIMAL(18, 2)"


def orders_per_window(messages: DataFrame) -> DataFrame:
    """Yields a row for each window when it is closed; an order that was delivered twice counts once."""
    events = messages.select(from_json(col("body").cast("string"), EVENT).alias("event")).select("event.*")
    orders = events.where("kind = 'order' AND id IS NOT NULL AND time <= current_timestamp() + INTERVAL 1 MINUTE")
    once = orders.withWatermark("time", "5 seconds").dropDuplicatesWithinWatermark(["id"])
    return once.groupBy(window("time", "10 seconds").alias("span")).agg(
        expr("count(*) AS orders"), expr("sum(amount) AS amount")
    )


def start(spark: SparkSession, nsqd: str, topic: str, to_topic: str, checkpoint: str) -> StreamingQuery:
    messages = (
        spark.readStream.format("nsq")
        .options(nsqd=nsqd, topic=topic, channel="live", startingOffsets="earliest", maxMessagesPerTrigger=200_000)
        .load()
    )
    counts = orders_per_window(messages).selectExpr("to_json(struct(span.start AS start, orders, amount)) AS body")
    return (
        counts.writeStream.format("nsq")
        .options(nsqd=nsqd, topic=to_topic, idempotent="true", checkpointLocation=checkpoint)
        .outputMode("append")
        .trigger(processingTime="2 seconds")
        .start()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nsqd", default="127.0.0.1:4151", help="HTTP addresses, separated by commas")
    parser.add_argument("--topic", default="events")
    parser.add_argument("--to-topic", default="events.live")
    parser.add_argument("--checkpoint", required=True, help="where the position is kept")
    args = parser.parse_args()
    os.environ.update(spark_environment())
    settings = {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "2"}
    spark = SparkSession.builder.master("local[*]").config(map=settings).getOrCreate()
    query = start(spark, args.nsqd, args.topic, args.to_topic, args.checkpoint)
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()


if __name__ == "__main__":
    main()
