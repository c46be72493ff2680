"""This is `nsq_stat --watch`, which shows all topics and channels in a table and draws it again at each interval."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nsquark.base.printable import printable
from nsquark.tools.cluster import ChannelCounters, StatCluster, TopicCounters, Unanswered

KEYS: Final = {"r": "rate", "d": "depth", "n": "name"}
LINES_AROUND: Final = 4
"""The screen has this many lines above and below the rows of the table."""
ERRORS_SHOWN_MAX: Final = 3
NUMBERS: Final = ("IN/S", "OUT/S", "DEPTH", "INFLT", "DEF", "REQ", "T-O", "MSGS", "CLIENTS")
"""These are the columns of numbers, in the words of nsq_stat's lines."""

Key = tuple[str, str]
"""This is a topic and a channel; the row of the topic itself has an empty channel."""


@dataclass(frozen=True)
class Row:
    topic: str
    channel: str
    now: ChannelCounters
    came_per_s: float | None
    went_per_s: float | None
    """These two rates are None where they are not known, such as after the first poll."""


class Totals:
    """Keeps the counters of each topic and channel over all nsqds, now and at the poll before."""

    def __init__(self, topic: str = "", channel: str = "") -> None:
        self._topic = topic
        self._channel = channel
        self._now: dict[Key, ChannelCounters] = {}
        self._before: dict[Key, ChannelCounters] = {}
        self._passed_s = 0.0

    def update(self, answers: list[list[TopicCounters]], passed_s: float) -> None:
        """Takes the answers of all nsqds, `passed_s` seconds after the last ones."""
        self._before, self._now, self._passed_s = self._now, {}, passed_s
        for topic in (topic for answer in answers for topic in answer):
            if self._topic and topic.topic_name != self._topic:
                continue
            if not self._channel:
                self._add((topic.topic_name, ""), _as_channel(topic))
            for channel in topic.channels or ():
                if not self._channel or channel.channel_name == self._channel:
                    self._add((topic.topic_name, channel.channel_name), channel)

    def _add(self, key: Key, stats: ChannelCounters) -> None:
        self._now.setdefault(key, ChannelCounters()).add(stats)

    def rows(self, order: str) -> list[Row]:
        """Returns the rows sorted by name, or by rate or depth with the largest first."""
        rows = [self._row(key) for key in sorted(self._now)]
        if order == "rate":
            rows.sort(key=lambda row: (row.came_per_s or 0) + (row.went_per_s or 0), reverse=True)
        elif order == "depth":
            rows.sort(key=lambda row: row.now.depth, reverse=True)
        return rows

    def _row(self, key: Key) -> Row:
        now, before = self._now[key], self._before.get(key)
        # A counter falls when an nsqd was restarted or went away, and then the rate is not known.
        if before is None or self._passed_s <= 0 or now.message_count < before.message_count:
            return Row(*key, now, None, None)
        came = now.message_count - before.message_count
        went = came - (now.depth - before.depth)
        return Row(*key, now, came / self._passed_s, max(went, 0) / self._passed_s)


def _as_channel(topic: TopicCounters) -> ChannelCounters:
    return ChannelCounters(
        depth=topic.depth, backend_depth=topic.backend_depth, message_count=topic.message_count, paused=topic.paused
    )


async def watch(cluster: StatCluster, topic: str, channel: str, interval_s: float, count: int | None) -> None:
    """Shows tables until q is pressed, or `count` of them with rates were shown."""
    totals = Totals(topic, channel)
    screen = _Screen(totals, interval_s)
    with _keys(screen.press), Live(console=screen.console, screen=True, auto_refresh=False) as live:
        screen.show = lambda table: live.update(table, refresh=True)
        polled_s = 0.0
        polls = 0
        while (count is None or polls <= count) and not screen.is_left.is_set():
            answers, errors = await _poll(cluster, topic)
            now_s = time.monotonic()
            totals.update(answers, now_s - polled_s if polls else 0.0)
            polled_s = now_s
            screen.draw(len(answers), errors)
            polls += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(screen.is_left.wait(), interval_s)


