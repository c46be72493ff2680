"""How long property tests search: briefly by default, longer with HYPOTHESIS_PROFILE=long."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

_COMMON: dict[str, Any] = {
    "deadline": None,  # a shared machine is slow at times; pytest-timeout bounds a test
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile("short", max_examples=30, stateful_step_count=30, **_COMMON)
settings.register_profile("long", max_examples=1000, stateful_step_count=80, **_COMMON)


def load() -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def examples(share: float) -> int:
    """The current profile's number of examples, times `share`: for tests whose examples are cheaper or dearer."""
    return max(1, int(settings().max_examples * share))
