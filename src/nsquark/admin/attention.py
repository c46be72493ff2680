"""What needs a person: found by comparing snapshots, worst first, each with since when and where to look."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from nsquark.admin.snapshot import Snapshot

Severity = Literal["critical", "warning", "info"]
ATTENTION_MAX: Final = 100


class Attention(msgspec.Struct, kw_only=True, frozen=True):
    severity: Severity
    text: str
    since: float
    """Unix seconds."""
    path: str
    """Where to look, below the base path."""


class Watch:
    """Remembers since when each finding holds."""

    def update(self, snapshot: Snapshot) -> tuple[Attention, ...]:
        return ()
