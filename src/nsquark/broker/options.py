"""Declares the options of nsqd: NSQ's own, then ours. Order and wording of the checks are NSQ's."""

import hashlib
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Self

from nsquark.base.durations import Duration
from nsquark.base.flags import Option, option, option_table, parse, table
from nsquark.base.hosts import HOSTNAME
from nsquark.base.kinds import (
    BOOLEAN,
    DURATION,
    FLOATS,
    INTEGER,
    LOG_LEVEL,
    STRING,
    STRINGS,
    Kind,
    parse_boolean,
    word_kind,
)
from nsquark.base.logs import Level
from nsquark.base.version import version_line

NODE_ID_COUNT: Final = 1024
DEFLATE_LEVEL_MAX: Final = 9
DISK_POLICIES: Final = ("reject", "drop-oldest")
AUTH_REQUEST_METHODS: Final = ("get", "post")
HTTP_AUTH_MODES: Final = ("", "required", "optional", "off")


class NsqdOptionsError(Exception):
    """Says that the options contradict each other or leave their range; nsqd must not start."""


class TlsRequired(IntEnum):
    """Says who must use TLS, numbered as `/config/tls_required` shows it."""

    NO = 0
    EXCEPT_HTTP = 1
    YES = 2

    @classmethod
    def parse(cls, word: str) -> "TlsRequired":
        if word.lower() == "tcp-https":
            return cls.EXCEPT_HTTP
        return cls.YES if parse_boolean(word.lower()) else cls.NO

    @classmethod
    def shown(cls, value: object) -> str:
        return "" if value is cls.NO else "tcp-https" if value is cls.EXCEPT_HTTP else "true"


class TlsVersion(IntEnum):
    """Has the version numbers of the TLS standards; `ssl.TLSVersion` has the same."""

    TLS1_0 = 0x0301
    TLS1_1 = 0x0302
    TLS1_2 = 0x0303
    TLS1_3 = 0x0304

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", ".")

    @classmethod
    def parse(cls, word: str) -> Self:
        if not word:
            return cls(cls.TLS1_0)
        for version in cls:
            if version.word == word.lower():
                return version
        raise ValueError(f'unknown TLS version "{word}" (tls1.0, tls1.1, tls1.2, tls1.3)')

    @classmethod
    def shown(cls, value: object) -> str:
        return value.word if isinstance(value, TlsVersion) else ""


def _parse_disk_policy(word: str) -> str:
    if word not in DISK_POLICIES:
        raise ValueError(f'unknown disk policy "{word}" ({", ".join(DISK_POLICIES)})')
    return word


def _parse_http_auth(word: str) -> str:
    if word not in HTTP_AUTH_MODES:
        raise ValueError(f'unknown mode "{word}" (required, optional, off)')
    return word


HTTP_AUTH: Final = word_kind(_parse_http_auth, str)
TLS_REQUIRED: Final = word_kind(TlsRequired.parse, TlsRequired.shown, boolean=True)
TLS_VERSION: Final = word_kind(TlsVersion.parse, TlsVersion.shown)
DISK_POLICY: Final = word_kind(_parse_disk_policy, str)
OPTIONAL_DURATION: Final[Kind[Duration | None]] = Kind("duration", DURATION.from_flag, DURATION.from_config)


def default_node_id(hostname: str) -> int:
    """Returns the node id NSQ gives a host: message ids stay in the same range when nsqd is replaced by this one."""
    digest = hashlib.md5(hostname.encode(), usedforsecurity=False).digest()
    return zlib.crc32(digest) % NODE_ID_COUNT


def _span(text: str) -> Duration:
    return Duration.parse(text)


