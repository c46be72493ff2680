"""Checks gnsq, on gevent, against nsqd, in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import Nsqd, eventually, nsqd_program

pytest.importorskip("gnsq")

SCRIPT = Path(__file__).with_name("gnsq_script.py")
SCRIPT_TIMEOUT_S = 60


def _run(nsqd: Nsqd, topic: str, **options: Any) -> list[list[Any]]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), f"127.0.0.1:{nsqd.tcp[1]}", topic, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    seen: list[list[Any]] = json.loads(result.stdout)
    return seen


EXPECTED = [
    ["bad", 1],
    ["bad", 2],
    ["bad", 3],
    ["deferred", 1],
    ["multi 1", 1],
    ["multi 2", 1],
    ["single", 1],
]


@pytest.mark.parametrize("options", [{}, {"deflate": True}], ids=repr)
def test_publish_consume_requeue(nsqd: Nsqd, topic: str, options: dict[str, Any]) -> None:
    """The options are the consumer's: gnsq's producer cannot use compression."""
    assert _run(nsqd, topic, **options) == EXPECTED

    def is_done() -> bool:
        shown = nsqd.channel(topic)
        return (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 0)

    eventually(is_done)
    shown = nsqd.channel(topic)
    assert (shown["requeue_count"], shown["message_count"]) == (2, 5)


def test_version_line_that_gnsq_parses() -> None:
    output = subprocess.run([nsqd_program(), "--version"], capture_output=True, text=True, check=True).stdout
    assert re.match(r"^nsqd v1\.3\.0 \(built w/[a-z0-9.-]+\)$", output)
