"""Checks the blocking client: from any thread, beside a running event loop, and on both sides of a fork."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client.pool_rig import address_of, messages_of
from harness import FaultProxy, Nsqd, eventually
from harness.interrupts import is_interrupted_at
from nsquark import sync
from nsquark.client.errors import (
    Closed,
    ConfigError,
    InvalidName,
    NotConnected,
    NsqError,
    TooMuchOutstanding,
    WrongHandler,
)
from nsquark.client.packing import mpub_body

WAIT_S = 30.0
GIVES_UP_SOON: dict[str, Any] = {
    "max_attempts": 1,
    "default_requeue_delay": "10ms",
    "backoff_multiplier": "10ms",
}


@pytest.fixture
def producer(nsqd: Nsqd) -> Iterator[sync.Producer]:
    with sync.Producer(address_of(nsqd)) as running:
        yield running


def _bodies(consumer: sync.Consumer, count: int) -> set[bytes]:
    bodies: set[bytes] = set()
    for _ in range(count):
        message = consumer.get(WAIT_S)
        assert message is not None, f"only {bodies}"
        message.finish()
        bodies.add(message.body)
    return bodies


# -- publishing ------------------------------------------------------------------------------------------


def test_every_way_of_publishing_arrives(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    assert not producer.is_connected
    producer.ping()
    assert producer.is_connected and producer.address == address_of(nsqd)
    producer.publish(topic, b"one")
    producer.multi_publish(topic, (body for body in (b"two", b"three")))
    producer.deferred_publish(topic, 0.0, b"four")
    producer.publish_nowait(topic, b"five").result(WAIT_S)
    producer.multi_publish_nowait(topic, mpub_body([b"six"])).result(WAIT_S)
    producer.deferred_publish_nowait(topic, 0.0, b"seven").result(WAIT_S)
    assert producer.outstanding == producer.outstanding_bytes == 0
    assert sorted(messages_of(nsqd, topic)) == sorted([b"one", b"two", b"three", b"four", b"five", b"six", b"seven"])


def test_one_producer_serves_many_threads(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: producer.publish(topic, b"%d" % number), range(200)))
    assert sorted(map(int, messages_of(nsqd, topic))) == list(range(200))


async def test_it_works_beside_a_running_event_loop(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    """The cells of a notebook run inside an event loop, too."""
    producer.publish(topic, b"x")
    assert messages_of(nsqd, topic) == [b"x"]


def test_errors_are_those_of_the_asyncio_client(producer: sync.Producer, topic: str) -> None:
    with pytest.raises(InvalidName):
        producer.publish("no good", b"x")
    with pytest.raises(InvalidName):
        producer.publish_nowait("no good", b"x")
    with pytest.raises(ConfigError, match="msg_timeout"):
        sync.Producer("127.0.0.1:1", msg_timeout=60)  # type: ignore[arg-type]
    with sync.Producer("127.0.0.1:1") as nobody:
        with pytest.raises(NotConnected):
            nobody.publish(topic, b"x")
        with pytest.raises(NotConnected):
            nobody.publish_nowait(topic, b"x").result(WAIT_S)
    with pytest.raises(Closed):
        nobody.publish(topic, b"x")


def test_a_pool_blocks_too(nsqd: Nsqd, topic: str) -> None:
    with sync.ProducerPool(["127.0.0.1:1", address_of(nsqd)]) as pool:
        for number in range(10):
            pool.publish(topic, b"%d" % number)
        pool.publish_nowait(topic, b"10").result(WAIT_S)
        assert [status.state for status in pool.nsqds()] == ["down", "up"]
    assert len(messages_of(nsqd, topic)) == 11


# -- consuming -------------------------------------------------------------------------------------------


def test_messages_are_iterated_and_answered(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    producer.multi_publish(topic, [b"finish", b"requeue", b"fail", b"fine"])
    seen = []
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=4, max_backoff_duration="0") as consumer:
        for message in consumer:
            seen.append((message.body, message.attempts))
            assert message.nsqd_address == address_of(nsqd) and len(message.id) == 16 and message.timestamp > 0
            if message.body == b"fail" and message.attempts == 1:
                with message:
                    raise RuntimeError("a mistake in a handler")
            elif message.body == b"requeue" and message.attempts == 1:
                message.touch()
                message.requeue(0.01, backoff=False)
            elif message.body == b"finish":
                message.finish()
            else:
                assert not message.is_answered
                with message:
                    pass
            assert message.is_answered
            if len(seen) == 5:
                break
        # Requeued by itself, the failed one comes after default_requeue_delay, which is long.
        eventually(lambda: consumer.stats().requeued == 2 and consumer.stats().finished == 3)
        assert sorted(seen) == sorted([(b"fail", 1), (b"fine", 1), (b"finish", 1), (b"requeue", 1), (b"requeue", 2)])
    assert nsqd.channel(topic)["deferred_count"] == 1


def test_an_answer_may_come_from_any_thread(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    producer.multi_publish(topic, [b"%d" % number for number in range(100)])
    with (
        sync.Consumer(topic, "ch", nsqd=[address_of(nsqd)], max_in_flight=100) as consumer,
        ThreadPoolExecutor(4) as threads,
    ):
        for _ in range(100):
            message = consumer.get(WAIT_S)
            assert message is not None
            threads.submit(message.finish)
        eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
        assert nsqd.channel(topic)["depth"] == 0


def test_handlers_run_in_threads_until_the_consumer_is_closed(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    at_once = threading.Barrier(3)
    bodies = []

    def handle(message: sync.Message) -> None:
        at_once.wait(WAIT_S)
        bodies.append(message.body)

    producer.multi_publish(topic, [b"a", b"b", b"c"])
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=3) as consumer:
        running = threading.Thread(target=consumer.run, args=(handle, 3))
        running.start()
        eventually(lambda: consumer.stats().finished == 3)
        assert sorted(bodies) == [b"a", b"b", b"c"]
    running.join(WAIT_S)
    assert not running.is_alive()


def test_waiting_for_a_message_ends(nsqd: Nsqd, topic: str) -> None:
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        assert consumer.get(timeout=0.05) is None
        rest: list[sync.Message] = []
        waiting = threading.Thread(target=lambda: rest.extend(consumer))
        waiting.start()
        consumer.close()
        waiting.join(WAIT_S)
        assert not waiting.is_alive() and rest == []


def test_an_interrupt_ends_the_wait_and_loses_no_message(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    class WaitInterrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise WaitInterrupted

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        next(consumer)

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(WaitInterrupted):  # also if the signal comes at once
                wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        producer.publish(topic, b"x")
        assert _bodies(consumer, 1) == {b"x"}


def test_a_consumer_is_steered(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        assert consumer.connections == [address_of(nsqd)]
        consumer.pause()
        assert consumer.is_paused
        eventually(lambda: nsqd.channel(topic)["clients"][0]["ready_count"] == 0)
        producer.publish(topic, b"x")
        consumer.change_max_in_flight(5)
        assert not consumer.is_paused
        assert _bodies(consumer, 1) == {b"x"}
        assert not consumer.is_starved
        consumer.disconnect_from_nsqd(address_of(nsqd))
        assert consumer.connections == []
        consumer.connect_to_nsqd(address_of(nsqd))
        assert consumer.connections == [address_of(nsqd)]


@pytest.mark.parametrize("kind", ["run", "get"])
def test_a_give_up_hook_may_publish(nsqd: Nsqd, producer: sync.Producer, topic: str, kind: str) -> None:
    given_up: list[tuple[bytes, str]] = []

    def give_up(message: sync.Message) -> None:
        producer.publish(f"{topic}_dead", message.body)
        given_up.append((message.body, threading.current_thread().name))

    def handle(_: sync.Message) -> None:
        raise RuntimeError("always")

    options = {"max_attempts": 1, "max_backoff_duration": "0", "default_requeue_delay": "0"}
    producer.publish(topic, b"x")
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), on_give_up=give_up, **options) as consumer:  # type: ignore[arg-type]
        if kind == "run":
            running = threading.Thread(target=consumer.run, args=(handle,))
            running.start()
            eventually(lambda: given_up)
            consumer.stop()
            running.join(WAIT_S)
            assert not running.is_alive()
            assert "nsquark loop" not in given_up[0][1] and topic in given_up[0][1]
        else:
            message = consumer.get(WAIT_S)
            assert message is not None
            message.requeue(0)
            eventually(lambda: consumer.get(0.05) or given_up)
            assert "nsquark loop" not in given_up[0][1]
        eventually(lambda: consumer.stats().given_up == 1)
    assert messages_of(nsqd, f"{topic}_dead") == [b"x"]


def test_async_functions_are_refused(nsqd: Nsqd, topic: str) -> None:
    async def handle(_: sync.Message) -> None: ...

    async def give_up(_: sync.Message) -> None: ...

    with sync.Producer(address_of(nsqd)) as producer:
        producer.publish(topic, b"x")
    with pytest.raises(ConfigError, match="on_give_up is a plain function"):
        sync.Consumer(topic, "ch", nsqd=address_of(nsqd), on_give_up=give_up)
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        with pytest.raises(WrongHandler, match=r"nsquark\.Consumer"):
            consumer.run(handle)
        with pytest.raises(WrongHandler, match="returned <coroutine"):
            consumer.run(lambda message: handle(message))
        with pytest.raises(ValueError, match="threads is 1 or more"):
            consumer.run(print, threads=0)
        assert consumer.stats().finished == 0
    eventually(lambda: nsqd.channel(topic)["depth"] == 1)


STOPPED_SCRIPT = """
import sys, time
from nsquark import sync

