"""From the topic to `arrivals`, from there to `events` and the topic of the rejected, and the results back to a topic.

An event is a JSON object: `id`, `time` (ISO 8601), `user`, `kind` (order or click) and, for an order, `amount`.

Only `arrivals` reads the topic, so that a message is judged once and every later step sees the same verdict. Over
tables of the pipeline this file uses `where` and `selectExpr` only: Spark resolves most other calls while the graph is
still being drawn, against the table as the last update left it.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import from_json

spark = SparkSession.active()


def setting(name: str) -> str:
    return str(spark.conf.get(f"events.{name}"))


# Every field is read as text and judged by the rules below: `from_json` with the final types would say that a message
# is bad, but not why.
FIELDS = "id STRING, time STRING, user STRING, kind STRING, amount STRING, not_json STRING"

# The first that applies is the reason. One event dated far ahead would move the watermark, and every window with it.
REASON = """CASE
    WHEN NOT is_valid_utf8(text) THEN 'not UTF-8'
    WHEN event IS NULL OR event.not_json IS NOT NULL THEN 'not a JSON object'
    WHEN coalesce(event.id, '') = '' THEN 'no id'
    WHEN coalesce(event.user, '') = '' THEN 'no user'
    WHEN event.kind IS NULL OR event.kind NOT IN ('order', 'click') THEN 'kind is neither order nor click'
    WHEN try_cast(event.time AS TIMESTAMP) IS NULL THEN 'time is not an ISO 8601 time'
    WHEN try_cast(event.time AS TIMESTAMP) > published + INTERVAL 5 MINUTES THEN 'time is in the future'
    WHEN event.kind = 'order' AND try_cast(event.amount AS DECIMAL(18, 2)) IS NULL THEN 'amount is not a number'
    WHEN try_cast(event.amount AS DECIMAL(18, 2)) < 0 THEN 'amount is negative'
END"""


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
        "nsqd", "seq", "timestamp AS published", "body", "CAST(body AS STRING) AS text"
    ).withColumn("event", from_json("text", FIELDS, {"columnNameOfCorruptRecord": "not_json"}))
    return parsed.selectExpr(
        "nsqd",
        "seq",
        "published",
        "body",
        "event.id AS id",
        "try_cast(event.time AS TIMESTAMP) AS time",
        "event.user AS user",
        "event.kind AS kind",
        "try_cast(event.amount AS DECIMAL(18, 2)) AS amount",
        f"{REASON} AS reason",
    )


@dp.table(comment="The good ones, typed. A redelivered event is here twice, with the same id.")
def events() -> DataFrame:
    good = spark.readStream.table("arrivals").where("reason IS NULL")
    return good.selectExpr("id", "time", "user", "kind", "amount", "published", "nsqd", "seq")


def topic_sink(name: str) -> None:
    """Idempotent: a batch that Spark runs again after a failure is not published twice."""
    dp.create_sink(name, "nsq", {"nsqd": setting("nsqd"), "topic": setting(name), "idempotent": "true"})


topic_sink("rejected_topic")


@dp.append_flow(target="rejected_topic")
def rejected() -> DataFrame:
    """A JSON object for each; what is not text travels as base64, so that nothing of it is lost."""
    bad = spark.readStream.table("arrivals").where("reason IS NOT NULL")
    return bad.selectExpr(
        """to_json(struct(
            reason, nsqd, seq, published,
            CASE WHEN reason <> 'not UTF-8' THEN CAST(body AS STRING) END AS body,
            CASE WHEN reason = 'not UTF-8' THEN base64(body) END AS body_base64
        )) AS body"""
    )


topic_sink("results_topic")


@dp.append_flow(target="results_topic")
def results() -> DataFrame:
    minutes = spark.readStream.table("per_minute")
    return minutes.selectExpr("to_json(struct(minute, kind, events, amount)) AS body")
