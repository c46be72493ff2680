"""Goes on with a replay of numbered messages and no Spark: replay_pieces.py <nsqd> <topic> <checkpoint> <piece> <end>.

<piece> is how many messages are appended at once, which is what `--rate` decides.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import Row

from nsquark.spark.jobs import replay
from nsquark.spark.jobs.replay_state import ReplayState
from nsquark.spark.sink.options import SinkOptions

UNTIL = datetime(2026, 1, 31, tzinfo=UTC)


def bodies(end: int) -> list[bytes]:
    return [b"message %d" % number for number in range(end)]


def go_on(nsqd: str, topic: str, checkpoint: Path, piece_messages: int, end: int) -> None:
    """Appends what is left of the messages before `end`."""
    options = SinkOptions.parse({"nsqd": nsqd, "topic": topic, "idempotent": "true"})
    rows = [Row(at_us=number, nsqd="n", topic="t", seq=number, body=body) for number, body in enumerate(bodies(end))]
    with ReplayState.opened(checkpoint, {}, None, UNTIL) as state, replay._Appending(options, state) as writer:
        left = rows if state.position is None else rows[state.position.seq + 1 :]
        for piece in replay.cut(left, piece_messages, options.request_bytes_max):
            writer.write(piece)


if __name__ == "__main__":
    go_on(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
