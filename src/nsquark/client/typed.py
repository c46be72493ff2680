"""Turns values into bytes and back: JSON and msgpack by msgspec, or functions of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import datetime
from types import CoroutineType
from typing import Any, Final, Literal

import msgspec
import msgspec.inspect

from nsquark.client.checks import Body
from nsquark.client.errors import ConfigError, DecodeFailed

Encode = Literal["json", "msgpack"] | Callable[[Any], bytes]
Decode = Literal["json", "msgpack"] | Callable[[bytes], Any]

DECODERS_MAX: Final = 256
"""So many decoders are kept, each for one type: making one takes longer than using it."""

_SEQUENCES: Final = (
    msgspec.inspect.ListType,
    msgspec.inspect.SetType,
    msgspec.inspect.FrozenSetType,
    msgspec.inspect.VarTupleType,
)
_WITH_FIELDS: Final = (
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.NamedTupleType,
)
_MADE: Final = (dict, list, str, bytes, int, float, type(None), datetime, msgspec.msgpack.Ext)
"""Are the classes of what a body holds, and so what is one of them by an abstract class."""

_encode_json: Final = msgspec.json.Encoder().encode
_encode_msgpack: Final = msgspec.msgpack.Encoder().encode


def encoded(value: Any, encode: Encode) -> Body:
    """Returns the bytes of a value; an error of the encoder goes to the caller."""
    if encode == "json":
        return _encode_json(value)
    if encode == "msgpack":
        return _encode_msgpack(value)
    if callable(encode):
        body: object = encode(value)
        if not isinstance(body, Body):
            if isinstance(body, CoroutineType):
                body.close()
            name = getattr(encode, "__qualname__", repr(encode))
            raise TypeError(f"encode={name} returned a {type(body).__qualname__}: give a function that returns bytes")
        return body
    raise _unknown("encode", encode)


def decoded(body: bytes, kind: Any, decode: Decode) -> Any:
    """Returns the value in a body, or raises DecodeFailed, whatever the decoder raised."""
    if callable(decode):
        decoder, name = decode, getattr(decode, "__qualname__", repr(decode))
    else:
        decoder, name = _kept_decoder(kind, decode), f"{decode} of type {getattr(kind, '__qualname__', kind)}"
    try:
        value = decoder(body)
    except Exception as error:
        raise DecodeFailed(f"not {name}: {error}") from error
    if isinstance(value, CoroutineType):
        value.close()
        raise ConfigError(f"decode={name} is an async function: give a plain one")
    return value


def _kept_decoder(kind: Any, decode: str) -> Callable[[bytes], Any]:
    try:
        return _keep_decoder(kind, decode)
    except TypeError:  # a type that cannot be hashed, such as one annotated with a dict, is none to look up by
        return _decoder(kind, decode)


def _decoder(kind: Any, decode: str) -> Callable[[bytes], Any]:
    _check_kind(kind)
    if decode == "json":
        return msgspec.json.Decoder(kind).decode
    if decode == "msgpack":
        return msgspec.msgpack.Decoder(kind).decode
    raise _unknown("decode", decode)


_keep_decoder: Final = functools.lru_cache(DECODERS_MAX)(_decoder)


def _check_kind(kind: Any) -> None:
    """Refuses a class that msgspec does not know, also where it is a part of the type: no body would have one, and so
    each message would be given up.
    """
    try:
        found = [msgspec.inspect.type_info(kind)]
    except TypeError as error:
        hint = f": the format is the second argument, decode={kind!r}" if str(kind) in ("json", "msgpack") else ""
        raise TypeError(f"kind={kind!r:.60} is no type to decode to{hint} ({error!s:.90})") from None
    seen: set[int] = set()  # a type may be a part of itself
    for info in found:  # which grows
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, msgspec.inspect.CustomType) and not any(issubclass(made, info.cls) for made in _MADE):
            name = getattr(info.cls, "__qualname__", info.cls)
            raise ConfigError(
                f"msgspec does not know how to make a {name}: give a Struct, a dataclass or a TypedDict,"
                f" or a function that makes a {name} of the bytes (decode=)"
            )
        found += _parts(info)


def _parts(info: msgspec.inspect.Type) -> Iterable[msgspec.inspect.Type]:
    """Returns the types of the parts that come from the body. A field with a default may be one that never does."""
    if isinstance(info, _SEQUENCES):
        return [info.item_type]
    if isinstance(info, msgspec.inspect.DictType):
        return [info.key_type, info.value_type]
    if isinstance(info, msgspec.inspect.TupleType):
        return info.item_types
    if isinstance(info, msgspec.inspect.UnionType):
        return info.types
    if isinstance(info, _WITH_FIELDS):
        has_no_defaults = isinstance(info, msgspec.inspect.TypedDictType)
        return [field.type for field in info.fields if field.required or has_no_defaults]
    return ()


def _unknown(option: str, value: object) -> ConfigError:
    return ConfigError(f'{option}={value!r}: give "json", "msgpack" or a function')
