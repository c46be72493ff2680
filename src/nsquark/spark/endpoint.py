"""Talks to nsqds and nsqlookupds over HTTP: every answer is bounded in time and in bytes, whatever it is."""

import functools
import http.client
import io
import ssl
import time
import urllib.parse
from typing import Any, TypeVar

import msgspec

from nsquark.base.addresses import PORT_MAX
from nsquark.base.printable import printable
from nsquark.spark.options import Access, HttpTls
from nsquark.web.bearer import bearer
from nsquark.wire.documents import decode_json

T = TypeVar("T")

REQUEST_TIMEOUT_S = 5.0
"""An nsqd that takes longer to answer from memory counts as unreachable for now."""
ANSWER_BYTES_MAX = 64 << 20
"""A JSON answer has at most this many bytes: an nsqd with hundreds of thousands of topics needs so many."""
READ_BYTES = 64 << 10
UNAUTHENTICATED = 401
TEXT_CHARS_MAX = 500
"""A text from outside adds at most this many characters to an error."""
_TCP_PORT_ANSWER = "E_BAD_PROTOCOL"
_FAILURES = (OSError, http.client.HTTPException, UnicodeError)
"""A host that is no name, such as one with two dots in a row, is a UnicodeError."""

Body = bytes | bytearray
"""The body of a request has one of these types."""


class NsqdError(RuntimeError):
    """Says that reading cannot go on; the text says why and what to do."""


class Unreachable(NsqdError):
    """Says that there is no answer now. The data is not lost, and a later try may succeed."""

    def __init__(self, text: str, address: str = ""):
        super().__init__(text)
        self.address = address


class WrongAddress(NsqdError):
    """Says that something answers, but not what was asked for; trying again will not help."""


class ForeignNsqd(WrongAddress):
    """Says that an nsqd is one of NSQ's own, or like it: it has no log API, so it cannot be read by range."""

    def __init__(self, address: str):
        super().__init__(
            f"{address} is an nsqd without a log API, like NSQ's own: only nsquark's nsqd can be read by Spark. Read "
            "its topics through nsquark tap (docs/tap.md), mirror them to an nsqd of nsquark with nsq_to_nsq, or read "
            "without it: onForeignNsqd=skip"
        )


class WantsTls(WrongAddress):
    """Says that an address is the plain HTTP port of an nsqd that requires TLS, which is at `https_address`."""

    def __init__(self, address: str, https_port: int):
        self.https_address = f"https://{address.rpartition(':')[0]}:{https_port}"
        super().__init__(
            f"{address} requires TLS: write {self.https_address}, with tlsRootCaFile and, if it asks for a "
            "certificate, tlsCertFile and tlsKeyFile"
        )


class Refused(NsqdError):
    """Says that nsqd answered with an error. `code` is its word for it, and `fields` has all that it said."""

    def __init__(self, address: str, path: str, status: int, fields: dict[str, Any]):
        self.status = status
        self.code = printable(str(fields.get("message", "")), TEXT_CHARS_MAX)
        self.fields = fields
        reason = f": {printable(str(fields['reason']), TEXT_CHARS_MAX)}" if fields.get("reason") else ""
        advice = "; write authSecretFile or authSecret" if self.code == "AUTH_REQUIRED" else ""
        super().__init__(f"{address} refused {path} with {status} {self.code}{reason}{advice}")


class Deadline:
    """Bounds the time that a whole answer may take. A socket's own timeout would begin again with every byte."""

    def __init__(self) -> None:
        self._at = 0.0

    def set(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: Any, deadline: Deadline):
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        self._sock.settimeout(self._deadline.left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, deadline: Deadline, sock: Any, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_TimedReader(raw, sock, deadline))


