"""Checks that docs/design.md names every file that nsqd makes in its data path."""

import re
from pathlib import Path
from typing import Final

import pytest

from faults.rebuilt_disks import record

from .map import PAGE

TOPIC: Final = "nsquark/topics/t.<topic>/"
NAMES: Final = {"<seq>": r"\d{20}", "<minute>": r"\d+", "<slot>": r"\d+", "*": ".+"}
"""Says what stands for such a part of a name in the tables; any other, such as <topic>, is a name without a slash."""


def names_in_table(page: str, header: str) -> list[str]:
    """Returns the names in the first column of a table, which may have several in a row."""
    rows = page.partition(f"| {header} | what |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def pattern(name: str) -> str:
    """Makes a regular expression of a documented name; what is documented as a directory may have anything in it."""
    parts = re.split(r"(<\w+>|\*)", name)
    exact = "".join(NAMES.get(part, "[^/]+") if part[:1] in ("<", "*") else re.escape(part) for part in parts)
    return exact + ".*" if name.endswith("/") else exact


def documented() -> re.Pattern[str]:
    page = PAGE.read_text()
    general = names_in_table(page, "file in the data path")
    of_topics = names_in_table(page, f"file in `{TOPIC}`")
    assert general and of_topics
    return re.compile("|".join(map(pattern, [*general, *(TOPIC + name for name in of_topics)])))


@pytest.mark.ours
@pytest.mark.parametrize(("seed", "flags"), [(1, ()), (2, ("--retention-time=1s",))])
def test_every_file_is_documented(tmp_path: Path, seed: int, flags: tuple[str, ...]) -> None:
    """The script publishes, defers, stages and appends, makes and deletes topics, and restarts nsqd after NSQ's own."""
    recording = record(tmp_path, "default", seed, *flags, takeover=True)
    made = {call.other_path or call.path for call in recording.calls if call.kind in ("create", "rename")}
    assert any(name.endswith(".deferred") for name in made)
    known = documented()
    assert not sorted(name for name in made if not known.fullmatch(name))
