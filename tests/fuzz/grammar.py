"""Makes what hostile clients send: valid commands and requests, and ones that are wrong in some place.

Everything is drawn from a `Random`, so a seed gives the same inputs again.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import cramjam

NAMES = (
    "t0",
    "t1",
    "t2#ephemeral",
    "t3",
    "t4#ephemeral",
    ".",
    "..",
    "a" * 64,
    "a" * 65,
    "",
    "b d",
    "t\0",
    "\u00e9",
    "x/y",
)
CHANNELS = ("c0", "c1", "c2#ephemeral", "a" * 64, "a" * 65, "", "#ephemeral", "c d")
NUMBERS = (0, 1, -1, 2, 5, 127, 255, 256, 4_095, 65_535, 1 << 20, (1 << 20) + 1, 5 << 20, (5 << 20) + 1, (1 << 31) - 1)
DIGITS = (
    "0",
    "1",
    "-1",
    "+1",
    "60000",
    "3600000",
    "3600001",
    "9" * 19,
    "9" * 20,
    "9" * 4301,
    "",
    "x",
    "1e3",
    "0x1",
    " 1",
)
BODY_BYTES_MAX = 2_000
COMMANDS_MAX = 25
REQUESTS_MAX = 8

Ids = list[bytes]
"""Has ids of messages that were delivered, so that some answers are right ones."""


def name(random: Random, names: tuple[str, ...] = NAMES) -> bytes:
    return random.choice(names if random.random() < 0.3 else names[:3]).encode()


def body(random: Random) -> bytes:
    size = random.choice((0, 1, 2, 10, 100, random.randrange(BODY_BYTES_MAX)))
    return random.randbytes(size) if random.random() < 0.5 else b"x" * size


def sized(random: Random, data: bytes) -> bytes:
    """Puts a body behind its size, which is sometimes another."""
    size = len(data) if random.random() < 0.9 else random.choice(NUMBERS)
    return struct.pack(">I", size & 0xFFFFFFFF) + data


def document(random: Random, fields: tuple[str, ...]) -> bytes:
    """Makes JSON of known and unknown fields, of right and wrong types."""
    kind = random.random()
    if kind < 0.05:
        depth = random.choice((10, 500, 5_000, 100_000))
        return b'{"x":' + b"[" * depth + b"]" * random.choice((0, depth)) + b"}"
    if kind < 0.1:
        return random.randbytes(random.randrange(1, 50))
    values: tuple[Any, ...] = (
        0,
        1,
        -1,
        1000,
        60_000,
        1 << 62,
        1 << 64,
        1.5,
        True,
        False,
        None,
        "",
        "x",
        "\ud83d\ude00" * 50,
        [],
        {},
        "y" * 3000,
    )
    keys = [random.choice(fields) if random.random() < 0.9 else "unknown" for _ in range(random.randrange(8))]
    chosen = {key.upper() if random.random() < 0.1 else key: random.choice(values) for key in keys}
    return json.dumps(chosen, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def mutated(random: Random, data: bytes) -> bytes:
    """Returns bytes with something changed, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del changed[at : at + random.choice((1, 1, 4, 100))]
        elif kind == 2:
            changed[at:at] = random.choice((b"\n", b"\r\n", b" ", b"\0", b"\xff", b"%", b"\n\n", random.randbytes(4)))
        elif kind == 3:
            changed[at:at] = changed[at : at + random.randrange(1, 50)]
        elif kind == 4:
            changed[at : at + 4] = struct.pack(">I", random.choice(NUMBERS) & 0xFFFFFFFF)
        else:
            del changed[at:]
    return bytes(changed)


# -- nsqd over TCP ---------------------------------------------------------------------------------------

IDENTIFY_FIELDS = (
    "client_id", "hostname", "user_agent", "feature_negotiation", "heartbeat_interval", "output_buffer_size",
    "output_buffer_timeout", "sample_rate", "msg_timeout", "deflate_level", "topology_zone", "show_limits",
)  # fmt: skip
"""Leaves out the fields that change the connection's encoding."""


