"""Gives unit tests the kernel's modules in both forms, one test run each."""

from types import ModuleType

import pytest

import hypothesis_profiles
from unit import kernel_forms

hypothesis_profiles.load()


@pytest.fixture(params=kernel_forms.FORMS)
def records(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("records", request.param)


@pytest.fixture(params=kernel_forms.FORMS)
def ledger(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("ledger", request.param)


@pytest.fixture(params=kernel_forms.FORMS)
def columns(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("columns", request.param)
