"""This is a message in the hands of a consumer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar, overload

from nsquark.client.checks import seconds_of
from nsquark.client.envelope import NO_HEADERS, Headers
from nsquark.client.errors import DecodeFailed
from nsquark.client.logs import shown_id
from nsquark.client.typed import Decode, decoded

if TYPE_CHECKING:
    from nsquark.client.subscription import Subscription

T = TypeVar("T")


class AnswerBlock(ABC):
    """Is answered by a block, for how that ends: `async with`, or `with` where nothing is awaited."""

    __slots__ = ()

    @abstractmethod
    def conclude(self, error: BaseException | None) -> bool:
        """Answers for how the block ended. Returns True if the error is dealt with."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.conclude(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.conclude(error)


class Message(AnswerBlock):
    """This is a message, which is answered once, by `finish` or `requeue`; what comes after that is ignored. Any thread
    may call its methods.

    `async with message:` finishes it when the block ends well. An exception is logged, and the message requeued with
    backoff; a cancellation requeues it at once, without backoff, and goes on. In `nsquark.sync` it is `with message:`.
    """

    __slots__ = (
        "_decode_error",
        "_subscription",
        "attempts",
        "auto_response",
        "body",
        "claim",
        "deadline_s",
        "give_up_reason",
        "headers",
        "id",
        "is_answered",
        "key",
        "last_deadline_s",
        "timestamp",
    )

    def __init__(
        self,
        subscription: Subscription,
        deadline_s: float,
        last_deadline_s: float,
        timestamp: int,
        attempts: int,
        message_id: bytes,
        body: bytes,
    ) -> None:
        self._subscription = subscription
        self.deadline_s = deadline_s
        """Is the time by the loop's clock after which nsqd gives the message to another."""
        self.last_deadline_s = last_deadline_s
        """Is the time beyond which no touch moves the deadline: nsqd's max-msg-timeout."""
        self.timestamp = timestamp
        """Is the time when it was published, in ns since 1970."""
        self.attempts = attempts
        """Counts the deliveries, this one included."""
        self.id = message_id
        """Is the id that nsqd gave it, 16 bytes."""
        self.body = body
        """Has the bytes that were published."""
        self.key: bytes | None = None
        """Is the key by which `dedupe` knows it: what its copies have in common, else its nsqd and id."""
        self.claim: bytes | None = None
        """Is the key that was claimed for it, until it is requeued."""
        self.headers: Headers = NO_HEADERS
        """Has the headers that its producer gave; a consumer with `envelope=True` reads them."""
        self.auto_response = True
        """Tells whether the end of its handler answers it."""
        self.is_answered = False
        """Tells whether it was finished or requeued."""
        self.give_up_reason = ""
        """Says why it is given up, for `on_give_up`."""

    @property
    def subscription(self) -> Subscription:
        return self._subscription

    @property
    def nsqd_address(self) -> str:
        """Tells from which nsqd it came."""
        return self._subscription.address

    def finish(self) -> None:
        """Tells nsqd that it is done with."""
        if not self.is_answered:
            self.is_answered = True
            self._subscription.finish(self)

    def requeue(self, delay: float | timedelta | None = None, *, backoff: bool = True) -> None:
        """Gives it back to nsqd, to come again later.

        delay: seconds until it comes; without it, default_requeue_delay times its attempts.
        backoff: whether the consumer slows down, as after a failed handler.
        """
        if not self.is_answered:
            seconds = None if delay is None else seconds_of("delay", delay)
            self.is_answered = True
            self._subscription.requeue(self, seconds, backoff)

    def give_back(self, delay_s: float | None = 0, *, backoff: bool = False) -> None:
        """Requeues it because it was not handled, or not to the end: this delivery does not count as an attempt, for
        nsqd where that knows how, and never for this consumer.
        """
        if not self.is_answered:
            self.is_answered = True
            self._subscription.requeue(self, delay_s, backoff, is_counted=False)

    def touch(self) -> None:
        """Starts its timeout again, for work that takes long."""
        if not self.is_answered:
            self._subscription.touch(self)

    def disable_auto_response(self) -> None:
        """Leaves it unanswered when its handler ends: someone else will answer it, later."""
        self.auto_response = False

    @overload
    def decode(self, kind: type[T], decode: Literal["json", "msgpack"] = "json") -> T: ...
    @overload
    def decode(self, kind: Any = Any, *, decode: Callable[[bytes], T]) -> T: ...
    @overload
    def decode(self, kind: Any = Any, decode: Decode = "json") -> Any: ...
    def decode(self, kind: Any = Any, decode: Decode = "json") -> Any:
        """Returns the value that the body holds, checked to be of this type; DecodeFailed if it is not.

        kind: any type that msgspec knows: a Struct, a dataclass, a TypedDict, `list[int]`.
        decode: `"json"`, `"msgpack"`, or a function that makes the value of the bytes and knows the type itself.
            Whatever it raises is a DecodeFailed: what may succeed another time, such as asking a server, is for the
            handler.
        """
        try:
            return decoded(self.body, kind, decode)
        except DecodeFailed as error:
            self._decode_error = error
            raise

    def or_raise(self) -> OrRaise[Self]:
        """Serves `async with message.or_raise():`, which answers as `async with message:` does and
        lets exceptions out.
        """
        return OrRaise(self)

    def conclude(self, error: BaseException | None) -> bool:
        """Answers the message for how its handler ended. Returns True if the error is dealt with."""
        if error is None:  # as is mostly so; a call to `answer_for` would be felt
            if self.auto_response:
                self.finish()
            return True
        if isinstance(error, Exception) and not self._is_hopeless(error):
            self.fail(error)
            return True
        return self.answer_for(error)

    def _is_hopeless(self, error: BaseException) -> bool:
        """Tells whether another attempt would fail in the same way: it was this message that could not be decoded."""
        return isinstance(error, DecodeFailed) and error is getattr(self, "_decode_error", None) and self.auto_response

    def fail(self, error: BaseException) -> None:
        """Logs why its handler failed, and requeues it with backoff."""
        self._subscription.log.error(
            "message %s of %s failed (attempt %d)",
            shown_id(self.id),
            self.nsqd_address,
            self.attempts,
            exc_info=error,
        )
        if self.auto_response:
            self.requeue()

    def answer_for(self, error: BaseException | None) -> bool:
        """Answers as `conclude` does, without a line in the log."""
        if error is None:
            if self.auto_response:
                self.finish()
            return True
        if not isinstance(error, Exception):
            self.give_back()
            return False
        if self._is_hopeless(error):
            self._subscription.give_up(self, f"cannot be decoded ({error})")
        elif self.auto_response:
            self.requeue()
        return True

    def __repr__(self) -> str:
        name = shown_id(self.id)
        return f"<Message {name} from {self.nsqd_address}, attempt {self.attempts}, {len(self.body)} bytes>"


class _Answerable(Protocol):
    def answer_for(self, error: BaseException | None) -> bool: ...


A = TypeVar("A", bound=_Answerable)


class OrRaise(Generic[A]):
    """Answers its message or batch for how a block ends, and lets every exception out.

    For tests, and for programs that end with the first failure.
    """

    def __init__(self, answered: A) -> None:
        self._answered = answered

    async def __aenter__(self) -> A:
        return self._answered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answered.answer_for(error)

    def __enter__(self) -> A:
        return self._answered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answered.answer_for(error)
