"""Uses gnsq, on gevent. It has plain handlers."""

from gevent import monkey

monkey.patch_all()

import time  # noqa: E402
from collections import deque  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import gnsq  # noqa: E402

from benchmarks.clients.arguments import (  # noqa: E402
    BATCH,
    BODY,
    MAX_IN_FLIGHT,
    Arguments,
    arguments,
    cannot,
    is_batch,
    outstanding_max,
    report,
)


def publish(args: Arguments) -> None:
    producer = gnsq.Producer([args.address])
    producer.start()
    producer.publish(args.topic, BODY)
    outstanding: deque[Any] = deque()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        if len(outstanding) >= outstanding_max(args.task):
            outstanding.popleft().get()
        if is_batch(args.task):
            outstanding.append(producer.multipublish(args.topic, BATCH, raise_error=False))
            count += len(BATCH)
        else:
            outstanding.append(producer.publish(args.topic, BODY, raise_error=False))
            count += 1
    for result in outstanding:
        result.get()
    report(count, time.perf_counter() - started)
    producer.close()
    producer.join()


def consume(args: Arguments) -> None:
    consumer = gnsq.Consumer(args.topic, args.channel, [args.address], max_in_flight=MAX_IN_FLIGHT)
    count, started, ended = 0, 0.0, gevent.event.Event()

    def handle(consumer: Any, message: Any) -> None:
        nonlocal count, started
        started = started or time.perf_counter()
        count += 1
        if count == args.wanted:
            ended.set()

    consumer.on_message.connect(handle)
    consumer.start(block=False)
    ended.wait(args.seconds)
    report(count, time.perf_counter() - started)
    consumer.close()
    consumer.join(timeout=5)


def main() -> None:
    args = arguments()
    if args.task in ("async", "iter"):
        cannot()
    elif args.task == "sync":
        consume(args)
    else:
        publish(args)


if __name__ == "__main__":
    main()
