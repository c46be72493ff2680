"""Describes what a check found, and prints it."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from nsquark.base.printable import printable

SUBJECT_WIDTH: Final = 28


class Verdict(Enum):
    """Has the word that is shown for a finding, and its colour on a terminal."""

    OK = ("ok", 32)
    WARNING = ("warning", 33)
    BROKEN = ("broken", 31)


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Verdict.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Makes a finding that something works less well, or that a part which not everybody needs does not work."""
    return Finding(Verdict.WARNING, subject, text, advice)


def broken(subject: str, text: str, advice: str) -> Finding:
    return Finding(Verdict.BROKEN, subject, text, advice)


def show(findings: Iterable[Finding]) -> None:
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for finding in findings:
        word, colour = finding.verdict.value
        label = f"{word:7}"
        if is_coloured:
            label = f"\x1b[{colour}m{label}\x1b[0m"
        print(f"{label}  {printable(finding.subject):{SUBJECT_WIDTH}}  {printable(finding.text)}")
        if finding.advice:
            print(f"         -> {printable(finding.advice)}")
