"""Reads and checks the options of the sink, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nsquark.spark.options import NAMES as SOURCE_NAMES
from nsquark.spark.options import (
    Access,
    HttpTls,
    OptionError,
    read_addresses,
    read_auth_secret,
    read_count,
    read_flag,
    read_seconds,
    read_tls,
)
from nsquark.wire.names import is_ephemeral, is_valid_name

OPTION_NAMES = frozenset(
    {
        "nsqd",
        "lookupd",
        "topic",
        "idempotent",
        "token",
        "maxMessageBytes",
        "maxRequestBytes",
        "writeTimeout",
        "authSecret",
        "authSecretFile",
        "tlsRootCaFile",
        "tlsCertFile",
        "tlsKeyFile",
        "tlsInsecureSkipVerify",
    }
)

MESSAGE_BYTES_MAX_DEFAULT = 1 << 20
"""This is nsqd's own default of --max-msg-size."""
REQUEST_BYTES_MAX_DEFAULT = 1 << 20
"""An MPUB has at most this many bytes: beyond it nothing gets faster. nsqd takes 5 MB by default."""
REQUEST_BYTES_MIN = 1024
WRITE_TIMEOUT_S_DEFAULT = 60.0
TOKEN_CHARS_MAX = 1000


@dataclass(frozen=True)
class SinkOptions:
    """Holds the options of the sink, parsed and checked."""

    nsqd: tuple[str, ...]
    lookupd: tuple[str, ...]
    topic: str | None
    """All rows go to this topic; if it is None, the column `topic` names that of each row."""
    idempotent: bool
    token: str | None
    """This names a batch write, so that it can be repeated."""
    message_bytes_max: int
    request_bytes_max: int
    write_timeout_s: float
    auth_secret: str = field(repr=False)
    tls: HttpTls | None
    """Connections to nsqds use this TLS; if it is None, they are plain."""

    @property
    def access(self) -> Access:
        """Returns what HTTP requests need: TLS files, which https addresses use, and the secret."""
        return Access(self.tls or HttpTls(), self.auth_secret)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Reads the options. Case does not matter in their names. The caller refuses unknown names."""
        lowered = {name.lower(): value for name, value in options.items()}
        _refuse_source_options(lowered)
        given = {name: lowered[name.lower()] for name in OPTION_NAMES if name.lower() in lowered}
        _check_pairs(given)
        nsqd = read_addresses(given, "nsqd")
        speaks_tls = any(name.startswith("tls") for name in given) or any(a.startswith("https://") for a in nsqd)
        return cls(
            nsqd=nsqd,
            lookupd=read_addresses(given, "lookupd"),
            topic=_topic(given),
            idempotent=read_flag(given, "idempotent", False),
            token=_token(given),
            message_bytes_max=read_count(given, "maxMessageBytes") or MESSAGE_BYTES_MAX_DEFAULT,
            request_bytes_max=max(read_count(given, "maxRequestBytes") or REQUEST_BYTES_MAX_DEFAULT, REQUEST_BYTES_MIN),
            write_timeout_s=read_seconds(given, "writeTimeout", WRITE_TIMEOUT_S_DEFAULT),
            auth_secret=read_auth_secret(given),
            tls=read_tls(given) if speaks_tls else None,
        )


def _refuse_source_options(lowered: Mapping[str, str]) -> None:
    for name in SOURCE_NAMES:
        if name.lower() in lowered and name not in OPTION_NAMES:
            raise OptionError(f"{name} is for reading: leave it out of a write")


def _check_pairs(given: Mapping[str, str]) -> None:
    if ("nsqd" in given) == ("lookupd" in given):
        raise OptionError(
            "write where to publish: either nsqd, the HTTP addresses of nsqds (127.0.0.1:4151), "
            "or lookupd, the HTTP addresses of nsqlookupds (127.0.0.1:4161)" + ("; not both" if "nsqd" in given else "")
        )
    is_idempotent = read_flag(given, "idempotent", False)
    if is_idempotent and "lookupd" in given:
        raise OptionError(
            "idempotent=true needs a fixed list of nsqds, since a retried task must meet the same one: write nsqd "
            "instead of lookupd"
        )
    if "token" in given and not is_idempotent:
        raise OptionError("token means nothing without idempotent=true: write both, or neither")
    if ("tlsCertFile" in given) != ("tlsKeyFile" in given):
        raise OptionError("tlsCertFile and tlsKeyFile belong together: write both, or neither")


def _topic(given: Mapping[str, str]) -> str | None:
    topic = given.get("topic")
    if topic is None:
        return None
    if not is_valid_name(topic):
        raise OptionError(f"topic {topic!r} is no name of a topic: write one name of 1 to 64 letters, digits and . _ -")
    if is_ephemeral(topic) and read_flag(given, "idempotent", False):
        raise OptionError(f"topic {topic!r} is ephemeral, and has no log to append to: leave out idempotent=true")
    return topic


def _token(given: Mapping[str, str]) -> str | None:
    token = given.get("token")
    if token is not None and not 1 <= len(token) <= TOKEN_CHARS_MAX:
        raise OptionError(f"token has {len(token)} characters: write 1 to {TOKEN_CHARS_MAX}")
    return token
