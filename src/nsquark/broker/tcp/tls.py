"""Sets TLS up as the options ask for it: contexts, what is shown of a connection, and the refusal of plain HTTP."""

from __future__ import annotations

import os
import ssl
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nsquark.broker.options import NsqdOptions, NsqdOptionsError, TlsVersion
from nsquark.web.certificates import common_name
from nsquark.web.messages import JSON_TYPE, NSQ_HEADER, Request, Response
from nsquark.web.router import Router, Target

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

CLIENT_CERTIFICATE_POLICIES: Final = ("require", "require-verify")

_OLD_VERSION_CIPHERS: Final = "ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:RSA+AESGCM:RSA+AES:!aNULL:!eNULL:!AESCCM:@SECLEVEL=0"
"""TLS 1.0 and 1.1 sign with SHA-1 and MD5, which OpenSSL allows at this level only."""

_VERSIONS: Final = {"TLSv1": "TLS1.0", "TLSv1.1": "TLS1.1", "TLSv1.2": "TLS1.2", "TLSv1.3": "TLS1.3"}
_CIPHER_SUITES: Final = {
    0x002F: "TLS_RSA_WITH_AES_128_CBC_SHA",
    0x0035: "TLS_RSA_WITH_AES_256_CBC_SHA",
    0xC009: "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    0xC00A: "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    0xC013: "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    0xC014: "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    0xC02B: "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    0xC02F: "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
}
"""Has the cipher suites NSQ has a name for; it shows all others by number."""


def server_context(options: NsqdOptions) -> ssl.SSLContext | None:
    """Makes the context for clients and HTTPS; returns None without a certificate."""
    if not options.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if asks_for_certificates(options):
            context.verify_mode = ssl.CERT_REQUIRED
            _trust(context, options.tls_root_ca_file, ssl.Purpose.CLIENT_AUTH)
        elif options.tls_root_ca_file:
            context.load_verify_locations(options.tls_root_ca_file)
    except (OSError, ValueError) as error:
        raise NsqdOptionsError(f"failed to build TLS config - {error}") from None
    _set_versions(context, options)
    return context


def tls_warnings(options: NsqdOptions) -> Iterator[str]:
    """Yields what an operator should know of the TLS settings, once they proved usable."""
    if asks_for_certificates(options) and options.tls_client_auth_policy != "require-verify":
        yield "--tls-client-auth-policy=require checks certificates as require-verify does"
    if options.tls_cert and options.tls_key and os.stat(options.tls_key).st_mode & stat.S_IROTH:
        yield f"--tls-key={options.tls_key} can be read by every user of this machine: chmod 600 it"


def asks_for_certificates(options: NsqdOptions) -> bool:
    return options.tls_client_auth_policy in CLIENT_CERTIFICATE_POLICIES


def client_context(options: NsqdOptions) -> ssl.SSLContext:
    """Makes the context for auth servers at an https address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        _trust(context, options.tls_root_ca_file, ssl.Purpose.SERVER_AUTH)
    except (OSError, ValueError) as error:
        raise NsqdOptionsError(f"failed to build TLS config - {error}") from None
    context.minimum_version = ssl.TLSVersion(max(options.tls_min_version, TlsVersion.TLS1_2))
    return context


def _trust(context: ssl.SSLContext, root_ca_file: str, purpose: ssl.Purpose) -> None:
    if root_ca_file:
        context.load_verify_locations(root_ca_file)
    else:
        context.load_default_certs(purpose)


def _set_versions(context: ssl.SSLContext, options: NsqdOptions) -> None:
    """Sets the versions. The old ones need a level at which weak signatures of certificates pass too, so it is not used
    where those are checked.
    """
    least = options.tls_min_version
    if least < TlsVersion.TLS1_2 and context.verify_mode is ssl.CERT_NONE:
        context.set_ciphers(_OLD_VERSION_CIPHERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion(least)


@dataclass(frozen=True, slots=True)
class TlsState:
    """Says what is known of a connection after its handshake, in /stats' words."""

    version: str
    cipher_suite: str
    common_name: str

    @classmethod
    def of(cls, connection: ssl.SSLObject) -> TlsState:
        version = connection.version() or ""
        return cls(
            _VERSIONS.get(version, f"Unknown {version}"),
            _cipher_suite(connection),
            common_name(connection.getpeercert()),
        )


def _cipher_suite(connection: ssl.SSLObject) -> str:
    negotiated = connection.cipher()
    name = negotiated[0] if negotiated else ""
    for cipher in connection.context.get_ciphers():
        if cipher["name"] == name:
            number = cipher["id"] & 0xFFFF
            return _CIPHER_SUITES.get(number, f"Unknown {number}")
    return f"Unknown {name}"


class TlsRequiredRouter(Router):
    """Answers on a plain HTTP port that is not to be used: every request is told where HTTPS is."""

    def __init__(self, nsqd: Nsqd) -> None:
        super().__init__()
        self._nsqd = nsqd

    def resolve(self, method: bytes, url: bytes) -> Target:
        uri = url.decode("latin-1")
        # No body is wanted: one that is announced or begun is refused with the same words.
        return Target(method.decode(), uri, "", "", {}, False, self._answer, False, 0, self._refusal(close=True))

    def _answer(self, request: Request) -> Response:
        return self._refusal(close=False)

    def _refusal(self, *, close: bool) -> Response:
        body = b'{"message": "TLS_REQUIRED", "https_port": %d}' % self._nsqd.https_port
        return Response(403, body, JSON_TYPE, (NSQ_HEADER,), close)
