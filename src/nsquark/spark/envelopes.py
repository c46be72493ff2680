"""Opens the envelopes of messages for the source's option `headers`, into a column of headers and the bodies inside."""

from collections.abc import Mapping

import pyarrow as pa

from nsquark.client.envelope import unwrap

HEADERS = pa.map_(pa.string(), pa.string())


def opened(rows: int, offsets: bytearray, bodies: bytearray) -> tuple[pa.Array, pa.Array]:
    """Returns the headers and bodies of messages. A message without an envelope has no headers, and keeps its body."""
    places = memoryview(offsets).cast("i")
    messages = [unwrap(bytes(bodies[places[row] : places[row + 1]])) for row in range(rows)]
    headers = pa.array([_pairs(message.headers) for message in messages], HEADERS)
    return headers, pa.array([message.body for message in messages], pa.binary())


def _pairs(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(headers.items())
