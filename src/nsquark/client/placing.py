"""Places each publish of a pool: on the best nsqd, on another when that fails, until its deadline."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from nsquark.client.breaker import LATENCY_STALE_S, Member, may_go_elsewhere
from nsquark.client.errors import Closed, NotConnected, TooMuchOutstanding
from nsquark.client.producer import Producer

SLOW_TIMES: Final = 2
SLOW_S_MIN: Final = 0.01
"""An nsqd is slow if it takes so many times as long as the fastest, and so much longer."""
SLOW_BYTES: Final = 1
"""The handicap of a slow nsqd: it is chosen only where all others have publishes to answer."""
SWEEP_INTERVAL_S: Final = 0.1
"""The time between two looks at the deadlines."""

Send = Callable[[Producer], "asyncio.Future[None]"]


class Publish:
    """This is one call of a publish method, until every copy of it is taken or one cannot be."""

    __slots__ = ("deadline_s", "error", "future", "given_to", "in_air", "is_admitted", "pending", "send", "size")

    def __init__(self, send: Send, size: int, copies: int, deadline_s: float, future: asyncio.Future[None]) -> None:
        self.send = send
        self.size = size
        self.deadline_s = deadline_s
        self.future = future
        self.pending = copies
        """The number of copies that no nsqd has said OK to."""
        self.in_air = 0
        """The number of copies that were sent and have no answer."""
        self.given_to: list[Member] = []
        """The nsqds where a copy is or may soon be: the next one goes elsewhere."""
        self.error: BaseException | None = None
        self.is_admitted = False


class Placing:
    """Finds an nsqd for every copy of every publish. `refusal` says why none will ever take one, or None.

    Invariants: every publish in `_unsettled` is either in `_waiting`, or admitted with each pending copy in the air or
    in `_homeless`; outstanding are the admitted ones that are unsettled or still in the air.
    """

    def __init__(
        self,
        copies: int,
        retry_s: float,
        bytes_max: int,
        count_max: int,
        refusal: Callable[[], BaseException | None],
    ) -> None:
        self._copies = copies
        self._retry_s = retry_s
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._refusal = refusal
        self._in_turn: deque[Member] = deque()
        self._fastest_s = 0.0
        self._waiting: deque[Publish] = deque()
        self._homeless: dict[Publish, int] = {}
        """The number of copies of a publish that wait for an nsqd."""
        self._unsettled: OrderedDict[Publish, None] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_letting_in = False
        self.count = self.bytes = 0
        """The number and the size of what is outstanding."""

    def use(self, members: Iterable[Member]) -> None:
        """Uses these nsqds from now on; what others still owe is theirs to answer."""
        self._in_turn = deque(members)

    def check_room(self, size: int, count: int) -> None:
        """Raises TooMuchOutstanding if so many publishes of this size together would be too much."""
        if self._waiting or not self._has_room(size, count):
            raise TooMuchOutstanding(f"{self.count} publishes ({self.bytes} bytes) wait for their answer")

    def submit(self, send: Send, size: int, loop: asyncio.AbstractEventLoop) -> Publish:
        """Sends it on its way, or lets it wait while too much is outstanding."""
        has_room = not self._waiting and self._has_room(size)
        publish = Publish(send, size, self._copies, time.monotonic() + self._retry_s, loop.create_future())
        self._unsettled[publish] = None
        if self._sweep is None:
            self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._sweep_up)
        if has_room:
            self._admit(publish)
        else:
            self._waiting.append(publish)
        return publish

    async def outcome(self, publish: Publish) -> None:
        try:
            await publish.future
        except asyncio.CancelledError:
            self._settled(publish)
            raise

    def place_homeless(self) -> None:
        """Tries again what found no nsqd: to be called when one can be used again, or none ever."""
        homeless, self._homeless = self._homeless, {}
        for publish, copies in homeless.items():
            for _ in range(copies):
                self._place(publish)

    def missing(self) -> str:
        """Tells how many nsqds there should be, and are."""
        usable = sum(member.is_usable for member in self._in_turn)
        return f"{self._copies} nsqds needed, {len(self._in_turn)} known, {usable} of them usable"

    async def close(self, timeout_s: float) -> None:
        """Waits for what is on its way, retries included; then all are settled."""
        while self._waiting:
            self._fail(self._waiting.popleft(), Closed("stopped before the message was sent"))
        unsettled = [publish for publish in self._unsettled if not publish.future.done()]
        try:
            if unsettled:
                await asyncio.wait([publish.future for publish in unsettled], timeout=timeout_s)
        finally:  # also when cancelled
            for publish in unsettled:
                self._fail(publish, Closed("closed before nsqd answered; it may or may not have the message"))

    def end(self) -> None:
        """Ends when nothing can be answered any more."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _has_room(self, size: int, count: int = 1) -> bool:
        """Tells whether they fit. One publish is always let through, however big."""
        waiting = self.count + count
        return waiting == 1 or (self.bytes + size <= self._bytes_max and waiting <= self._count_max)

    def _admit(self, publish: Publish) -> None:
        publish.is_admitted = True
        self.count += 1
        self.bytes += publish.size
        for _ in range(self._copies):
            self._place(publish)

    def _place(self, publish: Publish) -> None:
        """Gives one copy to the best nsqd; it waits if none can be used now."""
        if publish.future.done():
            return
        member = self._best(publish.given_to)
        if member is None:
            refusal = self._refusal()
            if refusal is None:
                self._homeless[publish] = self._homeless.get(publish, 0) + 1
            else:
                self._fail(publish, type(refusal)(*refusal.args))
            return
        self._give(publish, member)

    def _give(self, publish: Publish, member: Member) -> None:
        sent_s = time.monotonic() if member.producer.is_connected else None  # to connect is not to answer
        try:
            answer = publish.send(member.producer)
        except Exception as error:
            self._fail(publish, error)
            return
        publish.in_air += 1
        publish.given_to.append(member)
        member.sent()
        answer.add_done_callback(lambda answer: self._answered(publish, member, sent_s, answer.exception()))

    def _best(self, given_to: list[Member]) -> Member | None:
        """Finds who has the fewest unanswered bytes; equals take turns, or those who await each publish would use one
        nsqd only. One that is much slower than others has no turn, but for a publish now and then to measure it anew.
        """
        best: Member | None = None
        best_bytes = 0
        self._in_turn.rotate(-1)
        slow_s = SLOW_S_MIN + SLOW_TIMES * self._fastest_s if self._fastest_s else 0.0
        for member in self._in_turn:
            if not member.is_usable or member in given_to:
                continue
            waiting_bytes = member.producer.outstanding_bytes
            if 0 < slow_s < member.latency_s and time.monotonic() - member.measured_at_s < LATENCY_STALE_S:
                waiting_bytes += SLOW_BYTES
            if best is None or waiting_bytes < best_bytes:
                best, best_bytes = member, waiting_bytes
        return best

    def _answered(self, publish: Publish, member: Member, sent_s: float | None, error: BaseException | None) -> None:
        publish.in_air -= 1
        if error is None:
            member.succeeded(sent_s)
            publish.pending = max(0, publish.pending - 1)
            if not publish.pending and not publish.future.done():
                publish.future.set_result(None)
        else:
            member.failed(error)
            publish.error = error
            publish.given_to.remove(member)
            if not may_go_elsewhere(error):
                self._fail(publish, error)
            elif publish.in_air < publish.pending:
                self._place(publish)
        if publish.future.done():
            self._settled(publish)

    def _fail(self, publish: Publish, error: BaseException) -> None:
        """Settles it with an error, unless its future was cancelled."""
        if not publish.future.done():
            publish.future.set_exception(error)
        self._settled(publish)

    def _settled(self, publish: Publish) -> None:
        """Makes room for others. Copies in the air take up room even if nobody waits for them."""
        self._unsettled.pop(publish, None)
        self._homeless.pop(publish, None)
        if publish.is_admitted and not publish.in_air:
            publish.is_admitted = False
            self.count -= 1
            self.bytes -= publish.size
            if self._waiting and not self._is_letting_in:
                self._let_in()

    def _let_in(self) -> None:
        """Admits those that wait longest, as far as there is room. One that fails at once makes room for the next: in
        this loop, since thousands that call each other would be too deep.
        """
        self._is_letting_in = True
        while self._waiting and self._has_room(self._waiting[0].size):
            publish = self._waiting.popleft()
            if not publish.future.done():
                self._admit(publish)
        self._is_letting_in = False

    # -- deadlines -----------------------------------------------------------------------------------------

    def _sweep_up(self) -> None:
        self._sweep = None
        now_s = time.monotonic()
        silent = [member for member in self._in_turn if member.falls_silent(now_s)]
        for member in silent:
            self._send_elsewhere(member)
        measured = [member.latency_s for member in self._in_turn if member.is_usable and member.latency_s]
        self._fastest_s = min(measured, default=0.0)
        while self._unsettled:
            oldest = next(iter(self._unsettled))
            if oldest.deadline_s > now_s:
                break
            del self._unsettled[oldest]
            self._fail(oldest, self._too_late(oldest))
        if self._homeless and any(member.is_usable for member in self._in_turn):
            self.place_homeless()  # the one publish that was to try an nsqd was refused, which says nothing of it
        if self._unsettled or self.count:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._sweep_up)

    def _send_elsewhere(self, silent: Member) -> None:
        """Sends what this nsqd owes to another too, if there is one; whichever answers first counts."""
        for publish in list(self._unsettled):
            if silent in publish.given_to and not publish.future.done():
                other = self._best(publish.given_to)
                if other is None:
                    return
                self._give(publish, other)

    def _too_late(self, publish: Publish) -> NotConnected:
        if not publish.is_admitted:
            reason = "waited for room: too much is outstanding"
        elif publish.error is not None:
            reason = f"last error: {publish.error}"
        elif publish.in_air:
            reason = "no answer"
        else:
            reason = self.missing()
        taken = self._copies - publish.pending
        done = f"{taken} of {self._copies} copies" if self._copies > 1 else "the message"
        verb = "were taken" if self._copies > 1 else "was not taken"
        return NotConnected(f"{done} {verb} within {self._retry_s:g} s - {reason}")
