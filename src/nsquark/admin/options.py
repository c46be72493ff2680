"""Declares the options of nsqadmin, NSQ's own and then ours. The order and wording of the checks are NSQ's."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from nsquark.base.addresses import split_address
from nsquark.base.durations import Duration
from nsquark.base.flags import Option, option, option_table, parse, table
from nsquark.base.kinds import BOOLEAN, DURATION, INTEGER, LOG_LEVEL, STRING, STRINGS
from nsquark.base.logs import Level
from nsquark.base.version import version_line

POLL_INTERVAL_NS_MIN: Final = 100_000_000


class OptionsError(Exception):
    """Says that the options contradict each other or leave their range; nsqadmin must not start."""


@option_table
class NsqadminOptions:
    version: bool = option(BOOLEAN, False, "print the version and exit", in_config=False)
    config: str = option(STRING, "", "path of a TOML config file", in_config=False)
    verbose: bool = option(BOOLEAN, False, "deprecated, no effect: use --log-level", in_config=False)
    log_level: Level = option(LOG_LEVEL, Level.INFO, "least level to log: debug, info, warn, error, fatal")
    log_prefix: str = option(STRING, "[nsqadmin] ", "start of each log line")
    http_address: str = option(STRING, "0.0.0.0:4171", "host:port for browsers")
    base_path: str = option(STRING, "/", "path below which all pages are, for a proxy that serves more than this")
    dev_static_dir: str = option(STRING, "", "directory to serve /static/ from, for work on nsqadmin itself")
    lookupd_http_address: list[str] = option(
        STRINGS, [], "host:port of an nsqlookupd's HTTP, repeatable", key="nsqlookupd_http_addresses"
    )
    nsqd_http_address: list[str] = option(
        STRINGS, [], "host:port of an nsqd's HTTP, repeatable, instead of nsqlookupds", key="nsqd_http_addresses"
    )
    graphite_url: str = option(STRING, "", "URL of a graphite that has the statsd figures, for links and rates")
    proxy_graphite: bool = option(BOOLEAN, False, "pass /render on to graphite")
    statsd_counter_format: str = option(
        STRING, "stats.counters.%s.count", "how statsd names counters; empty: as they are"
    )
    statsd_gauge_format: str = option(STRING, "stats.gauges.%s", "how statsd names gauges; empty: as they are")
    statsd_prefix: str = option(STRING, "nsq.%s", "as that of nsqd")
    statsd_interval: Duration = option(DURATION, Duration.parse("1m"), "as that of nsqd")
    notification_http_endpoint: str = option(STRING, "", "URL to which every change is POSTed as JSON")
    http_client_connect_timeout: Duration = option(DURATION, Duration.parse("2s"), "to connect to nsqds, nsqlookupds")
    http_client_request_timeout: Duration = option(DURATION, Duration.parse("5s"), "for a whole request to them")
    http_client_tls_insecure_skip_verify: bool = option(BOOLEAN, False, "do not verify their certificates")
    http_client_tls_root_ca_file: str = option(STRING, "", "CA file to verify their certificates with")
    http_client_tls_cert: str = option(STRING, "", "certificate file to show to them")
    http_client_tls_key: str = option(STRING, "", "key file of that certificate")
    allow_config_from_cidr: str = option(STRING, "127.0.0.1/8", "network that may use /config; empty: all")
    acl_http_header: str = option(STRING, "X-Forwarded-User", "header in which a proxy names the user")
    admin_user: list[str] = option(
        STRINGS,
        [],
        "user who may change things, as named in --acl-http-header, repeatable; none: everybody",
        key="admin_users",
    )

    # -- ours: NSQ has none of them ----------------------------------------------------------------------
    auth_file: str = option(STRING, "", "file of users, password hashes and roles; `nsquark passwd` writes it")
    auth_secret_file: str = option(STRING, "", "file with the secret to show to nsqds with --http-auth")
    session_ttl: Duration = option(DURATION, Duration.parse("12h"), "time after which a login ends")
    no_message_browser: bool = option(BOOLEAN, False, "do not show messages, nor publish any")
    message_browser_max_bytes: int = option(INTEGER, 65536, "bytes of one message that the browser shows; more is cut")
    poll_interval: Duration = option(
        DURATION, Duration.parse("2s"), "pace at which nsqds are asked while pages are open"
    )
    http_allowed_hosts: list[str] = option(
        STRINGS,
        [],
        "name browsers may use for this nsqadmin besides addresses, names without a dot and its host name, repeatable "
        "or with commas; *.x = all below x, * = any",
    )


SPEC: Final[tuple[Option, ...]] = table(NsqadminOptions)


def parse_options(argv: Sequence[str]) -> NsqadminOptions:
    return parse("nsqadmin", NsqadminOptions, argv, version_line("nsqadmin"))


def check_options(options: NsqadminOptions) -> None:
    """Raises OptionsError with NSQ's words for the first thing that is wrong."""
    if not options.nsqd_http_address and not options.lookupd_http_address:
        raise OptionsError("--nsqd-http-address or --lookupd-http-address required")
    if options.nsqd_http_address and options.lookupd_http_address:
        raise OptionsError("use --nsqd-http-address or --lookupd-http-address not both")
    if options.http_client_tls_cert and not options.http_client_tls_key:
        raise OptionsError("--http-client-tls-key must be specified with --http-client-tls-cert")
    if options.http_client_tls_key and not options.http_client_tls_cert:
        raise OptionsError("--http-client-tls-cert must be specified with --http-client-tls-key")
    for flag, addresses in (("lookupd", options.lookupd_http_address), ("nsqd", options.nsqd_http_address)):
        for address in addresses:
            try:
                split_address(address)
            except ValueError as error:
                raise OptionsError(f"failed to resolve --{flag}-http-address ({address}) - {error}") from None
    if options.proxy_graphite or options.graphite_url:
        url = urlsplit(options.graphite_url)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise OptionsError(f"failed to parse --graphite-url='{options.graphite_url}' - give it as http://host:port")
    if options.allow_config_from_cidr:
        try:
            ipaddress.ip_network(options.allow_config_from_cidr, strict=False)
        except ValueError as error:
            raise OptionsError(
                f"failed to parse --allow-config-from-cidr='{options.allow_config_from_cidr}' - {error}"
            ) from None
    if options.poll_interval < POLL_INTERVAL_NS_MIN:
        raise OptionsError("--poll-interval must be at least 100ms")
    if options.message_browser_max_bytes < 1:
        raise OptionsError("--message-browser-max-bytes must be at least 1")
    if options.dev_static_dir and not Path(options.dev_static_dir).is_dir():
        raise OptionsError(f"--dev-static-dir {options.dev_static_dir} is no directory")


def normal_base_path(base_path: str) -> str:
    """Returns a base path without a slash at its end: "" for the root, else "/a/b"."""
    return "/" + base_path.strip("/") if base_path.strip("/") else ""
