"""Checks `nsquark.read_arrow`: what is in topics is read without Spark, and no more of it than was asked for."""

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'nsquark[sql]'")
import pyarrow.compute as pc  # noqa: E402

import nsquark  # noqa: E402
from harness import Nsqd, eventually, mpub_messages  # noqa: E402
from nsquark.query.arrow import source_options  # noqa: E402
from nsquark.query.bounds import INT64_MAX, RowFilter  # noqa: E402
from nsquark.query.dataset import TopicDataset  # noqa: E402
from nsquark.spark.endpoint import NsqdError, Unreachable  # noqa: E402
from nsquark.spark.options import OptionError  # noqa: E402
from nsquark.spark.source.range_rows import SCHEMA  # noqa: E402

pytestmark = pytest.mark.ours

seq, timestamp, on_nsqd = pc.field("seq"), pc.field("timestamp"), pc.field("nsqd")


def address(daemon: Nsqd) -> str:
    return "{}:{}".format(*daemon.http)


def publish(daemon: Nsqd, topic: str, *messages: bytes) -> None:
    assert daemon.post("/mpub", mpub_messages(messages), topic=topic, binary="true").status == 200


def numbers(low: int, high: int) -> list[bytes]:
    return [b"%06d" % number for number in range(low, high)]


def dataset(daemon: Nsqd, topic: str = "t") -> TopicDataset:
    return TopicDataset(source_options(topic, address(daemon), ()))


