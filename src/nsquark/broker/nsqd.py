"""This is nsqd itself: it owns topics, clients, clocks and listeners. The story of a message starts in
tcp/session.py.
"""

import asyncio
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nsquark.base.addresses import Listener, listen_anywhere
from nsquark.base.clock import wall_ms
from nsquark.base.hosts import HOSTNAME
from nsquark.base.logs import Logger
from nsquark.base.version import NSQ_VERSION
from nsquark.broker.auth import AuthServers
from nsquark.broker.data_path import DOOMED_PREFIX, METADATA_FILE, DataPath, ListedTopic, encode_metadata
from nsquark.broker.http.api import NsqdApi
from nsquark.broker.lookup_peers import LookupPeers
from nsquark.broker.observe.loop_delay import LoopDelay
from nsquark.broker.observe.statsd import StatsdPusher
from nsquark.broker.options import NsqdOptions, TlsRequired
from nsquark.broker.runs import Run, begin_run
from nsquark.broker.steady_clock import SteadyClock
from nsquark.broker.takeover import take_over
from nsquark.broker.tcp.session import LINE_BYTES_MAX, Session
from nsquark.broker.tcp.tls import TlsRequiredRouter, server_context, tls_warnings
from nsquark.broker.topic import DIRECTORY_PREFIX, Topic
from nsquark.broker.topology import is_shown
from nsquark.broker.upkeep import OPEN_AGAIN_S, Upkeep
from nsquark.kernel.turn import Turn
from nsquark.log.cache import ChunkCache
from nsquark.log.deleted_topics import DeletedTopics
from nsquark.log.files import write_atomically
from nsquark.log.segment import Segment
from nsquark.log.sequences import Sequences
from nsquark.log.services import LogSettings, LogShared
from nsquark.web.browsers import BrowserGuard
from nsquark.web.descriptors import Descriptors
from nsquark.web.server import HttpLimits, HttpServer, Router
from nsquark.wire.batch_format import UnknownVersion
from nsquark.wire.names import is_ephemeral, is_valid_name

READ_BUFFER_BYTES = 256 << 10
METADATA_DELAY_S = 0.05
DESCRIPTORS_SAID_EVERY_S = 10.0


class NsqdStartError(Exception):
    """Says that nsqd cannot start; the text says why."""


