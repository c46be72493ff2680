"""Defines what a consumer tells of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Totals since a consumer's start, and what is now."""

    received: int
    """Messages that came."""
    finished: int
    """Messages that were finished, given up ones included."""
    requeued: int
    """Messages that went back to nsqd."""
    expired: int
    """Messages that were not handled: they waited here until nsqd had taken them back."""
    given_up: int
    """Messages that failed too often, or could not be decoded."""
    duplicates: int
    """Copies that `dedupe` found."""
    connections: int
    """How many nsqds are connected now."""
    in_flight: int
    """How many messages are unanswered now."""
    backoff_level: int
    """How often the wait after failures was doubled; 0 is normal work."""
