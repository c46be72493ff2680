"""Measures what nsqadmin costs for a large cluster with two tabs open: `python -m benchmarks.admin`.

1,000 topics with 5 channels each on 3 nsqds, a tenth of them with traffic; one tab shows the overview, one the list of
topics.
"""

import argparse
import contextlib
import http.client
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.beside import beside
from nsquark.testing import Nsqd, Nsqlookupd
from nsquark.testing.daemons import Daemon

NSQDS = 3
BUSY_SHARE = 10
"""One topic in so many has traffic."""
MESSAGES_A_SECOND = 200
TIMED_REQUESTS = 20
TABS = ("/", "/topics")
REQUEST_TIMEOUT_S = 60.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Nsqadmin(Daemon):
    MODULE = "nsquark.admin.main"

    def __init__(self, *flags: str) -> None:
        super().__init__(*flags)
        self._ports = {"http": 0}

    def _addresses(self) -> list[str]:
        return ["--http-address=127.0.0.1:0"]

    def _is_listening(self) -> bool:
        return bool(self._listening("http"))


def main() -> None:
    options = _options()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsquark-admin-")))
        lookupd = stack.enter_context(Nsqlookupd())
        nsqds = [stack.enter_context(_nsqd(folder, number, lookupd)) for number in range(NSQDS)]
        with ThreadPoolExecutor(NSQDS) as threads:
            list(threads.map(lambda nsqd: _fill(nsqd, options.topics, options.channels), nsqds))
        admin = stack.enter_context(Nsqadmin(f"--lookupd-http-address={lookupd.http_address}"))
        stack.enter_context(beside(lambda ended: _publish(nsqds[0], options.topics, ended)))
        for page in TABS:
            stack.enter_context(_tab(admin, page))
        time.sleep(options.seconds / 3)
        began_s, cpu_s = time.monotonic(), _cpu_seconds(admin.pid)
        time.sleep(options.seconds)
        share = (_cpu_seconds(admin.pid) - cpu_s) / (time.monotonic() - began_s)
        print(f"{options.topics} topics x {options.channels} channels on {NSQDS} nsqds, tabs: {', '.join(TABS)}")
        print(f"CPU                       {share:8.1%} of a core")
        for path in ("/", "/topics", "/search.json?q=topic_99", "/api/topics"):
            first_s, whole_s, size = _request_times(admin, path)
            print(
                f"{path:25} {first_s * 1000:6.0f} ms to the first byte, {whole_s * 1000:.0f} ms whole, {size >> 10} KiB"
            )
        now_mb, peak_mb = _memory_mb(admin.pid)
        print(f"memory                    {now_mb:6.0f} MB, at most {peak_mb:.0f} MB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admin", description=__doc__)
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is watched")
    return parser.parse_args()


def _nsqd(folder: Path, number: int, lookupd: Nsqlookupd) -> Nsqd:
    path = folder / f"nsqd-{number}"
    path.mkdir()
    return Nsqd(path, f"--lookupd-tcp-address={lookupd.tcp_address}", "--max-bytes-per-file=1048576")


def _connect(daemon: Daemon) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*daemon.http, timeout=REQUEST_TIMEOUT_S)


def _post(connection: http.client.HTTPConnection, target: str, body: bytes = b"") -> None:
    connection.request("POST", target, body)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, target


def _fill(nsqd: Nsqd, topics: int, channels: int) -> None:
    connection = _connect(nsqd)
    for topic in range(topics):
        _post(connection, f"/topic/create?topic=topic_{topic}")
        for channel in range(channels):
            _post(connection, f"/channel/create?topic=topic_{topic}&channel=channel_{channel}")
        _post(connection, f"/pub?topic=topic_{topic}", b"the first")
    connection.close()


def _publish(nsqd: Nsqd, topics: int, ended: threading.Event) -> None:
    connection = _connect(nsqd)
    number = 0
    while not ended.wait(1 / MESSAGES_A_SECOND):
        number += BUSY_SHARE
        _post(connection, f"/pub?topic=topic_{number % topics}", b"a message")
    connection.close()


@contextlib.contextmanager
def _tab(admin: Nsqadmin, page: str) -> Iterator[None]:
    """Opens a tab as a browser does: the page, then its stream, read as it comes."""
    connection = _connect(admin)
    connection.request("GET", page)
    connection.getresponse().read()
    connection.request("GET", f"/events?page={page}")
    stream = connection.getresponse()
    thread = threading.Thread(target=_read_all, args=(stream,), daemon=True)
    thread.start()
    yield
    connection.close()


def _read_all(stream: http.client.HTTPResponse) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
        while stream.read1(65536):
            pass


def _request_times(admin: Nsqadmin, path: str) -> tuple[float, float, int]:
    """Returns seconds to the first byte and to the last, the middle ones of some requests, and bytes."""
    times = []
    size = 0
    connection = _connect(admin)
    for _ in range(TIMED_REQUESTS):
        began_s = time.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read(1)
        first_s = time.monotonic() - began_s
        size = len(answer.read()) + 1
        times.append((first_s, time.monotonic() - began_s))
    connection.close()
    return (*sorted(times)[TIMED_REQUESTS // 2], size)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _memory_mb(pid: int) -> tuple[float, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


if __name__ == "__main__":
    main()