@option_table
class NsqdOptions:
    # -- basics ------------------------------------------------------------------------------------------
    version: bool = option(BOOLEAN, False, "print the version and exit", in_config=False)
    config: str = option(STRING, "", "path of a TOML config file", in_config=False)
    verbose: bool = option(BOOLEAN, False, "deprecated, no effect: use --log-level", in_config=False)
    worker_id: bool = option(BOOLEAN, False, "deprecated, no effect: use --node-id", in_config=False)
    log_level: Level = option(LOG_LEVEL, Level.INFO, "least level to log: debug, info, warn, error, fatal")
    log_prefix: str = option(STRING, "[nsqd] ", "start of each log line")
    node_id: int = option(INTEGER, default_node_id(HOSTNAME), "this nsqd's part of message ids, 0 to 1023", key="id")

    # -- addresses ---------------------------------------------------------------------------------------
    tcp_address: str = option(STRING, "0.0.0.0:4150", "host:port or unix socket path for TCP clients")
    http_address: str = option(STRING, "0.0.0.0:4151", "host:port or unix socket path for HTTP; empty = off")
    https_address: str = option(STRING, "0.0.0.0:4152", "host:port for HTTPS, used with a certificate; empty = off")
    broadcast_address: str = option(STRING, HOSTNAME, "host told to nsqlookupd")
    broadcast_tcp_port: int = option(INTEGER, 0, "TCP port told to nsqlookupd; 0 = the listening one")
    broadcast_http_port: int = option(INTEGER, 0, "HTTP port told to nsqlookupd; 0 = the listening one")
    lookupd_tcp_address: list[str] = option(
        STRINGS, [], "host:port of an nsqlookupd, repeatable", key="nsqlookupd_tcp_addresses"
    )
    http_client_connect_timeout: Duration = option(DURATION, _span("2s"), "connect time of outgoing HTTP")
    http_client_request_timeout: Duration = option(DURATION, _span("5s"), "total time of outgoing HTTP")
    auth_http_address: list[str] = option(
        STRINGS, [], "host:port or URL of an auth server, repeatable", key="auth_http_addresses"
    )
    auth_http_request_method: str = option(STRING, "get", "how to ask auth servers: get or post")
    topology_region: str = option(STRING, "", "region of this nsqd, for topology aware consumption")
    topology_zone: str = option(STRING, "", "zone of this nsqd, for topology aware consumption")
    enable_experiment: list[str] = option(
        STRINGS, [], "experiment to switch on, repeatable: topology-aware-consumption"
    )

    # -- storage -----------------------------------------------------------------------------------------
    data_path: str = option(STRING, "", "existing directory of the data; empty = the current one")
    mem_queue_size: int = option(INTEGER, 10000, "messages kept for an ephemeral channel")
    max_bytes_per_file: int = option(INTEGER, 104857600, "bytes of a log file before the next is begun")
    sync_every: int = option(INTEGER, 2500, "messages per fsync; 1 = answer only after it")
    sync_timeout: Duration = option(DURATION, _span("2s"), "time per fsync")
    queue_scan_worker_pool_max: int = option(INTEGER, 4, "accepted for compatibility, no effect")
    queue_scan_selection_count: int = option(INTEGER, 20, "accepted for compatibility, no effect")

    # -- messages and commands ---------------------------------------------------------------------------
    msg_timeout: Duration = option(DURATION, _span("1m"), "time before an unanswered message is requeued")
    max_msg_timeout: Duration = option(DURATION, _span("15m"), "most a client may ask or touch for")
    max_msg_size: int = option(INTEGER, 1048576, "largest message in bytes")
    max_body_size: int = option(INTEGER, 5242880, "largest command body in bytes")
    max_req_timeout: Duration = option(DURATION, _span("1h"), "longest delay of REQ and DPUB")

    # -- what clients may ask for ------------------------------------------------------------------------
    max_heartbeat_interval: Duration = option(DURATION, _span("1m"), "longest heartbeat interval")
    max_rdy_count: int = option(INTEGER, 2500, "largest RDY count")
    max_output_buffer_size: int = option(INTEGER, 65536, "largest output buffer in bytes")
    max_output_buffer_timeout: Duration = option(DURATION, _span("30s"), "longest time between flushes")
    min_output_buffer_timeout: Duration = option(DURATION, _span("25ms"), "shortest time between flushes")
    output_buffer_timeout: Duration = option(DURATION, _span("250ms"), "time between flushes if none is asked")
    max_channel_consumers: int = option(INTEGER, 0, "most consumers of a channel; 0 = unlimited")

    # -- statistics --------------------------------------------------------------------------------------
    statsd_address: str = option(STRING, "", "UDP host:port of a statsd; empty = off")
    statsd_prefix: str = option(STRING, "nsq.%s", "prefix of statsd keys, %s is this host")
    statsd_interval: Duration = option(DURATION, _span("1m"), "time between statsd reports")
    statsd_mem_stats: bool = option(BOOLEAN, True, "report memory to statsd too")
    statsd_udp_packet_size: int = option(INTEGER, 508, "largest statsd packet in bytes")
    statsd_exclude_ephemeral: bool = option(BOOLEAN, False, "leave ephemeral topics and channels out of statsd")
    e2e_processing_latency_percentile: list[float] = option(
        FLOATS,
        [],
        "latency percentile to measure, above 0 up to 1, repeatable or with commas",
        key="e2e_processing_latency_percentiles",
    )
    e2e_processing_latency_window_time: Duration = option(
        DURATION, _span("10m"), "time the latency percentiles look back"
    )

    # -- TLS and compression -----------------------------------------------------------------------------
    tls_cert: str = option(STRING, "", "path of the certificate (PEM)")
    tls_key: str = option(STRING, "", "path of the certificate's key (PEM)")
    tls_client_auth_policy: str = option(STRING, "", "client certificates: require or require-verify")
    tls_root_ca_file: str = option(STRING, "", "path of the authorities' certificates (PEM)")
    tls_required: TlsRequired = option(TLS_REQUIRED, TlsRequired.NO, "require TLS of clients: true, false, tcp-https")
    tls_min_version: TlsVersion = option(
        TLS_VERSION, TlsVersion.TLS1_0, "least TLS version: tls1.0, tls1.1, tls1.2, tls1.3"
    )
    deflate: bool = option(BOOLEAN, True, "let clients use deflate")
    max_deflate_level: int = option(INTEGER, 6, "highest deflate level, 1 to 9")
    snappy: bool = option(BOOLEAN, True, "let clients use snappy")

    # -- ours: NSQ has none of them ----------------------------------------------------------------------
    retention_time: Duration = option(DURATION, Duration(0), "keep finished messages this long; 0 = off")
    retention_bytes: int = option(INTEGER, 0, "keep this many bytes of finished messages per topic; 0 = off")
    max_disk_bytes: int = option(INTEGER, 0, "most bytes of all logs on disk; 0 = unlimited")
    disk_policy: str = option(DISK_POLICY, "reject", "at --max-disk-bytes: reject or drop-oldest")
    requeue_on_disconnect: Duration | None = option(
        OPTIONAL_DURATION, None, "requeue a lost client's messages after this; unset = at their timeout"
    )
    cache_bytes: int = option(INTEGER, 67108864, "memory for the newest part of all logs, in bytes")
    http_auth: str = option(
        HTTP_AUTH,
        "",
        "with --auth-http-address, whether HTTP requests need a secret: required, optional or off; "
        "unset = required by the log API, optional elsewhere",
    )
    http_allowed_hosts: list[str] = option(
        STRINGS,
        [],
        "name HTTP clients may use for this nsqd besides addresses, names without a dot, its host name and broadcast "
        "address, repeatable or with commas; *.x = all below x, * = any",
    )
    max_connections: int = option(INTEGER, 0, "most client connections at once; 0 = by the limit of open files")
    busy_poll: Duration = option(DURATION, _span("200us"), "look for commands this long before sleeping, while it pays")


