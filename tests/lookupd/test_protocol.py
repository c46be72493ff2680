"""Checks nsqlookupd's TCP protocol, byte for byte; with NSQLOOKUPD set, the same of another nsqlookupd."""

import contextlib
import random
import signal
import socket
import struct
from collections.abc import Callable

import pytest

from harness import eventually
from harness.lookupd import (
    MAGIC_V1,
    LookupWire,
    Nsqlookupd,
    identify_command,
    identify_raw,
    nsqlookupd_is_ours,
)

ours = pytest.mark.skipif(not nsqlookupd_is_ours(), reason="NSQ's nsqlookupd has no such limit, or crashes")
IDENTIFY = identify_command()
UNREAD_BYTES_MAX = 64 * 1024 * 1024
"""The buffers of both sockets take far less than this."""


def framed(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


# -- starting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [b"  V2", b"GET ", b"\x00\x00\x00\x00", b"\xff\xfe\xfd\xfc"])
def test_another_magic_is_refused(wire: LookupWire, magic: bytes) -> None:
    wire.send(magic)
    assert wire.state() == framed(b"E_BAD_PROTOCOL")


def test_half_a_magic_gets_nothing(wire: LookupWire) -> None:
    wire.send(b"  ")
    wire.half_close()
    assert wire.state() == b""


def test_identify_answers_with_nsqlookupd_itself(lookupd: Nsqlookupd, wire: LookupWire) -> None:
    expected = (
        f'{{"broadcast_address":"127.0.0.1","hostname":"{socket.gethostname()}",'
        f'"http_port":{lookupd.http[1]},"tcp_port":{lookupd.tcp[1]},"version":"1.3.0"}}'
    )
    assert wire.identify() == expected.encode()


def test_commands_may_come_in_single_bytes(wire: LookupWire) -> None:
    for byte in MAGIC_V1 + IDENTIFY + b"REGISTER bytewise c\n":
        wire.send(bytes([byte]))
    wire.reply()
    assert wire.reply() == b"OK"


def test_many_commands_in_one_write_are_answered_in_order(wire: LookupWire) -> None:
    wire.send(MAGIC_V1 + b"PING\n" + IDENTIFY + b"REGISTER many c\nUNREGISTER many c\nPING\nNO\n")
    assert [wire.reply()[:2] for _ in range(6)] == [b"OK", b'{"', b"OK", b"OK", b"OK", b"E_"]
    assert wire.state() == b""


# -- what is accepted ------------------------------------------------------------------------------------

ACCEPTED = [
    b"PING\n",
    b"PING\r\n",
    b"  PING  \n",
    b"PING more words\n",
    "\u00a0PING\u2003\n".encode(),
    b"\x0bPING\x0c\n",
    b"REGISTER ok_topic\n",
    b"REGISTER ok_topic ok_channel\n",
    b"REGISTER ok_topic#ephemeral ok_channel#ephemeral\n",
    b"REGISTER ok_topic a b c\n",
    b"REGISTER ok_topic  c\n",
    b"REGISTER " + b"x" * 64 + b"\n",
    b"UNREGISTER never_registered\n",
    b"UNREGISTER never_registered c\n",
]


@pytest.mark.parametrize("line", ACCEPTED)
def test_ok(wire: LookupWire, line: bytes) -> None:
    wire.identify()
    assert wire.ask(line) == b"OK"
    assert wire.ask(b"PING\n") == b"OK"


def test_ping_needs_no_identify(wire: LookupWire) -> None:
    assert wire.ask(MAGIC_V1 + b"PING\n") == b"OK"


def test_a_double_space_means_no_channel(lookupd: Nsqlookupd, wire: LookupWire) -> None:
    wire.identify()
    wire.ask(b"REGISTER double_space  c\n")
    assert lookupd.channels("double_space") == set()


# -- what is refused, always with the connection ---------------------------------------------------------

REFUSED_BEFORE_IDENTIFY = {
    b"\n": b"E_INVALID invalid command ",
    b"ping\n": b"E_INVALID invalid command ping",
    b"FOO bar\n": b"E_INVALID invalid command FOO",
    b"F\xff\xe9\n": b"E_INVALID invalid command F\xff\xe9",
    b"\x85PING\n": b"E_INVALID invalid command \x85PING",
    b"\x1cPING\n": b"E_INVALID invalid command \x1cPING",
    b"REGISTER t\n": b"E_INVALID client must IDENTIFY",
    b"REGISTER\n": b"E_INVALID client must IDENTIFY",
    b"UNREGISTER t\n": b"E_INVALID client must IDENTIFY",
}
REFUSED_AFTER_IDENTIFY = {
    IDENTIFY: b"E_INVALID cannot IDENTIFY again",
    b"REGISTER\n": b"E_INVALID REGISTER insufficient number of params",
    b"REGISTER \n": b"E_INVALID REGISTER insufficient number of params",
    b"UNREGISTER\n": b"E_INVALID UNREGISTER insufficient number of params",
    b"REGISTER  t\n": b"E_BAD_TOPIC REGISTER topic name '' is not valid",
    b"REGISTER a!b\n": b"E_BAD_TOPIC REGISTER topic name 'a!b' is not valid",
    b"REGISTER a\xff\n": b"E_BAD_TOPIC REGISTER topic name 'a\xff' is not valid",
    b"REGISTER " + b"x" * 65 + b"\n": b"E_BAD_TOPIC REGISTER topic name '" + b"x" * 65 + b"' is not valid",
    b"REGISTER a b!c\n": b"E_BAD_CHANNEL REGISTER channel name 'b!c' is not valid",
    b"UNREGISTER a!b\n": b"E_BAD_TOPIC UNREGISTER topic name 'a!b' is not valid",
    b"UNREGISTER a b!\n": b"E_BAD_CHANNEL UNREGISTER channel name 'b!' is not valid",
}


@pytest.mark.parametrize("line", REFUSED_BEFORE_IDENTIFY)
def test_refused_before_identify(wire: LookupWire, line: bytes) -> None:
    wire.send(MAGIC_V1 + line)
    assert wire.state() == framed(REFUSED_BEFORE_IDENTIFY[line])


@pytest.mark.parametrize("line", REFUSED_AFTER_IDENTIFY)
def test_refused_after_identify(wire: LookupWire, line: bytes) -> None:
    wire.identify()
    wire.send(line)
    assert wire.state() == framed(REFUSED_AFTER_IDENTIFY[line])


# -- IDENTIFY's body -------------------------------------------------------------------------------------

BAD_JSON = [
    b"",
    b"[]",
    b'{"a',
    b"{} x",
    b'"text"',
    b"NaN",
    b'{"tcp_port":NaN}',
    b"[" * 5000,
    IDENTIFY[13:] + b"x",
    identify_command(tcp_port="1")[13:],
    identify_command(tcp_port=1.5)[13:],
    identify_command(tcp_port=True)[13:],
    identify_command(tcp_port=2**63)[13:],
    identify_command(version=3)[13:],
    identify_command(hostname=3)[13:],
    identify_command(remote_address=3)[13:],
]
INCOMPLETE = [
    b"null",
    b"{}",
    b'{"broadcast_address":null,"tcp_port":1,"http_port":2,"version":"1"}',
    identify_command(broadcast_address=None)[13:],
    identify_command(tcp_port=None)[13:],
    identify_command(http_port=None)[13:],
    identify_command(version="")[13:],
    identify_command(tcp_port=0)[13:],
]
COMPLETE = [
    identify_command(hostname=None)[13:],
    identify_command(tcp_port=-1)[13:],
    identify_command(tcp_port=70000)[13:],
    identify_command(unknown={"deep": [1, None]})[13:],
    identify_command(version=None, VERSION="x")[13:],
    IDENTIFY[13:] + b" \n",
    IDENTIFY[13:].replace(b'"h"', b'"\xff"'),
    IDENTIFY[13:].replace(b'"h"', b'"\\ud800"'),
]


@pytest.mark.parametrize("body", BAD_JSON)
def test_what_is_no_peer_is_bad_json(wire: LookupWire, body: bytes) -> None:
    wire.send(MAGIC_V1 + identify_raw(body))
    assert wire.state() == framed(b"E_BAD_BODY IDENTIFY failed to decode JSON body")


@pytest.mark.parametrize("body", INCOMPLETE)
def test_required_fields(wire: LookupWire, body: bytes) -> None:
    wire.send(MAGIC_V1 + identify_raw(body))
    assert wire.state() == framed(b"E_BAD_BODY IDENTIFY missing fields")


@pytest.mark.parametrize("body", COMPLETE)
def test_lenient_reading(wire: LookupWire, body: bytes) -> None:
    assert wire.ask(MAGIC_V1 + identify_raw(body)).startswith(b'{"broadcast_address"')


@pytest.mark.parametrize(("cut", "what"), [(b"", b"body size"), (b"\0\0", b"body size"), (b"\0\0\0\x05ab", b"body")])
def test_a_body_cut_short_is_told(wire: LookupWire, cut: bytes, what: bytes) -> None:
    wire.send(MAGIC_V1 + b"IDENTIFY\n" + cut)
    wire.half_close()
    assert wire.state() == framed(b"E_BAD_BODY IDENTIFY failed to read " + what)


def test_a_supplied_remote_address_does_not_count(lookupd: Nsqlookupd, wire: LookupWire) -> None:
    wire.identify(remote_address="1.2.3.4:5")
    assert wire.name in [node["remote_address"] for node in lookupd.nodes()]


# -- limits that NSQ's nsqlookupd does not have ----------------------------------------------------------


@ours
@pytest.mark.parametrize("size", [-1, -(2**31)])
def test_a_negative_size_is_an_error_and_no_crash(lookupd: Nsqlookupd, wire: LookupWire, size: int) -> None:
    wire.send(MAGIC_V1 + b"IDENTIFY\n" + struct.pack(">i", size))
    assert wire.state() == framed(b"E_BAD_BODY IDENTIFY invalid body size %d" % size)
    assert lookupd.get("/ping").body == b"OK"


@ours
def test_a_huge_body_is_refused_before_it_is_read(wire: LookupWire) -> None:
    wire.send(MAGIC_V1 + b"IDENTIFY\n" + struct.pack(">i", 2**31 - 1))
    assert wire.state() == framed(b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536")


@ours
def test_an_endless_line_is_refused(wire: LookupWire) -> None:
    wire.send(MAGIC_V1 + b"x" * 100_000)
    assert wire.state() == framed(b"E_INVALID line longer than 4096 bytes")


@ours
def test_whoever_does_not_read_replies_is_not_read_forever(lookupd: Nsqlookupd, wire: LookupWire) -> None:
    wire.send(MAGIC_V1)
    wire.socket.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < UNREAD_BYTES_MAX:
            sent += wire.socket.send(b"PING\n" * 10_000)
    assert sent < UNREAD_BYTES_MAX
    assert lookupd.get("/ping").body == b"OK"


def test_noise_never_kills(lookupd: Nsqlookupd) -> None:
    noise = random.Random(4)
    words = [
        b"IDENTIFY\n",
        b"REGISTER ",
        b"UNREGISTER ",
        b"PING\n",
        b"\n",
        b" ",
        IDENTIFY,
        b"\0\0\0\x03",
        b"a b\n",
    ]
    for _ in range(200):
        parts = [noise.choice([*words, noise.randbytes(noise.randrange(40))]) for _ in range(noise.randrange(12))]
        # NSQ's own cannot bear a negative size.
        parts = [b"PING\n" if part == b"IDENTIFY\n" and not nsqlookupd_is_ours() else part for part in parts]
        with lookupd.connect() as wire:
            wire.send(MAGIC_V1 + b"".join(parts))
            wire.half_close()
            wire.state()
    assert lookupd.get("/ping").body == b"OK"


# -- leaving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "error"])
def test_whoever_leaves_is_no_longer_found(lookupd: Nsqlookupd, how: str) -> None:
    topic = f"leaving_by_{how}"
    with lookupd.connect() as wire:
        wire.identify()
        wire.ask(b"REGISTER %s c\n" % topic.encode())
        assert lookupd.producers(topic) == {("10.0.0.1", 4150)}
        if how == "reset":
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "error":
            wire.send(b"NO\n")
            assert b"E_INVALID" in wire.state()
    eventually(lambda: lookupd.producers(topic) == set())
    assert lookupd.channels(topic) == {"c"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(make_lookupd: Callable[..., Nsqlookupd], number: signal.Signals) -> None:
    lookupd = make_lookupd()
    with lookupd.connect() as wire:
        wire.identify()
        assert lookupd.stop(number) == 0
        assert wire.state() == b""
    assert "TCP: closing" in lookupd.log
    assert "HTTP: closing" in lookupd.log
