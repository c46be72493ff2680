"""Asks by HTTP, and sees every byte of an answer, also of one that is cut off."""

import socket

from harness.closing import Closing
from harness.nsqadmin import Nsqadmin

TIMEOUT_S = 30.0
RECEIVED_BYTES = 1 << 16
WINDOW_BYTES = 1 << 16
"""The kernel holds little for a client that does not read, so that nsqadmin has to wait for it."""


class RawAnswer(Closing):
    """Is the answer to a GET: `data` has what was received of it so far, `was_reset` says whether it ended with a
    reset.
    """

    def __init__(self, address: tuple[str, int], target: str, version: str = "1.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(address)
        host = "{}:{}".format(*address)
        self._socket.sendall(f"GET {target} HTTP/{version}\r\nHost: {host}\r\n\r\n".encode())
        self.data = b""
        self.was_reset = False

    @classmethod
    def of(cls, admin: Nsqadmin, target: str, version: str = "1.1") -> "RawAnswer":
        return cls(admin.http, target, version)

    def close(self) -> None:
        self._socket.close()

    def read_until(self, wanted: bytes) -> None:
        while wanted not in self.data:
            received = self._socket.recv(RECEIVED_BYTES)
            assert received, f"ended before {wanted!r}: {self.data!r}"
            self.data += received

    def read_to_the_end(self) -> None:
        pieces = [self.data]
        try:
            while received := self._socket.recv(RECEIVED_BYTES):
                pieces.append(received)
        except ConnectionResetError:
            self.was_reset = True
        self.data = b"".join(pieces)

    def assert_cut_off(self) -> None:
        """It began once, and a client can tell that it is not whole, even one that knows no chunks."""
        assert self.data.count(b"HTTP/1.") == 1, self.data[-1000:]
        assert not self.data.endswith(b"\r\n0\r\n\r\n"), self.data[-1000:]
        assert self.was_reset
