"""Checks how often a password may be tried, with a clock of the test's own."""

import pytest

from nsquark.admin.throttle import (
    FORGET_S,
    FREE_FAILURES,
    FREE_FAILURES_SHARED,
    SHARED_WAIT_S_MAX,
    WAIT_S_MAX,
    LoginThrottle,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> LoginThrottle:
    return LoginThrottle(clock)


def fail(throttle: LoginThrottle, count: int, address: str = "10.0.0.1", user: str = "alice") -> None:
    for _ in range(count):
        throttle.failed(address, user)


def test_mistakes_are_free_and_guessing_is_not(throttle: LoginThrottle, clock: Clock) -> None:
    fail(throttle, FREE_FAILURES - 1)
    assert throttle.wait_s("10.0.0.1", "alice") == 0
    waits = []
    for _ in range(12):
        fail(throttle, 1)
        waits.append(throttle.wait_s("10.0.0.1", "alice"))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, WAIT_S_MAX, WAIT_S_MAX, WAIT_S_MAX]
    clock.now += WAIT_S_MAX
    assert throttle.wait_s("10.0.0.1", "alice") == 0


def test_others_are_not_kept_out(throttle: LoginThrottle) -> None:
    fail(throttle, FREE_FAILURES + 5)
    assert throttle.wait_s("10.0.0.1", "bob") == 0
    assert throttle.wait_s("10.0.0.2", "alice") == 0


def test_one_place_cannot_try_many_names(throttle: LoginThrottle) -> None:
    for number in range(FREE_FAILURES_SHARED + 10):
        fail(throttle, 1, user=f"user{number}")
    assert 0 < throttle.wait_s("10.0.0.1", "another") <= SHARED_WAIT_S_MAX


def test_many_places_cannot_try_one_name(throttle: LoginThrottle) -> None:
    for number in range(FREE_FAILURES_SHARED + 10):
        fail(throttle, 1, address=f"10.0.1.{number}")
    assert 0 < throttle.wait_s("10.0.9.9", "alice") <= SHARED_WAIT_S_MAX


def test_a_network_of_ipv6_is_one_place(throttle: LoginThrottle) -> None:
    for number in range(FREE_FAILURES + 2):
        fail(throttle, 1, address=f"2001:db8::{number}")
    assert throttle.wait_s("2001:db8::ffff", "alice") > 0
    assert throttle.wait_s("2001:db8:0:1::1", "alice") == 0
    fail(throttle, FREE_FAILURES + 2, address="::ffff:10.0.0.7")
    assert throttle.wait_s("10.0.0.7", "alice") > 0


def test_a_success_starts_anew(throttle: LoginThrottle) -> None:
    fail(throttle, FREE_FAILURES + 3)
    throttle.succeeded("10.0.0.1", "alice")
    assert throttle.wait_s("10.0.0.1", "alice") == 0


def test_failures_are_forgotten(throttle: LoginThrottle, clock: Clock) -> None:
    fail(throttle, FREE_FAILURES + 20)
    clock.now += FORGET_S + 1
    fail(throttle, 1)
    assert throttle.wait_s("10.0.0.1", "alice") == 0


def test_what_is_remembered_is_bounded(clock: Clock) -> None:
    throttle = LoginThrottle(clock, counts_max=100)
    for number in range(1000):
        fail(throttle, 1, address=f"place {number}", user=f"user {number}")
    assert len(throttle._counts) == 100
