"""Checks each page as people see it: what it shows, that it stays up to date, that everybody can read and reach it."""

from __future__ import annotations

import http.client
import re
import threading

import pytest
from playwright.sync_api import expect

from browser.cluster import Cluster
from browser.conftest import Tabs
from browser.steps import complaints, settled
from harness import Wire
from harness.http_server import LocalServer, QuietHandler
from harness.nsqadmin import Nsqadmin
from harness.waiting import eventually
from nsquark.admin.format import UNKNOWN

PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "messages": "/messages/orders",
    "channel": "/topics/emails/sender",
    "nodes": "/nodes",
    "node": "/nodes/{node}",
    "counter": "/counter",
    "lookup": "/lookup",
    "spark": "/spark",
    "missing": "/topics/nobody_has_this",
}

WIDE = """[...document.querySelectorAll('.bar *, main *')].filter(each => each.getBoundingClientRect().right > 391)
.map(each => `${each.tagName}.${each.className}: ${each.textContent.slice(0, 100)}`)"""
"""Finds what does not fit a phone."""


def path_of(cluster: Cluster, name: str) -> str:
    return PAGES[name].format(node=cluster.nsqds[0].http_address)


def forget_missing(tabs: Tabs, name: str) -> None:
    """Takes out what Chromium reports as an error where a page is not there."""
    if name == "missing":
        tabs.errors[:] = [error for error in tabs.errors if "404" not in error]


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_read_and_use_it(cluster: Cluster, tabs: Tabs, name: str) -> None:
    """Controls have names, fields labels, text enough contrast, and nothing is inline that the policy forbids."""
    page = settled(tabs.open(cluster.url + path_of(cluster, name), color_scheme="light"))
    assert complaints(page) == []
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert complaints(page) == []
    forget_missing(tabs, name)


def test_a_chart_has_a_name_before_it_is_drawn(cluster: Cluster, tabs: Tabs) -> None:
    """Nothing is drawn in a tab in the background, nor for a while on a busy machine."""
    page = tabs.open("about:blank")
    page.add_init_script("window.requestAnimationFrame = () => 0")
    page.goto(f"{cluster.url}/topics/orders")
    chart = settled(page).locator("time-chart").first
    expect(chart).to_have_attribute("role", "img")
    expect(chart).to_have_attribute("aria-label", "Messages per second")


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_does_not_scroll_sideways(cluster: Cluster, tabs: Tabs, name: str) -> None:
    page = settled(tabs.open(cluster.url + path_of(cluster, name), viewport={"width": 390, "height": 844}))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(WIDE) == []
    forget_missing(tabs, name)


@pytest.mark.parametrize("width", [768, 1024, 1100, 1280])
def test_tables_fit_a_tablet_and_a_laptop(cluster: Cluster, tabs: Tabs, width: int) -> None:
    """Nobody looks for columns beyond the edge of a card."""
    page = tabs.open("about:blank", viewport={"width": width, "height": 800})
    for name in ("topics", "topic", "channel", "nodes", "node"):
        page.goto(cluster.url + path_of(cluster, name))
        settled(page)
        expect(page.locator(".table tbody tr").first).to_be_visible()
        hidden = page.evaluate("[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)")
        assert (name, hidden) == (name, [0] * len(hidden))


def test_names_of_any_length_fit_a_phone(cluster: Cluster, tabs: Tabs) -> None:
    long = "l" * 64
    nsqd = cluster.nsqds[0]
    nsqd.post("/topic/create", topic=long)
    nsqd.post("/channel/create", topic=long, channel=long)
    with Wire(nsqd.tcp) as wire:
        agent = "u" * 200
        wire.subscribe(long, long, client_id="c" * 200, hostname="h" * 200, user_agent=agent)
        # A page that was opened before nsqadmin knows all of this is loaded anew when the first rows come.
        eventually(lambda: agent in cluster.admin.get(f"/topics/{long}/{long}").text)
        page = tabs.open("about:blank", viewport={"width": 390, "height": 844})
        node = f"/nodes/{nsqd.http_address}"
        for path in (
            f"/topics?q={long}",
            f"/topics/{long}",
            f"/topics/{long}/{long}",
            f"/messages/{long}",
            "/nodes",
            node,
            f"/topics/{long}x",
        ):
            page.goto(cluster.url + path)
            expect(page.locator("main")).to_contain_text(long)
            assert (path, page.evaluate(WIDE)) == (path, [])
            assert (path, page.evaluate("document.documentElement.scrollWidth")) == (path, 390)
    nsqd.post("/topic/delete", topic=long)
    forget_missing(tabs, "missing")


