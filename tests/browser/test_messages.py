"""Checks the message browser: a topic's log, found, opened, followed and published, whatever it holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.cluster import Cluster
from browser.conftest import Tabs
from browser.steps import complaints, confirm, settled
from harness.waiting import eventually
from harness.wire import Wire

HOSTILE = b'<img src=x onerror="document.title=1"><script>document.title="owned"</script>\x1b[31m\x1b]0;owned\x07'


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """Makes a topic of one nsqd with 60 messages, of which the last one is the newest."""
    name: str = request.node.name[-60:]
    nsqd = cluster.nsqds[0]
    for number in range(60):
        body = {"n": number, "user": {"id": number % 10, "name": f"user {number}"}, "tags": ["a", {"deep": [1, 2]}]}
        nsqd.post("/pub", json.dumps(body).encode(), topic=name)
    cluster.wait_until_shown(f"/messages/{name}")
    return name


def browse(cluster: Cluster, tabs: Tabs, topic: str, query: str = "", **settings: Any) -> Any:
    page = settled(tabs.open(f"{cluster.url}/messages/{topic}{query}", **settings))
    expect(page.locator("#searched")).not_to_have_text("Reading …")
    return page


def test_newest_first_page_after_page(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    rows = page.locator("#messages > li")
    expect(rows).to_have_count(50)
    expect(rows.first).to_contain_text('"n": 59')
    expect(page.locator("#searched")).to_contain_text("Searched")
    page.get_by_role("button", name="Older").click()
    expect(rows).to_have_count(60)
    expect(rows.last).to_contain_text('"n": 0')
    expect(page.locator("#searched")).to_contain_text("oldest message kept")
    expect(page.get_by_role("button", name="Older")).not_to_be_visible()


def test_looking_consumes_nothing(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    cluster.nsqds[0].post("/channel/create", topic=topic, channel="ch")
    eventually(lambda: cluster.nsqds[0].channel(topic)["depth"] == 60)
    browse(cluster, tabs, topic)
    found = cluster.nsqds[0].channel(topic)
    assert (found["depth"], found["in_flight_count"]) == (60, 0)


def test_filter_by_text_and_by_field(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    rows = page.locator("#messages > li")
    for wanted, count in [("user 41", 1), (".user.id == 7", 6), (".n >= 58", 2), ("nobody wrote this", 0)]:
        page.get_by_label("Filter").fill(wanted)
        page.keyboard.press("Enter")
        expect(rows).to_have_count(count)
        expect(page.locator("#searched")).to_contain_text("Searched 60 messages")
    page.get_by_label("Filter").fill(".user.id == ")
    page.keyboard.press("Enter")
    expect(page.locator("#filter-error")).to_be_visible()
    tabs.errors[:] = [error for error in tabs.errors if "400" not in error]


def test_a_search_has_an_address(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic, "?filter=.n+%3D%3D+5")
    expect(page.get_by_label("Filter")).to_have_value(".n == 5")
    expect(page.locator("#messages > li")).to_have_count(1)


def test_from_a_time_and_from_a_sequence_number(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    seq = page.locator("#messages > li").nth(9).get_attribute("data-seq")
    page.get_by_label("From").select_option("seq")
    page.get_by_label("Sequence number").fill(seq or "")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#messages > li").first).to_have_attribute("data-seq", seq or "")
    page.get_by_label("From").select_option("time")
    page.get_by_label("Time, in your zone").fill("2001-01-01T00:00:00")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#messages > li")).to_have_count(0)


def test_bodies_as_json_text_and_hex(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    row = page.locator("#messages > li").first
    row.locator("summary").first.focus()
    page.keyboard.press("Enter")
    tree = row.locator(".json")
    expect(tree.locator(".key", has_text='"user"')).to_be_visible()
    expect(tree.locator(".number", has_text="59").first).to_be_visible()
    assert complaints(page) == []
    deep = tree.locator(".key", has_text='"deep"')
    expect(deep).to_have_count(0)
    tree.locator("details:not([open]) > summary").first.click()
    expect(deep).to_be_visible()
    row.get_by_role("button", name="Text").click()
    expect(row.locator("pre.body")).to_contain_text('{"n": 59')
    row.get_by_role("button", name="Hex").click()
    expect(row.locator("pre.body")).to_contain_text("000000  7b 22 6e 22")


def test_numbers_are_shown_as_they_were_written(cluster: Cluster, tabs: Tabs) -> None:
    """JavaScript would round the first three, and write the others in another way."""
    numbers = ["9007199254740993", "12345678901234567890", "0.12345678901234567890", "1.50", "1e3", "-0"]
    cluster.nsqds[0].post("/pub", f"[{', '.join(numbers)}]".encode(), topic="numbers")
    cluster.wait_until_shown("/messages/numbers")
    page = browse(cluster, tabs, "numbers")
    page.locator("#messages > li summary").first.click()
    expect(page.locator("#messages .json .number")).to_have_text(numbers)


@pytest.mark.parametrize("width", [1280, 390])
def test_bodies_are_text_whatever_they_hold(cluster: Cluster, tabs: Tabs, width: int) -> None:
    nsqd = cluster.nsqds[0]
    topic = f"hostile{width}"
    nsqd.post("/pub", b"x" * 1_000_000, topic=topic)
    nsqd.post("/pub", b'{"a": ' + json.dumps(HOSTILE.decode()).encode() + b"}", topic=topic)
    nsqd.post("/pub", bytes(range(256)), topic=topic)
    nsqd.post("/pub", HOSTILE, topic=topic)
    cluster.wait_until_shown(f"/messages/{topic}")
    page = browse(cluster, tabs, topic, viewport={"width": width, "height": 844})
    rows = page.locator("#messages > li")
    expect(rows).to_have_count(4)
    for index in range(4):
        rows.nth(index).locator("summary").first.click()
        expect(rows.nth(index).locator(".body")).to_be_visible()
    expect(rows.nth(0).locator("pre.body")).to_contain_text('<script>document.title="owned"</script>')
    expect(rows.nth(1).locator("pre.body")).to_contain_text("0000f0  f0 f1 f2")
    assert page.locator("#messages img, #messages script").count() == 0
    assert page.title() == "Messages · nsqadmin"
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_live_tail(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    page.get_by_role("button", name="Live tail").click()
    expect(page.locator("#messages > li").first).to_contain_text('"n": 59')
    for number in (100, 101):
        cluster.nsqds[0].post("/pub", b'{"n": %d}' % number, topic=topic)
        expect(page.locator("#messages > li").first).to_contain_text(f'"n": {number}')
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Live tail")).to_be_visible()


def test_a_live_tail_says_how_many_messages_it_did_not_show(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    """More messages come at once than a page has room for."""
    page = browse(cluster, tabs, topic)
    page.get_by_role("button", name="Live tail").click()
    expect(page.locator("#searched")).to_contain_text("Live · 50 shown")
    expect(page.locator("#searched")).not_to_contain_text("not shown")
    for count, said in [(51, "1 message not shown"), (120, "71 messages not shown")]:
        cluster.nsqds[0].post("/mpub", b"\n".join(b"%d" % number for number in range(count)), topic=topic)
        expect(page.locator("#searched")).to_contain_text(said)


def test_download_as_jsonl(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic)
    for filtered, numbers in [("", list(range(59, -1, -1))), (".user.id == 3", [53, 43, 33, 23, 13, 3])]:
        page.get_by_label("Filter").fill(filtered)
        with page.expect_download() as downloading:
            page.get_by_role("link", name="JSONL", exact=True).click()
        lines = downloading.value.path().read_text().splitlines()
        assert [json.loads(json.loads(line)["body"])["n"] for line in lines] == numbers


def test_publish_text_a_file_and_later(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    nsqd = cluster.nsqds[0]
    nsqd.post("/channel/create", topic=topic, channel="ch")
    page = browse(cluster, tabs, topic)
    form = page.locator("#publish")
    form.get_by_label("Text").fill("typed by hand")
    form.get_by_role("button", name="Publish").click()
    dialog = confirm(page, "Publish")
    expect(dialog.locator(".dialog-body")).to_have_text(f"Publish to {topic}Done.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#messages > li").first).to_contain_text("typed by hand")
    form.get_by_label("or a file").set_input_files({"name": "a.bin", "mimeType": "", "buffer": b"from a file"})
    form.get_by_role("button", name="Publish").click()
    confirm(page, "Publish").get_by_role("button", name="Close").click()
    expect(page.locator("#messages > li").first).to_contain_text("from a file")
    form.get_by_label("Text").fill("much later")
    form.get_by_label("Delay in seconds").fill("600")
    form.get_by_role("button", name="Publish").click()
    expect(page.locator("#confirm")).to_contain_text("to be delivered in 600 s")
    confirm(page, "Publish").get_by_role("button", name="Close").click()
    eventually(lambda: nsqd.channel(topic)["deferred_count"] == 1)


def test_republish(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = browse(cluster, tabs, topic, "?filter=.n+%3D%3D+5")
    rows = page.locator("#messages > li")
    rows.first.locator("summary").first.click()
    rows.first.get_by_role("button", name="Republish").click()
    confirm(page, "Republish").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(2)
    assert cluster.nsqds[0].topic(topic)["message_count"] == 61


def test_what_a_channel_holds(cluster: Cluster, tabs: Tabs) -> None:
    """The consumer of emails gives some back for two seconds: those are shown with their attempts."""
    page = settled(tabs.open(f"{cluster.url}/topics/emails/sender"))
    held = page.locator("#held")
    held.get_by_role("button", name="Requeued").click()
    expect(held.locator("tbody tr").first).to_be_visible()
    expect(held.locator("tbody tr").first.locator("[data-label=attempts]")).to_have_text("1")
    href = held.locator("tbody tr a").first.get_attribute("href") or ""
    assert "at=seq" in href


def test_the_order_of_what_a_channel_holds_is_said(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    with Wire(cluster.nsqds[0].tcp) as wire:
        wire.subscribe(topic, "ch", 3)
        held = wire.read_messages(3)
        wire.REQ(held[0].id, 600_000)
        wire.RDY(0)
        page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
        status = page.locator("#held").get_by_role("status")
        expect(status).to_contain_text("shown, longest in flight first")
        page.locator("#held").get_by_role("button", name="Requeued").click()
        expect(status).to_have_text("1 shown, next due first")
