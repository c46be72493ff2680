"""Batches written to files outside the event loop's turn: their headers."""

from nsquark.kernel import batch as kernel
from nsquark.wire.batch_format import Batch, Bytes


def encode_header(batch: Batch, payload: Bytes) -> bytes:
    """The header of a batch that is to be written before its payload."""
    return kernel.encode_header(
        payload, batch.first_seq, batch.messages, batch.time_min_ns, batch.time_max_ns, batch.flags, batch.token
    )
