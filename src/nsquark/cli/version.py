"""What the programs say of themselves."""

import sys

from nsquark import NSQ_VERSION, __version__


def version_line(program: str) -> str:
    """`nsqd v1.3.0 (built w/...)`: NSQ names its compiler there, we name ourselves and the interpreter."""
    python = ".".join(str(number) for number in sys.version_info[:3])
    return f"{program} v{NSQ_VERSION} (built w/nsquark-{__version__}-{sys.implementation.name}-{python})"
