"""Knows the versions that the programs show."""

import sys
from typing import Final

__version__: Final = "0.1.0"
"""This is nsquark's version; it stands nowhere else."""

NSQ_VERSION: Final = "1.3.0"
"""nsqd, nsqlookupd and nsqadmin show this version: clients decide by it which features to expect."""


def version_line(program: str) -> str:
    """Returns `nsqd v1.3.0 (built w/...)`: NSQ names its compiler there, we name ourselves and the interpreter."""
    python = ".".join(str(number) for number in sys.version_info[:3])
    return f"{program} v{NSQ_VERSION} (built w/nsquark-{__version__}-{sys.implementation.name}-{python})"
