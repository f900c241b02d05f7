"""Several nodes on this machine, each with a network, an agent and simulated GPUs of its own.

In a test::

    with Lab(tmp_path, nodes=8) as lab, faults.slow(lab.nodes[2], 20):
        lab.wait(lambda scrapes: …)
"""

from tests.lab.lab import Lab
from tests.lab.node import Node
from tests.lab.station import NotPermitted

__all__ = ["Lab", "Node", "NotPermitted"]
