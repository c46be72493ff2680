"""Runs a real Chromium and a cluster under load, shared by the tests of a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from browser.cluster import Cluster
from browser.steps import TIMEOUT_MS

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first of these that is installed is used. The one without windows needs half the time of the others."""
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None:
        skip = pytest.mark.skip(reason="no chromium is installed: nsqadmin's pages were not tested")
        for item in items:
            if "browser" in item.path.parts:
                item.add_marker(skip)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


class Tabs:
    """Opens pages, and remembers every error they report."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.errors: list[str] = []

    def open(self, url: str, **settings: Any) -> Any:
        """Opens a tab of a new person: `settings` are those of Playwright's new_context."""
        context = self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.set_default_timeout(TIMEOUT_MS)
        self._contexts.append(context)
        return self.another(context, url)

    def another(self, context: Any, url: str) -> Any:
        """Opens one more tab of the same person."""
        page = context.new_page()
        page.on("console", lambda message: self._note(message.type, f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: self.errors.append(f"{page.url}: {error}"))
        page.goto(url, wait_until="domcontentloaded")
        return page

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def close(self) -> None:
        """Closes all tabs before an nsqadmin ends whose pages are open: they would rightly report that."""
        while self._contexts:
            self._contexts.pop().close()


@pytest.fixture
def tabs(chromium: Any) -> Iterator[Tabs]:
    """Yields the tabs; after the test no page has reported an error, unless the test took it out of `errors`."""
    opened = Tabs(chromium)
    yield opened
    opened.close()
    assert not opened.errors
