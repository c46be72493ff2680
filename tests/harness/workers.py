"""Shares the tests of `make test` among pytest-xdist's workers: whole files, the longest first.

The tests of a file share daemons, and those of tests/spark a few Spark sessions, so neither is taken apart. What
takes longest is handed out first; handed out last, it would keep one worker busy while the others have nothing left.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ALONE = ("tests/spark/test_pipeline.py",)
"""This test spends its time in a Spark of its own."""
ON_ONE_WORKER = ("tests/spark/test_s", "tests/spark/")
"""Beginnings of test ids. Tests that have the same first one of these share a Spark session: those of source and sink,
and the others.
"""
LONGEST_FIRST = (
    *ON_ONE_WORKER,
    "tests/docs/test_blocks.py",
    "tests/tools/",
    *ALONE,
    "tests/browser/",
    "tests/faults/",
    "tests/client/",
    "tests/broker/",
    "tests/admin/",
    "tests/tool/",
)
"""Beginnings of test ids; those that have none of them come last. What computes and what waits are side by side: Spark,
then the documents, then the tools.
"""


class WholeFiles(LoadFileScheduling):
    """Hands out files in the order of collection, and some groups of files as if each were one."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if file in ALONE:
            return file
        return next((beginning for beginning in ON_ONE_WORKER if nodeid.startswith(beginning)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles | None:
    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False  # by number of tests, which says little about how long they take
    return WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Ranks a test by the longest beginning that it has."""
    found = [beginning for beginning in LONGEST_FIRST if item.nodeid.startswith(beginning)]
    return LONGEST_FIRST.index(max(found, key=len)) if found else len(LONGEST_FIRST)
