"""The narrated tour of the demonstration: what happens, and where to look while it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stop:
    """One stop of the tour: a fault, and what to say before and after its page."""

    fault: str
    before: str
    after: str


WELCOME = """Three nodes with simulated GPUs, probing each other every two seconds; a real Prometheus
and Alertmanager with the shipped rules. All squares of the fleet page are
marked healthy. Open it now: node-1 serves it, and one of the others breaks each time."""

STOPS = (
    Stop(
        "gpu-lost",
        "A GPU falls off the bus. Watch the node's page turn red at once; the page to your phone\n"
        "follows when Prometheus has seen it too.",
        "The page names node and GPU, and says what to do first. Every rank on that GPU is dead:\n"
        "`dshealthd jobs NODE` would show the job that waits for it.",
    ),
    Stop(
        "infiniband-down",
        "An InfiniBand port goes down, as when a cable is pulled.",
        "One page for the port, not one for each symptom of it.",
    ),
    Stop(
        "path-hang",
        "The file system of the checkpoints hangs: every process that touches it hangs too.\n"
        "The agent does not: only the one worker that looked there is stuck, and is replaced.",
        "The path is named. Memory, GPUs and sockets on the same page stayed fresh throughout.",
    ),
    Stop(
        "node-dead",
        "A node goes silent on the network. Its peers notice within an epoch of the probes: on the\n"
        "fleet page it becomes unreachable.",
        "One page for the node; what its peers say of it is inhibited.",
    ),
)
FAREWELL = (
    "That was the tour. All faults are over, and their pages resolved; Ctrl-C ends the cluster."
)
