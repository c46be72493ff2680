"""Checks that one budget of memory holds over all logs."""

from nsquark.kernel.records import Chunk
from nsquark.log.cache import ChunkCache


class Owner:
    """Lets go of its chunks unless it holds on to them."""

    def __init__(self) -> None:
        self.evicted: list[Chunk] = []
        self.held: list[Chunk] = []

    def evict(self, chunk: Chunk) -> bool:
        if any(chunk is held for held in self.held):
            return False
        self.evicted.append(chunk)
        return True


def chunks(count: int, size: int = 100) -> list[Chunk]:
    return [Chunk(0, 1000 * index, size, 10) for index in range(count)]


def test_the_least_recently_used_goes_first() -> None:
    cache, owner = ChunkCache(300), Owner()
    first, second, third, fourth, fifth = chunks(5)
    for chunk in (first, second, third):
        cache.add(chunk, owner)
    cache.touch(first)
    cache.add(fourth, owner)
    assert owner.evicted == [second]
    cache.add(fifth, owner)
    assert owner.evicted == [second, third]
    assert cache.used_bytes == 300


def test_what_is_held_stays_and_others_go() -> None:
    cache, owner = ChunkCache(200), Owner()
    first, second, third = chunks(3)
    owner.held = [first]
    for chunk in (first, second, third):
        cache.add(chunk, owner)
    assert owner.evicted == [second]


def test_more_than_the_budget_is_kept_if_it_must_be() -> None:
    cache, owner = ChunkCache(150), Owner()
    held = chunks(4)
    owner.held = held
    for chunk in held:
        cache.add(chunk, owner)
    assert (owner.evicted, cache.used_bytes) == ([], 400)
    owner.held = []
    (extra,) = chunks(1)
    cache.add(extra, owner)
    assert cache.used_bytes <= 150
    assert extra not in owner.evicted


def test_removed_chunks_are_not_counted_or_evicted() -> None:
    cache, owner = ChunkCache(200), Owner()
    first, second, third = chunks(3)
    cache.add(first, owner)
    cache.add(second, owner)
    cache.remove(first)
    cache.remove(first)
    cache.touch(first)
    cache.add(third, owner)
    assert (owner.evicted, cache.used_bytes) == ([], 200)