def test_a_channel_that_nobody_reads_on_a_phone(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/orders/audit", viewport={"width": 390, "height": 844}))
    copy = page.locator(".command button")
    lines = "each => { const text = new Range(); text.selectNodeContents(each); return text.getClientRects().length; }"
    assert (copy.inner_text(), copy.evaluate(lines)) == ("Copy", 1)
    # It finished none of those that came in.
    expect(page.locator(".tile", has_text="Finished")).to_contain_text(re.compile(r"0\s*/s\s*[\d,]+ messages came in"))


def test_the_navigation_opens_on_a_phone(cluster: Cluster, tabs: Tabs) -> None:
    page = tabs.open(cluster.url, viewport={"width": 390, "height": 844})
    nodes = page.get_by_role("link", name="Nodes", exact=False).first
    expect(nodes).not_to_be_visible()
    page.locator("label.menu").click()
    nodes.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")


@pytest.mark.parametrize("name", ["overview", "topic", "channel", "lookup"])
def test_tab_goes_through_the_page_in_its_order(cluster: Cluster, tabs: Tabs, name: str) -> None:
    """Every stop is visible, shows that it has the focus, and lies behind the one before in the page."""
    page = settled(tabs.open(cluster.url + path_of(cluster, name)))
    page.evaluate("window.previous = null")
    step = """() => {
        const now = document.activeElement, before = window.previous;
        window.previous = now;
        if (now === document.body) return "end";
        const style = getComputedStyle(now);
        if (!now.checkVisibility()) return `hidden: ${now.outerHTML.slice(0, 99)}`;
        // A field for a time has parts, and the button among them marks itself.
        const isMarked = style.outlineStyle !== "none" || now.type === "datetime-local";
        if (!isMarked) return `no mark: ${now.outerHTML.slice(0, 99)}`;
        const isBehind = before?.compareDocumentPosition(now) & Node.DOCUMENT_POSITION_FOLLOWING;
        if (before && before !== now && !isBehind) return "back";
        return "";
    }"""
    stops = 0
    for _ in range(300):
        page.keyboard.press("Tab")
        said = page.evaluate(step)
        if said == "end":
            break
        assert said == "", f"stop {stops}"
        stops += 1
    assert stops > 10


def test_the_overview_shows_the_cluster_and_goes_on_by_itself(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(cluster.url))
    tiles = page.locator("[data-block=tiles]")
    expect(tiles).to_contain_text("2 nsqlookupds")
    depth = tiles.locator(".tile", has_text="Depth").locator("dd")
    first = depth.get_attribute("title")
    # Nobody reads orders/audit, so the depth grows.
    expect(depth).not_to_have_attribute("title", first or "")
    expect(page.locator("[data-rows=busiest] tr")).to_have_count(5)


@pytest.mark.parametrize("name", ["overview", "topic", "channel", "node", "counter"])
def test_charts_move(cluster: Cluster, tabs: Tabs, name: str) -> None:
    page = settled(tabs.open(cluster.url + path_of(cluster, name)))
    line = page.locator("time-chart path.stroke").first
    expect(line).to_have_attribute("d", re.compile(r"M[\d.]+ [\d.]+L"))
    drawn = line.get_attribute("d") or ""
    expect(line).not_to_have_attribute("d", drawn)
    expect(page.locator("time-chart").first.locator("text.axis").first).to_be_visible()


def test_a_chart_opened_now_shows_the_past(cluster: Cluster, tabs: Tabs) -> None:
    settled(tabs.open(cluster.url))
    page = settled(tabs.open(cluster.url))
    expect(page.locator("time-chart path.stroke").first).to_have_attribute("d", re.compile(r"L.*L.*L"))


def test_hovering_a_chart_says_what_was_when(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(cluster.url))
    chart = page.locator("time-chart").first
    expect(chart.locator("path.stroke").first).to_have_attribute("d", re.compile("L"))
    chart.hover(position={"x": chart.bounding_box()["width"] * 0.95, "y": 60})
    expect(chart.locator(".tip")).to_contain_text("in")
    expect(chart.locator(".tip")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d"))
    expect(page.locator("time-chart .tip")).to_have_count(3)
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".tip")).to_be_visible()


