"""Ways into the lab from this machine, which has no address on the lab's network.

Ports of 127.0.0.1 that lead to its servers.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator

from tests.lab.station import Station, connect


@contextlib.contextmanager
def forwarded(station: Station, port: int) -> Iterator[str]:
    """Yield the HOST:PORT of this machine that leads to a port of a station."""
    with socket.create_server(("127.0.0.1", 0)) as entrance:
        threading.Thread(target=_accept, args=(entrance, station, port), daemon=True).start()
        yield f"127.0.0.1:{entrance.getsockname()[1]}"
        entrance.shutdown(socket.SHUT_RDWR)  # wakes accept(2), which closing alone does not


def _accept(entrance: socket.socket, station: Station, port: int) -> None:
    with contextlib.suppress(OSError):  # the end of the entrance is the end of this
        while True:
            client, _ = entrance.accept()
            threading.Thread(target=_carry, args=(client, station, port), daemon=True).start()


def _carry(client: socket.socket, station: Station, port: int) -> None:
    """Carry bytes both ways until one side ends."""
    with (
        client,
        contextlib.suppress(OSError),
        connect(station, (station.address, port)) as server,
        selectors.DefaultSelector() as ready,
    ):
        ready.register(client, selectors.EVENT_READ, server)
        ready.register(server, selectors.EVENT_READ, client)
        while True:
            for key, _ in ready.select():
                source, target = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                chunk = source.recv(1 << 16)
                if not chunk:
                    return
                target.sendall(chunk)
