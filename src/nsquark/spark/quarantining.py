"""Separates bad rows, with the reason and where they came from, for a topic of their own: `nsquark.spark.quarantine`.

Only `where` and `selectExpr` are used, so that this works in declarative pipelines too: there Spark resolves most other
calls while the graph is still being drawn, against tables as the last update left them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import DataFrame

REASON = "reason"


class Quarantine(NamedTuple):
    """Holds the two parts of a DataFrame: the rows that go on, and those for the topic of bad rows."""

    good: DataFrame
    """These rows break no rule, and are as they were."""
    bad: DataFrame
    """These rows have one column, `body`, for `format("nsq")`: JSON with `reason`, `topic`, `nsqd`, `seq`, `published`
    and `body`, or `body_base64` where the body is not UTF-8.
    """


def judge(rows: DataFrame, rules: Mapping[str, str]) -> DataFrame:
    """Adds the column `reason`: it is null for a good row, else the reason of the first rule that the row breaks.

    `rules` maps a reason to a condition in SQL, which is true for bad rows. A condition that is null does not apply.
    """
    if not rules:
        raise ValueError(
            "quarantine needs rules: write {'no user': 'user IS NULL'}, a condition of bad rows by its reason"
        )
    cases = " ".join(f"WHEN {condition} THEN {_literal(reason)}" for reason, condition in rules.items())
    return rows.selectExpr("*", f"CASE {cases} END AS {REASON}")


def quarantine(rows: DataFrame, rules: Mapping[str, str] | None = None, *, timestamp: str = "timestamp") -> Quarantine:
    """Separates rows of `format("nsq")`, with whatever columns were added, into good and bad ones.

    `rules` maps a reason to a condition in SQL, which is true for bad rows; the first one that is true counts. Without
    `rules`, the rows have the column `reason` from `judge`. The columns `topic`, `nsqd`, `seq`, `body` and the one that
    `timestamp` names must still be there: they say where a bad row came from.
    """
    judged = rows if rules is None else judge(rows, rules)
    is_text = "is_valid_utf8(CAST(body AS STRING))"
    bad = judged.where(f"{REASON} IS NOT NULL").selectExpr(
        f"""to_json(struct(
            {REASON}, topic, nsqd, seq, {timestamp} AS published,
            CASE WHEN {is_text} THEN CAST(body AS STRING) END AS body,
            CASE WHEN NOT {is_text} THEN base64(body) END AS body_base64
        )) AS body"""
    )
    return Quarantine(judged.where(f"{REASON} IS NULL").selectExpr(f"* EXCEPT ({REASON})"), bad)


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
