"""Has fixtures for every test: an nsqd and an nsqlookupd per module, more where a test needs its own, and connections.

`make test` shares the test files among six workers; see harness/workers.py.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

# A daemon starts twice as fast from compiled modules, and tests are collected three times as fast; surroundings that
# forbid to keep bytecode would slow every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest.register_assert_rewrite("harness")

from harness import Nsqd, Wire, nsqd_is_ours, nsqd_program  # noqa: E402  (rewriting must be asked for first)
from harness.lookupd import Nsqlookupd  # noqa: E402
from nsquark.testing.daemons import started  # noqa: E402

pytest_plugins = ["harness.workers"]

# Sparks that live for seconds are not worth the JVM's second compiler.
os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark" / "conf"))
# Python takes the sitecustomize.py in there.
_WORKERS = str(Path(__file__).parent / "spark" / "workers")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_WORKERS, os.environ.get("PYTHONPATH")]))

# Shells have what they run in the background ignore Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_serial = itertools.count(1)


FINE_REASONS = ("PEER_", "NSQD names another", "not permitted", "only root", "cannot be mounted here")
"""A skip for one of these reasons is due to nothing missing: a program to compare with was not given, or this user
may not.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="a test that cannot run on this machine has failed")


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _judged(report: Report, config: pytest.Config) -> Report:
    """With --strict-skips, turns a skip for want of something on this machine into a failure that names it."""
    if report.skipped and config.getoption("strict_skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(words in reason for words in FINE_REASONS):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} cannot run here: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judged((yield), collector.config)


def pytest_report_header() -> str:
    return f"nsqd under test: {nsqd_program()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_long_forms(config, items)
    if nsqd_is_ours():
        return
    skip = pytest.mark.skip(reason="only this project's nsqd does this, and NSQD names another")
    for item in items:
        if item.get_closest_marker("ours"):
            item.add_marker(skip)


def _leave_out_long_forms(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that run only when asked for, by `make soak`."""
    if "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="module")
def nsqd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """Runs one nsqd for the tests of a module, which sets its flags by NSQD_FLAGS and uses topics of its own."""
    flags = getattr(request.module, "NSQD_FLAGS", ())
    daemon = Nsqd(tmp_path_factory.mktemp("nsqd"), *flags)
    with daemon:
        yield daemon
        assert daemon.is_running, f"nsqd died under the tests of this module:\n{daemon.log}"
        assert daemon.stop() == 0, daemon.log


@pytest.fixture
def make_nsqd(tmp_path: Path) -> Iterator[Callable[..., Nsqd]]:
    """Starts an nsqd with these flags, by default on this test's own data path."""

    def made(*flags: str, data_path: Path | None = None) -> Nsqd:
        directory = data_path or tmp_path / "data"
        directory.mkdir(exist_ok=True)
        return Nsqd(directory, *flags)

    yield from started(made)


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Nsqlookupd]:
    """Runs one nsqlookupd for the tests of a module."""
    with Nsqlookupd() as daemon:
        yield daemon
        assert daemon.is_running, f"nsqlookupd died under the tests of this module:\n{daemon.log}"
        assert daemon.stop() == 0, daemon.log


@pytest.fixture
def make_lookupd() -> Iterator[Callable[..., Nsqlookupd]]:
    """Starts an nsqlookupd with these flags."""
    yield from started(Nsqlookupd)


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Wire]]:
    """Opens connections, to the module's nsqd unless told otherwise, and closes them after the test."""
    wires: list[Wire] = []

    def open_one(daemon: Nsqd | None = None, **settings: Any) -> Wire:
        target = daemon or request.getfixturevalue("nsqd")
        wires.append(target.connect(**settings))
        return wires[-1]

    yield open_one
    for wire in wires:
        wire.close()


@pytest.fixture
def client(connect: Callable[..., Wire]) -> Wire:
    return connect()


@pytest.fixture
def topic() -> str:
    """Makes a name that no other test uses."""
    return f"topic_{next(_serial)}"
