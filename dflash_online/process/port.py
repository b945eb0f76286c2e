"""Ports: is one free, and which one is.

    cli, demo --require_free_port / free_port--> a service's command line

A port can be taken between the look and the service's own bind: the service then says so itself.
"""

from __future__ import annotations

import errno
import socket

from dflash_online.errors import PortInUseError, ProcessError


def is_port_free(host: str, port: int) -> bool:
    """True when a server could listen there now.

    Raises:
        OSError: the host is no address of this machine.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As every server does: connections of an ended server that wait to time out do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def require_free_port(name: str, host: str, port: int) -> None:
    """Refuse early, with a clear message, to start the service `name` on a taken port.

    Raises:
        PortInUseError: something listens there, or the port is reserved.
        ProcessError: the host is no address of this machine.
    """
    try:
        free = is_port_free(host, port)
    except OSError as error:
        raise ProcessError(name, f"cannot listen on {host}: {error}") from error
    if not free:
        raise PortInUseError(name, host, port)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
