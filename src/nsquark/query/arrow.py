"""Reads what is in topics now into a table of Arrow (`nsquark.read_arrow`) or of polars (`nsquark.read_polars`)."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from nsquark.query.dataset import TopicDataset
from nsquark.spark.options import NAMES, OptionError, SourceOptions, check_names

if TYPE_CHECKING:
    import polars

TIME = pa.timestamp("us", "UTC")


def read_arrow(
    topic: str | Sequence[str],
    *,
    nsqd: str | Sequence[str] = (),
    lookupd: str | Sequence[str] = (),
    columns: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    where: pc.Expression | None = None,
    text: bool = False,
    options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Reads what is in topics now, without consuming anything, into a `pyarrow.Table`.

    The table has the columns `topic`, `nsqd`, `seq`, `id`, `timestamp` and `body`. Rows of one topic on one nsqd are in
    the order of its log. All rows are held in memory; what `columns`, `since`, `until` and `where` leave out is not
    even fetched where that is possible.

    topic: the name of a topic, or several.
    nsqd: HTTP addresses of nsqds, like 127.0.0.1:4151.
    lookupd: HTTP addresses of nsqlookupds, instead of `nsqd`.
    columns: some of the columns, instead of all.
    since: the earliest time at which messages were published.
    until: the time before which messages were published.
    where: a filter, like `pyarrow.compute.field("seq") > 42`.
    text: whether `body` is a string; the column `raw` then has its bytes.
    options: further options of the Spark source, by name, like `authSecretFile`, `tlsRootCaFile` or `headers`.
    """
    dataset = TopicDataset(source_options(topic, nsqd, lookupd, options), text=text)
    if columns is not None:
        _check_columns(columns, dataset.schema)
    scanner = dataset.scanner(columns=columns, filter=_condition(since, until, where))
    return scanner.to_table()


def read_polars(topic: str | Sequence[str], **arguments: Any) -> "polars.DataFrame":
    """Reads what `read_arrow` reads into a `polars.DataFrame`.

    topic: the name of a topic, or several.
    **arguments: further arguments, as of `read_arrow`.
    """
    import polars

    frame = polars.from_arrow(read_arrow(topic, **arguments))
    assert isinstance(frame, polars.DataFrame)
    return frame


def source_options(
    topic: str | Sequence[str],
    nsqd: str | Sequence[str],
    lookupd: str | Sequence[str],
    more: Mapping[str, str] | None = None,
) -> SourceOptions:
    """Makes checked options for a batch read; raises `OptionError` if one of them is wrong."""
    check_names(more or {}, NAMES)
    given = {"topic": topic, "nsqd": nsqd, "lookupd": lookupd}
    named = {name: value if isinstance(value, str) else ",".join(value) for name, value in given.items() if value}
    parsed = SourceOptions.parse({**(more or {}), **named})
    parsed.check_batch()
    return parsed


def _check_columns(columns: Sequence[str], schema: pa.Schema) -> None:
    for name in columns:
        if name not in schema.names:
            raise OptionError(f"there is no column {name!r}: take any of {', '.join(schema.names)}")


def _condition(since: datetime | None, until: datetime | None, where: pc.Expression | None) -> pc.Expression | None:
    conditions = [] if where is None else [where]
    for name, moment in (("since", since), ("until", until)):
        if moment is None:
            continue
        if moment.tzinfo is None:
            raise OptionError(f"{name}={moment} has no zone: write datetime(..., tzinfo=UTC)")
        limit = pa.scalar(moment, TIME)
        conditions.append(pc.field("timestamp") >= limit if name == "since" else pc.field("timestamp") < limit)
    condition = None
    for each in conditions:
        condition = each if condition is None else condition & each
    return condition
