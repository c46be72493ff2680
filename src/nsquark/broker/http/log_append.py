"""Appends over HTTP in stages: parts are staged, then appended all at once and only once, or none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsquark.broker.http.arguments import NsqdArguments, disk_error, require_stored
from nsquark.broker.http.commits import settled
from nsquark.broker.topic import Topic
from nsquark.kernel.records import MPUB_TOO_BIG, measure_mpub
from nsquark.log.disk import DiskLimitReached
from nsquark.log.staging import (
    PARTS_MAX,
    STAGE_IDLE_S,
    AppendTooBig,
    Incomplete,
    Stage,
    StagedAppend,
    Staging,
    StagingFull,
    lease_spans,
    log_bytes_of,
    remove_leftovers,
    token_of,
    write_part,
)
from nsquark.web.arguments import Refusal
from nsquark.web.messages import Request
from nsquark.wire.record import COUNT_BYTES

if TYPE_CHECKING:
    from nsquark.broker.http.log_read import LogApi

TOKEN_CHARS_MAX = 128
CLEAN_EVERY_S = STAGE_IDLE_S / 10


class AppendApi:
    """Stages and appends. What is staged counts as used disk. A token is remembered from its append on; until then it
    names a stage.
    """

    def __init__(self, api: LogApi) -> None:
        self._nsqd = api.nsqd
        self._staging = Staging()
        self._running: dict[Stage, asyncio.Future[dict[str, Any]]] = {}
        self._cleaning = False
        remove_leftovers(self._nsqd.topics_path)

    # -- POST /log/stage ---------------------------------------------------------------------------------

    async def stage(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        topic = self._nsqd.topic(arguments.name("topic"))
        require_stored(topic)
        token = token_of(arguments.text("token", TOKEN_CHARS_MAX))
        number = arguments.number("part", 0, PARTS_MAX - 1)
        if token in topic.tokens:
            return {"duplicate": True}
        body = bytearray(request.body)
        count, log_bytes = self._measure(body)
        found = self._staging.find(topic, token)
        if found is not None and found.is_appending:
            raise Refusal(409, "APPENDING", reason="this token is being appended; ask /log/append for the outcome")
        stage = await self._add_part(topic, token, number, body, count, log_bytes, request.peer)
        return {"duplicate": False, "part": number, "count": count, "parts": len(stage.parts), "staged": stage.count}

    async def _add_part(
        self, topic: Topic, token: bytes, number: int, body: bytearray, count: int, log_bytes: int, peer: str
    ) -> Stage:
        assert topic.directory is not None
        self._require_disk(log_bytes)
        self._make_room(log_bytes)
        try:
            stage, part = self._staging.begin_part(topic, topic.directory, token, number, count, log_bytes, peer)
        except AppendTooBig as too_big:
            raise Refusal(413, "APPEND_TOO_BIG", reason=str(too_big)) from None
        except StagingFull as full:
            raise Refusal(503, "STAGING_FULL", reason=str(full)) from None
        self._nsqd.logs.disk_bytes += log_bytes
        error = await self._in_thread(lambda: write_part(part, body))
        useless = self._staging.end_part(stage, number, part, written=error is None)
        if useless is not None:
            self._delete([useless.path], useless.log_bytes)
        if topic.is_exiting:
            self._drop_topic(topic)
            raise Refusal(404, "TOPIC_NOT_FOUND")
        if error is not None:
            self._nsqd.logs.disk.failed(error)
            raise disk_error(error)
        if stage.is_dropped:
            raise Refusal(409, "ABORTED", reason="the stage was aborted meanwhile")
        self._clean_later()
        return stage

    def _measure(self, body: bytearray) -> tuple[int, int]:
        """Counts the messages of a part, and their bytes in the log."""
        options = self._nsqd.options
        count = int.from_bytes(body[:COUNT_BYTES], "big", signed=True)
        if len(body) < COUNT_BYTES or not 0 < count <= len(body):
            raise Refusal(413, "BAD_BODY", reason="the body is an int32 count, then an int32 size before each message")
        end, index, size, _ = measure_mpub(body, COUNT_BYTES, len(body), count, options.max_msg_size)
        if end == MPUB_TOO_BIG:
            raise Refusal(413, "MSG_TOO_BIG", reason=f"message {index} has {size} bytes")
        if end < 0:
            raise Refusal(413, "BAD_MESSAGE", reason=f"message {index} is empty or not whole")
        if end != len(body):
            raise Refusal(413, "BAD_BODY", reason=f"{len(body) - end} bytes follow the last of {count} messages")
        return count, log_bytes_of(end, count)

    def _require_disk(self, size: int) -> None:
        try:
            self._nsqd.logs.require_room(size)
        except DiskLimitReached as error:
            raise Refusal(503, "DISK_LIMIT", reason=str(error.strerror)) from None

    # -- POST /log/append --------------------------------------------------------------------------------

    async def append(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        topic = arguments.stored_topic()
        token = token_of(arguments.text("token", TOKEN_CHARS_MAX))
        parts = arguments.number("parts", 1, PARTS_MAX) if "parts" in arguments else None
        if token in topic.tokens:
            return {"duplicate": True}
        stage = self._staging.find(topic, token)
        if stage is None:
            raise Refusal(404, "NOT_STAGED", reason="nothing is staged under this token; stage all parts again")
        running = self._running.get(stage)
        if running is not None:
            await asyncio.wait([running])
            return await self.append(arguments, request)
        try:
            stage.check_complete(parts)
        except Incomplete as incomplete:
            raise Refusal(409, "INCOMPLETE", reason=str(incomplete)) from None
        running = self._running[stage] = asyncio.ensure_future(self._append(topic, stage))
        return await asyncio.shield(running)

    async def _append(self, topic: Topic, stage: Stage) -> dict[str, Any]:
        stage.is_appending = True
        try:
            self._require_disk(stage.log_bytes)
            count = stage.count
            now_ns = time.time_ns()
            work = self._prepare(stage, now_ns)
            commit = topic.log.append_threaded(work, now_ns)
            await settled(commit)
            if commit.error is not None:
                reason = f"{commit.error}; what was staged is still there"
                raise Refusal(404 if topic.is_exiting else 503, "APPEND_FAILED", reason=reason)
        finally:
            stage.is_appending = False
            del self._running[stage]
            if topic.is_exiting:
                self._drop_topic(topic)
        topic.tokens.add(stage.token)
        self._drop(topic, stage)
        return {"duplicate": False, "count": count, "first": work.first_seq, "next": work.next_seq}

    def _prepare(self, stage: Stage, timestamp_ns: int) -> StagedAppend:
        logs = self._nsqd.logs
        parts = [stage.parts[number] for number in sorted(stage.parts)]
        try:
            spans = lease_spans(logs.sequences, stage.count)
        except OSError as error:
            logs.disk.failed(error, stage.count)
            raise Refusal(503, "APPEND_FAILED", reason=f"{error}; what was staged is still there") from None
        return StagedAppend(logs.node_id, stage.token, parts, spans, timestamp_ns)

    # -- POST /log/abort ---------------------------------------------------------------------------------

    async def abort(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        topic = arguments.stored_topic()
        token = token_of(arguments.text("token", TOKEN_CHARS_MAX))
        stage = self._staging.find(topic, token)
        if stage is None:
            return {"dropped": False, "duplicate": token in topic.tokens}
        if stage.is_appending:
            raise Refusal(409, "APPENDING", reason="this token is being appended; ask /log/append for the outcome")
        self._drop(topic, stage)
        return {"dropped": True, "duplicate": False}

    # -- tokens and files --------------------------------------------------------------------------------

    def _drop(self, topic: Topic, stage: Stage) -> None:
        size = stage.log_bytes
        self._delete(self._staging.drop(topic, stage), size - stage.log_bytes)

    def _drop_topic(self, topic: Topic) -> None:
        """Forgets the stages of a topic, whose files are gone with its directory."""
        size = self._staging.staged_bytes
        self._staging.drop_topic(topic)
        self._nsqd.logs.disk_bytes -= size - self._staging.staged_bytes

    def _delete(self, paths: list[Path], size: int) -> None:
        self._nsqd.logs.disk_bytes -= size

        def work() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        self._nsqd.logs.run(work, lambda error: None)

    def _make_room(self, log_bytes: int) -> None:
        if not self._staging.has_room(log_bytes):
            before = self._staging.staged_bytes
            self._delete(self._staging.drop_slowest(log_bytes), before - self._staging.staged_bytes)

    def _clean_later(self) -> None:
        if not self._cleaning:
            self._cleaning = True
            self._nsqd.loop.call_later(CLEAN_EVERY_S, self._clean)

    def _clean(self) -> None:
        self._cleaning = False
        if self._nsqd.is_exiting:
            return
        for topic in self._staging.topics:
            if isinstance(topic, Topic) and topic.is_exiting:
                self._drop_topic(topic)
        size = self._staging.staged_bytes
        paths = self._staging.drop_idle()
        self._delete(paths, size - self._staging.staged_bytes)
        if len(self._staging):
            self._clean_later()

    async def _in_thread(self, work: Callable[[], None]) -> Exception | None:
        outcome: asyncio.Future[Exception | None] = self._nsqd.loop.create_future()
        self._nsqd.logs.run(work, outcome.set_result)
        return await outcome
