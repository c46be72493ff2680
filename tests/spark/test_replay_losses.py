"""Checks that a replay which goes on says when messages that it had yet to publish are gone."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker.logs import read_all
from harness import Nsqd, eventually
from spark.source_rig import address, bodies, info, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.base.errors import UserError
from nsquark.spark.jobs import replay
from nsquark.spark.jobs.replay import ReplayDone
from nsquark.spark.jobs.replay_state import STATE, ReplayState
from nsquark.spark.jobs.session import read_messages
from nsquark.spark.sink.options import SinkOptions
from spark.jobs_driver import replay_arguments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours

SMALL_SEGMENTS = "--max-bytes-per-file=20000"


def go_on(spark: "SparkSession", nsqd: Nsqd, directory: Path, pieces: int | None = None, *options: str) -> ReplayDone:
    """Goes on with the replay of topic `t`, and stops after so many pieces of ten messages."""
    args = replay_arguments(address(nsqd), "t", directory, rate=100)
    args.option = list(options)
    sink = SinkOptions.parse(replay._target(args))
    asked = 0

    def is_stopped() -> bool:
        nonlocal asked
        asked += 1
        return pieces is not None and asked > pieces

    with ReplayState.opened(args.checkpoint, replay.identity(args, sink), *replay._range(args)) as state:
        args.since, args.until = state.since, state.until
        fails = replay._fails_on_loss(args)
        return replay.publish(read_messages(spark, args), sink, 100, state, is_stopped, fails_on_loss=fails)


def holding_the_last(nsqd: Nsqd) -> Nsqd:
    """Publishes a thousand messages. The channel `drain` holds all of them, `hold` the last hundred."""
    assert nsqd.post("/topic/create", topic="t").status == 200
    for low in range(0, 1000, 50):
        if low in (0, 900):
            assert nsqd.post("/channel/create", topic="t", channel="hold" if low else "drain").status == 200
        publish(nsqd, "t", bodies(low, low + 50))
    return nsqd


def remove_what_is_not_held(nsqd: Nsqd) -> int:
    """Lets nsqd remove files; returns how many messages are left."""
    assert nsqd.post("/channel/empty", topic="t", channel="drain").status == 200
    return eventually(lambda: (left := int(info(nsqd, "t")["count"])) < 500 and left)


def replayed(nsqd: Nsqd) -> list[bytes]:
    return [record.body for record in read_all(nsqd, "t.again")]


def test_messages_that_retention_removed_before_they_were_replayed_are_an_error(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    nsqd = holding_the_last(make_nsqd(SMALL_SEGMENTS))
    assert go_on(spark, nsqd, tmp_path, 5).is_stopped
    assert replayed(nsqd) == bodies(0, 50)
    kept = remove_what_is_not_held(nsqd)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{950 - kept} messages that were left to publish .*failOnDataLoss=false"):
            go_on(spark, nsqd, tmp_path)
    assert replayed(nsqd) == bodies(0, 50), "nothing is published before it is known what is missing"
    done = go_on(spark, nsqd, tmp_path, None, "failOnDataLoss=false")
    assert (done.before, done.messages) == (50, kept)
    assert replayed(nsqd) == bodies(0, 50) + bodies(1000 - kept, 1000)


def test_messages_that_retention_removed_after_they_were_replayed_are_no_loss(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    nsqd = holding_the_last(make_nsqd(SMALL_SEGMENTS))
    assert go_on(spark, nsqd, tmp_path, 40).is_stopped
    assert go_on(spark, nsqd, tmp_path, 55).is_stopped
    assert 50 <= remove_what_is_not_held(nsqd) < 950
    assert go_on(spark, nsqd, tmp_path).before == 950
    assert replayed(nsqd) == bodies(0, 1000)


@pytest.mark.parametrize("damage", [b'{"id":"\xff"}', b"{", b"[" * 100_000])
def test_a_damaged_state_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / STATE).write_bytes(damage)
    with pytest.raises(UserError, match=r"replay\.json cannot be read .*: name another --checkpoint"):
        ReplayState.opened(tmp_path, {}, None, datetime.now(UTC)).__enter__()
