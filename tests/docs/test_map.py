"""Checks that the map in docs/design.md shows the files that there are."""

from . import map as design_map


def test_the_map_is_up_to_date() -> None:
    page = design_map.PAGE.read_text()
    assert design_map.BEGIN in page
    assert design_map.with_map(page) == page, "run `make reference`"
