"""Makes the values of sparklines: the last minutes of a series in a few numbers, as text that a page carries."""

from __future__ import annotations

import time
from typing import Final

from nsquark.admin.history import History
from nsquark.admin.view import SeriesKey

SECONDS: Final = 600
BUCKETS: Final = 40


def spark_values(history: History, key: SeriesKey) -> str:
    """Writes the highest value of each bucket, separated by commas; a bucket without values is empty."""
    step = SECONDS / BUCKETS
    # Buckets are aligned to the step, so that a value changes only while its bucket is the newest.
    end = (int(time.time() / step) + 1) * step
    buckets: list[float | None] = [None] * BUCKETS
    times, values = history.points(key, end - SECONDS)
    for at, value in zip(times, values, strict=True):
        place = int((at - end + SECONDS) / step)
        if value is None or not 0 <= place < BUCKETS:
            continue
        known = buckets[place]
        buckets[place] = value if known is None or value > known else known
    return ",".join("" if value is None else f"{value:.4g}" for value in buckets)
