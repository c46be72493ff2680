from nsquark.kernel.blocks cimport Block, Blocks


cdef class Sweep:
    cdef long long count
    cdef Blocks _blocks
    cdef list _now  # a heap of the numbers of the blocks that the sweep has yet to finish
    cdef long long _at
    cdef long long _end
    cdef list _later

    cdef void clear(self)
    cdef void queue(self, Block block, int index)
    cdef void unqueue(self, Block block, int index)
    cdef long long next(self) except -2
    cdef void _begin(self)
