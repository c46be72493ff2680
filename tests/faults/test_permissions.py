"""What is in a directory that nsqd may not read counts as not to be had now, never as not there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, Wire
from harness.nsqd import StartError

pytestmark = pytest.mark.ours

Connect = Callable[..., Wire]

NO_LISTING = 0o300
"""Files can be opened by name, but not found."""
NOTHING = 0o000
LATER_MS = 600_000
COUNT = 20


@pytest.fixture
def program(tmp_path: Path) -> str | None:
    """Makes an nsqd for which the modes of files count, as they do for all users but root."""
    if os.geteuid() != 0:
        return None
    setpriv = [shutil.which("setpriv") or "", "--bounding-set=-dac_override,-dac_read_search"]
    if not setpriv[0]:
        pytest.skip("no setpriv, by which root gives up its rights")
    if subprocess.run([*setpriv, "true"], capture_output=True).returncode:
        pytest.skip("to give up root's rights is not permitted here")
    script = tmp_path / "nsqd"
    command = [*setpriv, sys.executable, "-P", "-c", "'from nsquark.broker.main import main; main()'"]
    script.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def stopped(tmp_path: Path, program: str | None, connect: Connect) -> Nsqd:
    """Makes two topics with messages that wait, are requeued with a delay, or are finished."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    daemon = Nsqd(data_path, program=program)
    with daemon:
        for topic in ("t", "other"):
            consumer = connect(daemon).subscribe(topic, rdy=4)
            for number in range(COUNT):
                assert daemon.post("/pub", b"%d" % number, topic=topic).status == 200
            assert daemon.post("/pub", b"later", topic=topic, defer=LATER_MS).status == 200
            first = consumer.read_messages(4)
            consumer.RDY(0)
            for message in first[:2]:
                consumer.REQ(message.id, LATER_MS)
            for message in first[2:]:
                consumer.FIN(message.id)
            consumer.PUB("settled#ephemeral", b"x")
            consumer.expect_ok()
        assert daemon.stop() == 0
    return daemon


def _counts(daemon: Nsqd, topic: str) -> tuple[int, int]:
    shown = daemon.channel(topic)
    return shown["depth"], shown["deferred_count"]


ALL = (COUNT - 4, 3)


@pytest.mark.parametrize("mode", [NO_LISTING, NOTHING], ids=["not listed", "not used"])
@pytest.mark.parametrize("directory", ["t.t", "t.t/deferred"])
def test_a_topic_whose_files_cannot_be_found_is_not_served(stopped: Nsqd, directory: str, mode: int) -> None:
    path = stopped.data_path / "nsquark" / "topics" / directory
    path.chmod(mode)
    with stopped:
        assert "TOPIC(t): cannot be opened, it is not served" in stopped.log
        assert stopped.topic_names() == {"other"}
        assert _counts(stopped, "other") == ALL
        assert stopped.post("/pub", b"new", topic="t").status == 503
        assert stopped.stop() == 0
        assert "Traceback" not in stopped.log
    path.chmod(0o700)
    with stopped:
        assert _counts(stopped, "t") == ALL


@pytest.mark.parametrize("mode", [NO_LISTING, NOTHING], ids=["not listed", "not used"])
@pytest.mark.parametrize("directory", [".", "nsquark", "nsquark/topics"])
def test_a_data_path_that_cannot_be_read_refuses_the_start_with_a_sentence(
    stopped: Nsqd, directory: str, mode: int
) -> None:
    path = stopped.data_path / directory
    path.chmod(mode)
    with pytest.raises(StartError) as refused:
        stopped.start()
    path.chmod(0o700)
    assert "failed to instantiate nsqd - " in refused.value.log
    assert str(path) in refused.value.log and "ermission denied" in refused.value.log
    assert "Traceback" not in refused.value.log
    with stopped:
        assert _counts(stopped, "t") == _counts(stopped, "other") == ALL
