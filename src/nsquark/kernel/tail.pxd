from nsquark.kernel.commits cimport Commit, CommitQueue
from nsquark.kernel.extents cimport Extents
from nsquark.kernel.records cimport Chunk


cdef class Tail:
    cdef readonly CommitQueue commits
    cdef readonly Extents extents
    cdef public Chunk chunk
    cdef public bint writes_inline
    cdef public bint is_closed
    cdef public object on_committed
    cdef object _log
    cdef object _files
    cdef object _on_dirty

    cpdef object begin(self, long long timestamp_ns, long long first=*)
    cpdef object append_sized(self, object source, long long pos, long long end, long long count, long long timestamp_ns)
    cdef void _write_inline(self, Commit commit) except *
    cpdef void committed(self, Commit commit, long long messages, long long batches) except *
