"""Checks Spark with an nsqd with AUTH: the secret goes along with every request, and nowhere else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness import AuthServer, Nsqd
from harness.auth import granting
from nsquark.spark.endpoint import NsqdError, Refused
from nsquark.spark.nsqd_http import identify
from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.sink.append import Appenders, AppendFailed
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.publisher import tcp_addresses
from nsquark.spark.sink.rows import Bodies
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.channel import SourceChannel
from nsquark.spark.source.offsets import Key
from nsquark.spark.source.packed_rows import read_partition
from nsquark.spark.source.range_rows import SCHEMA

from .source_rig import address, bodies

SECRET = "hush-hush-\u00e9"
GRANT = {"topic": "^orders", "channels": ["^spark$", "^$"], "permissions": ["subscribe", "publish"]}


@pytest.fixture
def server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        running.answer = granting(GRANT)
        yield running


@pytest.fixture(params=["", "--http-auth=required"])
def nsqd(request: pytest.FixtureRequest, make_nsqd: Callable[..., Nsqd], server: AuthServer) -> Nsqd:
    return make_nsqd(f"--auth-http-address={server.address}", *filter(None, [request.param]))


def source(nsqd: Nsqd, **more: str) -> SourceOptions:
    return SourceOptions.parse({"nsqd": address(nsqd), "authSecret": SECRET, **more})


def sink(nsqd: Nsqd, **more: str) -> SinkOptions:
    return SinkOptions.parse({"nsqd": address(nsqd), "authSecret": SECRET, "writeTimeout": "5s", **more})


def append(options: SinkOptions, topic: str, count: int) -> None:
    with Appenders(options) as appenders:
        appenders.append("job", Bodies(topic, pa.array(bodies(0, count), pa.binary())))


def rows(options: SourceOptions) -> int:
    parts = plan_batch(options)
    return sum(batch.num_rows for part in parts for batch in read_partition(options, SCHEMA, part))


def test_reading_and_writing(nsqd: Nsqd, server: AuthServer) -> None:
    append(sink(nsqd, idempotent="true"), "orders-1", 100)
    append(sink(nsqd, idempotent="true"), "orders-2", 10)
    assert rows(source(nsqd, topic="orders-1")) == 100
    assert rows(source(nsqd, topicPattern=".*")) == 110
    assert tcp_addresses(sink(nsqd)) == ["{}:{}".format(*nsqd.tcp)]
    channel = source(nsqd, topic="orders-1", channel="spark")
    found = identify(address(nsqd), channel.access)
    key = Key("orders-1", found.id)
    assert SourceChannel(channel).commit_keys(found, "owner", {key: 0}) == {key: 0}
    found.close()
    assert {query["secret"] for query in server.queries} == {SECRET}


def test_a_topic_that_is_not_granted(nsqd: Nsqd) -> None:
    with pytest.raises(AppendFailed, match="403 UNAUTHORIZED"):
        append(sink(nsqd, idempotent="true"), "others", 1)
    append(sink(nsqd, idempotent="true"), "orders-1", 1)
    options = source(nsqd, topic="others")
    with pytest.raises(NsqdError, match="there is no topic others"):
        rows(options)
    channel = source(nsqd, topic="orders-1", channel="another")
    found = identify(address(nsqd), channel.access)
    with pytest.raises(Refused, match="UNAUTHORIZED"):
        SourceChannel(channel).commit_keys(found, "owner", {Key("orders-1", found.id): 0})
    found.close()


def test_without_a_secret(nsqd: Nsqd) -> None:
    options = SourceOptions.parse({"nsqd": address(nsqd), "topic": "orders-1"})
    with pytest.raises(Refused, match=r"401 AUTH_REQUIRED.*write authSecretFile or authSecret"):
        rows(options)
    with pytest.raises(AppendFailed, match="write authSecretFile or authSecret"):
        append(SinkOptions.parse({"nsqd": address(nsqd), "idempotent": "true"}), "orders-1", 1)


def test_with_a_wrong_secret(nsqd: Nsqd, server: AuthServer) -> None:
    server.status = 403
    with pytest.raises(Refused, match="403 AUTH_FAILED"):
        rows(source(nsqd, topic="orders-1"))


@pytest.mark.parametrize("kind", [SourceOptions, SinkOptions])
def test_secrets_from_a_file(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    given = {"nsqd": "127.0.0.1:4151", "topic": "orders"}
    options = kind.parse({**given, "authSecretFile": str(file)})
    assert options.access.secret == SECRET
    assert SECRET not in repr(options)
    assert SECRET not in repr(options.access)
    for wrong in (
        {"authSecretFile": str(tmp_path / "missing")},
        {"authSecretFile": str(file), "authSecret": SECRET},
        {"authSecret": "a\nb"},
    ):
        with pytest.raises(OptionError) as refused:
            kind.parse({**given, **wrong})
        assert "a\nb" not in str(refused.value)
        assert SECRET not in str(refused.value)
