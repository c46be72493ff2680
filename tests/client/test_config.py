"""Checks that Config has go-nsq's options, and tells of mistakes at once."""

import dataclasses
import json
import pickle
import ssl
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import nsquark
from harness.upgrades import make_certificate
from nsquark.base.durations import Duration
from nsquark.client.config import Config, Options, parse_option
from nsquark.client.errors import ConfigError

GO_NSQ_DEFAULTS = {
    "dial_timeout": "1s",
    "read_timeout": "1m0s",
    "write_timeout": "1s",
    "local_addr": "",
    "lookupd_poll_interval": "1m0s",
    "lookupd_poll_jitter": "0.3",
    "lookupd_poll_timeout": "1m0s",
    "max_requeue_delay": "15m0s",
    "default_requeue_delay": "1m30s",
    "backoff_strategy": "exponential",
    "max_backoff_duration": "2m0s",
    "backoff_multiplier": "1s",
    "max_attempts": "5",
    "low_rdy_idle_timeout": "10s",
    "low_rdy_timeout": "30s",
    "rdy_redistribute_interval": "5s",
    "heartbeat_interval": "30s",
    "sample_rate": "0",
    "tls_v1": "False",
    "tls_config": "None",
    "tls_root_ca_file": "",
    "tls_insecure_skip_verify": "False",
    "tls_cert": "",
    "tls_key": "",
    "deflate": "False",
    "deflate_level": "6",
    "snappy": "False",
    "output_buffer_size": "16384",
    "output_buffer_timeout": "250ms",
    "max_in_flight": "1",
    "msg_timeout": "0s",
    "auth_secret": "",
    "skip_lookupd_authorization": "True",
    "topology_region": "",
    "topology_zone": "",
    "max_msg_size": "0",
}


def test_defaults_are_those_of_go_nsq() -> None:
    config = Config()
    assert {name: str(getattr(config, name)) for name in GO_NSQ_DEFAULTS} == GO_NSQ_DEFAULTS
    assert config.user_agent == f"nsquark/{nsquark.__version__}"
    assert config.hostname.startswith(config.client_id) and "." not in config.client_id
    assert config.tls_min_version == "tls1.2"


def test_type_checkers_see_every_option() -> None:
    assert set(typing.get_type_hints(Options)) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("value", ["90s", timedelta(seconds=90), Duration.parse("1m30s")])
def test_durations_are_given_with_their_unit(value: Any) -> None:
    config = Config(msg_timeout=value)
    assert config.msg_timeout.seconds == 90
    assert config.msg_timeout.ms == 90_000


def test_a_timedelta_is_kept_to_the_microsecond() -> None:
    assert Config(dial_timeout=timedelta(days=40, microseconds=1)).dial_timeout == 40 * 86_400 * 10**9 + 1000


