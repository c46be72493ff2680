"""Flags of nsq_to_http, nsq_to_nsq and nsq_stat that do not fit together are refused in NSQ's words and order."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from nsquark.tools import nsq_stat, nsq_to_http, nsq_to_nsq
from nsquark.tools.program import Fatal, parse_options

T = TypeVar("T")

NSQD, LOOKUPD = "--nsqd-tcp-address=127.0.0.1:1", "--lookupd-http-address=127.0.0.1:1"
POST, GET = "--post=http://127.0.0.1:1", "--get=http://127.0.0.1:1/%s"
TO = "--destination-nsqd-tcp-address=127.0.0.1:1"
STATS = "--nsqd-http-address=127.0.0.1:1"
NEITHER = "--nsqd-tcp-address or --lookupd-http-address required"
BOTH = "use --nsqd-tcp-address or --lookupd-http-address not both"


def assert_refused(check: Callable[[T], object], kind: type[T], flags: list[str], line: str) -> None:
    """Asserts that a tool's check of its options ends it with this line."""
    options = parse_options("tool", kind, flags, "")
    with pytest.raises(Fatal) as failure:
        check(options)
    assert str(failure.value) == line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--header=x", "--channel="], "--header value format should be 'Name: value'"),
        (["--topic=t", "--header=x:"], "--header value format should be 'Name: value'"),
        (["--topic=t", "--header=x y: z"], "--header value format should be 'Name: value'"),
        (["--topic=t", "--header=x: a\r\nb: c"], "--header value format should be 'Name: value'"),
        ([NSQD, POST], "--topic and --channel are required"),
        (["--topic=t", "--channel=", NSQD, POST], "--topic and --channel are required"),
        (["--topic=t", "--content-type=a/b", GET], "--content-type only used with --post"),
        (["--topic=t", "--content-type=", POST], "--content-type requires a value when used"),
        (["--topic=t", POST], NEITHER),
        (["--topic=t", POST, NSQD, LOOKUPD], BOTH),
        (["--topic=t", NSQD], "--get or --post required"),
        (["--topic=t", NSQD, POST, GET], "use --get or --post not both"),
        (["--topic=t", NSQD, GET, "--get=http://x/"], "invalid GET address - must be a printf string"),
        (["--topic=t", NSQD, GET, "--get=http://x/%s%s"], "invalid GET address - must be a printf string"),
        (
            ["--topic=t", NSQD, "--post=127.0.0.1:80/x"],
            "--post 127.0.0.1:80/x: expected http://host:port/path or https://host:port/path",
        ),
        (["--topic=t", NSQD, POST, "--sample=1.01"], "ERROR: --sample must be between 0.0 and 1.0"),
        (["--topic=t", NSQD, POST, "-n=0"], "-n should be positive"),
    ],
)
def test_nsq_to_http(flags: list[str], line: str) -> None:
    assert_refused(nsq_to_http.checked, nsq_to_http.NsqToHttpOptions, flags, line)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([NSQD, TO], "--topic and --channel are required"),
        (["--topic=t", "--channel="], "--topic and --channel are required"),
        (["--topic=t", "--topic=b!"], "--topic is invalid"),
        (["--topic=t", "--destination-topic=b!"], "--destination-topic is invalid"),
        (["--topic=t", "--channel=b!"], "--channel is invalid"),
        (["--topic=t"], NEITHER),
        (["--topic=t", NSQD, LOOKUPD, TO], BOTH),
        (["--topic=t", NSQD], "--destination-nsqd-tcp-address required"),
    ],
)
def test_nsq_to_nsq(flags: list[str], line: str) -> None:
    assert_refused(nsq_to_nsq.check, nsq_to_nsq.NsqToNsqOptions, flags, line)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--topic=t", STATS], "--topic and --channel are required"),
        (["--topic=t", "--channel=c", "--interval=0"], "--interval should be positive"),
        (
            ["--topic=t", "--channel=c", "--http-client-connect-timeout=0"],
            "--http-client-connect-timeout should be positive",
        ),
        (
            ["--topic=t", "--channel=c", "--http-client-request-timeout=-1s"],
            "--http-client-request-timeout should be positive",
        ),
        (["--topic=t", "--channel=c", "--count=-1"], "--count should be positive"),
        (["--topic=t", "--channel=c"], "--nsqd-http-address or --lookupd-http-address required"),
        (["--watch"], "--nsqd-http-address or --lookupd-http-address required"),
        (
            ["--topic=t", "--channel=c", STATS, LOOKUPD],
            "use --nsqd-http-address or --lookupd-http-address not both",
        ),
        (
            ["--topic=t", "--channel=c", "--lookupd-http-address=http://x:1"],
            "--lookupd-http-address error - address should not contain scheme",
        ),
    ],
)
def test_nsq_stat(flags: list[str], line: str) -> None:
    assert_refused(nsq_stat.check, nsq_stat.NsqStatOptions, flags, line)


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        (nsq_stat.NsqStatOptions, "count", "1e3"),
        (nsq_stat.NsqStatOptions, "count", "4294967296"),
        (nsq_stat.NsqStatOptions, "interval", "5"),
        (nsq_to_http.NsqToHttpOptions, "sample", "half"),
        (nsq_to_http.NsqToHttpOptions, "n", "x"),
        (nsq_to_nsq.NsqToNsqOptions, "producer-opt", "bad"),
    ],
)
def test_values_that_cannot_be_read(kind: type, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options("tool", kind, [f"--{flag}={value}"], "")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f'invalid value "{value}" for flag -{flag}: ')
