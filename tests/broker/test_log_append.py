"""Checks staged appends: all messages of a token come or none, and once, whatever happens in between."""

import contextlib
import errno
import http.client
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.logs import answer, append, begin, decode, info, read_all, read_raw, refusal, stage
from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually, mpub_messages

pytestmark = pytest.mark.ours


def _bodies(mark: str, count: int, size: int = 20) -> list[bytes]:
    return [f"{mark} {number} ".encode().ljust(size, b".") for number in range(count)]


def _staged_files(daemon: Nsqd) -> list[Path]:
    return list(daemon.data_path.glob("**/staged/*"))


def test_parts_enter_the_log_together_in_the_order_of_their_numbers(nsqd: Nsqd, topic: str) -> None:
    bodies = [_bodies(f"part {number}", 30) for number in range(4)]
    for number in (2, 0, 3, 1):
        staged = stage(nsqd, topic, "token", number, bodies[number])
        assert (staged["part"], staged["count"], staged["duplicate"]) == (number, 30, False)
    assert staged["parts"] == 4 and staged["staged"] == 120
    assert info(nsqd, topic)["count"] == 0, "nothing is there before the append"
    before = time.time_ns()
    appended = append(nsqd, topic, "token", parts=4)
    records = read_all(nsqd, topic)
    assert [record.body for record in records] == [body for part in bodies for body in part]
    assert appended["duplicate"] is False and appended["count"] == 120
    assert (appended["first"], appended["next"]) == (records[0].seq, records[-1].seq + 1)
    assert all(before <= record.timestamp_ns <= time.time_ns() for record in records)
    eventually(lambda: not _staged_files(nsqd))


