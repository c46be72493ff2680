"""Checks command lines and config files of nsqd and nsqlookupd, as a user would write them."""

import re
from pathlib import Path

import pytest

from nsquark.base.durations import Duration
from nsquark.base.logs import Level
from nsquark.broker.options import (
    SPEC,
    NsqdOptions,
    NsqdOptionsError,
    TlsRequired,
    TlsVersion,
    config_value,
    default_node_id,
    parse_options,
    validate,
)
from nsquark.lookupd.options import parse_options as parse_lookupd_options


def from_config(tmp_path: Path, text: str, *argv: str) -> NsqdOptions:
    file = tmp_path / "nsqd.toml"
    file.write_text(text)
    return parse_options([*argv, "--config", str(file)])


def exit_status(argv: list[str]) -> object:
    with pytest.raises(SystemExit) as exited:
        parse_options(argv)
    return exited.value.code


# -- syntax ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["-tcp-address", "a:1"],
        ["--tcp-address", "a:1"],
        ["-tcp-address=a:1"],
        ["--tcp-address=a:1"],
        ["--tcp-address=b:2", "--tcp-address=a:1"],
        ["--tcp-address=a:1", "stop", "--tcp-address=b:2"],
        ["--tcp-address=a:1", "--", "--tcp-address=b:2"],
        ["--tcp-address=a:1", "-", "--tcp-address=b:2"],
        ["--tcp-address=a:1", "", "--tcp-address=b:2"],
    ],
)
def test_dashes_values_and_where_parsing_stops(argv: list[str]) -> None:
    assert parse_options(argv).tcp_address == "a:1"


def test_a_value_may_look_like_a_flag_or_be_empty_or_hold_an_equals_sign() -> None:
    assert parse_options(["-log-prefix", "-x"]).log_prefix == "-x"
    assert parse_options(["-log-prefix="]).log_prefix == ""
    assert parse_options(["-log-prefix=a=b"]).log_prefix == "a=b"


def test_booleans_never_take_the_next_argument() -> None:
    options = parse_options(["-deflate", "false", "-snappy=false"])
    assert options.deflate is True
    assert options.snappy is True


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("1", "t", "T", "true", "TRUE", "True")]
    + [(text, False) for text in ("0", "f", "F", "false", "FALSE", "False")],
)
def test_boolean_words(text: str, value: bool) -> None:
    assert parse_options([f"-deflate={text}"]).deflate is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0x1F", 31),
        ("0x_ff", 255),
        ("0o17", 15),
        ("010", 8),
        ("0b11", 3),
        ("1_000", 1000),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_integers(text: str, value: int) -> None:
    assert parse_options([f"-max-rdy-count={text}"]).max_rdy_count == value


def test_list_flags_append_and_do_not_split() -> None:
    options = parse_options(["-lookupd-tcp-address=a:1", "-lookupd-tcp-address", "b:2,c:3"])
    assert options.lookupd_tcp_address == ["a:1", "b:2,c:3"]
    assert parse_options([]).lookupd_tcp_address == []


def test_percentiles_split_on_commas_and_are_sorted() -> None:
    argv = ["-e2e-processing-latency-percentile=0.5,0.99", "-e2e-processing-latency-percentile", "1"]
    assert parse_options(argv).e2e_processing_latency_percentile == [1.0, 0.99, 0.5]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-nope"], "flag provided but not defined: -nope"),
        (["-tcp-address"], "flag needs an argument: -tcp-address"),
        (["---tcp-address=x"], "bad flag syntax: ---tcp-address=x"),
        (["-=x"], "bad flag syntax: -=x"),
        (["-max-rdy-count=x"], 'invalid value "x" for flag -max-rdy-count: parse error'),
        (["-max-rdy-count= 1"], 'invalid value " 1" for flag -max-rdy-count: parse error'),
        (["-max-rdy-count=1__0"], 'invalid value "1__0" for flag -max-rdy-count: parse error'),
        (["-max-rdy-count=9223372036854775808"], "value out of range"),
        (["-deflate=yes"], 'invalid boolean value "yes" for -deflate: parse error'),
        (["-msg-timeout=60"], 'invalid value "60" for flag -msg-timeout: parse error'),
        (["-log-level=loud"], "invalid log level 'loud'"),
        (["-tls-min-version=ssl3.0"], 'unknown TLS version "ssl3.0"'),
        (["-tls-required=maybe"], 'invalid boolean value "maybe" for -tls-required'),
        (["-disk-policy=hope"], "reject, drop-oldest"),
    ],
)
def test_bad_flags_exit_2_with_message_and_usage(
    argv: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(argv) == 2
    first, _, rest = capfd.readouterr().err.partition("\n")
    assert message in first
    assert rest.startswith("Usage of nsqd:\n")


@pytest.mark.parametrize("flag", ["-h", "-help", "--help"])
def test_help_lists_every_flag_on_stderr(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status([flag]) == 0
    usage = capfd.readouterr().err
    assert usage.startswith("Usage of nsqd:\n")
    for row in SPEC:
        assert re.search(rf"^  -{row.flag}( [a-z]+)?$", usage, re.MULTILINE)
    assert '  -log-prefix string\n    \tstart of each log line (default "[nsqd] ")\n' in usage
    assert "(default 1m0s)" in usage


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["-version", "-config=/does/not/exist"]) == 0
    assert re.fullmatch(r"nsqd v1\.3\.0 \(built w/[a-z0-9.-]+\)\n", capfd.readouterr().out)


def test_a_percentile_that_is_no_number_exits_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["-e2e-processing-latency-percentile=0.5,x"]) == 1
    assert capfd.readouterr().err.endswith("FATAL: Could not parse: x\n")


