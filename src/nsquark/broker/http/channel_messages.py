"""Lists what a channel has under way: messages in flight and for how long, requeued ones and when they come again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from nsquark.base.clock import now_ms
from nsquark.broker.channel import Channel
from nsquark.broker.http.arguments import NsqdArguments
from nsquark.web.arguments import INT64_MAX, Refusal, invalid
from nsquark.web.messages import Request
from nsquark.wire.record import message_id

if TYPE_CHECKING:
    from nsquark.broker.http.log_read import LogApi

LISTED: Final = 100
LISTED_MAX: Final = 1000
SLOTS_PER_TURN: Final = 1 << 17
"""This many slots are looked at, in well under a millisecond, before other clients have their turn."""
TURNS_MAX: Final = 64
IN_FLIGHT: Final = "in_flight"
REQUEUED: Final = "requeued"


class ChannelMessages:
    def __init__(self, api: LogApi) -> None:
        self._api = api

    async def listing(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Answers GET /channel/messages, which changes nothing and uses a short piece of each turn."""
        channel = arguments.channel()
        state = arguments.text("state", 16)
        if state not in (IN_FLIGHT, REQUEUED):
            raise invalid("state", f"{IN_FLIGHT} or {REQUEUED}")
        limit = arguments.number("limit", 1, LISTED_MAX, LISTED)
        seq = arguments.number("from", 0, INT64_MAX, 0)
        rows: list[tuple[int, int, int, int, int]] = []
        for _ in range(TURNS_MAX):
            found, seq = channel.ledger.waiting(state == IN_FLIGHT, seq, limit - len(rows), SLOTS_PER_TURN)
            rows += found
            if seq < 0 or len(rows) >= limit:
                break
            await asyncio.sleep(0)
            require_existing(channel)
        ledger = channel.ledger
        return {
            "topic": channel.topic.name,
            "channel": channel.name,
            "state": state,
            "count": ledger.in_flight if state == IN_FLIGHT else ledger.queued + ledger.deferred,
            "messages": self._in_flight(channel, rows) if state == IN_FLIGHT else self._requeued(rows),
            "from": seq if seq >= 0 else None,
        }

    def _in_flight(self, channel: Channel, rows: list[tuple[int, int, int, int, int]]) -> list[dict[str, Any]]:
        now = now_ms()
        clients = {session.consumer.id: session for session in channel.sessions if session.consumer is not None}
        listed = []
        for seq, attempts, consumer_id, delivered_ms, deadline_ms in rows:
            session = clients.get(consumer_id)
            listed.append(
                {
                    **self._message(seq, attempts),
                    "for_ms": max(0, now - delivered_ms),
                    "timeout_ms": max(0, deadline_ms - now),
                    "client": session.remote_address if session is not None else "",
                    "client_id": session.settings.client_id if session is not None else "",
                }
            )
        return listed

    def _requeued(self, rows: list[tuple[int, int, int, int, int]]) -> list[dict[str, Any]]:
        now = now_ms()
        return [{**self._message(row[0], row[1]), "due_ms": max(0, row[4] - now) if row[4] else 0} for row in rows]

    def _message(self, seq: int, attempts: int) -> dict[str, Any]:
        return {"seq": seq, "id": message_id(self._api.nsqd.logs.node_id, seq).decode(), "attempts": attempts}


def require_existing(channel: Channel) -> None:
    """Refuses a channel that was deleted while its request waited."""
    if channel.is_deleted:
        raise Refusal(404, "CHANNEL_NOT_FOUND")
