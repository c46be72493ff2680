"""Uses ansq, on asyncio. It has `async for` and no handlers."""

import asyncio
import time

import ansq

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


async def publish(args: Arguments, tasks: int) -> None:
    writer = await ansq.create_writer(nsqd_tcp_addresses=[args.address])
    await writer.pub(args.topic, BODY)
    count, started = 0, time.perf_counter()

    async def work() -> None:
        nonlocal count
        while time.perf_counter() - started < args.seconds:
            if is_batch(args.task):
                await writer.mpub(args.topic, *BATCH)
                count += len(BATCH)
            else:
                await writer.pub(args.topic, BODY)
                count += 1

    await asyncio.gather(*(work() for _ in range(tasks)))
    report(count, time.perf_counter() - started)
    await writer.close()


async def consume(args: Arguments) -> None:
    """Its readers have no max_in_flight yet: RDY is sent on the connection, below its `messages`."""
    reader = await ansq.create_reader(topic=args.topic, channel=args.channel, nsqd_tcp_addresses=[args.address])
    for connection in reader.connections:
        await connection.rdy(MAX_IN_FLIGHT)
    count, started = 0, time.perf_counter()
    async for message in reader.messages():
        await message.fin()
        count += 1
        if count == args.wanted or time.perf_counter() - started > args.seconds:
            break
    report(count, time.perf_counter() - started)
    await reader.close()


async def main() -> None:
    args = arguments()
    if args.task in ("sync", "async"):
        cannot()
    elif args.task == "iter":
        await consume(args)
    else:
        await publish(args, outstanding_max(args.task))


if __name__ == "__main__":
    asyncio.run(main())
