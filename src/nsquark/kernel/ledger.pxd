from nsquark.kernel.blocks cimport Block, Blocks
from nsquark.kernel.share cimport Share
from nsquark.kernel.sweep cimport Sweep


cdef class Ledger:
    cdef readonly long long floor
    cdef readonly long long next
    cdef readonly long long in_flight
    cdef readonly long long deferred
    cdef readonly long long ahead
    cdef readonly long long requeue_count
    cdef readonly long long timeout_count
    cdef readonly long long earliest
    cdef public long long wall_offset_ms
    cdef readonly long long msg_timeout_max_ms
    cdef readonly long long req_timeout_max_ms
    cdef public object journal
    cdef readonly bint has_news
    cdef readonly list finished_ns
    cdef Blocks blocks
    cdef Sweep sweep
    cdef bint measure
    cdef long long seen_ms  # when a message was requeued last, or the journal was read
    cdef list whole  # blocks that were finished as a whole, which the journal does not know
    cdef long long mark  # where `next` was when finished messages were noted last
    cdef dict _shares
    cdef long long _share_id

    cpdef int finish(self, Share share, long long seq) except -3
    cpdef int requeue(
        self, Share share, long long seq, long long delay_ms, long long now_ms, bint counted=*
    ) except -3
    cpdef int touch(self, Share share, long long seq, long long now_ms) except -3
    cpdef void raise_floor(self)
    cdef void note_waiting(self, Block block, int index)
    cdef void note_done(self, long long seq, long long count)
    cdef void due(self, Block block, long long deadline) noexcept
    cdef bint is_done(self, Block block, int slot) noexcept
    cdef int _index_in_flight(self, Share share, long long seq) except -3
    cdef long long _expire_block(self, Block block, long long now_ms) except -1
    cdef void _finished(self, Block block, int index, long long seq)
    cdef void _clear(self, long long seq)
