"""Advice that runbooks once got wrong, or did not answer: it stays as it was put right.

Each was tried against the release that the runbook names; a sentence that is written anew must
still say so.
"""

from __future__ import annotations

import re

import pytest

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.runbooks import render

SAYS = [
    ("nccl-environment", r"`\^lo,docker,br-,virbr`"),
    ("container-address", r"since 2\.28\.3, `virbr"),
    ("training-slow", r"`steps_per_print` \(DeepSpeed's default is None\)"),
    ("checkpoint-incompatible", r"`CKPT/latest_universal`, which `ds_to_universal` writes itself"),
    ("straggler", r"`iperf3` measures one TCP stream, not RDMA"),
    ("memory-full-gpu-idle", r"less offloading and less activation checkpointing are right"),
    ("cuda-oom", r"`max_split_size_mb` was the remedy .* before expandable segments"),
    ("nccl-all-reduce-failed", r"Xid 64\W.*\breset"),
    ("bad-link", r"req_rnr_retries_exceeded"),
    ("time-wait", r"Reserve them first.*ip_local_reserved_ports=\S*10250,28028\S*30000-32767"),
    ("nvml-broken", r"nv-hostengine.*rmmod nvidia_peermem"),
    ("bad-link", r"2\.30 can fail over to another port"),
    ("disk-full", r"lfs quota"),
    ("nccl-all-reduce-failed", r"`pip uninstall nccl` removes nothing"),
    ("nccl-all-reduce-failed", r"DS_BUILD_OPS"),
    ("p2p-disabled", r"\"Enable CUDA IPC\": it is on unless"),
    ("nccl-timeout", r"Smaller ZeRO buckets against timeouts: .* take longer, not shorter"),
]
NEVER = [
    ("nccl-environment", r"=\^docker"),
    ("bad-link", r"rnr_nak_retry_err[^.;]*(?:lost|exceeded its|ran out on)"),
    ("disk-full", r"First step[^\n]*\bdu -"),
]


def text_of(slug: str) -> str:
    """Return a runbook as one line."""
    return " ".join(render(all_symptoms()[slug]).split())


@pytest.mark.parametrize(("slug", "said"), SAYS)
def test_right_advice_is_there(slug: str, said: str) -> None:
    """What was put right is still said."""
    assert re.search(said, text_of(slug))


@pytest.mark.parametrize(("slug", "said"), NEVER)
def test_wrong_advice_is_gone(slug: str, said: str) -> None:
    """What does harm, or is wrong, is said no more."""
    assert not re.search(said, text_of(slug))