class Nsqd:
    """Is one broker. All of it but the log's threads runs in one event loop."""

    def __init__(self, options: NsqdOptions, logger: Logger, data: DataPath, router: Router | None = None) -> None:
        """Makes an nsqd that is not started; `router` is an empty one, which may refuse routes that are added to it."""
        self.options = options
        self.logger = logger
        self.data = data
        self.topics_path: Path = data.topics
        self.loop = asyncio.get_running_loop()
        # On a single core, a client could not send while the loop polls for it.
        poll_ns = options.busy_poll if len(os.sched_getaffinity(0)) > 1 else 0
        self.turn = Turn(self.loop.call_soon, logger.trace, poll_ns)
        self.loop_delay = LoopDelay(self.loop)
        self.node = data.prepare(logger.warning)
        self.start_time = int(wall_ms() // 1000)
        self.clock = SteadyClock(data.own / "clock")
        self.runs: list[Run] = []
        """Has the starts on this data path, this one last."""
        self.deleted_topics = DeletedTopics(data.own / "deleted")
        self.topics: dict[str, Topic] = {}
        self.listed_topics: dict[str, ListedTopic] = {}
        """Has the topics that nsqd.dat named, while they are loaded: to make again what their own files have lost."""
        self.descriptors = Descriptors()
        self._descriptors_said_s = float("-inf")
        self.sessions: set[Session] = set()
        self.sessions_admitted = 0
        self.producers: dict[Session, None] = {}
        self.unopened_topics: dict[str, ListedTopic] = {}
        """Has the topics whose files could not be opened at the start; nsqd.dat goes on naming them."""
        self.deferring: dict[Topic, None] = {}
        """Has the topics with messages that wait for their time."""
        self.read_buffer = bytearray(READ_BUFFER_BYTES)
        self.read_view = memoryview(self.read_buffer)
        self.partial_bytes_max = LINE_BYTES_MAX + 8 + max(options.max_body_size, options.max_msg_size)
        self.is_exiting = False
        self.may_write_metadata = False
        """Tells whether all is loaded: until then nsqd.dat may be NSQ's, with what is not taken over yet."""
        self.tcp_port = 0
        self.http_port = 0
        self.https_port = 0
        """A port is 0 while nothing listens, -1 with a unix socket."""
        self.tls_context = server_context(options)
        self.auth = AuthServers(options, logger) if options.auth_http_address else None
        self.logs = self._shared_by_logs()
        self.upkeep = Upkeep(self)
        self.logs.make_room = self.upkeep.make_room
        self.logs.syncer.on_behind = self._choose_ways
        self.turn.jobs = self.logs.running
        self.lookup = self._lookup_peers()
        router, limits = router or Router(), HttpLimits(connections=options.max_connections)
        NsqdApi(self).add_routes(router)
        browsers = BrowserGuard("nsqd", (options.broadcast_address, *options.http_allowed_hosts))
        self.https = HttpServer(router, browsers, limits, logger)
        refused = options.tls_required is TlsRequired.YES
        self.http = HttpServer(TlsRequiredRouter(self) if refused else router, browsers, limits, logger)
        self._tcp_listener: Listener | None = None
        self._tcp: asyncio.AbstractServer | None = None
        self._metadata_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _shared_by_logs(self) -> LogShared:
        options = self.options
        settings = LogSettings(
            options.max_bytes_per_file,
            options.sync_every,
            int(options.retention_time),
            options.retention_bytes,
            options.max_disk_bytes,
            options.sync_timeout.seconds,
        )
        cache, loop = ChunkCache(options.cache_bytes), self.loop
        post, later = loop.call_soon_threadsafe, loop.call_later
        return LogShared(settings, options.node_id, cache, post, later, self.logger.warning)

    def _lookup_peers(self) -> LookupPeers:
        options = self.options
        return LookupPeers(
            self.logger,
            self._identity,
            self._registrations,
            connect_timeout=options.http_client_connect_timeout.seconds,
            request_timeout=options.http_client_request_timeout.seconds,
            max_body_bytes=options.max_body_size,
        )

    # -- start and stop ----------------------------------------------------------------------------------

    async def start(self) -> None:
        self.load()
        for warning in tls_warnings(self.options):
            self.logger.warning(warning)
        await self._listen()
        self.write_metadata(sync=True)  # an empty nsqd.dat, left by a power cut, would make the next start fail
        self.lookup.start(self.options.lookupd_tcp_address)
        self.spawn(self.upkeep.run())
        self.loop_delay.start()
        if self.options.statsd_address:
            self.spawn(StatsdPusher(self).run())

    def load(self) -> None:
        """Opens every topic found, then lets sequence numbers start above all that is there."""
        self.listed_topics = self.data.listed_topics()
        for directory in sorted(self.topics_path.iterdir()):
            if directory.name.startswith(DOOMED_PREFIX):
                shutil.rmtree(directory, ignore_errors=True)
                continue
            name = directory.name.removeprefix(DIRECTORY_PREFIX)
            if directory.name.startswith(DIRECTORY_PREFIX) and is_valid_name(name):
                self.load_topic(name)
        highest = max((topic.highest_named for topic in self.topics.values()), default=0)
        try:
            self.logs.sequences = Sequences(self.data.own / "sequence", highest + 1, self.logs.report)
            self.runs = begin_run(self.data.own / "runs", self.logs.sequences.next, self.logs.report)
        except OSError as error:
            raise NsqdStartError(f"{error}. If that lasts, move this file away: it is made anew") from None
        self.listed_topics = self.unopened_topics
        take_over(self)

    def load_topic(self, name: str, segments: Callable[[], list[Segment]] | None = None) -> None:
        """Opens a topic. One that cannot be opened is left alone; the others are served, and it is tried again.

        `segments` returns its segments, if a thread has opened them, or raises what that met.
        """
        try:
            topic = self.topics[name] = self._opened(name, segments() if segments is not None else None)
        except UnknownVersion as error:
            raise NsqdStartError(str(error)) from None
        except Exception as error:  # whatever is wrong with one must not stop the others
            self.unopened_topics[name] = self.listed_topics.get(name) or ListedTopic(name)
            remedy = "; if that lasts, move this file away: what is in it is lost then, and the rest is served"
            self.logger.error(
                f"TOPIC({name}): cannot be opened, it is not served and tried again every {OPEN_AGAIN_S:.0f} s -"
                f" {type(error).__name__}: {error}{remedy if isinstance(error, OSError) and error.filename else ''}"
            )
            return
        self.deferring[topic] = None
        self.unopened_topics.pop(name, None)

    def _opened(self, name: str, segments: list[Segment] | None = None) -> Topic:
        """Opens a topic or makes it; if that fails, nothing of it counts in --max-disk-bytes."""
        counted = self.logs.disk_bytes
        try:
            return Topic(self, name, segments)
        except Exception:
            self.logs.disk_bytes = counted
            raise

    async def _listen(self) -> None:
        options = self.options
        try:
            await self.listen_for_clients(address := options.tcp_address)
            if self.tls_context is not None and (address := options.https_address):
                listener = listen_anywhere(address)
                await self.https.serve(listener, self.tls_context)
                self.https_port = listener.port
                self.logger.info(f"HTTPS: listening on {listener.shown}")
            if address := options.http_address:
                listener = listen_anywhere(address)
                await self.http.serve(listener)
                self.http_port = listener.port
                self.logger.info(f"HTTP: listening on {listener.shown}")
        except (OSError, ValueError) as error:
            raise NsqdStartError(f"listen ({address}) failed - {error}") from None

    async def listen_for_clients(self, address: str) -> None:
        listener = self._tcp_listener = listen_anywhere(address)
        self._tcp = await listener.serve(lambda: Session(self))
        self.tcp_port = listener.port
        self.logger.info(f"TCP: listening on {listener.shown}")

    async def stop(self) -> None:
        """Answers what was received, closes all connections, and leaves nothing unsaved."""
        self.is_exiting = True
        self.loop_delay.stop()
        if self._tcp is not None and self._tcp_listener is not None:
            self._tcp.close()
            self._tcp_listener.remove_file()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self.http.close(), self.https.close())
        await self.lookup.stop()
        self.turn.run()
        for session in list(self.sessions):
            session.shut_down()
        await asyncio.sleep(0)
        self.write_metadata()
        self.logger.info("NSQ: closing topics")
        self.upkeep.guard(self.logs.flush)  # all at once takes less time than one topic after another
        for topic in list(self.topics.values()):
            try:
                topic.close()
            except Exception as error:  # the next start finds what is written, as after a crash
                self.logger.error(f"TOPIC({topic.name}): failed to close - {error}")
        if hasattr(self.logs, "sequences"):
            self.logs.close()
        self.data.unlock()
        self.logger.info("NSQ: bye")

    # -- clients -----------------------------------------------------------------------------------------

    def admit(self, session: Session, transport: asyncio.BaseTransport) -> bool:
        limit = self.options.max_connections
        if self.is_exiting or (limit and len(self.sessions) >= limit):
            return False
        if not self.descriptors.admits(transport):
            self._say_descriptors_are_short()
            return False
        self.sessions.add(session)
        self.sessions_admitted += 1
        return True

    def _say_descriptors_are_short(self) -> None:
        now = self.loop.time()
        if now - self._descriptors_said_s > DESCRIPTORS_SAID_EVERY_S:
            self._descriptors_said_s = now
            self.logger.warning(
                f"TCP: connections are refused, {self.descriptors.for_connections} descriptors are in use: raise the"
                " limit of open files (LimitNOFILE, ulimit -n)"
            )

    def forget(self, session: Session) -> None:
        self.sessions.discard(session)
        self.producers.pop(session, None)

    # -- topics ------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Returns the topic of this name, made if it is not there; raises OSError if its files cannot be used."""
        found = self.topics.get(name)
        if found is not None:
            return found
        self.require_openable(name)
        try:
            topic = self.topics[name] = self._opened(name)
        except Exception as error:  # such as a file that a later version wrote
            self.logs.disk.failed(error)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"its files cannot be used: {type(error).__name__}: {error}") from error
        self.logger.info(f"TOPIC({name}): created")
        self.lookup.register(name, None)
        self.metadata_changed(topic.ephemeral)
        if self.lookup.addresses:
            self.spawn(self._bring_channels(topic))  # before what may fail: it also ends the waiting
            topic.await_channels()
        return topic

    def require_openable(self, name: str) -> None:
        """Raises OSError if a topic is there, but its files could not be opened. They are not tried again for each who
        asks: that may take long, and all others would wait.
        """
        if name in self.unopened_topics:
            raise OSError("the topic is there, but its files could not be opened; its nsqd logs why, and tries again")

    async def _bring_channels(self, topic: Topic) -> None:
        """Brings the channels that the cluster knows to a new topic, so that none of them misses a message."""
        names: set[str] = set()
        try:
            names = await self.lookup.channels_of(topic.name)
        finally:
            if not topic.is_exiting:
                try:
                    topic.bring_channels(sorted(names))
                except OSError as error:
                    self.logger.warning(f"TOPIC({topic.name}): failed to create the channels {sorted(names)} - {error}")

    def delete_topic(self, name: str) -> None:
        topic = self.topics.pop(name)
        topic.delete()
        self.deferring.pop(topic, None)
        self.logger.info(f"TOPIC({name}): deleted")
        self.lookup.unregister(name, None)
        self.metadata_changed(topic.ephemeral)

    def channel_changed(self, topic: Topic, name: str, *, created: bool) -> None:
        if created:
            self.logger.info(f"TOPIC({topic.name}): new channel({name})")
            self.lookup.register(topic.name, name)
        else:
            self.logger.info(f"TOPIC({topic.name}): deleting channel({name})")
            self.lookup.unregister(topic.name, name)
        self.metadata_changed(topic.ephemeral or is_ephemeral(name))

    def doomed_path(self, directory: Path) -> Path:
        return directory.with_name(f"{DOOMED_PREFIX}{uuid.uuid4().hex}")

    def _choose_ways(self) -> None:
        """Lets an OK wait for the sync of its message while the disk is behind: publishers go no
        faster than it does.
        """
        for topic in self.topics.values():
            if topic.log.segments is not None:
                topic.log.choose_way()

    # -- metadata ----------------------------------------------------------------------------------------

    def write_metadata(self, *, sync: bool = False) -> None:
        """Writes nsqd.dat, for tools that read it and for going back to NSQ; our own state is in the topics' files."""
        if not self.may_write_metadata:
            return
        path = self.data.path / METADATA_FILE
        self.logger.info(f"NSQ: persisting topic/channel metadata to {path}")
        topics = [
            ListedTopic(topic.name, topic.paused, topic.listed_channels)
            for topic in self.topics.values()
            if not topic.ephemeral
        ]
        topics += (listed for name, listed in self.unopened_topics.items() if name not in self.topics)
        try:
            write_atomically(path, encode_metadata(topics), sync=sync)
        except OSError as error:
            self.logger.error(f"failed to persist metadata - {error}")

    def metadata_changed(self, ephemeral: bool) -> None:
        if not ephemeral and self._metadata_timer is None and not self.is_exiting:
            self._metadata_timer = self.loop.call_later(METADATA_DELAY_S, self._write_metadata_later)

    def _write_metadata_later(self) -> None:
        self._metadata_timer = None
        self.write_metadata()

    # -- nsqlookupd --------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, object]:
        identity: dict[str, object] = {
            "version": NSQ_VERSION,
            "tcp_port": self.options.broadcast_tcp_port or self.tcp_port,
            "http_port": self.options.broadcast_http_port or self.http_port,
            "hostname": HOSTNAME,
            "broadcast_address": self.options.broadcast_address,
        }
        if is_shown(self.options):
            identity["topology_zone"] = self.options.topology_zone
            identity["topology_region"] = self.options.topology_region
        return identity

    def _registrations(self) -> list[tuple[str, str | None]]:
        registrations: list[tuple[str, str | None]] = []
        for topic in self.topics.values():
            registrations += [(topic.name, name) for name in topic.channels] or [(topic.name, None)]
        return registrations

    # -- health ------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        error = self.logs.disk.error
        return "OK" if error is None else f"NOK - {error}"

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
