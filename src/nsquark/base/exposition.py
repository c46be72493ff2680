"""Writes Prometheus' text form of metrics by hand: a library for it would double the time nsqd takes to start."""

from collections.abc import Mapping
from typing import Final

from nsquark.base.histogram import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """Collects the samples of one metric; `labels` are `name="value"` pairs with commas between, or empty."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self._name = name
        self._lines = [f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"]

    def add(self, value: float, labels: str = "", suffix: str = "") -> None:
        braced = f"{{{labels}}}" if labels else ""
        shown = "NaN" if value != value else value
        self._lines.append(f"{self._name}{suffix}{braced} {shown}\n")

    def add_histogram(self, histogram: Histogram) -> None:
        total = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            total += count
            self.add(total, f'le="{bound}"', "_bucket")
        self.add(histogram.sum, "", "_sum")
        self.add(total, "", "_count")

    @property
    def text(self) -> str:
        return "".join(self._lines)


def single(name: str, kind: str, help_text: str, value: float, labels: str = "") -> Family:
    """Makes a metric that has one sample."""
    family = Family(name, kind, help_text)
    family.add(value, labels)
    return family


def labelled(name: str, kind: str, help_text: str, label: str, values: Mapping[str, float]) -> Family:
    """Makes a metric with one label: it has a sample for each of the label's words, in order."""
    family = Family(name, kind, help_text)
    for word, value in sorted(values.items()):
        family.add(value, f'{label}="{word}"')
    return family


def of_histogram(name: str, help_text: str, histogram: Histogram) -> Family:
    """Makes a metric of a histogram: Prometheus wants its buckets, their sum and their count."""
    family = Family(name, "histogram", help_text)
    family.add_histogram(histogram)
    return family
