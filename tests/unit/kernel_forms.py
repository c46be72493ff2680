"""The kernel's modules in both forms: compiled, as installed, and interpreted from the same source."""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nsquark.kernel

FORMS = ("compiled", "interpreted")


def load(name: str, form: str) -> ModuleType:
    """A kernel module in one form; skips the test if the kernel was not compiled here."""
    if form == "interpreted":
        return _interpreted(name)
    module = importlib.import_module(f"nsquark.kernel.{name}")
    if str(module.__file__).endswith(".py"):
        pytest.skip(f"nsquark.kernel.{name} is not compiled here, or NSQUARK_PURE=1 is set")
    return module


def _interpreted(name: str) -> ModuleType:
    full_name = f"interpreted_kernel_{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    path = Path(nsquark.kernel.__file__).with_name(f"{name}.py")
    loader = importlib.machinery.SourceFileLoader(full_name, str(path))
    spec = importlib.util.spec_from_loader(full_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    loader.exec_module(module)
    return module
