cdef class Extents:
    cdef readonly long long head
    cdef list _starts
    cdef list _ends
    cdef list _ordinals
    cdef long long _total

    cpdef void add(self, long long first, long long count)
    cpdef long long ordinal(self, long long seq)
