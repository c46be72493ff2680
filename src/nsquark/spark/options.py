"""Reads and checks the options of the source, before anything is asked of an nsqd."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from nsquark.base.durations import NS_PER_MS, NS_PER_US, Duration
from nsquark.base.secrets import read_secret
from nsquark.wire.names import is_ephemeral, is_valid_name

NAMES = (
    "nsqd",
    "lookupd",
    "topic",
    "topicPattern",
    "channel",
    "channelTtl",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "minMessagesPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "headers",
    "failOnDataLoss",
    "lostNsqds",
    "expectedNsqds",
    "onForeignNsqd",
    "pushFilters",
    "readTimeout",
    "tlsRootCaFile",
    "tlsCertFile",
    "tlsKeyFile",
    "tlsInsecureSkipVerify",
    "authSecret",
    "authSecretFile",
)
BATCH_ONLY = ("endingOffsets", "endingTimestamp", "expectedNsqds", "pushFilters")
STREAM_ONLY = (
    "channel",
    "channelTtl",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "minMessagesPerTrigger",
    "maxTriggerDelay",
)

READ_TIMEOUT_S_DEFAULT = 60.0
TRIGGER_DELAY_S_DEFAULT = 15 * 60.0
CHANNEL_TTL_S_MIN = 10.0
"""channelTtl is at least this: the query shows at a third of it that it is alive, and the driver may pause."""
PARTITIONS_MAX = 4096
COUNT_MAX = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

_KAFKA = {
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "assign": "startingOffsets and topic",
    "kafka.bootstrap.servers": "nsqd or lookupd",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "minoffsetspertrigger": "minMessagesPerTrigger",
    "groupid": "channel",
    "kafka.group.id": "channel",
    "path": "topic: load() takes no argument",
}
"""Users of Spark's Kafka source write these names by habit; each has the name that is meant here."""


TABLES = (
    "Spark does not hand the options of CREATE TABLE to a source in Python when the table is read: write "
    "CREATE TEMPORARY VIEW … USING nsq OPTIONS (nsqd '…', topic '…') instead"
)


class OptionError(ValueError):
    """Says that an option is wrong; the text says what to write instead."""


@dataclass(frozen=True)
class HttpTls:
    """Says how to speak to https:// addresses. The files must be on every machine that runs a task."""

    root_ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    skip_verify: bool = False


@dataclass(frozen=True)
class Access:
    """Holds what is needed to ask nsqds and nsqlookupds: TLS files, and a secret."""

    tls: HttpTls = HttpTls()
    secret: str = field(default="", repr=False)
    """This is the secret for nsqds with AUTH."""


@dataclass(frozen=True)
class Position:
    """Says where reading starts or ends: at an end of the log, at a time, or at a place for each key of `places`."""

    kind: Literal["earliest", "latest", "time", "places"]
    time_ns: int = 0
    places: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True)
class ExpectedNsqds:
    """Says how many nsqds there must be at least, and which ids they must have, if ids were given."""

    count: int
    ids: tuple[str, ...] = ()


EARLIEST = Position("earliest")
LATEST = Position("latest")


