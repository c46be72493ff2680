"""Checks the stream of a tab: the past comes first, then what is new; polling is shared, and bounded."""

import http.client
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from admin.conftest import Cluster
from admin.event_stream import EventStream
from harness import eventually
from harness.nsqadmin import Nsqadmin


def has_series(key: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda name, data: name == "series" and key in data


def fast(cluster: Cluster) -> str:
    return f"--lookupd-http-address={cluster.lookupd.http_address}"


def test_a_tab_gets_the_past_and_then_what_is_new(
    cluster: Cluster, topic: str, make_admin: Callable[..., Nsqadmin]
) -> None:
    cluster.make(topic, "ch", count=1)
    admin = make_admin(fast(cluster))
    key = f"topic,{topic},depth"
    with EventStream(admin, f"/topics/{topic}") as tab:
        assert tab.answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert tab.answer.headers["Cache-Control"] == "no-store"
        first = tab.until(has_series(key))[key]
        assert first.keys() == {"t", "v"}
        assert len(first["t"]) == len(first["v"]) >= 1
        second = tab.until(has_series(key))[key]
        assert second["t"][0] > first["t"][-1]
    with EventStream(admin, f"/topics/{topic}") as tab:
        again = tab.until(has_series(key))[key]
        assert again["t"][: len(first["t"])] == first["t"], "what was before the tab was opened"


def test_figures_are_sent_when_they_change(cluster: Cluster, topic: str, make_admin: Callable[..., Nsqadmin]) -> None:
    cluster.make(topic, "ch", count=1)
    admin = make_admin(fast(cluster), "--poll-interval=200ms")
    with EventStream(admin, f"/topics/{topic}") as tab:
        first = tab.until(lambda name, _: name == "figures")
        assert len(first) > 5
        for nsqd in cluster.nsqds:
            nsqd.post("/pub", b"another", topic=topic)
        changed = tab.until(lambda name, data: name == "figures" and any("4" in text for text in data.values()))
        assert len(changed) < len(first)


def test_a_page_that_is_none_gets_no_stream(cluster: Cluster) -> None:
    for page in ("", "nonsense", "/" + "x" * 5000):
        assert cluster.admin.get("/events", page=page).status == 400
    with EventStream(cluster.admin, "/nowhere"), EventStream(cluster.admin, "/topics/missing"):
        assert cluster.admin.get("/ping").text == "OK"


def test_polling_is_shared_and_stops_with_the_last_tab(cluster: Cluster, make_admin: Callable[..., Nsqadmin]) -> None:
    admin = make_admin(fast(cluster), "--poll-interval=100ms")

    def asked_at() -> list[float]:
        """Returns when nsqd was asked, by its own log, which may be read late."""
        found = re.findall(r"(\S+ \S+) INFO: 200 GET /stats\?format=json&include_clients=false ", cluster.nsqds[0].log)
        return [datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp() for at in found]

    tabs = [EventStream(admin, "/") for _ in range(5)]
    for tab in tabs:
        tab.__enter__()
    began = time.time()
    for tab in tabs:
        tab.next()
        tab.next()

    def polls() -> list[float]:
        found = [at for at in asked_at() if at > began]
        return found if len(found) >= 8 else []

    asked = eventually(polls)
    # They are 0.1 s apart, but for one or two of the other nsqadmins; polls for each tab would need 0.14 s for it.
    assert asked[7] - asked[0] > 0.3, "five tabs are served by one poll"
    for tab in tabs:
        tab.__exit__(None, None, None)
    seen = [0]

    def is_quiet() -> bool:
        last, seen[0] = seen[0], len(asked_at())
        return last == seen[0]

    eventually(is_quiet, interval_s=1.0)


def test_streams_of_one_peer_are_bounded(cluster: Cluster, make_admin: Callable[..., Nsqadmin]) -> None:
    """The peer may be a proxy, with the tabs of everybody."""
    admin = make_admin(fast(cluster))
    tabs: list[EventStream] = []
    try:
        for _ in range(192):
            tabs.append(EventStream(admin, "/"))
            tabs[-1].__enter__()
        connection = http.client.HTTPConnection(*admin.http, timeout=20)
        connection.request("GET", "/events?page=/")
        assert connection.getresponse().status == 503
        connection.close()
    finally:
        for tab in tabs:
            tab.__exit__(None, None, None)
    eventually(lambda: _opens(admin))


def _opens(admin: Nsqadmin) -> bool:
    """Tells whether there is a place again, when those who left have been noticed."""
    connection = http.client.HTTPConnection(*admin.http, timeout=20)
    connection.request("GET", "/events?page=/")
    status = connection.getresponse().status
    connection.close()
    return status == 200
