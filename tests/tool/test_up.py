"""Checks `nsquark up`, which runs all daemons by one command."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import eventually
from harness.holding import hold
from nsquark.base.event_loop import SAME_STOP_S

from .conftest import NSQUARK, STOP_TIMEOUT_S, Up, get


def is_running(pid: int) -> bool:
    """Tells whether a process runs; a zombie that nobody waited for has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second one when it ends between the opening and the reading
        return False


def pids(ports: dict[str, Any]) -> list[int]:
    return [entry["pid"] for kind in ("nsqlookupd", "nsqd", "nsqadmin") for entry in ports[kind]]


def depth(address: str, topic: str) -> int:
    topics = json.loads(get(address, f"/stats?format=json&topic={topic}"))["topics"]
    return sum(topic["depth"] for topic in topics)


def found_at(lookupd: str, topic: str) -> set[int]:
    """Returns the TCP ports of the nsqds that a consumer is sent to."""
    known = json.loads(get(lookupd, "/topics"))["topics"]
    return (
        {p["tcp_port"] for p in json.loads(get(lookupd, f"/lookup?topic={topic}"))["producers"]}
        if topic in known
        else set()
    )


def test_nsqadmin_shows_the_nsqds(make_up: Callable[..., Up]) -> None:
    up = make_up("--nsqd=2").wait_until_up()
    address = up.ports["nsqadmin"][0]["http"]
    assert f"see it all at http://{address}/" in up.output
    eventually(lambda: len(json.loads(get(address, "/api/nodes"))["nodes"]) == 2)
    assert get(address, "/").startswith(b"<!doctype html>")


def test_a_signal_that_comes_twice_at_once_stops_all_in_order(make_up: Callable[..., Up]) -> None:
    """`timeout` sends each signal twice: to its child, and to the group that the child is in."""
    up = make_up("--no-nsqadmin").wait_until_up()
    nsqd = up.ports["nsqd"][0]["pid"]
    hold(nsqd)  # so that stopping takes longer than the signals
    began_s = time.monotonic()
    while time.monotonic() - began_s < SAME_STOP_S / 4:
        up.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    os.kill(nsqd, signal.SIGCONT)
    assert up.process.wait(STOP_TIMEOUT_S) == 0, up.errors
    assert "SIGTERM: stopping all" in up.errors
    assert "told twice" not in up.errors


def test_nsqadmin_can_be_left_out(make_up: Callable[..., Up]) -> None:
    up = make_up("--no-nsqadmin").wait_until_up()
    assert up.ports["nsqadmin"] == []
    assert "see it all at" not in up.output


def test_a_killed_nsqd_comes_back_with_its_data_on_its_ports(make_up: Callable[..., Up]) -> None:
    up = make_up("--nsqd=2").wait_until_up()
    before = up.ports
    first, second = before["nsqd"]
    lookupd = before["nsqlookupd"][0]["http"]
    assert f"nsqd-2      tcp {second['tcp']}  http {second['http']}" in up.output
    for node in (first, second):
        get(node["http"], "/pub?topic=kept", b"of " + node["name"].encode())
    tcp_ports = {int(node["tcp"].rpartition(":")[2]) for node in (first, second)}
    eventually(lambda: found_at(lookupd, "kept") == tcp_ports)

    os.kill(second["pid"], signal.SIGKILL)
    eventually(lambda: up.ports["nsqd"][1]["pid"] != second["pid"], STOP_TIMEOUT_S)
    after = up.ports["nsqd"][1]
    assert after | {"pid": 0} == second | {"pid": 0}
    assert depth(after["http"], "kept") == 1
    eventually(lambda: found_at(lookupd, "kept") == tcp_ports)
    assert up.ports["nsqd"][0] == first
    assert "nsqd-2     | died (SIGKILL): starting it again in 1 s" in up.errors

    running = pids(up.ports)
    assert up.stop(signal.SIGINT) == 0
    assert not any(map(is_running, running))
    assert not up.ports_file_exists
    assert re.search(r"^nsqd-1     \| .* INFO: NSQ: bye$", up.errors, re.MULTILINE)
    assert "\x1b" not in up.errors + up.output


def test_the_next_run_has_the_data_of_the_last(make_up: Callable[..., Up]) -> None:
    up = make_up("--log-level=warn").wait_until_up()
    get(up.ports["nsqd"][0]["http"], "/pub?topic=kept", b"x")
    assert up.stop() == 0
    assert "INFO" not in up.errors
    again = make_up().wait_until_up()
    assert depth(again.ports["nsqd"][0]["http"], "kept") == 1


def test_nsqlookupd_comes_back_too_and_deaths_in_a_row_wait_longer(make_up: Callable[..., Up]) -> None:
    up = make_up("--nsqd-flag=--sync-every=1").wait_until_up()
    node, lookupd = up.ports["nsqd"][0], up.ports["nsqlookupd"][0]
    get(node["http"], "/pub?topic=known", b"x")
    for _ in range(2):
        pid = up.ports["nsqlookupd"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: up.ports["nsqlookupd"][0]["pid"] != pid, STOP_TIMEOUT_S)
    assert re.findall(r"again in (\d+) s", up.errors) == ["1", "2"]
    assert up.ports["nsqlookupd"][0]["http"] == lookupd["http"]
    eventually(lambda: found_at(lookupd["http"], "known") == {int(node["tcp"].rpartition(":")[2])}, STOP_TIMEOUT_S)
    assert b"--sync-every=1" in Path(f"/proc/{node['pid']}/cmdline").read_bytes()


def test_daemons_do_not_outlive_an_up_that_is_killed(make_up: Callable[..., Up]) -> None:
    up = make_up().wait_until_up()
    running = pids(up.ports)
    up.process.kill()
    eventually(lambda: not any(map(is_running, running)), STOP_TIMEOUT_S)


def test_a_port_that_is_taken_is_named_and_nothing_is_left_running(make_up: Callable[..., Up]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        up = make_up(f"--lookupd-http-port={port}")
        assert up.process.wait(STOP_TIMEOUT_S) == 1
    last = up.errors.splitlines()[-1]
    assert last.startswith("nsquark up: nsqlookupd did not start: ")
    assert str(port) in last
    assert "Traceback" not in up.errors


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*NSQUARK, "up", "--base-port=0", f"--dir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    with subprocess.Popen(command, stderr=theirs, stdout=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"Ctrl-C" not in shown:
            shown += os.read(ours, 4096)
        process.terminate()
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
        assert process.wait(STOP_TIMEOUT_S) == 0
    os.close(ours)
    assert b"\x1b[36mnsqlookupd |\x1b[0m " in shown
    assert b"\x1b[32mnsqd-1     |\x1b[0m " in shown


def test_stopped_while_it_starts(make_up: Callable[..., Up]) -> None:
    up = make_up("--nsqd=2")
    eventually(lambda: "nsqlookupd |" in up.errors, STOP_TIMEOUT_S)
    assert up.stop() == 0
    assert "Traceback" not in up.errors
    assert not up.ports_file_exists


def test_data_that_another_up_serves_is_refused(make_up: Callable[..., Up]) -> None:
    first = make_up().wait_until_up()
    address = first.ports["nsqd"][0]["http"]
    second = make_up("--ports-file=/dev/null/none")
    assert second.process.wait(STOP_TIMEOUT_S) == 1
    last = second.errors.splitlines()[-1]
    assert last.startswith("nsquark up: nsqd-1 did not start: failed to instantiate nsqd - ")
    assert get(address, "/ping") == b"OK"
