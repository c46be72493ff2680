cdef class Share:
    cdef readonly unsigned int id
    cdef public long long rdy
    cdef public long long rdy_max
    cdef public long long in_flight
    cdef public long long msg_timeout_ms
    cdef public long long message_count
    cdef public long long finish_count
    cdef public long long requeue_count
