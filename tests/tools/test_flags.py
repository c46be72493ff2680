"""Checks bad flags: a clear line and NSQ's exit code tell of them."""

import re

import pytest

from tools.rig import run_tool

ALL = ["nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq"]
STAMP = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ")
BOTH = ("--nsqd-tcp-address=127.0.0.1:1", "--lookupd-http-address=127.0.0.1:1")


@pytest.mark.parametrize("tool", ALL)
def test_help_is_on_stderr_and_ends_with_an_example(tool: str) -> None:
    result = run_tool(tool, "--help")
    assert (result.code, result.out) == (0, b"")
    assert result.log.startswith(f"Usage of {tool}:\n  -")
    example = result.log.rstrip().splitlines()[-1]
    assert example.strip().startswith(tool) or f"| {tool} " in example
    flags = result.log.partition(":\n")[2].partition("\n\nExample:\n")[0]
    assert [line for line in flags.splitlines() if not line.startswith(("  -", "    \t"))] == []


@pytest.mark.parametrize("tool", ALL)
def test_unknown_flag_ends_with_2(tool: str) -> None:
    result = run_tool(tool, "--bad")
    assert result.code == 2
    assert result.log.startswith(f"flag provided but not defined: -bad\nUsage of {tool}:\n")


@pytest.mark.parametrize("tool", [tool for tool in ALL if tool != "to_nsq"])
def test_version_is_that_of_nsq(tool: str) -> None:
    result = run_tool(tool, "--version")
    assert (result.code, result.out) == (0, f"{tool} v1.3.0\n".encode())


@pytest.mark.parametrize(
    ("tool", "flags", "line"),
    [
        ("nsq_tail", [], "--nsqd-tcp-address or --lookupd-http-address required"),
        ("nsq_tail", ["--topic=x", *BOTH], "use --nsqd-tcp-address or --lookupd-http-address not both"),
        ("nsq_tail", [BOTH[0]], "--topic required"),
        ("nsq_to_file", [], "--nsqd-tcp-address or --lookupd-http-address required."),
        ("nsq_to_file", ["--topic=x", *BOTH], "use --nsqd-tcp-address or --lookupd-http-address not both"),
        ("nsq_to_file", [BOTH[0]], "--topic or --topic-pattern required"),
        (
            "nsq_to_file",
            [BOTH[0], "--topic-pattern=x"],
            "--lookupd-http-address must be specified when no --topic specified",
        ),
        ("nsq_to_file", [BOTH[0], "--topic=x", "--channel="], "--channel is required"),
        ("nsq_to_file", [BOTH[0], "--topic=x", "stray", "-x"], "unknown arguments: [stray -x]"),
        ("nsq_to_file", [BOTH[0], "--topic=x", "--gzip-level=0"], "invalid --gzip-level value (0), should be 1-9"),
        ("nsq_to_file", [BOTH[0], "--topic=x", "--log-level=foo"], "--log-level is invalid"),
        (
            "nsq_to_file",
            [BOTH[0], "--topic=x", "--http-client-connect-timeout=0"],
            "--http-client-connect-timeout should be positive",
        ),
        (
            "nsq_to_file",
            [BOTH[0], "--topic=x", "--gzip", "--filename-format=<TOPIC>"],
            "missing <REV> in --filename-format when gzip, rotation, or work dir enabled",
        ),
        (
            "nsq_to_file",
            [BOTH[0], "--topic=x", "--topic-pattern=(x"],
            "invalid --topic-pattern (x: missing ): (x",
        ),
        ("nsq_stat", ["--topic=x", "--channel=y", "--count=0"], "--count should be positive"),
        ("nsq_to_http", ["--topic=x", BOTH[0]], "--get or --post required"),
        ("nsq_to_nsq", ["--topic=x", BOTH[0]], "--destination-nsqd-tcp-address required"),
        ("to_nsq", [], "--topic required"),
        ("to_nsq", ["--topic=x"], "--nsqd-tcp-address required"),
        ("to_nsq", ["--topic=x", "--delimiter=ab"], "--delimiter must be a single byte"),
        ("to_nsq", ["--topic=x", "--delimiter="], "--delimiter must be a single byte"),
    ],
)
def test_flags_that_do_not_fit_end_with_1(tool: str, flags: list[str], line: str) -> None:
    result = run_tool(tool, *flags)
    assert (result.code, result.out) == (1, b"")
    assert STAMP.sub("", result.log) == f"{line}\n"


@pytest.mark.parametrize("tool", [tool for tool in ALL if tool in ("nsq_tail", "nsq_to_http", "nsq_to_nsq")])
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("bad,1", "invalid option bad"),
        ("max_attempts,zz", "failed to coerce option max_attempts (zz) - expected a whole number"),
    ],
)
def test_a_bad_option_for_the_client_is_a_bad_flag(tool: str, option: str, reason: str) -> None:
    result = run_tool(tool, "--topic=x", BOTH[0], f"--consumer-opt={option}")
    assert result.code == 2
    assert result.log.startswith(f'invalid value "{option}" for flag -consumer-opt: {reason}\n')
