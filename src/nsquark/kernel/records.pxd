cpdef tuple measure_mpub(
    const unsigned char[::1] data, long long pos, long long end, long long count, long long size_max
)


cdef class Chunk:
    cdef readonly long long first_seq
    cdef readonly long long count
    cdef readonly long long used
    cdef readonly long long resume
    cdef readonly object view
    cdef long long _id_bits
    cdef long long _timestamp_ns  # the time of the record before, if that was written here, else -1
    cdef long long _count_max
    cdef long long _size
    cdef unsigned char[::1] _data
    cdef unsigned int[::1] _offsets

    cpdef bint append(self, const unsigned char[::1] source, long long pos, long long size, long long timestamp_ns)
    cpdef long long append_sized(
        self, const unsigned char[::1] source, long long pos, long long count, long long timestamp_ns
    )
    cpdef long long append_pubs(
        self,
        const unsigned char[::1] source,
        long long pos,
        long long end,
        bytes line,
        long long size_max,
        long long timestamp_ns,
    )
    cdef void _write(self, const unsigned char[::1] source, long long pos, long long size, long long timestamp_ns) noexcept
    cpdef long long offset(self, long long index) except -1
