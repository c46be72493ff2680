"""Checks traces from publish to handler and the usual metrics, as the SDK's exporters see them in memory."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from client.consumer_rig import consumer_of, handle_until
from client.pool_rig import address_of
from harness import Nsqd, until
from nsquark import Consumer, Message, Producer, ProducerPool, sync
from nsquark.contrib.opentelemetry import Telemetry
from nsquark.errors import Closed, ConfigError, WrongHandler


class Exported:
    """Collects the spans and metrics of a test."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.telemetry = Telemetry(self.tracers, MeterProvider([self._metrics]))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def points(self, name: str) -> list[tuple[dict[str, Any], NumberDataPoint | HistogramDataPoint]]:
        data = self._metrics.get_metrics_data()
        assert data is not None
        found = [
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return [(dict(point.attributes or {}), point) for metric in found for point in metric.data.data_points]


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.tracers.shutdown()


@pytest.mark.parametrize("threads", [0, 1], ids=["async", "threads"])
async def test_a_trace_from_publish_to_handler(nsqd: Nsqd, topic: str, exported: Exported, threads: int) -> None:
    inside: list[trace.SpanContext] = []

    def note(message: Message) -> None:
        assert message.body == b"hello" and message.headers["tenant"] == "acme"
        inside.append(trace.get_current_span().get_span_context())

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        note(message)

    telemetry = exported.telemetry
    async with Producer(address_of(nsqd), envelope=True) as plain:
        with exported.tracers.get_tracer("test").start_as_current_span("order"):
            await telemetry.producer(plain).publish(topic, b"hello", headers={"tenant": "acme"})
    async with consumer_of(nsqd, topic, envelope=True) as consumer:
        handler = telemetry.handler(consumer, note if threads else handle)
        await handle_until(consumer, handler, lambda: consumer.stats().finished, threads=threads)

    order, publish, process = (exported.span(name) for name in ("order", f"publish {topic}", f"process {topic}"))
    assert publish.parent == order.context and process.parent is not None and publish.context is not None
    assert process.parent.span_id == publish.context.span_id
    assert inside == [process.context]
    assert publish.kind is SpanKind.PRODUCER and process.kind is SpanKind.CONSUMER
    host, port = nsqd.tcp
    common = {"messaging.system": "nsq", "messaging.destination.name": topic, "server.address": host}
    sent = {"messaging.operation.name": "publish", "messaging.operation.type": "send", "server.port": port}
    assert dict(publish.attributes or {}) == common | sent
    handled = {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "ch",
        "messaging.message.body.size": 5,
        "server.port": port,
    }
    attributes = dict(process.attributes or {})
    assert len(str(attributes.pop("messaging.message.id"))) == 16
    assert attributes == common | handled
    for name, value in (("messaging.client.sent.messages", 1), ("messaging.client.consumed.messages", 1)):
        ((labels, point),) = exported.points(name)
        assert isinstance(point, NumberDataPoint) and point.value == value
        assert labels["messaging.destination.name"] == topic and "error.type" not in labels
    for name in ("messaging.client.operation.duration", "messaging.process.duration"):
        ((labels, point),) = exported.points(name)
        assert isinstance(point, HistogramDataPoint) and point.count == 1 and len(point.explicit_bounds) == 14


async def test_the_global_propagator_may_be_set_later(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    """Programs make their Telemetry at the top of a module, and set OpenTelemetry up when they start."""

    class Named(TraceContextTextMapPropagator):
        def inject(self, carrier: Any, *arguments: Any, **others: Any) -> None:
            super().inject(carrier, *arguments, **others)
            carrier["named"] = carrier.pop("traceparent")

        def extract(self, carrier: Any, *arguments: Any, **others: Any) -> context.Context:
            return super().extract({"traceparent": carrier["named"]}, *arguments, **others)

    before = propagate.get_global_textmap()
    propagate.set_global_textmap(Named())
    try:
        async with Producer(address_of(nsqd), envelope=True) as plain:
            await exported.telemetry.producer(plain).publish(topic, b"hello")
        async with consumer_of(nsqd, topic, envelope=True) as consumer, await anext(consumer) as message:
            assert set(message.headers) == {"named"}
            with exported.telemetry.process(consumer, message):
                pass
    finally:
        propagate.set_global_textmap(before)
    publish, process = exported.span(f"publish {topic}"), exported.span(f"process {topic}")
    assert process.parent is not None and publish.context is not None
    assert process.parent.span_id == publish.context.span_id


async def test_a_batch_links_to_each_publish(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    telemetry = exported.telemetry
    async with ProducerPool(address_of(nsqd), envelope=True) as pool, Producer(address_of(nsqd)) as plain:
        producer = telemetry.producer(pool)
        await producer.multi_publish(topic, [b"1", b"2"])
        await producer.publish_nowait(topic, b"3")
        await plain.publish(topic, b"4")
    async with consumer_of(nsqd, topic, envelope=True) as consumer:
        got = 0
        async for batch in consumer.batches(4, 1):
            async with batch:
                with telemetry.process(consumer, batch) as span:
                    span.set_attribute("own", got)
                got += len(batch)
            if got == 4:
                break
    publishes = exported.spans(f"publish {topic}")
    assert [dict(span.attributes or {}).get("messaging.batch.message_count") for span in publishes] == [2, None]
    links = [link.context.span_id for span in exported.spans(f"process {topic}") for link in span.links]
    many, one = (span.context.span_id for span in publishes if span.context is not None)
    assert sorted(links) == sorted([many, many, one])
    ((_, sent),) = exported.points("messaging.client.sent.messages")
    ((_, consumed),) = exported.points("messaging.client.consumed.messages")
    assert isinstance(sent, NumberDataPoint) and isinstance(consumed, NumberDataPoint)
    assert (sent.value, consumed.value) == (3, 4)


async def test_failures_are_told(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    telemetry = exported.telemetry
    async with Producer(address_of(nsqd)) as plain:
        producer = telemetry.producer(plain)
        await producer.publish(topic, b"hello")  # without an envelope, and so without a trace
    with pytest.raises(Closed):
        await producer.publish(topic, b"hello")
    with pytest.raises(Closed):
        producer.publish_nowait(topic, b"hello")

    def fail(_: Message) -> None:
        raise RuntimeError("the database is away")

    async with consumer_of(nsqd, topic) as consumer:
        handler = telemetry.handler(consumer, fail)
        await handle_until(consumer, handler, lambda: consumer.stats().requeued)
    good, *bad = exported.spans(f"publish {topic}")
    assert good.status.status_code is StatusCode.UNSET
    assert [(span.status.status_code, (span.attributes or {})["error.type"]) for span in bad] == [
        (StatusCode.ERROR, "Closed")
    ] * 2
    process = exported.spans(f"process {topic}")[0]
    assert process.parent is None and process.status.description == "the database is away"
    assert [event.name for event in process.events] == ["exception"]
    labels = [labels.get("error.type") for labels, _ in exported.points("messaging.process.duration")]
    assert labels == ["RuntimeError"]


async def test_a_publish_that_is_cancelled_is_told_as_a_failure(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    async with ProducerPool(address_of(nsqd)) as pool, Producer(address_of(nsqd)) as plain:
        for producer in (exported.telemetry.producer(plain), exported.telemetry.producer(pool)):
            task = asyncio.create_task(producer.publish(topic, b"hello"))
            await asyncio.sleep(0)  # so that it has begun
            answers = (
                task,
                producer.publish_nowait(topic, b"hello"),
                producer.multi_publish_nowait(topic, [b"hello", b"world"]),
            )
            assert all(answer.cancel() for answer in answers)
            for answer in answers:
                with pytest.raises(asyncio.CancelledError):
                    await answer
    spans = exported.spans(f"publish {topic}")
    assert [(span.status.status_code, (span.attributes or {}).get("error.type")) for span in spans] == [
        (StatusCode.ERROR, "CancelledError")
    ] * 6
    for name in ("messaging.client.sent.messages", "messaging.client.operation.duration"):
        assert {labels.get("error.type") for labels, _ in exported.points(name)} == {"CancelledError"}


def test_without_asyncio(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    telemetry = exported.telemetry
    with sync.Producer(address_of(nsqd), envelope=True) as producer, telemetry.publish(topic) as headers:
        producer.publish(topic, b"hello", headers=headers)
    with (
        sync.Consumer(topic, "ch", nsqd=address_of(nsqd), envelope=True) as consumer,
        next(consumer).or_raise() as message,
        telemetry.process(consumer, message),
    ):
        assert message.body == b"hello"
    publish, process = exported.span(f"publish {topic}"), exported.span(f"process {topic}")
    assert process.parent is not None and publish.context is not None
    assert process.parent.span_id == publish.context.span_id


@pytest.mark.parametrize("kind", ["lambda", "task"])
async def test_what_a_plain_handler_returns_is_awaited_in_its_span(
    nsqd: Nsqd, topic: str, exported: Exported, kind: str
) -> None:
    handled: list[trace.SpanContext] = []

    async def work(message: Message) -> None:
        await asyncio.sleep(0)
        assert trace.get_current_span().is_recording(), "the span lasts as long as the work"
        handled.append(trace.get_current_span().get_span_context())

    handlers: dict[str, Callable[[Message], Any]] = {
        "lambda": lambda message: work(message),
        "task": lambda message: asyncio.ensure_future(work(message)),
    }
    async with Producer(address_of(nsqd)) as producer:
        await producer.multi_publish(topic, [b"1", b"2"])
    async with consumer_of(nsqd, topic) as consumer:
        handler = exported.telemetry.handler(consumer, handlers[kind])
        await handle_until(consumer, handler, lambda: consumer.stats().finished == 2)
    assert handled == [span.context for span in exported.spans(f"process {topic}")] and len(handled) == 2
    assert not trace.get_current_span().is_recording()


async def test_a_wrapped_handler_is_refused_as_a_bare_one(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    async def work(_: Message) -> None: ...

    async def forgets_to_await(message: Message) -> object:
        return work(message)

    def generator(_: Message) -> Iterator[None]:
        yield

    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b"hello")
    async with consumer_of(nsqd, topic) as consumer:
        for wrong in (generator, None):
            with pytest.raises(WrongHandler):
                exported.telemetry.handler(consumer, wrong)  # type: ignore[arg-type]
        with pytest.raises(WrongHandler, match=r"yield|returned"):
            await consumer.run(exported.telemetry.handler(consumer, lambda message: generator(message)))
        with pytest.raises(WrongHandler, match="returned"):
            await consumer.run(exported.telemetry.handler(consumer, lambda message: work(message)), threads=1)
        for forgetting in (forgets_to_await, lambda message: forgets_to_await(message)):
            with pytest.raises(WrongHandler, match="returned"):
                await asyncio.wait_for(consumer.run(exported.telemetry.handler(consumer, forgetting)), 20)
    await until(lambda: nsqd.channel(topic)["depth"] == 1)
    assert len(exported.spans(f"process {topic}")) == 4, "every span has ended"


async def test_every_publish_of_a_producer_is_traced(nsqd: Nsqd, topic: str, exported: Exported) -> None:
    names = [name for name in dir(Producer) if "publish" in name and not name.startswith("_")]
    async with Producer(address_of(nsqd)) as plain:
        traced = exported.telemetry.producer(plain)
        for name in names:
            delay = [0] if name.startswith("deferred") else []
            await getattr(traced, name)(topic, *delay, [b"x"] if name.startswith("multi") else b"x")
    assert len(exported.spans(f"publish {topic}")) == len(names) == 6


@pytest.mark.parametrize("threads", [0, 1], ids=["async", "threads"])
async def test_baggage_reaches_the_handler_alone(nsqd: Nsqd, topic: str, exported: Exported, threads: int) -> None:
    got: list[object] = []

    def note(_: Message) -> None:
        got.append(baggage.get_baggage("tenant"))

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        note(message)

    async with Producer(address_of(nsqd), envelope=True) as plain:
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        try:
            await exported.telemetry.producer(plain).publish(topic, b"1")
        finally:
            context.detach(token)
        await plain.multi_publish(topic, [b"2", b"3"], headers={"traceparent": "malformed"})
    async with consumer_of(nsqd, topic, envelope=True) as consumer:
        handler = exported.telemetry.handler(consumer, note if threads else handle)
        await handle_until(consumer, handler, lambda: consumer.stats().finished == 3, threads=threads)
    assert sorted(map(str, got)) == ["None", "None", "acme"]
    assert [span.parent is None for span in exported.spans(f"process {topic}")].count(True) == 2


@pytest.mark.parametrize("given", [None, 5, Producer, sync.Producer("127.0.0.1:1")], ids=["None", "5", "class", "sync"])
def test_what_is_no_producer(exported: Exported, given: Any) -> None:
    with pytest.raises(ConfigError, match="takes a Producer or a ProducerPool, not"):
        exported.telemetry.producer(given)


def test_what_is_no_consumer_costs_no_message(exported: Exported) -> None:
    """A handler that was wrapped all the same would fail with each message, until all were given up."""
    consumer = Consumer("t", "c", nsqd="127.0.0.1:1")
    for given in (None, "t", Producer("127.0.0.1:1"), Consumer):
        with pytest.raises(ConfigError, match=r"telemetry.handler takes the consumer first, not"):
            exported.telemetry.handler(given, print)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"telemetry.process takes the consumer first, not"):
            exported.telemetry.process(given, consumer).__enter__()  # type: ignore[arg-type]
    wrong: tuple[Any, ...] = (None, [], consumer)
    for received in wrong:
        with pytest.raises(ConfigError, match=r"telemetry.process takes a consumer and its message or batch, not"):
            exported.telemetry.process(consumer, received).__enter__()


@pytest.mark.parametrize("given", [5, "x", TracerProvider, MeterProvider, TraceContextTextMapPropagator])
@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider", "propagator"])
def test_what_no_span_could_go_to(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is an object of OpenTelemetry"):
        Telemetry(**{name: given})


async def test_wrong_arguments_are_refused_as_without_telemetry(exported: Exported) -> None:
    async with Producer("127.0.0.1:1", envelope=True) as plain:
        for producer in (plain, exported.telemetry.producer(plain)):
            with pytest.raises(TypeError, match="headrs"):
                await producer.publish("t", b"x", headrs={"tenant": "acme"})  # type: ignore[call-arg]
            for headers in ([("tenant", "acme")], 5):
                with pytest.raises(TypeError, match="headers are texts by name"):
                    await producer.publish("t", b"x", headers=headers)  # type: ignore[arg-type]
