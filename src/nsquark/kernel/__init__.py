"""Is the hot path: its Python source runs compiled by Cython or, slower, as it is."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

PURE_VARIABLE = "NSQUARK_PURE"
"""Setting this to 1 runs the kernel interpreted although it was compiled."""

MODULES = (
    "bytes",
    "records",
    "extents",
    "batch",
    "columns",
    "connection",
    "frames",
    "journal",
    "blocks",
    "sweep",
    "share",
    "ledger",
    "answers",
    "restart",
    "mpub",
    "commits",
    "tail",
    "replies",
    "publish",
    "http_lane",
    "turn",
)
"""Lists the kernel's modules, each after those it imports."""


def load_sources() -> None:
    """Puts the interpreted form of the kernel's modules in place before anything imports them."""
    for name in MODULES:
        path = Path(__file__).with_name(f"{name}.py")
        full_name = f"{__name__}.{name}"
        loader = importlib.machinery.SourceFileLoader(full_name, str(path))
        spec = importlib.util.spec_from_loader(full_name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        loader.exec_module(module)


if os.environ.get(PURE_VARIABLE) == "1":
    load_sources()


def is_compiled() -> bool:
    """Tells whether the kernel runs as C."""
    from nsquark.kernel import ledger

    return not str(ledger.__file__).endswith(".py")
