"""Interrupts calls as Ctrl-C does, at every place where that can happen."""

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def is_below(frame: FrameType | None, function: str) -> bool:
    """Tells whether a function of this name is on the stack of a frame."""
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def is_interrupted_at(function: str, instruction: int, call: Callable[[], object]) -> bool:
    """Interrupts a call, as Ctrl-C does, before the given one of the instructions that Python executes in a function of
    this name and below it; tells whether there were so many.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        # Python swallows what is raised in the callback of a weak reference.
        if event == "call" and is_below(frame, function) and frame.f_code.co_name != "_remove":
            frame.f_trace_opcodes = True
            sys.settrace(trace)  # Python 3.12 looks at the line above only then
        seen += event == "opcode"
        if seen == instruction:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return seen >= instruction