# -- special words ---------------------------------------------------------------------------------------


def test_tls_required_words() -> None:
    assert parse_options(["-tls-required"]).tls_required is TlsRequired.YES
    assert parse_options(["-tls-required=false"]).tls_required is TlsRequired.NO
    assert parse_options(["-tls-required=TCP-HTTPS"]).tls_required is TlsRequired.EXCEPT_HTTP


def test_tls_min_version_and_log_level_words() -> None:
    assert parse_options(["-tls-min-version", "TLS1.2"]).tls_min_version is TlsVersion.TLS1_2
    assert parse_options(["-log-level", "WARN"]).log_level is Level.WARNING


# -- config file -----------------------------------------------------------------------------------------


def test_flag_over_file_over_default(tmp_path: Path) -> None:
    text = """
        tcp_address = "file:1"
        http_address = "file:2"
        unknown = 1
        nsqlookupd_tcp_addresses = ["f:1", "f:2"]
    """
    options = from_config(tmp_path, text, "-tcp-address=flag:1", "-lookupd-tcp-address=flag:2")
    assert options.tcp_address == "flag:1"
    assert options.http_address == "file:2"
    assert options.lookupd_tcp_address == ["flag:2"]
    assert options.https_address == "0.0.0.0:4152"


def test_file_coercions(tmp_path: Path) -> None:
    text = """
        id = "12"
        msg_timeout = "5s"
        max_msg_timeout = 1500
        deflate = "false"
        snappy = 0
        statsd_mem_stats = 1
        auth_http_addresses = "a:1,b:2"
        e2e_processing_latency_percentiles = [0.5, 0.99]
        tls_required = true
        tls_min_version = ""
        log_level = "Debug"
        requeue_on_disconnect = "0s"
    """
    options = from_config(tmp_path, text)
    assert options.node_id == 12
    assert options.msg_timeout == Duration.parse("5s")
    assert options.max_msg_timeout == Duration.parse("1.5s")
    assert options.deflate is False
    assert options.snappy is True  # NSQ reads a number the wrong way round
    assert options.statsd_mem_stats is False
    assert options.auth_http_address == ["a:1", "b:2"]
    assert options.e2e_processing_latency_percentile == [0.5, 0.99]
    assert options.tls_required is TlsRequired.YES
    assert options.tls_min_version is TlsVersion.TLS1_0
    assert options.log_level is Level.DEBUG
    assert options.requeue_on_disconnect == 0


