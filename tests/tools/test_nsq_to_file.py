import gzip
import re
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from tools.rig import END_TIMEOUT_S, Cluster, Tool, numbered_lines

QUICK = ("--channel=archive", "--sync-interval=100ms")
HOST = socket.gethostname().partition(".")[0]
HOURLESS = "--filename-format=<TOPIC><REV>.log"
"""For tests that count files: one more would be begun when an hour ends."""


def lines_of(directory: Path) -> list[bytes]:
    """Returns the lines of all files in a directory, compressed or not."""
    found: list[bytes] = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found += (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return found


def names_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-in-flight=500",),
        ("--gzip", "--gzip-level=1"),
        ("--rotate-size=100000",),
        ("--gzip", "--rotate-size=100000", "--max-in-flight=1000"),
        ("--rotate-interval=200ms", "--work-dir={work}"),
        ("--work-dir={work}", "--gzip"),
    ],
    ids=["plain", "gzip", "rotated", "gzip rotated", "rotated by time from a work-dir", "gzip from a work-dir"],
)
def test_ten_thousand_lines(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    lines = numbered_lines(10_000)
    out, work = tmp_path / "out", tmp_path / "work"
    cluster.create(topic, "archive")
    cluster.publish(topic, lines)
    own = [flag.format(work=work) for flag in flags]
    tool = start("nsq_to_file", f"--topic={topic}", cluster.lookupd_flag, f"--output-dir={out}", *QUICK, *own)
    cluster.wait_until_finished(topic, "archive")
    assert tool.stop() == 0, tool.log
    assert sorted(lines_of(out)) == sorted(lines)
    assert not work.exists() or not names_of(work)
    assert tool.out == b""


def test_a_file_is_left_by_the_message_that_makes_it_too_big(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    lines = [b"%04d" % number for number in range(200)]
    cluster.create(topic, "archive")
    cluster.publish(topic, lines)
    own = ("--rotate-size=99", "--filename-format=<TOPIC><REV>.log", "--skip-empty-files")
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}", *QUICK, *own)
    cluster.wait_until_finished(topic, "archive")
    assert tool.stop() == 0, tool.log
    assert names_of(tmp_path) == [f"{topic}-{rev:06d}.log" for rev in range(10)]
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {100}


def test_every_placeholder(cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path) -> None:
    cluster.create(topic, "archive")
    cluster.publish(topic, [b"a", b"b"])
    own = (
        "--filename-format=<PID>/<TOPIC>.<HOST><REV>.<DATETIME>.log",
        "--datetime-format=%Y%%%d_%q",
        "--host-identifier=<SHORT_HOST>+<HOSTNAME>",
        "--rotate-size=1000",
    )
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}", *QUICK, *own)
    cluster.wait_until_finished(topic, "archive")
    assert tool.stop() == 0, tool.log
    host = re.escape(f"{HOST}+{socket.gethostname()}")
    assert re.fullmatch(rf"{tool.process.pid}/{topic}\.{host}-000000\.\d{{4}}%\d\d_%q\.log", names_of(tmp_path)[0])


def test_the_usual_name_has_no_revision(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    cluster.create(topic, "archive")
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}", *QUICK)
    name = eventually(lambda: names_of(tmp_path))[0]  # the first tick makes a file, without any message
    assert re.fullmatch(rf"{topic}\.{re.escape(HOST)}\.\d{{4}}-\d\d-\d\d_\d\d\.log", name)
    assert tool.stop() == 0


