"""How long one greedy client holds up another: the loop's CPU time until another client's PUB is answered.

    .venv/bin/python -m tests.faults.greedy [--seconds 5] [--only nop,dpub] [--nsqd <path of a program>]

For each flood a process sends as fast as nsqd takes it and reads all answers. Meanwhile a well-behaved client publishes
and waits for its OK. What counts is the CPU time that nsqd's event loop spends in between, not the time on the clock:
so a busy machine changes little. The sum is made of the flood's own work, of the PUB and of what the loop does anyway.
"""

import argparse
import contextlib
import json
import multiprocessing
import selectors
import socket
import ssl
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":  # pytest knows where the harness is, a plain Python does not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Nsqd, body_of, mpub_body
from harness.upgrades import SNAPPY_STREAM_START, make_certificate, masked_crc32c, trusting_anything

ANSWER_TIMEOUT_S = 30.0
PAUSE_S = 0.002
SECONDS_DEFAULT = 5.0
SEND_BYTES = 256 << 10
UNKNOWN_ID = b"0123456789abcdef"
TOPICS = 300
LINES = 2_500_000
IDENTIFY_BYTES = 5_000_000
KEYS = 350_000

Connect = Callable[[Nsqd], socket.socket]
"""Opens a flood's connection, up to where the flood begins."""


# -- floods --------------------------------------------------------------------------------------------------


def _plain(nsqd: Nsqd) -> socket.socket:
    wire = nsqd.connect()
    wire.identify(heartbeat_interval=-1)
    return wire.socket


def _subscribed(nsqd: Nsqd) -> socket.socket:
    return nsqd.connect().subscribe("flood", rdy=1, heartbeat_interval=60_000).socket


def _http(nsqd: Nsqd) -> socket.socket:
    return socket.create_connection(nsqd.http)


def _upgraded(**fields: object) -> Connect:
    def connect(nsqd: Nsqd) -> socket.socket:
        wire = nsqd.connect()
        wire.identify(heartbeat_interval=-1, **fields)
        if fields.get("tls_v1"):
            wire.socket = trusting_anything().wrap_socket(wire.socket)
        wire.take_pending() or wire.receive()  # OK, in whatever form it comes
        return wire.socket

    return connect


def _https(nsqd: Nsqd) -> socket.socket:
    return trusting_anything().wrap_socket(socket.create_connection(nsqd.https))


def _forever(data: bytes) -> Iterator[bytes]:
    while True:
        yield data


