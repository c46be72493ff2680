"""Reads JSON that others wrote; whatever is wrong with it is a ValueError."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """Reads the document as `kind`; ValueError says what is wrong, such as that it is nested too deeply to be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
