"""Finds the nsqds of a topic by the ids they keep, and asks each of them about its logs."""

import http.client
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from nsquark.base.addresses import join_address
from nsquark.spark.endpoint import (
    PORT_MAX,
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
ITEMS_MAX = 4096
"""So many things are asked about in one request."""
NSQDS_MAX = 4096
"""So many nsqds are found through nsqlookupds at most: each is asked for its id."""

Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Port = Annotated[int, msgspec.Meta(gt=0, le=PORT_MAX)]


class TopicHead(msgspec.Struct, frozen=True):
    """The ends of a log."""

    topic: str
    first: Seq
    next: Seq
    id: str = ""
    """The id of the topic's incarnation; an nsqd of an older version tells none."""


class NsqdRun(msgspec.Struct, frozen=True):
    """A start of an nsqd: ids sort by time, and no message of an earlier run has `first_seq` or a higher number."""

    id: str
    first_seq: Seq


class _Runs(msgspec.Struct):
    runs: list[NsqdRun]


class _Topics(msgspec.Struct):
    topics: list[TopicHead]


class _Place(msgspec.Struct):
    topic: str
    seq: Seq


class _Producer(msgspec.Struct, frozen=True):
    broadcast_address: str
    http_port: Port

    @property
    def address(self) -> str:
        return join_address(self.broadcast_address, self.http_port)


class _Producers(msgspec.Struct):
    producers: list[_Producer]


class RangeNsqd(Endpoint):
    """An nsqd that reads by range: it has told its id."""

    def __init__(self, address: str, access: Access, nsqd_id: str, timeout_s: float = REQUEST_TIMEOUT_S, run: str = ""):
        super().__init__(address, access, timeout_s)
        self.id = nsqd_id
        self.run = run
        """The start that the last answer came from."""

    def ask(self, path: str, method: str = "GET", body: Body | None = None, /, **query: Any) -> dict[str, Any]:
        fields = super().ask(path, method, body, **query)
        self.check_id(fields.get("nsqd_id"))
        self.run = str(fields.get("nsqd_run", ""))
        return fields

    def ask_many(
        self, path: str, name: str, items: Sequence[Any], answers: str, /, **query: Any
    ) -> list[dict[str, Any]]:
        """Asks about many things at once, as the list `name` of a document; each has its answer in `answers`."""
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
        """Makes the error of one of many answers that is one."""
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

    def topics(self) -> dict[str, TopicHead]:
        """Returns every topic, by name."""
        heads = self.read_as(self.ask("/log/info"), _Topics).topics
        return {head.topic: head for head in heads if is_valid_name(head.topic)}

    def first_at(self, topics: Sequence[str], **when: int | str) -> dict[str, int]:
        """Finds the first message published at a time or later, the end of the log if there is none: `ts_ms` or `ts` in
        ns since 1970, or `age_ms` ago by the clock of nsqd. With side="end", it finds where those end that are older.
        Topics that are not there are left out.
        """
        places: dict[str, int] = {}
        for fields in self.ask_many("/log/at", "topics", topics, "places", **when):
            if "message" not in fields:
                place = self.read_as(fields, _Place)
                places[place.topic] = place.seq
            elif fields["message"] != "TOPIC_NOT_FOUND":
                raise self.refusal("/log/at", fields)
        return places

    def runs(self) -> list[NsqdRun]:
        """Returns the starts that the nsqd remembers, the latest last."""
        return self.read_as(self.ask("/log/runs"), _Runs).runs

    def head(self, topic: str) -> TopicHead | None:
        """Returns the ends of a topic's log; None if the nsqd has no such topic."""
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
    """Finds who answers at this address. Every answer carries the id; that to a topic which is not there is the
    shortest.
    """
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
    """Finds the nsqds that the options name, now. What does not answer is remembered as
    `unreachable`, with the reason.
    """

    def __init__(self, options: SourceOptions):
        self._options = options
        self.unreachable: dict[str, str] = {}
        self.replaced: dict[str, RangeNsqd] = {}
        """The nsqds that answer now where another was known, by the id of that other."""
        self.foreign: list[str] = []
        """The addresses of nsqds that are left out with onForeignNsqd=skip."""

    def find(self, known: Mapping[str, str] | None = None) -> dict[str, RangeNsqd]:
        """Finds nsqds by id. `known` has addresses by id, where nsqds are also looked for that no nsqlookupd names any
        more.

        Raises if nothing at all can be asked, or if an address is not what it should be.
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
        """Adds an nsqd. One may have several addresses; two with one id have copies of one data path."""
        other = found.setdefault(nsqd.id, nsqd)
        if other.run == nsqd.run:
            return
        # One that was started again meanwhile has the same run now.
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
                return lookupd.read_as(lookupd.ask("/nodes"), _Producers).producers
            found: list[_Producer] = []
            for topic in self._options.topics:
                try:
                    found += lookupd.read_as(lookupd.ask("/lookup", topic=topic), _Producers).producers
                except Refused as refused:
                    if refused.code != "TOPIC_NOT_FOUND":
                        raise
            return found
        except (Refused, WrongAddress):
            raise WrongAddress(
                f"{lookupd.address} is not an nsqlookupd: write the HTTP address of one, like 127.0.0.1:4161, "
                "or use nsqd for addresses of nsqds"
            ) from None
