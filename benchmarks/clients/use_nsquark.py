"""Uses this project's client."""

import asyncio
import time
from collections import deque

from benchmarks.clients.arguments import (
    BATCH,
    BODY,
    MAX_IN_FLIGHT,
    Arguments,
    arguments,
    is_batch,
    outstanding_max,
    report,
)
from nsquark import Consumer, Message, Producer


async def publish(args: Arguments) -> None:
    async with Producer(args.address) as producer:
        await producer.publish(args.topic, BODY)
        count, started = 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < args.seconds:
            if args.task == "pub":
                await producer.publish(args.topic, BODY)
                count += 1
            else:
                await producer.multi_publish(args.topic, BATCH)
                count += len(BATCH)
    report(count, taken)


async def pipeline(args: Arguments) -> None:
    async with Producer(args.address) as producer:
        await producer.publish(args.topic, BODY)
        outstanding: deque[asyncio.Future[None]] = deque()
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < args.seconds:
            if len(outstanding) >= outstanding_max(args.task):
                await outstanding.popleft()
            if is_batch(args.task):
                outstanding.append(producer.multi_publish_nowait(args.topic, BATCH))
                count += len(BATCH)
            else:
                outstanding.append(producer.publish_nowait(args.topic, BODY))
                count += 1
        for future in outstanding:
            await future
        report(count, time.perf_counter() - started)


async def consume(args: Arguments) -> None:
    count, started, ended = 0, 0.0, asyncio.Event()

    def handle(message: Message) -> None:
        nonlocal count, started
        started = started or time.perf_counter()
        count += 1
        if count == args.wanted:
            ended.set()

    async def handle_async(message: Message) -> None:
        handle(message)

    async with Consumer(args.topic, args.channel, nsqd=args.address, max_in_flight=MAX_IN_FLIGHT) as consumer:
        asyncio.get_running_loop().call_later(args.seconds, ended.set)
        if args.task == "iter":
            async for message in consumer:
                async with message:
                    handle(message)
                if ended.is_set():
                    break
            report(count, time.perf_counter() - started)
        else:
            running = asyncio.create_task(consumer.run(handle if args.task == "sync" else handle_async, concurrency=8))
            await ended.wait()
            report(count, time.perf_counter() - started)
            await consumer.close()
            await running


async def main() -> None:
    args = arguments()
    if args.task in ("pipe", "mpubpipe"):
        await pipeline(args)
    else:
        await (publish(args) if args.task in ("pub", "mpub") else consume(args))


if __name__ == "__main__":
    asyncio.run(main())
