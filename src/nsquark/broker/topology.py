"""Knows where nsqd and its consumers stand, so that messages need not leave a zone or a region without need."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from nsquark.broker.options import NsqdOptions

if TYPE_CHECKING:
    from nsquark.broker.tcp.identify import ClientSettings

AWARE_CONSUMPTION: Final = "topology-aware-consumption"
"""Names the feature for --enable-experiment."""


class Closeness(IntEnum):
    """Says how close a consumer is, in the order in which consumers are served."""

    ZONE = 0
    REGION = 1
    ELSEWHERE = 2


class TopologyCounts:
    """Decides which consumers of one channel come first, and counts how many messages went how far."""

    def __init__(self, options: NsqdOptions) -> None:
        self._region = options.topology_region
        self._zone = options.topology_zone
        self.sent = dict.fromkeys(Closeness, 0)

    def closeness(self, client: ClientSettings) -> Closeness:
        """Tells how close a consumer is; an empty zone or region matches nothing."""
        if self._zone and client.topology_zone == self._zone:
            return Closeness.ZONE
        if self._region and client.topology_region == self._region:
            return Closeness.REGION
        return Closeness.ELSEWHERE


def is_aware(options: NsqdOptions) -> bool:
    return AWARE_CONSUMPTION in options.enable_experiment


def is_shown(options: NsqdOptions) -> bool:
    """Tells whether zone and region are shown: NSQ 1.3.0 has neither, so they are only where somebody asks for them."""
    return bool(options.topology_region or options.topology_zone or is_aware(options))
