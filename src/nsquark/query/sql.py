"""This is `nsquark sql`: it answers a question in SQL about topics, with DuckDB in this process."""

import argparse
import contextlib
import csv
import itertools
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

import duckdb
import msgspec

from nsquark.base.errors import UserError
from nsquark.base.printable import printable
from nsquark.query.arguments import add_nsq_arguments, all_topics, only, topic_names
from nsquark.query.dataset import TopicDataset
from nsquark.spark.endpoint import NsqdError
from nsquark.spark.options import OptionError, SourceOptions

ROWS_PER_FETCH: Final = 10_000
TABLE_ROWS_MAX: Final = 10_000
"""The format `table` shows at most this many rows: it holds all in memory, to find the widths of the columns."""
CELL_CHARS_MAX: Final = 200


Rows = Iterator[tuple[Any, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", help='in DuckDB\'s SQL; a topic is a table, "quoted" if its name has . or -')
    parser.add_argument("--format", choices=sorted(FORMATS), default="table", help="of the answer (default: table)")
    add_nsq_arguments(parser)
    parser.epilog = (
        "Columns: topic, nsqd, seq, id, timestamp, body (as text, for body->>'user' and the like), raw (its bytes)."
        " Conditions on topic, nsqd, seq and timestamp choose what is read at all. Times are in UTC."
        " The format json is an object a line."
    )


def run(args: argparse.Namespace) -> int:
    try:
        with connection(all_topics(args), args.query) as (database, topics):
            names, rows = _answer(database, topics, args.query)
            FORMATS[args.format](names, rows)
    except (NsqdError, OptionError) as error:
        raise UserError(str(error)) from None
    return 0


@contextlib.contextmanager
def connection(
    options: SourceOptions, query: str
) -> Iterator[tuple[duckdb.DuckDBPyConnection, dict[str, TopicDataset]]]:
    """Opens a database in memory, in which each topic that the query may name is a table."""
    database = duckdb.connect(config={"autoinstall_known_extensions": False})
    try:
        database.execute("SET TimeZone = 'UTC'")
        database.execute("SET python_enable_replacements = false")
        topics = {name: TopicDataset(only(options, name), text=True) for name in _named(query, topic_names(options))}
        for name, dataset in topics.items():
            database.register(name, dataset)
        yield database, topics
    finally:
        database.close()


def _named(query: str, topics: list[str]) -> list[str]:
    """Returns the topics whose name occurs in the query: making tables of all would take long if there are thousands.
    Case does not matter in names of tables, but does in names of topics: a topic that is written exactly as it is comes
    last, since the last table of a name replaces those before.
    """
    folded = query.casefold()
    return sorted((name for name in topics if name.casefold() in folded), key=lambda name: name in query)


def _answer(database: duckdb.DuckDBPyConnection, topics: dict[str, TopicDataset], query: str) -> tuple[list[str], Rows]:
    def rows() -> Rows:
        with _explained(topics):
            while found := database.fetchmany(ROWS_PER_FETCH):
                yield from found

    with _explained(topics):
        database.execute(query)
        return [column[0] for column in database.description or ()], rows()


@contextlib.contextmanager
def _explained(topics: dict[str, TopicDataset]) -> Iterator[None]:
    """Raises the error of a scan itself instead of DuckDB's error around it, which says less."""
    try:
        yield
    except duckdb.Error as error:
        for dataset in topics.values():
            if dataset.failure is not None:
                raise dataset.failure from None
        raise UserError(f"{error}{_advice(str(error))}") from None


def _advice(text: str) -> str:
    if "Malformed JSON" in text:
        return "\nnot every body is JSON: add WHERE json_valid(body)"
    if "does not exist" in text and "Table with name" in text:
        return '\ntopics are tables; a name with . or - is "quoted"'
    return ""


# -- the answer ------------------------------------------------------------------------------------------


def _write_table(names: list[str], rows: Rows) -> None:
    shown = [[_cell(value) for value in row] for row in itertools.islice(rows, TABLE_ROWS_MAX)]
    widths = [max(map(len, column)) for column in zip(names, *shown, strict=True)]
    for line in (names, ["-" * width for width in widths], *shown):
        print("  ".join(f"{value:{width}}" for value, width in zip(line, widths, strict=True)).rstrip())
    if next(rows, None) is not None:
        print(f"... more than {TABLE_ROWS_MAX} rows: add LIMIT, or take --format csv", file=sys.stderr)


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = value.isoformat(" ") if isinstance(value, datetime) else _text(value)
    return printable(text, CELL_CHARS_MAX)


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _write_csv(names: list[str], rows: Rows) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(value.isoformat() if isinstance(value, datetime) else value and _text(value) for value in row)


def _write_json(names: list[str], rows: Rows) -> None:
    encoder = msgspec.json.Encoder(enc_hook=str, decimal_format="number")
    for row in rows:
        print(encoder.encode(dict(zip(names, row, strict=True))).decode())


FORMATS: Final[dict[str, Callable[[list[str], Rows], None]]] = {
    "csv": _write_csv,
    "json": _write_json,
    "table": _write_table,
}
