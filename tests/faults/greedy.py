"""Measures how long one greedy client holds up another: the loop's CPU time until another client's PUB is answered.

    .venv/bin/python -m tests.faults.greedy [--seconds 5] [--only nop,dpub] [--nsqd <path of a program>]

For each flood a process sends as fast as nsqd takes it and reads all answers. Meanwhile a well-behaved client publishes
and waits for its OK. What counts is the CPU time that nsqd's event loop spends in between, not the time on the clock:
so a busy machine changes little. The sum is made of the flood's own work, of the PUB and of what the loop does anyway.
"""

import argparse
import contextlib
import multiprocessing
import selectors
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # pytest knows where the harness is, a plain Python does not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.floods import ENDED, FLOODS, Answer
from harness import Nsqd
from harness.upgrades import make_certificate

ANSWER_TIMEOUT_S = 30.0
PAUSE_S = 0.002
SECONDS_DEFAULT = 5.0

# -- running ---------------------------------------------------------------------------------------------


def flood(nsqd: Nsqd, name: str) -> None:
    """Sends for ever; reads whatever comes. Opens another connection when one is closed."""
    kind = FLOODS[name]
    while True:
        with contextlib.suppress(OSError), kind.connect(nsqd) as connection:
            _send_and_read(connection, kind.make(), kind.answer or (lambda received: b""))


def _send_and_read(connection: socket.socket, data: Iterator[bytes], answer: Answer) -> None:
    connection.setblocking(False)
    watch = selectors.DefaultSelector()
    watch.register(connection, selectors.EVENT_READ)
    rest, answers = memoryview(b""), b""
    while True:
        if not rest and answers:
            rest, answers = memoryview(answers), b""
        elif not rest and (piece := next(data, None)) is not None:
            rest = memoryview(piece)
            if piece == ENDED:
                return
        watch.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0))
        for _, events in watch.select():
            try:
                if events & selectors.EVENT_READ:
                    received = connection.recv(1 << 20)
                    if not received:
                        return
                    answers += answer(received)
                if events & selectors.EVENT_WRITE:
                    rest = rest[connection.send(rest) :]
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
    """Returns the CPU time of nsqd's main thread, in which its event loop runs."""
    return int(Path(f"/proc/{nsqd.pid}/task/{nsqd.pid}/schedstat").read_text().split()[0]) / 1e6


def cpu_ms(nsqd: Nsqd) -> float:
    """Returns the CPU time of all of nsqd's threads."""
    tasks = Path(f"/proc/{nsqd.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def own_wait_ms() -> float:
    """Returns how long this thread was ready to run and had no CPU: the client did not wait for what nsqd did
    meanwhile.
    """
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


def measure(nsqd: Nsqd, name: str, seconds: float, samples_min: int = 5) -> list[float]:
    """Returns the loop's CPU time for each PUB of the other client, sorted."""
    taken: list[float] = []
    with nsqd.connect(timeout_s=ANSWER_TIMEOUT_S) as other:
        other.identify(heartbeat_interval=-1)
        other.publish("other", b"x")
        prepare = FLOODS[name].prepare
        if prepare is not None:
            prepare(nsqd)
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
        flags = ("--log-level=fatal", f"--tls-cert={certificate}", f"--tls-key={key}")
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
