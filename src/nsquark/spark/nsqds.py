"""Talking to nsqds and nsqlookupds over HTTP, and finding the nsqds of a topic by the ids they keep."""

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterable
from typing import Any

from nsquark.cli.logs import library_log
from nsquark.spark.options import SourceOptions, Tls

log = library_log("nsquark.spark")

REQUEST_TIMEOUT_S = 5.0
"""For answers that nsqd has in memory: one that takes longer counts as not reachable now."""
ID_HEADER = "X-Nsquark-Id"
_TCP_PORT_ANSWER = "E_BAD_PROTOCOL"
_FAILURES = (OSError, http.client.HTTPException)


class NsqdError(RuntimeError):
    """Reading cannot go on; the text says why and what to do."""


class Unreachable(NsqdError):
    """No answer now. The data is not lost, and a later try may succeed."""

    def __init__(self, text: str, address: str = ""):
        super().__init__(text)
        self.address = address


class WrongAddress(NsqdError):
    """Something answers, but it is not what was asked for; trying again will not help."""


class TlsRequired(WrongAddress):
    """The port of plain HTTP of an nsqd that wants TLS, which tells there where to go."""

    def __init__(self, address: str, https_port: Any):
        self.https_address = f"https://{address.rpartition(':')[0]}:{https_port}"
        super().__init__(
            f"{address} requires TLS: write {self.https_address}, with tlsRootCaFile and, if it asks for a "
            "certificate, tlsCertFile and tlsKeyFile"
        )


class Refused(NsqdError):
    """nsqd answered with an error: its code and what else it said."""

    def __init__(self, address: str, path: str, status: int, fields: dict[str, Any]):
        self.status = status
        self.code = str(fields.get("message", ""))
        self.fields = fields
        reason = f": {fields['reason']}" if fields.get("reason") else ""
        super().__init__(f"{address} refused {path} with {status} {self.code}{reason}")


class Endpoint:
    """One HTTP address and the connection to it, which is kept open between requests. For one thread."""

    def __init__(self, address: str, tls: Tls, timeout_s: float = REQUEST_TIMEOUT_S):
        self.address = address
        self._tls = tls
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, path: str, method: str = "GET", /, **query: Any) -> dict[str, Any]:
        """The JSON of an answer. A connection that was kept may be stale, so the first failure is tried again."""
        was_kept = self._connection is not None
        try:
            response = self._send(method, path, query)
            body = response.read()
        except _FAILURES as error:
            self.close()
            if was_kept:
                return self.ask(path, method, **query)
            raise self._explained(error) from None
        if response.status == 200:
            return self._fields(body)
        raise self._refusal(path, response, body)

    def stream(self, path: str, /, **query: Any) -> http.client.HTTPResponse:
        """An answer whose body is still to be read."""
        try:
            response = self._send("GET", path, query)
            if response.status != 200:
                raise self._refusal(path, response, response.read())
            return response
        except _FAILURES as error:
            self.close()
            raise self._explained(error) from None

    def _send(self, method: str, path: str, query: dict[str, Any]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = open_connection(self.address, self._tls, self._timeout_s)
        self._connection.request(method, f"{path}?{urllib.parse.urlencode(query)}" if query else path)
        return self._connection.getresponse()

    def _fields(self, body: bytes) -> dict[str, Any]:
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise WrongAddress(f"{self.address} answers, but not as an nsqd or nsqlookupd does: check the address")
        return fields

    def _refusal(self, path: str, response: http.client.HTTPResponse, body: bytes) -> NsqdError:
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            return WrongAddress(
                f"{self.address} answers {path} with {response.status} and no JSON: check the address; "
                "it should be the HTTP port of an nsqd (4151) or, for lookupd, of an nsqlookupd (4161)"
            )
        if fields.get("message") == "TLS_REQUIRED":
            return TlsRequired(self.address, fields.get("https_port"))
        return Refused(self.address, path, response.status, fields)

    def _explained(self, error: Exception) -> NsqdError:
        if isinstance(error, http.client.BadStatusLine) and _TCP_PORT_ANSWER in str(error):
            return WrongAddress(
                f"{self.address} is the TCP port of an nsqd, where clients publish and subscribe; "
                "write its HTTP port instead (4151 by default)"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return WrongAddress(
                f"the certificate of {self.address} is not trusted ({error.verify_message}): "
                "write tlsRootCaFile, the authority that signed it"
            )
        if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
            return WrongAddress(f"{self.address} does not speak TLS: write the HTTPS port (4152 by default)")
        return Unreachable(f"{self.address} does not answer ({str(error) or type(error).__name__})", self.address)


def open_connection(address: str, tls: Tls, timeout_s: float) -> http.client.HTTPConnection:
    secure = address.startswith("https://")
    host, _, port = address.removeprefix("https://").rpartition(":")
    host = host.strip("[]")
    if not secure:
        return http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=_tls_context(tls))


def _tls_context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.root_ca_file)
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:
        raise WrongAddress(
            f"a TLS file cannot be used ({error}): tlsRootCaFile, tlsCertFile and tlsKeyFile must be PEM files that "
            "are there on the driver and on every executor"
        ) from None
    if tls.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Nsqd(Endpoint):
    """An nsqd that reads by range: it has told its id."""

    def __init__(self, address: str, tls: Tls, nsqd_id: str, timeout_s: float = REQUEST_TIMEOUT_S):
        super().__init__(address, tls, timeout_s)
        self.id = nsqd_id

    def ask(self, path: str, method: str = "GET", /, **query: Any) -> dict[str, Any]:
        fields = super().ask(path, method, **query)
        self.check_id(fields.get("nsqd_id"))
        return fields

    def stream(self, path: str, /, **query: Any) -> http.client.HTTPResponse:
        response = super().stream(path, **query)
        self.check_id(response.headers.get(ID_HEADER))
        return response

    def check_id(self, answered: str | None) -> None:
        if answered != self.id:
            self.close()
            raise Unreachable(f"{self.address} was nsqd {self.id} and now answers as nsqd {answered}", self.address)

    def topics(self) -> dict[str, dict[str, int]]:
        """first, next and count of every topic."""
        return {entry["topic"]: entry for entry in self.ask("/log/info")["topics"]}

    def head(self, topic: str) -> dict[str, Any] | None:
        """first, next, removed_to and more; None if it has no such topic."""
        try:
            return self.ask("/log/info", topic=topic)
        except Refused as refused:
            if refused.code == "TOPIC_NOT_FOUND":
                return None
            raise


