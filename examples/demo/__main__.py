"""Sends events through nsqds to consumers and to a lake, and kills one nsqd on the way: `python -m examples.demo
[--keep]`.

Exit code 0 only if the report at the end holds.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from examples.demo.board import Board
from examples.demo.events import Shop
from examples.demo.lake import Lake
from examples.demo.platform import Platform
from examples.demo.traffic import Consumers, Producers
from examples.demo.verdict import Verdict, judge

EVENTS_PER_SECOND = 400
CONSUMERS = 2
SHOP_SPEED = 20.0
"""A minute of the shop passes in three seconds."""
SHOP_OPENED_BEFORE = timedelta(hours=1)
KILL_AFTER_S = 10.0
UPDATE_AFTER_S = 18.0
PUBLISH_S_MIN = 40.0
BACK_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 60.0
POLL_S = 0.1


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave everything running afterwards, until Ctrl-C")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the events, to see the same ones again")
    args = parser.parse_args()
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: what was started is stopped.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="nsquark-demo-") as name:
        print(f"Starting nsqlookupd, two nsqds, nsqadmin and Spark; data and logs are in {name}", flush=True)
        async with Platform(Path(name)) as platform:
            return await show(platform, args)


async def show(platform: Platform, args: argparse.Namespace) -> int:
    shop = Shop(args.seed, datetime.now(UTC) - SHOP_OPENED_BEFORE, SHOP_SPEED)
    producers = Producers(shop, platform.nsqds("tcp"), EVENTS_PER_SECOND)
    consumers = Consumers(platform.lookupd, CONSUMERS)
    lake = Lake(platform)
    board = Board(platform, producers, consumers, lake)
    # Spark's client does not let the program end while it looks for a server that has gone.
    with contextlib.closing(lake):
        return await run(platform, producers, consumers, lake, board, args)


async def run(
    platform: Platform,
    producers: Producers,
    consumers: Consumers,
    lake: Lake,
    board: Board,
    args: argparse.Namespace,
) -> int:
    async with asyncio.TaskGroup() as running:
        publishing = running.create_task(producers.run())
        consuming = running.create_task(consumers.run())
        watching = running.create_task(board.run())
        verdict = await story(platform, producers, consumers, lake, board, publishing)
        print(report(verdict), flush=True)
        if args.keep:
            await keep(platform, args)
        await consumers.stop()
        await consuming
        watching.cancel()
    return 0 if verdict.is_true else 1


async def story(
    platform: Platform,
    producers: Producers,
    consumers: Consumers,
    lake: Lake,
    board: Board,
    publishing: "asyncio.Task[None]",
) -> Verdict:
    started = time.monotonic()
    board.say(f"nsqadmin shows it live at {platform.admin}")
    board.say(f"{EVENTS_PER_SECOND} events a second to two nsqds; {CONSUMERS} consumers share a channel")
    await asyncio.sleep(KILL_AFTER_S)
    pid = platform.pid(0)
    board.say(f"kill -9 of {platform.kill_nsqd(0)}; `nsquark up` starts it again, producers go elsewhere meanwhile")
    async with asyncio.timeout(BACK_TIMEOUT_S):
        while platform.pid(0) == pid:
            await asyncio.sleep(POLL_S)
    board.say("it is back, with what it had acknowledged")
    await asyncio.sleep(max(UPDATE_AFTER_S - (time.monotonic() - started), 0))
    board.say("first update of the Spark pipeline: topic to tables, bad events to a topic, results to another")
    board.say(f"it took {await lake.update():.0f} s")
    first = await lake.read()
    await asyncio.sleep(max(PUBLISH_S_MIN - (time.monotonic() - started), 0))
    producers.stop()
    await publishing
    board.say("the shop is closed; second update, with what came since")
    board.say(f"it took {await lake.update():.0f} s")
    last = await lake.read()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while not producers.acknowledged <= consumers.handled.keys():
                await asyncio.sleep(POLL_S)
    verdict = judge(producers, consumers, first, last)
    shown = await asyncio.to_thread(platform.nodes_shown)
    verdict.check("nsqds that nsqadmin shows", shown == len(platform.nsqds("http")), shown)
    return verdict


def report(verdict: Verdict) -> str:
    outcome = "Everything holds." if verdict.is_true else "Something is WRONG: see above."
    return "\n".join(["", "Report", *verdict.lines, "", outcome])


async def keep(platform: Platform, args: argparse.Namespace) -> None:
    print("\nStill running, until Ctrl-C:")
    for number, address in enumerate(platform.nsqds("http"), 1):
        print(f"  nsqd-{number}      http://{address}/stats")
    print(f"  nsqadmin    {platform.admin}")
    print(f"  nsqlookupd  http://{platform.lookupd}/nodes")
    print(f"  Spark UI    {platform.spark_ui}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