def _repeated(piece: bytes, size: int = SEND_BYTES) -> Iterator[bytes]:
    return _forever(piece * (size // len(piece) + 1))


def _empty_snappy_chunks() -> Iterator[bytes]:
    yield SNAPPY_STREAM_START
    yield from _repeated(b"\x01\x04\0\0" + struct.pack("<I", masked_crc32c(b"")))


def _skipped_snappy_chunks() -> Iterator[bytes]:
    yield SNAPPY_STREAM_START
    yield from _repeated(b"\xfe\0\0\0")


def _deflated_nops() -> Iterator[bytes]:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    while True:
        yield deflate.compress(b"NOP\n" * 5_000_000) + deflate.flush(zlib.Z_SYNC_FLUSH)


def _identify_of_many_keys() -> Iterator[bytes]:
    fields = json.dumps({f"k{number}": 0 for number in range(KEYS)})
    return _forever(b"IDENTIFY\n" + body_of(fields.encode()))


def _identify_of_many_lists() -> Iterator[bytes]:
    body = b'{"x":[' + b"[]," * (IDENTIFY_BYTES // 3) + b"[]]}"
    return _forever(b"IDENTIFY\n" + body_of(body))


def _identify_of_one_string() -> Iterator[bytes]:
    return _forever(b"IDENTIFY\n" + body_of(b'{"user_agent":"' + b"x" * IDENTIFY_BYTES + b'"}'))


def _lines() -> Iterator[bytes]:
    body = b"x\n" * LINES
    return _forever(b"POST /mpub?topic=lines HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def _tiny_chunks() -> Iterator[bytes]:
    head = b"POST /mpub?topic=chunks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return _forever(head + b"2\r\nx\n\r\n" * 200_000 + b"0\r\n\r\n")


FLOODS: dict[str, tuple[Connect, Callable[[], Iterator[bytes]]]] = {
    "NOP": (_plain, lambda: _repeated(b"NOP\n")),
    "pipelined 404s": (_http, lambda: _repeated(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")),
    "empty snappy chunks": (_upgraded(snappy=True), _empty_snappy_chunks),
    "skipped snappy chunks": (_upgraded(snappy=True), _skipped_snappy_chunks),
    "IDENTIFY, 5 MB of keys": (_plain, _identify_of_many_keys),
    "IDENTIFY, 5 MB of lists": (_plain, _identify_of_many_lists),
    "IDENTIFY, 5 MB string": (_plain, _identify_of_one_string),
    "/mpub of 2.5M lines": (_http, _lines),
    "MPUB of 1M messages": (_plain, lambda: _forever(b"MPUB many\n" + mpub_body([b"x"] * 1_000_000))),
    "MPUB of 65,536 messages": (_plain, lambda: _forever(b"MPUB many\n" + mpub_body([b"x"] * 65_536))),
    "PUB to 300 topics": (
        _plain,
        lambda: _repeated(b"".join(b"PUB t%d\n" % number + body_of(b"x") for number in range(TOPICS))),
    ),
    "PUB to one topic": (_plain, lambda: _repeated(b"PUB t\n" + body_of(b"x"))),
    "DPUB": (_plain, lambda: _repeated(b"DPUB later 600000\n" + body_of(b"x"))),
    "TOUCH of unknown": (_subscribed, lambda: _repeated(b"TOUCH " + UNKNOWN_ID + b"\n")),
    "FIN of unknown": (_subscribed, lambda: _repeated(b"FIN " + UNKNOWN_ID + b"\n")),
    "RDY": (_subscribed, lambda: _repeated(b"RDY 1\n")),
    "deflated NOPs": (_upgraded(deflate=True), _deflated_nops),
    "TLS, NOPs": (_upgraded(tls_v1=True), lambda: _repeated(b"NOP\n")),
    "TLS, a byte a record": (_upgraded(tls_v1=True), lambda: (b"NOP\n"[at : at + 1] for at in _cycle(4))),
    "HTTPS, pipelined 404s": (_https, lambda: _repeated(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")),
    "/mpub in 2-byte chunks": (_http, _tiny_chunks),
}


def _cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


# -- running -------------------------------------------------------------------------------------------------


def flood(nsqd: Nsqd, name: str) -> None:
    """Sends for ever; reads whatever comes. Opens another connection when one is closed."""
    connect, make = FLOODS[name]
    while True:
        with contextlib.suppress(OSError), connect(nsqd) as connection:
            _send_and_read(connection, make())


def _send_and_read(connection: socket.socket, data: Iterator[bytes]) -> None:
    connection.setblocking(False)
    watch = selectors.DefaultSelector()
    watch.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
    rest = memoryview(next(data))
    while True:
        for _, events in watch.select():
            try:
                if events & selectors.EVENT_READ and not connection.recv(1 << 20):
                    return
                if events & selectors.EVENT_WRITE:
                    rest = rest[connection.send(rest) :] or memoryview(next(data))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue


@contextlib.contextmanager
def flooding(nsqd: Nsqd, name: str) -> Iterator[None]:
    process = multiprocessing.get_context("fork").Process(target=flood, args=(nsqd, name), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def loop_cpu_ms(nsqd: Nsqd) -> float:
    """CPU time of nsqd's main thread, in which its event loop runs."""
    return int(Path(f"/proc/{nsqd.pid}/task/{nsqd.pid}/schedstat").read_text().split()[0]) / 1e6


def own_wait_ms() -> float:
    """How long this thread was ready to run and had no CPU: what nsqd did meanwhile, the client did not wait for."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


def measure(nsqd: Nsqd, name: str, seconds: float, samples_min: int = 5) -> list[float]:
    """The loop's CPU time for each PUB of the other client, sorted."""
    taken: list[float] = []
    with nsqd.connect(timeout_s=ANSWER_TIMEOUT_S) as other:
        other.identify(heartbeat_interval=-1)
        other.publish("other", b"x")
        started_ms = loop_cpu_ms(nsqd)
        with flooding(nsqd, name):
            _wait_for_the_flood(nsqd, started_ms)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or len(taken) < samples_min:
                time.sleep(PAUSE_S)
                before, kept_waiting_ms = loop_cpu_ms(nsqd), own_wait_ms()
                try:
                    other.publish("other", b"x")
                except TimeoutError:  # no answer at all: what it took so far has to do
                    deadline, samples_min = 0.0, 0
                kept_waiting_ms = own_wait_ms() - kept_waiting_ms
                taken.append(max(0.0, loop_cpu_ms(nsqd) - before - kept_waiting_ms))
    return sorted(taken)


def _wait_for_the_flood(nsqd: Nsqd, started_ms: float) -> None:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while loop_cpu_ms(nsqd) - started_ms < 20.0 and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def quantile(taken: list[float], share: float) -> float:
    return taken[min(len(taken) - 1, int(len(taken) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS_DEFAULT)
    parser.add_argument("--only", default="", help="parts of names of floods, with commas between")
    parser.add_argument("--nsqd", default=None, help="another program to measure")
    options = parser.parse_args()
    wanted = [word.strip() for word in options.only.split(",")]
    print("| flood | PUBs | p50 ms | p99 ms | max ms |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        certificate, key = make_certificate(Path(directory))
        flags = ("--log-level=fatal", f"--tls-cert={certificate}", f"--tls-key={key}", "--https-address=127.0.0.1:0")
        for name in FLOODS:
            if not any(word in name for word in wanted):
                continue
            data_path = Path(directory) / str(len(list(Path(directory).iterdir())))
            data_path.mkdir()
            with Nsqd(data_path, "--log-level=info", *flags[1:], program=options.nsqd) as nsqd:
                nsqd.request("PUT", "/config/log_level", b"fatal")
                taken = measure(nsqd, name, options.seconds)
            figures = " | ".join(f"{quantile(taken, share):.1f}" for share in (0.5, 0.99, 1.0))
            print(f"| {name} | {len(taken)} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
