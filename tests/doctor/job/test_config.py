"""Configurations, as the installed DeepSpeed reads them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.doctor.check import Outcome
from tests.doctor.job.asking import NAME, asked, inspect_many, results, texts, with_config

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.doctor.job_sources.inspection import Inspection

pytest.importorskip("deepspeed")
OK, WARNING, CRITICAL, UNKNOWN = (
    Outcome.OK,
    Outcome.WARNING,
    Outcome.CRITICAL,
    Outcome.UNKNOWN,
)
HEALTHY: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 100,
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 1e9,
        "overlap_comm": True,
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "use_gds": False},
    "tensorboard": {"enabled": False, "output_path": "/tmp/tb"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
    "comms_logger": {"enabled": False},
    "checkpoint": {"tag_validation": "Fail", "load_universal": False},
    "pipeline": {"stages": "auto"},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "data_types": {"grad_accum_dtype": "fp32"},
}
"""What jobs have in common, of the blocks that DeepSpeed documents."""


def changed(*without: str, **blocks: Any) -> dict[str, Any]:
    """Return the healthy configuration without some keys and with others."""
    kept = {key: value for key, value in HEALTHY.items() if key not in without}
    return {**kept, **blocks}


CASES: dict[str, dict[str, Any]] = {
    "healthy": HEALTHY,
    "minimal": {"train_micro_batch_size_per_gpu": 1},
    "british": changed("zero_optimization", zero_optimisation={"stage": 3}),
    "own key": changed(my_own_settings={"seed": 3}),
    "guide": changed(communication_backend={"name": "nccl", "timeout": 600}),
    "inner": changed(zero_optimization={"stage": 2, "reduce_bucket_sise": 3, "nonsense": 1}),
    "aio": changed(aio={"thread_count": 4}),
    "deprecated": changed(zero_optimization={"stage": 2, "cpu_offload": True}),
    "removed": changed(amp={"enabled": True}, elasticity={"enabled": True}),
    "removed inner": changed(zero_optimization={"stage": 3, "mics_shard_size": 8}),
    "both halves": changed(fp16={"enabled": True}, zero_optimisation={}),
    "offload_param": changed(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}}),
    "ratio": changed(
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    ),
    "stage": changed(zero_optimization={"stage": 4}),
    "optimizer": changed(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}),
    "untested": changed(
        "zero_allow_untested_optimizer", optimizer={"type": "SGD", "params": {"lr": 1e-3}}
    ),
    "max_grad_norm": changed(
        optimizer={"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}
    ),
    "tag": changed(checkpoint={"tag_validation": "Strict"}),
    "nan": changed(fp16={"enabled": True, "loss_scale": "NaN"}, bf16={"enabled": False}),
    "types": changed(zero_optimization=["stage", 3]),
    "batch": changed(train_batch_size=60),
}
RANKS = 8


@pytest.fixture(scope="module")
def inspected() -> dict[str, Inspection]:
    """Return what the installed DeepSpeed says of each case."""
    requests = [{"document": document, "ranks": RANKS} for document in CASES.values()]
    return dict(zip(CASES, inspect_many(requests), strict=True))


@pytest.mark.parametrize("case", ["healthy", "minimal"])
@pytest.mark.parametrize(
    "check", ["config-file", "config-keys", "config-deprecated", "config-conflicts", "batch-sizes"]
)
def test_no_false_alarm(inspected: dict[str, Inspection], case: str, check: str) -> None:
    """A configuration that DeepSpeed takes and reads is ok by every check."""
    job = with_config(CASES[case], inspected[case], ranks=RANKS)
    found = results(check, job)
    assert [result.outcome for result in found] == [OK], texts(found)


@pytest.mark.parametrize(
    ("case", "check", "outcome", "words"),
    [
        ("british", "config-keys", CRITICAL, "mean 'zero_optimization'"),
        ("own key", "config-keys", WARNING, "'my_own_settings' is read by nothing"),
        ("guide", "config-keys", WARNING, "init_distributed(timeout=...)"),
        ("inner", "config-keys", CRITICAL, "mean 'reduce_bucket_size'"),
        ("aio", "config-keys", WARNING, "'aio.thread_count' is read by nothing"),
        ("deprecated", "config-deprecated", WARNING, "use 'offload_optimizer'"),
        ("removed", "config-deprecated", CRITICAL, "'amp' ends the start"),
        ("removed inner", "config-deprecated", CRITICAL, "MiCS"),
        ("both halves", "config-conflicts", CRITICAL, "fp16 and bf16 are both enabled"),
        ("both halves", "config-keys", CRITICAL, "mean 'zero_optimization'"),
        ("offload_param", "config-conflicts", WARNING, "offload_param is for ZeRO stage 3"),
        ("ratio", "config-conflicts", CRITICAL, "Partial offloading"),
        ("stage", "config-conflicts", CRITICAL, "zero_optimization.stage"),
        ("optimizer", "config-conflicts", CRITICAL, "has the optimizer OneBitAdam"),
        ("untested", "config-conflicts", CRITICAL, "not tested with SGD"),
        ("max_grad_norm", "config-conflicts", CRITICAL, "gradient_clipping at top level"),
        ("tag", "config-conflicts", CRITICAL, "STRICT"),
        ("nan", "config-conflicts", CRITICAL, "finite"),
        ("types", "config-conflicts", CRITICAL, "refuses"),
    ],
)
def test_fault(
    inspected: dict[str, Inspection], case: str, check: str, outcome: Outcome, words: str
) -> None:
    """A fault is found by DeepSpeed's own reading, named with its key, and has a remedy."""
    found = results(check, with_config(CASES[case], inspected[case], ranks=RANKS))
    (result,) = (result for result in found if words in result.text)
    assert result.outcome is outcome
    assert NAME in result.text
    assert result.remedy


def test_batch_agrees_with_deepspeed(inspected: dict[str, Inspection]) -> None:
    """DeepSpeed refuses the batch that the check calls wrong, and takes the other one."""
    (result,) = results("batch-sizes", with_config(CASES["batch"], inspected["batch"], ranks=RANKS))
    assert result.outcome is CRITICAL
    assert "60 != 4 * 2 * 8" in inspected["batch"].batch
    assert not inspected["healthy"].batch


@pytest.mark.timeout(180)
def test_remedy_heals(tmp_path: Path) -> None:
    """From the file to the finding through an interpreter, and ok once the remedy was pasted."""
    file = tmp_path / NAME
    file.write_text('{"train_batch_size": 8, "gradient_cliping": 1.0}')
    arguments = ("--deepspeed-config", str(file), "--python", sys.executable, "--ranks", "8")
    (result,) = results("config-keys", asked(*arguments))
    assert result.outcome is CRITICAL
    assert "0.19" in result.source
    subprocess.run(result.remedy, shell=True, check=True)
    (result,) = results("config-keys", asked(*arguments))
    assert result.outcome is OK


def test_without_deepspeed(tmp_path: Path) -> None:
    """An interpreter without DeepSpeed leaves keys unknown and says why; never ok."""
    file = tmp_path / NAME
    file.write_text('{"train_batch_size": 8}')
    for python, why in (
        ("/usr/bin/python3", "DeepSpeed cannot be imported"),
        ("/usr/bin/true", "without an answer"),
        (str(tmp_path / "none"), "is no program"),
    ):
        job = asked("--deepspeed-config", str(file), "--python", python)
        for check in ("config-keys", "config-deprecated", "config-conflicts"):
            (result,) = results(check, job)
            assert result.outcome is UNKNOWN
            assert why in result.text
    assert "--python" in texts(results("config-keys", asked("--deepspeed-config", str(file))))
