"""Checks that the map in docs/design.md shows the files that there are, and the layers that a test holds."""

import re
from pathlib import Path

import pytest

from unit.test_layers import LAYERS

from . import map as design_map


def test_the_map_is_up_to_date() -> None:
    page = design_map.PAGE.read_text()
    assert design_map.BEGIN in page
    assert design_map.with_map(page) == page, "run `make reference`"


@pytest.mark.parametrize("page", [design_map.PAGE, design_map.ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_layers_are_those_that_hold(page: Path) -> None:
    found = re.search(r"^    base < .*\n(?: +< .*\n)*", page.read_text(), re.MULTILINE)
    assert found is not None
    assert [set(re.findall(r"\w+", layer)) for layer in found[0].split("<")] == list(LAYERS)
