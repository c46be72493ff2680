"""The nsqds of a topic, found by the ids they keep, and what each of them says of its logs."""

import http.client
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from nsquark.spark.endpoint import (
    PORT_MAX,
    REQUEST_TIMEOUT_S,
    Endpoint,
    NsqdError,
    Refused,
    TlsRequired,
    Unreachable,
    WrongAddress,
)
from nsquark.spark.options import Access, SourceOptions
from nsquark.wire.names import is_valid_name

ID_HEADER = "X-Nsquark-Id"
ID_CHARS_MAX = 64
NSQDS_MAX = 4096
"""Found through nsqlookupds: each is asked for its id."""

Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Port = Annotated[int, msgspec.Meta(gt=0, le=PORT_MAX)]


class TopicHead(msgspec.Struct, frozen=True):
    """The ends of a log."""

    topic: str
    first: Seq
    next: Seq


class _Topics(msgspec.Struct):
    topics: list[TopicHead]


class _Place(msgspec.Struct):
    seq: Seq


class _Producer(msgspec.Struct, frozen=True):
    broadcast_address: str
    http_port: Port

    @property
    def address(self) -> str:
        host = self.broadcast_address
        return f"{f'[{host}]' if ':' in host else host}:{self.http_port}"


class _Producers(msgspec.Struct):
    producers: list[_Producer]


class Nsqd(Endpoint):
    """An nsqd that reads by range: it has told its id."""

    def __init__(self, address: str, access: Access, nsqd_id: str, timeout_s: float = REQUEST_TIMEOUT_S):
        super().__init__(address, access, timeout_s)
        self.id = nsqd_id

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, /, **query: Any) -> dict[str, Any]:
        fields = super().ask(path, method, body, **query)
        self.check_id(fields.get("nsqd_id"))
        return fields

    def stream(self, path: str, /, **query: Any) -> http.client.HTTPResponse:
        response = super().stream(path, **query)
        self.check_id(response.headers.get(ID_HEADER))
        return response

    def check_id(self, answered: object) -> None:
        if answered != self.id:
            self.close()
            raise Unreachable(f"{self.address} was nsqd {self.id} and now answers as nsqd {answered}", self.address)

    def topics(self) -> dict[str, TopicHead]:
        """Every topic, by name."""
        heads = self.read_as(self.ask("/log/info"), _Topics).topics
        return {head.topic: head for head in heads if is_valid_name(head.topic)}

    def first_at(self, topic: str, time_ms: int) -> int:
        """The first message published at this time or later; the end of the log if there is none."""
        return self.read_as(self.ask("/log/at", topic=topic, ts_ms=time_ms), _Place).seq

    def head(self, topic: str) -> TopicHead | None:
        """None if it has no such topic."""
        try:
            head = self.read_as(self.ask("/log/info", topic=topic), TopicHead)
        except Refused as refused:
            if refused.code == "TOPIC_NOT_FOUND":
                return None
            raise
        if head.topic != topic:
            raise self.wrong(f" to a question about topic {topic}")
        return head


def identify(address: str, access: Access) -> Nsqd:
    """Who answers at this address. Every answer carries the id; that to a topic which is not there is the shortest."""
    endpoint = Endpoint(address, access)
    try:
        nsqd_id = endpoint.ask("/log/info", topic="_").get("nsqd_id")
    except Refused as refused:
        if refused.code in ("AUTH_REQUIRED", "AUTH_FAILED"):
            raise
        nsqd_id = refused.fields.get("nsqd_id")
    finally:
        endpoint.close()
    if not isinstance(nsqd_id, str) or not 1 <= len(nsqd_id) <= ID_CHARS_MAX or not nsqd_id.isprintable():
        raise _not_ours(address, endpoint)
    return Nsqd(address, access, nsqd_id)


def _not_ours(address: str, endpoint: Endpoint) -> WrongAddress:
    try:
        info = endpoint.ask("/info")
    except NsqdError:
        info = {}
    finally:
        endpoint.close()
    if "tcp_port" in info:
        return WrongAddress(f"{address} is an nsqd without a log API: only nsquark's nsqd can be read by Spark")
    if "version" in info:
        return WrongAddress(f"{address} is an nsqlookupd: write it as lookupd, or the HTTP address of an nsqd (4151)")
    return WrongAddress(f"{address} is not an nsqd: write the HTTP address of an nsqd, like 127.0.0.1:4151")


class Finder:
    """The nsqds that the options name, now. What does not answer is remembered as `unreachable`, with the reason."""

    def __init__(self, options: SourceOptions):
        self._options = options
        self.unreachable: dict[str, str] = {}

    def find(self) -> dict[str, Nsqd]:
        """By id. Raises if nothing at all can be asked, or if an address is not what it should be."""
        options = self._options
        self.unreachable = {}
        addresses = options.nsqd or self._look_up()
        found: dict[str, Nsqd] = {}
        for address in addresses:
            try:
                nsqd = self._identify(address)
            except Unreachable as error:
                self.unreachable[address] = str(error)
            else:
                found.setdefault(nsqd.id, nsqd)
        return found

    def _identify(self, address: str) -> Nsqd:
        try:
            return identify(address, self._options.access)
        except TlsRequired as error:
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
