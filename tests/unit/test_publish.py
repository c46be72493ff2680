"""Checks the way from a client's bytes to a commit, and from the commit to the replies, on both forms of the kernel."""

import struct
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from unit import kernel_forms

OK = b"ok "
MESSAGE_BYTES_MAX = 50
BODY_BYTES_MAX = 400

both_forms = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
bodies = st.binary(min_size=1, max_size=MESSAGE_BYTES_MAX)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("PUB"), st.lists(bodies, min_size=1, max_size=1)),
        st.tuples(st.just("MPUB"), st.lists(bodies, min_size=1, max_size=7)),
    ),
    max_size=10,
)


@pytest.fixture(params=kernel_forms.FORMS)
def publish(request: pytest.FixtureRequest) -> SimpleNamespace:
    names = ("records", "extents", "commits", "tail", "replies", "publish")
    modules = [kernel_forms.load(name, request.param) for name in names]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


class IntakeClient:
    """Is a client of one topic whose log keeps all in chunks of this size."""

    def __init__(self, publish: SimpleNamespace, chunk_bytes: int = 200) -> None:
        class Log:
            def extend(self, body_bytes: int) -> None:
                chunk = publish.Chunk(1, 1, max(chunk_bytes, body_bytes + 34), 10)
                chunks.append(chunk)
                tail.chunk = chunk
                tail.commits.open.slices.append((chunk, 0))

        class Replies(publish.ReplyQueue):  # type: ignore[name-defined]
            def refusal(self, word: str, error: Exception) -> bytes:
                return f"{word} {error} ".encode()

        chunks: list[Any] = []
        self.chunks = chunks
        self.commits: list[Any] = []
        self.written: list[bytes] = []
        self.closed = 0
        tail = publish.Tail(Log(), None, publish.Extents(), lambda tail: self.commits.append(tail.commits.open))
        self.tail = tail
        self.replies = Replies(OK, self.written.append, self._close)
        self.published = {"t": 0}
        self.congested = 0
        self.intake = publish.Intake(
            "t", self.tail, self.replies, self.published, self._congested, MESSAGE_BYTES_MAX, BODY_BYTES_MAX
        )

    def _close(self) -> None:
        self.closed += 1

    def _congested(self) -> None:
        self.congested += 1

    def begin(self) -> "IntakeClient":
        """Goes on as after a first publish, which goes the other way."""
        self.tail.append(b"first", 0, 5, 1)
        return self

    def messages(self) -> list[bytes]:
        found = []
        for chunk in self.chunks:
            for index in range(chunk.count):
                found.append(bytes(chunk.view[chunk.offset(index) + 34 : chunk.offset(index + 1)]))
        return found

    def commit(self, error: Exception | None = None) -> None:
        self.tail.commits.start_next().settle(error)
        self.tail.commits.written()


def encoded(word: str, messages: list[bytes]) -> bytes:
    if word == "PUB":
        return b"PUB t\n" + sized(messages[0])
    return b"MPUB t\n" + sized(struct.pack(">i", len(messages)) + b"".join(map(sized, messages)))


def sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


@both_forms
@given(commands, st.data())
def test_whole_commands_are_taken_and_nothing_else(
    publish: SimpleNamespace, given_commands: list[tuple[str, list[bytes]]], data: st.DataObject
) -> None:
    client = IntakeClient(publish).begin()
    stream, ends = b"", [0]
    for word, messages in given_commands:
        stream += encoded(word, messages)
        ends.append(len(stream))
    cut = data.draw(st.integers(0, len(stream)))
    taken = client.intake.publish(bytearray(stream + b"PUB t\n"), 0, cut)
    assert taken in ends and taken <= cut
    whole = given_commands[: ends.index(taken)]
    if taken < max(end for end in ends if end <= cut):  # a PUB may wait for a new chunk, an MPUB brings its own
        assert given_commands[len(whole)][0] == "PUB"
    assert client.messages() == [b"first", *(body for _, messages in whole for body in messages)]
    assert client.published["t"] == sum(len(messages) for _, messages in whole)
    client.commit()
    assert b"".join(client.written) == OK * len(whole)


