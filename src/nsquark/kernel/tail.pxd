from nsquark.kernel.records cimport Chunk
from nsquark.kernel.extents cimport Extents


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


cdef class Tail:
    cdef public Chunk chunk
    cdef public Commit open
    cdef public Commit writing
    cdef public object waiting
    cdef public bint writes_inline
    cdef public long long uncommitted_bytes
    cdef public bint is_closed
    cdef public object segments
    cdef public Extents extents
    cdef public long long head
    cdef public object on_committed
    cdef object _on_dirty

    cpdef object begin(self, long long timestamp_ns, long long first=*)
    cpdef object append_sized(self, object source, long long pos, long long end, long long count, long long timestamp_ns)
    cdef void added(self, Commit commit, long long size, long long timestamp_ns) noexcept
    cdef void _write_inline(self, Commit commit) except *
    cpdef void committed(self, Commit commit, long long messages, long long batches) except *
