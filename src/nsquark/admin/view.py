"""Describes what a page shows inside its frame: named blocks and rows of HTML, and the series of its charts.

The page in a browser is built of the same pieces that the event stream sends later, so both are always alike. A piece
is made by a macro of `templates/parts/`; a row's macro gets one item of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nsquark.admin import format as figures
from nsquark.admin.snapshot import ClientInfo

SeriesKey = tuple[str, ...]
CLIENT_ROWS_MAX: Final = 500


class Crumb(NamedTuple):
    name: str
    path: str


class Line(NamedTuple):
    """Describes a line of a chart; with `axis` 2 it has the scale at the right."""

    series: SeriesKey
    label: str
    kind: str
    """This is the kind of figure, which decides the colour of the line."""
    axis: int = 1

    @property
    def key(self) -> str:
        return series_name(self.series)


class Chart(NamedTuple):
    name: str
    lines: tuple[Line, ...]
    unit: str
    """This is one of the units in static/format.js."""
    unit2: str = ""

    @property
    def description(self) -> list[dict[str, object]]:
        """Describes the chart as chart.js reads it."""
        return [{"key": each.key, "label": each.label, "kind": each.kind, "axis": each.axis} for each in self.lines]


def series_of(charts: Iterable[Chart]) -> tuple[SeriesKey, ...]:
    return tuple(dict.fromkeys(line.series for chart in charts for line in chart.lines))


class PageRow(NamedTuple):
    key: str
    item: Any


@dataclass(frozen=True, slots=True)
class Rows:
    """Describes a list on a page, whose rows the macro `macro` draws."""

    name: str
    macro: str
    rows: Sequence[PageRow]


def client_rows(clients: Sequence[ClientInfo]) -> Rows:
    rows = [PageRow(f"{client.node}/{client.remote_address}", client) for client in clients[:CLIENT_ROWS_MAX]]
    return Rows("clients", "client_row", rows)


@dataclass(frozen=True, slots=True)
class View:
    template: str
    parts: str
    """This is the file of macros in `templates/parts/`."""
    title: str
    section: str
    """This is the entry of the navigation that the page belongs to."""
    context: Mapping[str, Any]
    blocks: tuple[str, ...] = ()
    lists: tuple[Rows, ...] = ()
    series: tuple[SeriesKey, ...] = ()
    """These series are drawn as charts."""
    sparks: tuple[SeriesKey, ...] = ()
    """These series are drawn small, in rows; their history is kept while somebody looks."""
    client_watch: tuple[str, ...] = ()
    """This is a topic and a channel, or two empty strings and an nsqd, whose clients the page shows."""
    crumbs: tuple[Crumb, ...] = ()
    status: int = 200
    scripts: tuple[str, ...] = ()
    """Only this page loads these scripts."""
    is_live: bool = field(default=True)


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("nsquark.admin", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(figures.FILTERS)
    return made


def series_name(key: SeriesKey) -> str:
    """Returns the name of a series in the event stream. Names in NSQ have no commas."""
    return ",".join(key)


def pieces(view: View, urls: Any) -> dict[str, str]:
    """Makes every piece of a page, by name. `rows:<list>` is the order of a list's rows as JSON."""
    parts = environment().get_template(f"parts/{view.parts}").module
    made: dict[str, str] = {}
    for name in view.blocks:
        made[f"block:{name}"] = str(getattr(parts, name)(view.context, urls)).strip()
    for listed in view.lists:
        macro = getattr(parts, listed.macro)
        made[f"rows:{listed.name}"] = ORDER.encode([row.key for row in listed.rows]).decode()
        for row in listed.rows:
            made[f"row:{listed.name}:{row.key}"] = str(macro(row.item, urls)).strip()
    return made


ORDER: Final = msgspec.json.Encoder()


class Pieces:
    """Gives a template the pieces of its view."""

    def __init__(self, view: View, made: Mapping[str, str]) -> None:
        self._view = view
        self._made = made

    def block(self, name: str) -> Markup:
        return Markup(self._made[f"block:{name}"])

    def rows(self, name: str) -> Markup:
        listed = next(each for each in self._view.lists if each.name == name)
        return Markup("").join(Markup(self._made[f"row:{name}:{row.key}"]) for row in listed.rows)

    def is_empty(self, name: str) -> bool:
        return not next(each for each in self._view.lists if each.name == name).rows
