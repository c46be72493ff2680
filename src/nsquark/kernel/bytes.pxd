# cython: boundscheck=False, wraparound=False, initializedcheck=False
# This is the C form of bytes.py, which modules have inline. Decorators instead of the line above have no effect.
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from libc.string cimport memcpy


cdef inline bytearray room(Py_ssize_t size):
    return PyByteArray_FromStringAndSize(NULL, size)


cdef inline long long u32(const unsigned char[::1] data, long long pos) noexcept:
    return (
        (<long long> data[pos] << 24)
        | (<long long> data[pos + 1] << 16)
        | (<long long> data[pos + 2] << 8)
        | <long long> data[pos + 3]
    )


cdef inline long long i32(const unsigned char[::1] data, long long pos) noexcept:
    return <int> u32(data, pos)


cdef inline long long i64(const unsigned char[::1] data, long long pos) noexcept:
    return <long long> ((<unsigned long long> u32(data, pos) << 32) | <unsigned long long> u32(data, pos + 4))


cdef inline unsigned long long little_u64(const unsigned char[::1] data, long long pos) noexcept:
    cdef unsigned long long value = 0
    cdef int index
    for index in range(8):
        value = (value << 8) | data[pos + 7 - index]
    return value


cdef inline void put(unsigned char[::1] data, long long pos, long long value, int size) noexcept:
    cdef int shift = 8 * (size - 1)
    while shift >= 0:
        data[pos] = <unsigned char> ((value >> shift) & 255)
        pos += 1
        shift -= 8


cdef inline void copy(
    unsigned char[::1] target,
    long long target_pos,
    const unsigned char[::1] source,
    long long source_pos,
    long long size,
) noexcept:
    memcpy(&target[target_pos], &source[source_pos], size)
