"""Checks that a query reads each message once, whatever becomes of an nsqd's data path: put back to before a topic was
made, or many things at random.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd
from spark.sink_rig import log_bodies
from spark.source_rig import bodies, on_fixed_port, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.source.plan import DataLost
from spark.micro_batches import MakeQuery
from spark.test_source_history import put_back

pytestmark = pytest.mark.ours

TOPICS = ("one", "two")
STEPS = ("publish",) * 3 + ("read",) * 2 + ("batch", "backup", "put back", "delete", "restart", "kill", "start again")


def backup_of(daemon: Nsqd, directory: Path, *, is_ahead: bool) -> Path:
    """Copies the data path; one that `is_ahead` gives higher numbers than before when it is put back."""
    daemon.stop()
    shutil.copytree(daemon.data_path, directory)
    if is_ahead:
        (directory / "nsquark" / "sequence").write_bytes(b"damaged")
    daemon.start()
    return directory


@pytest.mark.parametrize("is_ahead", [False, True], ids=["numbers-come-again", "numbers-go-on"])
@pytest.mark.parametrize("published", [0, 20, 300], ids="published-{}".format)
def test_a_backup_from_before_a_topic_was_made_is_said_once_and_what_is_new_is_read(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, published: int, is_ahead: bool
) -> None:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    backup = backup_of(daemon, tmp_path / "backup", is_ahead=is_ahead)
    publish(daemon, "t", bodies(0, 100))
    one = start(daemon, topic="t")
    assert one.state() == bodies(0, 100)
    put_back(daemon, backup)
    if published:
        publish(daemon, "t", bodies(1000, 1000 + published))
    with pytest.raises(DataLost, match="older state"):
        one.restarted().plan()
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == bodies(1000, 1000 + published)
    once = again.restarted(failOnDataLoss="true")
    assert once.state() == [], "failOnDataLoss=false is needed once"
    publish(daemon, "t", bodies(2000, 2010))
    assert once.state() == bodies(2000, 2010)


def test_a_channel_holds_messages_whose_numbers_come_again(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery
) -> None:
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    backup = backup_of(daemon, tmp_path / "backup", is_ahead=False)
    publish(daemon, "t", bodies(0, 100))
    one = start(daemon, topic="t", channel="ch")
    assert one.state() == bodies(0, 100)
    put_back(daemon, backup)
    publish(daemon, "t", bodies(1000, 1300))
    again = one.restarted(failOnDataLoss="false")
    assert again.plan()
    assert daemon.channel("t", "ch")["depth"] == 300
    assert again.state() == bodies(1000, 1300)
    assert daemon.channel("t", "ch")["depth"] == 0


def test_a_deleted_topic_of_which_nsqd_knows_nothing_is_said_once(
    make_nsqd: Callable[..., Nsqd], start: MakeQuery
) -> None:
    daemon = on_fixed_port(make_nsqd())
    publish(daemon, "t", bodies(0, 100))
    one = start(daemon, topic="t")
    assert one.state() == bodies(0, 100)
    daemon.post("/topic/delete", topic="t")
    (daemon.data_path / "nsquark" / "deleted" / "t.t").unlink()
    with pytest.raises(DataLost, match="deleted, with an unknown number of messages"):
        one.restarted().plan()
    again = one.restarted(failOnDataLoss="false")
    assert again.state() == []
    once = again.restarted(failOnDataLoss="true")
    assert once.state() == [], "failOnDataLoss=false is needed once"
    publish(daemon, "t", bodies(200, 210))
    assert once.state() == bodies(200, 210)


@pytest.mark.parametrize("seed", range(4))
def test_each_message_that_is_there_in_the_end_was_read_once(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, start: MakeQuery, seed: int
) -> None:
    random_ = random.Random(seed)
    daemon = on_fixed_port(make_nsqd(data_path=tmp_path / "data"))
    limits = {"maxMessagesPerTrigger": random_.choice([7, 50, 1000])}
    one = start(daemon, topic=",".join(TOPICS), channel="ch", failOnDataLoss="false", **limits)
    published = 0
    read: Counter[bytes] = Counter()
    backups: list[Path] = []
    taken: list[str] = []
    for _ in range(15):
        step = random_.choice(STEPS)
        taken.append(step)
        if step == "publish":
            count = random_.choice([1, 3, 40, 300])
            publish(daemon, random_.choice(TOPICS), bodies(published, published + count))
            published += count
        elif step == "read":
            read.update(one.state())
        elif step == "batch":
            read.update(one.next())
        elif step == "backup":
            place = tmp_path / f"backup-{len(backups)}"
            backups.append(backup_of(daemon, place, is_ahead=random_.random() < 0.3))
        elif step == "put back" and backups:
            put_back(daemon, random_.choice(backups))
        elif step == "delete":
            daemon.post("/topic/delete", topic=random_.choice(TOPICS))
        elif step in ("restart", "kill"):
            daemon.restart(crash=step == "kill")
        if step in ("backup", "put back", "restart", "kill", "start again"):
            one = one.restarted()  # at once, as an nsqd that is away is left out for a while
    read.update(one.state())
    assert one.restarted(failOnDataLoss="true").state() == [], taken
    there = Counter(body for topic in TOPICS for body in log_bodies(daemon, topic))
    assert (there - read, read - Counter(set(read))) == (Counter(), Counter()), f"missing or doubled after {taken}"
