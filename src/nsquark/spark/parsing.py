"""Has `nsquark.spark.parse_json`: the JSON in messages as columns, with what does not fit set apart."""

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, from_json

CORRUPT = "_corrupt_record"
"""Spark's usual name for the text of what does not fit."""


def parse_json(messages: DataFrame, schema: str, *, column: str = "body") -> DataFrame:
    """Adds the fields of the JSON in `column` as columns, by `schema`, the DDL that `nsquark schema` prints.

    A row that does not fit has null in the field that does not, or in all if it is no JSON at all, and its text in the
    column `_corrupt_record`, which is null in all others.
    """
    parsed = from_json(
        col(column).cast("string"), f"{schema}, {CORRUPT} STRING", {"columnNameOfCorruptRecord": CORRUPT}
    )
    return messages.withColumn("_parsed", parsed).select("*", "_parsed.*").drop("_parsed")
