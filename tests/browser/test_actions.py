"""Checks everything that changes the cluster: it asks first, does it on every nsqd, and says what each of them
answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.cluster import Cluster
from browser.conftest import Tabs
from browser.steps import close, complaints, confirm, settled
from harness.nsqadmin import Nsqadmin
from harness.waiting import eventually
from nsquark.admin.passwords import PasswordHash, User, Users, write_users
from nsquark.admin.roles import Role

_serial = itertools.count(1)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """Makes a topic with a channel and ten messages on each nsqd, that no other test uses."""
    name = f"acted_on_{next(_serial)}"
    for nsqd in cluster.nsqds:
        nsqd.post("/topic/create", topic=name)
        nsqd.post("/channel/create", topic=name, channel="ch")
        for number in range(10):
            nsqd.post("/pub", b'{"user": {"id": %d}}' % number, topic=name)
    eventually(lambda: sum(channel["depth"] for channel in cluster.channels(name, "ch")) == 30)
    eventually(
        lambda: all(
            len(lookupd.get("/lookup", topic=name).json().get("producers", ())) == 3 for lookupd in cluster.lookupds
        )
    )
    cluster.wait_until_shown(f"/topics/{name}/ch", *(nsqd.http_address for nsqd in cluster.nsqds))
    return name


def press(page: Any, name: str) -> None:
    page.locator(".head").get_by_role("button", name=name, exact=True).click()


@pytest.mark.parametrize("path", ["/topics/{}", "/topics/{}/ch"])
def test_pause_and_unpause(cluster: Cluster, tabs: Tabs, topic: str, path: str) -> None:
    def paused() -> set[bool]:
        found = cluster.channels(topic, "ch") if path.endswith("ch") else cluster.topics(topic)
        return {each["paused"] for each in found}

    page = settled(tabs.open(cluster.url + path.format(topic)))
    press(page, "Pause")
    expect(page.locator("#confirm")).to_contain_text("until it is unpaused")
    assert complaints(page) == []
    dialog = confirm(page, "Pause")
    expect(dialog.get_by_role("status")).to_have_text("Done.")
    expect(dialog.locator(".results li.ok")).to_have_count(3)
    assert paused() == {True}
    close(page)
    expect(page.locator("[data-block=status]")).to_contain_text("paused")
    press(page, "Unpause")
    confirm(page, "Unpause")
    close(page)
    expect(page.locator("[data-block=status]")).not_to_contain_text("paused")
    assert paused() == {False}


def test_cancelling_does_nothing(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
    press(page, "Empty")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#confirm")).not_to_be_visible()
    press(page, "Empty")
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).not_to_be_visible()
    assert sum(channel["depth"] for channel in cluster.channels(topic, "ch")) == 30


def test_empty_a_channel(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
    press(page, "Empty")
    confirm(page, "Empty")
    close(page)
    assert {channel["depth"] for channel in cluster.channels(topic, "ch")} == {0}
    expect(page.locator("[data-block=tiles] .tile", has_text="Depth").locator("dd")).to_have_attribute("title", "0")


def test_empty_a_topic(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    for nsqd in cluster.nsqds:
        nsqd.post("/topic/pause", topic=topic)
        nsqd.post("/pub", b"held back", topic=topic)
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}"))
    press(page, "Empty")
    confirm(page, "Empty")
    assert {found["depth"] for found in cluster.topics(topic)} == {0}


def test_delete_a_channel_by_typing_its_name(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
    press(page, "Delete")
    confirm(page, "Delete", "ch")
    close(page)
    expect(page).to_have_url(f"{cluster.url}/topics/{topic}")
    assert list(cluster.channels(topic, "ch")) == []


def test_delete_a_topic_by_typing_its_name(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}"))
    press(page, "Delete")
    confirm(page, "Delete", topic)
    close(page)
    expect(page).to_have_url(f"{cluster.url}/topics")
    assert cluster.topics(topic) == []
    expect(page.locator("[data-rows=topics] tr", has_text=topic)).to_have_count(0)


def test_tombstone_a_topic_on_one_nsqd(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}"))
    gone = cluster.nsqds[0].http_address
    page.get_by_role("button", name=f"Tombstone {topic} on {gone}").click()
    confirm(page, "Tombstone")
    close(page)
    assert topic not in cluster.nsqds[0].topic_names()
    assert topic in cluster.nsqds[1].topic_names()
    expect(page.locator("[data-rows=nodes] tr")).to_have_count(2)


def test_create_a_topic_and_a_channel(cluster: Cluster, tabs: Tabs) -> None:
    page = settled(tabs.open(f"{cluster.url}/lookup"))
    page.get_by_label("Topic", exact=True).fill("by_hand")
    page.get_by_label("Channel, if you want one").fill("first")
    page.get_by_role("button", name="Create").click()
    confirm(page, "Create")
    close(page)
    for lookupd in cluster.lookupds:
        assert "by_hand" in lookupd.get("/topics").json()["topics"]
        assert lookupd.get("/channels", topic="by_hand").json()["channels"] == ["first"]
    # No nsqd has it, so it is inactive, and can be forgotten again.
    expect(page.locator(".tree")).to_contain_text("by_hand")
    page.get_by_role("button", name="Delete channel first of by_hand").click()
    confirm(page, "Delete")
    close(page)
    expect(page.locator(".tree")).not_to_contain_text("first")
    page.get_by_role("button", name="Delete topic by_hand").click()
    confirm(page, "Delete")
    close(page)
    expect(page.get_by_role("button", name="Delete topic by_hand")).to_have_count(0)
    assert "by_hand" not in cluster.lookupds[0].get("/topics").json()["topics"]


def test_who_fails_is_named_beside_who_did_it(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    cluster.nsqds[2].post("/channel/delete", topic=topic, channel="ch")
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
    press(page, "Pause")
    dialog = confirm(page, "Pause")
    expect(dialog.get_by_role("status")).to_contain_text("Done on 2 of 3")
    expect(dialog.locator(".results li.bad")).to_contain_text(cluster.nsqds[2].http_address)
    expect(dialog.locator(".results li.bad")).to_contain_text("CHANNEL_NOT_FOUND")


def test_seek_shows_first_what_comes_again(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    for nsqd in cluster.nsqds:
        nsqd.post("/channel/empty", topic=topic, channel="ch")
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch"))
    page.get_by_label("To", exact=True).select_option("oldest")
    page.get_by_role("button", name="Preview").click()
    dialog = page.locator("#confirm")
    expect(dialog).to_contain_text("30 messages come again")
    expect(dialog.locator("#seek-preview tbody tr")).to_have_count(3)
    assert {channel["depth"] for channel in cluster.channels(topic, "ch")} == {0}
    confirm(page, "Seek")
    close(page)
    assert {channel["depth"] for channel in cluster.channels(topic, "ch")} == {10}
    page.get_by_label("To", exact=True).select_option("newest")
    page.get_by_role("button", name="Preview").click()
    expect(dialog).to_contain_text("30 are passed over")
    confirm(page, "Seek")
    assert {channel["depth"] for channel in cluster.channels(topic, "ch")} == {0}


def test_seek_to_a_time(cluster: Cluster, tabs: Tabs, topic: str) -> None:
    page = settled(tabs.open(f"{cluster.url}/topics/{topic}/ch", timezone_id="Asia/Tokyo"))
    page.get_by_role("button", name="Preview").click()
    # An hour ago nothing was published yet, so all that waits now goes on waiting.
    expect(page.locator("#confirm")).to_contain_text("No message comes again and none is passed over")


# -- who may ---------------------------------------------------------------------------------------------


PEOPLE = {"vera": Role.VIEWER, "otto": Role.OPERATOR, "ada": Role.ADMIN}
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqadmin]:
    """Runs an nsqadmin of the same cluster that asks who one is."""
    path = tmp_path_factory.mktemp("auth") / "users"
    people = {name: User(name, role, PasswordHash.of(PASSWORD)) for name, role in PEOPLE.items()}
    write_users(path, Users(people))
    asking = [f"--lookupd-http-address={lookupd.http_address}" for lookupd in cluster.lookupds]
    with Nsqadmin(*asking, f"--auth-file={path}", "--poll-interval=500ms") as admin:
        yield admin


def sign_in(tabs: Tabs, admin: Nsqadmin, name: str, path: str = "/") -> Any:
    page = tabs.open(admin.url + path)
    expect(page).to_have_title("Sign in · nsqadmin")
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    return settled(page)


def test_signing_in_and_out(guarded: Nsqadmin, tabs: Tabs) -> None:
    page = tabs.open(f"{guarded.url}/topics/orders")
    expect(page).to_have_title("Sign in · nsqadmin")
    assert complaints(page) == []
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("do not belong together")
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{guarded.url}/topics/orders")
    expect(page.locator(".side-foot")).to_contain_text("ada · admin")
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_title("Sign in · nsqadmin")
    page.goto(f"{guarded.url}/topics")
    expect(page).to_have_title("Sign in · nsqadmin")
    tabs.errors[:] = [error for error in tabs.errors if "401" not in error]


def test_a_page_whose_login_has_ended_leads_to_the_next(guarded: Nsqadmin, tabs: Tabs) -> None:
    page = sign_in(tabs, guarded, "ada", "/topics/orders")
    other = settled(tabs.another(page.context, f"{guarded.url}/nodes"))
    other.get_by_role("button", name="Sign out").click()
    expect(page).to_have_title("Sign in · nsqadmin")
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{guarded.url}/topics/orders")
    tabs.errors[:] = [error for error in tabs.errors if "401" not in error]


@pytest.mark.parametrize(
    ("name", "buttons"),
    [("vera", []), ("otto", ["Pause"]), ("ada", ["Pause", "Empty", "Delete"])],
)
def test_each_role_sees_what_it_may_do(
    guarded: Nsqadmin, tabs: Tabs, topic: str, name: str, buttons: list[str]
) -> None:
    page = sign_in(tabs, guarded, name, f"/topics/{topic}")
    assert page.locator(".head .actions [data-action]:visible").all_inner_texts() == buttons
    expect(page.get_by_role("button", name="Tombstone")).to_have_count(3 if name == "ada" else 0)
    page.goto(f"{guarded.url}/messages/{topic}")
    expect(page.locator("#messages li").first).to_be_visible()
    expect(page.locator("#publish")).to_have_count(0 if name == "vera" else 1)


SEND = """async ([path, sent]) => {
    const token = document.querySelector('meta[name="csrf"]').content;
    const body = JSON.stringify({action: "pause", topic: "payments"});
    const headers = {"Content-Type": "application/json"};
    if (sent) headers["X-CSRF-Token"] = sent === "own" ? token : sent;
    const answer = await fetch(path, {method: "POST", headers, body});
    return answer.status;
}"""


def test_what_a_role_may_not_do_is_refused_whoever_asks(guarded: Nsqadmin, cluster: Cluster, tabs: Tabs) -> None:
    page = sign_in(tabs, guarded, "vera")
    assert page.evaluate(SEND, ["/action", "own"]) == 403
    assert page.evaluate(SEND, ["/api/topics/payments", "own"]) == 403
    assert {found["paused"] for found in cluster.topics("payments")} == {False}
    tabs.errors.clear()


@pytest.mark.parametrize("with_login", [False, True])
def test_forged_requests_are_refused(cluster: Cluster, guarded: Nsqadmin, tabs: Tabs, with_login: bool) -> None:
    """Without the token of a page of ours nothing changes, with and without logins."""
    page = sign_in(tabs, guarded, "ada") if with_login else settled(tabs.open(cluster.url))
    url = guarded.url if with_login else cluster.url
    for path in ("/action", "/api/topics/payments"):
        assert page.evaluate(SEND, [path, ""]) == 403
        assert page.evaluate(SEND, [path, "made up"]) == 403
    # Another site sends a form, and the browser its cookies with it.
    form = f'<form method="post" enctype="text/plain" action="{url}/action"><input name="a" value="b"></form>'
    page.route("http://evil.example/", lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto("http://evil.example/")
    with page.expect_navigation():
        page.evaluate("document.forms[0].submit()")
    # The cookie of a login is not even sent with it.
    expect(page.locator("body")).to_contain_text("LOGIN_REQUIRED" if with_login else "FOREIGN_ORIGIN")
    assert {found["paused"] for found in cluster.topics("payments")} == {False}
    tabs.errors.clear()
