"""Defines what a consumer tells of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counts what a consumer did since its start, and what it has now."""

    received: int
    """Counts the messages that came."""
    finished: int
    """Counts the messages that were finished, given up ones included."""
    requeued: int
    """Counts the messages that went back to nsqd."""
    expired: int
    """Counts the messages that were not handled: they waited here until nsqd had taken them back."""
    given_up: int
    """Counts the messages that failed too often, or could not be decoded."""
    duplicates: int
    """Counts the copies that `dedupe` found."""
    connections: int
    """Tells how many nsqds are connected now."""
    in_flight: int
    """Tells how many messages are unanswered now."""
    backoff_level: int
    """Tells how often the wait after failures was doubled; 0 is normal work."""
