"""Unix sockets: which addresses mean one, and how to listen on one that a dead process may have left behind."""

import contextlib
import errno
import os
import socket
import stat
from typing import Final

from nsquark.web.addresses import BACKLOG

PROBE_TIMEOUT_S: Final = 1.0


def is_unix_address(address: str) -> bool:
    """As for NSQ all that has not the form `host:port` is a path, whether or not host and port make sense."""
    host, colon, port = address.rpartition(":")
    if host.startswith("["):
        return not (colon and host.endswith("]"))
    return not colon or ":" in host or "[" in host or "]" in port


def listen_unix(path: str) -> socket.socket:
    """A listening socket at `path`. A socket file nobody listens on is replaced; any other file is left alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_socket(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _is_abandoned(path: str) -> bool:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
