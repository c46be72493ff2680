"""Checks that docs/spark.md tells the options that there are, with their defaults, and quotes errors that the source
has.
"""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.options import (
    BATCH_ONLY,
    CHANNEL_TTL_S_MIN,
    NAMES,
    PARTITIONS_MAX,
    STREAM_ONLY,
    SourceOptions,
)
from nsquark.spark.sink.options import OPTION_NAMES, REQUEST_BYTES_MIN, TOKEN_CHARS_MAX, SinkOptions
from nsquark.spark.sink.writer import REQUEST_MESSAGES_MAX

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text()
SOURCE = ROOT / "src" / "nsquark" / "spark"
GOOD = {"nsqd": "127.0.0.1:4151", "topic": "orders"}


def table(below: str, header: str) -> list[list[str]]:
    """Reads the rows of the first table with this header below a heading."""
    part = PAGE[PAGE.index(f"\n{below}\n") :]
    lines = part[part.index(f"\n{header}\n") + 1 :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


READING = table("## Options for reading", "| option | | default |")
WRITING = table("### Options", "| option | default | |")


def test_the_options_for_reading_are_those_of_the_code() -> None:
    told = [name for row in READING for name in names_in(row[0])]
    assert sorted(told) == sorted(NAMES)
    for row in READING:
        for name in names_in(row[0]):
            assert ("stream only" in row[1]) == (name in STREAM_ONLY), name
            assert ("batch only" in row[1]) == (name in BATCH_ONLY), name


def test_the_defaults_for_reading_are_those_of_the_code() -> None:
    told = {name: row[2].strip("` ") for row in READING for name in names_in(row[0])}
    options = SourceOptions.parse(GOOD)
    assert {name: default for name, default in told.items() if default} == {
        "startingOffsets": "batch: `earliest`; stream: `latest",
        "endingOffsets": options.ending.kind,
        "channel": "none",
        "channelTtl": "never",
        "maxMessagesPerTrigger": "all",
        "maxBytesPerTrigger": "all",
        "minMessagesPerTrigger": "1",
        "maxTriggerDelay": f"{options.trigger_delay_s / 60:.0f}m",
        "minPartitions": str(options.partitions_min),
        "headers": str(options.headers).lower(),
        "failOnDataLoss": str(options.fail_on_data_loss).lower(),
        "onForeignNsqd": "skip" if options.skips_foreign_nsqds else "fail",
        "pushFilters": str(options.pushes_filters).lower(),
        "readTimeout": f"{options.read_timeout_s:.0f}s",
        "tlsRootCaFile": "the system's",
        "tlsInsecureSkipVerify": str(options.access.tls.skip_verify).lower(),
    }
    assert options.starting is None, "earliest for a batch and latest for a stream"
    assert options.channel is None and not options.channel_ttl_s
    assert (options.messages_max, options.bytes_max, options.messages_min) == (None, None, None)
    meaning = {name: row[1] for row in READING for name in names_in(row[0])}
    assert f"{PARTITIONS_MAX} at most" in meaning["minPartitions"]
    assert f"at least `{CHANNEL_TTL_S_MIN:.0f}s`" in meaning["channelTtl"]


def test_the_options_for_writing_are_those_of_the_code() -> None:
    told = {name: row[1].strip("` ") for row in WRITING for name in names_in(row[0])}
    assert set(told) == OPTION_NAMES
    options = SinkOptions.parse(GOOD)
    assert {name: default for name, default in told.items() if default} == {
        "idempotent": str(options.idempotent).lower(),
        "maxMessageBytes": str(options.message_bytes_max),
        "maxRequestBytes": str(options.request_bytes_max),
        "writeTimeout": f"{options.write_timeout_s:.0f}s",
    }
    meaning = {name: row[2] for row in WRITING for name in names_in(row[0])}
    assert f"at least {REQUEST_BYTES_MIN}" in meaning["maxRequestBytes"]
    assert f"at most {REQUEST_MESSAGES_MAX:,} messages" in meaning["maxRequestBytes"]
    assert f"1 to {TOKEN_CHARS_MAX} characters" in meaning["token"]


def sentences() -> list[str]:
    """Collects every text in the code of the connector, with … where a value stands."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_errors_that_are_explained_are_those_of_the_code() -> None:
    rows = table("## Operations", "| error | do |")
    quoted = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row[0]) if phrase not in NAMES]
    assert len(quoted) > 20
    texts = sentences()
    for phrase in quoted:
        form = re.compile(".*".join(re.escape(piece.strip()) for piece in re.split(r"…|\bN\b", phrase)))
        assert any(form.search(text) for text in texts), f"no error says {phrase!r}"
    advised = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row[1]) if name[0].islower()}
    assert {"lostNsqds", "failOnDataLoss", "onForeignNsqd", "tlsRootCaFile"} <= advised
    assert advised - set(NAMES) <= {"nsq_to_nsq"}, "the advice names options that there are"
