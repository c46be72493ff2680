"""Judges what clients saw over several rounds: was anything lost, invented, out of order, repeated without a reason?"""

from collections import Counter
from dataclasses import dataclass, field

from faults.fates import Tally
from faults.load import UNSTEADY_MSG_TIMEOUT_MS, Answer, Consumer, Delivery, Round, Sent, sequence_of

CLOCK_SLACK_S = 0.003
"""The broker counts in whole milliseconds."""
TIMEOUT_SLACK_S = 0.05
"""A message has this long for the way to a consumer. What it was late itself is measured: see `judge_round`."""

REQUEUED = "requeued"
TIMED_OUT = "timed out"
IN_FLIGHT = "in flight"
FIN_ON_ITS_WAY = "FIN on its way"
ABOVE_FLOOR = "finished above the floor"
REASONS = (REQUEUED, TIMED_OUT, IN_FLIGHT, FIN_ON_ITS_WAY, ABOVE_FLOOR)
"""A message is delivered again for one of these reasons."""


@dataclass(slots=True)
class _Message:
    """Has what a channel's consumers know of one message."""

    seq: int
    last: Delivery
    last_round: int
    answer: Answer | None = None
    answer_round: int = 0
    requeued_attempts: int = 0
    """A later delivery must count more attempts than this: its REQ is known to have been carried out."""
    answered_by: str = ""
    has_fin_on_its_way: bool = False
    """It timed out and came again to the connection on which a FIN of the delivery before was on its way: nsqd, as NSQ,
    takes that for a FIN of this one, whatever the consumer says next."""

    def is_finished_in(self, number: int) -> bool:
        answer = self.answer
        if answer is None or answer.refused or answer.requeue_ms is not None:
            return False
        return answer.confirmed and self.answer_round == number

    @property
    def is_finished(self) -> bool:
        if self.answer is None or self.answer.refused:
            return self.has_fin_on_its_way
        return self.answer.requeue_ms is None

    @property
    def is_answered(self) -> bool:
        return self.answer is not None and not self.answer.refused


