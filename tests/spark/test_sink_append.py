"""Appends under tokens, without Spark around it: checks what a retry finds, and what it makes of it."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import FaultProxy, Nsqd, eventually

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from nsquark.spark.sink import append  # noqa: E402
from nsquark.spark.sink.append import Appenders, AppendFailed, Collected, choose_nsqd, pieces  # noqa: E402
from nsquark.spark.sink.options import SinkOptions  # noqa: E402
from nsquark.spark.sink.rows import Bodies  # noqa: E402

from .sink_rig import differences, http_address, log_bodies  # noqa: E402
from .source_rig import on_fixed_port  # noqa: E402

pytestmark = pytest.mark.ours

PART_BYTES = 4096
SMALL_PIECE_BYTES = 64 << 10


def column(bodies: list[bytes], topic: str = "t") -> Bodies:
    return Bodies(topic, pa.array(bodies, pa.binary()))


def shuffled(bodies: list[bytes], seed: int) -> list[bytes]:
    return random.Random(seed).sample(bodies, len(bodies))


def options(*nsqds: str, timeout: str = "60s", part_bytes: int = PART_BYTES) -> SinkOptions:
    given = {"nsqd": ",".join(nsqds), "topic": "t", "idempotent": "true", "writeTimeout": timeout}
    return SinkOptions.parse(given | {"maxRequestBytes": str(part_bytes)})


def append_once(
    settings: SinkOptions, name: str, bodies: Bodies, log_bytes_max: int = append.PIECE_LOG_BYTES_MAX
) -> None:
    with Appenders(settings, log_bytes_max) as appenders:
        appenders.append(name, bodies)


@pytest.fixture
def rows() -> list[bytes]:
    """Makes rows of about 300 KiB together, some of them twice."""
    rows = [b"%06d" % number + b"x" * random.Random(number).randrange(200) for number in range(2500)]
    return rows + rows[:50]


def test_pieces_are_the_same_for_the_same_rows_in_any_order(rows: list[bytes]) -> None:
    content, cut = pieces(column(rows), PART_BYTES, SMALL_PIECE_BYTES)
    again_content, again = pieces(column(shuffled(rows, 1)), PART_BYTES, SMALL_PIECE_BYTES)
    assert content == again_content
    assert len(cut) > 3
    assert [Counter(piece.column.to_pylist()) for piece in cut] == [Counter(p.column.to_pylist()) for p in again]
    assert Counter(body for piece in cut for body in piece.column.to_pylist()) == Counter(rows)
    for piece in cut:
        assert sum(34 + len(body) for body in piece.column.to_pylist()) <= SMALL_PIECE_BYTES


def test_rows_that_fit_into_one_part_keep_their_order() -> None:
    rows = [b"c", b"a", b"b"]
    _, cut = pieces(column(rows), PART_BYTES)
    assert [piece.column.to_pylist() for piece in cut] == [rows]


def test_other_rows_are_another_content(rows: list[bytes]) -> None:
    content, _ = pieces(column(rows), PART_BYTES)
    assert pieces(column(rows[1:]), PART_BYTES)[0] != content
    assert pieces(column([b"other!" + rows[0][6:], *rows[1:]]), PART_BYTES)[0] != content


def test_an_attempt_after_a_shuffle_goes_on_where_the_first_was_interrupted(
    nsqd: Nsqd, topic: str, rows: list[bytes]
) -> None:
    settings = options(http_address(nsqd))
    content, cut = pieces(column(rows, topic), PART_BYTES, SMALL_PIECE_BYTES)
    interrupted = append.Appender(settings.nsqd[0], settings)
    interrupted.append(append.digest(["q/0/0", content, 0]), cut[0])
    interrupted.close()
    assert 0 < len(log_bodies(nsqd, topic)) < len(rows)
    append_once(settings, "q/0/0", column(shuffled(rows, 2), topic), SMALL_PIECE_BYTES)
    assert differences([nsqd], topic, rows) == (0, 0)
    append_once(settings, "q/0/0", column(shuffled(rows, 3), topic), SMALL_PIECE_BYTES)
    assert differences([nsqd], topic, rows) == (0, 0)


def test_attempts_at_the_same_time_do_not_mix(nsqd: Nsqd, topic: str, rows: list[bytes]) -> None:
    settings = options(http_address(nsqd))
    attempts = [
        threading.Thread(
            target=append_once, args=(settings, "q/0/0", column(shuffled(rows, seed), topic), SMALL_PIECE_BYTES)
        )
        for seed in range(4)
    ]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join()
    assert differences([nsqd], topic, rows) == (0, 0)


def test_other_rows_under_the_same_name_are_not_lost(nsqd: Nsqd, topic: str) -> None:
    """A restart that finds another number of partitions gives a name other rows."""
    settings = options(http_address(nsqd))
    append_once(settings, "q/0/0", column([b"a", b"b"], topic))
    append_once(settings, "q/0/0", column([b"b", b"c"], topic))
    assert sorted(log_bodies(nsqd, topic)) == [b"a", b"b", b"b", b"c"]


def test_equal_rows_under_other_names_all_arrive(nsqd: Nsqd, topic: str) -> None:
    settings = options(http_address(nsqd))
    for name in ("q/0/0", "q/0/1", "q/1/0"):
        append_once(settings, name, column([b"same"], topic))
    assert log_bodies(nsqd, topic) == [b"same"] * 3


def test_more_than_one_append_holds_is_split(nsqd: Nsqd, topic: str) -> None:
    """The limit is nsqd's real one."""
    rows = [random.Random(number).randbytes(1_000_000) for number in range(80)]
    settings = options(http_address(nsqd), part_bytes=4 << 20)
    append_once(settings, "q/0/0", column(rows, topic))
    append_once(settings, "q/0/0", column(rows[::-1], topic))
    assert differences([nsqd], topic, rows) == (0, 0)


