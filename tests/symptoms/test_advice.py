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


WRONG = [
    # Before systemd 254, `-n` takes the last lines of all, of which `-g` shows those that match
    # (systemd/systemd#25147): none, with the releases of Ubuntu 22.04 and RHEL 8.
    r"journalctl[^`]*? -g (?:'[^']*'|[^ `]+) -n",
    # It stops the process, and waits for a thread in state D; tried with py-spy 0.4.3.
    r"py-spy (?:dump|top) (?!--nonblocking)",
    # GNU timeout waits until the process is gone, which a driver that hangs keeps in state D.
    r"timeout \d+ nvidia-smi",
]
"""Commands that do not do what a step uses them for."""
DISPLAYS = (
    "MEMORY UTILIZATION ECC TEMPERATURE POWER CLOCK COMPUTE PIDS PERFORMANCE SUPPORTED_CLOCKS "
    "PAGE_RETIREMENT ACCOUNTING ENCODER_STATS SUPPORTED_GPU_TARGET_TEMP VOLTAGE FBC_STATS "
    "ROW_REMAPPER RESET_STATUS GSP_FIRMWARE_VERSION"
)
"""What `nvidia-smi -q -d` takes, by its own help (driver 535)."""


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


@pytest.mark.parametrize("slug", all_symptoms())
def test_commands_that_work(slug: str) -> None:
    """A command that fails or hangs in the very case for which it is named is named nowhere."""
    text = text_of(slug)
    assert [found for wrong in WRONG for found in re.findall(wrong, text)] == []
    displays = re.findall(r"nvidia-smi -q -d ([A-Z_,]+)", text)
    assert {one for found in displays for one in found.split(",")} <= set(DISPLAYS.split())
    # The driver resets no GPU that is open anywhere, and the agent has all of them open.
    assert "--gpu-reset" not in text or re.search("release-gpus|`nccl-all-reduce-failed`", text)


@pytest.mark.parametrize("slug", all_symptoms())
def test_what_ends_no_training(slug: str) -> None:
    """To drain is explained where it is said, as Kubernetes' own drain ends what runs."""
    text = text_of(slug)
    now, _, _ = text.partition("## Confirm")
    said = bool(re.search(r"\b[Dd]rain", now.partition("## Meaning")[0]))
    assert said == ("`kubectl cordon NODE`, as `kubectl drain` would end" in text)
