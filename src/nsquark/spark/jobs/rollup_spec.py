"""Reads from a TOML file what a rollup computes, and checks it before Spark is started."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nsquark.base.durations import Duration
from nsquark.base.errors import UserError
from nsquark.wire.names import is_ephemeral, is_valid_name

MEASURES: Final = ("sum", "min", "max", "avg")
OWN_COLUMNS: Final = ("window_start", "window_end", "topic", "count")
"""Every result has these columns, beside the keys and measures."""
NAMES: Final = ("topics", "window", "watermark", "time", "keys", *MEASURES, "output")
OUTPUT_NAMES: Final = ("parquet", "topic")
WATERMARK_DEFAULT: Final = "10s"
SPEC_BYTES_MAX: Final = 1 << 20

_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")
"""This matches a field of the body, or one inside of another: `user.country`."""


@dataclass(frozen=True)
class RollupSpec:
    """Says what a rollup computes of the messages of topics, for each window of time and each combination of keys."""

    topics: tuple[str, ...]
    window_ms: int
    watermark_ms: int
    """A window stays open this long after its end, for messages that come late."""
    time: str | None
    """This field has the time of a message; if it is None, the time of publishing counts."""
    keys: tuple[str, ...]
    measures: Mapping[str, tuple[str, ...]]
    """This maps each measure to the fields that it is computed of."""
    parquet: str
    topic: str | None

    @property
    def fields(self) -> list[str]:
        """Returns all fields that are read from a body, each once."""
        numbers = [field for fields in self.measures.values() for field in fields]
        return list(dict.fromkeys([*([self.time] if self.time else []), *self.keys, *numbers]))

    @property
    def identity(self) -> str:
        """Returns what may not change while the results and the open windows of earlier runs are kept."""
        parts = {"window_ms": self.window_ms, "time": self.time, "keys": self.keys, "measures": dict(self.measures)}
        return json.dumps({**parts, "topic": self.topic}, sort_keys=True)


def read_spec(path: Path) -> RollupSpec:
    """Reads a spec; raises UserError with the file, the setting and what to write instead."""
    try:
        with path.open("rb") as file:
            text = file.read(SPEC_BYTES_MAX).decode()
        return _spec(tomllib.loads(text))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def column_of(field: str) -> str:
    """Returns the column for a field: a dot in its path becomes an underscore, since a dot means more in SQL."""
    return field.replace(".", "_")


def _spec(given: dict[str, Any]) -> RollupSpec:
    _refuse_unknown(given, NAMES, "")
    output = given.get("output")
    if not isinstance(output, dict) or not isinstance(output.get("parquet"), str) or not output["parquet"]:
        raise ValueError('[output] says where results go: write [output] and parquet = "/var/lib/rollup"')
    _refuse_unknown(output, OUTPUT_NAMES, "output.")
    topic = output.get("topic")
    if topic is not None and (not isinstance(topic, str) or not is_valid_name(topic) or is_ephemeral(topic)):
        raise ValueError(f"output.topic {topic!r} is no topic with a log: use 1 to 64 of a-z A-Z 0-9 . _ -")
    spec = RollupSpec(
        topics=_topics(given),
        window_ms=_duration_ms(given, "window", None, 1),
        watermark_ms=_duration_ms(given, "watermark", WATERMARK_DEFAULT, 0),
        time=_fields(given, "time", [given["time"]])[0] if "time" in given else None,
        keys=_fields(given, "keys", given.get("keys", [])),
        measures={name: _fields(given, name, given[name]) for name in MEASURES if name in given},
        parquet=output["parquet"],
        topic=topic,
    )
    if spec.topic in spec.topics:
        raise ValueError(f"output.topic {spec.topic!r} is read too, and results would be counted again: name another")
    _refuse_doubles(spec)
    return spec


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"there is no setting {prefix}{name}: known are {', '.join(prefix + k for k in known)}")


def _topics(given: Mapping[str, Any]) -> tuple[str, ...]:
    topics = given.get("topics")
    if not isinstance(topics, list) or not topics:
        raise ValueError('topics says what is read: write topics = ["orders"]')
    for topic in topics:
        if not isinstance(topic, str) or not is_valid_name(topic):
            raise ValueError(f"{topic!r} in topics is no name of a topic: use 1 to 64 of a-z A-Z 0-9 . _ -")
    return tuple(topics)


def _duration_ms(given: Mapping[str, Any], name: str, default: str | None, least: int) -> int:
    text = given.get(name, default)
    if not isinstance(text, str):
        raise ValueError(f'{name} is a time in quotes: write {name} = "1m"')
    try:
        found = Duration.parse(text).ms
    except ValueError as error:
        raise ValueError(f'{name}: {error}: write {name} = "1m"') from None
    if found < least:
        raise ValueError(f"{name} {text!r} is too short: write at least {least}ms")
    return found


def _fields(given: Mapping[str, Any], name: str, fields: Any) -> tuple[str, ...]:
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
        raise ValueError(f'{name} has fields of the body: write {name} = ["amount"]')
    for field in fields:
        if not _FIELD.fullmatch(field):
            raise ValueError(f"{field!r} in {name} is no field: write names like amount or user.country")
    return tuple(fields)


def _refuse_doubles(spec: RollupSpec) -> None:
    """Raises if Spark would not tell two names apart, or if a field is used as a value and has fields of its own.

    Case does not matter in Spark's names.
    """
    columns = [*OWN_COLUMNS, *map(column_of, spec.keys)]
    columns += [f"{name}_{column_of(field)}" for name, fields in spec.measures.items() for field in fields]
    for names in (columns, spec.fields):
        lowered = [name.lower() for name in names]
        for name in names:
            if lowered.count(name.lower()) > 1:
                raise ValueError(f"two columns would be called {name}: rename a field, or leave one out")
    for field in spec.fields:
        inner = next((other for other in spec.fields if other.lower().startswith(f"{field.lower()}.")), None)
        if inner:
            raise ValueError(f"{field} is used as a value, and {inner} as a field inside of it: use one of them")
    written: dict[str, str] = {}
    for field in spec.fields:
        for dot in re.finditer(r"\.", field):
            outer = field[: dot.start()]
            before = written.setdefault(outer.lower(), outer)
            if before != outer:
                raise ValueError(f"{before} and {outer} differ only in case, which Spark ignores: use one of them")
