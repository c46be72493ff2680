"""Loads the kernel's modules in both forms: compiled, as installed, and interpreted from the same source."""

import functools
import importlib
import sys
from types import ModuleType

import pytest

import nsquark.kernel

FORMS = ("compiled", "interpreted")


def load(name: str, form: str) -> ModuleType:
    """Returns a kernel module in one form; skips the test if the kernel was not compiled here."""
    if form == "interpreted":
        return _interpreted()[name]
    module = importlib.import_module(f"nsquark.kernel.{name}")
    if str(module.__file__).endswith(".py"):
        pytest.skip(f"nsquark.kernel.{name} is not compiled here, or NSQUARK_PURE=1 is set")
    return module


@functools.cache
def _interpreted() -> dict[str, ModuleType]:
    """Loads all modules interpreted, made for each other; everyone else keeps those that were there."""
    names = {name: f"nsquark.kernel.{name}" for name in nsquark.kernel.MODULES}
    before = {full_name: sys.modules.pop(full_name, None) for full_name in names.values()}
    nsquark.kernel.load_sources()
    loaded = {name: sys.modules.pop(full_name) for name, full_name in names.items()}
    sys.modules.update({full_name: module for full_name, module in before.items() if module is not None})
    return loaded
