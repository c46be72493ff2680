"""Reads one range of a log in a task: streams it from nsqd, and turns it into Arrow batches.

Three things are checked: each batch of the log by its checksum, the whole range by the count that the plan promised,
and the nsqd by its id. After a lost connection, reading goes on at the next message.
"""

import http.client
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import pyarrow as pa

from nsquark.base.logs import library_log
from nsquark.kernel.columns import ColumnBuilder, RecordError
from nsquark.spark.endpoint import NsqdError, Refused, Unreachable
from nsquark.spark.envelopes import HEADERS, opened
from nsquark.spark.nsqd_http import Finder, RangeNsqd
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.offsets import Key
from nsquark.spark.source.plan import Planner, RangePartition
from nsquark.wire.batch_format import HEADER_BYTES, Damage, StoredBatch, read_header, scan
from nsquark.wire.record import ID_BYTES

log = library_log("nsquark.spark")

ROWS_MAX = 8192
BODY_BYTES_MAX = 4 << 20
"""An Arrow batch is full at this many bytes of bodies: the JVM holds a few batches per task."""
BUFFER_BYTES = 1 << 20
BUFFER_BYTES_MAX = 256 << 20
"""The buffer never exceeds this, which is far above the largest batch that nsqd writes: what does not fit is no log."""
READ_BYTES = 256 << 10
STALL_TIMEOUT_S = 30.0
"""If no bytes come for this time, the connection counts as lost."""
DAMAGES_TOLD_MAX = 10
RETRY_PAUSE_S = 0.2

SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "nsqd": pa.string(),
        "seq": pa.int64(),
        "id": pa.string(),
        "timestamp": pa.timestamp("us", "UTC"),
        "body": pa.binary(),
    }
)


def arrow_schema(options: SourceOptions) -> pa.Schema:
    """Returns the columns that can be read with these options."""
    return SCHEMA.append(pa.field("headers", HEADERS)) if options.headers else SCHEMA


class ArrowColumns:
    """Wraps the kernel's buffers as the columns that were asked for. What is the same in all rows is made once."""

    def __init__(self, schema: pa.Schema, key: Key, opens_envelopes: bool):
        self._opens_envelopes = opens_envelopes
        self._schema = schema
        self._constants = {
            name: pa.array([value] * ROWS_MAX, pa.string())
            for name, value in (("topic", key.topic), ("nsqd", key.nsqd_id))
            if name in schema.names
        }
        self._id_offsets = pa.array(range(0, ID_BYTES * (ROWS_MAX + 1), ID_BYTES), pa.int32()).buffers()[1]

    def batch(
        self,
        columns: tuple[int, bytearray, bytearray, bytearray, bytearray, bytearray],
        topics: Sequence[str] | None = None,
    ) -> pa.RecordBatch:
        """Makes an Arrow batch; `topics` has the topic of each row, if the rows are not all of one topic."""
        rows, seqs, times, ids, offsets, bodies = columns
        made: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: self._topics(rows, topics),
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
            made |= {"headers": lambda: headers, "body": lambda: messages}
        return pa.RecordBatch.from_arrays([made[name]() for name in self._schema.names], schema=self._schema)

    def _topics(self, rows: int, topics: Sequence[str] | None) -> pa.Array:
        return self._constants["topic"].slice(0, rows) if topics is None else pa.array(topics, pa.string())


def _array(kind: pa.DataType, rows: int, values: bytearray) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(values)])


