"""This is `nsquark export`, which writes the data of a stopped nsqd as files of NSQ's nsqd."""

import argparse
import asyncio
from pathlib import Path

from nsquark.base.errors import UserError
from nsquark.base.logs import Logger
from nsquark.broker.data_path import DataPath, DataPathError
from nsquark.broker.export import Exported, ExportError, NsqExport
from nsquark.broker.nsqd import Nsqd, NsqdStartError
from nsquark.broker.options import NsqdOptionsError, parse_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to-nsq",
        type=Path,
        required=True,
        metavar="DIR",
        help="a new or empty directory, for NSQ's nsqd to be started with as its --data-path",
    )
    parser.add_argument(
        "--data-path",
        default="",
        metavar="PATH",
        help="the data path of the nsqd, which is stopped (default: here)",
    )
    parser.epilog = (
        "Written is what each channel has not finished, with publish times and attempts, what waits in topics, and"
        " topics, channels and pauses. Deferred messages are ready at once: NSQ does not store delays."
        " The data path stays as it is."
    )


def run(args: argparse.Namespace) -> int:
    try:
        exported = asyncio.run(_export(args.data_path, args.to_nsq))
    except (NsqdOptionsError, DataPathError, NsqdStartError, ExportError, OSError) as error:
        raise UserError(str(error)) from None
    for name, messages in exported.queues.items():
        print(f"{name}: {messages} messages")
    print(f"{sum(exported.queues.values())} messages are in {args.to_nsq}")
    print(f"NSQ's nsqd must be started with --max-msg-size={exported.message_bytes_max} at least")
    return 0


async def _export(data_path: str, target: Path) -> Exported:
    options = parse_options([f"--data-path={data_path}", "--log-level=warn"])
    data = DataPath(options.data_path)
    if not data.own.is_dir():
        raise UserError(f"{data.path} is no data path of this nsqd: name it by --data-path")
    data.lock()
    nsqd = Nsqd(options, Logger(options.log_prefix, options.log_level), data)
    try:
        nsqd.load()
        return NsqExport(nsqd, target).run()
    finally:
        await nsqd.stop()