@pytest.mark.parametrize("value", [60, 60.0, 1, 0])
def test_a_plain_number_is_no_duration(value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Config(msg_timeout=value)
    assert str(error.value) == (
        f"failed to coerce option msg_timeout ({value}) - "
        f"a plain number has no unit: write '{value}s' or timedelta(seconds={value})"
    )


RANGES: list[tuple[str, Any, Any]] = [
    ("dial_timeout", "0", None),
    ("lookupd_poll_timeout", "0", None),
    ("read_timeout", "100ms", "5m"),
    ("write_timeout", "100ms", "5m"),
    ("lookupd_poll_interval", "10ms", "5m"),
    ("lookupd_poll_jitter", 0.0, 1.0),
    ("max_requeue_delay", "0", "60m"),
    ("default_requeue_delay", "0", "60m"),
    ("max_backoff_duration", "0", "60m"),
    ("backoff_multiplier", "0", "60m"),
    ("max_attempts", 0, 65535),
    ("low_rdy_idle_timeout", "1s", "5m"),
    ("low_rdy_timeout", "1s", "5m"),
    ("rdy_redistribute_interval", "1ms", "5s"),
    ("sample_rate", 0, 99),
    ("deflate_level", 1, 9),
    ("max_in_flight", 0, None),
    ("msg_timeout", "0", None),
    ("max_msg_size", 0, None),
]


def _stepped(bound: Any, step: int) -> Any:
    return Duration(Duration.parse(bound) + step) if isinstance(bound, str) else bound + step


@pytest.mark.parametrize(("name", "least", "most"), RANGES)
def test_ranges_include_their_ends_and_nothing_beyond(name: str, least: Any, most: Any) -> None:
    # Without heartbeats any read_timeout is possible.
    bounds = [bound for bound in (least, most) if bound is not None]
    for bound in bounds:
        Config(**{"heartbeat_interval": -1, name: bound})
    for bound, step, sign in zip(bounds, (-1, 1), "<>", strict=False):
        with pytest.raises(ConfigError, match=rf"^invalid {name} ! .* {sign} .*"):
            Config(**{"heartbeat_interval": -1, name: _stepped(bound, step)})


def test_range_error_names_value_and_range() -> None:
    with pytest.raises(ConfigError) as error:
        Config(read_timeout="6m")
    assert str(error.value) == "invalid read_timeout ! 6m0s > 5m0s (allowed: 100ms to 5m0s)"
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesage_timeout": "1s"}, "invalid option mesage_timeout, did you mean msg_timeout?"),
        ({"zzz": 1}, "invalid option zzz"),
        ({"msg_timeout": "60"}, 'failed to coerce option msg_timeout (60) - missing unit in duration "60"'),
        ({"max_in_flight": "5"}, "failed to coerce option max_in_flight (5) - expected a whole number"),
        ({"max_in_flight": True}, "failed to coerce option max_in_flight (True) - expected a whole number"),
        ({"tls_v1": 1}, "failed to coerce option tls_v1 (1) - expected True or False"),
        (
            {"lookupd_poll_jitter": float("nan")},
            "failed to coerce option lookupd_poll_jitter (nan) - expected a finite",
        ),
        ({"lookupd_poll_jitter": 10**400}, "failed to coerce option lookupd_poll_jitter (1000"),
        ({"backoff_strategy": "linear"}, "failed to coerce option backoff_strategy (linear) - expected one of exponen"),
        ({"tls_min_version": "1.2"}, "failed to coerce option tls_min_version (1.2) - expected one of ssl3.0, tls1.0"),
        ({"local_addr": "nowhere"}, "failed to coerce option local_addr (nowhere) - address nowhere: give it as host"),
        ({"heartbeat_interval": "61s"}, "invalid heartbeat_interval ! 1m1s > 1m0s (read_timeout)"),
        ({"read_timeout": "10s"}, "invalid heartbeat_interval ! 30s > 10s (read_timeout)"),
        ({"heartbeat_interval": "-5s"}, "invalid heartbeat_interval ! -5s < 0s (-1 disables it)"),
        ({"heartbeat_interval": 5}, "failed to coerce option heartbeat_interval (5) - a plain number has no unit"),
        ({"tls_cert": "a.pem"}, "invalid tls_cert ! tls_cert and tls_key need each other"),
        ({"deflate": True, "snappy": True}, "invalid snappy ! nsqd compresses by deflate or by snappy"),
    ],
)
def test_mistakes_fail_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**options)
    assert str(error.value).startswith(text)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ConfigError) as error:
        Config(auth_secret=b"hush")  # type: ignore[arg-type]
    assert "hush" not in str(error.value)
    assert "hush" not in repr(Config(auth_secret="hush"))


def test_a_config_never_changes() -> None:
    config = Config(max_in_flight=3)
    with pytest.raises(AttributeError):
        config.max_in_flight = 4
    other = config.replace(max_in_flight=4, heartbeat_interval=-1)
    assert (config.max_in_flight, other.max_in_flight) == (3, 4)
    assert other.replace(sample_rate=1).heartbeat_interval == -1
    assert config == Config(max_in_flight=3)
    assert {config: 1}[Config(max_in_flight=3)] == 1
    assert pickle.loads(pickle.dumps(other)) == other


