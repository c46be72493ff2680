cdef enum:
    BLOCK_BITS = 12
    BLOCK_SLOTS = 4096
    SLOT_MASK = 4095

cdef enum:
    FREE = 0
    IN_FLIGHT = 1
    QUEUED = 2
    DEFERRED = 3
    FINISHED = 4
    NOTED = 5


cdef class Block:
    cdef long long number
    cdef int size
    cdef int active  # counts slots that are in flight, queued or deferred
    cdef int active_from  # below this index nothing is active
    cdef int queued_from  # below this index nothing waits for the sweep that is under way
    cdef int later_from  # below this index nothing waits for the next sweep
    cdef long long earliest
    cdef bint noted  # what is unfinished here is in the journal, and stays there until finished
    cdef bint parked  # what the journal has of it is durable, and the floor has passed it
    cdef bint listed  # it is among the blocks that the sweep has yet to finish
    cdef bint listed_later  # it is among the blocks of the next sweep
    cdef bint unnoted  # something was finished here that is not in the journal
    cdef bint sparse
    cdef unsigned short[::1] slots
    cdef unsigned char[::1] state
    cdef unsigned short[::1] attempts
    cdef unsigned int[::1] owner
    cdef long long[::1] deadline
    cdef long long[::1] delivered
    cdef long long[::1] published  # in ns; used only where latency is measured

    cdef void reset(self, long long number) noexcept
    cdef int index(self, int slot) noexcept
    cdef int slot_of(self, int index) noexcept
    cdef long long seq_of(self, int index) noexcept
    cdef bint is_active(self, int index) noexcept
    cdef Block thinned(self, bint measure)
    cdef Block widened(self, Block dense)


cdef class Blocks:
    cdef dict by_number
    cdef object order
    cdef set parked
    cdef readonly bint measure
    cdef Block recent
    cdef list _pool

    cdef void clear(self)
    cdef Block find(self, long long seq)
    cdef Block get(self, long long number)
    cdef Block open(self, long long number)
    cdef Block dense(self, Block sparse)
    cdef void release(self, Block block)
    cdef void set_aside(self, Block block)
    cdef void set_parked_aside(self, long long floor)
    cdef bint is_known(self, long long seq)
    cdef Block _fresh(self, long long number)
    cdef void _pool_add(self, Block block)
