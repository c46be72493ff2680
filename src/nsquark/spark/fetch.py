"""A task's work: a range of the log, streamed from nsqd and turned into Arrow batches.

Messages are checked three times: each batch of the log by its checksum, the whole range by the count that the plan
promised, and the nsqd by its id. A lost connection is taken up again at the next message.
"""

import http.client
import time
from collections.abc import Callable, Generator, Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, DataType, LongType, MapType, StringType, StructType, TimestampType

from nsquark.cli.logs import library_log
from nsquark.kernel.columns import ColumnBuilder
from nsquark.log.batches import HEADER_BYTES, Batch, Damage, scan
from nsquark.spark.envelopes import opened
from nsquark.spark.nsqds import Finder, Nsqd, NsqdError, Refused, Unreachable
from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.plan import Planner, RangePartition

log = library_log("nsquark.spark")

ROWS_MAX = 8192
BODY_BYTES_MAX = 4 << 20
"""Of an Arrow batch. The JVM holds a few of them per task."""
READ_BYTES = 1 << 20
BUFFER_BYTES_MAX = 256 << 20
"""Far above the largest batch that nsqd writes: what does not fit is no log."""
STALL_TIMEOUT_S = 30.0
"""Without a byte from nsqd, after which the connection counts as lost."""
RETRY_PAUSE_S = 0.2
ID_BYTES = 16

COLUMNS: dict[str, DataType] = {
    "topic": StringType(),
    "nsqd": StringType(),
    "seq": LongType(),
    "id": StringType(),
    "timestamp": TimestampType(),
    "body": BinaryType(),
}
HEADERS = "headers"


def columns(options: SourceOptions) -> dict[str, DataType]:
    """What there is to read with these options."""
    return {**COLUMNS, HEADERS: MapType(StringType(), StringType())} if options.headers else COLUMNS


def check_schema(schema: StructType, options: SourceOptions) -> None:
    """A schema given by the user may leave columns out, and order them as it likes."""
    known = columns(options)
    described = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
    for field in schema.fields:
        kind = known.get(field.name)
        if kind is None and field.name == HEADERS:
            raise OptionError("the column headers is there with the option headers=true, which opens envelopes")
        if kind is None:
            raise OptionError(f"format nsq has no column {field.name!r}: take any of {described}")
        if kind != field.dataType:
            raise OptionError(
                f"column {field.name} is a {kind.simpleString()}, not a {field.dataType.simpleString()}: "
                f"read it as it is and cast it in a select ({described})"
            )
    if not schema.fields:
        raise OptionError(f"the schema has no columns: take any of {described}")


class ArrowColumns:
    """Wraps the kernel's buffers as the columns that were asked for. What is the same in every row is made once."""

    def __init__(self, schema: StructType, partition: RangePartition, opens_envelopes: bool):
        self._opens_envelopes = opens_envelopes
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._constants = {
            name: pa.array([value] * ROWS_MAX, pa.string())
            for name, value in (("topic", partition.key.topic), ("nsqd", partition.key.nsqd_id))
            if name in schema.fieldNames()
        }
        self._id_offsets = pa.array(range(0, ID_BYTES * (ROWS_MAX + 1), ID_BYTES), pa.int32()).buffers()[1]

    def batch(self, taken: tuple[int, bytearray, bytearray, bytearray, bytearray, bytearray]) -> pa.RecordBatch:
        rows, seqs, times, ids, offsets, bodies = taken
        made: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: self._constants["topic"].slice(0, rows),
            "nsqd": lambda: self._constants["nsqd"].slice(0, rows),
            "seq": lambda: _array(pa.int64(), rows, seqs),
            "id": lambda: pa.Array.from_buffers(pa.string(), rows, [None, self._id_offsets, pa.py_buffer(ids)]),
            "timestamp": lambda: _array(pa.timestamp("us", "UTC"), rows, times),
            "body": lambda: pa.Array.from_buffers(
                pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(bodies)]
            ),
        }
        if self._opens_envelopes:
            headers, messages = opened(rows, offsets, bodies)
            made |= {HEADERS: lambda: headers, "body": lambda: messages}
        return pa.RecordBatch.from_arrays([made[name]() for name in self._schema.names], schema=self._schema)


def _array(kind: pa.DataType, rows: int, values: bytearray) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(values)])