class ChannelJudge:
    """Follows one channel delivery by delivery.

    `floor_at_least[n]`: at the kill that ended round n every message below it was surely finished and noted.
    """

    def __init__(self, topic: str, channel: str) -> None:
        self.name = f"{topic}:{channel}"
        self.topic = topic
        self.channel = channel
        self.faults: list[str] = []
        self.invented = 0
        self._slack_s = TIMEOUT_SLACK_S
        self.clock_is_set = False
        """nsqd's clock is not ours: when something is due cannot be judged."""
        self.reasons: Counter[str] = Counter()
        self.received = 0
        self.bodies: set[bytes] = set()
        self.order_of_first: list[bytes] = []
        self._messages: dict[bytes, _Message] = {}
        self._unsettled: dict[bytes, _Message] = {}
        self._floor_at_least: dict[int, int] = {}

    def judge_round(self, number: int, consumers: list[Consumer], published: dict[bytes, Sent]) -> None:
        # The timeout counts from when nsqd sends; what comes just after a consumer looked is noted two looks later.
        self._slack_s = TIMEOUT_SLACK_S + 2 * max((consumer.lag_s for consumer in consumers), default=0.0)
        events = [(event, consumer.name) for consumer in consumers for event in consumer.events]
        for event, by in sorted(events, key=lambda each: each[0].time):
            if isinstance(event, Answer):
                self._answered(number, event, by)
            else:
                self._delivered(number, event, by, published)
        self._end_round(number)

    def _answered(self, number: int, answer: Answer, by: str) -> None:
        message = self._messages[answer.id]
        if answer.refused and message.is_answered:
            return  # one connection is told that another was faster
        message.answer, message.answer_round, message.answered_by = answer, number, by
        if answer.requeue_ms is not None and answer.confirmed and not answer.refused:
            message.requeued_attempts = message.last.attempts

    def _delivered(self, number: int, delivery: Delivery, by: str, published: dict[bytes, Sent]) -> None:
        self.received += 1
        sent = published.get(delivery.body)
        if sent is None or sent.topic != self.topic:
            self.invented += 1
            self.faults.append(f"{self.name}: received what was never published to it: {delivery.body[:60]!r}")
            return
        message = self._messages.get(delivery.id)
        if message is None:
            if delivery.time < sent.due - CLOCK_SLACK_S and not self.clock_is_set:
                early_ms = (sent.due - delivery.time) * 1000
                self.faults.append(f"{self.name}: {delivery.body[:40]!r} came {early_ms:.0f} ms before it was due")
            message = self._messages[delivery.id] = _Message(sequence_of(delivery.id), delivery, number)
            self.bodies.add(delivery.body)
            self.order_of_first.append(delivery.id)
        else:
            if message.last.body != delivery.body:
                self.faults.append(f"{self.name}: id {delivery.id.decode()} names two messages")
            self._repeated(number, message, delivery)
            answer = message.answer
            was_finished = answer is not None and answer.requeue_ms is None and not answer.refused
            message.has_fin_on_its_way = was_finished and message.answer_round == number and message.answered_by == by
            message.last, message.last_round, message.answer = delivery, number, None
        self._unsettled[delivery.id] = message

    def _repeated(self, number: int, message: _Message, delivery: Delivery) -> None:
        if message.last_round == number:
            reason = self._reason_within_round(message, delivery)
            if delivery.attempts != message.last.attempts + 1 and not self._may_be_read_in_any_order:
                self._complain(message, delivery, f"after attempt {message.last.attempts}")
        else:
            reason = self._reason_after_kill(message, delivery)
        if delivery.attempts <= message.requeued_attempts:
            self._complain(message, delivery, f"although attempt {message.requeued_attempts} was requeued")
        if reason is None:
            self._complain(message, delivery, f"without a reason, last answer {message.answer}")
        else:
            self.reasons[reason] += 1

    @property
    def _may_be_read_in_any_order(self) -> bool:
        """Tells whether some consumer looked so late that a delivery timed out unread: another consumer may have read
        the next attempt before.
        """
        return self.channel != "steady" and self._slack_s >= UNSTEADY_MSG_TIMEOUT_MS / 1000

    def _reason_within_round(self, message: _Message, delivery: Delivery) -> str | None:
        answer, since = message.answer, delivery.time - message.last.time
        if answer is not None and answer.requeue_ms is not None and not answer.refused:
            self._check_due(message, answer, answer.requeue_ms, delivery)
            return REQUEUED
        has_timed_out = since >= UNSTEADY_MSG_TIMEOUT_MS / 1000 - self._slack_s
        return TIMED_OUT if has_timed_out and self.channel != "steady" else None

    def _reason_after_kill(self, message: _Message, delivery: Delivery) -> str | None:
        answer = message.answer
        if answer is None or answer.refused:
            return IN_FLIGHT
        if answer.requeue_ms is not None:
            if answer.confirmed:
                self._check_due(message, answer, answer.requeue_ms, delivery)
            return REQUEUED
        if not answer.confirmed:
            return FIN_ON_ITS_WAY
        return ABOVE_FLOOR if message.seq >= self._floor_at_least[message.answer_round] else None

    def _check_due(self, message: _Message, answer: Answer, requeue_ms: int, delivery: Delivery) -> None:
        early_s = answer.time + requeue_ms / 1000 - delivery.time
        if early_s > CLOCK_SLACK_S and not self.clock_is_set:
            self._complain(message, delivery, f"{early_s * 1000:.0f} ms before the end of its REQ's delay")

    def _complain(self, message: _Message, delivery: Delivery, text: str) -> None:
        self.faults.append(
            f"{self.name}: {delivery.id.decode()} came again in attempt {delivery.attempts} {text}"
            f" (last delivered in round {message.last_round}, {delivery.time - message.last.time:.3f} s earlier)"
        )

    def _end_round(self, number: int) -> None:
        """Ends a round: what is finished and below everything unfinished must never come again."""
        unfinished = [one.seq for one in self._unsettled.values() if not one.is_finished_in(number)]
        floor = min(unfinished, default=1 << 62)
        self._floor_at_least[number] = floor
        self._unsettled = {key: one for key, one in self._unsettled.items() if one.seq >= floor}

    @property
    def unfinished(self) -> list[bytes]:
        """Returns what no FIN was sent for since it last came; after the last round there must be none."""
        return [one.last.body for one in self._messages.values() if not one.is_finished]


