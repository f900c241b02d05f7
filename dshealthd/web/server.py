"""The HTTP server: `/`, `/metrics`, `/api/v1/status`, `/-/healthy`, `/-/ready`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from dshealthd.config import listen_address
from dshealthd.exposition import negotiate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dshealthd.collector import Sample
    from dshealthd.config import Web
    from dshealthd.snapshot import Snapshot
    from dshealthd.telemetry import Telemetry


class Server:
    """Serves a snapshot."""

    def __init__(self, options: Web, snapshot: Snapshot, own: Callable[[], Iterable[Sample]], telemetry: Telemetry) -> None:
        """Prepare to serve `snapshot` and the agent's `own` samples; `start` opens the socket."""
        self._options = options
        self._snapshot = snapshot
        self._own = own
        self._telemetry = telemetry
        application = web.Application(client_max_size=options.max_body_bytes)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/-/healthy", self._healthy)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Open the socket; OSError when that is not possible."""
        host, port = listen_address(self._options.listen_address)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def close(self) -> None:
        """Close the socket and the connections."""
        await self._runner.cleanup()

    def url(self, hostname: str) -> str:
        """Return the page's address as a person would type it."""
        host, _ = listen_address(self._options.listen_address)
        port = self._runner.addresses[0][1]
        return f"http://{host or hostname}:{port}/"

    def samples(self) -> Iterator[Sample]:
        """Yield the server's own metrics."""
        yield from ()

    async def _metrics(self, request: web.Request) -> web.Response:
        chosen = negotiate(request.headers.get("Accept", ""))
        return web.Response(body=self._snapshot.body(chosen, self._own), headers={"Content-Type": chosen.value})

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")