def test_a_cut_connection_and_a_restarted_nsqd_are_tried_again(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, topic: str, rows: list[bytes]
) -> None:
    """What was staged is gone after a restart; what was appended is known."""
    nsqd = make_nsqd()
    with FaultProxy(nsqd.http) as proxy:
        host, port = proxy.address
        settings = options(f"{host}:{port}")
        append_once(settings, "q/0/0", column(rows, topic))
        proxy.down.stalled = True
        attempt = threading.Thread(target=append_once, args=(settings, "q/1/0", column(rows, topic)))
        attempt.start()
        eventually(lambda: proxy.connection_count > 0)
        nsqd.restart(crash=True)
        proxy.target = nsqd.http
        proxy.cut()
        proxy.heal()
        attempt.join()
        append_once(settings, "q/1/0", column(shuffled(rows, 1), topic))
        append_once(settings, "q/0/0", column(shuffled(rows, 1), topic))
    assert differences([nsqd], topic, rows * 2) == (0, 0)


def test_an_nsqd_that_stays_away_is_named(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = on_fixed_port(make_nsqd())
    address = http_address(nsqd)
    nsqd.kill()
    with pytest.raises(AppendFailed, match=rf"(?s){address}.*no other may take its place"):
        append_once(options(address, timeout="300ms"), "q/0/0", column([b"a"]))


def test_a_message_above_the_limit_of_nsqd_is_refused(make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = make_nsqd("--max-msg-size=100")
    with pytest.raises(AppendFailed, match=r"MSG_TOO_BIG: message 1 has 101 bytes"):
        append_once(options(http_address(nsqd)), "q/0/0", column([b"a", b"x" * 101], topic))
    assert log_bodies(nsqd, topic) == []


def test_a_partition_that_is_too_big_says_so() -> None:
    collected = Collected(7, bytes_max=1 << 20)
    collected.add(column([b"x" * 600_000]))
    with pytest.raises(AppendFailed, match=r"partition 7 has more than 1 MiB.*repartition"):
        collected.add(column([b"x" * 600_000]))


def test_an_nsqd_is_chosen_the_same_way_every_time_and_none_is_left_out() -> None:
    addresses = ["a:1", "b:1", "c:1"]
    chosen = [choose_nsqd(addresses, f"q/0/{partition}", "t") for partition in range(60)]
    assert chosen == [choose_nsqd(addresses[::-1], f"q/0/{partition}", "t") for partition in range(60)]
    assert set(chosen) == set(addresses)
