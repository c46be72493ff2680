"""Knows the nsqds of a streaming query: its driver finds them in the background, and asks for heads when needed."""

import functools
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Unreachable
from nsquark.spark.nsqd_http import Finder, RangeNsqd
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.offsets import Key
from nsquark.wire.names import is_ephemeral

log = library_log("nsquark.spark")

FIND_INTERVAL_S = 2.0
"""A new nsqd, or one that is back, is noticed after about this time."""
ASKED_EACH_POLL_MAX = 4
"""Up to this many nsqds are asked at each of Spark's polls, which come every 15 ms when there is nothing to do. With
more nsqds, asking takes at most HEADS_TIME_FRACTION of the driver's time.
"""
HEADS_TIME_FRACTION = 0.1
SINGLE_TOPICS_MAX = 4
"""Up to this many topics are asked for one by one; for more, nsqd is asked for all that it has."""
WAIT_INTERVAL_S = 0.2
FOREIGN_SKIPPED = "%s is an nsqd without a log API; what it has is not read (onForeignNsqd=skip)"


class Head(NamedTuple):
    """Says where the log of a key begins and ends, and of which incarnation of the topic it is."""

    first: int
    next: int
    topic_id: str = ""


class Heads(dict[Key, Head]):
    """Maps each key to its head. `nsqds` has the ids of the nsqds that answered, even if they have no such topics."""

    def __init__(self) -> None:
        super().__init__()
        self.nsqds: set[str] = set()


class Cluster:
    """Asks for heads in the foreground, since a poll after a publish must see the message (`processAllAvailable`). What
    could hang is done in the background: finding nsqds, and trying those that do not answer.
    """

    def __init__(self, options: SourceOptions, in_background: Callable[[], None] = lambda: None):
        self._options = options
        self._in_background = in_background
        self._lock = threading.Lock()
        self._nsqds: dict[str, RangeNsqd] = {}
        self._silent: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._replaced: dict[str, RangeNsqd] = {}
        self._foreign: set[str] = set()
        self._error: NsqdError | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._heads = Heads()
        self._heads_until = 0.0

    def remember(self, addresses: Mapping[str, str]) -> None:
        """Remembers the addresses of nsqds that the query has read. They are looked for there too when nsqlookupds
        forget them, which happens as soon as a connection breaks.
        """
        if self._options.lookupd:
            self._known = {
                nsqd_id: address for nsqd_id, address in addresses.items() if nsqd_id not in self._options.lost_nsqds
            }

    # -- what there is -----------------------------------------------------------------------------------

    def nsqds(self) -> dict[str, RangeNsqd]:
        """Returns the nsqds that answer, by id."""
        if self._thread is None:
            self._find()
            if self._silent and not self._nsqds:
                raise Unreachable("no nsqd answers: " + "; ".join(self._silent.values()))
            self._thread = threading.Thread(target=self._find_again, name="nsquark-find", daemon=True)
            self._thread.start()
        with self._lock:
            if self._error is not None:
                raise self._error
            return dict(self._nsqds)

    @property
    def silent(self) -> list[str]:
        """Returns why addresses do not answer, with a text for each."""
        with self._lock:
            return list(self._silent.values())

    def replaced_by(self, nsqd_id: str) -> RangeNsqd | None:
        """Returns the nsqd that answers now where the nsqd with this id was, if another does."""
        with self._lock:
            return self._replaced.get(nsqd_id)

    def heads(self, *, fresh: bool = False) -> Heads:
        if fresh or time.monotonic() >= self._heads_until:
            began = time.monotonic()
            self._heads = Heads()
            for nsqd in self.nsqds().values():
                try:
                    self._heads.update(self._heads_of(nsqd))
                    self._heads.nsqds.add(nsqd.id)
                except Unreachable as error:
                    self.mark_silent(error)
            ended = time.monotonic()
            is_small = len(self._nsqds) <= ASKED_EACH_POLL_MAX
            self._heads_until = ended if is_small else ended + (ended - began) / HEADS_TIME_FRACTION
        return self._heads

    def _heads_of(self, nsqd: RangeNsqd) -> dict[Key, Head]:
        options = self._options
        if options.topic_pattern is None and len(options.topics) <= SINGLE_TOPICS_MAX:
            found = [head for head in map(nsqd.head, options.topics) if head is not None]
        else:
            found = nsqd.topics(functools.partial(is_wanted, options))
        return {Key(head.topic, nsqd.id): Head(head.first, head.next, head.id) for head in found}

    def wait_for(self, ids: Collection[str]) -> dict[str, RangeNsqd]:
        """Returns the nsqds once all of `ids` answer; raises after readTimeout. A batch that was begun needs them."""
        deadline = time.monotonic() + self._options.read_timeout_s
        while True:
            nsqds = self.nsqds()
            missing = sorted(set(ids) - nsqds.keys())
            if not missing:
                return nsqds
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"nsqd {', '.join(missing)} is needed to go on and did not answer for "
                    f"{self._options.read_timeout_s:g} s: start it again, or, if it is gone for good, give it up with "
                    f"lostNsqds={','.join(missing)}"
                )
            time.sleep(WAIT_INTERVAL_S)

    # -- what does not answer ----------------------------------------------------------------------------

    def mark_silent(self, error: Unreachable) -> bool:
        """Leaves an nsqd out until the background thread finds that it answers again; tells whether there was one."""
        with self._lock:
            silent = [nsqd for nsqd in self._nsqds.values() if nsqd.address == error.address]
            for nsqd in silent:
                nsqd.close()
                del self._nsqds[nsqd.id]
                self._silent[nsqd.address] = str(error)
                log.warning("nsqd %s is left out for now: %s", nsqd.id, error)
            return bool(silent)

    def _find(self) -> None:
        finder = Finder(self._options)
        found = finder.find(self._known)
        with self._lock:
            self._error = None
            for nsqd_id, nsqd in found.items():
                known = self._nsqds.get(nsqd_id)
                if known is None or known.address != nsqd.address:
                    self._nsqds[nsqd_id] = nsqd
            for address in finder.unreachable.keys() - self._silent.keys():
                log.warning("%s; the query goes on without it", finder.unreachable[address])
            for address in set(finder.foreign) - self._foreign:
                log.warning(FOREIGN_SKIPPED, address)
            self._foreign |= set(finder.foreign)
            self._silent = finder.unreachable
            self._replaced = finder.replaced

    def _find_again(self) -> None:
        said = ""
        while not self._stopped.wait(FIND_INTERVAL_S):
            try:
                self._find()
                self._in_background()
                said = ""
            except Unreachable as error:
                if said != str(error):  # the same error is logged once
                    said = str(error)
                    log.warning("%s", error)
            except NsqdError as error:
                with self._lock:
                    self._error = error

    def stop(self) -> None:
        self._stopped.set()


def is_wanted(options: SourceOptions, topic: str) -> bool:
    if options.topic_pattern is None:
        return topic in options.topics
    return not is_ephemeral(topic) and re.fullmatch(options.topic_pattern, topic) is not None
