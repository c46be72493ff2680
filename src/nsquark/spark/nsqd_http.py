"""Finds the nsqds that the options name, each by its id, and asks them about their logs."""

import http.client
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from nsquark.base.addresses import PORT_MAX, join_address
from nsquark.base.printable import printable
from nsquark.spark.endpoint import (
    REQUEST_TIMEOUT_S,
    Body,
    Endpoint,
    ForeignNsqd,
    NsqdError,
    Refused,
    Unreachable,
    WantsTls,
    WrongAddress,
)
from nsquark.spark.options import Access, SourceOptions
from nsquark.wire.names import is_valid_name

ID_HEADER = "X-Nsquark-Id"
ID_CHARS_MAX = 64
HOST_CHARS_MAX = 255
ITEMS_MAX = 4096
"""One request asks about at most this many topics or ranges."""
NSQDS_MAX = 4096
"""At most this many nsqds are found through nsqlookupds: each is asked for its id."""

TIME_NS_MAX = (1 << 63) - 1
"""An nsqd counts no later time, which is in the year 2262."""

Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Port = Annotated[int, msgspec.Meta(gt=0, le=PORT_MAX)]


class TopicHead(msgspec.Struct, frozen=True):
    """Says where the log of a topic begins and ends."""

    topic: str
    first: Seq
    next: Seq
    id: str = ""
    """This is the id of the topic's incarnation; an nsqd of an older version tells none."""


class NsqdRun(msgspec.Struct, frozen=True):
    """Describes a run of an nsqd, from one start to the next. Ids sort by time, and no message of an earlier run has
    `first_seq` or a higher number.
    """

    id: str
    first_seq: Seq


class _Runs(msgspec.Struct):
    runs: list[NsqdRun]


class _LogInfo(msgspec.Struct):
    topics: list[TopicHead]
    unopened: list[str] = []


class _Place(msgspec.Struct):
    topic: str
    seq: Seq


class _Producer(msgspec.Struct, frozen=True):
    broadcast_address: str
    http_port: Port

    @property
    def address(self) -> str:
        return join_address(printable(self.broadcast_address, HOST_CHARS_MAX), self.http_port)


class _ProducerList(msgspec.Struct):
    producers: list[_Producer]


