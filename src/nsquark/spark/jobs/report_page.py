"""Makes the report as one page of HTML that needs nothing else: no script, no other file, no other host.

The page says so to the browser too: its policy allows its own style sheet and nothing more. The numbers of each plot
are below it.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise

from nsquark.spark.jobs.report_backlog import Backlog
from nsquark.spark.jobs.report_measures import (
    GAP_EDGES,
    REST,
    SIZE_EDGES,
    Bucket,
    Counts,
    NsqdReport,
    TopicReport,
    without_holes,
)
from nsquark.spark.jobs.report_words import SECOND_US, duration_text, rate_text, size_text, time_text
from nsquark.spark.jobs.svg import PlotLine, bar_plot, escape, share_bar, time_plot

ROWS_MAX = 200
"""The tables of topics, nsqds and channels have at most this many rows; a sentence tells how many there are in all."""
TICKS = 5
DAY_US = 86_400 * SECOND_US
NAMES_MAX = 3


@dataclass(frozen=True)
class Figures:
    """Holds all that a page shows."""

    topics: Sequence[TopicReport]
    """The topics are in order, the largest first."""
    nsqds: Sequence[NsqdReport]
    width_us: int
    """A point on the axis of time stands for this long."""
    by_topic: Sequence[Bucket]
    by_nsqd: Sequence[Bucket]
    sizes: Counts
    gaps: Counts
    peak_per_s: int
    backlog: Backlog | None
    """It is None for an archive, which has no channels."""
    source: str
    """This says where the messages were read."""
    made: datetime

    @property
    def messages(self) -> int:
        return sum(topic.messages for topic in self.topics)

    @property
    def bytes(self) -> int:
        return sum(topic.bytes for topic in self.topics)

    @property
    def first_us(self) -> int:
        return min(topic.first_us for topic in self.topics)

    @property
    def last_us(self) -> int:
        return max(topic.last_us for topic in self.topics)


def page(figures: Figures) -> str:
    """Returns the whole document."""
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    topics = _names([topic.topic for topic in figures.topics])
    body = (
        _headline(figures),
        _topics(figures),
        _rates(figures),
        _distributions(figures, "Sizes", "size", figures.sizes, SIZE_EDGES, size_text),
        _distributions(figures, "Time between messages", "gap", figures.gaps, GAP_EDGES, duration_text),
        _backlog(figures),
        _nsqds(figures),
    )
    sections = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(topics)}: report</title><style>{style}</style></head>\n<body><main>"
        f"<header><h1>{escape(topics)}</h1><p>{_about(figures)}</p></header>\n{sections}\n"
        f"<footer>Made by nsquark report on {escape(_moment(figures.made))} from {escape(figures.source)}. "
        "All times are in UTC, and the time of a message is when it was published.</footer></main></body></html>\n"
    )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _about(figures: Figures) -> str:
    return escape(
        f"{_count(len(figures.topics), 'topic')} on {_count(len(figures.nsqds), 'nsqd')}, from "
        f"{time_text(figures.first_us)} to {time_text(figures.last_us)} "
        f"({duration_text(figures.last_us - figures.first_us)})"
    )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


# -- the figures at the top ------------------------------------------------------------------------------


def _headline(figures: Figures) -> str:
    span_us = figures.last_us - figures.first_us
    rate = (figures.messages - 1) * SECOND_US / span_us if span_us else None
    cards = [
        ("messages", f"{figures.messages:,}", f"{size_text(figures.bytes / figures.messages)} each on average"),
        ("of data", size_text(figures.bytes), f"largest {size_text(max(t.size_max for t in figures.topics))}"),
        ("per second", rate_text(rate), "from the first to the last message"),
        ("in the busiest second", f"{figures.peak_per_s:,}", _times(figures.peak_per_s, rate)),
    ]
    if figures.backlog is not None and not figures.backlog.unknown:
        channels = figures.backlog.channels
        waiting = sum(channel.open for channel in channels)
        cards.append(("not finished", f"{waiting:,}", f"in {_count(len(channels), 'channel')}"))
    drawn = "".join(
        f'<li><b class="figure">{escape(value)}</b><span>{escape(what)}</span><small>{escape(more)}</small></li>'
        for what, value, more in cards
    )
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in _sentences(figures))
    return f'<section aria-label="In short"><ul class="cards">{drawn}</ul><ul class="said">{said}</ul></section>'


def _times(peak: int, rate: float | None) -> str:
    return f"{peak / rate:,.1f} times the average" if rate else "all of them"


def _sentences(figures: Figures) -> Iterable[str]:
    largest = figures.topics[0]
    if len(figures.topics) > 1:
        yield f"{largest.topic} has {largest.messages / figures.messages:.0%} of the messages."
    longest = max(figures.topics, key=lambda topic: topic.gap_max_us or 0)
    if longest.gap_max_us:
        yield (
            f"The longest silence was {duration_text(longest.gap_max_us)}, in {longest.topic}; half of its messages "
            f"came within {duration_text(longest.gap_p50_us)} of the one before."
        )
    if figures.backlog is not None and figures.backlog.channels and figures.backlog.channels[0].open:
        worst = figures.backlog.channels[0]
        time = _time_behind(figures, worst.topic, worst.open)
        about = f", about {time} of what comes in" if time != "-" else ""
        yield f"Channel {worst.channel} of {worst.topic} has the largest backlog: {worst.open:,} messages{about}."
    if len(figures.nsqds) > 1:
        most, least = figures.nsqds[0].messages, figures.nsqds[-1].messages
        times = f"{most / least:,.1f} times what the quietest took"
        yield f"Of {_count(len(figures.nsqds), 'nsqd')}, the busiest took {times}."


def _time_behind(figures: Figures, name: str, waiting: int) -> str:
    """Returns how long it took to publish this many messages, on average."""
    rate = next((topic.rate_per_s for topic in figures.topics if topic.topic == name), None)
    return duration_text(waiting / rate * SECOND_US) if rate and waiting else "-"


# -- tables ----------------------------------------------------------------------------------------------


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a table, in which the first cell of a row names it. Cells are escaped, but for markup made here."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{_cell(row[0])}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


class _Markup(str):
    """Marks text as HTML that was made here, of parts that are escaped."""


def _cell(cell: str) -> str:
    return cell if isinstance(cell, _Markup) else escape(cell)


def _behind(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{escape(caption)}</summary>{_table(caption, header, rows)}</details>"


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(parts)}</section>"


def _swatch(style: str, name: str) -> _Markup:
    return _Markup(f'<i class="swatch {style}"></i>{escape(name)}')


def _topics(figures: Figures) -> str:
    styles = _styles(figures.by_topic)
    header = "topic|messages|share|data|size: half|99 %|largest|per s|busiest s|gap: half|90 %|99 %|longest|first|last"
    rows = [
        (
            _swatch(styles.get(topic.topic, styles.get(REST, "s0")), topic.topic),
            f"{topic.messages:,}",
            _share(styles.get(topic.topic, styles.get(REST, "s0")), topic.messages, figures.messages),
            *map(size_text, (topic.bytes, topic.size_p50, topic.size_p99, topic.size_max)),
            rate_text(topic.rate_per_s),
            f"{topic.peak_per_s:,}",
            *map(duration_text, (topic.gap_p50_us, topic.gap_p90_us, topic.gap_p99_us, topic.gap_max_us)),
            time_text(topic.first_us),
            time_text(topic.last_us),
        )
        for topic in figures.topics[:ROWS_MAX]
    ]
    text = "Sizes and gaps as half, 90 % and 99 % of the messages have them at most." + _left_out(figures.topics)
    return _section("Topics", text, _table("Topics", header.split("|"), rows))


def _share(style: str, part: int, whole: int) -> _Markup:
    return _Markup(f"{share_bar([(style, part / whole)])}<span>{part / whole:.1%}</span>")


def _left_out(rows: Sequence[object]) -> str:
    return f" The table has the {ROWS_MAX} largest of {len(rows):,}." if len(rows) > ROWS_MAX else ""


# -- plots over time -------------------------------------------------------------------------------------


def _styles(points: Sequence[Bucket]) -> dict[str, str]:
    """Returns a colour for each name, the largest first, and grey for the rest."""
    totals: dict[str, int] = {}
    for point in points:
        totals[point.name] = totals.get(point.name, 0) + point.messages
    named = sorted((name for name in totals if name != REST), key=lambda name: (-totals[name], name))
    styles = {name: f"s{number}" for number, name in enumerate(named, 1)}
    return styles | ({REST: "s0"} if REST in totals else {})


def _rates(figures: Figures) -> str:
    called = _called(figures, "topics", len(figures.topics))
    return _section(
        "Rates",
        f"What was published in each {duration_text(figures.width_us)}, by topic.",
        _over_time(figures, figures.by_topic, "Messages per second by topic", called, _messages_per_s, rate_text),
        _over_time(figures, figures.by_topic, "Data per second by topic", called, _bytes_per_s, _size_rate, 1024),
    )


def _called(figures: Figures, what: str, count: int) -> Callable[[str], str]:
    shown = len(_styles(figures.by_topic if what == "topics" else figures.by_nsqd)) - 1
    return lambda name: f"{count - shown:,} other {what}" if name == REST else name


def _messages_per_s(point: Bucket, width_us: int) -> float:
    return point.messages * SECOND_US / width_us


def _bytes_per_s(point: Bucket, width_us: int) -> float:
    return point.bytes * SECOND_US / width_us


def _size_rate(rate: float) -> str:
    return f"{size_text(rate)}/s"


def _over_time(
    figures: Figures,
    points: Sequence[Bucket],
    title: str,
    called: Callable[[str], str],
    value: Callable[[Bucket, int], float],
    said: Callable[[float], str],
    base: int = 10,
) -> str:
    width_us = figures.width_us
    low_us = min(point.start_us for point in figures.by_topic)
    high_us = max(point.start_us for point in figures.by_topic)
    lines = []
    for name, style in _styles(points).items():
        filled = without_holes([point for point in points if point.name == name], width_us, low_us, high_us)
        lines.append(PlotLine(called(name), style, [value(point, width_us) for point in filled]))
    starts = [time_text(start_us) for start_us in range(low_us, high_us + width_us, width_us)]
    rows = [
        (when, *(said(line.values[place]) for line in lines))
        for place, when in enumerate(starts)
        if any(line.values[place] for line in lines)
    ]
    legend = "".join(f"<li>{_swatch(line.style, line.name)}</li>" for line in lines)
    return (
        f'<h3>{escape(title)}</h3><ul class="legend">{legend}</ul>'
        f"{time_plot(title, lines, _tick_times(low_us, high_us + width_us), starts, said, base)}"
        f"{_behind(f'{title}: the numbers', ('from', *(line.name for line in lines)), rows)}"
    )


def _tick_times(low_us: int, high_us: int) -> list[str]:
    span_us = high_us - low_us
    form = "%m-%d %H:%M" if span_us > DAY_US else "%H:%M" if span_us > 120 * 60 * SECOND_US else "%H:%M:%S"
    return [
        datetime.fromtimestamp((low_us + span_us * number / (TICKS - 1)) / SECOND_US, UTC).strftime(form)
        for number in range(TICKS)
    ]


# -- distributions ---------------------------------------------------------------------------------------


def _distributions(
    figures: Figures, title: str, what: str, counts: Counts, edges: Sequence[int], said: Callable[[float], str]
) -> str:
    """Draws a plot for each topic, all with one axis, so that they can be compared."""
    if not counts:
        return _section(title, f"There is no {what} to show: each topic has a single message.")
    used = [place for of_topic in counts.values() for place, count in enumerate(of_topic) if count]
    low, high = min(used), max(used)
    bounds = [0, *edges]
    words = [
        *(f"{said(start)} to {said(end)}" for start, end in pairwise(bounds[low : high + 2])),
        *([f"{said(edges[-1])} or more"] if high == len(edges) else []),
    ]
    ends = (said(bounds[low]), said(bounds[high + 1]) if high < len(edges) else f"over {said(edges[-1])}")
    called = _called(figures, "topics", len(figures.topics))
    styles = {name: style for name, style in _styles(figures.by_topic).items() if name in counts}
    plots = []
    for name, style in styles.items():
        shown = counts[name][low : high + 1]
        texts = [f"{word}: {count:,} messages" for word, count in zip(words, shown, strict=True)]
        heading = f"{title} of {called(name)}"
        plots.append(
            f"<figure><figcaption>{_swatch(style, called(name))}<small>{sum(shown):,} messages</small></figcaption>"
            f"{bar_plot(heading, style, shown, texts, ends)}</figure>"
        )
    rows = [(word, *(f"{counts[name][low + place]:,}" for name in styles)) for place, word in enumerate(words)]
    steps = "Each bar is twice as large as the one before." if what == "size" else "Bars grow as 1, 2, 5, 10."
    return _section(
        title,
        f"How many messages have which {what}. {steps} Each plot has its own height.",
        f'<div class="small">{"".join(plots)}</div>',
        _behind(f"{title}: the numbers", (what, *map(called, styles)), rows),
    )


# -- backlog and nsqds -----------------------------------------------------------------------------------


def _backlog(figures: Figures) -> str:
    backlog = figures.backlog
    if backlog is None:
        return _section("Backlog", "An archive has no channels: what consumers have not handled is not known from it.")
    if backlog.unknown:
        return _section("Backlog", f"It could not be asked for: {backlog.unknown}")
    if not backlog.channels:
        return _section("Backlog", "None of the topics has a channel: nobody consumes them.")
    top = max(channel.open for channel in backlog.channels) or 1
    header = ("topic / channel", "not finished", "", "waiting", "in flight", "deferred", "consumers", "that is about")
    rows = [
        (
            f"{channel.topic} / {channel.channel}",
            f"{channel.open:,}",
            _Markup(
                share_bar(
                    [
                        ("waiting", channel.depth / top),
                        ("in-flight", channel.in_flight / top),
                        ("deferred", channel.deferred / top),
                    ]
                )
            ),
            *(f"{count:,}" for count in (channel.depth, channel.in_flight, channel.deferred, channel.consumers)),
            _time_behind(figures, channel.topic, channel.open),
        )
        for channel in backlog.channels[:ROWS_MAX]
    ]
    legend = "".join(
        f"<li>{_swatch(style, style.replace('-', ' '))}</li>" for style in ("waiting", "in-flight", "deferred")
    )
    text = (
        "What each channel had not finished when the report was made, on all nsqds; the last column is how long it "
        "took to publish so much, at the average rate of the topic." + _left_out(backlog.channels)
    )
    return _section("Backlog", text, f'<ul class="legend">{legend}</ul>', _table("Backlog", header, rows))


def _nsqds(figures: Figures) -> str:
    styles = _styles(figures.by_nsqd)
    addresses = figures.backlog.addresses if figures.backlog is not None else {}

    def called(name: str) -> str:
        if name == REST:
            return f"{len(figures.nsqds) - len(styles) + 1:,} other nsqds"
        return addresses.get(name, name)

    header = ("nsqd", "messages", "share", "data", "topics", "first", "last", "id")
    rows = [
        (
            _swatch(styles.get(nsqd.nsqd, "s0"), called(nsqd.nsqd)),
            f"{nsqd.messages:,}",
            _share(styles.get(nsqd.nsqd, "s0"), nsqd.messages, figures.messages),
            size_text(nsqd.bytes),
            f"{nsqd.topics:,}",
            time_text(nsqd.first_us),
            time_text(nsqd.last_us),
            nsqd.nsqd,
        )
        for nsqd in figures.nsqds[:ROWS_MAX]
    ]
    return _section(
        "nsqds",
        "Who took the messages." + _left_out(figures.nsqds),
        _table("nsqds", header, rows),
        _over_time(figures, figures.by_nsqd, "Messages per second by nsqd", called, _messages_per_s, rate_text),
    )
