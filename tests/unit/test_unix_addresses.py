"""Checks which addresses mean a unix socket."""

import pytest

from nsquark.base.addresses import is_unix_address


@pytest.mark.parametrize(
    "address", ["127.0.0.1:4150", ":4150", "[::1]:4150", "host:nonsense", "/run/a:b", "0.0.0.0:0", "[::]:"]
)
def test_host_and_port(address: str) -> None:
    assert not is_unix_address(address)


@pytest.mark.parametrize("address", ["/run/nsqd.sock", "nsqd.sock", "relative/path", "::1", "a:b:c", "[::1]", "[x:1"])
def test_path(address: str) -> None:
    assert is_unix_address(address)
