# cython: language_level=3
"""Keeps a consumer's share of a channel. The C types are in share.pxd."""

import cython


class Share:
    """Keeps what one consumer has of a channel: its RDY, what it has in flight, and what became of its messages."""

    def __init__(self, share_id: cython.uint, rdy_max: cython.longlong, msg_timeout_ms: cython.longlong):
        self.id = share_id
        self.rdy = 0
        self.rdy_max = rdy_max
        self.in_flight = 0
        self.msg_timeout_ms = msg_timeout_ms
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
