"""Brings NSQ to Spark: `format("nsq")`, to read and to write, as batches and as streams.

Begin reading in `source/datasource.py`. The package itself imports nothing, so that Spark's workers start quickly; its
public functions are loaded when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsquark.spark.parsing import parse_json
    from nsquark.spark.quarantining import judge, quarantine

__all__ = ["judge", "parse_json", "quarantine"]

_HOMES = {
    "judge": "nsquark.spark.quarantining",
    "parse_json": "nsquark.spark.parsing",
    "quarantine": "nsquark.spark.quarantining",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
