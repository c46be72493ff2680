"""Checks which destination is chosen, with a clock and a chance of the test's own."""

import random
from collections import Counter
from typing import Any

from nsquark.tools.hostpool import BUCKET_S, EpsilonGreedy, HostPool, RoundRobin, make_pool

HOSTS = ("a", "b", "c")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def take(pool: HostPool | RoundRobin, count: int) -> str:
    return "".join(pool.choose() for _ in range(count))


def test_round_robin_begins_with_the_second_and_keeps_those_that_fail() -> None:
    pool = RoundRobin(HOSTS)
    pool.mark("b", False)
    assert take(pool, 7) == "bcabcab"


def test_a_hostpool_rotates() -> None:
    assert take(HostPool(HOSTS), 7) == "abcabca"


def test_a_failed_host_is_left_out_for_thirty_seconds() -> None:
    clock = Clock()
    pool = HostPool(HOSTS, clock)
    pool.mark("b", False)
    assert take(pool, 4) == "acac"
    clock.now_s += 30
    assert take(pool, 4) == "acac", "not before the thirty seconds are over"
    clock.now_s += 0.001
    assert take(pool, 4) == "abca", "one retry, and then it is left out again"


def test_each_retry_doubles_the_pause_up_to_fifteen_minutes() -> None:
    clock = Clock()
    pool = HostPool(("a", "b"), clock)
    pool.mark("b", False)
    pauses: list[Any] = []
    began_s = clock.now_s
    while len(pauses) < 8:
        clock.now_s += 1
        if "b" in take(pool, 2):
            pool.mark("b", False)
            pauses.append(clock.now_s - began_s)
            began_s = clock.now_s
    assert [round(pause) for pause in pauses] == [31, 61, 121, 241, 481, 901, 901, 901]


def test_a_success_revives_and_the_next_failure_begins_with_the_short_pause() -> None:
    clock = Clock()
    pool = HostPool(("a", "b"), clock)
    pool.mark("b", False)
    clock.now_s += 31
    assert take(pool, 2) == "ab"
    pool.mark("b", True)
    assert take(pool, 4) == "abab"
    pool.mark("b", False)
    clock.now_s += 31
    assert "b" in take(pool, 2)


def test_when_all_are_dead_all_are_revived() -> None:
    pool = HostPool(HOSTS, Clock())
    for host in HOSTS:
        pool.mark(host, False)
    # As NSQ's: the one that is tried first stays the next one.
    assert take(pool, 4) == "aabc"


def greedy(seed: int = 7) -> tuple[EpsilonGreedy, Clock]:
    clock = Clock()
    return EpsilonGreedy(HOSTS, clock, random.Random(seed).random), clock


def serve(pool: EpsilonGreedy, seconds: dict[str, float], count: int) -> Counter[str]:
    chosen: Counter[str] = Counter()
    for _ in range(count):
        host = pool.choose()
        chosen[host] += 1
        pool.mark(host, True, seconds[host])
    return chosen


def test_the_greedy_pool_chooses_by_response_time() -> None:
    pool, _ = greedy()
    serve(pool, {"a": 0.01, "b": 0.02, "c": 0.04}, 200)
    chosen = serve(pool, {"a": 0.01, "b": 0.02, "c": 0.04}, 7000)
    # 4 : 2 : 1, and a hundredth of the choices are made without looking.
    assert 3700 < chosen["a"] < 4300
    assert 1800 < chosen["b"] < 2200
    assert 850 < chosen["c"] < 1150


def test_the_greedy_pool_notices_answers_faster_than_a_millisecond() -> None:
    pool, _ = greedy()
    times = {"a": 0.0001, "b": 0.0009, "c": 0.0009}
    serve(pool, times, 200)
    chosen = serve(pool, times, 1000)
    assert chosen["a"] > 700


def test_the_greedy_pool_forgets_old_times() -> None:
    pool, clock = greedy()
    before = {"a": 0.01, "b": 0.1, "c": 0.1}
    now = {"a": 0.1, "b": 0.01, "c": 0.1}
    serve(pool, before, 500)
    for _ in range(40):
        clock.now_s += BUCKET_S
        serve(pool, now, 20)
    clock.now_s += 300
    serve(pool, now, 300)
    chosen = serve(pool, now, 1000)
    assert chosen["b"] > chosen["a"] * 3


def test_the_greedy_pool_tries_a_dead_host_no_sooner_than_a_hostpool() -> None:
    pool, clock = greedy()
    times = {"a": 0.001, "b": 0.1, "c": 0.1}
    serve(pool, times, 200)
    pool.mark("a", False)
    assert "a" not in take(pool, 500)
    clock.now_s += 31
    assert take(pool, 500).count("a") == 1


def test_every_word_has_its_pool() -> None:
    kinds = {mode: type(make_pool(mode, HOSTS)) for mode in ("hostpool", "epsilon-greedy", "round-robin", "whatever")}
    assert list(kinds.values()) == [HostPool, EpsilonGreedy, RoundRobin, RoundRobin]