class RangeReader:
    """Reads one partition. All messages before `_position` were given out, or are in the builder."""

    def __init__(self, options: SourceOptions, schema: StructType, partition: RangePartition):
        self._options = options
        self._partition = partition
        with_bodies = not {"body", HEADERS}.isdisjoint(schema.fieldNames())
        self._columns = ArrowColumns(schema, partition, options.headers and with_bodies)
        self._builder = ColumnBuilder(partition.low, partition.high, ROWS_MAX, BODY_BYTES_MAX, with_bodies)
        self._position = partition.low
        self._rows = 0
        self._gone = False
        self._damage: list[str] = []
        self._progress_at = time.monotonic()
        self._address = partition.address
        self._buffer = bytearray(READ_BYTES)

    def batches(self) -> Iterator[pa.RecordBatch]:
        while self._position < self._partition.high:
            try:
                yield from self._attempt()
                break
            except (Unreachable, OSError, http.client.HTTPException) as error:
                self._pause_or_fail(error)
            except Refused as refused:
                if refused.status != 503:
                    self._give_up_removed(refused)
                else:
                    self._pause_or_fail(refused)
        if self._builder.rows:
            yield self._take()
        self._check_count()

    # -- one connection ----------------------------------------------------------------------------------

    def _attempt(self) -> Iterator[pa.RecordBatch]:
        partition = self._partition
        nsqd = Nsqd(
            self._address,
            self._options.tls,
            partition.key.nsqd_id,
            min(STALL_TIMEOUT_S, self._options.read_timeout_s),
        )
        self._builder.low = self._position
        try:
            response = nsqd.stream(
                "/log/read", topic=partition.key.topic, **{"from": self._position, "to": partition.high}
            )
            filled = 0
            while received := response.readinto(memoryview(self._buffer)[filled:]):
                self._progress_at = time.monotonic()
                filled += received
                used = yield from self._decode(filled)
                filled = self._keep(used, filled)
            if filled:
                self._damage.append(f"{filled} bytes at the end of the range")
        finally:
            nsqd.close()

    def _decode(self, filled: int) -> Generator[pa.RecordBatch, None, int]:
        """Takes all whole batches of the buffer; returns how many bytes they were."""
        used = 0
        for found in scan(memoryview(self._buffer)[:filled], 0):
            if isinstance(found, Damage):
                self._damage.append(found.reason)
                used = found.end
                continue
            used = found.end
            yield from self._rows_of(found)
        return used

    def _rows_of(self, batch: Batch) -> Iterator[pa.RecordBatch]:
        pos, seq = batch.offset + HEADER_BYTES, batch.first_seq
        while True:
            pos, seq = self._builder.append(self._buffer, pos, batch.end, seq)
            self._position = max(self._position, seq)
            if pos == batch.end:
                return
            yield self._take()

    def _take(self) -> pa.RecordBatch:
        self._rows += self._builder.rows
        made = self._columns.batch(self._builder.take())
        # What Spark does with the last batch is not nsqd's delay.
        self._progress_at = time.monotonic()
        return made

    def _keep(self, used: int, filled: int) -> int:
        """Moves what is left of a batch to the front; a batch larger than the buffer gets a larger one."""
        rest = filled - used
        if used:
            self._buffer[:rest] = self._buffer[used:filled]
        elif filled == len(self._buffer):
            if filled >= BUFFER_BYTES_MAX:
                raise NsqdError(f"{self._address} sends no log: no batch ends within {BUFFER_BYTES_MAX >> 20} MiB")
            self._buffer = self._buffer + bytearray(filled)
        return rest

    # -- when it does not work ---------------------------------------------------------------------------

    def _pause_or_fail(self, error: Exception) -> None:
        """Unreachable is not lost: nsqd may be starting again, perhaps on another port."""
        key = self._partition.key
        if time.monotonic() - self._progress_at > self._options.read_timeout_s:
            raise Unreachable(
                f"nsqd {key.nsqd_id} did not give topic {key.topic} from {self._position} on for "
                f"{self._options.read_timeout_s:g} s ({error}): start it again, raise readTimeout, or, if it is gone "
                f"for good, give it up with lostNsqds={key.nsqd_id}"
            ) from error
        log.warning("nsqd %s: %s; trying again from %d", key.nsqd_id, error, self._position)
        time.sleep(RETRY_PAUSE_S)
        try:
            found = Finder(self._options).find().get(key.nsqd_id)
        except NsqdError:
            return
        if found is not None:
            self._address = found.address
            found.close()

    def _give_up_removed(self, refused: Refused) -> None:
        """Retention was faster than this task."""
        partition = self._partition
        if refused.code == "REMOVED":
            gone_to = min(int(refused.fields["removed_to"]), partition.high)
        elif refused.code in ("BEYOND_HEAD", "TOPIC_NOT_FOUND"):
            gone_to = partition.high
        else:
            raise refused
        Planner(self._options).lost(partition.key, self._position, gone_to, refused.code)
        self._position, self._gone = gone_to, True

    def _check_count(self) -> None:
        partition = self._partition
        if self._rows == partition.count or (self._gone and self._rows < partition.count):
            return
        if self._rows > partition.count:
            raise NsqdError(
                f"nsqd {partition.key.nsqd_id} gave {self._rows} messages for a range planned with {partition.count}"
            )
        damage = f" ({'; '.join(self._damage)})" if self._damage else ""
        why = f"{partition.count - self._rows} of its {partition.count} messages are damaged on disk{damage}"
        Planner(self._options).lost(partition.key, partition.low, partition.high, why)
