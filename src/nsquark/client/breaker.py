"""Knows one nsqd of a producer pool, with the circuit breaker that keeps publishes away from it
while it is in trouble.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from collections.abc import Callable
from typing import Final

from nsquark.client.backoff import retry_delay_s
from nsquark.client.config import Config
from nsquark.client.errors import AuthFailed, Closed, IdentifyFailed, NotConnected, ServerError
from nsquark.client.logs import Log, NamedLog
from nsquark.client.producer import Producer

RETRY_S_MIN: Final = 0.2
RETRY_S_MAX: Final = 15.0
"""A failed nsqd is probed after the first, then after twice as long each time, up to the second."""
PROBE_TIMEOUT_S: Final = 5.0
SILENCE_S_MIN: Final = 1.0
SILENCE_S_MAX: Final = 3.0
SILENCE_TIMES: Final = 3
"""An nsqd that owes answers for so many times the longest wait for one lately has perhaps vanished: after the first of
these times at the earliest, and after the second in any case.
"""
LATENCY_STALE_S: Final = 5.0
"""A measurement that is older says nothing of today: the next one counts alone."""
LATENCY_WEIGHT: Final = 0.2

LOST: Final = (OSError, Closed, IdentifyFailed, AuthFailed)
"""These errors say nothing about the message: another nsqd may take it."""
NOT_WRITTEN: Final = frozenset(("E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED"))
"""These are errors of an nsqd whose disk is full or broken, or that is shutting down. The message is as good as before,
and not there.
"""


class State(enum.Enum):
    UP = "up"
    """It takes any number of publishes."""
    TRIAL = "trial"
    """It answers again after a failure: one publish at a time until one is taken."""
    SILENT = "silent"
    """It owes answers for much longer than it usually takes: it takes none until it answers, or is taken for dead."""
    DOWN = "down"
    """It takes none, until a probe gets through."""


def may_go_elsewhere(error: BaseException) -> bool:
    """Tells whether another nsqd may take a message that failed so. Any other answer would come from every nsqd alike,
    and each closes the connection that asked.
    """
    return isinstance(error, LOST) or (isinstance(error, ServerError) and error.code in NOT_WRITTEN)


class Member:
    """This is one nsqd of the pool. Invariants:

    * There is a probing task exactly while the state is DOWN and the member is not closed.
    * A member that is SILENT owes answers: any answer makes it UP, and any loss DOWN.
    """

    def __init__(
        self,
        address: str,
        config: Config,
        *,
        is_fixed: bool,
        silence_s_max: float,
        stall_s: float,
        on_usable: Callable[[], None],
        on_down: Callable[[], None],
        log: Log,
    ) -> None:
        self.address = address
        self.is_fixed = is_fixed
        self.state = State.UP
        self.failures = 0
        self.error: BaseException | None = None
        self._config = config
        self._silence_s_max = min(SILENCE_S_MAX, silence_s_max)
        self._stall_s = stall_s
        self._on_usable = on_usable
        self._on_down = on_down
        self._log = log
        self.latency_s = 0.0
        """Tells how long it takes to answer, lately; 0 before the first answer."""
        self.measured_at_s = 0.0
        self.producer = self._new_producer()
        self._is_loss_expected = False
        self._is_closed = False
        self._progress_s = 0.0
        """Is the time of the last answer, or of the first publish since then that waits for one."""
        self._longest_wait_s = self._longest_wait_at_s = 0.0
        """Is the longest time without progress that an answer ended, and when it did. Waiting behind other publishes
        does not count.
        """
        self._probing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_usable(self) -> bool:
        return self.state is State.UP or (self.state is State.TRIAL and not self.producer.outstanding)

    def sent(self) -> None:
        """Is told of each publish that was handed to `producer`."""
        if self.producer.outstanding == 1:
            self._progress_s = time.monotonic()
            if self._is_loss_expected and not self.producer.is_connected:
                # What the connection before this one owed is told of its loss before the next turn of the loop.
                asyncio.get_running_loop().call_soon(self._expect_no_loss)

    def succeeded(self, sent_s: float | None) -> None:
        """Is told of an answer to what was sent then; None says nothing about how long it takes."""
        now_s = time.monotonic()
        wait_s = now_s - self._progress_s
        if wait_s >= self._longest_wait_s or now_s - self._longest_wait_at_s > LATENCY_STALE_S:
            self._longest_wait_s, self._longest_wait_at_s = wait_s, now_s
        self._progress_s = now_s
        self._is_loss_expected = False
        if sent_s is not None:
            is_fresh = now_s - self.measured_at_s < LATENCY_STALE_S
            weight = LATENCY_WEIGHT if self.latency_s and is_fresh else 1.0
            self.measured_at_s = now_s
            self.latency_s += weight * (now_s - sent_s - self.latency_s)
        if self.state is State.TRIAL or self.state is State.SILENT:
            self._go_up()

    def failed(self, error: BaseException) -> None:
        """Is told of an error that a publish ended with."""
        is_silent = self.state is State.SILENT
        if isinstance(error, ServerError) and error.code not in NOT_WRITTEN:
            # The publish was wrong, not the nsqd, which now closes the connection on all that were sent after it.
            self._is_loss_expected = True
            self._progress_s = time.monotonic()
            if is_silent:
                self._go_up()
        elif isinstance(error, NotConnected) and self._is_loss_expected and not is_silent:
            # All publishes of one connection fail in one turn of the loop; the next loss is a real one.
            asyncio.get_running_loop().call_soon(self._expect_no_loss)
        elif (is_silent or may_go_elsewhere(error)) and self.state is not State.DOWN and not self._is_closed:
            self._go_down(error)

    def falls_silent(self, now_s: float, blocked_s: float) -> bool:
        """Returns True once, when what it owes should go elsewhere too. After longer silence it is taken for dead.

        blocked_s: time in which this program could read no answer, which does not count.
        """
        self._progress_s = min(now_s, self._progress_s + blocked_s)
        if not self.producer.outstanding:
            return False
        silence_s = now_s - self._progress_s
        if silence_s > self._stall_s:
            self._replace_producer(f"no answer for {silence_s:.1f} s")
        elif self.state in (State.UP, State.TRIAL) and silence_s > self._patience_s(now_s):
            self._log.warning("nsqd %s answers nothing for %.1f s: others are asked", self.address, silence_s)
            self.state = State.SILENT
            return True
        return False

    async def ping(self) -> None:
        """Connects if needed; NotConnected if that takes too long."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self.producer.ping()
        except TimeoutError:
            raise NotConnected(f"{self.address}: not connected within {PROBE_TIMEOUT_S:g} s") from None

    async def close(self, timeout_s: float) -> None:
        self._is_closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
            self._probing = None
        await self.producer.close(timeout_s)
        if self._closing:
            await asyncio.wait(self._closing)

    def _patience_s(self, now_s: float) -> float:
        is_stale = now_s - self._longest_wait_at_s > LATENCY_STALE_S
        usual_s = SILENCE_S_MIN if is_stale else SILENCE_TIMES * self._longest_wait_s
        return min(self._silence_s_max, max(SILENCE_S_MIN, usual_s))

    def _expect_no_loss(self) -> None:
        self._is_loss_expected = False

    def _go_up(self) -> None:
        self._log.info("nsqd %s is up again", self.address)
        self.state = State.UP
        self.failures = 0
        self._on_usable()

    def _go_down(self, error: BaseException) -> None:
        self._log.warning("nsqd %s is down: %s", self.address, error)
        self.state = State.DOWN
        self._is_loss_expected = False
        self.failures += 1
        self.error = error
        self._probing = asyncio.create_task(self._probe(), name=f"nsquark probe {self.address}")
        self._on_down()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(retry_delay_s(self.failures, RETRY_S_MIN, RETRY_S_MAX))
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self.producer.ping()
            except TimeoutError:
                self._replace_producer(f"not connected within {PROBE_TIMEOUT_S:g} s")
            except Exception as error:
                self.error = error
            else:
                break
            self.failures += 1
        self._probing = None
        self.error = None
        self.state = State.TRIAL
        self._on_usable()

    def _new_producer(self) -> Producer:
        # The pool itself bounds what is outstanding, over all its nsqds.
        return Producer(
            self.address,
            self._config,
            outstanding_bytes_max=sys.maxsize,
            outstanding_max=sys.maxsize,
            logger=self._log.logger if isinstance(self._log, NamedLog) else self._log,
        )

    def _replace_producer(self, why: str) -> None:
        """Makes a new producer; what the old one still owes fails at once, and goes elsewhere."""
        closing = asyncio.create_task(self.producer.close_because(why, 0), name=f"nsquark close {self.address}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.producer = self._new_producer()