def identify(address: str, tls: Tls) -> Nsqd:
    """Who answers at this address. Every answer carries the id; that to a topic which is not there is the shortest."""
    endpoint = Endpoint(address, tls)
    try:
        nsqd_id = endpoint.ask("/log/info", topic="_")["nsqd_id"]
    except Refused as refused:
        nsqd_id = refused.fields.get("nsqd_id")
        if nsqd_id is None:
            raise _not_ours(address, endpoint) from None
    finally:
        endpoint.close()
    return Nsqd(address, tls, str(nsqd_id))


def _not_ours(address: str, endpoint: Endpoint) -> WrongAddress:
    try:
        info = endpoint.ask("/info")
    except NsqdError:
        info = {}
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
            return identify(address, self._options.tls)
        except TlsRequired as error:
            if self._options.nsqd:
                raise
            # nsqlookupd knows only the port of plain HTTP.
            return identify(error.https_address, self._options.tls)

    def _look_up(self) -> Iterable[str]:
        options = self._options
        addresses: dict[str, None] = {}
        failures: list[str] = []
        for lookupd in options.lookupd:
            endpoint = Endpoint(lookupd, options.tls)
            try:
                for producer in self._producers(endpoint):
                    host = producer["broadcast_address"]
                    host = f"[{host}]" if ":" in host else host
                    addresses[f"{host}:{producer['http_port']}"] = None
            except Unreachable as error:
                failures.append(str(error))
            finally:
                endpoint.close()
        if len(failures) == len(options.lookupd):
            raise Unreachable("no nsqlookupd answers: " + "; ".join(failures))
        return list(addresses)

    def _producers(self, lookupd: Endpoint) -> list[dict[str, Any]]:
        try:
            if self._options.topic_pattern is not None:
                nodes: list[dict[str, Any]] = lookupd.ask("/nodes")["producers"]
                return nodes
            found: list[dict[str, Any]] = []
            for topic in self._options.topics:
                try:
                    found += lookupd.ask("/lookup", topic=topic)["producers"]
                except Refused as refused:
                    if refused.code != "TOPIC_NOT_FOUND":
                        raise
            return found
        except (Refused, KeyError):
            raise WrongAddress(
                f"{lookupd.address} is not an nsqlookupd: write the HTTP address of one, like 127.0.0.1:4161, "
                "or use nsqd for addresses of nsqds"
            ) from None
