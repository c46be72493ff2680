"""Makes traces and metrics with OpenTelemetry: `pip install nsquark[otel]`.

Names are those of its semantic conventions for messaging. The context travels in a message's headers, so producers and
consumers need `envelope=True`; without it there are spans and metrics, but no trace leads from one to the other.

* The spans are `publish <topic>` of kind PRODUCER, and `process <topic>` of kind CONSUMER, which is its child; the span
  of a batch has a link to each message's publish instead.
* The metrics are `messaging.client.operation.duration`, `messaging.client.sent.messages`,
  `messaging.client.consumed.messages` and `messaging.process.duration`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from asyncio import CancelledError, Future
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, Unpack

from nsquark.base.addresses import split_address
from nsquark.base.extras import needs
from nsquark.base.version import __version__
from nsquark.client.batches import Batch
from nsquark.client.checks import checked_bodies, is_async
from nsquark.client.documented import documented_like
from nsquark.client.envelope import Headers
from nsquark.client.errors import ConfigError
from nsquark.client.handlers import Handler, check_handler
from nsquark.client.message import Message
from nsquark.client.packing import Packing
from nsquark.client.pool import ProducerPool
from nsquark.client.producer import Producer

with needs("otel"):
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

SCOPE: Final = "nsquark"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The conventions ask for these bounds in the histograms of durations."""

Attributes = dict[str, str | int]


class Subscribed(Protocol):
    """Describes a consumer of the asyncio or of the blocking client."""

    @property
    def topic(self) -> str: ...
    @property
    def channel(self) -> str: ...


