"""Options of the NVRx health check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dshealthd.core.options import Section, option

_LONGEST = 107
"""Most bytes in the path of a Unix socket; sun_path in unix(7)."""


@dataclass(frozen=True, kw_only=True)
class NvrxOptions(Section):
    """The node health check that NVRx's `ft_launcher` requests.

    Off until `socket` is set; needs grpcio (docs/nvrx.md).
    """

    socket: Path | None = option(
        None,
        "Unix socket for --ft-node-health-check-endpoint, such as /run/dshealthd/nvhcd.sock. "
        "Directory permissions control access.",
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options with unusable values, each with the reason."""
        if self.socket is not None and (
            not self.socket.is_absolute() or len(bytes(self.socket)) > _LONGEST
        ):
            yield "socket", f"must be an absolute path of at most {_LONGEST} bytes"
