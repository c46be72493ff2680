"""Runs Python blocks one after another in one process, so that those with a SparkSession share its JVM.

Each block has names of its own, as a program has: one that needs the imports of another fails. On stdin come lines
`<script>\t<output>`; the exit code of each is written to stdout.
"""

import os
import runpy
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        script, output = line.rstrip("\n").split("\t")
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        answers.write(f"{_run(script)}\n")


def _run(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
