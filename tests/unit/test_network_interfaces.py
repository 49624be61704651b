"""Which interface has an address."""

from __future__ import annotations

import socket

import pytest

from stretto.network_interfaces import interface_of


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
def test_the_loopback_interface_has_all_addresses_of_its_network(address: str) -> None:
    found = interface_of(address)
    assert found in [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize("address", ["203.0.113.9", "::1", "host", ""])
def test_an_address_that_no_interface_has_is_of_none(address: str) -> None:
    assert interface_of(address) is None
