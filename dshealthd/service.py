"""What the agent runs: services, each of which follows the configuration until it is closed."""

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
        """The name by which the log and the status line speak of it."""
        ...

    async def apply(self, config: Config) -> None:
        """Run as the configuration says, from the first call on; what it keeps runs on.

        What cannot start is a state and never an exception: the agent goes on without it.
        """
        ...

    def samples(self) -> Iterator[Sample]:
        """Yield its own metrics; none while it is off."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return what people are shown: `state` is `off`, `ok`, `running` or `failing`.

        A failing one has the reason as `detail`.
        """
        ...

    async def close(self) -> None:
        """End all that it has begun. It may never have been applied."""
        ...
