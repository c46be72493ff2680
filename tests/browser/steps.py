"""Has the steps that several tests take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import expect

TIMEOUT_MS = 30_000
"""Everything that a test waits for may take this long; machines may be busy."""
CHECKS = (Path(__file__).parent / "checks.js").read_text()

expect.set_options(timeout=TIMEOUT_MS)


def settled(page: Any) -> Any:
    """Returns the page once its stream has sent the first figures."""
    if page.locator("body[data-live]").count():
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
    return page


def complaints(page: Any) -> list[str]:
    """Finds what those who use a keyboard or a screen reader, or see little, would complain of."""
    found: list[str] = page.evaluate(CHECKS)
    return found


def confirm(page: Any, button: str, typed: str = "") -> Any:
    """Answers the question with this button; the dialog then shows the result."""
    dialog = page.locator("#confirm")
    expect(dialog).to_be_visible()
    if typed:
        expect(dialog.get_by_role("button", name=button)).to_be_disabled()
        dialog.get_by_role("textbox").fill(typed)
    dialog.get_by_role("button", name=button).click()
    expect(dialog.get_by_role("button", name="Close")).to_be_visible()
    return dialog


def close(page: Any) -> None:
    """Closes the dialog with a result that the page is loaded anew for."""
    with page.expect_navigation():
        page.locator("#confirm").get_by_role("button", name="Close").click()
    settled(page)