def _mpub(random: Random) -> bytes:
    bodies = [body(random) for _ in range(random.choice((0, 1, 2, 10, 200)))]
    count = len(bodies) if random.random() < 0.9 else random.choice(NUMBERS)
    messages = struct.pack(">I", count & 0xFFFFFFFF) + b"".join(sized(random, each) for each in bodies)
    return b"MPUB " + name(random) + b"\n" + sized(random, messages)


def _answer(random: Random, ids: Ids) -> bytes:
    known = (
        random.choice(ids) if ids and random.random() < 0.8 else random.choice((b"0" * 16, b"x" * 16, b"", b"1" * 15))
    )
    word = random.choice((b"FIN", b"REQ", b"TOUCH"))
    return b" ".join([word, known, *([random.choice(DIGITS).encode()] if word == b"REQ" else [])]) + b"\n"


def command(random: Random, ids: Ids) -> bytes:
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: b"IDENTIFY\n" + sized(random, document(random, IDENTIFY_FIELDS)),
        lambda: b"SUB " + name(random) + b" " + name(random, CHANNELS) + b"\n",
        lambda: b"PUB " + name(random) + b"\n" + sized(random, body(random)),
        lambda: b"PUB t0\n" + sized(random, body(random) or b"x"),
        lambda: _mpub(random),
        lambda: b"DPUB " + name(random) + b" " + random.choice(DIGITS).encode() + b"\n" + sized(random, body(random)),
        lambda: b"RDY " + random.choice((b"0", b"1", b"100", b"2500", random.choice(DIGITS).encode())) + b"\n",
        lambda: _answer(random, ids),
        lambda: _answer(random, ids),
        lambda: b"NOP\n" * random.choice((1, 1, 100)),
        lambda: random.choice((b"CLS\n", b"AUTH\n" + sized(random, body(random)), b"\n", b"PUB\n", b"sub t0 c0\n")),
        lambda: random.randbytes(random.randrange(1, 60)),
    )
    made = random.choice(makers)()
    return mutated(random, made) if random.random() < 0.15 else made


def commands(random: Random, ids: Ids) -> tuple[bytes, int]:
    """Makes what a client sends behind its magic, and says how many commands that is."""
    count = random.randrange(1, COMMANDS_MAX)
    return b"".join(command(random, ids) for _ in range(count)), count


# -- HTTP ------------------------------------------------------------------------------------------------

NSQD_PATHS = (
    ("POST", "/pub"), ("POST", "/pub"), ("POST", "/mpub"), ("POST", "/mpub"), ("GET", "/ping"), ("GET", "/info"),
    ("GET", "/stats"), ("GET", "/metrics"), ("POST", "/topic/create"), ("POST", "/topic/delete"),
    ("POST", "/topic/empty"), ("POST", "/topic/pause"), ("POST", "/topic/unpause"), ("POST", "/channel/create"),
    ("POST", "/channel/delete"), ("POST", "/channel/empty"), ("POST", "/channel/pause"), ("POST", "/channel/unpause"),
    ("GET", "/log/info"), ("GET", "/log/at"), ("GET", "/log/plan"), ("GET", "/log/read"), ("POST", "/log/stage"),
    ("POST", "/log/append"), ("POST", "/log/abort"), ("POST", "/channel/seek"), ("POST", "/channel/commit"),
    ("GET", "/channel/seek"), ("GET", "/channel/messages"),
    ("GET", "/config/nsqlookupd_tcp_addresses"), ("GET", "/nothing"), ("OPTIONS", "/pub"), ("HEAD", "/ping"),
)  # fmt: skip
LOOKUPD_PATHS = (
    ("GET", "/ping"), ("GET", "/info"), ("GET", "/topics"), ("GET", "/channels"), ("GET", "/lookup"), ("GET", "/nodes"),
    ("GET", "/debug"), ("GET", "/metrics"), ("POST", "/topic/create"), ("POST", "/topic/delete"),
    ("POST", "/topic/tombstone"), ("POST", "/channel/create"), ("POST", "/channel/delete"), ("GET", "/nothing"),
)  # fmt: skip
KEYS = (
    "topic", "channel", "defer", "binary", "format", "include_clients", "include_mem", "from", "to", "after", "wait",
    "ts", "ts_ms", "token", "part", "parts", "owner", "seq", "ttl", "start", "max_messages", "max_bytes", "node",
)  # fmt: skip