def test_the_span_of_charts_is_chosen_and_remembered(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(cluster.url))
    page.get_by_role("button", name="1 hour").click()
    expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    page.goto(f"{cluster.url}/topics/orders")
    expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")


def test_the_list_of_topics_filters_as_one_types(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics"))
    rows = page.locator("[data-rows=topics] tr")
    expect(rows.filter(has_text="clicks")).to_have_count(1)
    expect(rows.locator("spark-line svg").first).to_be_visible()
    page.keyboard.press("f")
    page.keyboard.type("sensors")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("heading", level=2)).to_contain_text("1 topic with “sensors”")
    expect(page).to_have_url(re.compile(r"q=sensors"))
    page.keyboard.type(" nothing")
    expect(page.locator("#topics")).to_contain_text("No topic has sensors nothing in its name")


def test_the_list_of_topics_sorts(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics"))
    names = page.locator("[data-rows=topics] td.name a")
    assert names.all_inner_texts() == sorted(names.all_inner_texts())
    page.get_by_role("link", name="Depth").click()
    expect(names.first).to_have_text("orders")


def test_slash_finds_anything_by_keyboard(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(cluster.url))
    node = cluster.nsqds[1].http_address
    for typed, found in [("bill", "/topics/orders/billing"), ("sensors", "/topics/sensors.temperature"), (node, node)]:
        page.keyboard.press("/")
        expect(page.locator("#palette input")).to_be_focused()
        page.keyboard.type(typed)
        expect(page.locator("#found li[aria-selected=true]")).to_contain_text(typed)
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(re.escape(found) + "$"))
        settled(page)
    page.keyboard.press("/")
    page.keyboard.type("no such thing anywhere")
    expect(page.locator("#found")).to_contain_text("Nothing has this name")
    page.keyboard.press("Escape")
    expect(page.locator("#palette")).not_to_be_visible()


def test_keys_go_to_pages_and_rows(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(cluster.url))
    page.evaluate("performance.now = () => 1000")  # the second key must follow soon, by the page's clock
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page).to_have_url(f"{cluster.url}/topics")
    settled(page)
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("[data-rows=topics] tr").nth(1).locator("td.name a")).to_be_focused()
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_times_are_of_the_readers_zone_with_the_exact_value_on_hover(cluster: Cluster, tabs: Tabs) -> None:
    path = f"/nodes/{cluster.nsqds[0].http_address}"
    for zone, offset in [("Asia/Tokyo", r"\+09:00"), ("America/New_York", r"-0[45]:00")]:
        page = settled(tabs.open(cluster.url + path, timezone_id=zone))
        started = page.locator("[data-block=facts] local-time")
        expect(started).to_contain_text("ago")
        exact = re.compile(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} {offset} \({zone}\)")
        expect(started).to_have_attribute("title", exact)


def test_figures_are_those_of_nsqd(cluster: Cluster, tabs: Tabs) -> None:
    nsqd = cluster.nsqds[0]
    nsqd.post("/topic/create", topic="still")
    nsqd.post("/channel/create", topic="still", channel="life")
    for number in range(1234):
        nsqd.post("/pub", b"%d" % number, topic="still")
    cluster.wait_until_shown("/topics/still", "life")
    page = settled(tabs.open(f"{cluster.url}/topics/still"))
    row = page.locator("[data-rows=channels] tr", has_text="life")
    expect(row.locator("[data-label=depth]")).to_contain_text("1,234")
    expect(row.locator("[data-label=messages]")).to_have_text("1,234")
    row.get_by_role("link").click()
    expect(page.locator("[data-block=tiles]")).to_contain_text("nobody takes messages")
    expect(page.locator("[data-rows=nodes]")).to_contain_text(nsqd.http_address)