def test_no_empty_files_when_told(cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path) -> None:
    cluster.create(topic, "archive")
    own = ("--skip-empty-files", "--rotate-interval=50ms", "--sync-interval=20ms", "--channel=archive", HOURLESS)
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}", *own)
    cluster.publish(topic, [b"one", b"two"])
    cluster.wait_until_finished(topic, "archive")
    before = names_of(tmp_path)
    eventually(lambda: tool.log.count("since last open, rotating...") == len(before))  # and none is open now
    cluster.publish(topic, [b"three"])
    eventually(lambda: len(names_of(tmp_path)) == len(before) + 1)
    assert tool.stop() == 0, tool.log
    assert sorted(lines_of(tmp_path)) == [b"one", b"three", b"two"]
    assert all(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("flags", [(), ("--gzip",), ("--work-dir={work}",)], ids=["plain", "gzip", "work-dir"])
def test_hup_closes_files_and_the_next_message_opens_one(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    cluster.create(topic, "archive")
    own = (*(flag.format(work=work) for flag in flags), "--channel=archive", "--skip-empty-files", "--sync-interval=1h")
    own = (*own, HOURLESS)
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={out}", *own)
    for count, body in enumerate((b"one", b"two", b"three"), 1):
        cluster.publish(topic, [body])
        eventually(lambda: cluster.in_flight(topic, "archive") == 1)

        def is_finished_after_a_signal() -> bool:
            """Signals again and again: the message may still have been on its way when the file was closed."""
            tool.send_signal(signal.SIGHUP)
            return cluster.depth(topic, "archive") == 0

        eventually(is_finished_after_a_signal, interval_s=0.2)
        eventually(lambda count=count: len(lines_of(out)) == count if out.exists() else False)
    assert tool.stop() == 0, tool.log
    assert lines_of(out) == [b"one", b"two", b"three"]
    assert len(names_of(out)) == (3 if flags else 1)


def test_topics_are_found_at_once_and_later(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    early, late, other = f"{topic}_early", f"{topic}_late", f"{topic}_other"
    for name in (early, other):
        cluster.create(name)
        cluster.publish(name, [b"here"])
    pattern = f"--topic-pattern=^{topic}_(early|late)$"
    own = (f"--output-dir={tmp_path}", *QUICK, "--filename-format=<TOPIC>", "--http-client-request-timeout=1m")
    first = start("nsq_to_file", cluster.lookupd_flag, pattern, *own, "--topic-refresh=1h")
    eventually(lambda: early in names_of(tmp_path))  # NSQ's would look for topics after an hour
    assert first.stop() == 0, first.log
    second = start("nsq_to_file", cluster.lookupd_flag, pattern, *own, "--topic-refresh=100ms")
    cluster.create(late)
    cluster.publish(late, [b"here"])
    eventually(lambda: late in names_of(tmp_path))
    assert second.stop() == 0, second.log
    assert f"skipping topic {other} (doesn't match pattern" in second.log
    assert other not in names_of(tmp_path)


def test_what_is_there_is_appended_to_or_passed_over(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    cluster.create(topic, "archive")
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for directory, name in ((plain, "log"), (packed, "log-000000.gz")):
        directory.mkdir()
        (directory / name).write_bytes(b"no end of line")
    for directory, own in ((plain, ()), (packed, ("--gzip",))):
        cluster.publish(topic, [b"one", b"two"])
        flags = (f"--output-dir={directory}", "--filename-format=log<REV>", *QUICK, *own)
        tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        cluster.wait_until_finished(topic, "archive")
        assert tool.stop() == 0, tool.log
    assert (plain / "log").read_bytes() in (b"no end of line\none\ntwo\n", b"no end of line\ntwo\none\n")
    assert (packed / "log-000000.gz").read_bytes() == b"no end of line"
    assert sorted(gzip.decompress((packed / "log-000001.gz").read_bytes()).splitlines()) == [b"one", b"two"]


def test_nothing_in_the_output_dir_is_overwritten(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    """A name that is taken while the file is being written is raised."""
    out, work = tmp_path / "out", tmp_path / "work"
    cluster.create(topic, "archive")
    own = (f"--output-dir={out}", f"--work-dir={work}", "--filename-format=log<REV>", *QUICK)
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, *own)
    eventually(lambda: work.exists() and names_of(work))
    (out / "log-000000").write_bytes(b"mine")
    cluster.publish(topic, [b"one"])
    cluster.wait_until_finished(topic, "archive")
    assert tool.stop() == 0, tool.log
    assert (out / "log-000000").read_bytes() == b"mine"
    assert (out / "log-000001").read_bytes() == b"one\n"
    assert not names_of(work)


@pytest.mark.parametrize("spelling", ["{out}/", "{out}/../out", "{link}"], ids=["slash", "dots", "link"])
def test_a_work_dir_that_is_the_output_dir_by_another_name(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path, spelling: str
) -> None:
    """What is finished stays where it is; moving a file to itself would remove it."""
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    cluster.create(topic, "archive")
    flags = (f"--output-dir={out}", f"--work-dir={spelling.format(out=out, link=link)}", "--filename-format=log<REV>")
    for body in (b"one", b"two"):
        cluster.publish(topic, [body])
        tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, *flags, *QUICK)
        cluster.wait_until_finished(topic, "archive")
        assert tool.stop() == 0, tool.log
    assert [(out / name).read_bytes() for name in names_of(out)] == [b"one\n", b"two\n"]


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_a_full_disk_ends_it_and_loses_nothing(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    lines = numbered_lines(300)
    cluster.create(topic, "archive")
    cluster.publish(topic, lines)
    flags = (f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}", "--filename-format=log", *QUICK)
    full = start("nsq_to_file", *flags, "--max-in-flight=20", preexec_fn=_limit_file_size)
    assert full.wait() == 1
    assert f"FATAL: [{topic}/archive] writing message to disk: File too large" in full.log
    assert (tmp_path / "log").read_bytes().endswith(b"\n")  # what the last write left is taken back
    again = start("nsq_to_file", *flags)
    cluster.wait_until_finished(topic, "archive")
    assert again.stop() == 0, again.log
    assert set(lines_of(tmp_path)) == set(lines)


def test_a_directory_that_cannot_be_made_ends_it(
    cluster: Cluster, topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cluster.create(topic, "archive")
    cluster.publish(topic, [b"one", b"two"])
    tool = start("nsq_to_file", f"--topic={topic}", *cluster.nsqd_flags, f"--output-dir={tmp_path}/file/x", *QUICK)
    assert tool.wait() == 1
    assert f"FATAL: [{topic}/archive] unable to create dir: Not a directory" in tool.log
    assert cluster.depth(topic, "archive") == 2


def test_an_nsqd_that_comes_and_goes(
    make_nsqd: Callable[..., Nsqd], topic: str, start: Callable[..., Tool], tmp_path: Path
) -> None:
    nsqd = make_nsqd()
    nsqd.keep_ports()  # also while it is away: nobody else is to answer there
    nsqd.kill()
    out = tmp_path / "out"
    flags = (f"--output-dir={out}", "--topic-refresh=100ms", *QUICK)
    tool = start("nsq_to_file", f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", *flags)
    tool.wait_for_log(f"ERROR: couldn't create logger for new topic {topic}: {nsqd.tcp_address}")
    nsqd.start()
    nsqd.post("/pub", b"one", topic=topic)
    eventually(lambda: out.exists() and lines_of(out) == [b"one"])
    nsqd.restart(crash=True)
    nsqd.post("/pub", b"two", topic=topic)
    eventually(lambda: set(lines_of(out)) == {b"one", b"two"}, END_TIMEOUT_S)  # it tries again ever more rarely
    assert tool.stop() == 0
