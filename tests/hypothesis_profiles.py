"""Decides how long property tests search: briefly by default, longer with HYPOTHESIS_PROFILE=long."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_COMMON: dict[str, Any] = {
    "deadline": None,  # a shared machine is slow at times; pytest-timeout bounds a test
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile("short", max_examples=30, stateful_step_count=30, **_COMMON)
settings.register_profile("long", max_examples=1000, stateful_step_count=80, **_COMMON)


def load() -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def examples(share: float) -> int:
    """Returns the profile's number of examples, times `share`, for tests whose examples are cheaper or dearer."""
    return max(1, int(settings().max_examples * share))


def run_model(model: type[RuleBasedStateMachine], share: float = 1.0, **attributes: Any) -> None:
    """Searches for a history in which a model and what it stands beside disagree; its class gets these attributes."""
    machine = type(f"{model.__name__}Machine", (model,), attributes)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(share)))
