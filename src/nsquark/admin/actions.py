"""Carries out the actions on a cluster, such as create, pause and delete, for the pages and for NSQ's /api."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote_plus

from nsquark.admin.api_types import ApiNode
from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import UpstreamError
from nsquark.admin.survey import Answers, Survey
from nsquark.wire.names import is_valid_name

PLAIN_ACTIONS: Final = ("pause", "unpause", "empty")
"""These actions are done by one POST to every nsqd that has the topic."""


class ActionRefused(Exception):
    """Says that a requested action cannot be done; its text is NSQ's error code."""


@dataclass(frozen=True, slots=True)
class Result:
    """Tells whether one nsqd or nsqlookupd did an action, or why not."""

    address: str
    is_done: bool
    text: str = ""


@dataclass(slots=True)
class Outcome:
    """Collects what came of an action: `errors` has the order in which NSQ lists them, and `results` has one for every
    nsqd and nsqlookupd that was told to change something.
    """

    errors: list[UpstreamError] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Tells whether at least one nsqd or nsqlookupd did the action."""
        return any(result.is_done for result in self.results)


class Actions:
    """Carries out actions: each finds the nsqds and nsqlookupds that it concerns, then tells all of them, even if some
    fail.
    """

    def __init__(self, cluster: ClusterClient, survey: Survey) -> None:
        self._cluster = cluster
        self._survey = survey

    @property
    def _lookupds(self) -> list[str]:
        return self._cluster.lookupds

    async def create(self, topic: str, channel: str = "") -> Outcome:
        """Creates the topic and the channel at all nsqlookupds, and the channel on the nsqds that have the topic.

        Without nsqlookupds, where NSQ does nothing, it creates both on all nsqds.
        """
        if not is_valid_name(topic):
            raise ActionRefused("INVALID_TOPIC")
        if channel and not is_valid_name(channel):
            raise ActionRefused("INVALID_CHANNEL")
        outcome = Outcome()
        makers = self._lookupds or self._cluster.nsqds
        await self._post(outcome, makers, "topic/create", topic)
        if channel:
            await self._post(outcome, makers, "channel/create", topic, channel)
            if self._lookupds:
                producers = _without_errors(outcome, await self._survey.producers_of(topic))
                await self._post(outcome, _addresses(producers), "channel/create", topic, channel)
        return outcome

    async def delete(self, topic: str, channel: str = "") -> Outcome:
        outcome = Outcome()
        # The producers are looked up first, since nsqlookupds forget them with the topic.
        producers = _without_errors(outcome, await self._survey.producers_of(topic))
        verb = "channel/delete" if channel else "topic/delete"
        await self._post(outcome, self._lookupds, verb, topic, channel)
        await self._post(outcome, _addresses(producers), verb, topic, channel)
        return outcome

    async def plain(self, action: str, topic: str, channel: str = "") -> Outcome:
        if action not in PLAIN_ACTIONS:
            raise ActionRefused("INVALID_ACTION")
        outcome = Outcome()
        producers = _without_errors(outcome, await self._survey.producers_of(topic))
        await self._post(
            outcome, _addresses(producers), f"{'channel' if channel else 'topic'}/{action}", topic, channel
        )
        return outcome

    async def tombstone(self, topic: str, node: str) -> Outcome:
        """Hides the topic of one nsqd from consumers for a while, and deletes it there."""
        if not is_valid_name(topic):
            raise ActionRefused("INVALID_TOPIC")
        outcome = Outcome()
        target = f"/topic/tombstone?topic={quote_plus(topic)}&node={quote_plus(node)}"
        _add_results(outcome, self._lookupds, await self._survey.post_each(self._lookupds, target))
        described = await self._survey.describe(node)
        await self._post(outcome, [described.http_address], "topic/delete", topic)
        return outcome

    async def _post(self, outcome: Outcome, addresses: Iterable[str], verb: str, topic: str, channel: str = "") -> None:
        told = list(addresses)
        target = f"/{verb}?topic={quote_plus(topic)}" + (f"&channel={quote_plus(channel)}" if channel else "")
        _add_results(outcome, told, await self._survey.post_each(told, target))


def _without_errors(outcome: Outcome, answers: Answers[list[ApiNode]]) -> list[ApiNode]:
    outcome.errors += answers.errors
    return answers.value


def _addresses(nodes: Iterable[ApiNode]) -> list[str]:
    return [node.http_address for node in nodes]


def _add_results(outcome: Outcome, told: list[str], answers: Answers[list[tuple[str, bytes]]]) -> None:
    outcome.errors += answers.errors
    failed = {error.address: str(error) for error in answers.errors}
    outcome.results += [Result(address, address not in failed, failed.get(address, "")) for address in told]
