"""Exports the client's errors, where users look for them."""

from nsquark.client.errors import (
    AuthFailed,
    Closed,
    ConfigError,
    DecodeFailed,
    IdentifyFailed,
    InvalidName,
    LookupFailed,
    MessageTooBig,
    NotConnected,
    NsqError,
    ServerError,
    TooMuchOutstanding,
    WrongHandler,
    WrongPort,
)

__all__ = [
    "AuthFailed",
    "Closed",
    "ConfigError",
    "DecodeFailed",
    "IdentifyFailed",
    "InvalidName",
    "LookupFailed",
    "MessageTooBig",
    "NotConnected",
    "NsqError",
    "ServerError",
    "TooMuchOutstanding",
    "WrongHandler",
    "WrongPort",
]
