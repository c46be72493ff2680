"""Uses pynsq, on tornado. It has handlers, plain and async, and no iteration."""

import asyncio
import time
from typing import Any

import nsq

from benchmarks.clients.arguments import (
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


async def publish(args: Arguments, outstanding: int) -> None:
    writer = nsq.Writer([args.address])
    while not any(conn.state == "CONNECTED" for conn in writer.conns.values()):
        await asyncio.sleep(0.01)
    count, left, ended, started = 0, outstanding, asyncio.Event(), time.perf_counter()

    def answered(conn: Any, data: Any) -> None:
        nonlocal count, left
        count += len(BATCH) if is_batch(args.task) else 1
        if time.perf_counter() - started < args.seconds:
            send()
            return
        left -= 1
        if not left:
            ended.set()

    def send() -> None:
        if is_batch(args.task):
            writer.mpub(args.topic, BATCH, callback=answered)
        else:
            writer.pub(args.topic, BODY, callback=answered)

    for _ in range(outstanding):
        send()
    await ended.wait()
    report(count, time.perf_counter() - started)


async def consume(args: Arguments) -> None:
    count, started, ended = 0, 0.0, asyncio.Event()

    def handle(message: Any) -> bool:
        nonlocal count, started
        started = started or time.perf_counter()
        count += 1
        if count == args.wanted:
            ended.set()
        return True

    async def handle_async(message: Any) -> bool:
        return handle(message)

    nsq.Reader(
        topic=args.topic,
        channel=args.channel,
        nsqd_tcp_addresses=[args.address],
        message_handler=handle if args.task == "sync" else handle_async,
        max_in_flight=MAX_IN_FLIGHT,
    )
    asyncio.get_running_loop().call_later(args.seconds, ended.set)
    await ended.wait()
    report(count, time.perf_counter() - started)


async def main() -> None:
    args = arguments()
    if args.task == "iter":
        cannot()
    elif args.task in ("sync", "async"):
        await consume(args)
    else:
        await publish(args, outstanding_max(args.task))


if __name__ == "__main__":
    asyncio.run(main())