class RangeNsqd(Endpoint):
    """Asks an nsqd whose logs can be read by range. It checks that every answer has the id of that nsqd."""

    def __init__(self, address: str, access: Access, nsqd_id: str, timeout_s: float = REQUEST_TIMEOUT_S, run: str = ""):
        super().__init__(address, access, timeout_s)
        self.id = nsqd_id
        self.run = run
        """The last answer of `ask` came from this run of the nsqd."""

    def ask(self, path: str, method: str = "GET", body: Body | None = None, /, **query: Any) -> dict[str, Any]:
        fields = super().ask(path, method, body, **query)
        self.check_id(fields.get("nsqd_id"))
        self.run = str(fields.get("nsqd_run", ""))
        return fields

    def ask_many(
        self, path: str, name: str, items: Sequence[Any], answers: str, /, **query: Any
    ) -> list[dict[str, Any]]:
        """Asks about many items, as the list `name` of a document; the list `answers` of the reply has one for each."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(items), ITEMS_MAX):
            asked = items[start : start + ITEMS_MAX]
            try:
                fields = self.ask(path, "POST", msgspec.json.encode({name: asked}), **query)
            except Refused as refused:
                if refused.status in (404, 405):
                    raise WrongAddress(f"{self.address} is an nsqd of an older version: upgrade it first") from None
                raise
            listed = self.read_as(fields.get(answers), list[dict[str, Any]])
            if len(listed) != len(asked):
                raise self.wrong(f", with {len(listed)} answers to {len(asked)} questions")
            found += listed
        return found

    def refusal(self, path: str, fields: dict[str, Any]) -> Refused:
        """Makes the error for an answer of `ask_many` that is a refusal."""
        status = fields.get("status")
        return Refused(self.address, path, status if isinstance(status, int) else 400, fields)

    def stream(self, path: str, body: Body | None = None, /, **query: Any) -> http.client.HTTPResponse:
        response = super().stream(path, body, **query)
        self.check_id(response.headers.get(ID_HEADER))
        return response

    def check_id(self, answered: object) -> None:
        if answered != self.id:
            self.close()
            raise Unreachable(f"{self.address} was nsqd {self.id} and now answers as nsqd {answered}", self.address)

    def topics(self, is_wanted: Callable[[str], bool]) -> list[TopicHead]:
        """Returns where the logs of the wanted topics begin and end. Raises if the files of one could not be opened: it
        would be missing without a word.
        """
        info = self.read_as(self.ask("/log/info"), _LogInfo)
        if unopened := [topic for topic in info.unopened if is_wanted(topic)]:
            reason = f"the files of topic {', '.join(unopened)} could not be opened; its nsqd logs why, and tries again"
            raise Refused(self.address, "/log/info", 503, {"message": "DISK_ERROR", "reason": reason})
        return [head for head in info.topics if is_valid_name(head.topic) and is_wanted(head.topic)]

    def topic_names(self) -> set[str]:
        """Returns the names of all topics, of those too whose files could not be opened."""
        info = self.read_as(self.ask("/log/info"), _LogInfo)
        return set(filter(is_valid_name, [*(head.topic for head in info.topics), *info.unopened]))

    def first_at(self, topics: Sequence[str], **when: int | str) -> dict[str, int]:
        """Finds for each topic the first message published at a time or later, or the end of the log: `ts` in ns since
        1970, or `age_ms` ago by the clock of nsqd. With side="end", finds where the older messages end. Topics that
        nsqd does not have are left out.
        """
        if isinstance(ts := when.get("ts"), int):
            when["ts"] = min(max(ts, 0), TIME_NS_MAX)
        places: dict[str, int] = {}
        for fields in self.ask_many("/log/at", "topics", topics, "places", **when):
            if "message" not in fields:
                place = self.read_as(fields, _Place)
                places[place.topic] = place.seq
            elif fields["message"] != "TOPIC_NOT_FOUND":
                raise self.refusal("/log/at", fields)
        return places

    def runs(self) -> list[NsqdRun]:
        """Returns the runs that the nsqd remembers, the latest last."""
        return self.read_as(self.ask("/log/runs"), _Runs).runs

    def head(self, topic: str) -> TopicHead | None:
        """Returns where a topic's log begins and ends, or None if the nsqd has no such topic."""
        try:
            head = self.read_as(self.ask("/log/info", topic=topic), TopicHead)
        except Refused as refused:
            if refused.code == "TOPIC_NOT_FOUND":
                return None
            raise
        if head.topic != topic:
            raise self.wrong(f" to a question about topic {topic}")
        return head


def identify(address: str, access: Access) -> RangeNsqd:
    """Finds which nsqd answers at an address. Every answer has its id; one about a missing topic is the shortest."""
    endpoint = Endpoint(address, access)
    try:
        fields = endpoint.ask("/log/info", topic="_")
    except Refused as refused:
        if refused.code in ("AUTH_REQUIRED", "AUTH_FAILED"):
            raise
        fields = refused.fields
    finally:
        endpoint.close()
    nsqd_id = fields.get("nsqd_id")
    if not isinstance(nsqd_id, str) or not 1 <= len(nsqd_id) <= ID_CHARS_MAX or not nsqd_id.isprintable():
        raise _not_ours(address, endpoint)
    return RangeNsqd(address, access, nsqd_id, run=str(fields.get("nsqd_run", "")))


def _not_ours(address: str, endpoint: Endpoint) -> WrongAddress:
    try:
        info = endpoint.ask("/info")
    except NsqdError:
        info = {}
    finally:
        endpoint.close()
    if "tcp_port" in info:
        return ForeignNsqd(address)
    if "version" in info:
        return WrongAddress(f"{address} is an nsqlookupd: write it as lookupd, or the HTTP address of an nsqd (4151)")
    return WrongAddress(f"{address} is not an nsqd: write the HTTP address of an nsqd, like 127.0.0.1:4151")