with sync.Consumer(sys.argv[1], "ch", nsqd=sys.argv[2], max_in_flight=20) as consumer:
    def handle(message):
        print("began", flush=True)
        sys.stdin.read()
        time.sleep(0.3)
    consumer.run(handle, threads=3)
print("ended", consumer.stats().finished, flush=True)
"""


def test_sigterm_ends_a_script_in_order(nsqd: Nsqd, topic: str) -> None:
    with sync.Producer(address_of(nsqd)) as producer:
        producer.multi_publish(topic, [b"%d" % number for number in range(20)])
    script = subprocess.Popen(
        [sys.executable, "-c", STOPPED_SCRIPT, topic, address_of(nsqd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline().startswith("began")
    script.terminate()
    output, _ = script.communicate(timeout=WAIT_S)
    finished = int(output.rpartition("ended ")[2])
    assert script.returncode == 0
    assert 1 <= finished < 20
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    assert nsqd.channel(topic)["depth"] == 20 - finished


def test_publishes_without_waiting_come_in_order_and_are_bounded(nsqd: Nsqd, topic: str) -> None:
    with sync.Producer(address_of(nsqd), outstanding_max=500) as producer:
        answers = []
        for number in range(2000):
            while True:
                try:
                    answers.append(producer.publish_nowait(topic, b"%d" % number))
                except TooMuchOutstanding:
                    answers[-1].result(WAIT_S)
                else:
                    break
        for answer in answers:
            answer.result(WAIT_S)
        with pytest.raises(InvalidName):
            producer.publish_nowait("no name", b"x")
        with pytest.raises(ValueError, match="must not be empty"):
            producer.publish_nowait(topic, b"")
    with pytest.raises(Closed):
        producer.publish_nowait(topic, b"x")
    assert nsqd.topic(topic)["message_count"] == 2000


def test_what_was_taken_without_waiting_is_sent_though_others_fill_the_room(nsqd: Nsqd, topic: str) -> None:
    """Each publish that returned a future has its answer, whoever publishes beside it."""
    with sync.Producer(address_of(nsqd), outstanding_max=2) as producer, ThreadPoolExecutor(4) as pool:
        others = [pool.submit(producer.publish, topic, b"other") for _ in range(400)]
        answers: list[Future[None]] = []
        while not all(other.done() for other in others):
            with contextlib.suppress(TooMuchOutstanding):
                answers.append(producer.publish_nowait(topic, b"x"))
        for answer in (*answers, *others):
            answer.result(WAIT_S)
    assert nsqd.topic(topic)["message_count"] == len(answers) + 400


# -- fork ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _silent_exit() -> Iterator[None]:
    """Ends a forked child, which must never come back into the test run."""
    code = 1
    try:
        yield
        code = 0
    finally:
        os._exit(code)


def _in_fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        with _silent_exit():
            work()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_producer_works_on_both_sides_of_a_fork(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    producer.publish(topic, b"before")

    def child() -> None:
        producer.publish(topic, b"child")
        producer.publish_nowait(topic, b"child, later").result(WAIT_S)
        with sync.Producer(address_of(nsqd)) as new:
            new.publish(topic, b"child's own")
        producer.close()

    assert _in_fork(child) == 0
    producer.publish(topic, b"parent")
    assert _in_fork(lambda: producer.publish(topic, b"second child")) == 0
    producer.publish(topic, b"after")
    assert set(messages_of(nsqd, topic)) == {
        b"before",
        b"child",
        b"child, later",
        b"child's own",
        b"parent",
        b"second child",
        b"after",
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_under_load_harms_neither_side(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    """The child is made while the loop's thread is busy, whatever it holds at that moment."""
    stop = threading.Event()
    published = 0

    def load() -> None:
        nonlocal published
        while not stop.is_set():
            producer.publish(topic, b"parent")
            published += 1

    loading = threading.Thread(target=load)
    loading.start()
    try:
        codes = [_in_fork(lambda: producer.publish(topic, b"child")) for _ in range(10)]
    finally:
        stop.set()
        loading.join(WAIT_S)
    assert not loading.is_alive()
    assert codes == [0] * 10
    bodies = messages_of(nsqd, topic)
    assert (bodies.count(b"child"), bodies.count(b"parent")) == (10, published)


