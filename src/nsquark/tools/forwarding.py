"""Is shared by nsq_to_http and nsq_to_nsq: it reports how long requests took, and answers messages that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nsquark.client.logs import shown_id
from nsquark.client.message import Message
from nsquark.tools.program import say
from nsquark.tools.sources import ConsumeOptions
from nsquark.tools.timings import Timings

REFUSALS_MAX: Final = 5
"""A message that was refused this often is given up; go-nsq's default for max_attempts is the same."""
KEEP_TRYING: Final = "0"
"""This is the default for max_attempts of a consumer whose failures `Failures` answers."""


class NotAccepted(Exception):
    """Says that a destination did not accept a message. `is_refused` says that it answered, and blamed the message."""

    def __init__(self, text: str, *, is_refused: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused


class Failures:
    """Requeues messages that were not accepted, and gives up those that are refused again and again.

    go-nsq gives up after five attempts whatever went wrong, so that an outage of the destination loses messages. Here
    only refused messages are given up, unless `--consumer-opt=max_attempts,N` asks for go-nsq's rule.
    """

    def __init__(self, options: ConsumeOptions) -> None:
        is_asked_for = any(name.replace("-", "_") == "max_attempts" for name, _ in options.consumer_opt)
        self._refusals_max = 0 if is_asked_for else REFUSALS_MAX

    def conclude(self, messages: Sequence[Message], error: NotAccepted) -> None:
        """Answers messages that failed together; for the consumer's backoff they are one failure."""
        first = messages[0]
        others = f" and {len(messages) - 1} others" if len(messages) > 1 else ""
        say(f"ERROR: message {shown_id(first.id)}{others} (attempt {first.attempts}) was not taken - {error}")
        for message in messages:
            if error.is_refused and 0 < self._refusals_max <= message.attempts:
                say(f"ERROR: message {shown_id(message.id)} was refused {message.attempts} times, giving up")
                message.finish()
            else:
                message.requeue()


class StatusLines:
    """Prints the status lines of all destinations together and, if there are several, of each."""

    def __init__(self, every: int, addresses: Sequence[str]) -> None:
        several = addresses if len(addresses) > 1 else ()
        self._each = {address: Timings(every, f"[{address}]:", say) for address in several}
        self._all = Timings(every, "[aggregate]:", say)

    def took(self, address: str, seconds: float, count: int = 1) -> None:
        """Records that `count` requests to this address took this long each."""
        if address in self._each:
            self._each[address].took(seconds, count)

    def took_in_all(self, seconds: float, count: int = 1) -> None:
        """Records that `count` messages took this long each."""
        self._all.took(seconds, count)
