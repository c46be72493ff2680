"""Infers the schema of a topic's JSON from a sample of messages, for `nsquark schema` and `nsquark.infer_schema`."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from nsquark.base.errors import UserError
from nsquark.base.printable import printable
from nsquark.query.arguments import add_nsq_arguments, all_topics, only
from nsquark.query.arrow import source_options
from nsquark.query.dataset import read_batches
from nsquark.query.json_types import Seen, infer, misfits
from nsquark.spark.endpoint import NsqdError
from nsquark.spark.nsqd_http import RangeNsqd
from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.plan import Planner, Ranges
from nsquark.spark.source.range_rows import SCHEMA
from nsquark.wire.documents import decode_json

SAMPLE_DEFAULT: Final = 10_000
REASONS_TOLD_MAX: Final = 5
WIDER: Final = 8
"""A range with too few messages is made this many times wider: sequence numbers have gaps."""


@dataclass(frozen=True)
class TopicSchema:
    """Holds the schema of a topic's JSON, as Spark's DDL, and how well it fits the sample that it was inferred from."""

    ddl: str
    """This is the schema for `from_json` and `.schema(...)`."""
    rows: int
    """The sample has this many messages."""
    fitting: int
    """This many messages of the sample fit the schema."""
    misfits: Mapping[str, int]
    """These are the reasons why messages do not fit, each with how many do not."""

    @property
    def share(self) -> float:
        """Returns the share of the sample that fits; 1.0 is all of it."""
        return self.fitting / self.rows if self.rows else 0.0


def infer_schema(
    topic: str,
    *,
    nsqd: str | Sequence[str] = (),
    lookupd: str | Sequence[str] = (),
    sample: int = SAMPLE_DEFAULT,
    options: Mapping[str, str] | None = None,
) -> TopicSchema:
    """Infers the schema of the JSON in a topic from its newest messages.

    A body does not fit if it is no JSON, or has a value of another kind than nearly all bodies have at its place.

    topic: the name of the topic.
    nsqd: HTTP addresses of nsqds, like 127.0.0.1:4151.
    lookupd: HTTP addresses of nsqlookupds, instead of `nsqd`.
    sample: how many messages of each nsqd are looked at, at least.
    options: further options of the Spark source, by name.
    """
    return schema_of(source_options(topic, nsqd, lookupd, options), sample)


def schema_of(options: SourceOptions, sample: int) -> TopicSchema:
    parts = plan_batch(options, lambda ranges, nsqds: _newest(options, ranges, nsqds, sample))
    batches = read_batches(options, parts, pa.schema([SCHEMA.field("body")]))
    bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
    seen = Seen()
    documents = list(_documents(bodies))
    for document in documents:
        if document is not _NO_JSON:
            seen.add(document)
    kind = infer(seen)
    reasons: Counter[str] = Counter()
    fitting = 0
    for document in documents:
        why = "the body is no JSON" if document is _NO_JSON else next(misfits(document, kind), None)
        reasons.update([why] if why else [])
        fitting += why is None
    return TopicSchema(kind.columns(), len(documents), fitting, dict(reasons.most_common()))


_NO_JSON: Final = object()


def _documents(bodies: list[bytes]) -> Iterator[Any]:
    for body in bodies:
        try:
            yield decode_json(body, Any)
        except (ValueError, msgspec.MsgspecError):
            yield _NO_JSON


def _newest(options: SourceOptions, ranges: Ranges, nsqds: Mapping[str, RangeNsqd], count: int) -> Ranges:
    """Finds for each log a range at its end that has `count` messages, or a few times more, or else the whole log."""
    found = {}
    for key, stored in ranges.items():
        width = count
        while (low := max(stored.high - width, stored.low)) > stored.low:
            if Planner(options).plans({key: stored._replace(low=low)}, nsqds)[key].count >= count:
                break
            width *= WIDER
        found[key] = stored._replace(low=low)
    return found


# -- the command -----------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", help="a topic whose messages are JSON")
    parser.add_argument(
        "--sample",
        type=_count,
        default=SAMPLE_DEFAULT,
        metavar="N",
        help=f"infer from the newest N messages of each nsqd (default: {SAMPLE_DEFAULT})",
    )
    add_nsq_arguments(parser)
    parser.epilog = "The schema is on stdout, for from_json; how well it fits, and why some rows do not, on stderr."


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of messages, 1 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    try:
        schema = schema_of(only(all_topics(args), args.topic), args.sample)
    except (NsqdError, OptionError) as error:
        raise UserError(str(error)) from None
    if not schema.rows:
        raise UserError(f"topic {args.topic} has no messages to infer a schema from")
    print(printable(schema.ddl, len(schema.ddl)))
    print(f"fits {schema.fitting} of {schema.rows} messages ({schema.share:.1%})", file=sys.stderr)
    for reason, count in list(schema.misfits.items())[:REASONS_TOLD_MAX]:
        print(f"{count}: {printable(reason)}", file=sys.stderr)
    return 0
