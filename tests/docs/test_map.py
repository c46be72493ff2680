"""The map of files in docs/design.md is that of the files there are."""

from . import map as design_map


def test_the_map_is_up_to_date() -> None:
    page = design_map.PAGE.read_text()
    assert design_map.BEGIN in page
    assert design_map.with_map(page) == page, "run `make reference`"
