"""Gives messages by the hundred to those who write them to a database or a file in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Self, overload

from nsquark.client.checks import check_count, seconds_of
from nsquark.client.message import AnswerBlock, Message, OrRaise
from nsquark.client.taking import Taking


class Batch(AnswerBlock, Sequence[Message]):
    """Holds some messages of a consumer, which are answered together or one by one.

    `async with batch:` finishes, when the block ends well, those that were not answered in it. After an exception,
    which is logged, it requeues them with backoff; after a cancellation at once and without. In `nsquark.sync` it is
    `with batch:`.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        """Is called by `Consumer.batches`.

        messages: what came, in this order.
        """
        self._messages = messages

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @property
    def bodies(self) -> list[bytes]:
        """Returns the body of each message."""
        return [message.body for message in self._messages]

    @property
    def unanswered(self) -> list[Message]:
        """Returns the messages that were neither finished nor requeued."""
        return [message for message in self._messages if not message.is_answered]

    def finish(self) -> None:
        """Finishes all that were not answered."""
        for message in self._messages:
            message.finish()

    def requeue(self, delay: float | timedelta | None = None, *, backoff: bool = True) -> None:
        """Requeues all that were not answered; for the consumer's backoff they are one failure.

        delay: seconds until they come again; without it default_requeue_delay times the attempts of each.
        backoff: whether the consumer slows down, as after a failed handler.
        """
        for message in self._messages:
            message.requeue(delay, backoff=backoff)

    def touch(self) -> None:
        """Starts the timeout of each unanswered message again."""
        for message in self._messages:
            message.touch()

    def or_raise(self) -> OrRaise[Self]:
        """Serves `async with batch.or_raise():`, which answers as `async with batch:` does and lets exceptions out."""
        return OrRaise(self)

    def conclude(self, error: BaseException | None) -> bool:
        """Answers what is unanswered for how its handling ended. Returns True if the error is dealt with."""
        if isinstance(error, Exception):
            self._messages[0].subscription.log.error("a batch of %d messages failed", len(self), exc_info=error)
        return self.answer_for(error)

    def answer_for(self, error: BaseException | None) -> bool:
        """Answers as `conclude` does, without a line in the log."""
        for message in self.unanswered:
            message.answer_for(error)
        return error is None or isinstance(error, Exception)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages, {len(self.unanswered)} unanswered>"


class Batches:
    """Makes batches of what a consumer has, for `async for`.

    A batch is handed out when it is full, `max_wait` after its first message, and as soon as no more can come before
    some of it is answered: with fewer than `max_messages` in flight, or in backoff, waiting would be in vain.
    """

    def __init__(self, taking: Taking, max_messages: int, max_wait: float | timedelta) -> None:
        check_count("max_messages", max_messages, 1)
        self._taking = taking
        self._gathered = taking.gathered
        self._messages_max = max_messages
        self._wait_s = seconds_of("max_wait", max_wait)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        while (first := await self._taking.next_by(None)) is not None:
            messages = await self._gather(first)
            if there := [message for message in messages if not message.is_answered and self._taking.refresh(message)]:
                return Batch(there)
        raise StopAsyncIteration

    async def _gather(self, first: Message) -> list[Message]:
        """Waits for others. All are kept alive meanwhile; those that nsqd takes back all the same count as answered."""
        messages = [first]
        self._gathered.add(first)
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        try:
            while len(messages) < self._messages_max and not self._taking.has_all():
                message = await self._taking.next_by(deadline_s)
                if message is None:
                    break
                messages.append(message)
                self._gathered.add(message)
        except BaseException:
            for message in messages:
                message.give_back()
            raise
        finally:
            self._gathered.difference_update(messages)
        return messages
