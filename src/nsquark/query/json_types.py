"""Infers a Spark type from many JSON values, and tells which of the values do not fit it.

A field gets the type that nearly all of its values have. The few others do not fit, and are counted. Where the others
are many, the type is `string`, which fits anything: Spark's from_json gives any value that is no string as its JSON
text.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

DOMINANT_FRACTION: Final = 0.9
"""A field is a `string` if no kind of value has at least this share of its values."""
FIELDS_MAX: Final = 200
"""An object with more different names than this is a map."""
BIGINTS: Final = range(-(1 << 63), 1 << 63)


@dataclass
class Seen:
    """Counts the kinds of values that were seen at one place of many documents."""

    kinds: Counter[str] = field(default_factory=Counter)
    fields: "dict[str, Seen]" = field(default_factory=dict)
    items: "Seen | None" = None

    def add(self, value: Any) -> None:
        kind = kind_of(value)
        self.kinds[kind] += 1
        if kind == "struct":
            for name, inner in value.items():
                self.fields.setdefault(name, Seen()).add(inner)
        elif kind == "array":
            self.items = self.items or Seen()
            for inner in value:
                self.items.add(inner)

    def merge(self, others: "Iterable[Seen]") -> "Seen":
        """Returns what was seen here and at other places, as if they were one place."""
        merged = Seen(Counter(self.kinds), dict(self.fields), self.items)
        for other in others:
            merged.kinds += other.kinds
            for name, inner in other.fields.items():
                known = merged.fields.get(name)
                merged.fields[name] = inner if known is None else known.merge([inner])
            if other.items is not None:
                merged.items = other.items if merged.items is None else merged.items.merge([other.items])
        return merged


@dataclass(frozen=True)
class Type:
    """Describes a type of Spark, with the types inside of it."""

    name: str
    fields: "tuple[tuple[str, Type], ...]" = ()
    items: "Type | None" = None

    def ddl(self) -> str:
        if self.name == "struct":
            return f"STRUCT<{', '.join(f'{_quoted(name)}: {kind.ddl()}' for name, kind in self.fields)}>"
        if self.items is not None:
            inside = self.items.ddl()
            return f"ARRAY<{inside}>" if self.name == "array" else f"MAP<STRING, {inside}>"
        return self.name.upper()

    def columns(self) -> str:
        """Returns the DDL for from_json and `.schema(...)`: the columns of a struct, or the type itself."""
        if self.name != "struct":
            return self.ddl()
        return ", ".join(f"{_quoted(name)} {kind.ddl()}" for name, kind in self.fields)


STRING: Final = Type("string")


def infer(seen: Seen) -> Type:
    kinds = Counter({kind: count for kind, count in seen.kinds.items() if kind != "null"})
    numbers = [kind for kind in ("double", "decimal(20,0)", "bigint") if kinds[kind]]
    if numbers:
        kinds[numbers[0]] = sum(kinds.pop(kind) for kind in numbers)
    name, count = kinds.most_common(1)[0] if kinds else ("string", 0)
    if count < DOMINANT_FRACTION * kinds.total():
        return STRING
    if name == "array":
        return Type("array", items=infer(seen.items) if seen.items is not None else STRING)
    if name != "struct":
        return Type(name)
    if len(seen.fields) > FIELDS_MAX:
        return Type("map", items=infer(Seen().merge(seen.fields.values())))
    if not seen.fields:
        return Type("map", items=STRING)  # Spark has no empty struct
    return Type("struct", tuple((name, infer(inner)) for name, inner in seen.fields.items()))


def misfits(value: Any, kind: Type, place: str = "the body") -> Iterator[str]:
    """Yields what does not fit where a value is not of a type; null fits every type."""
    found = kind_of(value)
    if found == "null" or kind == STRING:
        return
    if found == "struct" and kind.name in ("struct", "map"):
        types = dict(kind.fields)
        for name, inner in value.items():
            expected = kind.items or types.get(name)
            if expected is not None:
                yield from misfits(inner, expected, name if place == "the body" else f"{place}.{name}")
    elif found == "array" and kind.name == "array" and kind.items is not None:
        for inner in value:
            yield from misfits(inner, kind.items, f"{place}[]")
    elif found != kind.name and found not in _WIDER.get(kind.name, ()):
        yield f"{place} is a {found}, not a {kind.name}"


_WIDER: Final = {"double": ("bigint", "decimal(20,0)"), "decimal(20,0)": ("bigint",)}


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "bigint" if value in BIGINTS else "decimal(20,0)"
        case float():
            return "double"
        case str():
            return "string"
        case dict():
            return "struct"
        case _:
            return "array"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else f"`{name.replace('`', '``')}`"
