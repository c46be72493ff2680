"""Checks whether this machine can run the daemons and Spark: versions, kernel, ports, clock, disk, limits, Java."""

import contextlib
import ctypes
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nsquark import kernel
from nsquark.base.version import NSQ_VERSION, __version__
from nsquark.tool.findings import Finding, broken, ok, warning

PYTHON_MIN: Final = (3, 11)
JAVA_MIN: Final = 17
FREE_BYTES_WANTED: Final = 2 * 1024**3
"""A topic keeps its newest file, of 100 MiB by default, so with less than this a few topics fill the disk."""
FREE_BYTES_MIN: Final = 64 * 1024**2
FSYNC_SECONDS_WANTED: Final = 0.1
FILES_WANTED: Final = 4096
CONNECT_SECONDS_MAX: Final = 1.0
JAVA_SECONDS_MAX: Final = 20.0
EARLIEST_TIME: Final = 1_735_689_600
"""This is 2025-01-01; a machine without a battery for its clock starts long before that."""
DEFAULT_PORTS: Final = {
    4150: "nsqd TCP",
    4151: "nsqd HTTP",
    4160: "nsqlookupd TCP",
    4161: "nsqlookupd HTTP",
    4171: "nsqadmin HTTP",
}

_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?$")
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_TIMEX_BYTES: Final = 256
"""No kernel's struct timex is larger than this."""
_TIME_ERROR: Final = 5


def findings(directory: Path) -> list[Finding]:
    return [
        *_versions(),
        *_kernel(),
        *_java(),
        *_clock(),
        *_disk(directory),
        *_limits(),
        *_ports(),
    ]


