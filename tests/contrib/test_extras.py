"""Checks the package where an extra is not installed: what needs it says so, and the rest works."""

import subprocess
import sys

import pytest

MISSING = """
import sys
for name in ("aiohttp", "opentelemetry", "taskiq", "pyarrow"):
    sys.modules[name] = None  # importing it fails as if it were not installed
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MISSING + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("program", "missing", "extra"),
    [
        ("from nsquark.contrib.opentelemetry import Telemetry", "opentelemetry", "otel"),
        ("from nsquark.contrib.taskiq import NsqBroker", "taskiq", "taskiq"),
        ("from nsquark import read_arrow", "pyarrow", "sql"),
        ("from nsquark.admin.main import main", "aiohttp", "admin"),
        ("import nsquark; nsquark.infer_schema('orders')", "pyarrow", "sql"),
    ],
)
def test_a_missing_extra_is_named(program: str, missing: str, extra: str) -> None:
    said = run(program).stderr.splitlines()[-1]
    assert said == f"ModuleNotFoundError: No module named {missing!r}: pip install 'nsquark[{extra}]'"


@pytest.mark.parametrize(
    "program",
    [
        "from nsquark import *; print(Consumer, sync.Producer)",
        "import nsquark; print([getattr(nsquark, name) for name in dir(nsquark) if name[0].isupper()])",
        "import nsquark; help(nsquark)",
    ],
)
def test_the_public_names_need_no_extra(program: str) -> None:
    done = run(program)
    assert done.returncode == 0 and "Consumer" in done.stdout and "Producer" in done.stdout, done.stderr