def test_options_win_over_the_config_given_with_them() -> None:
    config = Config(max_in_flight=3)
    assert Config.merge(config, {}) is config
    assert Config.merge(config, {"sample_rate": 7}) == Config(max_in_flight=3, sample_rate=7)
    assert Config.merge(None, {"sample_rate": 7}) == Config(sample_rate=7)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("msg-timeout", "60s", Duration.parse("60s")),
        ("msg_timeout", 60, Duration.parse("60ms")),
        ("msg_timeout", timedelta(seconds=1), Duration.parse("1s")),
        ("heartbeat-interval", -1, -1),
        ("heartbeat-interval", "-1", -1),
        ("output_buffer_timeout", "-1ns", -1),
        ("max-in-flight", "200", 200),
        ("max-in-flight", 200, 200),
        ("lookupd-poll-jitter", "0.5", 0.5),
        ("lookupd-poll-jitter", 1, 1.0),
        ("tls-v1", "t", True),
        ("tls-v1", "FALSE", False),
        ("tls-v1", 2, True),
        ("tls-v1", 0, False),
        ("tls-v1", True, True),
        ("client-id", 7, "7"),
        ("backoff-strategy", "full_jitter", "full_jitter"),
    ],
)
def test_command_line_values_follow_go_nsq(name: str, value: object, kept: object) -> None:
    config = Config.from_options({name: value})
    assert getattr(config, name.replace("-", "_")) == kept


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("not-there", "1", "invalid option not_there"),
        ("tls-v1", "yes", "failed to coerce option tls_v1 (yes) - expected true or false"),
        ("tls-v1", ["yes"], "failed to coerce option tls_v1 (['yes']) - expected true or false"),
        ("max-in-flight", "1.5", "failed to coerce option max_in_flight (1.5) - expected a whole number"),
        ("max-in-flight", "-1", "invalid max_in_flight ! -1 < 0"),
        ("msg-timeout", "60", 'failed to coerce option msg_timeout (60) - missing unit in duration "60"'),
        ("lookupd-poll-jitter", "much", "failed to coerce option lookupd_poll_jitter (much) - expected a number"),
    ],
)
def test_command_line_mistakes_fail_at_once(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_options({name: value})
    assert str(error.value).startswith(text)


def test_command_line_pairs() -> None:
    arguments = ["msg-timeout,90s", "snappy", "user-agent,a,b"]
    config = Config.from_options(dict(map(parse_option, arguments)))
    assert (config.msg_timeout.seconds, config.snappy, config.user_agent) == (90, True, "a,b")


def test_identify_says_what_go_nsq_says() -> None:
    config = Config(client_id="me", hostname="me.example", user_agent="x/1", msg_timeout="5s", heartbeat_interval=-1)
    assert json.loads(config.identify_body()) == {
        "client_id": "me",
        "hostname": "me.example",
        "user_agent": "x/1",
        "short_id": "me",
        "long_id": "me.example",
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 6,
        "snappy": False,
        "feature_negotiation": True,
        "show_limits": True,
        "requeue_uncounted": True,
        "heartbeat_interval": -1,
        "sample_rate": 0,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
        "msg_timeout": 5000,
    }
    hints = json.loads(Config(topology_region="eu", topology_zone="eu-1").identify_body())
    assert (hints["topology_region"], hints["topology_zone"]) == ("eu", "eu-1")


class _Linear:
    def calculate(self, attempt: int) -> float:
        return float(attempt)


def test_a_backoff_strategy_may_be_an_object() -> None:
    strategy = _Linear()
    assert Config(backoff_strategy=strategy).backoff_strategy is strategy


def test_tls_context_of_the_options(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    given = ssl.create_default_context()
    assert Config(tls_config=given).ssl_context() is given

    checking = Config(tls_root_ca_file=certificate, tls_cert=certificate, tls_key=str(key)).ssl_context()
    assert checking.check_hostname and checking.verify_mode is ssl.CERT_REQUIRED
    assert len(checking.get_ca_certs()) == 1, "only the file given counts, not what the machine trusts"
    assert checking.minimum_version is ssl.TLSVersion.TLSv1_2

    trusting = Config(tls_insecure_skip_verify=True, tls_min_version="tls1.3").ssl_context()
    assert not trusting.check_hostname and trusting.verify_mode is ssl.CERT_NONE
    assert trusting.minimum_version is ssl.TLSVersion.TLSv1_3


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    with pytest.raises(ConfigError, match="tls_root_ca_file ! cannot use /not/there"):
        Config(tls_root_ca_file="/not/there").ssl_context()
    with pytest.raises(ConfigError, match=r"tls_cert ! cannot use .*/not/there"):
        Config(tls_cert=certificate, tls_key="/not/there").ssl_context()
