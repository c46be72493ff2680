"""Checks how a channel's messages are shared among its consumers, and what each gets next."""

from pathlib import Path

import pytest

from harness import until
from nsquark.broker.channel import Channel
from nsquark.broker.feed import Feed
from nsquark.broker.tcp.session import Session
from unit.nsqd_parts import command, consumer, in_flight, opened, publish


async def test_a_burst_reaches_all_who_are_ready(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        clients = [consumer(nsqd, "t", "ch", rdy=100)[1] for _ in range(4)]
        publish(topic, *(b"%d" % number for number in range(20)))
        shares = [client.bodies() for client in clients]
        assert [len(share) for share in shares] == [5, 5, 5, 5]
        assert sorted(int(body) for share in shares for body in share) == list(range(20))


async def test_single_messages_go_to_another_one_each_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        clients = [consumer(nsqd, "t", "ch", rdy=100)[1] for _ in range(3)]
        for number in range(6):
            publish(topic, b"%d" % number)
        assert [len(client.bodies()) for client in clients] == [2, 2, 2]


async def test_nobody_gets_more_than_its_rdy_or_its_socket_takes(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        (_, small), (stuck, unread), (_, large) = (consumer(nsqd, "t", "ch", rdy) for rdy in (1, 100, 100))
        stuck.pause_writing()
        publish(topic, *[b"m"] * 10)
        await until(lambda: not topic.channels["ch"].depth)
        assert [len(client.bodies()) for client in (small, unread, large)] == [1, 0, 9]


async def test_few_messages_are_offered_to_few_of_many_who_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish must not cost more the more consumers wait for it."""
    offered: list[Session] = []

    def fill(feed: Feed, session: Session, want: int, now: int) -> None:
        offered.append(session)
        send(feed, session, want, now)

    send = Feed.fill
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        clients = [consumer(nsqd, "t", "ch", rdy=100)[1] for _ in range(50)]
        monkeypatch.setattr(Feed, "fill", fill)
        publish(topic, b"1", b"2")
        assert sorted(body for client in clients for body in client.bodies()) == [b"1", b"2"]
        assert len(offered) == 2


async def test_a_new_channel_disturbs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SUB to a new channel must not cost more the more channels there are."""
    delivering: list[str] = []

    def deliver(channel: Channel) -> None:
        delivering.append(channel.name)
        send(channel)

    send = Channel.deliver
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        publish(topic, b"first")
        clients = [consumer(nsqd, "t", f"ch{number}", rdy=1)[1] for number in range(5)]
        assert [client.bodies() for client in clients] == [[b"first"], [], [], [], []]
        monkeypatch.setattr(Channel, "deliver", deliver)
        consumer(nsqd, "t", "new", rdy=1)
        assert set(delivering) == {"new"}


async def test_a_consumer_that_takes_everything_gets_a_part_each_turn(tmp_path: Path) -> None:
    """Others have their turn meanwhile, however fast it reads; so they do when all of it is delivered again."""
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        session, client = consumer(nsqd, "t", "ch", rdy=100)
        publish(topic, *[b"m" * 100_000] * 50)
        got = len(client.bodies())
        assert 0 < got < 50
        await until(lambda: not topic.channels["ch"].depth)
        assert got + len(client.bodies()) == 50
        command(session, b"".join(b"REQ %s 0\n" % message_id for message_id in in_flight(topic, "ch")))
        got = len(client.bodies())
        assert 0 < got < 50
        await until(lambda: not topic.channels["ch"].depth)
        assert got + len(client.bodies()) == 50
        assert set(client.attempts) == {2}


async def test_a_window_that_is_nearly_full_is_refilled_in_one_portion_a_little_later(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        session, client = consumer(nsqd, "t", "ch", rdy=100)
        publish(topic, *[b"m"] * 150)
        assert len(client.bodies()) == 100
        ids = in_flight(topic, "ch")
        assert len(ids) == 100
        for message_id in ids[:3]:
            command(session, b"FIN %s\n" % message_id)
            assert client.received == b""
        await until(lambda: client.received)
        assert len(client.bodies()) == 3


async def test_the_nearest_consumers_come_first(tmp_path: Path) -> None:
    flags = ("--topology-region=r", "--topology-zone=z", "--enable-experiment=topology-aware-consumption")
    async with opened(tmp_path, *flags) as nsqd:
        topic = nsqd.topic("t")
        _, far = consumer(nsqd, "t", "ch", 100)
        _, region = consumer(nsqd, "t", "ch", 3, topology_region="r")
        _, zone = consumer(nsqd, "t", "ch", 4, topology_zone="z")
        publish(topic, *[b"m"] * 10)
        assert [len(client.bodies()) for client in (zone, region, far)] == [4, 3, 3]


async def test_redeliveries_take_no_more_than_half_while_new_messages_wait(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        session, client = consumer(nsqd, "t", "ch", rdy=10)
        publish(topic, *[b"again"] * 10, *[b"new"] * 30)
        assert client.bodies() == [b"again"] * 10
        ids = in_flight(topic, "ch")
        command(session, b"".join(b"REQ %s 0\n" % message_id for message_id in ids))
        bodies = client.bodies()
        assert len(bodies) == 10
        assert bodies.count(b"again") == 5
        assert sorted(client.attempts) == [1] * 5 + [2] * 5


async def test_what_lies_in_memory_only_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    async with opened(tmp_path, "--mem-queue-size=5") as nsqd:
        topic = nsqd.topic("t#ephemeral")
        topic.channel("ch")
        publish(topic, *(b"%d" % number for number in range(12)))
        assert topic.channels["ch"].depth == 5
        _, client = consumer(nsqd, "t#ephemeral", "ch", rdy=100)
        await until(lambda: client.received.count(b"\0\0\0\2"))
        assert client.bodies() == [b"7", b"8", b"9", b"10", b"11"]
