"""A taken port is named before a service starts."""

from __future__ import annotations

import socket

import pytest

from dflash_online.errors import PortInUseError, ProcessError
from dflash_online.process.port import free_port, is_port_free, require_free_port


def test_a_port_is_free_until_something_listens() -> None:
    port = free_port()
    assert is_port_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_port_free("127.0.0.1", port)
        with pytest.raises(PortInUseError, match=f"target server: port {port} on 127.0.0.1 is in use"):
            require_free_port("target server", "127.0.0.1", port)
    require_free_port("target server", "127.0.0.1", port)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ProcessError, match=r"trainer: cannot listen on 192\.0\.2\.1"):
        require_free_port("trainer", "192.0.2.1", 8000)
