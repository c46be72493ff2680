"""Jobs whose machine loses power go on from what was surely on disk, with nothing lost and nothing doubled."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.logs import read_all
from faults.crash_states import MODELS, Disk
from faults.shim import Shim
from harness import Nsqd

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

import pyarrow.parquet

from nsquark.spark.jobs.layout import SPARK_LOG
from nsquark.spark.jobs.sink_log import live_files
from spark.replay_pieces import bodies, go_on
from spark.source_rig import address
from spark.test_job_compact import compaction, read_files, read_without_list

pytestmark = pytest.mark.ours

REPLAY = Path(__file__).with_name("replay_pieces.py")
COMPACT = Path(__file__).with_name("compact_killed.py")
NEVER_KILLED = 0


class Machine:
    """Has a disk on which a program works, and does what power cuts may do to it."""

    def __init__(self, directory: Path) -> None:
        """Takes what is in `root` by now as being on the disk."""
        self.root = directory / "root"
        self.root.mkdir(exist_ok=True)
        self._disk = Disk(self.root)
        self._shim = Shim(directory, self.root, record=True)

    def run(self, program: Path, *arguments: str | Path | int) -> None:
        command = [sys.executable, str(program), *map(str, arguments)]
        subprocess.run(command, env=os.environ | self._shim.environment, check=True)

    def cut_power(self, model: str) -> None:
        """Leaves in `root` what a cut at the end may leave, by a model of crash_states.py."""
        self._disk.apply(self._shim.trace())
        self._rebuild(model, 0)

    def cuts(self, model: str) -> Iterator[int]:
        """Leaves in `root` what a cut after each call may leave, one after another."""
        for number, call in enumerate(list(self._shim.trace())):
            self._disk.apply([call])
            self._rebuild(model, number)
            yield number

    def _rebuild(self, model: str, seed: int) -> None:
        shutil.rmtree(self.root)
        self._disk.rebuild(self.root, model, random.Random(seed))


@pytest.mark.parametrize("checkpoint", ["", "new/checkpoint"], ids=["old_directory", "new_directory"])
@pytest.mark.parametrize("model", MODELS)
def test_a_replay_goes_on_at_another_rate_after_a_power_cut(
    nsqd: Nsqd, topic: str, tmp_path: Path, model: str, checkpoint: str
) -> None:
    machine = Machine(tmp_path)
    machine.run(REPLAY, address(nsqd), topic, machine.root / checkpoint, 4, 40)
    machine.cut_power(model)
    go_on(address(nsqd), topic, machine.root / checkpoint, 7, 60)
    assert [record.body for record in read_all(nsqd, topic)] == bodies(60), "each once, in order"


def make_archive(directory: Path, files: int) -> Counter[bytes]:
    """Makes an archive whose files have a message each, as one batch of Spark leaves it; returns its messages."""
    (directory / SPARK_LOG).mkdir(parents=True)
    (directory / "topic=t").mkdir()
    for number in range(files):
        path = directory / "topic=t" / f"part-{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"body": [b"%d" % number]}), path)
    lines = [
        json.dumps({"path": path.as_uri(), "size": path.stat().st_size, "modificationTime": 1, "action": "add"})
        for path in sorted((directory / "topic=t").iterdir())
    ]
    (directory / SPARK_LOG / "0").write_text("\n".join(["v1", *lines]))
    return read_without_list(directory)


@pytest.mark.parametrize("model", MODELS)
def test_an_archive_has_each_message_once_wherever_the_power_is_cut(tmp_path: Path, model: str) -> None:
    lake = tmp_path / "root" / "lake"
    messages = make_archive(lake, files=6)
    machine = Machine(tmp_path)
    machine.run(COMPACT, lake, NEVER_KILLED)
    for number in machine.cuts(model):
        assert read_files(live_files(lake)) == messages, f"cut after call {number}"
        compaction(lake).run()
        assert read_files(live_files(lake)) == messages == read_without_list(lake), f"cut after call {number}"
    assert number > 20