def test_consumers_get_what_was_appended_as_any_other_message(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    consumer = connect().subscribe(topic, rdy=1000)
    publisher = connect()
    publisher.publish(topic, b"before")
    stage(nsqd, topic, "token", 0, _bodies("staged", 500, 1000))
    append(nsqd, topic, "token")
    publisher.publish(topic, b"after")
    messages = consumer.read_messages(502, finish=True)
    assert [message.body for message in messages] == [b"before", *_bodies("staged", 500, 1000), b"after"]
    eventually(lambda: nsqd.channel(topic)["depth"] + nsqd.channel(topic)["in_flight_count"] == 0)
    assert nsqd.topic(topic)["message_count"] == 502


def test_a_token_is_appended_once(nsqd: Nsqd, topic: str) -> None:
    stage(nsqd, topic, "token", 0, [b"a"])
    assert append(nsqd, topic, "token")["duplicate"] is False
    assert append(nsqd, topic, "token")["duplicate"] is True
    assert stage(nsqd, topic, "token", 0, [b"a"])["duplicate"] is True
    assert append(nsqd, topic, "token")["duplicate"] is True
    stage(nsqd, topic, "another", 0, [b"b"])
    append(nsqd, topic, "another")
    assert [record.body for record in read_all(nsqd, topic)] == [b"a", b"b"]


def test_the_same_token_in_another_topic_is_another(nsqd: Nsqd, topic: str) -> None:
    for name in (topic, f"{topic}_b"):
        stage(nsqd, name, "token", 0, [b"a"])
        assert append(nsqd, name, "token")["duplicate"] is False
        assert info(nsqd, name)["count"] == 1


def test_appends_of_one_token_at_the_same_time_are_one(nsqd: Nsqd, topic: str) -> None:
    for number in range(4):
        stage(nsqd, topic, "token", number, _bodies("x", 1000, 1000))
    waiting = [begin(nsqd, "POST", "/log/append", topic=topic, token="token") for _ in range(5)]
    replies = [connection.getresponse().read() for connection in waiting]
    assert sum(b'"duplicate":false' in reply for reply in replies) == 1
    assert sum(b'"duplicate":true' in reply for reply in replies) == 4
    assert info(nsqd, topic)["count"] == 4000


def test_a_part_sent_again_replaces_the_first(nsqd: Nsqd, topic: str) -> None:
    stage(nsqd, topic, "token", 0, [b"wrong", b"wrong too"])
    stage(nsqd, topic, "token", 1, [b"second"])
    stage(nsqd, topic, "token", 0, [b"right"])
    assert append(nsqd, topic, "token")["count"] == 2
    assert [record.body for record in read_all(nsqd, topic)] == [b"right", b"second"]


def test_an_append_with_missing_parts_is_refused(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    query = {"topic": topic, "token": "token"}
    status, refused = refusal(nsqd, "POST", "/log/append", **query)
    assert (status, refused["message"]) == (404, "NOT_STAGED")
    stage(nsqd, topic, "token", 1, [b"second"])
    status, refused = refusal(nsqd, "POST", "/log/append", **query)
    assert (status, refused["message"]) == (409, "INCOMPLETE")
    stage(nsqd, topic, "token", 0, [b"first"])
    status, refused = refusal(nsqd, "POST", "/log/append", **query, parts=3)
    assert (status, refused["message"]) == (409, "INCOMPLETE")
    assert info(nsqd, topic)["count"] == 0
    assert append(nsqd, topic, "token", parts=2)["count"] == 2


def test_an_aborted_stage_is_gone(nsqd: Nsqd, topic: str) -> None:
    stage(nsqd, topic, "token", 0, [b"x"])
    assert answer(nsqd, "POST", "/log/abort", topic=topic, token="token")["dropped"] is True
    assert answer(nsqd, "POST", "/log/abort", topic=topic, token="token")["dropped"] is False
    assert refusal(nsqd, "POST", "/log/append", topic=topic, token="token")[0] == 404
    eventually(lambda: not _staged_files(nsqd))


def test_a_topic_deleted_and_made_again_knows_no_tokens_or_stages(nsqd: Nsqd, topic: str) -> None:
    stage(nsqd, topic, "done", 0, [b"x"])
    append(nsqd, topic, "done")
    stage(nsqd, topic, "open", 0, [b"x"])
    assert nsqd.post("/topic/delete", topic=topic).status == 200
    nsqd.post("/topic/create", topic=topic)
    assert refusal(nsqd, "POST", "/log/append", topic=topic, token="open")[0] == 404
    stage(nsqd, topic, "done", 0, [b"y"])
    assert append(nsqd, topic, "done")["duplicate"] is False
    assert [record.body for record in read_all(nsqd, topic)] == [b"y"]
    assert nsqd.get("/ping").text == "OK"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "BAD_BODY"),
        (b"\0\0\0", "BAD_BODY"),
        (b"\0\0\0\0", "BAD_BODY"),
        (b"\xff\xff\xff\xff", "BAD_BODY"),
        (b"\x7f\xff\xff\xff", "BAD_BODY"),
        (mpub_messages([b"x"]) + b"more", "BAD_BODY"),
        (mpub_messages([b"x", b""]), "BAD_MESSAGE"),
        (mpub_messages([b"x", b"yyy"])[:-1], "BAD_MESSAGE"),
        (mpub_messages([b"x" * 1_048_577]), "MSG_TOO_BIG"),
    ],
)
def test_a_part_that_is_no_list_of_messages_is_refused(nsqd: Nsqd, topic: str, body: bytes, code: str) -> None:
    status, refused = refusal(nsqd, "POST", "/log/stage", body, topic=topic, token="token", part=0)
    assert (status, refused["message"]) == (413, code)
    eventually(lambda: not _staged_files(nsqd))  # those of the tests before may still be on their way out