@dataclass(frozen=True)
class SourceOptions:
    """Holds the options of the source, parsed and checked."""

    nsqd: tuple[str, ...]
    lookupd: tuple[str, ...]
    topics: tuple[str, ...]
    topic_pattern: str | None
    channel: str | None
    channel_ttl_s: float
    starting: Position | None
    """Reading starts here. If it is None, a batch starts at the earliest message and a stream at the latest, as with
    Spark's Kafka source.
    """
    ending: Position
    messages_max: int | None
    bytes_max: int | None
    messages_min: int | None
    trigger_delay_s: float
    partitions_min: int
    headers: bool
    """If it is set, envelopes are opened, and there is a column of headers."""
    fail_on_data_loss: bool
    lost_nsqds: frozenset[str]
    expected_nsqds: ExpectedNsqds | None
    pushes_filters: bool
    """If it is set, filters choose what is read, provided that Spark's setting for pushing them down is on."""
    skips_foreign_nsqds: bool
    """If it is set, nsqds without a log API are left out, while a cluster moves from NSQ."""
    read_timeout_s: float
    access: Access
    given: frozenset[str]
    """These are the names of the options that were given."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "SourceOptions":
        """Reads the options. Case does not matter in names, as everywhere in Spark. Unknown names are ignored here."""
        lowered = {name.lower(): value for name, value in options.items()}
        given = {name: lowered[name.lower()] for name in NAMES if name.lower() in lowered}
        _check_pairs(given)
        return cls(
            nsqd=read_addresses(given, "nsqd"),
            lookupd=read_addresses(given, "lookupd"),
            topics=_topics(given),
            topic_pattern=_pattern(given),
            channel=_channel(given),
            channel_ttl_s=_channel_ttl_s(given),
            starting=_position(given, "starting"),
            ending=_position(given, "ending") or LATEST,
            messages_max=read_count(given, "maxMessagesPerTrigger"),
            bytes_max=read_count(given, "maxBytesPerTrigger"),
            messages_min=read_count(given, "minMessagesPerTrigger"),
            trigger_delay_s=read_seconds(given, "maxTriggerDelay", TRIGGER_DELAY_S_DEFAULT),
            partitions_min=_partitions(given),
            headers=read_flag(given, "headers", False),
            fail_on_data_loss=read_flag(given, "failOnDataLoss", True),
            lost_nsqds=frozenset(_listed(given, "lostNsqds")),
            expected_nsqds=_expected_nsqds(given),
            pushes_filters=read_flag(given, "pushFilters", False),
            skips_foreign_nsqds=_skips_foreign(given),
            read_timeout_s=read_seconds(given, "readTimeout", READ_TIMEOUT_S_DEFAULT),
            access=Access(read_tls(given), read_auth_secret(given)),
            given=frozenset(given),
        )

    @property
    def has_limits(self) -> bool:
        return bool(self.messages_max or self.bytes_max or self.messages_min)

    def check_batch(self) -> None:
        self._refuse(STREAM_ONLY, "is for streams: leave it out of a batch read, or use spark.readStream")
        if self.starting == LATEST:
            raise OptionError(
                "startingOffsets=latest leaves nothing to read in a batch: write earliest, a JSON object, "
                "or startingTimestamp"
            )

    def check_stream(self) -> None:
        self._refuse(BATCH_ONLY, "is for batch reads: leave it out of a stream, or use spark.read")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if name in self.given:
                raise OptionError(f"{name} {why}")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises OptionError for a name that is not `known`, with the one that was probably meant."""
    by_lower = {name.lower(): name for name in known}
    for name in given:
        if name.lower() in by_lower:
            continue
        meant = _KAFKA.get(name.lower())
        if meant is None:
            close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
            meant = by_lower[close[0]] if close else None
        advice = f"write {meant}" if meant else f"the options are {', '.join(sorted(by_lower.values(), key=str.lower))}"
        raise OptionError(f"format nsq has no option {name!r}: {advice}")


def _check_pairs(given: Mapping[str, str]) -> None:
    if not given:
        raise OptionError(f"there are no options: write nsqd or lookupd, and topic. {TABLES}")
    if ("nsqd" in given) == ("lookupd" in given):
        raise OptionError(
            "write where the messages are: either nsqd, the HTTP addresses of nsqds (127.0.0.1:4151), "
            "or lookupd, the HTTP addresses of nsqlookupds (127.0.0.1:4161)" + ("; not both" if "nsqd" in given else "")
        )
    if ("topic" in given) == ("topicPattern" in given):
        raise OptionError("write what to read: either topic or topicPattern" + ("; not both" * ("topic" in given)))
    for side in ("starting", "ending"):
        if f"{side}Offsets" in given and f"{side}Timestamp" in given:
            raise OptionError(f"write either {side}Offsets or {side}Timestamp, not both")
    for name, needed in (
        ("channelTtl", "channel"),
        ("maxTriggerDelay", "minMessagesPerTrigger"),
        ("tlsKeyFile", "tlsCertFile"),
        ("tlsCertFile", "tlsKeyFile"),
    ):
        if name in given and needed not in given:
            raise OptionError(f"{name} means nothing without {needed}: write both, or neither")
    low, high = read_count(given, "minMessagesPerTrigger"), read_count(given, "maxMessagesPerTrigger")
    if low and high and low > high:
        raise OptionError(f"minMessagesPerTrigger={low} is above maxMessagesPerTrigger={high}: write a smaller minimum")


