"""Checks that docs/design.md names the files that a message crosses from PUB to FIN."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nsquark.kernel import PURE_VARIABLE

from .map import PAGE

FILES_MAX = 10
"""The story is told by at most this many files."""


def crossed_files(directory: Path) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-m", "docs.crossed_files", str(directory)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {PURE_VARIABLE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.ours
def test_the_path_of_a_message_is_as_told(tmp_path: Path) -> None:
    chapter = PAGE.read_text().partition("## The path of a message\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `([\w/]+\.py)` \|", chapter, re.MULTILINE)
    crossed = crossed_files(tmp_path / "data")
    assert 0 < len(table) <= FILES_MAX
    assert set(table) <= crossed
    named = set(re.findall(r"`([\w/]+\.py)`", chapter))
    assert not {file for file in crossed - named if not file.startswith("base/")}