def test_stages_without_good_arguments_are_refused(nsqd: Nsqd, topic: str) -> None:
    body = mpub_messages([b"x"])
    good = {"topic": topic, "token": "token", "part": "0"}
    for change, code in (
        ({"topic": "bad name"}, "INVALID_ARG_TOPIC"),
        ({"topic": "t#ephemeral"}, "EPHEMERAL_TOPIC"),
        ({"token": ""}, "INVALID_ARG_TOKEN"),
        ({"token": "x" * 129}, "INVALID_ARG_TOKEN"),
        ({"part": "-1"}, "INVALID_ARG_PART"),
        ({"part": "10000"}, "INVALID_ARG_PART"),
    ):
        status, refused = refusal(nsqd, "POST", "/log/stage", body, **(good | change))
        assert (status, refused["message"]) == (400, code)


def test_more_than_an_append_may_have_is_refused_and_the_rest_stays(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    part = [b"x" * 1_000_000] * 5
    for number in range(13):
        stage(daemon, "t", "token", number, part)
    body = mpub_messages(part)
    status, refused = refusal(daemon, "POST", "/log/stage", body, topic="t", token="token", part=13)
    assert (status, refused["message"]) == (413, "APPEND_TOO_BIG")
    assert "split" in refused["reason"]
    stage(daemon, "t", "token", 12, part)  # to replace one takes no more room
    assert append(daemon, "t", "token", parts=13)["count"] == 65
    assert info(daemon, "t")["count"] == 65


def test_a_large_append_keeps_nobody_waiting_and_its_order(make_nsqd: Callable[..., Nsqd]) -> None:
    """While 60 MiB are appended, others publish to the same topic; nothing is torn apart or out of order."""
    daemon = make_nsqd()
    for number in range(12):
        stage(daemon, "t", "token", number, _bodies(f"part {number}", 5000, 1000))
    stop = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        with daemon.connect() as wire:
            wire.identify(heartbeat_interval=-1)
            while not stop.is_set():
                wire.publish("t", b"single %d" % published)
                published += 1

    publisher = threading.Thread(target=publish)
    publisher.start()
    eventually(lambda: published > 100)
    assert append(daemon, "t", "token", parts=12)["count"] == 60_000
    stop.set()
    publisher.join()
    records = read_all(daemon, "t")
    singles = [record.body for record in records if record.body.startswith(b"single")]
    assert singles == [b"single %d" % number for number in range(published)]
    staged = [record for record in records if record.body.startswith(b"part")]
    expected = [body for number in range(12) for body in _bodies(f"part {number}", 5000, 1000)]
    assert [record.body for record in staged] == expected
    first, last = records.index(staged[0]), records.index(staged[-1])
    assert last - first == 59_999, "nothing came in between"
    daemon.restart(crash=True)
    assert [record.seq for record in read_all(daemon, "t")] == [record.seq for record in records]


def test_tiny_messages_in_many_parts(nsqd: Nsqd, topic: str) -> None:
    for number in range(300):
        stage(nsqd, topic, "token", number, [b"%d" % number])
    assert append(nsqd, topic, "token", parts=300)["count"] == 300
    stage(nsqd, topic, "more", 0, [b"x"] * 300_000)
    assert append(nsqd, topic, "more")["count"] == 300_000
    records = read_all(nsqd, topic)
    assert [record.body for record in records[:300]] == [b"%d" % number for number in range(300)]
    assert len(records) == 300_300 and records[-1].body == b"x"


# -- crashes ---------------------------------------------------------------------------------------------


def test_tokens_survive_crashes_stages_do_not(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    stage(daemon, "t", "done", 0, [b"x"])
    append(daemon, "t", "done")
    stage(daemon, "t", "open", 0, [b"x"])
    assert _staged_files(daemon)
    daemon.restart(crash=True)
    assert not _staged_files(daemon)
    assert append(daemon, "t", "done")["duplicate"] is True
    assert refusal(daemon, "POST", "/log/append", topic="t", token="open")[1]["message"] == "NOT_STAGED"
    assert info(daemon, "t")["count"] == 1


def test_tokens_survive_the_removal_of_their_messages(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd("--max-bytes-per-file=5000")
    for number in range(20):
        stage(daemon, "t", f"token {number}", 0, _bodies("x", 10, 100))
        append(daemon, "t", f"token {number}")
    first = info(daemon, "t")["first"]
    connect(daemon).subscribe("t", rdy=500).read_messages(200, finish=True)
    eventually(lambda: info(daemon, "t")["first"] > first and info(daemon, "t")["segments"] == 1)
    for crash in (True, False):
        daemon.restart(crash=crash)
        for number in range(20):
            assert append(daemon, "t", f"token {number}")["duplicate"] is True


@pytest.mark.parametrize("kind", ["write", "sync", "create"])
def test_messages_do_not_go_before_their_tokens_are_stored(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], tmp_path: Path, kind: str
) -> None:
    """The disk refuses to store tokens for a while; then each is known for ever, and none is appended again."""
    daemon = make_nsqd("--max-bytes-per-file=5000")
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    daemon.restart()
    shim.set_rules(Rule(kind, "*/tokens*", errno.EIO))
    for number in range(20):
        stage(daemon, "t", f"token {number}", 0, _bodies("x", 10, 100))
        append(daemon, "t", f"token {number}")
    connect(daemon).subscribe("t", rdy=500).read_messages(200, finish=True)
    eventually(lambda: "could not remove what is finished" in daemon.log)
    daemon.restart(crash=True)
    for number in range(20):
        assert append(daemon, "t", f"token {number}")["duplicate"] is True
    shim.set_rules()
    eventually(lambda: info(daemon, "t")["segments"] == 1)
    daemon.restart(crash=True)
    for number in range(20):
        assert append(daemon, "t", f"token {number}")["duplicate"] is True


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_token_is_known_only_with_its_messages(make_nsqd: Callable[..., Nsqd], tmp_path: Path, kind: str) -> None:
    """The disk refuses the append: neither now nor after a crash does the token pass for one that was appended."""
    daemon = make_nsqd()
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    daemon.restart()
    for crash in (False, True):
        token = f"crash {crash}"
        stage(daemon, "t", token, 0, _bodies(token, 10))
        shim.set_rules(Rule(kind, "*.log", errno.EIO))
        for _ in range(2):
            status, refused = refusal(daemon, "POST", "/log/append", topic="t", token=token)
            assert (status, refused["message"]) == (503, "APPEND_FAILED")
        shim.set_rules()
        if crash:
            daemon.restart(crash=True)
            assert stage(daemon, "t", token, 0, _bodies(token, 10))["duplicate"] is False
        eventually(lambda: daemon.get("/ping").status == 200)
        assert append(daemon, "t", token)["duplicate"] is False
        assert append(daemon, "t", token)["duplicate"] is True
    assert [record.body for record in read_all(daemon, "t")] == _bodies("crash False", 10) + _bodies("crash True", 10)


def _write_all_tokens(daemon: Nsqd, tokens: range, parts: int, kill_after_s: float) -> None:
    """Stages and appends one token after another until the process is killed under it."""
    timer = threading.Timer(kill_after_s, daemon.kill)
    timer.start()
    with contextlib.suppress(OSError, http.client.HTTPException):
        for token in tokens:
            _write_token(daemon, token, parts)
    timer.join()
    daemon.start()


def _write_token(daemon: Nsqd, token: int, parts: int) -> None:
    for part in range(parts):
        if stage(daemon, "t", str(token), part, _bodies(f"{token}/{part}", 40, 3000))["duplicate"]:
            return
    append(daemon, "t", str(token), parts=parts)


def test_killed_at_any_moment_each_token_is_there_wholly_and_once(make_nsqd: Callable[..., Nsqd]) -> None:
    """A writer that repeats everything after each crash ends with every message once, in whole runs."""
    daemon = make_nsqd("--max-bytes-per-file=3000000")
    tokens, parts = range(12), 8
    dice = random.Random(7)
    for _ in range(8):
        _write_all_tokens(daemon, tokens, parts, dice.uniform(0.02, 0.6))
        records = read_all(daemon, "t") if "t" in daemon.topic_names() else []
        per_token = 40 * parts
        assert len(records) % per_token == 0, "a part of an append is visible"
        for start in range(0, len(records), per_token):
            token = int(records[start].body.split(b"/")[0])
            expected = [body for part in range(parts) for body in _bodies(f"{token}/{part}", 40, 3000)]
            assert [record.body for record in records[start : start + per_token]] == expected
    for token in tokens:
        _write_token(daemon, token, parts)
    marks = [record.body for record in read_all(daemon, "t")]
    assert len(marks) == len(set(marks)) == len(tokens) * parts * 40


def test_killed_in_the_middle_of_an_append_all_or_nothing_is_there(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    dice = random.Random(11)
    done: list[int] = []
    for token in range(8):
        for part in range(4):
            stage(daemon, "t", str(token), part, _bodies(f"{token}/{part}", 400, 10_000))
        waiting = begin(daemon, "POST", "/log/append", topic="t", token=str(token), parts=4)
        time.sleep(dice.uniform(0.0, 0.06))  # where in the append the crash comes
        daemon.restart(crash=True)
        waiting.close()
        count = info(daemon, "t")["count"]
        assert count in (1600 * len(done), 1600 * (len(done) + 1))
        if count > 1600 * len(done):
            done.append(token)
            assert append(daemon, "t", str(token))["duplicate"] is True
        else:
            assert refusal(daemon, "POST", "/log/append", topic="t", token=str(token))[1]["message"] == "NOT_STAGED"
    bodies = [body for token in done for part in range(4) for body in _bodies(f"{token}/{part}", 400, 10_000)]
    assert [record.body for record in read_all(daemon, "t")] == bodies


def test_an_append_cut_off_by_a_crash_is_not_there(make_nsqd: Callable[..., Nsqd]) -> None:
    """The file ends as if the power had failed between two batches of a run: some promise more."""
    daemon = make_nsqd()
    stage(daemon, "t", "whole", 0, [b"kept"])
    append(daemon, "t", "whole")
    kept = info(daemon, "t")["bytes"]
    stage(daemon, "t", "cut", 0, _bodies("x", 3000, 1000))
    append(daemon, "t", "cut")
    raw = read_raw(daemon, "t", 0, info(daemon, "t")["next"])
    assert len(decode(raw)) == 3001
    daemon.kill()
    [log_file] = daemon.data_path.glob("**/t.t/*.log")
    for index in daemon.data_path.glob("**/t.t/*.idx"):
        index.unlink()
    (log_file.parent / "tokens").unlink(missing_ok=True)
    with open(log_file, "r+b") as file:
        file.truncate((kept + len(raw)) // 2)
    daemon.start()
    assert [record.body for record in read_all(daemon, "t")] == [b"kept"]
    assert append(daemon, "t", "whole")["duplicate"] is True
    stage(daemon, "t", "cut", 0, _bodies("y", 5))
    assert append(daemon, "t", "cut")["duplicate"] is False
    assert info(daemon, "t")["count"] == 6


def test_a_full_disk_limit_refuses_stages_and_keeps_what_is_there(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--max-disk-bytes=300000")
    stage(daemon, "t", "a", 0, _bodies("x", 100, 1000))
    append(daemon, "t", "a")
    stage(daemon, "t", "b", 0, _bodies("x", 100, 1000))
    body = mpub_messages(_bodies("x", 100, 1000))
    status, refused = refusal(daemon, "POST", "/log/stage", body, topic="t", token="c", part=0)
    assert (status, refused["message"]) == (503, "DISK_LIMIT")
    status, refused = refusal(daemon, "POST", "/log/append", topic="t", token="b")
    assert (status, refused["message"]) == (503, "DISK_LIMIT")
    assert info(daemon, "t")["count"] == 100
    assert answer(daemon, "POST", "/log/abort", topic="t", token="b")["dropped"] is True
    with daemon.connect() as wire:
        wire.publish("t", b"x" * 100_000)
