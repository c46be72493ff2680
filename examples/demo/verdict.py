"""Tells whether it was all true: what the producers know, beside what arrived at either end."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

from examples.demo.events import Event, per_customer, per_minute
from examples.demo.lake import Tables
from examples.demo.traffic import Consumers, Producers

MINUTE = timedelta(minutes=1)
NAMED_MAX = 5


@dataclass
class Verdict:
    lines: list[str] = field(default_factory=list)
    is_true: bool = True

    def note(self, name: str, value: object) -> None:
        self.lines.append(f"  {name:<58} {value:>12}")

    def check(self, name: str, holds: bool, detail: object) -> None:
        self.is_true &= holds
        self.lines.append(f"  {name:<58} {detail:>12}  {'ok' if holds else 'WRONG'}")


def judge(producers: Producers, consumers: Consumers, first: Tables, last: Tables) -> Verdict:
    """Compares the tables after an update in the middle, `first`, and those at the end, `last`, with what was sent."""
    verdict = Verdict()
    acknowledged, failed = producers.acknowledged, set(producers.failed)
    consumed, lake = set(consumers.handled), set(last.arrived)
    verdict.note("events sent", f"{len(producers.sent):,}")
    verdict.note("acknowledged to the producers", f"{len(acknowledged):,}")
    verdict.note("publishes that failed", f"{len(failed):,}")
    for event_id in sorted(failed)[:NAMED_MAX]:
        place = "in the lake" if event_id in lake else "nowhere"
        verdict.lines.append(f"      {event_id} is {place}: {producers.failed[event_id]}")
    verdict.check("acknowledged, but not consumed", acknowledged <= consumed, len(acknowledged - consumed))
    verdict.check("acknowledged, but not in the lake", acknowledged <= lake, len(acknowledged - lake))
    verdict.check("in the lake, but never sent", lake <= acknowledged | failed, len(lake - acknowledged - failed))
    verdict.note("delivered again to consumers", f"{consumers.deliveries - len(consumed):,}")
    verdict.note("in the lake more than once", f"{len(last.arrived) - len(lake):,}")
    bad = {event.id for event in producers.sent.values() if not event.is_good}
    verdict.check("bad events, rejected with a reason", last.rejected == bad & lake, f"{len(last.rejected):,}")
    _check_customers(verdict, producers.sent, last)
    _check_minutes(verdict, producers.sent, first, last)
    return verdict


def _check_customers(verdict: Verdict, sent: dict[str, Event], last: Tables) -> None:
    expected = per_customer(event for event in sent.values() if event.id in last.good)
    verdict.check("customers, each as counted by the producers", expected == last.customers, len(last.customers))


def _check_minutes(verdict: Verdict, sent: dict[str, Event], first: Tables, last: Tables) -> None:
    """A minute that was closed in the first update has what was there then; a later one all that is there now."""
    expected: dict[tuple[datetime, str], tuple[int, Decimal]] = {}
    for ids, opened, closed in ((first.good, None, first.watermark), (last.good, first.watermark, last.watermark)):
        for key, counted in per_minute(_of(sent, ids)).items():
            end = key[0] + MINUTE
            if closed is not None and end <= closed and (opened is None or end > opened):
                expected[key] = counted
    money = sum((amount for _, amount in last.per_minute.values()), Decimal(0))
    verdict.check("closed minutes, each as counted by the producers", expected == last.per_minute, len(last.per_minute))
    verdict.note("money in them", f"{money:,}")


def _of(sent: dict[str, Event], ids: Iterable[str]) -> Iterable[Event]:
    return iter([sent[event_id] for event_id in ids if event_id in sent])
