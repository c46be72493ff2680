"""Declares the client's options: those of go-nsq, by its names, with its defaults and ranges."""

# ruff: noqa: RUF009  (the calls in Config's class body make dataclass fields, of values that cannot change)

from __future__ import annotations

import dataclasses
import difflib
import os
import ssl
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack

import msgspec

from nsquark.base.durations import Duration
from nsquark.base.hosts import HOSTNAME
from nsquark.base.version import __version__
from nsquark.client.errors import ConfigError
from nsquark.client.options import (
    DISABLED,
    Address,
    BackoffStrategy,
    FilePath,
    Fraction,
    OptionKind,
    Secret,
    Span,
    SpanOrOff,
    Strategy,
    Text,
    Tls,
    Whole,
    Word,
    YesNo,
    read,
)

USER_AGENT: Final = f"nsquark/{__version__}"

DurationLike = str | timedelta | Duration
PathLike = str | os.PathLike[str]

T = TypeVar("T")

_KIND: Final = "kind"

_TLS_VERSIONS: Final = {
    # Nobody speaks SSL 3.0 any more: what asks for it gets the oldest that there is.
    "ssl3.0": ssl.TLSVersion.MINIMUM_SUPPORTED,
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}


class Options(TypedDict, total=False):
    """Types Config's fields as a user gives them, by keyword to `Config`, `Producer`, `ProducerPool` or `Consumer`."""

    dial_timeout: DurationLike
    read_timeout: DurationLike
    write_timeout: DurationLike
    local_addr: str
    lookupd_poll_interval: DurationLike
    lookupd_poll_jitter: float
    lookupd_poll_timeout: DurationLike
    max_requeue_delay: DurationLike
    default_requeue_delay: DurationLike
    backoff_strategy: str | BackoffStrategy
    max_backoff_duration: DurationLike
    backoff_multiplier: DurationLike
    max_attempts: int
    low_rdy_idle_timeout: DurationLike
    low_rdy_timeout: DurationLike
    rdy_redistribute_interval: DurationLike
    client_id: str
    hostname: str
    user_agent: str
    heartbeat_interval: DurationLike | int
    sample_rate: int
    tls_v1: bool
    tls_config: ssl.SSLContext | None
    tls_root_ca_file: PathLike
    tls_insecure_skip_verify: bool
    tls_cert: PathLike
    tls_key: PathLike
    tls_min_version: str
    deflate: bool
    deflate_level: int
    snappy: bool
    output_buffer_size: int
    output_buffer_timeout: DurationLike | int
    max_in_flight: int
    msg_timeout: DurationLike
    auth_secret: str
    skip_lookupd_authorization: bool
    topology_region: str
    topology_zone: str
    max_msg_size: int


def _option(kind: OptionKind[T], default: T, *, is_secret: bool = False) -> T:
    # The cast that `dataclasses.field` itself makes: it returns a Field and is typed as the field's value.
    option: T = dataclasses.field(default=default, metadata={_KIND: kind}, repr=not is_secret)
    return option


def _span(default: str, least: str | None = None, most: str | None = None) -> Duration:
    bounds = (None if text is None else Duration.parse(text) for text in (least, most))
    return _option(Span(*bounds), Duration.parse(default))


def _span_or_off(default: str) -> Duration:
    return _option(SpanOrOff(), Duration.parse(default))


def _whole(default: int, least: int | None = None, most: int | None = None) -> int:
    return _option(Whole(least, most), default)


def _yes_no(default: bool) -> bool:
    return _option(YesNo(), default)


def _text(default: str = "") -> str:
    return _option(Text(), default)


