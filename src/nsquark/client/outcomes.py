"""Passes on what becomes of a consumer's messages, to RDY, backoff, the store of keys and the giving up."""

from __future__ import annotations

from nsquark.client.copies import Copies
from nsquark.client.giving_up import GivingUp
from nsquark.client.inbox import Inbox
from nsquark.client.message import Message
from nsquark.client.rdy import Flow
from nsquark.client.taking import Taking


class Outcomes:
    """Is told by subscriptions what becomes of messages, counts it, and tells those whom it concerns."""

    def __init__(self, taking: Taking, inbox: Inbox, copies: Copies | None, giving_up: GivingUp) -> None:
        self._taking = taking
        self._inbox = inbox
        self._copies = copies
        self._giving_up = giving_up
        self._flow: Flow
        self.received = self.finished = self.requeued = 0

    def begin(self, flow: Flow) -> None:
        """Is called before the first message can come."""
        self._flow = flow

    def messages_received(self, messages: list[Message]) -> None:
        """Is told of messages of one subscription. Nobody takes them any more if it is leaving, or all is stopped."""
        self.received += len(messages)
        if self._taking.is_stopped or messages[0].subscription.is_leaving:
            for message in messages:
                message.give_back()
        else:
            self._inbox.put(messages)

    def message_finished(self, message: Message, is_sent: bool) -> None:
        """Is told of a FIN. If it was not sent, the connection was lost: nsqd will deliver the message again."""
        if self._copies is not None:
            self._copies.finished(message)
        if is_sent:
            self.finished += 1
        else:
            self._giving_up.did_not_fail(message, is_counted=True)
        flow = self._flow
        if flow.is_owing:
            flow.answered()
        if flow.level:
            flow.succeeded()

    def finish_refused(self, nsqd_address: str, message_id: bytes) -> None:
        """Is told of a FIN that came too late: nsqd will deliver the message again."""
        self._giving_up.ended_well(nsqd_address, message_id)

    def message_requeued(self, message: Message, is_sent: bool, backoff: bool) -> None:
        """Is told of a REQ, or that nsqd took a message back. It was not sent if nobody is there to be told."""
        if self._copies is not None:
            self._copies.requeued(message)
        if is_sent:
            self.requeued += 1
        self._flow.answered()
        if backoff:
            self._flow.failed()
        elif self._flow.level:
            self._flow.went_on()

    def message_failed(self, message: Message) -> None:
        """Is told that a message goes back which was handled in vain, or which its hook wants to see again."""
        message.give_up_reason = ""
        self._giving_up.failed(message)

    def message_forgotten(self, message: Message) -> None:
        """Is told that nobody answered a message in time."""
        self._giving_up.failed(message)
        self._flow.answered()

    def message_hopeless(self, message: Message, reason: str) -> None:
        """Is told of a message that another attempt would not help."""
        if not message.is_answered:
            self._giving_up.begin(message, reason)

    def message_not_handled(self, message: Message, is_counted: bool) -> None:
        """Is told that a message goes back, or was taken back, without having been handled."""
        self._giving_up.did_not_fail(message, is_counted)
