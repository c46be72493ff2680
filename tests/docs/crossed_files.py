"""Prints the files that a message crosses from PUB to FIN: `NSQUARK_PURE=1 python -m docs.crossed_files <directory>`.

The kernel must not be compiled, since Python does not see the calls in it otherwise.
"""

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import nsquark
from harness import body_of
from nsquark.broker.tcp.session import Session
from unit.nsqd_parts import RawTransport, command, consumer, in_flight, opened

SOURCE = Path(nsquark.__file__).parent


async def main(directory: Path) -> None:
    crossed: set[Path] = set()

    def note_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            crossed.add(Path(frame.f_code.co_filename))

    async with opened(directory) as nsqd:
        receiver, _ = consumer(nsqd, "t", "ch", rdy=10)
        publisher = Session(nsqd)
        publisher.connection_made(RawTransport())
        command(publisher, b"  V2PUB t\n" + body_of(b"the first takes another way"))
        command(receiver, b"FIN " + in_flight(nsqd.topic("t"), "ch")[0] + b"\n")
        sys.setprofile(note_call)
        command(publisher, b"PUB t\n" + body_of(b"followed"))
        sys.setprofile(None)
        (message,) = in_flight(nsqd.topic("t"), "ch")
        sys.setprofile(note_call)
        command(receiver, b"FIN " + message + b"\n")
        sys.setprofile(None)
        assert not in_flight(nsqd.topic("t"), "ch")
    for path in sorted(path for path in crossed if path.is_relative_to(SOURCE)):
        print(path.relative_to(SOURCE))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
