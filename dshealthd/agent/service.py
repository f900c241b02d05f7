"""The contract of the agent's services: each follows the configuration until it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.config.config import Config
    from dshealthd.core.collector import Sample


class Service(Protocol):
    """One part of the agent, in its event loop; the agent holds a list of them."""

    @property
    def name(self) -> str:
        """The service's name in the log and the status line."""
        ...

    async def apply(self, config: Config) -> None:
        """Run the service as configured, from the first call on; unchanged parts keep running.

        A failure to start is a state and never an exception: the agent continues without it.
        """
        ...

    def samples(self) -> Iterator[Sample]:
        """Yield the service's own metrics; none while it is off."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return the service's state for users: `state` is `off`, `ok`, `running` or `failing`.

        If it is failing, `detail` is the reason.
        """
        ...

    async def close(self) -> None:
        """Stop everything the service started. `apply` may never have been called."""
        ...
