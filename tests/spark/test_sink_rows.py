"""Checks what the sink makes of options, columns and rows, before Spark or an nsqd comes into it."""

from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark.sql import types  # noqa: E402

from nsquark.spark.options import OptionError  # noqa: E402
from nsquark.spark.sink.options import SinkOptions  # noqa: E402
from nsquark.spark.sink.rows import BadRow, RowReader, check_schema  # noqa: E402

MESSAGE_BYTES_MAX = 1000


def schema(**columns: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, kind) for name, kind in columns.items()])


TEXT, BYTES, NUMBER = types.StringType(), types.BinaryType(), types.IntegerType()


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"text": TEXT}, "the nsq sink writes the column body"),
        ({"body": TEXT, "defer": NUMBER}, "the nsq sink has no column defer: select only body, topic, defer_ms"),
        ({"body": NUMBER}, "column body has type int: cast it to string or binary"),
        ({"body": TEXT, "topic": NUMBER}, "column topic has type int: cast it to string"),
        ({"body": TEXT, "defer_ms": TEXT}, "column defer_ms has type string: cast it to"),
        ({"body": TEXT}, "no topic to write to: give the option topic, or a column topic"),
    ],
)
def test_columns_that_cannot_be_written_are_refused(columns: dict[str, types.DataType], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_schema(schema(**columns), None, idempotent=False)


def test_columns_that_can_be_written() -> None:
    check_schema(schema(body=TEXT), "t", idempotent=False)
    check_schema(schema(Body=BYTES, Topic=TEXT, defer_ms=types.LongType()), None, idempotent=False)
    check_schema(
        schema(topic=TEXT, nsqd=TEXT, seq=NUMBER, id=TEXT, timestamp=NUMBER, body=BYTES), None, idempotent=True
    )


def test_once_cannot_defer() -> None:
    with pytest.raises(ValueError, match="idempotent=true cannot defer messages"):
        check_schema(schema(body=TEXT, defer_ms=NUMBER), "t", idempotent=True)


def batch(**columns: Any) -> Any:
    return pa.record_batch(columns)


@pytest.mark.parametrize(
    ("topic", "body", "defer_ms", "sentence"),
    [
        ("t", None, 0, "its body is null: filter"),
        ("t", "", 0, "its body is empty, and NSQ has no empty messages"),
        ("t", "x" * 1001, 0, "its body has 1001 bytes, more than 1000"),
        (None, "a", 0, "its topic is null: fill it in"),
        ("no topic!", "a", 0, "'no topic!' is not a topic"),
        ("t", "a", -1, "its defer_ms is negative"),
    ],
)
def test_a_bad_row_is_named_by_its_number(topic: str, body: str, defer_ms: int, sentence: str) -> None:
    reader = RowReader(3, None, MESSAGE_BYTES_MAX)
    reader.read(batch(topic=["t"] * 5, body=["x"] * 5))
    with pytest.raises(BadRow, match=f"row 6 of partition 3 cannot be written: {sentence}"):
        reader.read(batch(topic=["t", topic, "t"], body=["a", body, "b"], defer_ms=[0, defer_ms, 1]))


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
@pytest.mark.parametrize("bytes_max", [10, 1 << 20])
def test_rows_become_messages_by_topic(kind: Any, bytes_max: int) -> None:
    """The rows come from a slice of a batch, whose buffers have other rows too."""
    bodies = [f"{number}-\u00e4" for number in range(50)]
    raw = bodies if "string" in str(kind) else [body.encode() for body in bodies]
    whole = batch(topic=["c", "a", "b", "a", "c"] * 10, body=pa.array(raw, kind))
    found: dict[str, list[bytes]] = {}
    reader = RowReader(0, None, MESSAGE_BYTES_MAX)
    groups, deferred = reader.read(whole.slice(5, 40))
    for group in groups:
        for messages in group.mpub_bodies(bytes_max, 7):
            assert messages.count <= 7
            found.setdefault(group.topic, []).extend(unpacked(messages.data))
    wanted: dict[str, list[bytes]] = {}
    for topic, body in zip(["c", "a", "b", "a", "c"] * 8, bodies[5:45], strict=True):
        wanted.setdefault(topic, []).append(body.encode())
    assert found == wanted
    assert deferred == []
    assert reader.row == 40


def unpacked(data: bytes | bytearray) -> list[bytes]:
    count, pos, found = int.from_bytes(data[:4], "big"), 4, []
    for _ in range(count):
        size = int.from_bytes(data[pos : pos + 4], "big")
        found.append(bytes(data[pos + 4 : pos + 4 + size]))
        pos += 4 + size
    assert pos == len(data)
    return found


def test_an_empty_batch_has_no_messages() -> None:
    empty = batch(topic=pa.array([], pa.string()), body=pa.array([], pa.string()))
    assert RowReader(0, None, MESSAGE_BYTES_MAX).read(empty) == ([], [])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nsqd": ""}, "nsqd is empty"),
        ({"nsqd": "127.0.0.1"}, "no address: write host:port"),
        ({"lookupd": "127.0.0.1:4161"}, "not both"),
        ({"topic": "a b"}, "no name of a topic"),
        ({"topic": "a,b"}, "no name of a topic: write one name"),
        ({"startingOffsets": "earliest"}, "startingOffsets is for reading: leave it out of a write"),
        ({"token": "x"}, "token means nothing without idempotent=true"),
        ({"idempotent": "yes"}, "write true or false"),
        ({"idempotent": "true", "token": ""}, "token has 0 characters"),
        ({"idempotent": "true", "token": "x", "topic": "t#ephemeral"}, "ephemeral, and has no log to append to"),
        ({"maxMessageBytes": "0"}, "maxMessageBytes='0': write a whole number"),
        ({"maxRequestBytes": "1 MB"}, "maxRequestBytes='1 MB': write a whole number"),
        ({"writeTimeout": "60"}, "writeTimeout='60': write a time with its unit"),
        ({"tlsCertFile": "/x"}, "tlsCertFile and tlsKeyFile belong together"),
    ],
)
def test_options_are_checked(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        SinkOptions.parse({"nsqd": "127.0.0.1:4151", "topic": "t"} | options)


def test_once_needs_a_fixed_list_of_nsqds() -> None:
    with pytest.raises(OptionError, match="write nsqd instead of lookupd"):
        SinkOptions.parse({"lookupd": "127.0.0.1:4161", "topic": "t", "idempotent": "true"})
    with pytest.raises(OptionError, match="write where to publish: either nsqd"):
        SinkOptions.parse({"topic": "t"})