def test_all_messages_of_several_nsqds_come_in_the_order_of_their_logs(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    first = make_nsqd("--max-bytes-per-file=20000", "--node-id=1")
    second = make_nsqd("--node-id=2", data_path=tmp_path / "second")
    publish(first, "t", *numbers(0, 3000))
    publish(second, "t", *numbers(3000, 3500))
    table = nsquark.read_arrow("t", nsqd=[address(first), address(second)])
    assert table.schema == SCHEMA
    assert sorted(table["body"].to_pylist()) == numbers(0, 3500)
    assert len(set(table["nsqd"].to_pylist())) == 2
    assert len(set(table["id"].to_pylist())) == 3500
    for nsqd_id in set(table["nsqd"].to_pylist()):
        seqs = table.filter(on_nsqd == nsqd_id)["seq"].to_pylist()
        assert seqs == sorted(seqs)
    assert nsquark.read_arrow("t", nsqd=address(first)).num_rows == 3000


def test_columns_are_chosen_and_bodies_may_be_text(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    publish(nsqd, "t", "grün".encode(), b"\xff\x00")
    assert nsquark.read_arrow("t", nsqd=address(nsqd), columns=["seq"]).schema.names == ["seq"]
    table = nsquark.read_arrow("t", nsqd=address(nsqd), text=True)
    assert table.schema.names == ["topic", "nsqd", "seq", "id", "timestamp", "body", "raw"]
    assert table["body"].to_pylist() == ["grün", "\ufffd\x00"]
    assert table["raw"].to_pylist() == ["grün".encode(), b"\xff\x00"]
    with pytest.raises(OptionError, match="there is no column 'attempts': take any of topic, nsqd, seq"):
        nsquark.read_arrow("t", nsqd=address(nsqd), columns=["attempts"])


def test_a_filter_on_seq_time_or_nsqd_decides_what_is_fetched(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    publish(nsqd, "t", *numbers(0, 1000))
    between = datetime.now(UTC)
    publish(nsqd, "t", *numbers(1000, 1100))
    seqs = nsquark.read_arrow("t", nsqd=address(nsqd))["seq"].to_pylist()
    later = pa.scalar(between, pa.timestamp("us", "UTC"))
    for where, rows, fetched in (
        (seq >= seqs[1050], 50, 50),
        ((seq > seqs[10]) & (seq < seqs[20]), 9, 10),
        (seq.isin([seqs[7], seqs[9]]), 2, 3),
        (timestamp >= later, 100, 100),
        (timestamp < later, 1000, 1000),
        ((timestamp >= later) & (timestamp < later), 0, 0),
        (on_nsqd == "another", 0, 0),
        (pc.field("body") == b"000007", 1, 1100),
        ((seq < seqs[100]) & (pc.field("body") == b"000007"), 1, 100),
    ):
        scanned = dataset(nsqd)
        assert scanned.scanner(filter=where).to_table().num_rows == rows, where
        assert fetched <= scanned.rows_read <= fetched + 1, where
    assert nsquark.read_arrow("t", nsqd=address(nsqd), since=between, where=seq < seqs[1010]).num_rows == 10
    assert nsquark.read_arrow("t", nsqd=address(nsqd), until=between, columns=["body"]).num_rows == 1000
    assert nsquark.read_arrow("t", nsqd=address(nsqd), since=between + timedelta(hours=1)).num_rows == 0


def test_a_message_that_was_deferred_is_found_by_its_time(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()

    def logged(topic: str, **bounds: Any) -> list[bytes]:
        found: list[bytes] = nsquark.read_arrow(topic, nsqd=address(nsqd), **bounds)["body"].to_pylist()
        return found

    # Whoever stands still for longer than the message is deferred publishes the last one too late, and tries again.
    for topic in (f"t{number}" for number in range(20)):
        publish(nsqd, topic, b"first")
        assert nsqd.post("/pub", b"deferred", topic=topic, defer=300).status == 200
        between = datetime.now(UTC)
        publish(nsqd, topic, b"last")
        eventually(lambda topic=topic: len(logged(topic)) == 3)
        if logged(topic) != [b"first", b"deferred", b"last"]:
            break
    assert logged(topic) == [b"first", b"last", b"deferred"]
    assert logged(topic, until=between) == [b"first", b"deferred"]
    assert logged(topic, since=between) == [b"last"]


def test_bounds_are_those_of_the_filter_for_each_log() -> None:
    where = ((on_nsqd == "a") & (seq >= 5)) | ((on_nsqd == "b") & (seq < 9) & (pc.field("topic") == "t"))
    assert RowFilter(where, SCHEMA).bounds("t", "a") == (5, INT64_MAX, 0, INT64_MAX)
    assert RowFilter(where, SCHEMA).bounds("t", "b") == (0, 9, 0, INT64_MAX)
    assert RowFilter(where, SCHEMA).bounds("u", "b") is None
    assert RowFilter(where, SCHEMA).needs("seq") and not RowFilter(where, SCHEMA).needs("body")


def test_what_cannot_be_read_is_an_error(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    nsqd, gone = make_nsqd(), make_nsqd(data_path=tmp_path / "second")
    gone.keep_ports()  # so that no other nsqd listens there when it is gone
    publish(nsqd, "t", b"m")
    with pytest.raises(NsqdError, match="there is no topic nix"):
        nsquark.read_arrow("nix", nsqd=address(nsqd))
    with pytest.raises(OptionError, match="write where the messages are"):
        nsquark.read_arrow("t")
    with pytest.raises(OptionError, match="channel is for streams"):
        nsquark.read_arrow("t", nsqd=address(nsqd), options={"channel": "c"})
    with pytest.raises(OptionError, match="has no zone"):
        nsquark.read_arrow("t", nsqd=address(nsqd), since=datetime(2026, 1, 1))
    gone.stop()
    with pytest.raises(Unreachable, match="a batch reads what all nsqds have"):
        nsquark.read_arrow("t", nsqd=[address(nsqd), address(gone)])


def test_a_failure_is_that_of_the_last_scan(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd()
    nsqd.keep_ports()
    publish(nsqd, "t", *numbers(0, 10))
    scanned = TopicDataset(source_options("t", address(nsqd), (), {"readTimeout": "3s"}))
    scan = scanned.scanner()
    nsqd.stop()
    with pytest.raises(Unreachable):
        scan.to_table()
    assert isinstance(scanned.failure, Unreachable)
    nsqd.start()

    def is_read() -> bool:
        try:
            return bool(scanned.scanner().to_table().num_rows == 10)
        except Unreachable:  # somebody stood still for the three seconds
            return False

    eventually(is_read)
    assert scanned.failure is None


def test_who_stops_early_leaves_no_reader_behind(make_nsqd: Callable[..., Nsqd]) -> None:
    """A part has more batches than may wait, so somebody still reads when it stops."""
    nsqd = make_nsqd()
    for _ in range(30):
        publish(nsqd, "t", *[b"x"] * 10_000)
    before = set(threading.enumerate())
    reader = TopicDataset(source_options("t", address(nsqd), (), {})).scanner().to_reader()
    assert reader.read_next_batch().num_rows > 0
    assert not set(threading.enumerate()) <= before
    del reader
    eventually(lambda: set(threading.enumerate()) <= before)


def test_polars_and_pandas(make_nsqd: Callable[..., Nsqd]) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    nsqd = make_nsqd()
    publish(nsqd, "t", b'{"n": 1}', b'{"n": 2}')
    frame = nsquark.read_polars("t", nsqd=address(nsqd), columns=["body"], text=True)
    assert frame["body"].str.json_path_match("$.n").cast(polars.Int64).to_list() == [1, 2]
    assert list(nsquark.read_arrow("t", nsqd=address(nsqd)).to_pandas()["body"]) == [b'{"n": 1}', b'{"n": 2}']


def test_neither_spark_nor_duckdb_is_loaded_for_it() -> None:
    script = (
        "import sys, nsquark; nsquark.read_arrow; nsquark.read_polars; "
        "print([name for name in ('pyspark', 'duckdb', 'polars') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert result.stdout == "[]\n"