class Finder:
    """Finds the nsqds that the options name. `unreachable` has the addresses that did not answer, with the reason."""

    def __init__(self, options: SourceOptions):
        self._options = options
        self.unreachable: dict[str, str] = {}
        self.replaced: dict[str, RangeNsqd] = {}
        """This maps the id of a known nsqd to another nsqd, which answers at its address now."""
        self.foreign: list[str] = []
        """These nsqds are left out because of onForeignNsqd=skip."""

    def find(self, known: Mapping[str, str] | None = None) -> dict[str, RangeNsqd]:
        """Returns nsqds by id. `known` has addresses by id: nsqds that no nsqlookupd names any more are looked for
        there.

        Raises if no nsqlookupd answers, or if an address is not what it should be. Nsqds that do not answer are in
        `unreachable`.
        """
        self.unreachable, self.replaced, self.foreign = {}, {}, []
        found: dict[str, RangeNsqd] = {}
        for address in self._options.nsqd or self._look_up():
            try:
                nsqd = self._identify(address)
            except Unreachable as error:
                self.unreachable[address] = str(error)
            except ForeignNsqd:
                if not self._options.skips_foreign_nsqds:
                    raise
                self.foreign.append(address)
            else:
                self._add(found, nsqd)
        for nsqd_id, address in (known or {}).items():
            if nsqd_id not in found:
                self._find_known(found, nsqd_id, address)
        return found

    def _add(self, found: dict[str, RangeNsqd], nsqd: RangeNsqd) -> None:
        """Adds an nsqd. One nsqd may have several addresses; two nsqds with one id run on copies of one data path."""
        other = found.setdefault(nsqd.id, nsqd)
        if other.run == nsqd.run:
            return
        # If one nsqd was restarted between the two answers, both addresses tell the same run now.
        first, second = self._identify(other.address), self._identify(nsqd.address)
        if first.id == second.id and first.run != second.run:
            raise WrongAddress(
                f"two nsqds have the id {nsqd.id}, {other.address} and {nsqd.address}: one runs on a copy of the "
                "other's data path. Stop one of them, or give it an id of its own (docs/operations.md); until then "
                "neither can be read, since their messages could not be told apart"
            )

    def _find_known(self, found: dict[str, RangeNsqd], nsqd_id: str, address: str) -> None:
        try:
            nsqd = self._identify(address)
        except NsqdError as error:
            self.unreachable.setdefault(address, str(error))
            return
        if nsqd.id == nsqd_id:
            found[nsqd_id] = nsqd
        else:
            self.replaced[nsqd_id] = nsqd

    def _identify(self, address: str) -> RangeNsqd:
        try:
            return identify(address, self._options.access)
        except WantsTls as error:
            if self._options.nsqd:
                raise
            # nsqlookupd knows only the port of plain HTTP.
            return identify(error.https_address, self._options.access)

    def _look_up(self) -> Iterable[str]:
        options = self._options
        addresses: dict[str, None] = {}
        failures: list[str] = []
        for lookupd in options.lookupd:
            endpoint = Endpoint(lookupd, Access(options.access.tls))
            try:
                addresses |= dict.fromkeys(producer.address for producer in self._producers(endpoint))
                if len(addresses) > NSQDS_MAX:
                    raise WrongAddress(f"{lookupd} names more than {NSQDS_MAX} nsqds: write nsqd, with those to read")
            except Unreachable as error:
                failures.append(str(error))
            finally:
                endpoint.close()
        if len(failures) == len(options.lookupd):
            raise Unreachable("no nsqlookupd answers: " + "; ".join(failures))
        return list(addresses)

    def _producers(self, lookupd: Endpoint) -> list[_Producer]:
        try:
            if self._options.topic_pattern is not None:
                return lookupd.read_as(lookupd.ask("/nodes"), _ProducerList).producers
            found: list[_Producer] = []
            for topic in self._options.topics:
                try:
                    found += lookupd.read_as(lookupd.ask("/lookup", topic=topic), _ProducerList).producers
                except Refused as refused:
                    if refused.code != "TOPIC_NOT_FOUND":
                        raise
            return found
        except (Refused, WrongAddress):
            raise WrongAddress(
                f"{lookupd.address} is not an nsqlookupd: write the HTTP address of one, like 127.0.0.1:4161, "
                "or use nsqd for addresses of nsqds"
            ) from None
