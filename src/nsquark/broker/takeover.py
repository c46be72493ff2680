"""Takes over from NSQ in one restart: what its nsqd left in the data path is brought in, and its files are set aside.

Each topic with messages is one step, done wholly or not at all, whenever the process dies:

1. The topic and its channels are made, and everything is written into `nsquark/takeover/import.<topic>`: the new
   segments of the topic's log, and its cursors and journals as they are to be. What a crash leaves of it is removed.
2. The directory is renamed to `ready.<topic>`. From here on the step is done at this start or the next:
3. its files replace those of the topic, the cursors last, and NSQ's files move to `nsq-before-nsquark`.

In the log come the first channel's messages, the second's and so on, then the topic's own; each channel skips what
belongs to the others.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from nsquark.broker.data_path import METADATA_FILE, DataPathError, ListedTopic, Metadata
from nsquark.broker.topic import DIRECTORY_PREFIX, Topic
from nsquark.kernel.journal import JOURNAL_REQUEUED, record
from nsquark.log.cursors import ChannelState, CursorFile, TopicState, encode_state
from nsquark.log.files import DIRECTORY_MODE, name_twice, names_like, read_surviving, sync_directory, write_atomically
from nsquark.log.journal import Journal
from nsquark.log.nsq_import.diskqueue import QUEUED_OVERHEAD_BYTES, DiskQueue, find_queues
from nsquark.log.nsq_import.import_log import LogImport
from nsquark.log.segment import SEGMENT_SUFFIX
from nsquark.log.services import LogShared
from nsquark.wire.documents import decode_json
from nsquark.wire.names import is_ephemeral, is_valid_name
from nsquark.wire.record import RECORD_OVERHEAD_BYTES

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

MARKED_BYTES = 64 << 10
ASIDE_DIRECTORY = "nsq-before-nsquark"
STAGING_DIRECTORY = "takeover"
IMPORT_PREFIX = "import."
READY_PREFIX = "ready."
PLAN_FILE = "plan.json"
CURSORS_FILE = "cursors"
CHANNEL_SEPARATORS = (":", ";")
"""One of these stands between topic and channel in a file's name; the second is for Windows."""
PROGRESS_S = 3.0
GROWTH_MAX = RECORD_OVERHEAD_BYTES / QUEUED_OVERHEAD_BYTES
"""A message grows at most by this factor from NSQ's file to our log, apart from the headers of batches."""
ATTEMPTS_REMEMBERED_MAX = 1_000_000
"""About this many attempts are remembered per channel: a journal is read into memory as a whole. Further messages start
with their first attempt.
"""


class TakenFiles(msgspec.Struct):
    """Names the files of NSQ that a step took over, each with its size and a checksum of its end to know it by."""

    files: dict[str, tuple[int, int] | None]
    segments: list[str] = []
    """Names the files of our log that have their messages."""
    check: str = ""

    def checksum(self) -> str:
        return xxh3_64_hexdigest(f"{self.files} {self.segments}".encode())


@dataclass(slots=True)
class NsqLeftovers:
    """Collects what NSQ left of one topic."""

    listed: ListedTopic | None = None
    own: DiskQueue | None = None
    channels: dict[str, DiskQueue] = field(default_factory=dict)

    @property
    def queues(self) -> list[DiskQueue]:
        return [*self.channels.values(), *([self.own] if self.own is not None else [])]

    @property
    def files(self) -> list[Path]:
        return [path for queue in self.queues for path in queue.files]

    @property
    def unread_bytes(self) -> int:
        return sum(queue.unread_bytes for queue in self.queues)

    @property
    def has_messages(self) -> bool:
        """Tells whether there are messages, or there should be."""
        return any(queue.depth > 0 for queue in self.queues) or self.unread_bytes > 0


@dataclass(slots=True)
class Placed:
    """Says where a topic's imported messages are in its log, as sequence numbers."""

    log_end: int
    """Is the end of what was in the log before."""
    first: int
    of_channel: dict[str, tuple[int, int]] = field(default_factory=dict)
    own_from: int = 0
    end: int = 0


