"""Advice that runbooks once got wrong, or did not answer: it stays as it was put right.

Each was tried against the release that the runbook names; a sentence that is written anew must
still say so.
"""

from __future__ import annotations

import re

import pytest

from dshealthd.findings.catalogue import finding_of
from dshealthd.findings.finding import Sign
from dshealthd.findings.series import DEFAULTS
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
    # Without nvidia_peermem, rmmod's status is not 0, though it has removed the rest.
    ("nvml-broken", r"rmmod [^`;]*; modprobe -a nvidia"),
    ("nvml-broken", r"rm /run/dshealthd/release-gpus"),
    ("cuda-oom", r"`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which every release reads"),
    ("nccl-timeout", r"TORCH_NCCL_TRACE_BUFFER_SIZE=2000 .* in every release"),
    ("agent-gone", r"still make steps .* a power cycle ends them"),
    ("bad-link", r"when no job uses NVLink across nodes, `sudo systemctl restart nvidia-imex"),
    ("clock-unsynchronized", r"`chrony` on Debian and Ubuntu"),
    ("slow-communication", r"`dshealthd probe --size 1G`.* Smaller sizes stay far below"),
    ("slow-communication", r"on Arm `iommu\.passthrough=1`"),
    ("shared-memory", r"half of the memory is the default"),
    ("nccl-timeout", r"Smaller ZeRO buckets against timeouts: .* take longer, not shorter"),
]
NEVER = [
    ("nccl-environment", r"=\^docker"),
    # Behind a rule that rejects the rest, it would have no effect.
    ("rendezvous-unreachable", r"nft add rule"),
    ("bad-link", r"rnr_nak_retry_err[^.;]*(?:lost|exceeded its|ran out on)"),
    ("disk-full", r"First step[^\n]*\bdu -"),
]


STEPS = [
    ("DshealthdFabricPortDown", "polling", "both ends of the cable"),
    ("DshealthdFabricPortDown", "link up", "`sminfo` on a"),
    ("DshealthdFabricPortDown", "gone", "`lspci | grep"),
    ("DshealthdNetworkPortDegraded", "has receive errors", "reseat or replace the cable"),
    ("DshealthdNetworkPortDegraded", "discards packets, as with congestion", "`perfquery -x`"),
    ("DshealthdNetworkPortDegraded", "has lost a connection to a peer that", "`dshealthd jobs`"),
    ("DshealthdNvmlBroken", "a call did not return", "sleep 20; ps "),
    ("DshealthdNvmlBroken", "version mismatch", "What runs there goes on"),
    ("DshealthdNvmlBroken", "not loaded", "`dkms status`"),
    ("DshealthdGpusUnwatched", "released by an operator", "/run/dshealthd/release-gpus"),
    ("DshealthdGpusUnwatched", "permission denied", "DeviceAllow"),
    ("DshealthdGpusUnwatched", "internal", "`journalctl -u dshealthd -n 50`"),
    ("DshealthdMaintenance", "operator: new cable", "`dshealthd maintenance off`"),
    ("DshealthdMaintenance", "slurm: new cable", "`scontrol update nodename=a state=resume`"),
    ("DshealthdGpuRepairDue", "needs a reset to replace a bad memory row", "; rm /run/dshealthd"),
    ("DshealthdGpuRepairDue", "its driver has logged Xid 121: errors", "Xid catalog"),
    ("DshealthdGpuRepairDue", "its infoROM is corrupted", "cut its power"),
    ("DshealthdGpuRepairDue", "Xid 31 recurs there in different jobs", "`dcgmi diag -r 3`"),
    ("DshealthdFilesystemFull", "is filling up", "`df -h /ckpt; df -i /ckpt`"),
    ("DshealthdFilesystemFull", "has less free than the last ones took", "checkpoints of run-1"),
    ("DshealthdSharedMemoryLow", "full", "`fuser -v /dev/shm/NAME`"),
    ("DshealthdSharedMemoryLow", "too small", "`mount -o remount,size=50% /dev/shm`"),
]
"""First steps that are right for one reason of a finding, and wrong for another."""
WRONG = [
    # Before systemd 254, `-n` takes the last lines of all, of which `-g` shows those that match
    # (systemd/systemd#25147): none, with the releases of Ubuntu 22.04 and RHEL 8.
    r"journalctl[^`]*? -g (?:'[^']*'|[^ `]+) -n",
    # It stops the process, and waits for a thread in state D; tried with py-spy 0.4.3.
    r"py-spy (?:dump|top) (?!--nonblocking)",
    # GNU timeout waits until the process is gone, which a driver that hangs keeps in state D.
    r"timeout \d+ nvidia-smi",
    # "required flag --alertmanager.url not provided"; only Debian's build has a default.
    r"`amtool (?!--alertmanager\.url)",
    # Made by the package, and so not on the nodes of Kubernetes.
    r"(?<!mkdir -p /run/dshealthd; )touch /run/dshealthd/",
    # There, `comm` is a thread's own name: the threads of a process are not counted together.
    r"ps -eLo",
    # The name of the host, which these columns contain, may be as long as they are.
    r"journalctl -k --since[^`]*\| cut",
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


@pytest.mark.parametrize(("alert", "reason", "step"), STEPS)
def test_the_step_is_for_the_reason(alert: str, reason: str, step: str) -> None:
    """What an alert knows decides its first step, and that step alone is told."""
    sign = Sign(alert, reason, part="/ckpt", job="run-1")
    told = finding_of(sign, "a", DEFAULTS).first_step
    assert step in told
    of_others = {other for name, _, other in STEPS if name == alert} - {step}
    assert [other for other in of_others if other in told] == []


@pytest.mark.parametrize("slug", all_symptoms())
def test_commands_that_work(slug: str) -> None:
    """A command that fails or hangs in the very case for which it is named is named nowhere."""
    text = text_of(slug)
    assert [found for wrong in WRONG for found in re.findall(wrong, text)] == []
    displays = re.findall(r"nvidia-smi -q -d ([A-Z_,]+)", text)
    assert {one for found in displays for one in found.split(",")} <= set(DISPLAYS.split())
    # The driver resets no GPU that is open anywhere, and the agent has all of them open.
    assert "--gpu-reset" not in text or re.search("release-gpus|`nccl-all-reduce-failed`", text)
    # What is run on a node with the package is run in a pod in Kubernetes.
    if "## What to do now" in text and re.search("bin/py-spy|`dshealthd (jobs|evidence)", text):
        assert "the agent is a pod" in text


@pytest.mark.parametrize("slug", all_symptoms())
def test_what_ends_no_training(slug: str) -> None:
    """To drain is explained where it is said, as Kubernetes' own drain ends what runs."""
    text = text_of(slug)
    now, _, _ = text.partition("## Confirm")
    said = bool(re.search(r"\b[Dd]rain", now.partition("## Meaning")[0]))
    assert said == ("`kubectl cordon NODE`, as `kubectl drain` would end" in text)
