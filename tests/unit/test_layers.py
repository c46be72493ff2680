"""Checks the layers: a module imports only what lies below its own package, so that each is read by itself."""

import ast
import re
import subprocess
import sys
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

MODULE_NAME: Final = re.compile(r"nsquark(\.\w+)+[.:]?\w*")
"""Finds texts that name a module, or what is in one; a text that goes on after a dot is put together when it runs."""
RELATIVE_NAME: Final = re.compile(r"\.+[a-z_0-9]+(\.\w+)*")
C_DECLARATIONS: Final = (".pxd", ".pyx", ".pxi")
CYTHONS_VIEW: Final = "cython.cimports."
"""Cython knows the C declarations of a module by its name behind this prefix."""

LEVELS: Final = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def names_of_top_package(tree: ast.AST) -> set[str]:
    """Returns the names by which a module calls `nsquark` itself: `import nsquark.wire` too makes that name known."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {"nsquark"} | {alias.asname for alias in aliases if alias.name == "nsquark" and alias.asname}


def imports_of(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Yields the full names that a module imports, wherever in it: also those in functions and for type checkers, those
    of modules that it names in a text, to load them later, and attributes of `nsquark`, which are loaded when used.
    """
    for name in _names_in(source, package):
        yield name.removeprefix(CYTHONS_VIEW)
        if name == "nsquark.*":
            yield from nsquark._HOMES.values()


def _names_in(source: str, package: tuple[str, ...]) -> Iterator[str]:
    tree = ast.parse(source)
    top = names_of_top_package(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in top:
            yield f"nsquark.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from named_in_call(node, package, top)


def absolute(name: str, package: tuple[str, ...]) -> str:
    """Returns the full name of a module that a module of this package names, by dots at its beginning or in full."""
    level = len(name) - len(name.lstrip("."))
    above = package[: len(package) - level + 1] if level else ()
    return ".".join((*above, *filter(None, name.split("."))))


def named_in_call(call: ast.Call, package: tuple[str, ...], top: set[str]) -> Iterator[str]:
    """Yields what `getattr(nsquark, name)` and `import_module(".name", package)` load."""
    texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if any(isinstance(each, ast.Name) and each.id in top for each in call.args):
        yield from (f"nsquark.{text}" for text in texts)
    elif "import" in ast.unparse(call.func) and texts and RELATIVE_NAME.fullmatch(texts[0]):
        yield absolute(texts[0], tuple(texts[1].split(".")) if len(texts) > 1 else package)


def package_of(name: str) -> str | None:
    """Finds the package right below nsquark that a full name lies in; None for others' modules and nsquark itself.

    What is public there, such as `nsquark.Consumer`, lies where it is loaded from.
    """
    parts = name.replace(":", ".").split(".")
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
    return imports_as_python(source) if path.suffix in C_DECLARATIONS else source


def imports_as_python(source: str) -> str:
    return "\n".join(line.strip().replace("cimport", "import") for line in source.splitlines() if "import" in line)


def modules() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the modules and, beside those that are compiled, their types for Python and for C."""
    for path in sorted(each for each in ROOT.rglob("*.p*") if each.suffix in (".py", ".pyi", *C_DECLARATIONS)):
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


@pytest.mark.parametrize("package", sorted(set().union(*LAYERS[: LEVELS["broker"] + 1])))
def test_what_a_package_loads_lies_below_it(package: str) -> None:
    """Loads its modules in a new process: whatever way they import, nothing but the lower packages may come."""
    names = [".".join(module) for path, module in modules() if module[1] == package and path.suffix == ".py"]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60, check=True)
    found = {other for other in map(package_of, done.stdout.split()) if other is not None and other != package}
    assert {other for other in found if LEVELS[other] >= LEVELS[package]} == set()


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
        ("from nsquark import *", ("nsquark", "broker", "topic")),
        ("import nsquark\nnsquark.Consumer", ("nsquark", "broker", "topic")),
        ("import nsquark as nsq\ndef f():\n    return nsq.sync.Producer", ("nsquark", "client", "pool")),
        ("import nsquark.wire.names\nnsquark.broker.nsqd", ("nsquark", "web", "server")),
        ("importlib.import_module('nsquark.client.consumer')", ("nsquark", "base", "clock")),
        ("importlib.import_module('.consumer', 'nsquark.client')", ("nsquark", "base", "clock")),
        ("importlib.import_module('..client', __package__)", ("nsquark", "base", "clock")),
        ("importlib.import_module(f'nsquark.client.{name}')", ("nsquark", "base", "clock")),
        ("pkgutil.resolve_name('nsquark.client.consumer:Consumer')", ("nsquark", "base", "clock")),
        ("from nsquark.base import clock\nHOMES = {'Consumer': 'nsquark.Consumer'}", ("nsquark", "broker", "topic")),
        ("import nsquark\ngetattr(nsquark, 'Consumer')", ("nsquark", "broker", "topic")),
        ("from cython.cimports.nsquark.log.segment import Segment", ("nsquark", "kernel", "batch")),
        (imports_as_python("    from nsquark.log.segment cimport Segment"), ("nsquark", "kernel", "batch")),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nsquark.broker.topic import Topic",
            ("nsquark", "kernel", "turn"),
        ),
    ],
)
def test_an_upward_import_is_found(source: str, module: tuple[str, ...]) -> None:
    assert upward_imports(source, module)
