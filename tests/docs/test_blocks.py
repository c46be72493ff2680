"""Checks that every Python and shell block in README.md and docs/ runs; blocks.py says how exceptions are marked."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import BadDocument, read_blocks

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_blocks.py")
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
NAMESPACES = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Gives a document a network and process ids of its own: default ports are free, and nothing outlives the test."""
DOCUMENT_TIMEOUT_S = 900


@functools.cache
def why_no_namespaces() -> str:
    try:
        result = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return f"unshare: {error.strerror}"
    return result.stderr.strip() if result.returncode else ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(document: Path) -> None:
    """A block without a language might be a command that no test runs."""
    unnamed = [block.line for block in read_blocks(document) if not block.language]
    assert not unnamed, f"{document.name}: give the blocks at lines {unnamed} a language: sh, python, text ..."


@pytest.mark.timeout(DOCUMENT_TIMEOUT_S + 60)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    if not any(block.is_run for block in read_blocks(document)):
        return
    result = run_blocks(document, tmp_path)
    assert result.returncode == 0, result.stdout


def run_blocks(document: Path, directory: Path) -> "subprocess.CompletedProcess[str]":
    if reason := why_no_namespaces():
        pytest.skip(f"needs a network of its own, which this system refuses: {reason}")
    return subprocess.run(
        [*NAMESPACES, sys.executable, str(RUNNER), str(document), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DOCUMENT_TIMEOUT_S,
        check=False,
    )


def test_how_blocks_are_marked(tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(
        "```sh\na\n```\n<!-- not run here: it needs a cluster -->\n\n```python\nb\n```\n"
        "<!-- runs in the background -->\n```sh\nnsquark up\n```\n<!-- file: x/y.toml -->\n```toml\nk = 1\n```\n"
        "<!-- not run here: far away -->\ntext\n```bash\nc\n\n  d\n```\n  ```text\n  e\n  ```\n"
    )
    blocks = read_blocks(document)
    assert [(block.line, block.language, block.text) for block in blocks] == [
        (1, "sh", "a\n"),
        (6, "python", "b\n"),
        (10, "sh", "nsquark up\n"),
        (14, "toml", "k = 1\n"),
        (19, "bash", "c\n\n  d\n"),
        (24, "text", "e\n"),
    ]
    assert [block.is_run for block in blocks] == [True, False, True, False, True, False]
    assert blocks[1].skipped == "it needs a cluster"
    assert [block.starts_daemons for block in blocks] == [False, False, True, False, False, False]
    assert blocks[3].file == "x/y.toml"


@pytest.mark.parametrize("comment", ["not run here:", "not run here", "file: ../x", "runs somewhere"])
def test_a_comment_that_means_nothing_is_an_error(comment: str, tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(f"<!-- {comment} -->\n```sh\nfalse\n```\n")
    with pytest.raises(BadDocument, match=r"d\.md:2: a block cannot follow the comment"):
        read_blocks(document)


FAILS = "echo $$ > pid; exit 1"
FAILED = 'until grep -qs "(zombie)" /proc/$(cat pid || true)/status; do sleep 0.05; done'
"""Waits until the block in the background has ended, which nobody takes note of before this block ends."""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("```sh\ncurl -sf 127.0.0.1:4151/ping\nfalse\n```\n", "d.md:1: exit code 1:\nOK"),
        ("```python\nraise SystemExit(3)\n```\n", "d.md:1: exit code 3"),
        ("```python\nclass SparkSession: ...\n```\n\n```python\nSparkSession()\n```\n", "d.md:5: exit code 1"),
        (f"<!-- runs in the background -->\n```sh\n{FAILS}\n```\n\n```sh\n{FAILED}\n```\n", "d.md:2: exit code 1"),
        ("<!-- file: a.txt -->\n```text\n1\n```\n\n```sh\ntrue\n```\n", "d.md:2: nothing below uses the file a.txt"),
    ],
)
def test_a_block_that_fails_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(text)
    result = run_blocks(document, tmp_path)
    assert result.returncode == 1
    assert sentence in result.stdout
