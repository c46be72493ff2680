"""Reads and writes numbers in bytes. This is the interpreted form; the C form is in bytes.pxd.

The module itself is not compiled: other modules have the functions of bytes.pxd inline, so that a call costs nothing.
"""


def room(size):
    """Makes a bytearray whose bytes are not set yet when compiled: clearing them costs as much as a copy."""
    return bytearray(size)


def u32(data, pos):
    """Reads an unsigned number of 4 bytes, big endian."""
    return int.from_bytes(data[pos : pos + 4], "big")


def i32(data, pos):
    """Reads a signed number of 4 bytes, big endian."""
    return int.from_bytes(data[pos : pos + 4], "big", signed=True)


def i64(data, pos):
    """Reads a signed number of 8 bytes, big endian."""
    return int.from_bytes(data[pos : pos + 8], "big", signed=True)


def little_u64(data, pos):
    """Reads an unsigned number of 8 bytes, little endian."""
    return int.from_bytes(data[pos : pos + 8], "little")


def put(data, pos, value, size):
    """Writes the lowest `size` bytes of a number, big endian."""
    data[pos : pos + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "big")


def copy(target, target_pos, source, source_pos, size):
    """Copies `size` bytes between two places that do not overlap."""
    target[target_pos : target_pos + size] = source[source_pos : source_pos + size]
