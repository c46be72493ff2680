"""Turns the JSON in messages into columns, and sets apart what does not fit: `nsquark.spark.parse_json`."""

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, from_json

CORRUPT = "_corrupt_record"
"""Spark usually gives this name to the column with the text of a row that does not fit."""


def parse_json(messages: DataFrame, schema: str, *, column: str = "body") -> DataFrame:
    """Adds the fields of the JSON in `column` as columns, by `schema`, the DDL that `nsquark schema` prints.

    In a row that does not fit, the fields that do not are null, or all of them if the text is no JSON, and the column
    `_corrupt_record` has the text; in all other rows it is null.
    """
    parsed = from_json(
        col(column).cast("string"), f"{schema}, {CORRUPT} STRING", {"columnNameOfCorruptRecord": CORRUPT}
    )
    return messages.withColumn("_parsed", parsed).select("*", "_parsed.*").drop("_parsed")