# -- versions --------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MIN:
        yield broken("Python", python, f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer")
    else:
        yield ok("Python", f"{python} at {sys.executable}")
    yield ok("nsquark", f"{__version__}, speaks NSQ {NSQ_VERSION}")
    missing_of: dict[str, list[str]] = {}
    for name, wanted, marker in _requirements():
        extra = _EXTRA.search(marker)
        version = _version(name)
        if extra is not None:
            missing_of.setdefault(extra[1], []).extend([] if version else [name])
        elif version is None and name == "uvloop":
            yield warning("uvloop", "not installed: the daemons are slower", "pip install uvloop")
        elif version is None or not _satisfies(version, wanted):
            yield broken(name, f"{version or 'not installed'}, needs {wanted}", f"pip install '{name}{wanted}'")
        else:
            yield ok(name, version)
    for extra_name, missing in missing_of.items():
        if extra_name == "spark":
            yield _spark(missing)


def _spark(missing: list[str]) -> Finding:
    if missing:
        text = f"not installed: {', '.join(missing)}"
        return warning("Spark", text, "pip install 'nsquark[spark]', if you want Spark; the daemons do not need it")
    return ok("Spark", f"pyspark {_version('pyspark')}")


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yields name, versions and marker of each package that nsquark requires."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("nsquark") or ():
            found = _REQUIREMENT.match(text)
            if found is not None:
                yield found[1], found[2].strip(), found[3] or ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, wanted: str) -> bool:
    """Tells whether a version is new enough. It looks at lower bounds only, since our required packages have no
    others.
    """
    lowest = re.search(r">=\s*([0-9.]+)", wanted)
    return lowest is None or _numbers(version) >= _numbers(lowest[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


# -- kernel and compiler ---------------------------------------------------------------------------------


def _kernel() -> Iterator[Finding]:
    compiler = _compiler()
    if kernel.is_compiled():
        yield ok("kernel", "compiled")
        yield ok("C compiler", compiler or "none, and none is needed: the kernel is compiled")
    elif os.environ.get(kernel.PURE_VARIABLE) == "1":
        yield warning("kernel", "interpreted, which is slow", f"unset {kernel.PURE_VARIABLE} to use the compiled one")
    elif compiler:
        yield ok("C compiler", compiler)
        yield warning("kernel", "interpreted, which is slow", "reinstall nsquark: the compiler was missing before")
    else:
        advice = "install a C compiler (gcc or clang), then reinstall nsquark"
        yield warning("kernel", "interpreted, which is slow, for lack of a C compiler", advice)


def _compiler() -> str | None:
    configured = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    names = [configured.split()[0], "cc", "gcc", "clang"]
    return next((path for path in map(shutil.which, names) if path), None)


# -- Java ------------------------------------------------------------------------------------------------


def _java() -> Iterator[Finding]:
    """Checks Java. Only Spark needs it, so its absence is no more than a warning."""
    try:
        from nsquark.spark.java import find_java
    except ModuleNotFoundError:
        return
    try:
        home = find_java()
    except Exception as error:
        yield warning("Java", " ".join(str(error).split()), f"install Java {JAVA_MIN} or newer, if you want Spark")
        return
    version = _java_version(home)
    if version is None:
        yield warning("Java", f"{home} does not start", f"install Java {JAVA_MIN} or newer, if you want Spark")
    elif version < JAVA_MIN:
        yield warning("Java", f"{version} at {home}", f"Spark needs {JAVA_MIN} or newer: set JAVA_HOME to one")
    else:
        yield ok("Java", f"{version} at {home}")


def _java_version(home: Path) -> int | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS_MAX, check=False
        )
        found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
        return int(found[1]) if found is not None else None
    return None


# -- clock -----------------------------------------------------------------------------------------------


def _clock() -> Iterator[Finding]:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    advice = "run an NTP service (systemd-timesyncd, chrony): messages carry the time of their nsqd"
    if now < EARLIEST_TIME:
        yield broken("clock", f"{shown} is wrong", advice)
    elif _is_synchronised() is False:
        yield warning("clock", f"{shown}; the system does not know whether it is right", advice)
    else:
        yield ok("clock", shown)


def _is_synchronised() -> bool | None:
    """Tells whether the Linux kernel knows that its clock is synchronised; it returns None if it cannot be asked."""
    if sys.platform != "linux":
        return None
    answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if answer < 0 else answer != _TIME_ERROR


# -- disk ------------------------------------------------------------------------------------------------


def _disk(directory: Path) -> Iterator[Finding]:
    subject = f"disk at {directory.resolve()}"
    if not directory.is_dir():
        yield broken(subject, "no such directory", f"mkdir -p {directory}, or name another by --dir")
        return
    try:
        seconds = _time_of_fsync(directory)
    except PermissionError:
        yield broken(subject, "not writable", f"give this user the right to write there (now uid {os.getuid()})")
        return
    except OSError as error:
        yield broken(subject, f"write and sync fail: {error.strerror}", "look at the disk (dmesg), or use another")
        return
    if seconds > FSYNC_SECONDS_WANTED:
        text = f"writable; a sync took {seconds * 1000:.0f} ms"
        yield warning(subject, text, "a slow disk delays publishers with --sync-every=1: use a faster one for that")
    else:
        yield ok(subject, f"writable; a sync took {seconds * 1000:.1f} ms")
    yield _free_space(directory)


def _time_of_fsync(directory: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".nsquark-doctor-") as file:
        file.write(b"nsquark" * 512)
        file.flush()
        started = time.monotonic()
        os.fsync(file.fileno())
        return time.monotonic() - started


def _free_space(directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    text = f"{usage.free / 1024**3:.1f} GiB free of {usage.total / 1024**3:.1f}"
    advice = "make room, or set --max-disk-bytes and a lower --max-bytes-per-file"
    if usage.free < FREE_BYTES_MIN:
        return broken("disk space", text, advice)
    if usage.free < FREE_BYTES_WANTED:
        return warning("disk space", text, advice)
    return ok("disk space", text)


# -- limits and ports ------------------------------------------------------------------------------------


def _limits() -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < FILES_WANTED:
        advice = "raise it (LimitNOFILE in a systemd unit, `ulimit -Hn` in a shell): one per connection is needed"
        yield warning("open files", f"at most {hard}", advice)
    else:
        yield ok("open files", "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}")


def _ports() -> Iterator[Finding]:
    for port, use in DEFAULT_PORTS.items():
        subject = f"port {port} ({use})"
        reason = _why_not_bindable(port)
        if reason is None:
            yield ok(subject, "free")
        elif _is_ours(port, use):
            yield ok(subject, f"{use.split()[0]} answers")
        else:
            flag = f"--{use.split()[1].lower()}-address"
            yield warning(
                subject, reason, f"end the program that has it (ss -ltnp), or give {use.split()[0]} another by {flag}"
            )


def _why_not_bindable(port: int) -> str | None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
            # Two sockets with SO_REUSEADDR may bind the same port, but only one can listen.
            sock.listen()
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def _is_ours(port: int, use: str) -> bool:
    """Tells whether an nsqd, nsqlookupd or nsqadmin has the port.

    It asks the HTTP port, which is one above TCP; a wrong word on the TCP port itself would leave an error in the log.
    """
    http_port = port if use.endswith("HTTP") else port + 1
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", http_port), CONNECT_SECONDS_MAX) as sock:
        sock.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        return answer.endswith(b"\r\n\r\nOK")
    return False
