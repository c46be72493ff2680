"""Checks the database alone, with a clock of its own: who is listed, who is hidden, and what remains."""

from hypothesis import given, settings
from hypothesis import strategies as st

import hypothesis_profiles
from nsquark.lookupd.peer import PeerInfo
from nsquark.lookupd.registry import Registry, RegistryProducer

hypothesis_profiles.load()  # by default an example that takes longer than 200 ms fails

INACTIVE_NS = 300
TOMBSTONE_NS = 45


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def make() -> tuple[Registry, Clock]:
    clock = Clock()
    return Registry(INACTIVE_NS, TOMBSTONE_NS, clock), clock


def join(registry: Registry, number: int = 1) -> RegistryProducer:
    info = PeerInfo(f"127.0.0.1:{number}", "h", f"host{number}", 4150, 4151, "1.3.0")
    return registry.identify(info, b"{}")


def live(registry: Registry, topic: str) -> list[RegistryProducer]:
    return registry.live_producers_of(registry.topics[topic])


def test_a_channel_is_registered_with_its_topic() -> None:
    registry, _ = make()
    producer = join(registry)
    added = registry.register(producer, "t", "c")
    assert [str(key) for key in added] == [
        "category:channel key:t subkey:c",
        "category:topic key:t subkey:",
    ]
    assert live(registry, "t") == [producer]
    assert registry.channels_of("t") == ["c"]
    assert registry.register(producer, "t", "c") == []


def test_keys_stay_when_their_last_producer_leaves() -> None:
    registry, _ = make()
    producer = join(registry)
    registry.register(producer, "t", "c")
    registry.unregister_channel(producer, "t", "c")
    registry.unregister_topic(producer, "t")
    assert live(registry, "t") == []
    assert registry.channels_of("t") == ["c"]


def test_unregistering_empties_away_ephemeral_keys_only() -> None:
    registry, _ = make()
    first, second = join(registry, 1), join(registry, 2)
    for producer in (first, second):
        registry.register(producer, "t", "c#ephemeral")
    registry.unregister_channel(first, "t", "c#ephemeral")
    assert registry.channels_of("t") == ["c#ephemeral"]
    registry.unregister_channel(second, "t", "c#ephemeral")
    assert registry.channels_of("t") == []
    registry.register(first, "e#ephemeral", "")
    registry.unregister_topic(first, "e#ephemeral")
    assert "e#ephemeral" not in registry.topics


def test_a_channel_survives_its_ephemeral_topic() -> None:
    registry, _ = make()
    producer = join(registry)
    registry.register(producer, "t#ephemeral", "c")
    removed = registry.unregister_topic(producer, "t#ephemeral")
    assert [key.category for key in removed] == ["channel", "topic"]
    assert list(registry.topics) == []
    assert registry.channels_of("t#ephemeral") == ["c"]


def test_a_disconnect_leaves_even_ephemeral_keys() -> None:
    registry, _ = make()
    producer = join(registry)
    registry.register(producer, "t#ephemeral", "c#ephemeral")
    assert len(registry.disconnect(producer)) == 2
    assert live(registry, "t#ephemeral") == []
    assert registry.channels_of("t#ephemeral") == ["c#ephemeral"]
    assert registry.active_producers() == []


def test_silence_hides_and_only_a_ping_shows_again() -> None:
    registry, clock = make()
    producer = join(registry)
    registry.register(producer, "t", "")
    clock.now_ns += INACTIVE_NS
    assert live(registry, "t") == [producer]
    clock.now_ns += 1
    registry.register(producer, "t", "c")
    assert live(registry, "t") == []
    assert registry.active_producers() == []
    assert registry.ping(producer) == INACTIVE_NS + 1
    assert live(registry, "t") == [producer]
    assert registry.active_producers() == [producer]


def test_a_tombstone_hides_one_producer_of_one_topic_for_its_lifetime() -> None:
    registry, clock = make()
    first, second = join(registry, 1), join(registry, 2)
    for producer in (first, second):
        registry.register(producer, "t", "")
        registry.register(producer, "u", "")
    registry.tombstone("t", "host1:4151")
    registry.register(first, "t", "")
    assert live(registry, "t") == [second]
    assert live(registry, "u") == [first, second]
    assert registry.is_tombstoned(first, registry.topics["t"])
    clock.now_ns += TOMBSTONE_NS
    assert live(registry, "t") == [first, second]
    assert not registry.is_tombstoned(first, registry.topics["t"])


def test_a_registration_after_unregistering_has_no_tombstone() -> None:
    registry, _ = make()
    producer = join(registry)
    registry.register(producer, "t", "")
    registry.tombstone("t", "host1:4151")
    registry.unregister_topic(producer, "t")
    registry.register(producer, "t", "")
    assert live(registry, "t") == [producer]


def test_deleting_a_topic_takes_its_channels_and_registrations() -> None:
    registry, _ = make()
    producer = join(registry)
    registry.register(producer, "t", "c")
    registry.register(producer, "u", "c")
    registry.delete_topic("t")
    assert list(registry.topics) == ["u"]
    assert registry.channels_of("t") == []
    assert [key.topic for key in producer.topics()] == ["u"]
    assert not registry.delete_channel("t", "c")
    assert registry.delete_channel("u", "c")
    assert live(registry, "u") == [producer]


NAMES = st.sampled_from(["a", "b", "a#ephemeral"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "unregister", "delete_topic", "delete_channel", "disconnect", "tombstone"]),
        st.integers(0, 2),
        NAMES,
        st.sampled_from(["", "c", "c#ephemeral"]),
    ),
    max_size=40,
)


@settings(max_examples=hypothesis_profiles.examples(3))
@given(STEPS)
def test_both_sides_of_the_index_always_agree(steps: list[tuple[str, int, str, str]]) -> None:
    registry, _ = make()
    producers = [join(registry, number) for number in range(3)]
    for step, number, topic, channel in steps:
        producer = producers[number]
        if step == "register":
            registry.register(producer, topic, channel)
        elif step == "unregister" and channel:
            registry.unregister_channel(producer, topic, channel)
        elif step == "unregister":
            registry.unregister_topic(producer, topic)
        elif step == "delete_topic":
            registry.delete_topic(topic)
        elif step == "delete_channel":
            registry.delete_channel(topic, channel)
        elif step == "tombstone":
            registry.tombstone(topic, producer.info.node)
        else:
            registry.disconnect(producer)
            producers[number] = join(registry, number)
        by_key = {(key, producer) for key in registry.all_keys() for producer in key.producers}
        by_producer = {(key, producer) for producer in registry.producers for key in producer.keys}
        assert by_key == by_producer
        assert all(channels for channels in registry.channels.values())