SPEC: Final[tuple[Option, ...]] = table(NsqdOptions)
_BY_KEY: Final = {row.key: row for row in SPEC if row.key is not None}
_NOT_NEGATIVE: Final = (
    "retention_time",
    "retention_bytes",
    "max_disk_bytes",
    "requeue_on_disconnect",
    "cache_bytes",
    "max_connections",
    "busy_poll",
)


def parse_options(argv: Sequence[str]) -> NsqdOptions:
    return parse("nsqd", NsqdOptions, argv, version_line("nsqd"))


def validate(options: NsqdOptions) -> None:
    """Makes the start-up checks that need neither socket nor file. A client certificate policy implies TLS."""
    if not 1 <= options.max_deflate_level <= DEFLATE_LEVEL_MAX:
        raise NsqdOptionsError("--max-deflate-level must be [1,9]")
    if not 0 <= options.node_id < NODE_ID_COUNT:
        raise NsqdOptionsError("--node-id must be [0,1024)")
    if options.tls_client_auth_policy and options.tls_required is TlsRequired.NO:
        options.tls_required = TlsRequired.YES
    if bool(options.tls_cert) != bool(options.tls_key):
        raise NsqdOptionsError("failed to build TLS config - --tls-cert and --tls-key must be given together")
    if options.tls_required is not TlsRequired.NO and not options.tls_cert:
        raise NsqdOptionsError("cannot require TLS client connections without TLS key and cert")
    if options.auth_http_request_method not in AUTH_REQUEST_METHODS:
        raise NsqdOptionsError("--auth-http-request-method must be post or get")
    if options.http_auth == "required" and not options.auth_http_address:
        raise NsqdOptionsError("--http-auth=required needs --auth-http-address")
    for percentile in options.e2e_processing_latency_percentile:
        if not 0 < percentile <= 1:
            shown = repr(percentile).removesuffix(".0")
            raise NsqdOptionsError(f"invalid E2E processing latency percentile: {shown}")
    for attribute in _NOT_NEGATIVE:
        if (getattr(options, attribute) or 0) < 0:
            raise NsqdOptionsError(f"--{attribute.replace('_', '-')} must not be negative")


def config_value(options: NsqdOptions, key: str) -> str | int | bool | list[str] | list[float] | None:
    """Returns what `GET /config/<key>` shows: durations in nanoseconds, words by number. Other keys raise KeyError."""
    value: str | int | bool | list[str] | list[float] | None = getattr(options, _BY_KEY[key].attribute)
    # Durations and numbered words are subclasses of int; JSON wants the plain number.
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
