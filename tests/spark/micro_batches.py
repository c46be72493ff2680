"""Makes Spark's calls to a stream reader, in Spark's order, without Spark: for tests of what a batch takes.

Offsets go through JSON and partitions through pickle, as they do between Spark's processes.
"""

import json
import pickle
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from harness import Nsqd
from nsquark.spark.source.datasource import NsqDataSource
from nsquark.spark.source.stream import NsqStreamReader
from spark.source_rig import addresses


class MicroBatches:
    """Is one query and its checkpoint; `restarted` is another process that goes on with the checkpoint."""

    def __init__(self, options: dict[str, Any], committed: str | None = None):
        self._options = options
        source = NsqDataSource({name: str(value) for name, value in options.items()})
        found = pickle.loads(pickle.dumps(source)).streamReader(schema=source.schema())
        assert isinstance(found, NsqStreamReader)
        self.reader = found
        self._restarted: list[MicroBatches] = []
        try:
            self.committed = committed or json.dumps(self.reader.initialOffset())
        except BaseException:
            self.reader.stop()
            raise
        self.planned = ""

    def restarted(self, **options: Any) -> "MicroBatches":
        again = MicroBatches({**self._options, **options}, self.committed)
        self._restarted.append(again)
        return again

    @property
    def offset(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.committed)
        return fields

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Plans a batch; tells whether there is one to run."""
        limit = limit or self.reader.getDefaultReadLimit()
        self.planned = json.dumps(self.reader.latestOffset(self.offset, limit))
        return self.planned != self.committed

    def run(self) -> list[bytes]:
        """Reads the planned batch, which is committed when all of it was read."""
        found = [body for part in self.partitions() for body in self.read(part)]
        self.committed = self.planned
        return sorted(found)

    def partitions(self) -> list[Any]:
        return [
            pickle.loads(pickle.dumps(part)) for part in self.reader.partitions(self.offset, json.loads(self.planned))
        ]

    def read(self, partition: Any) -> list[bytes]:
        return [body for batch in self.reader.read(partition) for body in batch.column("body").to_pylist()]

    def next(self, limit: ReadLimit | None = None) -> list[bytes]:
        """Returns what the next batch reads; that is nothing if there is none."""
        return self.run() if self.plan(limit) else []

    def state(self) -> list[bytes]:
        """Returns what all batches read, until there is none."""
        found: list[bytes] = []
        while self.plan():
            found += self.run()
        return sorted(found)

    def all_available(self) -> list[bytes]:
        return self.next(ReadAllAvailable())

    def stop(self) -> None:
        """Ends its threads, and those of the queries that went on with its checkpoint."""
        self.reader.stop()
        for again in self._restarted:
            again.stop()


def query(*daemons: Nsqd, **options: Any) -> MicroBatches:
    """Makes a query that reads from the earliest message on, unless told otherwise."""
    where = {} if "lookupd" in options else {"nsqd": addresses(*daemons)}
    where |= {} if "startingTimestamp" in options else {"startingOffsets": "earliest"}
    return MicroBatches({**where, **options})


MakeQuery = Callable[..., MicroBatches]
"""The fixture `start` gives one: `query`, whose threads end after the test."""