class RangeRowReader:
    """Reads one partition. Always: all messages before `_position` were yielded or given up, or are in the builder."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, partition: RangePartition):
        self._options = options
        self._partition = partition
        with_bodies = self._with_bodies = not {"body", "headers"}.isdisjoint(schema.names)
        self._columns = ArrowColumns(schema, partition.key, options.headers and with_bodies)
        self._builder = ColumnBuilder(partition.low, partition.high, ROWS_MAX, BODY_BYTES_MAX, with_bodies)
        self._position = partition.low
        self._rows = 0
        self._gone = False
        self._damage: list[str] = []
        self._progress_at = time.monotonic()
        self._failure: Exception | None = None
        """This is why the last attempt failed, if no message has come since."""
        self._address = partition.address
        self._buffer = bytearray(BUFFER_BYTES)

    def batches(self) -> Iterator[pa.RecordBatch]:
        while self._position < self._partition.high:
            try:
                for batch in self._attempt():
                    yield batch
                    # The time that Spark takes for a batch must not count as a delay of nsqd.
                    self._progress_at = time.monotonic()
                break
            except (Unreachable, OSError, http.client.HTTPException) as error:
                self._pause_or_fail(error)
            except Refused as refused:
                if refused.status != 503:
                    self._give_up_removed(refused)
                else:
                    self._pause_or_fail(refused)
        if self._builder.rows:
            yield self._full_batch()
        self._check_count()

    # -- one connection ----------------------------------------------------------------------------------

    def _attempt(self) -> Iterator[pa.RecordBatch]:
        partition = self._partition
        nsqd = RangeNsqd(self._address, self._options.access, partition.key.nsqd_id, self._left_s())
        self._builder.low = self._position
        try:
            which = {"id": partition.topic_id} if partition.topic_id else {}
            if not self._with_bodies:
                which["bodies"] = "false"
            where = {"from": self._position, "to": partition.high}
            response = nsqd.stream("/log/read", topic=partition.key.topic, **which, **where)
            filled = 0
            while True:
                nsqd.deadline.set(self._left_s())
                received = response.readinto(memoryview(self._buffer)[filled : filled + READ_BYTES])
                if not received:
                    break
                filled += received
                used = yield from self._decode(filled)
                filled = self._make_room(used, filled)
            if filled:
                self._add_damage(f"{filled} bytes at the end of the range")
        finally:
            nsqd.close()

    def _left_s(self) -> float:
        """Returns how long the next read may take: a message must come within readTimeout, whatever other bytes do."""
        left_s = min(self._progress_at + self._options.read_timeout_s - time.monotonic(), STALL_TIMEOUT_S)
        if left_s <= 0:
            raise self._failure or TimeoutError(f"no message in {self._options.read_timeout_s:g} s")
        return left_s

    def _decode(self, filled: int) -> Generator[pa.RecordBatch, None, int]:
        """Yields the rows of all whole batches in the buffer; returns how many bytes of the buffer are used up."""
        used = 0
        for found in scan(memoryview(self._buffer)[:filled], 0):
            if isinstance(found, Damage):
                self._add_damage(found.reason)
                used = found.end
                continue
            used = found.end
            self._check_batch(found)
            yield from self._rows_of(found)
        return used

    def _check_batch(self, batch: StoredBatch) -> None:
        """Raises if a batch does not bring the reader forward: with empty or other batches it could go on for ever."""
        if not (batch.messages > 0 and batch.next_seq > self._position and batch.first_seq < self._partition.high):
            raise NsqdError(
                f"nsqd {self._partition.key.nsqd_id} at {self._address} sends messages {batch.first_seq} to "
                f"{batch.next_seq - 1} where those from {self._position} to {self._partition.high - 1} were asked for"
            )

    def _rows_of(self, batch: StoredBatch) -> Iterator[pa.RecordBatch]:
        pos, seq = batch.offset + HEADER_BYTES, batch.first_seq
        while True:
            try:
                pos, seq = self._builder.append(self._buffer, pos, batch.end, seq)
            except RecordError as error:
                raise self._no_log(f"{error}, in a batch whose checksum is right") from None
            if seq > self._position:
                self._position = seq
                self._progress_at = time.monotonic()
                self._failure = None
            if pos == batch.end:
                break
            yield self._full_batch()
        if seq != batch.next_seq:
            raise self._no_log(f"a batch of {batch.messages} messages has {seq - batch.first_seq}")
        self._check_not_more(self._rows + self._builder.rows)

    def _full_batch(self) -> pa.RecordBatch:
        self._rows += self._builder.rows
        return self._columns.batch(self._builder.hand_over())

    def _make_room(self, used: int, filled: int) -> int:
        """Moves the bytes that are not used up to the front, and returns how many there are. The buffer grows for a
        batch that does not fit; bytes that are no batch are dropped.
        """
        rest = filled - used
        if used:
            self._buffer[:rest] = self._buffer[used:filled]
        elif filled == len(self._buffer):
            header = read_header(memoryview(self._buffer), 0, 0)
            if header is None:
                # The last bytes may be the beginning of a header.
                self._add_damage(f"{filled} bytes without a batch")
                rest = HEADER_BYTES - 1
                self._buffer[:rest] = self._buffer[filled - rest : filled]
            elif header[0].end > BUFFER_BYTES_MAX:
                raise self._no_log(f"a batch of {header[0].payload_bytes} bytes, at most {BUFFER_BYTES_MAX} are taken")
            else:
                self._buffer = self._buffer + bytearray(min(filled, header[0].end - filled))
        return rest

    def _add_damage(self, reason: str) -> None:
        if len(self._damage) < DAMAGES_TOLD_MAX:
            self._damage.append(reason)

    def _no_log(self, why: str) -> NsqdError:
        return NsqdError(f"nsqd {self._partition.key.nsqd_id} at {self._address} sends no log: {why}")

    # -- when it does not work ---------------------------------------------------------------------------

    def _pause_or_fail(self, error: Exception) -> None:
        """Waits a little, and finds the nsqd, which may have restarted on another port; raises after readTimeout."""
        key = self._partition.key
        self._failure = error
        if time.monotonic() - self._progress_at >= self._options.read_timeout_s:
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
        """Gives up messages that were removed before this task came to them."""
        partition = self._partition
        if refused.code == "REMOVED":
            removed_to = refused.fields.get("removed_to")
            if not isinstance(removed_to, int) or removed_to <= self._position:
                raise self._no_log(f"it says that messages from {self._position} on are gone, but not up to where")
            gone_to = min(removed_to, partition.high)
        elif refused.code in ("BEYOND_HEAD", "TOPIC_NOT_FOUND", "REPLACED"):
            gone_to = partition.high
        else:
            raise refused
        lost = refused.fields.get("lost")
        Planner(self._options).lost(partition.key, self._position, gone_to, refused.code, lost)
        self._position, self._gone = gone_to, True

    def _check_not_more(self, rows: int) -> None:
        partition = self._partition
        if rows > partition.count:
            raise NsqdError(
                f"nsqd {partition.key.nsqd_id} gave {rows} messages for a range planned with {partition.count}"
            )

    def _check_count(self) -> None:
        partition = self._partition
        self._check_not_more(self._rows)
        if self._rows == partition.count or self._gone:
            return
        damage = f" ({'; '.join(self._damage)})" if self._damage else ""
        why = f"{partition.count - self._rows} of its {partition.count} messages are damaged on disk{damage}"
        Planner(self._options).lost(partition.key, partition.low, partition.high, why)