def _publish_in_process(address: str, topic: str, number: int) -> None:
    with sync.ProducerPool([address]) as pool:
        pool.publish(topic, b"%d" % number)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_works_in_multiprocessing(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    producer.publish(topic, b"-1")
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_publish_in_process, args=(address_of(nsqd), topic, number)) for number in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(WAIT_S)
    assert [child.exitcode for child in children] == [0] * 4
    producer.publish(topic, b"4")
    assert sorted(map(int, messages_of(nsqd, topic))) == [-1, 0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_consumer_stays_with_its_process(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:

        def child() -> None:
            with pytest.raises(NsqError, match="make one after the fork"):
                consumer.get(0.1)
            consumer.close()

        assert _in_fork(child) == 0
        producer.publish(topic, b"x")
        assert _bodies(consumer, 1) == {b"x"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_was_closed_stays_closed_in_a_child(nsqd: Nsqd, topic: str) -> None:
    with sync.Producer(address_of(nsqd)) as producer:
        producer.publish(topic, b"x")

    def child() -> None:
        with pytest.raises(Closed):
            producer.publish(topic, b"y")

    assert _in_fork(child) == 0


def test_what_is_outstanding_is_bounded(nsqd: Nsqd, topic: str) -> None:
    address = "{}:{}"
    with FaultProxy(nsqd.tcp) as proxy, sync.Producer(address.format(*proxy.address), write_timeout="60s") as producer:
        producer.ping()
        proxy.stall()
        futures: list[Future[None]] = []

        def fill() -> None:
            while len(futures) < 1000:
                futures.append(producer.publish_nowait(topic, b"x" * (1 << 20)))

        with pytest.raises(TooMuchOutstanding):
            fill()
        proxy.resume()
        for future in futures:
            future.result(WAIT_S)


# -- the end of the interpreter --------------------------------------------------------------------------

UNCLOSED = {
    "closed in __del__": """
class Owner:
    def __init__(self):
        self.producer = sync.Producer(address)
        self.producer.publish(topic, b"x")
    def __del__(self):
        self.producer.close()
owner = Owner()
""",
    "closed in __del__ and never used": """
class Owner:
    def __init__(self): self.producer = sync.Producer(address)
    def __del__(self): self.producer.close()
owner = Owner()
""",
    "a generator with a producer": """
def generator():
    with sync.Producer(address) as producer:
        producer.publish(topic, b"x")
        yield producer
left_open = generator()
next(left_open)
""",
    "a generator with a consumer": """
def generator():
    with sync.Producer(address) as producer: producer.publish(topic, b"x")
    with sync.Consumer(topic, "ch", nsqd=address) as consumer:
        yield next(consumer)
left_open = generator()
message = next(left_open)
""",
    "a late publish": """
class Owner:
    def __init__(self):
        self.producer = sync.Producer(address)
        self.producer.ping()
    def __del__(self):
        for publish in (self.producer.publish, self.producer.publish_nowait):
            try:
                publish(topic, b"x")
            except Exception as error:
                print(error)
owner = Owner()
""",
}


def _run_script(code: str, nsqd: Nsqd, topic: str) -> subprocess.CompletedProcess[str]:
    head = f"import itertools, sys\nfrom nsquark import sync\naddress, topic = {address_of(nsqd)!r}, {topic!r}\n"
    return subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=2 * WAIT_S, check=True
    )


@pytest.mark.parametrize("case", UNCLOSED)
def test_what_is_open_when_the_interpreter_ends_does_not_hold_it_up(nsqd: Nsqd, topic: str, case: str) -> None:
    ended = _run_script(UNCLOSED[case], nsqd, topic)
    assert ended.stderr == ""
    assert ended.stdout.count("the interpreter is ending") == (2 if case == "a late publish" else 0)


def test_what_was_published_without_waiting_is_sent_before_the_interpreter_ends(nsqd: Nsqd, topic: str) -> None:
    _run_script(
        """
def publish():
    producer = sync.Producer(address)
    for number in range(5000):
        producer.publish_nowait(topic, b"%d" % number)
publish()
""",
        nsqd,
        topic,
    )
    assert nsqd.topic(topic)["message_count"] == 5000


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_was_published_without_waiting_is_sent_before_a_child_ends(
    nsqd: Nsqd, topic: str, start: str, tmp_path: Path
) -> None:
    """A child that multiprocessing forked ends without what `atexit` has."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing, sys
from nsquark import sync
producer = sync.Producer({address_of(nsqd)!r})
def publish():
    for number in range(5000):
        producer.publish_nowait({topic!r}, b"%d" % number)
if __name__ == "__main__":
    producer.ping()
    child = multiprocessing.get_context({start!r}).Process(target=publish)
    child.start()
    child.join()
    sys.exit(child.exitcode)
""")
    subprocess.run([sys.executable, "-W", "ignore", str(program)], timeout=2 * WAIT_S, check=True)
    assert nsqd.topic(topic)["message_count"] == 5000


def test_what_could_not_be_sent_before_the_interpreter_ends_is_told(nsqd: Nsqd, topic: str) -> None:
    ended = _run_script(
        """
import socket
from nsquark.client import loop_thread
loop_thread.EXIT_WAIT_S = 0.2
silent = socket.create_server(("127.0.0.1", 0))
producer = sync.Producer("127.0.0.1:%d" % silent.getsockname()[1])
for _ in range(3): producer.publish_nowait(topic, b"x")
""",
        nsqd,
        topic,
    )
    assert "3 publishes had no answer" in ended.stderr


def test_threads_of_a_forked_child_share_one_producer(nsqd: Nsqd, topic: str) -> None:
    """The constructor is made slow, so that threads without a lock would meet in it."""
    _run_script(
        """
import os, threading, time
producer = sync.Producer(address)
make = producer._make
made = []
def make_slowly():
    time.sleep(0.05)
    made.append(make())
    return made[-1]
producer._make = make_slowly
child = os.fork()
if child == 0:
    threads = [threading.Thread(target=producer.publish, args=(topic, b"x")) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    os._exit(len(made))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
""",
        nsqd,
        topic,
    )
    assert nsqd.topic(topic)["message_count"] == 8


@pytest.mark.parametrize("where", ["handler", "hook", "hook of what cannot be decoded"])
def test_an_exit_in_a_handler_ends_its_run_and_nothing_else(
    nsqd: Nsqd, producer: sync.Producer, topic: str, where: str
) -> None:
    producer.publish(topic, b"x")

    def handle(message: sync.Message) -> None:
        if where == "handler":
            sys.exit(7)
        if where != "hook":
            message.decode()
        raise ValueError("so that it is given up")

    def give_up(_: object) -> None:
        sys.exit(7)

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), on_give_up=give_up, **GIVES_UP_SOON) as consumer:
        with pytest.raises(SystemExit, match="7"):
            consumer.run(handle)
        producer.publish(topic, b"y")
    eventually(lambda: nsqd.channel(topic)["depth"] + nsqd.channel(topic)["deferred_count"] == 2)