def test_only_the_listed_key_works(tmp_path: Path) -> None:
    text = 'node_id = 7\nlookupd_tcp_address = ["x:1"]\nversion = true\nworker_id = true'
    options = from_config(tmp_path, text)
    assert options.node_id == parse_options([]).node_id
    assert options.lookupd_tcp_address == []
    assert options.version is False
    assert options.worker_id is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("msg_timeout = 1.5", "failed parsing msg_timeout 1.5"),
        ('msg_timeout = "60"', "missing unit in duration"),
        ('tls_required = "maybe"', "failed parsing tls_required maybe"),
        ('tls_min_version = "ssl3.0"', "failed parsing tls_min_version ssl3.0"),
        ('log_level = "loud"', "failed parsing log_level loud"),
        ("max_rdy_count = true", "expected an integer"),
        ("auth_http_addresses = [1]", "expected an array of strings"),
        ("tcp_address = [", "failed to load config file"),
    ],
)
def test_bad_files_exit_1_with_one_line(
    tmp_path: Path, text: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        from_config(tmp_path, text)
    assert exited.value.code == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("[nsqd] ")
    assert message in lines[0]


def test_missing_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["-config", str(tmp_path / "none")]) == 1
    expected = f"FATAL: failed to load config file {tmp_path / 'none'} - No such file or directory\n"
    assert capfd.readouterr().err.endswith(expected)


# -- checks at start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["-max-deflate-level=0", "-node-id=-1"], "--max-deflate-level must be [1,9]"),
        (["-max-deflate-level=10"], "--max-deflate-level must be [1,9]"),
        (["-node-id=1024", "-tls-required"], "--node-id must be [0,1024)"),
        (["-tls-required"], "cannot require TLS client connections without TLS key and cert"),
        (["-tls-client-auth-policy=x"], "cannot require TLS client connections without TLS key and cert"),
        (["-auth-http-request-method=put"], "--auth-http-request-method must be post or get"),
        (["-e2e-processing-latency-percentile=2"], "invalid E2E processing latency percentile: 2"),
        (["-e2e-processing-latency-percentile=0"], "invalid E2E processing latency percentile: 0"),
        (["-cache-bytes=-1"], "--cache-bytes must not be negative"),
        (["-requeue-on-disconnect=-1s"], "--requeue-on-disconnect must not be negative"),
    ],
)
def test_contradictions_are_refused(argv: list[str], text: str) -> None:
    with pytest.raises(NsqdOptionsError) as refused:
        validate(parse_options(argv))
    assert str(refused.value) == text


def test_a_lone_certificate_or_key_is_refused() -> None:
    with pytest.raises(NsqdOptionsError, match="failed to build TLS config - "):
        validate(NsqdOptions(tls_cert="cert.pem"))  # type: ignore[call-arg]


def test_defaults_are_valid_and_a_client_policy_turns_tls_on() -> None:
    validate(NsqdOptions())  # type: ignore[call-arg]
    options = NsqdOptions(tls_client_auth_policy="require", tls_cert="c", tls_key="k")  # type: ignore[call-arg]
    validate(options)
    assert options.tls_required is TlsRequired.YES


def test_node_id_comes_from_the_host_name() -> None:
    assert 0 <= default_node_id("any-host") < 1024
    assert default_node_id("localhost") != default_node_id("any-host")


# -- /config ---------------------------------------------------------------------------------------------


def test_config_values() -> None:
    options = parse_options(["-log-level=warn", "-tls-required=tcp-https", "-lookupd-tcp-address=a:1"])
    assert config_value(options, "id") == options.node_id
    assert config_value(options, "msg_timeout") == 60_000_000_000
    assert type(config_value(options, "msg_timeout")) is int
    assert config_value(options, "log_level") == 3
    assert config_value(options, "tls_required") == 1
    assert config_value(options, "tls_min_version") == 769
    assert config_value(options, "deflate") is True
    assert config_value(options, "nsqlookupd_tcp_addresses") == ["a:1"]
    assert config_value(options, "statsd_address") == ""


@pytest.mark.parametrize("key", ["node_id", "lookupd_tcp_address", "version", "config", "verbose", "worker_id", "x"])
def test_config_has_no_other_keys(key: str) -> None:
    with pytest.raises(KeyError):
        config_value(NsqdOptions(), key)  # type: ignore[call-arg]


# -- nsqlookupd ------------------------------------------------------------------------------------------


def test_lookupd_options(capfd: pytest.CaptureFixture[str]) -> None:
    options = parse_lookupd_options(["-tombstone-lifetime=1s"])
    assert (options.tcp_address, options.http_address) == ("0.0.0.0:4160", "0.0.0.0:4161")
    assert (str(options.inactive_producer_timeout), options.tombstone_lifetime.ms) == ("5m0s", 1000)
    with pytest.raises(SystemExit):
        parse_lookupd_options(["-version"])
    assert capfd.readouterr().out.startswith("nsqlookupd v1.3.0 (built w/")
