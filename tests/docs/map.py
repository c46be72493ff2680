"""Makes the map in docs/design.md of the first paragraph of every module's docstring: `make reference`."""

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "nsquark"
FOUND_BY_SPARK: Final = ROOT / "src" / "pyspark_nsquark" / "__init__.py"
PAGE: Final = ROOT / "docs" / "design.md"
BEGIN: Final = "<!-- The map is made of the docstrings: make reference -->\n"
END: Final = "<!-- The end of the map -->\n"
WIDTH: Final = 120

PACKAGES: Final = (
    "base",
    "wire",
    "kernel",
    "log",
    "web",
    "client",
    "lookupd",
    "broker",
    "spark",
    "admin",
    "tools",
    "query",
    "tap",
    "tool",
)
"""Lists the packages from the lowest layer to the highest."""


class Undocumented(Exception):
    """A module or package has no docstring to say what it is for."""


def summary(path: Path) -> str:
    """Returns the first paragraph of a module's docstring, as one line."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise Undocumented(
            f"{path.relative_to(ROOT)} needs a docstring: its first paragraph is for the map in docs/design.md"
        )
    return " ".join(text.split("\n\n")[0].split())


def entry(path: Path) -> str:
    """Writes a file's line of the map, wrapped as the docs are."""
    return wrapped(f"* `{path.stem}`: {summary(path)}", "  ")


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def package_lines(directory: Path) -> Iterator[str]:
    """Writes a heading for a package, a line for each of its files, and the same for the packages in it."""
    yield "\n" + wrapped(f"**`{directory.relative_to(SOURCE)}/`** {summary(directory / '__init__.py')}") + "\n"
    for path in sorted(directory.glob("*.py")):
        if path.stem != "__init__":
            yield entry(path)
    for inner in sorted(path.parent for path in directory.glob("*/__init__.py")):
        yield from package_lines(inner)


def make_map() -> str:
    others = [entry(path) for path in sorted(SOURCE.glob("*.py")) if path.stem != "__init__"]
    above = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name not in PACKAGES)
    lines = [line for name in (*PACKAGES, *above) for line in package_lines(SOURCE / name)]
    found_by_spark = wrapped(f"* `pyspark_nsquark`: {summary(FOUND_BY_SPARK)}", "  ")
    return "".join([*lines, "\n**beside them**\n\n", *others, found_by_spark, "\n"])


def with_map(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{make_map()}{END}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(with_map(PAGE.read_text()))
    except Undocumented as problem:
        sys.exit(str(problem))
