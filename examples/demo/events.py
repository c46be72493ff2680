"""Orders and clicks as a shop would send them, a share of them broken, and the generator's own record of each."""

import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

BAD_SHARE = 0.03
ORDER_SHARE = 0.3
USERS = [f"user-{number:03}" for number in range(200)]


@dataclass(frozen=True)
class Event:
    id: str
    time: datetime
    user: str
    kind: str
    amount: Decimal | None
    body: bytes
    is_good: bool

    @property
    def minute(self) -> datetime:
        return self.time.replace(second=0, microsecond=0)


class Shop:
    """Its clock runs faster than ours, so that minutes close while someone watches."""

    def __init__(self, seed: int, opened: datetime, speed: float) -> None:
        self._random = random.Random(seed)
        self._opened = opened
        self._speed = speed

    def event(self, elapsed_s: float) -> Event:
        chance = self._random
        time = self._opened + timedelta(seconds=elapsed_s * self._speed + chance.uniform(-2, 2))
        user = chance.choice(USERS)
        kind = "order" if chance.random() < ORDER_SHARE else "click"
        amount = Decimal(chance.randint(100, 30_000)) / 100 if kind == "order" else None
        event_id = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        fields = {"id": event_id, "time": time.astimezone(UTC).isoformat(), "user": user, "kind": kind}
        if amount is not None:
            fields["amount"] = str(amount)
        body = json.dumps(fields).encode()
        is_good = chance.random() >= BAD_SHARE
        if not is_good:
            body = self._break(body, fields)
        return Event(event_id, time, user, kind, amount, body, is_good)

    def _break(self, body: bytes, fields: dict[str, str]) -> bytes:
        """Breaks an event as things break: it is cut off, its amount is none, nobody knows its kind. The id stays
        readable.
        """
        way = self._random.randrange(3)
        if way == 0:
            return body[: len(body) * 2 // 3]
        if way == 1:
            return json.dumps({**fields, "kind": "order", "amount": "a lot"}).encode()
        return json.dumps({**fields, "kind": "refund?"}).encode()


def per_minute(events: Iterator[Event]) -> dict[tuple[datetime, str], tuple[int, Decimal]]:
    """Returns count and money of each minute and kind."""
    counts: dict[tuple[datetime, str], tuple[int, Decimal]] = {}
    for event in events:
        count, amount = counts.get((event.minute, event.kind), (0, Decimal(0)))
        counts[event.minute, event.kind] = count + 1, amount + (event.amount or 0)
    return counts


def per_customer(events: Iterator[Event]) -> dict[str, tuple[int, int, Decimal]]:
    """Orders, clicks and money of each user."""
    customers: dict[str, tuple[int, int, Decimal]] = {}
    for event in events:
        orders, clicks, spent = customers.get(event.user, (0, 0, Decimal(0)))
        is_order = event.kind == "order"
        customers[event.user] = orders + is_order, clicks + (not is_order), spent + (event.amount or 0)
    return customers
