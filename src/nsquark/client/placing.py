"""Places each publish of a pool: on the best nsqd, on another when that fails, until its deadline."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from nsquark.client.breaker import LATENCY_STALE_S, Member, State, may_go_elsewhere
from nsquark.client.errors import Closed, NotConnected, TooMuchOutstanding
from nsquark.client.producer import Producer

SLOW_TIMES: Final = 2
SLOW_S_MIN: Final = 0.01
"""An nsqd is slow if it takes so many times as long as the fastest, and so much longer."""
SLOW_BYTES: Final = 1
"""Is the handicap of a slow nsqd: it is chosen only where all others have publishes to answer."""
LOOK_INTERVAL_S: Final = 0.1
"""Is the time between two looks at the deadlines, and at nsqds that owe answers."""

Send = Callable[[Producer], "asyncio.Future[None]"]


class Publish:
    """This is one call of a publish method, until every copy of it is taken or one cannot be."""

    __slots__ = ("deadline_s", "error", "future", "holders", "is_admitted", "owing", "pending", "send", "size")

    def __init__(self, send: Send, size: int, copies: int, deadline_s: float, future: asyncio.Future[None]) -> None:
        self.send = send
        self.size = size
        self.deadline_s = deadline_s
        self.future = future
        self.pending = copies
        """Counts the copies that no nsqd has said OK to."""
        self.owing: list[Member] = []
        """Has the nsqds that were sent a copy and have not answered."""
        self.holders: tuple[Member, ...] = ()
        """Has the nsqds that have a copy while others are pending."""
        self.error: BaseException | None = None
        self.is_admitted = False

    @property
    def lacking(self) -> int:
        """Counts the pending copies that no nsqd is about to take: one that is silent may never answer."""
        return self.pending - sum(member.state is not State.SILENT for member in self.owing)


class Placing:
    """Finds an nsqd for every copy of every publish. `refusal` says why none will ever take one, or None;
    `lookup_problem` says why none may be known, or None.

    Invariants: every publish in `_undecided` is either in `_waiting`, or admitted and, if it lacks copies, in
    `_homeless`; outstanding are the admitted ones that are undecided or have an nsqd that owes an answer.
    """

    def __init__(
        self,
        copies: int,
        retry_s: float,
        bytes_max: int,
        count_max: int,
        refusal: Callable[[], BaseException | None],
        lookup_problem: Callable[[], BaseException | None],
    ) -> None:
        self._copies = copies
        self._retry_s = retry_s
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._refusal = refusal
        self._lookup_problem = lookup_problem
        self._rotation: deque[Member] = deque()
        self._fastest_s = 0.0
        self._waiting: OrderedDict[Publish, None] = OrderedDict()
        self._homeless: dict[Publish, None] = {}
        """Has the publishes that lack copies for which there was no nsqd."""
        self._undecided: OrderedDict[Publish, None] = OrderedDict()
        self._look_timer: asyncio.TimerHandle | None = None
        self._look_due_s = 0.0
        self._is_letting_in = False
        self.count = self.bytes = 0
        """These are the number and the size of what is outstanding."""

    def use(self, members: Iterable[Member]) -> None:
        """Uses these nsqds from now on; what others still owe is theirs to answer."""
        self._rotation = deque(members)

    def check_room(self, size: int, count: int) -> None:
        """Raises TooMuchOutstanding if so many publishes of this size together would be too much."""
        if self._waiting or not self._has_room(size, count):
            raise TooMuchOutstanding(f"{self.count} publishes ({self.bytes} bytes) wait for their answer")

    def submit(self, send: Send, size: int, loop: asyncio.AbstractEventLoop) -> Publish:
        """Sends it on its way, or lets it wait while too much is outstanding."""
        has_room = not self._waiting and self._has_room(size)
        publish = Publish(send, size, self._copies, time.monotonic() + self._retry_s, loop.create_future())
        self._undecided[publish] = None
        if self._look_timer is None:
            self._look_later(loop)
        if has_room:
            self._admit(publish)
        else:
            self._waiting[publish] = None
        return publish

    async def outcome(self, publish: Publish) -> None:
        try:
            await publish.future
        except asyncio.CancelledError:
            self._decided(publish)
            raise

    def place_homeless(self) -> None:
        """Tries again what found no nsqd: to be called when one can be used again, or none ever."""
        homeless, self._homeless = self._homeless, {}
        for publish in homeless:
            self._place_lacking(publish)

    def missing(self) -> str:
        """Tells how many nsqds there should be, and are."""
        usable = sum(member.is_usable for member in self._rotation)
        problem = self._lookup_problem()
        reason = f" - {problem}" if problem is not None else ""
        return f"{self._copies} nsqds needed, {len(self._rotation)} known, {usable} of them usable{reason}"

    async def close(self, timeout_s: float) -> None:
        """Waits for what is on its way, retries included; then every publish has its outcome."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for publish in waiting:
            self._fail(publish, Closed("stopped before the message was sent"))
        undecided = [publish for publish in self._undecided if not publish.future.done()]
        try:
            if undecided:
                await asyncio.wait([publish.future for publish in undecided], timeout=timeout_s)
        finally:  # also when cancelled
            for publish in undecided:
                self._fail(publish, Closed("closed before nsqd answered; it may or may not have the message"))

    def end(self) -> None:
        """Ends when nothing can be answered any more."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

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

    def _place_lacking(self, publish: Publish) -> None:
        for _ in range(publish.lacking):
            self._place(publish)

    def _place(self, publish: Publish) -> None:
        """Gives one copy to the best nsqd; it waits if none can be used now."""
        if publish.future.done():  # its caller may have cancelled it while there was no nsqd
            self._decided(publish)
            return
        member = self._best(publish)
        if member is None:
            refusal = self._refusal()
            if refusal is None:
                self._homeless[publish] = None
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
        publish.owing.append(member)
        member.sent()
        answer.add_done_callback(lambda answer: self._answered(publish, member, sent_s, answer.exception()))

    def _best(self, publish: Publish) -> Member | None:
        """Finds who has the fewest unanswered bytes, and no copy of this publish at its address: an nsqd that left and
        came back is another member. Equals take turns, or those who await each publish would use one nsqd only. One
        that is much slower than others has no turn, but for a publish now and then to measure it anew.
        """
        best: Member | None = None
        best_bytes = 0
        others = (*publish.owing, *publish.holders)
        slow_s = SLOW_S_MIN + SLOW_TIMES * self._fastest_s if self._fastest_s else 0.0
        for member in self._rotation:
            if not member.is_usable or (others and any(member.address == other.address for other in others)):
                continue
            waiting_bytes = member.producer.outstanding_bytes
            if 0 < slow_s < member.latency_s and time.monotonic() - member.measured_at_s < LATENCY_STALE_S:
                waiting_bytes += SLOW_BYTES
            if best is None or waiting_bytes < best_bytes:
                best, best_bytes = member, waiting_bytes
        if best is not None:
            self._rotation.remove(best)
            self._rotation.append(best)
        return best

    def _answered(self, publish: Publish, member: Member, sent_s: float | None, error: BaseException | None) -> None:
        publish.owing.remove(member)
        if error is None:
            publish.pending = max(0, publish.pending - 1)
            if publish.pending:
                publish.holders += (member,)
            elif not publish.future.done():
                publish.future.set_result(None)
            member.succeeded(sent_s)
        else:
            publish.error = error
            if not may_go_elsewhere(error):
                self._fail(publish, error)  # before the nsqd is usable again, which places what has no outcome
            member.failed(error)
            self._place_lacking(publish)
        if publish.future.done():
            self._decided(publish)

    def _fail(self, publish: Publish, error: BaseException) -> None:
        """Gives it an error as its outcome, unless its future was cancelled."""
        if not publish.future.done():
            publish.future.set_exception(error)
        self._decided(publish)

    def _decided(self, publish: Publish) -> None:
        """Makes room for others. What an nsqd owes takes up room even if nobody waits for it."""
        self._undecided.pop(publish, None)
        self._homeless.pop(publish, None)
        if publish.is_admitted and not publish.owing:
            publish.is_admitted = False
            self.count -= 1
            self.bytes -= publish.size
        if self._waiting:
            self._waiting.pop(publish, None)
            if not self._is_letting_in:
                self._let_in()

    def _let_in(self) -> None:
        """Admits those that wait longest, as far as there is room. One that fails at once makes room for the next: in
        this loop, since thousands that call each other would be too deep.
        """
        self._is_letting_in = True
        while self._waiting and self._has_room(next(iter(self._waiting)).size):
            publish, _ = self._waiting.popitem(last=False)
            if not publish.future.done():
                self._admit(publish)
        self._is_letting_in = False

    # -- deadlines ---------------------------------------------------------------------------------------

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look_due_s = time.monotonic() + LOOK_INTERVAL_S
        self._look_timer = loop.call_later(LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._look_timer = None
        now_s = time.monotonic()
        blocked_s = max(0.0, now_s - self._look_due_s)
        silent = [member for member in self._rotation if member.falls_silent(now_s, blocked_s)]
        if silent:
            self._send_elsewhere(silent)
        measured = [member.latency_s for member in self._rotation if member.is_usable and member.latency_s]
        self._fastest_s = min(measured, default=0.0)
        while self._undecided:
            oldest = next(iter(self._undecided))
            if oldest.deadline_s > now_s:
                break
            del self._undecided[oldest]
            self._fail(oldest, self._too_late(oldest))
        if self._homeless and any(member.is_usable for member in self._rotation):
            self.place_homeless()  # the one publish that was to try an nsqd was refused, which says nothing of it
        if self._undecided or self.count:
            self._look_later(asyncio.get_running_loop())

    def _send_elsewhere(self, silent: list[Member]) -> None:
        """Sends what these nsqds owe to another too, as soon as there is one; whichever answers first counts."""
        for publish in list(self._undecided):
            if any(member in publish.owing for member in silent):
                self._place_lacking(publish)

    def _too_late(self, publish: Publish) -> NotConnected:
        if not publish.is_admitted:
            reason = "waited for room: too much is outstanding"
        elif publish.error is not None:
            reason = f"last error: {publish.error}"
        elif publish.owing:
            reason = "no answer"
        else:
            reason = self.missing()
        taken = self._copies - publish.pending
        done = f"{taken} of {self._copies} copies" if self._copies > 1 else "the message"
        verb = "were taken" if self._copies > 1 else "was not taken"
        return NotConnected(f"{done} {verb} within {self._retry_s:g} s - {reason}")
