"""Reads the small JSON objects in the bodies of requests, and words errors as Go does."""

from __future__ import annotations

import json
from typing import Final

from nsquark.admin.cluster import go_char

_WORDS: Final = {
    "Expecting value": "looking for beginning of value",
    "Expecting property name enclosed in double quotes": "looking for beginning of object key string",
    "Illegal trailing comma before end of object": "looking for beginning of object key string",
    "Expecting ':' delimiter": "after object key",
    "Expecting ',' delimiter": "after object key:value pair",
}
_KINDS: Final = {list: "array", str: "string", bool: "bool", int: "number", float: "number", dict: "object"}


def string_fields(body: bytes, *names: str) -> dict[str, str]:
    """Returns the values of these fields, empty where they are missing, or raises ValueError in Go's words.

    As in Go's decoder, only the first value of the body is read, and names are compared without regard to case.
    """
    text = body.decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text:
        raise ValueError("EOF")
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except json.JSONDecodeError as error:
        raise ValueError(_go_words(text, error)) from None
    found = dict.fromkeys(names, "")
    if value is None:
        return found
    if not isinstance(value, dict):
        fields = "; ".join(f'{name.capitalize()} string "json:\\"{name}\\""' for name in names)
        raise ValueError(f"json: cannot unmarshal {_KINDS[type(value)]} into Go value of type struct {{ {fields} }}")
    for name, given in value.items():
        if name.lower() not in found or given is None:
            continue
        if not isinstance(given, str):
            field = name.lower()
            raise ValueError(
                f"json: cannot unmarshal {_KINDS[type(given)]} into Go struct field .{field} of type string"
            )
        found[name.lower()] = given
    return found


def _go_words(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text) or error.msg.startswith("Unterminated"):
        return "unexpected EOF"
    words = _WORDS.get(error.msg.partition(":")[0] if error.msg.startswith("Expecting property") else error.msg)
    return f"invalid character {go_char(text[error.pos])} {words or 'in literal'}"
