from nsquark.kernel.commits cimport Commit


cdef class ReplyQueue:
    cdef public object after
    cdef public object write
    cdef bytes _ok
    cdef object _close
    cdef object _waiting
    cdef bint _is_stopped

    cpdef void promise(self, Commit commit, object word, long long count) except *
    cpdef void flush(self) except *
