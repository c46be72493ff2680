"""The short form of real_disks.py; `make torture KINDS=ext4,xfs,full` runs the long one."""

import pytest

from faults.real_disks import NotHere, check_full, check_shutdown

pytestmark = pytest.mark.ours


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "default"), ("ext4", "sync-every=1"), ("xfs", "sync-every=1")])
def test_a_file_system_that_loses_its_memory(kind: str, mode: str) -> None:
    try:
        tally = check_shutdown(kind, mode, seed=3, steps=120)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert tally.is_good, tally
    assert tally.acknowledged > 100, "hardly anything was published"


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill -9"])
def test_a_disk_filled_to_the_last_byte_and_freed(kill: bool) -> None:
    try:
        tally = check_full("tmpfs", seed=4, kill=kill)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert tally.is_good, tally
    assert tally.acknowledged > 100, "hardly anything was published"