def _path() -> str:
    return _option(FilePath(), "")


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """Holds options, immutable and checked: a Config that exists is one that a producer or consumer can use.

    A duration is given as Go writes it (`"90s"`), as a timedelta or as a Duration, and kept as a Duration. Options go
    by keyword to `Config`, `Producer`, `ProducerPool` and `Consumer` alike.
    """

    # -- the connection ----------------------------------------------------------------------------------
    dial_timeout: Duration = _span("1s", "0")
    """Limits how long connecting may take."""
    read_timeout: Duration = _span("60s", "100ms", "5m")
    """A connection on which nothing came for so long is lost, but not where heartbeats are off. 100ms to 5m."""
    write_timeout: Duration = _span("1s", "100ms", "5m")
    """A connection to which nothing could be written for so long is lost. 100ms to 5m."""
    local_addr: str = _option(Address(), "")
    """Is the `host:port` to connect from."""
    heartbeat_interval: Duration = _span_or_off("30s")
    """Says how often nsqd asks whether the client lives; at most `read_timeout`. `-1` switches heartbeats off."""
    client_id: str = _text(HOSTNAME.partition(".")[0])
    """Is the name by which nsqd shows the client."""
    hostname: str = _text(HOSTNAME)
    """Is the name by which nsqd shows the client's machine."""
    user_agent: str = _text(USER_AGENT)
    """Is the name by which nsqd shows the client's program."""
    sample_rate: int = _whole(0, 0, 99)
    """Lets so many percent of the messages come, 0 to 99; 0 means all."""
    output_buffer_size: int = _whole(16384)
    """Lets nsqd buffer so many bytes for this connection."""
    output_buffer_timeout: Duration = _span_or_off("250ms")
    """Limits how long nsqd buffers bytes for this connection. `-1` switches buffering off."""
    msg_timeout: Duration = _span("0", "0")
    """Says how long nsqd waits for an answer to a message; 0 is what nsqd has set."""
    max_msg_size: int = _whole(0, 0)
    """Limits the size of a frame that is accepted, in bytes; 0 stands for 64 MiB."""
    auth_secret: str = _option(Secret(), "", is_secret=True)
    """Is shown to an nsqd that asks for a secret."""
    topology_region: str = _text()
    """Tells nsqd in which region this client is."""
    topology_zone: str = _text()
    """Tells nsqd in which zone of that region this client is."""

    # -- TLS and compression -----------------------------------------------------------------------------
    tls_v1: bool = _yes_no(False)
    """Asks for TLS; an nsqd that offers none is refused (go-nsq goes on in clear)."""
    tls_config: ssl.SSLContext | None = _option(Tls(), None)
    """Is an `ssl.SSLContext`, used instead of the options below."""
    tls_root_ca_file: str = _path()
    """Names the file of the authorities that may have signed nsqd's certificate."""
    tls_insecure_skip_verify: bool = _yes_no(False)
    """Accepts any certificate of nsqd's."""
    tls_cert: str = _path()
    """Names the file of the certificate that the client shows."""
    tls_key: str = _path()
    """Names the file of the key to that certificate."""
    tls_min_version: str = _option(Word(*_TLS_VERSIONS), "tls1.2")
    """Is the lowest version that is spoken, ssl3.0 to tls1.3. go-nsq has tls1.0, which OpenSSL refuses by default."""
    deflate: bool = _yes_no(False)
    """Asks for compression by deflate, unless `snappy` is chosen."""
    deflate_level: int = _whole(6, 1, 9)
    """Says how hard deflate compresses, 1 to 9."""
    snappy: bool = _yes_no(False)
    """Asks for compression by snappy, unless `deflate` is chosen."""

    # -- discovery ---------------------------------------------------------------------------------------
    lookupd_poll_interval: Duration = _span("60s", "10ms", "5m")
    """Says how often nsqlookupds are asked. 10ms to 5m."""
    lookupd_poll_jitter: float = _option(Fraction(0.0, 1.0), 0.3)
    """Is the part of the interval up to which the second round is put off, at random. 0 to 1."""
    lookupd_poll_timeout: Duration = _span("1m", "0")
    """Limits how long a question to an nsqlookupd may take."""
    # Misnamed by NSQ.
    skip_lookupd_authorization: bool = _yes_no(True)
    """As in go-nsq, **true sends** `auth_secret` to nsqlookupds."""

    # -- consuming ---------------------------------------------------------------------------------------
    max_in_flight: int = _whole(1, 0)
    """So many messages may be unanswered, over all connections; 0 pauses."""
    max_attempts: int = _whole(5, 0, 65535)
    """A message that failed so often is given up; 0 is never. 0 to 65535."""
    default_requeue_delay: Duration = _span("90s", "0", "60m")
    """After so long, times its attempts, a failed message comes again. 0 to 1h."""
    max_requeue_delay: Duration = _span("15m", "0", "60m")
    """Limits the delay after which a failed message comes again. 0 to 1h."""
    backoff_strategy: str | BackoffStrategy = _option(Strategy(), "exponential")
    """Says how waits grow: `exponential`, `full_jitter`, or an object with `calculate(attempt)`, which returns seconds.
    """
    backoff_multiplier: Duration = _span("1s", "0", "60m")
    """Is the first wait after a failure. 0 to 1h."""
    max_backoff_duration: Duration = _span("2m", "0", "60m")
    """Limits the wait after failures; 0 means no backoff. 0 to 1h."""
    low_rdy_idle_timeout: Duration = _span("10s", "1s", "5m")
    """With more connections than max_in_flight, one that brings nothing for so long makes room. 1s to 5m."""
    low_rdy_timeout: Duration = _span("30s", "1s", "5m")
    """With more connections than max_in_flight, one that had its turn for so long makes room. 1s to 5m."""
    rdy_redistribute_interval: Duration = _span("5s", "1ms", "5s")
    """Says how often it is looked at which connections make room. 1ms to 5s."""

    def __init__(self, **options: Unpack[Options]) -> None:
        for name, value in options.items():
            kind = _kind_of(name)
            object.__setattr__(self, name, read(name, value, kind.typed, kind))
        self._check_together()

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Reads options by go-nsq's rules for command lines and config files.

        `-` and `_` mean the same in a name; strings are parsed; an integer for a duration is in milliseconds and for a
        bool means true unless it is 0.

        options: values by name.
        """
        if not isinstance(options, Mapping) or not all(isinstance(given, str) for given in options):
            raise ConfigError(f"options are values by name, such as {{'msg-timeout': '2m'}}, not {options!r:.60}")
        checked: dict[str, Any] = {}
        for given, value in options.items():
            name = given.replace("-", "_")
            kind = _kind_of(name)
            checked[name] = read(name, value, kind.loose, kind)
        return cls(**checked)

    @classmethod
    def merge(cls, config: Config | None, options: Options, defaults: Options | None = None) -> Config:
        """Makes what a constructor with both `config` and `**options` means: the options win.

        config: what a user gave, or None.
        options: what a user gave by keyword.
        defaults: options that hold where the user gave none, instead of the usual ones.
        """
        if config is None:
            config = cls()
        elif not isinstance(config, Config):
            raise ConfigError(f"config is a Config, such as Config(snappy=True), not a {type(config).__name__}")
        return Config(**{**(defaults or {}), **config._given(), **options}) if defaults or options else config

    def replace(self, **options: Unpack[Options]) -> Config:
        """Returns a Config with these options changed."""
        return Config(**{**self._given(), **options})

    def _given(self) -> dict[str, Any]:
        """Returns the options that were given; the others have their default from the class."""
        return dict(vars(self))

    def _check_together(self) -> None:
        if self.heartbeat_interval > self.read_timeout:
            raise ConfigError(
                f"invalid heartbeat_interval ! {self.heartbeat_interval} > {self.read_timeout} (read_timeout): "
                "a quiet connection would be taken for a dead one"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("invalid tls_cert ! tls_cert and tls_key need each other: give both")
        if self.deflate and self.snappy:
            raise ConfigError("invalid snappy ! nsqd compresses by deflate or by snappy: give one of them")

    def ssl_context(self) -> ssl.SSLContext:
        """Returns `tls_config` if it was given, else a context made of the tls_ options."""
        if self.tls_config is not None:
            return self.tls_config
        try:
            context = ssl.create_default_context(cafile=self.tls_root_ca_file or None)
        except OSError as error:
            raise ConfigError(f"invalid tls_root_ca_file ! cannot use {self.tls_root_ca_file}: {error}") from None
        if self.tls_insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:
                raise ConfigError(f"invalid tls_cert ! cannot use {self.tls_cert}, {self.tls_key}: {error}") from None
        context.minimum_version = _TLS_VERSIONS[self.tls_min_version]
        return context

    def identify_body(self) -> bytes:
        """Makes the JSON of IDENTIFY."""
        fields: dict[str, object] = {
            "client_id": self.client_id,
            "hostname": self.hostname,
            "user_agent": self.user_agent,
            # The names of the first two in NSQ before 0.2.28.
            "short_id": self.client_id,
            "long_id": self.hostname,
            "tls_v1": self.tls_v1,
            "deflate": self.deflate,
            "deflate_level": self.deflate_level,
            "snappy": self.snappy,
            "feature_negotiation": True,
            # Ours; another nsqd does not know them and leaves them out of its answer.
            "show_limits": True,
            "requeue_uncounted": True,
            "heartbeat_interval": _ms_or_off(self.heartbeat_interval),
            "sample_rate": self.sample_rate,
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": _ms_or_off(self.output_buffer_timeout),
            "msg_timeout": self.msg_timeout.ms,
        }
        if self.topology_region:
            fields["topology_region"] = self.topology_region
        if self.topology_zone:
            fields["topology_zone"] = self.topology_zone
        return msgspec.json.encode(fields)


def parse_option(argument: str) -> tuple[str, str | bool]:
    """Splits `key,value` of a command line into a pair for `Config.from_options`; a `key` alone is true.

    ConfigError for an option that does not exist or cannot have this value; what must fit together is checked later.
    """
    given, comma, text = argument.partition(",")
    name, value = given.replace("-", "_"), text if comma else True
    kind = _kind_of(name)
    read(name, value, kind.loose, kind)
    return name, value


_KINDS: Final[dict[str, OptionKind[Any]]] = {field.name: field.metadata[_KIND] for field in dataclasses.fields(Config)}


def _kind_of(name: str) -> OptionKind[Any]:
    kind = _KINDS.get(name)
    if kind is None:
        similar = difflib.get_close_matches(name, _KINDS, n=1)
        raise ConfigError(f"invalid option {name}" + (f", did you mean {similar[0]}?" if similar else ""))
    return kind


def _ms_or_off(span: Duration) -> int:
    return -1 if span == DISABLED else span.ms