@dataclass
class Verdict:
    """Judges all channels and all publishers together."""

    channels: list[ChannelJudge]
    published: dict[bytes, Sent] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    lost: int = 0

    def set_clock_is_set(self, value: bool) -> None:
        for judge in self.channels:
            judge.clock_is_set = value

    def tally(self, rounds: int) -> Tally:
        return Tally(
            rounds=rounds,
            acknowledged=len(self.acknowledged),
            lost=self.lost,
            invented=sum(judge.invented for judge in self.channels),
            repeated=sum(self.reasons[reason] for reason in (IN_FLIGHT, FIN_ON_ITS_WAY, ABOVE_FLOOR)),
            faults=list(self.faults),
        )

    def add_round(self, one: Round) -> None:
        self.faults += one.faults
        for publisher in one.publishers:
            self.published.update((sent.body, sent) for sent in publisher.sent)
            self.acknowledged |= publisher.acknowledged
        for judge in self.channels:
            mine = [each for each in one.consumers if (each.topic, each.channel) == (judge.topic, judge.channel)]
            judge.judge_round(one.number, mine, self.published)
            for consumer in mine:
                self._check_order_of_run(judge, consumer)

    def _check_order_of_run(self, judge: ChannelJudge, consumer: Consumer) -> None:
        """Checks that first attempts reach one connection in the order of the log."""
        last = -1
        for event in consumer.events:
            if isinstance(event, Delivery) and event.attempts == 1:
                seq = sequence_of(event.id)
                if seq <= last:
                    self.faults.append(f"{judge.name}: {event.id.decode()} came to {consumer.name} out of order")
                last = seq

    def conclude(self) -> None:
        """Ends the judgement, once, after everything was drained."""
        ids: dict[bytes, bytes] = {}
        for judge in self.channels:
            self.faults += judge.faults
            wanted = {body for body in self.acknowledged if self.published[body].topic == judge.topic}
            lost = wanted - judge.bodies
            self.lost += len(lost)
            if lost:
                self.faults.append(f"{judge.name}: {len(lost)} acknowledged messages lost, e.g. {_some(lost)}")
            if judge.unfinished:
                self.faults.append(f"{judge.name}: {len(judge.unfinished)} never finished: {_some(judge.unfinished)}")
            if judge.channel == "steady" and judge.order_of_first != sorted(judge.order_of_first):
                self.faults.append(f"{judge.name}: first deliveries are not in the order of the log")
            self._check_ids(judge, ids)
        self._check_publishers_order({body: key for key, body in ids.items()})

    def _check_ids(self, judge: ChannelJudge, ids: dict[bytes, bytes]) -> None:
        bodies: dict[bytes, bytes] = {}
        for message_id, message in judge._messages.items():
            body = message.last.body
            if ids.setdefault(message_id, body) != body:
                self.faults.append(f"{judge.name}: id {message_id.decode()} names another message elsewhere")
            if bodies.setdefault(body, message_id) != message_id:
                judge.invented += 1
                self.faults.append(f"{judge.name}: {body[:40]!r} is in the log twice")

    def _check_publishers_order(self, id_of: dict[bytes, bytes]) -> None:
        last: dict[tuple[str, str], bytes] = {}
        for sent in sorted(self.published.values(), key=lambda sent: (sent.publisher, sent.number)):
            message_id = id_of.get(sent.body)
            if message_id is None or sent.is_deferred:
                continue
            key = (sent.publisher, sent.topic)
            if message_id <= last.get(key, b""):
                self.faults.append(f"{sent.topic}: {sent.body[:40]!r} is in the log before what was sent earlier")
            last[key] = message_id

    @property
    def reasons(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for judge in self.channels:
            total += judge.reasons
        return total


def _some(bodies: set[bytes] | list[bytes]) -> str:
    return ", ".join(body[:30].decode() for body in sorted(bodies)[:3])
