"""Checks the envelope: what goes in comes out, nothing else is taken for one, and only who asks for it opens it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hypothesis_profiles
from client.consumer_rig import consumer_of, publish
from client.pool_rig import address_of
from harness import Nsqd
from nsquark import Producer, ProducerPool, sync
from nsquark.client.envelope import (
    ENVELOPE_BYTES,
    HEADERS_BYTES_MAX,
    KEY_BYTES,
    KEY_ONLY,
    MAGIC,
    WITH_HEADERS,
    new_key,
    unwrap,
    wrap,
)
from nsquark.errors import ConfigError, MessageTooBig

hypothesis_profiles.load()  # by default an example that takes longer than 200 ms fails

texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=hypothesis_profiles.examples(3))
@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), st.dictionaries(texts, texts, max_size=5), st.binary())
def test_what_was_wrapped_comes_out(key: bytes, headers: dict[str, str], body: bytes) -> None:
    for form in (body, bytearray(body), memoryview(body)):
        assert unwrap(wrap(key, form, headers)) == (key, headers, body)


@settings(max_examples=hypothesis_profiles.examples(3))
@given(st.binary())
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    if not body.startswith(MAGIC):
        assert unwrap(body) == (None, {}, body)


@pytest.mark.parametrize(
    "body",
    [
        KEY_ONLY + b"k" * (KEY_BYTES - 1),
        WITH_HEADERS + b"k" * (KEY_BYTES - 1),
        WITH_HEADERS + b"k" * KEY_BYTES,
        WITH_HEADERS + b"k" * KEY_BYTES + b"\0\x05{}",
        WITH_HEADERS + b"k" * KEY_BYTES + b"\0\x07{\"a\":1}body",
        WITH_HEADERS + b"k" * KEY_BYTES + b"\0\x02[]body",
        WITH_HEADERS + b"k" * KEY_BYTES + b"\0\x09{\"a\":\"\xff\"}body",
        MAGIC + b"\x03" + b"k" * 100,
    ],
)  # fmt: skip
def test_what_only_looks_like_an_envelope_is_a_body(body: bytes) -> None:
    assert unwrap(body) == (None, {}, body)


def test_an_envelope_may_be_in_another() -> None:
    outer, inner = new_key(), wrap(new_key(), b"body", {"a": "b"})
    assert unwrap(wrap(outer, inner)) == (outer, {}, inner)


def test_keys_differ_and_have_one_size() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {KEY_BYTES}
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        wrap(b"key", b"body")


def test_headers_are_texts_and_have_a_bound() -> None:
    with pytest.raises(TypeError, match="headers are texts by name; 'a' is 1"):
        wrap(new_key(), b"body", {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="headers are texts that UTF-8 can write"):
        wrap(new_key(), b"body", {"a": "\udcff"})
    longest = {"a": "x" * (HEADERS_BYTES_MAX - len(b'{"a":""}'))}
    assert unwrap(wrap(new_key(), b"body", longest)).headers == longest
    with pytest.raises(MessageTooBig, match="an envelope takes 65535"):
        wrap(new_key(), b"body", {"a": longest["a"] + "x"})


# -- who makes and who opens envelopes -------------------------------------------------------------------


@pytest.mark.parametrize("is_pool", [False, True], ids=["producer", "pool"])
async def test_headers_travel_with_each_kind_of_publish(nsqd: Nsqd, topic: str, is_pool: bool) -> None:
    headers = {"traceparent": "00-1-2-01", "tenant": "ä"}
    address = address_of(nsqd)
    publisher = ProducerPool(address, envelope=True) if is_pool else Producer(address, envelope=True)
    async with publisher as producer:
        await producer.publish(topic, b"one", headers=headers)
        await producer.multi_publish(topic, [b"two", b"three"], headers=headers)
        await producer.deferred_publish(topic, 0.01, b"four", headers=headers)
        await producer.publish_nowait(topic, b"five", headers=headers)
        await producer.publish(topic, b"plain")
    got = {}
    async with consumer_of(nsqd, topic, envelope=True) as consumer:
        async for message in consumer:
            got[message.body] = dict(message.headers)
            message.finish()
            if len(got) == 6:
                break
    assert got.pop(b"plain") == {}
    assert got == dict.fromkeys([b"one", b"two", b"three", b"four", b"five"], headers)


async def test_who_did_not_ask_sees_the_body_as_it_is(nsqd: Nsqd, topic: str) -> None:
    """The body is another's envelope, or only begins like one."""
    bodies = {KEY_ONLY + b"x" * 40, wrap(new_key(), b"body", {"a": "b"})}
    publish(nsqd, topic, *bodies)
    async with consumer_of(nsqd, topic) as consumer:
        taken = [await anext(consumer) for _ in bodies]
        assert {message.body for message in taken} == bodies
        assert all(message.key is None and not message.headers for message in taken)
        for message in taken:
            message.finish()


async def test_a_producer_without_envelopes_refuses_headers(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer, ProducerPool(address_of(nsqd)) as pool:
        with pytest.raises(ConfigError, match="envelope=True"):
            await producer.publish(topic, b"x", headers={"a": "b"})
        with pytest.raises(ConfigError, match="envelope=True"):
            await pool.multi_publish(topic, [b"x"], headers={"a": "b"})
    assert topic not in nsqd.topic_names()


def test_headers_without_asyncio(nsqd: Nsqd, topic: str) -> None:
    with sync.Producer(address_of(nsqd), envelope=True) as producer:
        producer.publish(topic, b"one", headers={"a": "b"})
        producer.multi_publish_nowait(topic, [b"two"], headers={"a": "b"}).result(20)
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=5, envelope=True) as consumer:
        taken = [next(consumer) for _ in range(2)]
        assert {message.body: message.headers for message in taken} == {b"one": {"a": "b"}, b"two": {"a": "b"}}
        for message in taken:
            message.finish()


def test_an_envelope_takes_up_what_the_documents_say() -> None:
    assert ENVELOPE_BYTES == 25