def take_over(nsqd: Nsqd) -> None:
    """Brings everything NSQ's nsqd left into our topics; before clients are served."""
    try:
        TakeOver(nsqd).run()
        nsqd.may_write_metadata = True
    except OSError as error:
        raise DataPathError(
            f"failed to take over the data of NSQ - {error}; nothing is lost: start again when this is mended"
        ) from None


class TakeOver:
    """Makes one pass over the data path. Nothing of NSQ's is changed before it is durable on our side."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.logger = nsqd.logger
        self.data_path = nsqd.data.path
        self.staging = nsqd.data.own / STAGING_DIRECTORY
        self.aside = self.data_path / ASIDE_DIRECTORY
        self._messages = 0
        self._done_bytes = 0
        self._total_bytes = 0
        self._started_s = self._reported_s = time.monotonic()

    def run(self) -> None:
        self._finish_earlier()
        metadata = self._load_metadata()
        found = self._find(metadata)
        if metadata is None and not found:
            return
        self._total_bytes = sum(topic.unread_bytes for topic in found.values())
        self.logger.info(f"TAKEOVER: NSQ left {len(found)} topics with {_mib(self._total_bytes)} of messages")
        self._check_room()
        for name in sorted(found):
            self._import_topic(name, found[name])
        self._sync_topics(list(found))
        if metadata is not None:
            self._replace_metadata()
        if self.staging.exists():
            self.staging.rmdir()
        seconds = time.monotonic() - self._started_s
        self.logger.info(
            f"TAKEOVER: {self._messages} messages of {len(found)} topics taken over in {seconds:.1f} s;"
            f" the files of NSQ are in {self.aside}"
        )

    # -- what is there -----------------------------------------------------------------------------------

    def _load_metadata(self) -> Metadata | None:
        """Reads nsqd.dat if it is NSQ's. Ours is a copy of what our topics' directories say."""
        path = self.data_path / METADATA_FILE
        try:
            metadata = decode_json(path.read_bytes(), Metadata)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if not self.nsqd.data.was_ours:
                raise DataPathError(
                    f"failed to load metadata - {path} cannot be read: {error};"
                    " restore it, or remove it to start without the topics it names"
                ) from None
            self.logger.warning(f"TAKEOVER: {path} cannot be read ({error}); {self._set_metadata_aside(path)}")
            return None
        return None if metadata.nsquark else metadata

    @staticmethod
    def _set_metadata_aside(path: Path) -> str:
        try:
            return f"it stays as {name_twice(path).name}, and is written anew"
        except OSError as error:
            return f"it is written anew, since it could not be set aside: {error}"

    def _find(self, metadata: Metadata | None) -> dict[str, NsqLeftovers]:
        found: dict[str, NsqLeftovers] = {}
        for listed in (metadata.topics if metadata is not None else None) or ():
            if not is_valid_name(listed.name):
                self.logger.warning(f"skipping creation of invalid topic {listed.name}")
            elif not is_ephemeral(listed.name):
                found.setdefault(listed.name, NsqLeftovers()).listed = listed
        for queue in find_queues(self.data_path).values():
            topic, channel = _split(queue.base)
            if any(not is_valid_name(name) or is_ephemeral(name) for name in (topic, channel or topic)):
                self.logger.warning(f"TAKEOVER: {queue.base}: no lasting topic or channel, its files are set aside")
                self._set_aside(queue.files)
            elif channel:
                found.setdefault(topic, NsqLeftovers()).channels[channel] = queue
            else:
                found.setdefault(topic, NsqLeftovers()).own = queue
        return found

    def _check_room(self) -> None:
        needed = int(self._total_bytes * GROWTH_MAX)
        space = os.statvfs(self.data_path)
        free = space.f_bavail * space.f_frsize
        if needed > free:
            raise DataPathError(
                f"taking over the data of NSQ in {self.data_path} needs {_mib(needed)} of free disk space and"
                f" {_mib(free)} are there; nothing was changed: make room and start again"
            )

    # -- one topic ---------------------------------------------------------------------------------------

    def _import_topic(self, name: str, found: NsqLeftovers) -> None:
        self._declare(name, found)
        if found.has_messages:
            self._import(name, found)
        else:
            self._set_aside(found.files)
        for queue in found.queues:
            for problem in queue.problems:
                self.logger.error(f"TAKEOVER: {problem}")

    def _declare(self, name: str, found: NsqLeftovers) -> None:
        """Makes the topic and its channels, empty; the topic's pause first, since it decides where channels start."""
        topic = self.nsqd.topic(name)
        listed = found.listed or ListedTopic(name, topic.paused)
        if topic.paused != listed.paused:
            topic.set_paused(listed.paused)
        for entry in listed.channels or ():
            if not is_valid_name(entry.name):
                self.logger.warning(f"skipping creation of invalid channel {entry.name}")
            elif not is_ephemeral(entry.name):
                channel = topic.channel(entry.name)
                if channel.paused != entry.paused:
                    channel.set_paused(entry.paused)
        for channel_name in found.channels:
            topic.channel(channel_name)

    def _import(self, name: str, found: NsqLeftovers) -> None:
        """Does steps 1 to 3 for a topic that exists here by now."""
        topic = self.nsqd.topics[name]
        pump, log_end = topic.pump, topic.log.head
        self._close(topic)
        stage = self.staging / f"{IMPORT_PREFIX}{name}"
        stage.mkdir(mode=DIRECTORY_MODE, parents=True)
        sync_directory(self.staging.parent)  # or a power cut loses the plan, and NSQ's files are taken over twice
        placed = self._write_log(stage, self._directory(name), found, log_end)
        if placed.of_channel and pump < log_end:
            self.logger.warning(f"TAKEOVER: topic {name} is paused: what it held back before goes to its channels now")
        elif not placed.of_channel and pump < log_end:
            placed.own_from = pump
        _write_cursors(self.nsqd.logs, self._directory(name), stage, placed)
        segments = [path.name for path in names_like(stage, f"*{SEGMENT_SUFFIX}")]
        plan = TakenFiles({path.name: _mark(path) for path in found.files}, segments)
        plan.check = plan.checksum()
        write_atomically(stage / PLAN_FILE, msgspec.json.encode(plan))
        sync_directory(self._directory(name))
        sync_directory(self.nsqd.topics_path)
        ready = stage.rename(self.staging / f"{READY_PREFIX}{name}")
        sync_directory(self.staging)
        self._move_in(ready, name)

    def _write_log(self, stage: Path, directory: Path, found: NsqLeftovers, log_end: int) -> Placed:
        log = LogImport(stage, self.nsqd.logs)
        placed = Placed(log_end, log.next_seq())
        for channel in sorted(found.channels):
            low = log.next_seq()
            journal = f"c.{channel}.journal"
            attempted = self._copy(log, found.channels[channel], directory / journal, stage / journal)
            if attempted > ATTEMPTS_REMEMBERED_MAX:
                self.logger.warning(f"TAKEOVER: {found.channels[channel].base}: some attempts are counted anew")
            if log.next_seq() > low:
                placed.of_channel[channel] = (low, log.next_seq())
        placed.own_from = log.next_seq()
        if found.own is not None:
            self._copy(log, found.own)
        placed.end = log.finish()
        return placed

    def _copy(self, log: LogImport, queue: DiskQueue, old: Path | None = None, new: Path | None = None) -> int:
        """Copies all of a queue into the log; returns how many were attempted before, which the journal has."""
        attempted, before = 0, log.messages
        journal: Journal | None = None
        for piece in queue.pieces():
            known = log.append(piece)
            if known and attempted < ATTEMPTS_REMEMBERED_MAX and old is not None and new is not None:
                journal = journal or self._continued(old, new)
                journal.append(b"".join(record(JOURNAL_REQUEUED, n, seq, 0, 0) for seq, n in known))
            attempted += len(known)
            self._progress(queue.base, len(piece.records), piece.end)
        if journal is not None:
            journal.make_durable()
            journal.close()
        self.logger.info(f"TAKEOVER: {queue.base}: {log.messages - before} messages, {attempted} attempted before")
        return attempted

    def _continued(self, old: Path, new: Path) -> Journal:
        """Copies a journal, if there is one, to append to the copy."""
        if old.exists():
            shutil.copyfile(old, new)
        journal = Journal(self.nsqd.logs, new)
        journal.load(self.nsqd.options.max_req_timeout.ms)
        return journal

    def _progress(self, base: str, messages: int, size: int) -> None:
        self._messages += messages
        self._done_bytes += size
        now_s = time.monotonic()
        if now_s - self._reported_s >= PROGRESS_S:
            self._reported_s = now_s
            share = f"{_mib(self._done_bytes)} of {_mib(self._total_bytes)}"
            self.logger.info(f"TAKEOVER: at {base}: {self._messages} messages so far, {share}")

    # -- putting in place --------------------------------------------------------------------------------

    def _finish_earlier(self) -> None:
        """Completes what an earlier start got ready, and removes what it did not."""
        if not self.staging.exists():
            return
        for stage in sorted(self.staging.iterdir()):
            name = stage.name.removeprefix(READY_PREFIX)
            if name == stage.name:
                shutil.rmtree(stage)
                continue
            self.logger.info(f"TAKEOVER: topic {name}: finishing what an earlier start began")
            self._close(self.nsqd.topic(name))
            self._move_in(stage, name)
        self.staging.rmdir()

    def _move_in(self, ready: Path, name: str) -> None:
        """Moves what is ready into the closed topic and NSQ's files aside, then opens the topic."""
        directory = self._directory(name)
        plan_file = ready / PLAN_FILE
        if plan_file.exists():  # else all was done but for removing what is left, which the topic has too
            plan = self._read_plan(plan_file)
            for segment in plan.segments:
                # A loss of power may keep half of a rename from one directory to another.
                if not (ready / segment).exists() and not (directory / segment).exists():
                    self.logger.error(f"TAKEOVER: {ready / segment} is gone: what it had is taken over once more")
                    plan = TakenFiles({})
            staged = [path for path in ready.iterdir() if path != plan_file]
            for path in sorted(staged, key=lambda path: (path.name == CURSORS_FILE, path.suffix != ".log", path.name)):
                path.replace(directory / path.name)
            sync_directory(directory)
            # A file that is not as it was has been used by NSQ since: it is taken over once more.
            left = [self.data_path / file for file, mark in plan.files.items() if _mark(self.data_path / file) == mark]
            self._set_aside(left)
            plan_file.unlink()
        shutil.rmtree(ready)
        self.nsqd.topics[name] = Topic(self.nsqd, name)
        if self.nsqd.topics[name].deferrals.count:
            self.nsqd.deferring[self.nsqd.topics[name]] = None

    def _read_plan(self, path: Path) -> TakenFiles:
        """Reads which files are taken over. If that is damaged, none counts as such: messages that come twice are
        better than messages that are lost.
        """
        raw, _ = read_surviving(path, self.logger.error)
        try:
            plan = decode_json(bytes(raw), TakenFiles)
            if plan.check == plan.checksum():
                return plan
        except ValueError:
            pass
        self.logger.error(
            f"TAKEOVER: {path} is damaged: it tells which files of NSQ in {self.data_path} are taken over already;"
            " those of its topic that are left there are taken over once more, so messages may come twice"
        )
        return TakenFiles({})

    def _close(self, topic: Topic) -> None:
        """Closes a topic, so that everything of it is in its files and nothing of nsqd refers to it."""
        nsqd = self.nsqd
        del nsqd.topics[topic.name]
        if topic.log.segments is not None:
            nsqd.logs.disk_bytes -= topic.log.segments.total_bytes
        topic.close()
        nsqd.deferring.pop(topic, None)
        for channel in topic.channels.values():
            channel.is_deleted = True  # the turn that is due passes it by

    def _set_aside(self, files: list[Path]) -> None:
        if not files:
            return
        self.aside.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for path in files:
            path.rename(_free_name(self.aside / path.name))
        sync_directory(self.aside)
        sync_directory(self.data_path)

    def _sync_topics(self, names: list[str]) -> None:
        """Makes the topics durable before nsqd.dat is replaced, which is the only other place that tells of those
        without messages.
        """
        for name in names:
            topic = self.nsqd.topics[name]
            topic.make_durable()
            sync_directory(self._directory(name))
        self.nsqd.logs.drain()
        sync_directory(self.nsqd.topics_path)

    def _replace_metadata(self) -> None:
        path = self.data_path / METADATA_FILE
        self.aside.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        content, copy = path.read_bytes(), self.aside / METADATA_FILE
        if not copy.exists() or copy.read_bytes() != content:
            write_atomically(_free_name(copy), content)
        self.nsqd.may_write_metadata = True
        self.nsqd.write_metadata()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self.data_path)

    def _directory(self, name: str) -> Path:
        return self.nsqd.topics_path / f"{DIRECTORY_PREFIX}{name}"