async def _poll(cluster: StatCluster, topic: str) -> tuple[list[list[TopicCounters]], list[str]]:
    """Returns the answers of the nsqds that can be reached, and the errors of the others."""
    try:
        nsqds = await cluster.nsqds()
    except Unanswered as error:
        return [], [str(error)]
    answers = await asyncio.gather(*(cluster.stats(nsqd, topic) for nsqd in nsqds), return_exceptions=True)
    errors = []
    for nsqd, answer in zip(nsqds, answers, strict=True):
        if isinstance(answer, Unanswered):
            errors.append(f"{nsqd}: {answer.reason}")
        elif isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)], errors


class _Screen:
    """Draws the table as it was last polled, in the order that was last asked for."""

    def __init__(self, totals: Totals, interval_s: float) -> None:
        self.console = Console(highlight=False, markup=False)
        self.is_left = asyncio.Event()
        self.show: Callable[[Group], None] = lambda table: None
        self._totals = totals
        self._interval_s = interval_s
        self._order = "rate"
        self._nsqds = 0
        self._errors: list[str] = []

    def press(self, key: str) -> None:
        if key in ("q", "Q"):
            self.is_left.set()
        elif key in KEYS:
            self._order = KEYS[key]
            self._draw()

    def draw(self, nsqds: int, errors: list[str]) -> None:
        self._nsqds, self._errors = nsqds, errors
        self._draw()

    def _draw(self) -> None:
        rows = self._totals.rows(self._order)
        errors = [Text(printable(text), "red", no_wrap=True) for text in self._errors[:ERRORS_SHOWN_MAX]]
        room = max(self.console.height - LINES_AROUND - len(errors), 1)
        keys = "  ".join(f"{key} by {order}" for key, order in KEYS.items())
        hidden = f"   {len(rows) - room} rows more" if len(rows) > room else ""
        head = f"{self._nsqds} nsqds, every {self._interval_s:g} s, by {self._order}{hidden}"
        self.show(
            Group(
                Text(head, no_wrap=True),
                _table(rows[:room]),
                *errors,
                Text(f"{keys}  q leaves  (yellow: paused)", "dim"),
            )
        )


def _table(rows: list[Row]) -> Table:
    """Makes the table; on a narrow terminal the names are cut, and not the numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("TOPIC", no_wrap=True)
    table.add_column("CHANNEL", no_wrap=True)
    numbers = [_numbers(row) for row in rows]
    for place, name in enumerate(NUMBERS):
        width = max([len(name), *(len(each[place]) for each in numbers)])
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row, texts in zip(rows, numbers, strict=True):
        is_idle = not (row.came_per_s or row.went_per_s or row.now.depth)
        style = "yellow" if row.now.paused else "dim" if is_idle else ""
        table.add_row(Text(printable(row.topic)), Text(printable(row.channel)), *texts, style=style)
    return table


def _numbers(row: Row) -> list[str]:
    now = row.now
    if not row.channel:
        # A topic passes its messages on to its channels, so a message that left it is not handled yet.
        return [_rate(row.came_per_s), "", f"{now.depth}", "", "", "", "", f"{now.message_count}", ""]
    counters = (now.in_flight_count, now.deferred_count, now.requeue_count, now.timeout_count)
    rates = [_rate(row.came_per_s), _rate(row.went_per_s)]
    return [*rates, f"{now.depth}", *map(str, counters), f"{now.message_count}", f"{now.client_count}"]


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.0f}"


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Calls `press` with each key that is pressed inside the `with`, and then restores the terminal. Without a terminal
    there are no keys.
    """
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield
        return
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def read() -> None:
        data = os.read(fd, 1024)
        if not data:
            loop.remove_reader(fd)
        for key in data.decode("ascii", "ignore"):
            press(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
