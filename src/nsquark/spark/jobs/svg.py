"""Draws plots as SVG, without a browser: text keeps its size on a phone, since only the inner picture is stretched.

Colours are classes of the page's style sheet, so that one picture is right on light and dark. All text is escaped here.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsquark.base.printable import printable

HEIGHT_PX = 220
TOP_PX, BOTTOM_PX = 18, 22
"""This room is above the plot, for the label of the topmost line, and below, for the times."""
PLOT_PX = HEIGHT_PX - TOP_PX - BOTTOM_PX
SMALL_HEIGHT_PX = 120
STEPS = 1000
"""A plot is this many units high: coordinates are whole numbers, which keeps a page small."""
GRID_LINES = 4
TEXT_CHARS_MAX = 1000


@dataclass(frozen=True)
class PlotLine:
    """Describes a line of a plot."""

    name: str
    style: str
    """This is the class of the line's colour."""
    values: Sequence[float]


def escape(text: str) -> str:
    """Makes text that strangers wrote fit for any place in a page."""
    return html.escape(printable(text, TEXT_CHARS_MAX))


def grid_step(top: float, base: int = 10) -> float:
    """Returns the step between grid lines, a round number of which about GRID_LINES reach up to `top`: 1, 2 or 5 times
    a power of ten. With base 1024, for bytes, it is such a number of B, KiB, MiB and so on.
    """
    least = top / GRID_LINES
    if least <= 0:
        return 1.0
    unit = 1.0
    while base > 10 and least >= unit * base:
        unit *= base
    power = 10.0 ** math.floor(math.log10(least / unit))
    return next(unit * power * digit for digit in (1, 2, 5, 10) if unit * power * digit >= least * (1 - 1e-9))


def time_plot(
    title: str,
    lines: Sequence[PlotLine],
    ticks: Sequence[str],
    points: Sequence[str],
    said: Callable[[float], str],
    base: int = 10,
) -> str:
    """Draws values over time in steps. `ticks` are spread over the axis; each of `points` says when a value is from."""
    highest = max((value for line in lines for value in line.values), default=0)
    step = grid_step(highest, base)
    heights = [step * number for number in range(max(1, math.ceil(highest / step - 1e-9)) + 1)]
    top = heights[-1]
    paths = "".join(
        f'<path class="line {line.style}" d="{_steps(line.values, top)}"/>' for line in reversed(lines) if line.values
    )
    hovers = "".join(
        f'<rect class="hover" x="{place}" width="1" height="{STEPS}"><title>{_point(point, place, lines, said)}</title>'
        "</rect>"
        for place, point in enumerate(points)
    )
    return (
        f'<svg class="plot" height="{HEIGHT_PX}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{_grid(heights)}"
        f'<svg y="{TOP_PX}" width="100%" height="{PLOT_PX}" viewBox="0 0 {len(points)} {STEPS}" '
        f'preserveAspectRatio="none">{paths}{hovers}</svg>{_labels(heights, said)}{_ticks(ticks)}</svg>'
    )


def _steps(values: Sequence[float], top: float) -> str:
    pieces = []
    for place, value in enumerate(values):
        height = round(STEPS * (1 - value / top))
        pieces.append(f"{'M0 ' if not place else 'V'}{height}H{place + 1}")
    return "".join(pieces)


def _point(when: str, place: int, lines: Sequence[PlotLine], said: Callable[[float], str]) -> str:
    values = [f"{line.name}: {said(line.values[place])}" for line in lines if line.values[place]]
    return "&#10;".join(escape(text) for text in (when, *(values or ["nothing"])))


def _y(height: float, top: float) -> float:
    return TOP_PX + PLOT_PX * (1 - height / top)


def _grid(heights: Sequence[float]) -> str:
    ys = [_y(height, heights[-1]) for height in heights]
    return "".join(f'<line class="grid" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>' for y in ys)


def _labels(heights: Sequence[float], said: Callable[[float], str]) -> str:
    """Writes the labels of the grid. They are above the lines, whose colour a halo keeps off the text."""
    return "".join(
        f'<text class="tick" y="{_y(height, heights[-1]) - 4:.1f}">{escape(said(height))}</text>'
        for height in heights[1:]
    )


def _ticks(ticks: Sequence[str]) -> str:
    """Writes the labels of the axis; every second one is left out on a narrow screen."""
    last = len(ticks) - 1
    drawn = []
    for number, text in enumerate(ticks):
        anchor = "start" if number == 0 else "end" if number == last else "middle"
        narrow = " wide-only" if number % 2 else ""
        drawn.append(
            f'<text class="tick{narrow}" x="{100 * number / max(last, 1):.1f}%" y="{HEIGHT_PX - 6}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )
    return "".join(drawn)


def bar_plot(title: str, style: str, counts: Sequence[int], said: Sequence[str], ends: tuple[str, str]) -> str:
    """Draws a distribution: a bar for each count, which `said` has in words, between the two ends of the axis."""
    top = max(counts, default=0) or 1
    bars = "".join(
        f'<rect class="bar {style}" x="{place + 0.08:.2f}" width=".84" y="{STEPS - _height(count, top)}" '
        f'height="{_height(count, top)}"/>'
        for place, count in enumerate(counts)
        if count
    )
    hovers = "".join(
        f'<rect class="hover" x="{place}" width="1" height="{STEPS}"><title>{escape(text)}</title></rect>'
        for place, text in enumerate(said)
    )
    bottom = SMALL_HEIGHT_PX - BOTTOM_PX
    return (
        f'<svg class="plot" height="{SMALL_HEIGHT_PX}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
        f'<svg width="100%" height="{bottom}" viewBox="0 0 {len(counts)} {STEPS}" preserveAspectRatio="none">'
        f'{bars}{hovers}</svg><line class="grid" x2="100%" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="tick" y="{SMALL_HEIGHT_PX - 6}">{escape(ends[0])}</text>'
        f'<text class="tick" x="100%" y="{SMALL_HEIGHT_PX - 6}" text-anchor="end">{escape(ends[1])}</text></svg>'
    )


def _height(count: int, top: int) -> int:
    """Returns the height of a bar, at least a trace: one message among a million is there to be seen."""
    return max(round(STEPS * count / top), STEPS // 60)


def share_bar(shares: Sequence[tuple[str, float]]) -> str:
    """Draws a bar across a cell of a table, in pieces, each with a class and a share. The numbers stand beside it."""
    drawn, x = [], 0.0
    for style, share in shares:
        if share > 0:
            drawn.append(
                f'<rect class="bar {style}" x="{100 * x:.2f}%" width="{100 * share:.2f}%" height="12" rx="2"/>'
            )
        x += share
    return f'<svg class="share" height="12" aria-hidden="true">{"".join(drawn)}</svg>'
