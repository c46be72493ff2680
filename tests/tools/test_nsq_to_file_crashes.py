"""Kills nsq_to_file again and again: nothing is lost or overwritten, and files can be read up to what was finished."""

import contextlib
import os
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from tools.rig import END_TIMEOUT_S, Tool, numbered_lines

MESSAGES = 6_000
KILLS = 8
CHANNEL = "archive"
GZIP_WINDOW_BITS = 31


def readable(path: Path) -> bytes:
    """Returns what a reader gets of a file, up to where it breaks off."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    text = b""
    while data:
        member = zlib.decompressobj(wbits=GZIP_WINDOW_BITS)
        text += member.decompress(data)
        if not member.eof:
            break
        data = member.unused_data
    return text


def whole_lines(directories: list[Path]) -> list[bytes]:
    lines: list[bytes] = []
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                lines += readable(path).split(b"\n")[:-1]
    return lines


def unfinished(nsqd: Nsqd, topic: str) -> int:
    channel = nsqd.channel(topic, CHANNEL)
    return int(channel["depth"] + channel["in_flight_count"] + channel["deferred_count"])


def contents(directories: list[Path]) -> dict[int, bytes]:
    """Reads files by inode: one that was moved is still the same, and one that is just being moved is left out."""
    found: dict[int, bytes] = {}
    for path in [path for directory in directories for path in directory.rglob("*")]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            found[os.fstat(file.fileno()).st_ino] = file.read()
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--filename-format=<TOPIC>.log",),
        ("--gzip",),
        ("--rotate-size=50000", "--work-dir={work}"),
        ("--gzip", "--rotate-size=50000", "--work-dir={work}"),
    ],
    ids=["plain", "gzip", "rotated from a work-dir", "gzip rotated from a work-dir"],
)
def test_killed_at_any_moment(
    make_nsqd: Callable[..., Nsqd], topic: str, start: Callable[..., Tool], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    chance = random.Random(f"{flags}")
    out, work = tmp_path / "out", tmp_path / "work"
    places = [out, work]
    nsqd = make_nsqd()
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel=CHANNEL)
    lines = numbered_lines(MESSAGES)
    for at in range(0, MESSAGES, 2000):
        assert nsqd.post("/mpub", b"\n".join(lines[at : at + 2000]), topic=topic).status == 200
    own = [flag.format(work=work) for flag in flags]
    common = (f"--topic={topic}", f"--channel={CHANNEL}", f"--nsqd-tcp-address={nsqd.tcp_address}")
    soon = ("--sync-interval=100ms", "--max-in-flight=40", "--consumer-opt=msg_timeout,2s")
    command = ("nsq_to_file", *common, f"--output-dir={out}", *soon, *own)
    left = MESSAGES
    for _ in range(KILLS):
        tool = start(*command)
        eventually(lambda left=left: unfinished(nsqd, topic) < left, END_TIMEOUT_S)
        time.sleep(chance.uniform(0, 0.05))  # the moment is chosen by chance
        before = contents(places)
        tool.kill()
        after = contents(places)
        assert all(after[inode].startswith(data) for inode, data in before.items()), "a file has changed"
        eventually(lambda: nsqd.channel(topic, CHANNEL)["client_count"] == 0)
        left = unfinished(nsqd, topic)
        written = set(whole_lines(places))
        assert len(written & set(lines)) >= MESSAGES - left, "finished messages that no file has"
        if not left:
            break
    tool = start(*command)
    tool.wait_for_log("connected")
    eventually(lambda: unfinished(nsqd, topic) == 0, END_TIMEOUT_S)
    assert tool.stop() == 0, tool.log
    assert set(whole_lines([out])) >= set(lines)
    assert not [path for path in work.rglob("*") if path.is_file()], "files that were never handed over"
