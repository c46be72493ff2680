cdef class Commit:
    cdef public list waiters
    cdef public bint is_settled
    cdef public object error
    cdef public list slices
    cdef public long long time_min_ns
    cdef public long long time_max_ns
    cdef public long long bytes_added
    cdef public int flags
    cdef public bytes token


cdef class CommitQueue:
    cdef readonly Commit open
    cdef readonly Commit writing
    cdef readonly long long uncommitted_bytes
    cdef readonly object waiting

    cpdef bint is_congested(self) noexcept
    cdef Commit begin(self, long long timestamp_ns)
    cdef void added(self, long long size, long long timestamp_ns) noexcept
    cpdef object start_next(self)
    cpdef void written(self)
    cpdef list abandon(self)
    cdef list _all(self)
