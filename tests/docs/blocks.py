"""Finds the code blocks of a document, and how each is to be run.

Python and shell blocks are run. A comment on the line above the fence changes that:

    <!-- not run here: reason -->     left out, for this reason
    <!-- runs in the background -->   goes on while the blocks after it run; it is ended with the document
    <!-- file: name -->               written to this file, which a later block uses; for blocks of any language
"""

import re
from dataclasses import dataclass
from pathlib import Path

PYTHON = ("python", "py")
SHELL = ("sh", "bash", "shell")
DAEMONS = re.compile(r"\b(nsqd|nsqlookupd|nsquark up)\b")

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<language>[^\s`]*)[^`]*$")
_COMMENT = re.compile(r"^\s*<!--\s*(.*?)\s*-->\s*$")


class BadDocument(Exception):
    """Says that this reader does not understand a document, and names the line."""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    skipped: str = ""
    file: str = ""
    in_background: bool = False

    @property
    def is_run(self) -> bool:
        return self.language in PYTHON + SHELL and not self.skipped and not self.file

    @property
    def uses_spark(self) -> bool:
        return self.language in PYTHON and not self.in_background and "SparkSession" in self.text

    @property
    def starts_daemons(self) -> bool:
        return self.is_run and self.in_background and DAEMONS.search(self.text) is not None


def read_blocks(document: Path) -> list[Block]:
    blocks: list[Block] = []
    lines = document.read_text().splitlines()
    comment = ""
    place = 0
    while place < len(lines):
        fence = _FENCE.match(lines[place])
        if fence is None:
            found = _COMMENT.match(lines[place])
            # Blank lines may stand between a comment and its fence.
            comment = found[1] if found is not None else comment if not lines[place].strip() else ""
            place += 1
            continue
        start, indent, ticks = place, len(fence["indent"]), fence["ticks"]
        place += 1
        while place < len(lines) and lines[place].strip() != ticks:
            place += 1
        if place == len(lines):
            raise BadDocument(f"{document.name}:{start + 1}: the block has no end")
        text = "\n".join(line[indent:] for line in lines[start + 1 : place]) + "\n"
        blocks.append(_block(f"{document.name}:{start + 1}", start + 1, fence["language"], text, comment))
        comment = ""
        place += 1
    return blocks


def _block(where: str, line: int, language: str, text: str, comment: str) -> Block:
    if not comment:
        return Block(line, language, text)
    if comment == "runs in the background":
        return Block(line, language, text, in_background=True)
    word, _, rest = comment.partition(": ")
    if word == "not run here" and rest:
        return Block(line, language, text, skipped=rest)
    if word == "file" and re.fullmatch(r"[\w-][\w./-]*", rest) and ".." not in rest:
        return Block(line, language, text, file=rest)
    raise BadDocument(f"{where}: a block cannot follow the comment {comment!r}")
