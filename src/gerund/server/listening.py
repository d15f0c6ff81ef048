"""The socket: the one place where gerund opens a port, and says in a sentence when it cannot.

Knows: addresses, the system's errors. Does not know: HTTP.
"""

import errno
import socket

from gerund.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: an address of this machine, or a name of one.
        port: 0 for a free one.

    Raises:
        ConfigError: there is no such address here, or the port is taken or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"there is no address {host}: {error.strerror}") from error
    except (OSError, OverflowError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            said = f"port {port} of {host} is in use; take another by --port, or 0 for a free one"
        elif number == errno.EACCES:
            said = f"port {port} is not allowed to you; take one from 1024 on by --port"
        elif number == errno.EADDRNOTAVAIL:
            said = f"{host} is no address of this machine; 127.0.0.1 is this machine alone"
        else:
            said = f"{host}, port {port}: cannot be listened on: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(said) from error
    # create_server makes sockets of protocol 0, and asyncio sets TCP_NODELAY only on those that name TCP. Without it,
    # the second packet of every answer waits for the client's delayed acknowledgement, some 40 ms.
    made = socket.socket(made.family, made.type, socket.IPPROTO_TCP, fileno=made.detach())
    made.set_inheritable(True)
    return made


def address_of(made: socket.socket) -> str:
    """Return a socket's address as a URL."""
    host, port = made.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - what a client on this machine asks
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