def _write_cursors(shared: LogShared, directory: Path, stage: Path, placed: Placed) -> None:
    """Writes the topic's cursor file, with the imported messages accounted for."""
    for path in [directory / CURSORS_FILE, *names_like(directory, f"{CURSORS_FILE}.*.[01]")]:
        shutil.copyfile(path, stage / path.name)
    cursors = CursorFile(shared, stage / CURSORS_FILE)
    try:
        for slot in cursors.load():
            if slot.index == 0:
                topic = msgspec.msgpack.decode(slot.state, type=TopicState)
                slot.position = placed.own_from
                slot.state, slot.brief = encode_state(msgspec.structs.replace(topic, follows=False))
            else:
                channel = msgspec.msgpack.decode(slot.state, type=ChannelState)
                slot.position, skips = _channel_range(slot.position, channel, placed)
                slot.state, slot.brief = encode_state(msgspec.structs.replace(channel, skips=skips))
            cursors.write(slot)
        cursors.make_durable()
    finally:
        cursors.close()


def _channel_range(position: int, channel: ChannelState, placed: Placed) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Finds where a channel stands and what it skips, so that of the import it gets its own and the
    topic's messages.
    """
    channels_end = max((high for _, high in placed.of_channel.values()), default=placed.first)
    low, high = placed.of_channel.get(channel.name, (channels_end, channels_end))
    skips = [*channel.skips, (placed.first, low), (high, channels_end)]
    skips = [(skip_low, skip_high) for skip_low, skip_high in skips if skip_low < skip_high]
    if position >= placed.log_end:
        position = placed.first
    if skips and skips[0][0] == position:
        position = skips.pop(0)[1]
    return position, tuple(skips)


def _split(base: str) -> tuple[str, str]:
    """Splits a queue's name into topic and channel; the channel is empty for the topic's own."""
    for separator in CHANNEL_SEPARATORS:
        topic, found, channel = base.partition(separator)
        if found:
            return topic, channel
    return base, ""


def _mark(path: Path) -> tuple[int, int] | None:
    """Reads what tells whether NSQ has used a file since: its size and its end. Times change when files are copied."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MARKED_BYTES))
            return size, xxh3_64_intdigest(file.read(MARKED_BYTES))
    except FileNotFoundError:
        return None


def _free_name(path: Path) -> Path:
    """Returns the path or, where a file from an earlier move is in the way, one beside it."""
    number = 1
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