class Telemetry:
    """Says where spans and metrics go.

    tracer_provider: makes the tracer; it is the global one unless given.
    meter_provider: makes the metrics; it is the global one unless given.
    propagator: writes a context into headers; it is the global one unless given, by default W3C's `traceparent`.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
    ) -> None:
        _check_has("tracer_provider", tracer_provider, "get_tracer")
        _check_has("meter_provider", meter_provider, "get_meter")
        _check_has("propagator", propagator, "inject")
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider, SCHEMA_URL)
        self._given_propagator = propagator
        meter = metrics.get_meter(SCOPE, __version__, meter_provider, SCHEMA_URL)
        self._sent = meter.create_counter("messaging.client.sent.messages", unit="{message}")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", unit="{message}")
        self._publish_s = meter.create_histogram(
            "messaging.client.operation.duration", "s", "", explicit_bucket_boundaries_advisory=BUCKETS_S
        )
        self._process_s = meter.create_histogram(
            "messaging.process.duration", "s", "", explicit_bucket_boundaries_advisory=BUCKETS_S
        )

    @property
    def _propagator(self) -> TextMapPropagator:
        """Is looked up at each use: a program may set the global one, as the providers, after this was made."""
        return self._given_propagator or propagate.get_global_textmap()

    def producer(self, producer: Producer | ProducerPool) -> TracedProducer:
        """Returns an object with the producer's publish methods, each of which makes a span.

        producer: the producer, with `envelope=True` if traces are to go on in consumers.
        """
        if not isinstance(producer, Producer | ProducerPool):
            raise ConfigError(
                f"telemetry.producer takes a Producer or a ProducerPool, not {producer!r:.80};"
                " in nsquark.sync use `with telemetry.publish(topic) as headers:`"
            )
        return TracedProducer(self, producer)

    def handler(self, consumer: Subscribed, handler: Handler) -> Handler:
        """Wraps a handler in `process`, for `consumer.run`.

        consumer: the consumer whose messages the handler gets.
        handler: an async function, or a plain one, which may run in threads.
        """
        check_handler(handler, 1, 0)
        _check_consumer("handler", consumer)

        @functools.wraps(handler)
        async def handle(message: Message) -> Any:
            with self.process(consumer, message):
                return await handler(message)

        @functools.wraps(handler)
        def handle_plainly(message: Message) -> Any:
            with contextlib.ExitStack() as processing:
                processing.enter_context(self.process(consumer, message))
                outcome = handler(message)
                if inspect.isawaitable(outcome) and _is_in_event_loop():  # a thread cannot await: `run` refuses it
                    return _awaited(outcome, processing.pop_all())
                return outcome

        return handle if is_async(handler) else handle_plainly

    @contextlib.contextmanager
    def publish(self, topic: str, count: int = 1, address: str = "") -> Iterator[dict[str, str]]:
        """Surrounds a block that publishes, and gives it the headers that carry its context.

        topic: the topic to publish to.
        count: the number of messages.
        address: the address of the nsqd, if it is known.
        """
        sending = self.begin_publish(topic, count, address)
        with trace.use_span(sending.span):
            try:
                yield sending.headers
            except BaseException as error:
                sending.end(error)
                raise
        sending.end(None)

    def begin_publish(self, topic: str, count: int, address: str) -> Sending:
        """Begins a publish that the caller ends with `Sending.end`, for instance in a callback."""
        attributes = _attributes("publish", "send", topic) | _server(address)
        return Sending(self._tracer, self._propagator, self._sent, self._publish_s, attributes, count)

    @contextlib.contextmanager
    def process(self, consumer: Subscribed, received: Message | Batch) -> Iterator[Span]:
        """Surrounds a block that handles a message or a batch, and gives it the span, for attributes of your own.

        It belongs inside of `async with message:`, which keeps exceptions, so that the span has them.

        consumer: the consumer that brought the message or batch.
        received: the message or batch.
        """
        _check_consumer("process", consumer)
        if not isinstance(received, Message | Batch):
            raise ConfigError(f"telemetry.process takes a consumer and its message or batch, not {received!r:.80}")
        attributes = _attributes("process", "process", consumer.topic)
        attributes["messaging.consumer.group.name"] = consumer.channel
        messages: Sequence[Message] = received if isinstance(received, Batch) else [received]
        self._consumed.add(len(messages), attributes)
        started_s = time.perf_counter()
        with self._process_span(received, attributes) as span:
            try:
                yield span
            except BaseException as error:
                _fail(span, error)
                attributes["error.type"] = type(error).__qualname__
                raise
            finally:
                self._process_s.record(time.perf_counter() - started_s, attributes)

    @contextlib.contextmanager
    def _process_span(self, received: Message | Batch, attributes: Attributes) -> Iterator[Span]:
        start = functools.partial(
            self._tracer.start_as_current_span,
            _name(attributes),
            kind=SpanKind.CONSUMER,
            record_exception=False,
            set_status_on_exception=False,
        )
        if isinstance(received, Batch):
            publishes = (self._span_context(message) for message in received)
            links = [Link(publish) for publish in publishes if publish.is_valid]
            with start(attributes={**attributes, "messaging.batch.message_count": len(received)}, links=links) as span:
                yield span
            return
        own: Attributes = {
            "messaging.message.id": received.id.decode("ascii", "replace"),
            "messaging.message.body.size": len(received.body),
        }
        # Attached as a whole: what else came with the trace, such as baggage, is for the handler and what it publishes.
        token = context.attach(self._carried(received) if received.headers else context.get_current())
        try:
            with start(attributes={**attributes, **own, **_server(received.nsqd_address)}) as span:
                yield span
        finally:
            context.detach(token)

    def _span_context(self, message: Message) -> trace.SpanContext:
        return trace.get_current_span(self._carried(message)).get_span_context()

    def _carried(self, message: Message) -> context.Context:
        """Reads the context from the headers; without one there, no span is in it."""
        return self._propagator.extract(message.headers, trace.set_span_in_context(trace.INVALID_SPAN))


class Sending:
    """Measures a publish from its beginning to `end`, and has its span and headers."""

    def __init__(
        self,
        tracer: trace.Tracer,
        propagator: TextMapPropagator,
        sent: metrics.Counter,
        duration_s: metrics.Histogram,
        attributes: Attributes,
        count: int,
    ) -> None:
        self._sent = sent
        self._duration_s = duration_s
        self._attributes = attributes
        self._count = count
        self._started_s = time.perf_counter()
        batch = {"messaging.batch.message_count": count} if count != 1 else {}
        self.span = tracer.start_span(_name(attributes), kind=SpanKind.PRODUCER, attributes={**attributes, **batch})
        self.headers: dict[str, str] = {}
        propagator.inject(self.headers, trace.set_span_in_context(self.span))

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            _fail(self.span, error)
            self._attributes["error.type"] = type(error).__qualname__
        self.span.end()
        self._sent.add(self._count, self._attributes)
        self._duration_s.record(time.perf_counter() - self._started_s, self._attributes)


@documented_like(Producer)
class TracedProducer:
    """Wraps a `Producer` or `ProducerPool` so that publishes make spans; `Telemetry.producer` returns it.

    `multi_publish` makes one span for all its messages; the span of a `publish_nowait` ends with the answer.
    """

    def __init__(self, telemetry: Telemetry, producer: Producer | ProducerPool) -> None:
        self._telemetry = telemetry
        self.producer = producer
        self._address = producer.address if isinstance(producer, Producer) else ""

    async def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None:
        with self._publish(topic, 1, packing) as packed:
            await self.producer.publish(topic, body, **packed)

    async def multi_publish(self, topic: str, bodies: Iterable[Any], **packing: Unpack[Packing]) -> None:
        listed = checked_bodies(bodies)
        with self._publish(topic, len(listed), packing) as packed:
            await self.producer.multi_publish(topic, listed, **packed)

    async def deferred_publish(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> None:
        with self._publish(topic, 1, packing) as packed:
            await self.producer.deferred_publish(topic, delay, body, **packed)

    def publish_nowait(self, topic: str, body: Any, **packing: Unpack[Packing]) -> Future[None]:
        return self._publish_nowait(
            topic, 1, packing, lambda packed: self.producer.publish_nowait(topic, body, **packed)
        )

    def deferred_publish_nowait(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> Future[None]:
        return self._publish_nowait(
            topic, 1, packing, lambda packed: self.producer.deferred_publish_nowait(topic, delay, body, **packed)
        )

    def multi_publish_nowait(self, topic: str, bodies: Iterable[Any], **packing: Unpack[Packing]) -> Future[None]:
        listed = checked_bodies(bodies)
        return self._publish_nowait(
            topic, len(listed), packing, lambda packed: self.producer.multi_publish_nowait(topic, listed, **packed)
        )

    @contextlib.contextmanager
    def _publish(self, topic: str, count: int, packing: Packing) -> Iterator[Packing]:
        with self._telemetry.publish(topic, count, self._address) as carrying:
            yield self._with_context(packing, carrying)

    def _publish_nowait(
        self, topic: str, count: int, packing: Packing, publish: Callable[[Packing], Future[None]]
    ) -> Future[None]:
        sending = self._telemetry.begin_publish(topic, count, self._address)
        try:
            answer = publish(self._with_context(packing, sending.headers))
        except BaseException as error:
            sending.end(error)
            raise
        answer.add_done_callback(lambda answer: sending.end(_error_of(answer)))
        return answer

    def _with_context(self, packing: Packing, carrying: Headers) -> Packing:
        """Adds the context to the headers; a producer without envelopes cannot carry it."""
        if not self.producer.envelope:
            return packing
        given = packing.get("headers") or {}
        if not isinstance(given, Mapping):
            return packing  # the producer refuses it, with a sentence
        traced = packing.copy()
        traced["headers"] = {**given, **carrying}
        return traced


def _check_has(name: str, given: object, method: str) -> None:
    if given is not None and (isinstance(given, type) or not callable(getattr(given, method, None))):
        raise ConfigError(f"{name} is an object of OpenTelemetry with {method}, not {given!r:.80}")


def _check_consumer(method: str, given: object) -> None:
    if not isinstance(getattr(given, "topic", None), str) or not isinstance(getattr(given, "channel", None), str):
        raise ConfigError(f"telemetry.{method} takes the consumer first, not {given!r:.80}")


async def _awaited(outcome: Awaitable[Any], processing: contextlib.ExitStack) -> Any:
    """Awaits what a handler returned, inside of its span."""
    with processing:
        return await outcome


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _error_of(answer: Future[None]) -> BaseException | None:
    return CancelledError() if answer.cancelled() else answer.exception()


def _attributes(name: str, kind: str, topic: str) -> Attributes:
    return {
        "messaging.system": "nsq",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _name(attributes: Attributes) -> str:
    return f"{attributes['messaging.operation.name']} {attributes['messaging.destination.name']}"


def _server(address: str) -> Attributes:
    if not address:
        return {}
    if address.startswith("/"):
        return {"server.address": address}
    host, port = split_address(address)
    return {"server.address": host, "server.port": port}


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, str(error)))