def _value(random: Random, key: str) -> str:
    if key in ("topic", "channel"):
        names = NAMES if key == "topic" else CHANNELS
        return random.choice(names if random.random() < 0.2 else names[:2]).replace("#", "%23").replace(" ", "+")
    words = (
        "true",
        "false",
        "json",
        "text",
        "oldest",
        "newest",
        "time:0",
        "a",
        "%zz",
        "%00",
        "a;b",
        "%F0%9F%98%80",
        "n" * 200,
    )
    return random.choice(words + DIGITS).replace(" ", "+")


def request(random: Random, paths: tuple[tuple[str, str], ...]) -> bytes:
    method, path = random.choice(paths)
    keys = ["topic"] * (random.random() < 0.9) + random.sample(KEYS, random.randrange(4))
    query = "&".join(f"{key}={_value(random, key)}" for key in keys)
    content = b"" if method == "GET" else random.choice((body(random), b"a\nb\n" * 20, _mpub(random)[10:]))
    chunked = random.random() < 0.2
    lines = [f"{method} {path}?{query} HTTP/{random.choice(('1.1', '1.1', '1.1', '1.0', '2.0'))}", "Host: 127.0.0.1"]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
        step = random.choice((1, 2, 100))
        pieces = [content[at : at + step] for at in range(0, min(len(content), 400), step)]
        content = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    elif content or random.random() < 0.5:
        lines.append(f"Content-Length: {len(content) if random.random() < 0.95 else random.choice(NUMBERS)}")
    extra = (
        "Connection: close",
        "Connection: keep-alive",
        "Expect: 100-continue",
        "Upgrade: h2c",
        "X: " + "y" * 5000,
        "Z:",
    )
    lines += random.sample(extra, random.choice((0, 0, 0, 1, 2)))
    made = ("\r\n".join(lines) + "\r\n\r\n").encode() + content
    return mutated(random, made) if random.random() < 0.15 else made


def requests(random: Random, paths: tuple[tuple[str, str], ...]) -> tuple[bytes, int]:
    count = random.randrange(1, REQUESTS_MAX)
    return b"".join(request(random, paths) for _ in range(count)), count


# -- nsqlookupd over TCP ---------------------------------------------------------------------------------

PEER_FIELDS = ("broadcast_address", "tcp_port", "http_port", "version", "hostname", "remote_address")
PEER = b'{"broadcast_address":"fuzz","tcp_port":1,"http_port":2,"version":"1","hostname":"h"}'


def lookup_command(random: Random) -> bytes:
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: b"IDENTIFY\n" + sized(random, PEER if random.random() < 0.7 else document(random, PEER_FIELDS)),
        lambda: b"REGISTER " + name(random) + b" " + name(random, CHANNELS) + b"\n",
        lambda: b"REGISTER " + name(random) + b"\n",
        lambda: b"UNREGISTER " + name(random) + random.choice((b"\n", b" c0\n", b"  \n")),
        lambda: b"PING\n" * random.choice((1, 1, 50)),
        lambda: random.randbytes(random.randrange(1, 40)),
    )
    made = random.choice(makers)()
    return mutated(random, made) if random.random() < 0.15 else made


def lookup_commands(random: Random) -> tuple[bytes, int]:
    count = random.randrange(1, COMMANDS_MAX)
    first = b"IDENTIFY\n" + sized(random, PEER) if random.random() < 0.7 else b""
    return first + b"".join(lookup_command(random) for _ in range(count)), count + bool(first)


# -- on the way ------------------------------------------------------------------------------------------


def pieces(data: bytes, random: Random) -> Iterator[bytes]:
    """Cuts bytes as the network may: mostly they stay whole, sometimes they come in a few pieces or one by one."""
    step = random.choice((len(data), len(data), 1000, 7, 1 if len(data) < 300 else 100)) or 1
    for at in range(0, len(data), step):
        yield data[at : at + step]


def snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress(data))


def deflate(data: bytes) -> bytes:
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH)
