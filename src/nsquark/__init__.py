"""nsquark is NSQ in Python, on a durable log, with Spark as its data pipeline."""

import importlib
import importlib.util
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from nsquark.base.extras import needs
from nsquark.base.version import __version__ as __version__

if TYPE_CHECKING:
    from nsquark import errors, sync
    from nsquark.client.batches import Batch
    from nsquark.client.config import Config
    from nsquark.client.consumer import Consumer
    from nsquark.client.dedupe import Dedupe
    from nsquark.client.message import Message
    from nsquark.client.pool import ProducerPool
    from nsquark.client.producer import Producer
    from nsquark.query.arrow import read_arrow as read_arrow
    from nsquark.query.arrow import read_polars as read_polars
    from nsquark.query.schema import infer_schema as infer_schema

# Without what needs an extra: `from nsquark import *` is to work without it.
__all__ = [
    "Batch",
    "Config",
    "Consumer",
    "Dedupe",
    "Message",
    "Producer",
    "ProducerPool",
    "errors",
    "sync",
]

_HOMES = {
    "Batch": "nsquark.client.batches",
    "Config": "nsquark.client.config",
    "Consumer": "nsquark.client.consumer",
    "Dedupe": "nsquark.client.dedupe",
    "Message": "nsquark.client.message",
    "Producer": "nsquark.client.producer",
    "ProducerPool": "nsquark.client.pool",
    "infer_schema": "nsquark.query.schema",
    "read_arrow": "nsquark.query.arrow",
    "read_polars": "nsquark.query.arrow",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that nsqd, which is in this package too, starts without it."""
    if name in ("errors", "sync"):
        return importlib.import_module(f"nsquark.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    with needs("sql") if home.startswith("nsquark.query.") else nullcontext():
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """Lists also what is loaded when it is first used, for `help` and completion."""
    return sorted({*globals(), *(_HOMES if importlib.util.find_spec("pyarrow") else ()), *__all__})