def test_an_exit_in_the_loops_thread_leaves_the_loop_to_others(nsqd: Nsqd, topic: str) -> None:
    """A callback and an encoder run there; whoever used the loop next waited for ever."""
    ended = _run_script(
        """
def end(_): sys.exit(7)
with sync.Producer(address) as producer:
    answers = [producer.publish_nowait(topic, b"x") for _ in range(3)]
    for answer in answers: answer.add_done_callback(end)
    for answer in answers: answer.result(30)
    try: producer.publish(topic, 1, encode=end)
    except SystemExit as exit: print("exit", exit.code)
    producer.publish(topic, b"x")
with sync.Producer("127.0.0.1:1") as producer:
    answers = [producer.publish_nowait(topic, b"x") for _ in range(3)]
    for answer in answers: answer.add_done_callback(end)
    for answer in answers: print(type(answer.exception(30)).__name__)
""",
        nsqd,
        topic,
    )
    assert ended.stdout.split() == ["exit", "7", *["NotConnected"] * 3]
    assert "a callback raised SystemExit(7) in the event loop's thread" in ended.stderr
    assert nsqd.topic(topic)["message_count"] == 4


@pytest.mark.parametrize("returned", ["coroutine", "generator"])
def test_a_hook_that_only_returns_what_is_to_be_done(
    nsqd: Nsqd, producer: sync.Producer, topic: str, returned: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A coroutine that a hook returns is run; a generator would not be, so the message is not given up."""
    producer.publish(topic, b"x")
    buried: list[bytes] = []

    async def bury(message: sync.Message) -> None:
        buried.append(message.body)

    def hook(message: sync.Message) -> object:
        return bury(message) if returned == "coroutine" else (body for body in [message.body])

    def fail(_: object) -> None:
        raise ValueError("so that it is given up")

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), on_give_up=hook, **GIVES_UP_SOON) as consumer:
        running = threading.Thread(target=consumer.run, args=(fail,), kwargs={"stop_on_signals": False})
        running.start()
        if returned == "coroutine":
            eventually(lambda: consumer.stats().given_up == 1)
            assert buried == [b"x"]
        else:
            eventually(lambda: "on_give_up returned" in caplog.text)
            assert consumer.stats().given_up == 0
        consumer.stop()
        running.join(WAIT_S)
        assert not running.is_alive()


def test_a_handler_that_closes_its_consumer_ends_it(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    producer.publish(topic, b"stop")
    handled: list[bytes] = []

    def handle(message: sync.Message) -> None:
        handled.append(message.body)
        consumer.close()

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        consumer.run(handle)
    assert handled == [b"stop"]
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] == nsqd.channel(topic)["depth"] == 0)


def test_what_threads_handle_when_ctrl_c_comes_is_finished(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    """The end waits for these threads in any case, so their messages need not come again."""
    producer.multi_publish(topic, [b"1", b"2", b"3"])
    ended = _run_script(
        """
import os, signal, threading
started, may_end = threading.Barrier(2), threading.Event()
def handle(message):
    if started.wait(30) == 0: os.kill(os.getpid(), signal.SIGINT)
    may_end.wait(30)
with sync.Consumer(topic, "ch", nsqd=address, max_in_flight=3) as consumer:
    try: consumer.run(handle, threads=2)
    except KeyboardInterrupt: may_end.set()
print(consumer.stats().finished)
""",
        nsqd,
        topic,
    )
    assert ended.stdout == "2\n"
    eventually(lambda: nsqd.channel(topic)["requeue_count"] == nsqd.channel(topic)["depth"] == 1)


def test_no_message_is_lost_to_an_interrupt_at_any_instruction(nsqd: Nsqd, producer: sync.Producer, topic: str) -> None:
    """What a consumer took and its caller did not get goes back at once. No lock stays taken, for which the thread that
    does the work of all would wait.
    """
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=1, msg_timeout="60s") as consumer:
        producer.publish(topic, b"x")
        for instruction in itertools.count(1):
            if not is_interrupted_at("result", instruction, lambda: consumer.get(WAIT_S)):
                break
        assert instruction > 10 or sys.version_info >= (3, 13)  # which does not trace the instructions of this call
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        assert _bodies(consumer, 1) == {b"x"}


def test_an_interrupt_at_any_instruction_of_a_start_leaves_no_connection(
    nsqd: Nsqd, producer: sync.Producer, topic: str
) -> None:
    """Whoever is interrupted there has no `with` block whose end would give back what came."""
    producer.publish(topic, b"x")
    for instruction in itertools.count(1):
        consumer = sync.Consumer(topic, "ch", nsqd=address_of(nsqd), msg_timeout="60s")
        if not is_interrupted_at("result", instruction, consumer.__enter__):
            break
        assert consumer.connections == []
    assert instruction > 10 or sys.version_info >= (3, 13)  # which does not trace the instructions of this call
    consumer.close()
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        assert _bodies(consumer, 1) == {b"x"}


def test_an_interrupt_at_any_instruction_of_the_first_use_harms_no_later_one(nsqd: Nsqd, topic: str) -> None:
    """The first call of a process starts the thread that does the work of all."""
    _run_script(
        f"sys.path.append({str(Path(__file__).parents[1])!r})"
        """
from harness.interrupts import is_interrupted_at
from nsquark.client.loop_thread import process

for function in ("_loop_thread", "call"):
    for instruction in itertools.count(1):
        process.forked()  # begins anew, as in a child
        with sync.Producer(address) as producer:
            is_interrupted = is_interrupted_at(function, instruction, producer.ping)
            producer.publish(topic, b"x")
        if not is_interrupted: break
    assert instruction > 10 or sys.version_info >= (3, 13), (function, instruction)
""",
        nsqd,
        topic,
    )


def test_an_interrupted_publish_without_waiting_harms_no_other(nsqd: Nsqd, topic: str) -> None:
    """What comes next is sent, there is room for it, and the end does not wait for what was never sent."""
    _run_script(
        """
import random, signal
from nsquark.client.loop_thread import process
from nsquark.errors import TooMuchOutstanding

def interrupt(*_): raise KeyboardInterrupt

def publish_many():
    for _ in range(1000):  # Python swallows what is raised in the callback of a weak reference
        try: producer.publish_nowait(topic, b"x")
        except TooMuchOutstanding: pass

signal.signal(signal.SIGALRM, interrupt)
with sync.Producer(address, outstanding_max=50) as producer:
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.0003))
            publish_many()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt: pass
        producer.publish(topic, b"x")  # and all that was on its way
        producer.publish_nowait(topic, b"x").result(10)
