"""The envelope of a message that is published in several copies: a prefix that says so, and a key all copies share.

Consumers of this project take it off. Others see it before the body, so it is used only where `copies` asks for it.
"""

import os
from typing import Final

MAGIC: Final = b"\x00nsquark\x01"
"""No text and no usual format begins like this; its last byte is the envelope's version."""
KEY_BYTES: Final = 16
ENVELOPE_BYTES: Final = len(MAGIC) + KEY_BYTES


def new_key() -> bytes:
    """Random: producers that know nothing of each other, forks among them, never meet in a key."""
    return os.urandom(KEY_BYTES)


def wrap(key: bytes, body: bytes | bytearray | memoryview) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"an envelope's key has {KEY_BYTES} bytes, not {len(key)}")
    return b"".join((MAGIC, key, body))


def unwrap(body: bytes) -> tuple[bytes | None, bytes]:
    """Key and body of what was wrapped; None and the body as it is of what was not."""
    if not body.startswith(MAGIC) or len(body) < ENVELOPE_BYTES:
        return None, body
    return body[len(MAGIC) : ENVELOPE_BYTES], body[ENVELOPE_BYTES:]
