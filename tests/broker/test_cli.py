"""Checks nsqd's command line, log lines and signals."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, StartError, Wire, eventually, nsqd_program

RUN_TIMEOUT_S = 60


def run(*flags: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [nsqd_program(), *flags], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, cwd=cwd, check=False
    )


@pytest.mark.parametrize("flag", ["--version", "-version", "--version=true", "-version=1"])
def test_version(flag: str) -> None:
    result = run(flag)
    assert result.returncode == 0
    assert re.fullmatch(r"nsqd v1\.3\.0 \(built w/[a-z0-9.-]+\)\n", result.stdout)
    assert result.stderr == ""


@pytest.mark.parametrize("flag", ["--help", "-h", "-help"])
def test_help(flag: str) -> None:
    result = run(flag)
    assert result.returncode == 0
    assert result.stderr.startswith("Usage of nsqd:\n")
    assert "\n  -mem-queue-size int\n" in result.stderr
    assert "(default 10000)" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--no-such-flag"], "flag provided but not defined: -no-such-flag"),
        (["--no-such-flag=1"], "flag provided but not defined: -no-such-flag"),
        (["--mem-queue-size=x"], 'invalid value "x" for flag -mem-queue-size'),
        (["--mem-queue-size", "1.5"], 'invalid value "1.5" for flag -mem-queue-size'),
        (["--msg-timeout=5"], 'invalid value "5" for flag -msg-timeout'),
        (["--msg-timeout=5 s"], 'invalid value "5 s" for flag -msg-timeout'),
        (["--snappy=maybe"], 'invalid boolean value "maybe" for -snappy'),
        (["--log-level=loud"], 'invalid value "loud" for flag -log-level'),
        (["--data-path"], "flag needs an argument: -data-path"),
        (["---x"], "bad flag syntax: ---x"),
        (["--tls-min-version=ssl3.0"], "for flag -tls-min-version"),
    ],
    ids=repr,
)
def test_bad_flag(flags: list[str], text: str) -> None:
    result = run(*flags)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Usage of nsqd:\n" in result.stderr


BAD_SETTINGS = [
    (["--max-deflate-level=0"], "--max-deflate-level must be [1,9]"),
    (["--max-deflate-level=10"], "--max-deflate-level must be [1,9]"),
    (["--node-id=1024"], "--node-id must be [0,1024)"),
    (["--node-id=-1"], "--node-id must be [0,1024)"),
    (["--tls-required=true"], "cannot require TLS client connections without TLS key and cert"),
    (["--tls-cert=/nonexistent", "--tls-key=/nonexistent"], "failed to build TLS config - "),
    (["--e2e-processing-latency-percentile=1.5"], "invalid E2E processing latency percentile: 1.5"),
    (["--tcp-address=127.0.0.1:99999"], "listen (127.0.0.1:99999) failed - "),
    (["--data-path=/nonexistent"], "failed to lock data-path"),
]


@pytest.mark.parametrize(("flags", "text"), BAD_SETTINGS, ids=repr)
def test_bad_setting(make_nsqd: Callable[..., Nsqd], flags: list[str], text: str) -> None:
    with pytest.raises(StartError) as caught:
        make_nsqd(*flags)
    assert caught.value.exit_code == 1
    assert text in caught.value.log
    assert re.search(r"\[nsqd\] \S+ \S+ FATAL: failed to instantiate nsqd - ", caught.value.log)


def test_percentile_that_is_no_number(make_nsqd: Callable[..., Nsqd]) -> None:
    with pytest.raises(StartError) as caught:
        make_nsqd("--e2e-processing-latency-percentile=x")
    assert caught.value.exit_code == 1
    assert "Could not parse: x" in caught.value.log


@pytest.mark.parametrize("content", ["= nonsense", None])
def test_bad_config_file(make_nsqd: Callable[..., Nsqd], tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "nsqd.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartError) as caught:
        make_nsqd(f"--config={file}")
    assert caught.value.exit_code == 1
    assert f"failed to load config file {file} - " in caught.value.log


def test_port_in_use(make_nsqd: Callable[..., Nsqd]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as caught:
            make_nsqd(f"--tcp-address=127.0.0.1:{port}")
    assert caught.value.exit_code == 1
    assert f"listen (127.0.0.1:{port}) failed - " in caught.value.log


def test_flag_forms(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd(
        "-max-rdy-count", "0x10", "--mem-queue-size=1_000", "-snappy=F", "--msg-timeout", "1m30s", "-verbose",
        "--lookupd-tcp-address=127.0.0.1:1", "-lookupd-tcp-address", "127.0.0.1:2", "--", "--ignored",
    )  # fmt: skip
    assert daemon.get("/config/max_rdy_count").json() == 16
    assert daemon.get("/config/mem_queue_size").json() == 1000
    assert daemon.get("/config/snappy").json() is False
    assert daemon.get("/config/msg_timeout").json() == 90_000_000_000
    assert daemon.get("/config/nsqlookupd_tcp_addresses").json() == ["127.0.0.1:1", "127.0.0.1:2"]


def test_boolean_flag_never_takes_the_next_argument(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--snappy", "false", "--max-rdy-count=7")
    assert daemon.get("/config/snappy").json() is True
    assert daemon.get("/config/max_rdy_count").json() == 2500


def test_fixed_ports_are_free_again_at_once(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    daemon.keep_ports()  # and hold them while it is down, or another process may be given them
    ports = [daemon.tcp[1], daemon.http[1]]
    connect(daemon).subscribe("t", rdy=1)
    daemon.restart()
    assert (daemon.tcp[1], daemon.http[1]) == tuple(ports)
    connect(daemon).assert_usable()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_by_signal(make_nsqd: Callable[..., Nsqd], number: signal.Signals) -> None:
    daemon = make_nsqd()
    assert daemon.process is not None
    daemon.process.send_signal(number)
    assert daemon.process.wait(RUN_TIMEOUT_S) == 0
    daemon.wait_for_log("NSQ: bye")


def test_stop_with_busy_clients(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    publisher, consumer = connect(daemon), connect(daemon).subscribe("t", rdy=100)
    for _ in range(50):
        publisher.MPUB("t", [b"x"] * 100)
    consumer.read_message()
    assert daemon.stop() == 0


def test_log_lines(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    client = connect(daemon)
    client.identify(client_id="me")
    client.subscribe("t", "c")
    daemon.get("/ping")
    daemon.get("/nothing")
    address = f"127.0.0.1:{client.local_port}"
    for text in [
        f"INFO: TCP: listening on 127.0.0.1:{daemon.tcp[1]}",
        f"INFO: HTTP: listening on 127.0.0.1:{daemon.http[1]}",
        f"INFO: TCP: new client({address})",
        f"INFO: CLIENT({address}): desired protocol magic '  V2'",
        f"INFO: [{address}] IDENTIFY: ",
        "INFO: TOPIC(t): created",
        "INFO: TOPIC(t): new channel(c)",
        "INFO: 200 GET /ping (127.0.0.1:",
        "INFO: 404 GET /nothing (127.0.0.1:",
        f"NSQ: persisting topic/channel metadata to {daemon.data_path}/nsqd.dat",
    ]:
        daemon.wait_for_log(text)
    line = r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (DEBUG|INFO|WARNING|ERROR|FATAL): .*"
    assert all(re.fullmatch(line, text) for text in daemon.log.splitlines()), daemon.log


def test_publishing_over_http_is_not_logged(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    daemon.post("/pub", b"x", topic="t")
    daemon.post("/mpub", b"x", topic="t")
    daemon.get("/ping")
    daemon.wait_for_log("200 GET /ping")
    assert "pub?topic" not in daemon.log


def test_log_prefix_and_level(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--log-prefix=here: ", "--log-level=DEBUG")
    assert daemon.log.startswith("here: ")
    assert daemon.get("/config/log_level").json() == 1


def test_data_path_defaults_to_the_current_directory(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [nsqd_program(), "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually((tmp_path / "nsqd.dat").exists)
        process.terminate()
        assert process.wait(RUN_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.ours
def test_stderr_that_nobody_reads_blocks_nothing(tmp_path: Path) -> None:
    """A launcher reads the ports and then stops reading; a full pipe must not stop nsqd."""
    process = subprocess.Popen(
        [
            nsqd_program(),
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            f"--data-path={tmp_path}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = None
        while address is None:
            line = process.stderr.readline()
            assert line, "nsqd ended"
            if " TCP: listening on " in line:
                host, _, port = line.strip().rpartition(" ")[2].rpartition(":")
                address = (host, int(port))
        for number in range(400):
            with Wire(address) as client:
                client.IDENTIFY(user_agent="x" * 1000, client_id=str(number))
                client.expect_ok()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_nothing_survives_a_kill(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    address = daemon.tcp
    daemon.keep_ports()  # nobody else may listen there
    daemon.kill()
    with pytest.raises(ConnectionRefusedError):
        Wire(address)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_program_is_the_process_that_was_started(make_nsqd: Callable[..., Nsqd]) -> None:
    """There is no child that would outlive a kill of the launcher."""
    daemon = make_nsqd()
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    assert children == []
    os.kill(daemon.pid, 0)


def test_broadcast_ports_do_not_change_info(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--broadcast-tcp-port=1111", "--broadcast-http-port=2222", "--broadcast-address=some.host")
    info = daemon.get("/info").json()
    assert (info["tcp_port"], info["http_port"]) == (daemon.tcp[1], daemon.http[1])
    assert info["broadcast_address"] == "some.host"
