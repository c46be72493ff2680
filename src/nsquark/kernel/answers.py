# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Carries out a consumer's answers: all FIN, REQ, TOUCH, RDY and NOP of a socket read, in one call."""

import cython

from nsquark.wire import record

if cython.compiled:
    from cython.cimports.nsquark.kernel.ledger import Ledger
    from cython.cimports.nsquark.kernel.share import Share
else:
    from nsquark.kernel.ledger import Ledger
    from nsquark.kernel.share import Share

ID_BYTES = cython.declare(cython.longlong, record.ID_BYTES)
SEQ_MASK = cython.declare(cython.longlong, record.SEQ_MASK)


def acknowledge(
    ledger: Ledger,
    share: Share,
    data: cython.uchar[::1],
    pos: cython.longlong,
    end: cython.longlong,
    now_ms: cython.longlong,
) -> cython.longlong:
    """Carries out the FIN, REQ, TOUCH, RDY and NOP commands at `pos`; returns where the first other thing starts.

    What is incomplete, malformed or refused is left for the session, which knows how to answer.
    """
    seq: cython.longlong
    value: cython.longlong
    after: cython.longlong
    first: cython.int
    while pos + 4 <= end:
        first = data[pos]
        if first == 70:  # FIN <16 hex digits>
            if pos + 21 > end or data[pos + 1] != 73 or data[pos + 2] != 78 or data[pos + 3] != 32:
                break
            seq = _sequence(data, pos + 4)
            if seq < 0 or data[pos + 20] != 10 or ledger.finish(share, seq) != 0:
                break
            pos += 21
        elif first == 82 and data[pos + 1] == 68:  # RDY <n>
            after = _number_end(data, pos + 4, end)
            if after < 0 or data[pos + 2] != 89 or data[pos + 3] != 32:
                break
            value = _number(data, pos + 4, after)
            if value > share.rdy_max:
                break
            share.rdy = value
            pos = after + 1
        elif first == 82:  # REQ <16 hex digits> <ms>
            if pos + 23 > end or data[pos + 1] != 69 or data[pos + 2] != 81 or data[pos + 3] != 32:
                break
            seq = _sequence(data, pos + 4)
            after = _number_end(data, pos + 21, end)
            if seq < 0 or data[pos + 20] != 32 or after < 0:
                break
            if ledger.requeue(share, seq, _number(data, pos + 21, after), now_ms) != 0:
                break
            pos = after + 1
        elif first == 84:  # TOUCH <16 hex digits>
            if pos + 23 > end or data[pos + 1] != 79 or data[pos + 2] != 85 or data[pos + 3] != 67:
                break
            seq = _sequence(data, pos + 6)
            if data[pos + 4] != 72 or data[pos + 5] != 32 or seq < 0 or data[pos + 22] != 10:
                break
            if ledger.touch(share, seq, now_ms) != 0:
                break
            pos += 23
        elif first == 78:  # NOP
            if data[pos + 1] != 79 or data[pos + 2] != 80 or data[pos + 3] != 10:
                break
            pos += 4
        else:
            break
    return pos


def sequence_of(message_id: bytes) -> int:
    """Returns the sequence number in a message id, or -1 if it is not an id of ours."""
    return _sequence(memoryview(bytearray(message_id)), 0) if len(message_id) == ID_BYTES else -1


@cython.cfunc
@cython.exceptval(check=False)
def _sequence(data: cython.uchar[::1], pos: cython.longlong) -> cython.longlong:
    """Returns the sequence number in the id at `pos`, without the node's bits, or -1 if it is not an id of ours."""
    value: cython.longlong = 0
    end: cython.longlong = pos + ID_BYTES
    char: cython.int
    if data[pos] > 55:  # the sign bit is never set
        return -1
    while pos < end:
        char = data[pos]
        if 48 <= char <= 57:
            char -= 48
        elif 97 <= char <= 102:
            char -= 87
        else:
            return -1
        value = (value << 4) | char
        pos += 1
    return value & SEQ_MASK


@cython.cfunc
@cython.exceptval(check=False)
def _number_end(data: cython.uchar[::1], pos: cython.longlong, end: cython.longlong) -> cython.longlong:
    """Returns where the line feed after 1 to 9 digits is, or -1 if there is something else."""
    at: cython.longlong = pos
    while at < end and 48 <= data[at] <= 57 and at - pos < 10:
        at += 1
    if at >= end or data[at] != 10 or at == pos or at - pos > 9:
        return -1
    return at


@cython.cfunc
@cython.exceptval(check=False)
def _number(data: cython.uchar[::1], pos: cython.longlong, end: cython.longlong) -> cython.longlong:
    value: cython.longlong = 0
    while pos < end:
        value = value * 10 + (data[pos] - 48)
        pos += 1
    return value
