"""Takes the pictures of docs/nsqadmin.md: `make screenshots`.

    .venv/bin/python -m tests.browser.screenshots --seconds 150

A cluster runs under load for a while, so that charts have a past; then pages are opened, light and dark.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pytest knows where the harness is, a plain Python does not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image
from playwright.sync_api import sync_playwright

from browser.cluster import Cluster
from browser.conftest import CHROMIUM, FLAGS
from browser.steps import settled

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
COLOURS = 256
"""This many are enough for pages of few colours, and take a third of the bytes."""
DRAWN_MS = 1500

PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "channel": "/topics/emails/sender",
    "messages": "/messages/orders?filter=.status+%3D%3D+%22failed%22",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=int, default=150, help="of load before the first picture")
    seconds = arguments.parse_args().seconds
    if CHROMIUM is None:
        sys.exit("no chromium is installed")
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), "--poll-interval=2s") as cluster,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # An open page has the cluster asked at the full pace, so that charts are drawn finely.
        browser.new_page().goto(cluster.url)
        time.sleep(seconds)
        for scheme in ("light", "dark"):
            for name, path in PAGES.items():
                take(browser, cluster.url + path, f"nsqadmin-{name}-{scheme}", scheme, WIDE)
        take(browser, cluster.url, "nsqadmin-phone", "dark", PHONE)
        browser.close()


def take(browser: Any, url: str, name: str, scheme: str, size: dict[str, int]) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, timezone_id="Europe/Berlin")
    page = context.new_page()
    page.goto(url)
    settled(page)
    if "messages" in url:
        page.locator("#messages summary").first.click()
    page.wait_for_timeout(DRAWN_MS)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    context.close()
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
