"""Runs `nsquark compact-archive` in a process that kills itself before one of the steps that reach the disk:

python compact_killed.py <archive> <number of the step>
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from nsquark.spark.jobs import compact

STEPS = ("replace", "unlink", "fsync")


def count_steps(do: Any) -> None:
    """Calls `do(name)` before each step."""
    for name in STEPS:
        real = getattr(os, name)

        def step(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            do(_name)
            return _real(*args, **options)

        setattr(os, name, step)


def main(archive: Path, wanted: int) -> None:
    left = [wanted]

    def kill(_name: str) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    count_steps(kill)
    compact.Compaction(archive, 1 << 27, None).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