def _listed(given: Mapping[str, str], name: str) -> list[str]:
    return [item.strip() for item in given.get(name, "").split(",") if item.strip()]


def read_addresses(given: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Reads addresses, each as `host:port` or `https://host:port`."""
    if name not in given:
        return ()
    addresses = tuple(dict.fromkeys(item.removeprefix("http://").rstrip("/") for item in _listed(given, name)))
    port = 4151 if name == "nsqd" else 4161
    if not addresses:
        raise OptionError(f"{name} is empty: write one or more addresses like 127.0.0.1:{port}, separated by commas")
    for address in addresses:
        match = re.fullmatch(r"(?:https://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
        if match is None or not 0 < int(match[1]) < 65536:
            raise OptionError(f"{name} has {address!r}, which is no address: write host:port, like 127.0.0.1:{port}")
    return addresses


def _topics(given: Mapping[str, str]) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(_listed(given, "topic")))
    if "topic" in given and not topics:
        raise OptionError("topic is empty: write the name of a topic")
    for topic in topics:
        if not is_valid_name(topic):
            raise OptionError(
                f"topic {topic!r} is no name of a topic: write 1 to 64 letters, digits and . _ -, or use topicPattern"
            )
        if is_ephemeral(topic):
            raise OptionError(f"topic {topic!r} is ephemeral: it has no files that could be read by range")
    return topics


def _pattern(given: Mapping[str, str]) -> str | None:
    pattern = given.get("topicPattern")
    if pattern is None:
        return None
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"topicPattern {pattern!r} is no regular expression: {error}") from None
    return pattern


def _channel(given: Mapping[str, str]) -> str | None:
    channel = given.get("channel")
    if channel is None:
        return None
    if not is_valid_name(channel) or is_ephemeral(channel):
        raise OptionError(f"channel {channel!r} is no name of a kept channel: write 1 to 64 letters, digits and . _ -")
    return channel


def _channel_ttl_s(given: Mapping[str, str]) -> float:
    ttl_s = read_seconds(given, "channelTtl", 0.0)
    if "channelTtl" in given and ttl_s < CHANNEL_TTL_S_MIN:
        raise OptionError(f"channelTtl={given['channelTtl']} is too short: write {CHANNEL_TTL_S_MIN:.0f}s or more")
    return ttl_s


def _skips_foreign(given: Mapping[str, str]) -> bool:
    word = given.get("onForeignNsqd", "fail").strip().lower()
    if word not in ("fail", "skip"):
        raise OptionError(f"onForeignNsqd={given['onForeignNsqd']!r}: write fail or skip")
    return word == "skip"


def _expected_nsqds(given: Mapping[str, str]) -> ExpectedNsqds | None:
    ids = tuple(dict.fromkeys(_listed(given, "expectedNsqds")))
    if "expectedNsqds" not in given:
        return None
    if len(ids) == 1 and ids[0].isdecimal() and 0 < int(ids[0]) <= COUNT_MAX:
        return ExpectedNsqds(int(ids[0]))
    if not ids or any(item.isdecimal() for item in ids):
        raise OptionError(
            f"expectedNsqds={given['expectedNsqds']!r}: write how many nsqds there are, or their ids by comma (the "
            "column nsqd has them, and /log/info)"
        )
    return ExpectedNsqds(len(ids), ids)


def _position(given: Mapping[str, str], side: str) -> Position | None:
    if text := given.get(f"{side}Timestamp"):
        return Position("time", time_ns=_time_ns(f"{side}Timestamp", text))
    name = f"{side}Offsets"
    if name not in given:
        return None
    text = given[name].strip()
    words = {"earliest": EARLIEST, "latest": LATEST} if side == "starting" else {"latest": LATEST}
    if text.lower() in words:
        return words[text.lower()]
    if not text.startswith("{"):
        raise OptionError(f"{name}={text!r}: write {', '.join(words)} or a JSON object like {_EXAMPLE}")
    return Position("places", places=_places(name, text))


_EXAMPLE = '{"orders@<nsqd id>": 454958866497536}'


def _places(name: str, text: str) -> tuple[tuple[str, int | str], ...]:
    """Reads a sequence number, `earliest` or `latest` for each key. An offset that Spark logged is taken too: its
    `next` is where reading starts or ends.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{name} is no JSON ({error}): write an object like {_EXAMPLE}") from None
    places: dict[str, int | str] = {}
    for key, value in found.items():
        if "@" not in key and key in ("v", "q", "t", "n"):
            continue
        place: int | str = value.get("next", "") if isinstance(value, dict) else value
        topic, _, nsqd_id = key.partition("@")
        is_number = isinstance(place, int) and not isinstance(place, bool) and place >= 0
        if not is_valid_name(topic) or not nsqd_id or not (is_number or place in ("earliest", "latest")):
            raise OptionError(
                f'{name} has {key!r}: {value!r}; write "<topic>@<nsqd id>": a sequence number, '
                '"earliest" or "latest" (ids are in the column nsqd and in /log/info)'
            )
        places[key] = place
    return tuple(sorted(places.items()))


def _time_ns(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,16}", text.strip()):
        return int(text) * NS_PER_MS
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(
            f"{name}={text!r}: write milliseconds since 1970, or a time with its zone like 2026-01-31T12:00:00Z"
        )
    time_us = (moment - EPOCH) // MICROSECOND
    if time_us < 0:
        raise OptionError(f"{name}={text!r} is before 1970: write startingOffsets=earliest")
    return time_us * NS_PER_US


def read_count(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    text = given[name].strip()
    if not re.fullmatch(r"[0-9]+", text) or not 0 < int(text) <= COUNT_MAX:
        raise OptionError(f"{name}={given[name]!r}: write a whole number of 1 or more")
    return int(text)


def _partitions(given: Mapping[str, str]) -> int:
    count = read_count(given, "minPartitions") or 1
    if count > PARTITIONS_MAX:
        raise OptionError(f"minPartitions={count}: write at most {PARTITIONS_MAX}")
    return count


def read_flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    if name not in given:
        return default
    text = given[name].strip().lower()
    if text not in ("true", "false"):
        raise OptionError(f"{name}={given[name]!r}: write true or false")
    return text == "true"


def read_seconds(given: Mapping[str, str], name: str, default_s: float) -> float:
    if name not in given:
        return default_s
    try:
        duration = Duration.parse(given[name].strip())
    except ValueError:
        duration = Duration(0)
    if duration <= 0:
        raise OptionError(f"{name}={given[name]!r}: write a time with its unit, like 500ms, 60s or 5m")
    return duration.seconds


def read_auth_secret(given: Mapping[str, str]) -> str:
    """Reads the secret. A file is read here, on the driver; executors get its content."""
    if "authSecretFile" not in given:
        secret = given.get("authSecret", "")
        if not secret.isprintable():
            raise OptionError("authSecret has characters that cannot be sent: write it without line breaks")
        return secret
    if "authSecret" in given:
        raise OptionError("write either authSecret or authSecretFile, not both")
    try:
        return read_secret(given["authSecretFile"])
    except ValueError as error:
        raise OptionError(f"authSecretFile {error}: write the path of a file with the secret, on the driver") from None


def read_tls(given: Mapping[str, str]) -> HttpTls:
    return HttpTls(
        root_ca_file=given.get("tlsRootCaFile"),
        cert_file=given.get("tlsCertFile"),
        key_file=given.get("tlsKeyFile"),
        skip_verify=read_flag(given, "tlsInsecureSkipVerify", False),
    )
