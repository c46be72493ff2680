from nsquark.kernel.records cimport Chunk
from nsquark.kernel.extents cimport Extents


cpdef bytes encode_header(
    object payload,
    long long first_seq,
    long long messages,
    long long time_min_ns,
    long long time_max_ns,
    int flags,
    bytes token,
)


cdef class BatchFile:
    cdef public long long size
    cdef public Extents extents
    cdef public long long time_min_ns
    cdef public long long time_max_ns
    cdef public object seqs
    cdef public object offsets
    cdef public object times
    cdef public long long index_at

    cpdef long long append(
        self, int fd, Chunk chunk, long long start, long long size, long long time_min_ns, long long time_max_ns
    ) except -1
    cpdef void grown(
        self,
        long long offset,
        long long first_seq,
        long long messages,
        long long payload_bytes,
        long long time_min_ns,
        long long time_max_ns,
    )
