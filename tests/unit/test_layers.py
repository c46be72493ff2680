"""Checks the layers: a module imports only what lies below its own package, so that each is read by itself."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

import nsquark

ROOT: Final = Path(nsquark.__file__).parent

LAYERS: Final = (
    {"base"},
    {"wire"},
    {"kernel"},
    {"log", "web"},
    {"client", "lookupd", "broker"},
    # The public names of the client, and what is built on them.
    {"sync", "errors", "contrib", "testing"},
    {"spark", "admin", "tools"},
    {"query", "tap"},
    {"tool"},
)
"""Lists the layers from the lowest. Packages of one layer do not import each other, but for those of `BESIDE`."""

BESIDE: Final = {("contrib", "sync"), ("contrib", "errors"), ("sync", "errors"), ("testing", "errors")}

MODULE_NAME: Final = re.compile(r"nsquark(\.[a-z_0-9]+)+")

LEVELS: Final = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def names_of_top_package(tree: ast.AST) -> set[str]:
    """Returns the names by which a module calls `nsquark` itself: `import nsquark.wire` too makes that name known."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {"nsquark"} | {alias.asname for alias in aliases if alias.name == "nsquark" and alias.asname}


def imports_of(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Yields the full names that a module imports, wherever in it: also those in functions and for type checkers, those
    of modules that it names in a text, to load them later, and attributes of `nsquark`, which are loaded when used.
    """
    tree = ast.parse(source)
    top = names_of_top_package(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (above, node.module or "") if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in top:
            yield f"nsquark.{node.attr}"


def package_of(name: str) -> str | None:
    """Finds the package right below nsquark that a full name lies in; None for others' modules and nsquark itself.

    What is public there, such as `nsquark.Consumer`, lies where it is loaded from.
    """
    parts = name.split(".")
    if parts[0] != "nsquark" or len(parts) == 1:
        return None
    if parts[1] in nsquark._HOMES:
        return package_of(nsquark._HOMES[parts[1]])
    return parts[1] if parts[1] in LEVELS else None


def upward_imports(source: str, module: tuple[str, ...]) -> list[str]:
    """Returns what a module imports and may not. `module` has the parts of its full name."""
    own = module[1]
    found = []
    for name in imports_of(source, module[:-1]):
        other = package_of(name)
        if other is None or other == own or (own, other) in BESIDE:
            continue
        if LEVELS[other] >= LEVELS[own]:
            found.append(name)
    return found


def source_of(path: Path) -> str:
    """Returns a module's source; of declarations for C just the imports, as Python writes them."""
    source = path.read_text()
    if path.suffix != ".pxd":
        return source
    return "\n".join(line.replace("cimport", "import") for line in source.splitlines() if "import" in line)


def modules() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the modules and, beside those that are compiled, their types for Python and for C."""
    for path in sorted(each for each in ROOT.rglob("*.p*") if each.suffix in (".py", ".pyi", ".pxd")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield path, ("nsquark", *parts)


@pytest.mark.parametrize(("path", "module"), [pytest.param(p, m, id=str(p.relative_to(ROOT))) for p, m in modules()])
def test_a_module_imports_only_from_below(path: Path, module: tuple[str, ...]) -> None:
    assert module[1] in LEVELS, f"{module[1]} has no place in LAYERS"
    assert not upward_imports(source_of(path), module)


def test_no_packages_import_each_other() -> None:
    below: dict[str, set[str]] = {package: set() for package in LEVELS}
    for path, module in modules():
        used = {package_of(name) for name in imports_of(source_of(path), module[:-1])}
        below[module[1]] |= {package for package in used if package is not None and package != module[1]}
    order = list(TopologicalSorter(below).static_order())  # raises CycleError, which names them
    assert set(order) == set(LEVELS)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from nsquark.log.files import write_all", ("nsquark", "base", "clock")),
        ("import nsquark.broker.nsqd", ("nsquark", "web", "server")),
        ("from nsquark import client", ("nsquark", "wire", "names")),
        ("from ..broker import nsqd", ("nsquark", "lookupd", "daemon")),
        ("def f():\n    from nsquark.tool import up", ("nsquark", "spark", "options")),
        ("from nsquark.web.fetch import fetch", ("nsquark", "log", "files")),
        ("from ... import broker", ("nsquark", "log", "nsq_import", "diskqueue")),
        ("from nsquark import Consumer", ("nsquark", "broker", "topic")),
        ("import nsquark\nnsquark.Consumer", ("nsquark", "broker", "topic")),
        ("import nsquark as nsq\ndef f():\n    return nsq.sync.Producer", ("nsquark", "client", "pool")),
        ("import nsquark.wire.names\nnsquark.broker.nsqd", ("nsquark", "web", "server")),
        ("importlib.import_module('nsquark.client.consumer')", ("nsquark", "base", "clock")),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nsquark.broker.topic import Topic",
            ("nsquark", "kernel", "turn"),
        ),
    ],
)
def test_an_upward_import_is_found(source: str, module: tuple[str, ...]) -> None:
    assert upward_imports(source, module)