@pytest.mark.parametrize(
    "command",
    [
        b"PUB u\n" + sized(b"x"),
        b"PUB t \n" + sized(b"x"),
        b"PUB t\n" + struct.pack(">i", 0),
        b"PUB t\n" + sized(b"x" * (MESSAGE_BYTES_MAX + 1)),
        b"PUB t\n" + struct.pack(">i", -1) + b"x" * 9,
        b"MPUB u\n" + sized(struct.pack(">i", 1) + sized(b"x")),
        b"MPUB t\n" + sized(struct.pack(">i", 0)),
        b"MPUB t\n" + sized(struct.pack(">i", -1)),
        b"MPUB t\n" + sized(struct.pack(">i", 2) + sized(b"x")),
        b"MPUB t\n" + sized(struct.pack(">i", 1) + sized(b"")),
        b"MPUB t\n" + sized(struct.pack(">i", 1) + sized(b"x" * (MESSAGE_BYTES_MAX + 1))),
        b"MPUB t\n" + struct.pack(">ii", BODY_BYTES_MAX + 1, 1) + sized(b"x"),
        b"MPUB t\n" + struct.pack(">ii", -1, 1) + sized(b"x"),
        b"MPUB t\n" + struct.pack(">ii", 5, BODY_BYTES_MAX) + sized(b"x"),
        b"FIN 0123456789abcdef\n",
    ],
)
def test_what_is_not_well_formed_is_left(publish: SimpleNamespace, command: bytes) -> None:
    client = IntakeClient(publish).begin()
    before = encoded("MPUB", [b"a", b"b"])
    data = bytearray(before + command)
    assert client.intake.publish(data, 0, len(data)) == len(before)
    assert client.messages() == [b"first", b"a", b"b"]


def test_nothing_is_taken_into_a_log_that_is_closed(publish: SimpleNamespace) -> None:
    client = IntakeClient(publish).begin()
    client.tail.is_closed = True
    data = bytearray(encoded("MPUB", [b"a"]))
    assert client.intake.publish(data, 0, len(data)) == 0


def test_replies_wait_for_earlier_ones(publish: SimpleNamespace) -> None:
    client = IntakeClient(publish)
    first, second = publish.Commit(), publish.Commit()
    client.replies.promise(first, "PUB", 2)
    client.replies.promise(second, "MPUB", 1)
    client.replies.send(b"frame ")
    second.settle()
    assert (client.written, client.replies.are_owed) == ([], True)
    first.settle()
    assert (b"".join(client.written), client.replies.are_owed) == (OK * 3 + b"frame ", False)


def test_a_failed_publish_is_the_last_reply(publish: SimpleNamespace) -> None:
    client = IntakeClient(publish)
    good, bad = publish.Commit(), publish.Commit()
    client.replies.promise(good, "PUB", 1)
    client.replies.promise(bad, "MPUB", 1)
    client.replies.send(b"never ")
    bad.settle(OSError("full"))
    good.settle()
    assert b"".join(client.written) == OK + b"MPUB full "
    assert (client.closed, client.replies.are_owed) == (1, False)


def test_a_closed_connection_gets_no_reply(publish: SimpleNamespace) -> None:
    client = IntakeClient(publish)
    commit = publish.Commit()
    client.replies.promise(commit, "PUB", 1)
    client.replies.stop()
    commit.settle(OSError("full"))
    assert (client.written, client.closed) == ([], 0)


def test_a_client_is_told_when_too_much_is_uncommitted(publish: SimpleNamespace) -> None:
    client = IntakeClient(publish).begin()
    client.tail.append(bytes(9 << 20), 0, 9 << 20, 1)
    data = bytearray(encoded("MPUB", [b"a"]))
    client.intake.publish(data, 0, len(data))
    assert client.congested == 1
