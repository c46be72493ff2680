"""Checks a file of the log that cannot be read for a while: no message is left out, and the error tells why."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from spark.source_rig import SMALL_FILES, address, bodies, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.endpoint import Refused, Unreachable
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.batch import plan_batch
from spark.micro_batches import MakeQuery

pytestmark = pytest.mark.ours

FILES_OPEN_MAX = 16
"""nsqd opens this many files of a range before it answers."""
MESSAGES = 12_000


def files_of(daemon: Nsqd, topic: str) -> list[Path]:
    return sorted(daemon.data_path.glob(f"**/t.{topic}/*.log"))


@pytest.mark.parametrize("place", [0, FILES_OPEN_MAX + 1], ids=["refused", "cut"])
@pytest.mark.parametrize("topics", ["one", "one,two"], ids=["alone", "packed"])
def test_a_file_that_cannot_be_read_leaves_no_message_out(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery, topics: str, place: int
) -> None:
    daemon = make_nsqd(*SMALL_FILES)
    for topic in topics.split(","):
        for low in range(0, MESSAGES, 100):
            publish(daemon, topic, [b"%s %s" % (topic.encode(), body) for body in bodies(low, low + 100)])
    file = files_of(daemon, "one")[place]
    away = file.with_suffix(".away")
    file.rename(away)
    one = start(daemon, topic=topics, startingOffsets="earliest", readTimeout="2s")
    assert one.plan()

    def says_why() -> bool:
        """Tells whether the error tells why: if somebody stood still for the two seconds, it says that instead."""
        with pytest.raises(Unreachable, match=r"did not give topic \w+ from \d+ on for 2 s ") as raised:
            one.run()
        return re.search(r"topic one .*503 DISK_ERROR.*No such file", str(raised.value)) is not None

    eventually(says_why)

    patient = one.restarted(readTimeout="60s")
    patient.planned = one.planned
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.extend(patient.run()))
    reading.start()
    eventually(lambda: "/log/read" in daemon.log)
    away.rename(file)
    reading.join()
    assert found == sorted(
        b"%s %s" % (topic.encode(), body) for topic in topics.split(",") for body in bodies(0, MESSAGES)
    )


def test_a_topic_that_cannot_be_opened_is_not_left_out(make_nsqd: Callable[..., Nsqd], start: MakeQuery) -> None:
    daemon = make_nsqd()
    for topic in ("orders.a", "orders.b", "other"):
        publish(daemon, topic, bodies(0, 10))
    obstacle = files_of(daemon, "orders.a")[0].with_name("removed")
    daemon.stop()
    obstacle.mkdir()
    daemon.start()
    reason = "503 DISK_ERROR: the files of topic orders.a could not be opened"
    with pytest.raises(Refused, match=reason):
        plan_batch(SourceOptions.parse({"nsqd": address(daemon), "topicPattern": r"orders\..*"}))
    with pytest.raises(Refused, match=reason):
        plan_batch(SourceOptions.parse({"nsqd": address(daemon), "topic": "orders.a,orders.b"}))
    with pytest.raises(Refused, match=reason):
        start(daemon, topicPattern=r"orders\..*", startingOffsets="earliest").plan()
    assert plan_batch(SourceOptions.parse({"nsqd": address(daemon), "topic": "other"}))
    obstacle.rmdir()
    query = start(daemon, topicPattern=r"orders\..*", startingOffsets="earliest")
    eventually(lambda: daemon.get("/log/info", topic="orders.a").status == 200)
    assert "unopened" not in daemon.get("/log/info").json()
    assert query.plan()
    assert query.run() == sorted(2 * bodies(0, 10))