def test_consumers_are_shown_with_what_they_do(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/clicks/sessions"))
    rows = page.locator("[data-rows=clients] tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("sessions/2.1")
    finished = rows.first.locator("[data-label=finished]")
    expect(finished).not_to_have_text(finished.inner_text())


def test_a_spark_query_is_shown_as_one(cluster: Cluster, tabs: Tabs) -> None:
    """It commits how far it came, to a channel that it owns; a page that is open already shows the first one too."""
    page = settled(tabs.open(f"{cluster.url}/spark"))
    expect(page.locator(".empty")).to_contain_text("No query")
    for nsqd in cluster.nsqds:
        nsqd.post("/channel/commit", topic="clicks", channel="lake", owner="clicks-to-lake", seq=0)
    row = page.locator("[data-rows=queries] tr")
    expect(row).to_contain_text("clicks-to-lake")
    expect(row.locator("[data-label=nsqds]")).to_have_text("3")
    expect(row.locator("[data-label='backlog ends']")).to_contain_text("falls behind")
    assert complaints(page) == []
    row.get_by_role("link", name="lake").click()
    expect(page.locator("[data-block=status]")).to_contain_text("read by clicks-to-lake")
    for nsqd in cluster.nsqds:
        nsqd.post("/channel/delete", topic="clicks", channel="lake")
    page.goto(f"{cluster.url}/spark")
    expect(page.locator("[data-rows=queries] tr")).to_have_count(0)


def test_what_is_empty_says_what_to_do_next(cluster: Cluster, tabs: Tabs) -> None:
    cluster.nsqds[0].post("/topic/create", topic="lonely")
    cluster.wait_until_shown("/topics/lonely")
    page = settled(tabs.open(f"{cluster.url}/topics/lonely", permissions=["clipboard-read", "clipboard-write"]))
    expect(page.locator("div.empty")).to_contain_text("No channels")
    page.get_by_role("button", name="Copy").click()
    eventually(lambda: "--topic=lonely" in page.evaluate("navigator.clipboard.readText()"))
    page.goto(f"{cluster.url}/spark")
    expect(page.locator(".empty code")).to_contain_text("readStream")


def test_new_topics_and_channels_appear_by_themselves(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics?q=sprouting"))
    detail = settled(tabs.open(f"{cluster.url}/topics/payments"))
    cluster.nsqds[0].post("/channel/create", topic="payments", channel="sprouting")
    expect(detail.locator("[data-rows=channels] tr", has_text="sprouting")).to_have_count(1)
    cluster.nsqds[0].post("/channel/delete", topic="payments", channel="sprouting")
    expect(detail.locator("[data-rows=channels] tr", has_text="sprouting")).to_have_count(0)
    expect(page.locator("#topics")).to_contain_text("No topic has sprouting")


def test_what_does_not_answer_is_named_and_the_rest_shown(cluster: Cluster, tabs: Tabs) -> None:
    live = cluster.nsqds[0].http_address
    with Nsqadmin(f"--nsqd-http-address={live}", "--nsqd-http-address=127.0.0.1:1", "--poll-interval=500ms") as admin:
        page = settled(tabs.open(admin.url))
        expect(page.locator("[data-block=failures]")).to_contain_text("127.0.0.1:1")
        expect(page.locator("[data-rows=busiest] tr").first).to_be_visible()
        expect(page.locator("[data-block=attention]")).to_contain_text("127.0.0.1:1")
        page.goto(f"{admin.url}/nodes")
        silent = page.locator("[data-rows=nodes] tr", has=page.get_by_text("127.0.0.1:1", exact=True))
        expect(silent).to_contain_text("no answer")
        for figure in ("in/s", "out/s", "depth", "consumers"):
            expect(silent.locator(f"[data-label='{figure}']")).to_have_text(UNKNOWN)
        page.goto(f"{admin.url}/nodes/127.0.0.1:1")
        expect(page.locator("[data-block=tiles]")).not_to_contain_text("0")
        expect(page.locator("div.empty")).to_contain_text("What is on this nsqd is not known")
        page.goto(f"{admin.url}/lookup")
        expect(page.locator(".empty")).to_contain_text("No nsqlookupd is configured")
        tabs.close()
    lookupds = [f"--lookupd-http-address={address}" for address in (cluster.lookupds[0].http_address, "127.0.0.1:1")]
    with Nsqadmin(*lookupds, "--poll-interval=500ms") as admin:
        page = settled(tabs.open(f"{admin.url}/lookup"))
        silent = page.locator("[data-block=servers] tr", has=page.get_by_text("127.0.0.1:1", exact=True))
        expect(silent.locator("[data-label='nsqds it knows']")).to_have_text(UNKNOWN)
        tabs.close()


def test_figures_that_no_nsqd_told_are_not_known(tabs: Tabs) -> None:
    with Nsqadmin("--nsqd-http-address=127.0.0.1:1", "--poll-interval=500ms") as admin:
        page = settled(tabs.open(admin.url))
        for title in ("Depth", "In flight", "Consumers"):
            tile = page.locator("[data-block=tiles] .tile", has_text=title)
            expect(tile.locator("dd").first).to_contain_text(UNKNOWN)
        page.reload()
        expect(page.locator("div.empty")).to_contain_text("No nsqd answers")
        page.goto(f"{admin.url}/topics")
        expect(page.locator("div.empty")).to_contain_text("No nsqd answers")
        expect(page.locator("main")).not_to_contain_text("0 topics")
        tabs.close()


def test_everything_is_below_the_base_path(cluster: Cluster, tabs: Tabs) -> None:
    lookupd = cluster.lookupds[0].http_address
    flags = [f"--lookupd-http-address={lookupd}", "--base-path=/a/b/", "--poll-interval=500ms"]
    with Nsqadmin(*flags) as admin:
        page = settled(tabs.open(f"{admin.url}/a/b"))
        page.locator("[data-rows=busiest] a", has_text="orders").click()
        expect(page).to_have_url(f"{admin.url}/a/b/topics/orders")
        settled(page)
        page.keyboard.press("/")
        expect(page.locator("#palette input")).to_be_focused()
        page.keyboard.type("billing")
        expect(page.locator("#found li").first).to_contain_text("billing")
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{admin.url}/a/b/topics/orders/billing")
        settled(page)
        tabs.close()


def test_it_comes_back_when_nsqadmin_does(cluster: Cluster, tabs: Tabs) -> None:
    flags = [f"--lookupd-http-address={cluster.lookupds[0].http_address}", "--poll-interval=500ms"]
    with Nsqadmin(*flags) as admin:
        page = settled(tabs.open(admin.url))
        admin.stop()
        expect(page.locator(".live")).to_have_attribute("data-state", "lost")
        admin.start()
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
        tabs.close()
    tabs.errors[:] = [error for error in tabs.errors if "ERR_" not in error]


def test_it_comes_back_when_a_proxy_said_that_nsqadmin_is_away(cluster: Cluster, tabs: Tabs) -> None:
    """A browser does not try a stream again by itself that was answered by an error."""
    is_away = threading.Event()

    class Proxy(QuietHandler):
        """Passes requests on to nsqadmin, as nginx does, or says that it is away."""

        def do_GET(self) -> None:
            if is_away.is_set():
                self.answer(502)
                return
            upstream = http.client.HTTPConnection(*cluster.admin.http)
            upstream.request("GET", self.path, headers={"Host": self.headers["Host"]})
            answer = upstream.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            while not is_away.is_set() and (piece := answer.read1()):
                self.wfile.write(piece)
            upstream.close()

    with LocalServer(Proxy) as proxy:
        page = settled(tabs.open(f"http://{proxy.address}"))
        depth = page.locator("[data-block=tiles] .tile", has_text="Depth").locator("dd")
        is_away.set()
        with page.expect_response(lambda response: response.status == 502):
            expect(page.locator(".live")).to_have_attribute("data-state", "lost")
        shown = depth.get_attribute("title") or ""
        is_away.clear()
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
        expect(depth).not_to_have_attribute("title", shown)
        is_away.set()
        tabs.close()
    tabs.errors[:] = [error for error in tabs.errors if "502" not in error and "ERR_" not in error]


def test_nothing_is_loaded_from_another_host(cluster: Cluster, tabs: Tabs) -> None:
    page = tabs.open("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto(cluster.url + path_of(cluster, name), wait_until="domcontentloaded")
        settled(page)
        forget_missing(tabs, name)
    assert asked
    assert [url for url in asked if not url.startswith((f"{cluster.url}/", "data:"))] == []
