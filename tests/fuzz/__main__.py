"""Sends random and half-random input to everything that listens or parses, with well-behaved clients beside it.

    .venv/bin/python -m tests.fuzz --seconds 600 [--seed 7]

Exit code 0 if nothing crashed, no traceback was logged, every connection ended, and no message of the well-behaved
clients was harmed. Inputs after which a connection did not end are put into tests/fuzz/corpus.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # pytest knows where the harness is, a plain Python does not

from fuzz.running import run

SECONDS_DEFAULT = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS_DEFAULT)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = run(options.seconds, options.seed, Path(directory))
    print(report)
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
