"""What the programs say of themselves."""

import sys
from typing import Final

__version__: Final = "0.1.0"
"""The one place where nsquark's version stands."""

NSQ_VERSION: Final = "1.3.0"
"""What nsqd, nsqlookupd and nsqadmin say of themselves: clients decide by it which features to expect."""


def version_line(program: str) -> str:
    """`nsqd v1.3.0 (built w/...)`: NSQ names its compiler there, we name ourselves and the interpreter."""
    python = ".".join(str(number) for number in sys.version_info[:3])
    return f"{program} v{NSQ_VERSION} (built w/nsquark-{__version__}-{sys.implementation.name}-{python})"
