"""NVSwitches that this node itself manages, and the daemons that this takes.

Without NVSwitches (PCIe cards, NVLink bridges), and where other nodes manage them (the switch trays
of GB200 NVL72), there are none. docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dshealthd.core.host import Host, read_bytes
from dshealthd.linux.infiniband import of_nvidia
from dshealthd.linux.pci import bus

FABRIC_MANAGER = "nv-fabricmanager"
SUBNET_MANAGER = "nvlsm"
"""The subnet manager of NVLink, which Fabric Manager's service starts on Blackwell's boards."""
ENABLED = "etc/systemd/system/multi-user.target.wants/nvidia-fabricmanager.service"
"""The link that `systemctl enable nvidia-fabricmanager` makes."""
_MANAGEMENT = b"SW_MNG"
"""In the vital product data of an adapter through which a Blackwell board's switches are
managed."""
_DATA_SIZE = 4096
"""Bytes of vital product data, of which adapters have some hundred."""


class Switches:
    """The NVSwitches of one machine. What an adapter has answered is kept: its firmware is slow."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._manages: dict[str, bool | OSError] = {}

    def daemons(self, *, on_fabric: bool) -> tuple[str, ...]:
        """Return the names of the daemons that manage this node's NVSwitches; empty without any.

        `on_fabric` says that GPUs take part in a fabric, so that NVSwitches that are not on the PCI
        bus, those of Blackwell's boards, may be managed through an adapter. OSError.
        """
        if bus(self._host).switches():
            return (FABRIC_MANAGER,)
        if not on_fabric:
            return ()
        adapters = self._adapters()
        if True in adapters.values():
            return SUBNET_MANAGER, FABRIC_MANAGER
        for unread in adapters.values():
            if isinstance(unread, OSError):
                raise unread.with_traceback(None)
        return ()

    def _adapters(self) -> Mapping[str, bool | OSError]:
        self._manages = {
            name: known if isinstance(known := self._manages.get(name), bool) else self._read(name)
            for name in of_nvidia(self._host)
        }
        return self._manages

    def _read(self, adapter: str) -> bool | OSError:
        try:
            data = read_bytes(self._host.sys(f"class/infiniband/{adapter}/device/vpd"), _DATA_SIZE)
        except FileNotFoundError:  # a virtual function has none
            return False
        except OSError as error:
            return error
        return _MANAGEMENT in data


def fabric_manager_enabled(host: Host) -> bool:
    """Return whether Fabric Manager is to run on this node, by systemd's links."""
    return os.path.lexists(host.root(ENABLED))
