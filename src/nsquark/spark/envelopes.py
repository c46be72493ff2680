"""Opens messages in envelopes for the source's option `headers`: a column of headers, and bodies without them."""

from collections.abc import Mapping

import pyarrow as pa

from nsquark.client.envelope import unwrap

HEADERS = pa.map_(pa.string(), pa.string())


def opened(rows: int, offsets: bytearray, bodies: bytearray) -> tuple[pa.Array, pa.Array]:
    """Returns headers and bodies. A message without an envelope has no headers, and the body that it has."""
    places = memoryview(offsets).cast("i")
    messages = [unwrap(bytes(bodies[places[row] : places[row + 1]])) for row in range(rows)]
    headers = pa.array([_pairs(message.headers) for message in messages], HEADERS)
    return headers, pa.array([message.body for message in messages], pa.binary())


def _pairs(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(headers.items())