class Endpoint:
    """Asks one HTTP address, over a connection that is kept open between requests. It is for one thread."""

    def __init__(
        self,
        address: str,
        access: Access,
        timeout_s: float = REQUEST_TIMEOUT_S,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ):
        self.address = address
        self.deadline = Deadline()
        """The request that is under way has this deadline; a caller that reads a stream may put it off."""
        self._access = access
        # Over plain HTTP the secret is sent only after a 401 asks for it; an nsqd that requires TLS asks only over TLS.
        self._headers = bearer(access.secret) if address.startswith("https://") else {}
        self._timeout_s = timeout_s
        self._answer_bytes_max = answer_bytes_max
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, path: str, method: str = "GET", body: Body | None = None, /, **query: Any) -> dict[str, Any]:
        """Returns the JSON of an answer. A request that fails on a connection which was open before is sent again on
        another: the first may be stale.
        """
        was_open = self._connection is not None
        try:
            response = self._send(method, path, query, body)
            answer = self._read(response)
        except _FAILURES as error:
            self.close()
            if was_open and not isinstance(error, TimeoutError):
                return self.ask(path, method, body, **query)
            raise self._explained(error) from None
        if response.status == 200:
            return self._fields(answer)
        if self._shows_secret_to(response.status):
            return self.ask(path, method, body, **query)
        raise self._refusal(path, response.status, answer)

    def stream(self, path: str, body: Body | None = None, /, **query: Any) -> http.client.HTTPResponse:
        """Returns an answer whose body is still to be read. A request with a body of its own is a POST."""
        try:
            response = self._send("GET" if body is None else "POST", path, query, body)
            if response.status == 200:
                return response
            answer = self._read(response)
        except _FAILURES as error:
            self.close()
            raise self._explained(error) from None
        if self._shows_secret_to(response.status):
            return self.stream(path, body, **query)
        raise self._refusal(path, response.status, answer)

    def _shows_secret_to(self, status: int) -> bool:
        """Tells whether to send the request again, now with the secret."""
        if status != UNAUTHENTICATED or self._headers or not self._access.secret:
            return False
        self._headers = bearer(self._access.secret)
        return True

    def read_as(self, fields: Any, kind: type[T]) -> T:
        """Converts an answer to a type; raises WrongAddress if it does not fit."""
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise self.wrong(f": {error}") from None

    def _send(self, method: str, path: str, query: dict[str, Any], body: Body | None) -> http.client.HTTPResponse:
        self.deadline.set(self._timeout_s)
        if self._connection is None:
            self._connection = _open_connection(self.address, self._access.tls, self._timeout_s)
            self._connection.response_class = functools.partial(_TimedResponse, self.deadline)  # type: ignore[assignment]
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(self._timeout_s)
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        self._connection.request(method, target, body, self._headers)
        return self._connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while piece := response.read(READ_BYTES):
            data += piece
            if len(data) > self._answer_bytes_max:
                self.close()
                raise self.wrong(f" (with more than {self._answer_bytes_max >> 20} MiB)")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return bytes(data)

    def _fields(self, body: bytes) -> dict[str, Any]:
        try:
            return decode_json(body, dict[str, Any])
        except ValueError:
            raise self.wrong() from None

    def wrong(self, how: str = "") -> WrongAddress:
        """Makes the error for an answer that no nsqd or nsqlookupd would give; `how` says what is wrong with it."""
        return WrongAddress(f"{self.address} answers, but not as an nsqd or nsqlookupd does{how}: check the address")

    def _refusal(self, path: str, status: int, body: bytes) -> NsqdError:
        try:
            fields = decode_json(body, dict[str, Any])
        except ValueError:
            return WrongAddress(
                f"{self.address} answers {path} with {status} and no JSON: check the address; "
                "it should be the HTTP port of an nsqd (4151) or, for lookupd, of an nsqlookupd (4161)"
            )
        https_port = fields.get("https_port")
        if fields.get("message") == "TLS_REQUIRED" and isinstance(https_port, int) and 0 < https_port <= PORT_MAX:
            return WantsTls(self.address, https_port)
        return Refused(self.address, path, status, fields)

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


def _open_connection(address: str, tls: HttpTls, timeout_s: float) -> http.client.HTTPConnection:
    secure = address.startswith("https://")
    host, _, port = address.removeprefix("https://").rpartition(":")
    host = host.strip("[]")
    if not secure:
        return http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=_tls_context(tls))


def _tls_context(tls: HttpTls) -> ssl.SSLContext:
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