assert not process.unanswered, process.unanswered
""",
        nsqd,
        topic,
    )


WAYS_TO_WAIT = {
    "publish_nowait": "last.result(10)",
    "publish": 'producer.publish(topic, b"x")',  # and not `result`, which holds a lock that the loop wants
}


@pytest.mark.parametrize("method", WAYS_TO_WAIT)
def test_a_signal_handler_may_publish(nsqd: Nsqd, topic: str, method: str) -> None:
    """It interrupts who publishes, and who waits for the answers."""
    _run_script(
        f"""
import signal
with sync.Producer(address) as producer:
    count = 0
    def publish(*_):
        global count
        count += 1
        producer.{method}(topic, b"x")
        if count < 500: signal.setitimer(signal.ITIMER_REAL, 0.0005)
    signal.signal(signal.SIGALRM, publish)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    while count < 500:
        for _ in range(20): last = producer.publish_nowait(topic, b"x")
        {WAYS_TO_WAIT[method]}
""",
        nsqd,
        topic,
    )


def test_a_process_that_cannot_have_a_loop_says_why_and_awaits_nothing(nsqd: Nsqd, topic: str) -> None:
    ended = _run_script(
        """
import os, resource
producer = sync.Producer(address)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, most))
try: producer.publish(topic, b"x")
except OSError as error: print(error)
""",
        nsqd,
        topic,
    )
    assert "Too many open files" in ended.stdout and "never awaited" not in ended.stderr
