"""Checks what strangers say, in nsqd's log and in /stats: it stays on its line, and is nothing that a terminal
obeys.
"""

import struct
from collections.abc import Callable, Iterator

import pytest

from harness import Nsqd, Wire, body_of
from harness.lookupd import Impostor

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e"
FORGED = f"x\n[nsqd] 2026/01/01 00:00:00.000000 INFO: forged\r{ESCAPES}"


@pytest.fixture
def quiet_end(nsqd: Nsqd) -> Iterator[None]:
    """Asserts that, whatever the test did, each line of the log is whole and printable."""
    yield
    assert all(line.isprintable() for line in nsqd.log.split("\n")), nsqd.log
    assert not any(line.endswith("INFO: forged") for line in nsqd.log.split("\n"))


@pytest.mark.ours
@pytest.mark.usefixtures("quiet_end")
def test_identify_bodies(nsqd: Nsqd, client: Wire) -> None:
    # Raw bytes: JSON would escape them.
    client.send(b"IDENTIFY\n" + body_of(b'{"client_id":\n"' + FORGED.encode() + b'"}'))
    client.read_frame()
    nsqd.wait_for_log(r"INFO: forged\r\x1b[2J")


@pytest.mark.ours
@pytest.mark.usefixtures("quiet_end")
def test_error_texts(nsqd: Nsqd, connect: Callable[..., Wire]) -> None:
    said = ESCAPES.encode() + b"\r\xff"
    for command in (said, b"RDY " + said, b"REQ " + b"0" * 16 + b" " + said, b"PUB " + said):
        connect().send(command + b"\n")
    connect().send(b"DPUB t " + said + b"\n" + body_of(b"x"))
    nsqd.wait_for_log(r"E_INVALID invalid command \x1b[2J")


@pytest.mark.ours
@pytest.mark.usefixtures("quiet_end")
def test_long_texts_are_cut(nsqd: Nsqd, client: Wire) -> None:
    client.send(b"IDENTIFY\n" + body_of(b'{"client_id":"' + b"y" * 1_000_000 + b'"}'))
    client.read_frame()
    assert nsqd.get(f"/nothing?{'z' * 20_000}").status == 404
    nsqd.wait_for_log("zzz... (")
    assert max(map(len, nsqd.log.split("\n"))) < 5000


@pytest.mark.ours
def test_stats_as_text(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    connect().subscribe(topic, hostname=FORGED, user_agent=ESCAPES)
    producer = connect()
    producer.identify(hostname=FORGED, user_agent=ESCAPES)
    producer.publish(topic, b"x")
    text = nsqd.get("/stats").body.decode()
    assert text.count(r"x\n[nsqd] 2026/01/01") == 2
    assert all(line.replace("\t", "").isprintable() for line in text.split("\n"))


@pytest.mark.ours
def test_what_nsqlookupd_says(make_nsqd: Callable[..., Nsqd]) -> None:
    answer = f"E_INVALID {FORGED}".encode()
    impostor = Impostor(struct.pack(">i", len(answer)) + answer)
    nsqd = make_nsqd(f"--lookupd-tcp-address={impostor.address}")
    nsqd.wait_for_log(r"IDENTIFY - E_INVALID x\n[nsqd]")
    impostor.close()
    assert all(line.isprintable() for line in nsqd.log.split("\n")), nsqd.log
