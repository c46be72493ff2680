"""Finds what `promtool check metrics` would complain about, and a little more."""

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"[a-z][a-z0-9_]*")
OWN_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count", "")}
OWN_LABEL = {"le": "histogram", "quantile": "summary"}
WORDS_NOT_IN_NAMES = {"counter", "gauge", "histogram", "summary", "metric"}
UNITS_NOT_BASE = {
    *("ms", "us", "ns", "millisecond", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days"),
    *("kb", "mb", "kilobytes", "megabytes", "bits", "percent"),
}


def complaints(text: str) -> list[str]:
    """Yields one complaint for each thing that is wrong."""
    found: list[str] = []
    declared = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    described = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    kinds = dict(declared)
    found += [f"{name}: declared twice" for name, times in Counter(name for name, _ in declared).items() if times > 1]
    for name, kind in declared:
        found += _of_name(name, kind)
        if not described.get(name, "").strip():
            found.append(f"{name}: no help")
    # A gauge `x` and a counter `x_total` are one name in OpenMetrics.
    bases = Counter(name.removesuffix("_total") for name in kinds)
    found += [f"{name}: two kinds of one name" for name, times in bases.items() if times > 1]
    return found + _of_samples(text, kinds)


def _of_name(name: str, kind: str) -> list[str]:
    found = []
    words = set(name.split("_"))
    if not NAME.fullmatch(name):
        found.append(f"{name}: not lower case words with underscores")
    if (kind == "counter") != name.endswith("_total"):
        found.append(f"{name}: counters and only counters end in _total")
    if name.endswith(("_bucket", "_sum", "_count", "_info")) and not (kind == "gauge" and name.endswith("_info")):
        found.append(f"{name}: a suffix with a meaning of its own")
    if words & WORDS_NOT_IN_NAMES:
        found.append(f"{name}: names its kind")
    if words & UNITS_NOT_BASE:
        found.append(f"{name}: not a base unit")
    for unit in ("seconds", "bytes"):
        if unit in words and not name.removesuffix("_total").endswith(f"_{unit}"):
            found.append(f"{name}: the unit comes last")
    return found


def _of_samples(text: str, kinds: dict[str, str]) -> list[str]:
    found = []
    seen: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
    for family in text_string_to_metric_families(text):
        name = family.name if family.name in kinds else f"{family.name}_total"
        kind = kinds.get(name)
        if kind is None:
            found.append(f"{family.name}: not declared")
            continue
        for sample in family.samples:
            seen[sample.name, tuple(sorted(sample.labels.items()))] += 1
            suffix = sample.name.removeprefix(name)
            if suffix not in OWN_SUFFIXES.get(kind, ("",)):
                found.append(f"{sample.name}: no sample of a {kind} {name}")
            for label in sample.labels:
                if not NAME.fullmatch(label) or OWN_LABEL.get(label, kind) != kind:
                    found.append(f"{sample.name}: label {label}")
    return found + [f"{key}: twice" for key, times in seen.items() if times > 1]
