"""Checks the program `nsquark`: its help, its versions, and what it says of mistakes."""

import importlib.util
import subprocess

import pytest

import nsquark as package
from nsquark.base.version import NSQ_VERSION
from nsquark.tool.main import COMMANDS, TOOLS

from .conftest import NSQUARK, RUN_TIMEOUT_S, nsquark


def test_help_names_every_command() -> None:
    result = nsquark("--help")
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in (*COMMANDS, *TOOLS))
    assert all(daemon in result.stdout.splitlines()[-1] for daemon in ("nsqd,", "nsqlookupd", "nsqadmin"))
    assert len(result.stdout.splitlines()) < 40


def test_without_a_command_it_shows_its_help_and_fails() -> None:
    result = nsquark()
    assert (result.returncode, result.stdout) == (2, "")
    assert "commands:" in result.stderr


def test_version() -> None:
    result = nsquark("--version")
    assert result.returncode == 0
    assert result.stdout == f"nsquark {package.__version__} (speaks NSQ {NSQ_VERSION})\n"


def test_an_unknown_command_is_answered_with_the_known_ones() -> None:
    result = nsquark("start")
    assert result.returncode == 2
    assert "there is no command 'start': choose one of up, doctor" in result.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_of_its_own(command: str) -> None:
    if command not in ("up", "doctor", "export", "passwd") and importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed")
    result = nsquark(command, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: nsquark {command} ")
    assert "--help" in result.stdout


@pytest.mark.parametrize("command", TOOLS)
def test_every_tool_is_a_command(command: str) -> None:
    result = nsquark(command, "--help")
    assert result.returncode == 0
    program = "nsquark tap" if command == "tap" else TOOLS[command][0].rpartition(".")[2]
    assert result.stderr.startswith(f"Usage of {program}:\n")
    assert nsquark(command, "--no-such-flag").returncode == 2


def test_a_wrong_option_is_named() -> None:
    result = nsquark("up", "--nsqds", "3")
    assert result.returncode == 2
    assert "--nsqds" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("up", "--nsqd", "0"), "nsquark up: --nsqd must be at least 1\n"),
        (("up", "--dir", "/dev/null/x"), "choose another --dir\n"),
        (("up", "--base-port", "65500", "--nsqd", "2"), "choose a lower --base-port, or 0 for any free ports\n"),
        (("doctor", "--nsqd", "http://x:4151"), "must be host:port, without http:// or a path\n"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = nsquark(*arguments)
    assert result.returncode == 1
    assert result.stderr.endswith(sentence)
    assert result.stderr.count("\n") == 1


def test_output_that_nobody_reads_any_more_is_no_error() -> None:
    """A reader may end early, as in `nsquark doctor | head -1`."""
    with subprocess.Popen([*NSQUARK, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(RUN_TIMEOUT_S) == 1
