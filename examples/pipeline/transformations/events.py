"""Leads from the topic to `arrivals`, from there to `events` and the topic of the rejected, and the results back to
a topic.

An event is a JSON object: `id`, `time` (ISO 8601), `user`, `kind` (order or click) and, for an order, `amount`.

Only `arrivals` reads the topic, so that a message is judged once and every later step sees the same verdict. Over
tables of the pipeline this file uses `where` and `selectExpr` only: Spark resolves most other calls while the graph is
still being drawn, against the table as the last update left it.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import from_json

from nsquark.spark import judge, quarantine

spark = SparkSession.active()


def setting(name: str) -> str:
    return str(spark.conf.get(f"events.{name}"))


# Every field is read as text and judged by the rules below: `from_json` with the final types would say that a message
# is bad, but not why.
FIELDS = "id STRING, time STRING, user STRING, kind STRING, amount STRING, not_json STRING"

# What a message is rejected for: the first that applies. One event dated far ahead would move the watermark, and every
# window with it.
RULES = {
    "not UTF-8": "NOT is_valid_utf8(text)",
    "not a JSON object": "event IS NULL OR event.not_json IS NOT NULL",
    "no id": "coalesce(event.id, '') = ''",
    "no user": "coalesce(event.user, '') = ''",
    "kind is neither order nor click": "event.kind IS NULL OR event.kind NOT IN ('order', 'click')",
    "time is not an ISO 8601 time": "try_cast(event.time AS TIMESTAMP) IS NULL",
    "time is in the future": "try_cast(event.time AS TIMESTAMP) > published + INTERVAL 5 MINUTES",
    "amount is not a number": "event.kind = 'order' AND try_cast(event.amount AS DECIMAL(18, 2)) IS NULL",
    "amount is negative": "try_cast(event.amount AS DECIMAL(18, 2)) < 0",
}


@dp.table(comment="Every message of the topic, once: as it came, as it was understood, and why not.")
def arrivals() -> DataFrame:
    messages = (
        spark.readStream.format("nsq")
        .option("nsqd", setting("nsqd"))
        .option("topic", setting("topic"))
        .option("channel", setting("channel"))
        .option("startingOffsets", "earliest")
        .load()
    )
    parsed = messages.selectExpr(
        "topic", "nsqd", "seq", "timestamp AS published", "body", "CAST(body AS STRING) AS text"
    ).withColumn("event", from_json("text", FIELDS, {"columnNameOfCorruptRecord": "not_json"}))
    return judge(parsed, RULES).selectExpr(
        "topic",
        "nsqd",
        "seq",
        "published",
        "body",
        "event.id AS id",
        "try_cast(event.time AS TIMESTAMP) AS time",
        "event.user AS user",
        "event.kind AS kind",
        "try_cast(event.amount AS DECIMAL(18, 2)) AS amount",
        "reason",
    )


@dp.table(comment="The good ones, typed. A redelivered event is here twice, with the same id.")
def events() -> DataFrame:
    good = quarantine(spark.readStream.table("arrivals"), timestamp="published").good
    return good.selectExpr("id", "time", "user", "kind", "amount", "published", "nsqd", "seq")


def topic_sink(name: str) -> None:
    """Makes an idempotent sink: a batch that Spark runs again after a failure is not published twice."""
    dp.create_sink(name, "nsq", {"nsqd": setting("nsqd"), "topic": setting(name), "idempotent": "true"})


topic_sink("rejected_topic")


@dp.append_flow(target="rejected_topic")
def rejected() -> DataFrame:
    """Makes a JSON object for each rejected message, with the reason, where it came from, and the body."""
    return quarantine(spark.readStream.table("arrivals"), timestamp="published").bad


topic_sink("results_topic")


@dp.append_flow(target="results_topic")
def results() -> DataFrame:
    minutes = spark.readStream.table("per_minute")
    return minutes.selectExpr("to_json(struct(minute, kind, events, amount)) AS body")
