"""The contract of services, which the agent runs: each follows the configuration until closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.config import Config
    from dshealthd.core.collector import Sample


class Service(Protocol):
    """One part of the agent, in its event loop; the agent holds a list of them."""

    @property
    def name(self) -> str:
        """The name by which the log and the status line speak of the service."""
        ...

    async def apply(self, config: Config) -> None:
        """Run the service as the configuration says, from the first call on; what it keeps runs on.

        What cannot start is a state and never an exception: the agent goes on without it.
        """
        ...

    def samples(self) -> Iterator[Sample]:
        """Yield the service's own metrics; none while it is off."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return what people see of it: `state` is `off`, `ok`, `running` or `failing`.

        A failing one has the reason as `detail`.
        """
        ...

    async def close(self) -> None:
        """End all that the service has begun. It may never have been applied."""
        ...
