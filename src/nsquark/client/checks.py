"""What no nsqd would take, refused before it is sent: nsqd closes the connection for it."""

from nsquark.client.errors import InvalidName
from nsquark.wire.names import NAME_LENGTH_MAX, is_valid_name

Body = bytes | bytearray | memoryview


def check_name(kind: str, name: str) -> None:
    if not is_valid_name(name):
        raise InvalidName(f"{kind} name {name!r} is not valid: 1 to {NAME_LENGTH_MAX} of . a-z A-Z 0-9 _ -")


def checked_body(body: Body) -> bytes:
    if not isinstance(body, bytes):
        if not isinstance(body, bytearray | memoryview):
            raise TypeError(f"a message body is bytes, not {type(body).__name__}; encode it first")
        body = bytes(body)
    if not body:
        raise ValueError("a message body must not be empty: nsqd refuses it")
    return body
