"""Configurations, as the installed DeepSpeed reads them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dshealthd.doctor.job import config
from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.sources import deepspeed_config, inspection
from dshealthd.doctor.job.sources.inspection import Inspection
from dshealthd.doctor.job.sources.source import Source
from dshealthd.findings.finding import State
from tests.command_line import shell_script
from tests.doctor.job.asking import (
    CRITICAL,
    NAME,
    OK,
    UNKNOWN,
    WARNING,
    asked,
    faults,
    inspect_many,
    outcomes,
    results,
    runs_as_nobody,
    texts,
    with_config,
)
from tests.doctor.looks import apply
from tests.processes import runs
from tests.waiting import until

# Its import here would take seconds, and in each worker of the tests.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("takes DeepSpeed", allow_module_level=True)

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
    "comments": changed(_comment="x", comment="x", **{"//": "x", "# stage": "x", "$schema": "x"}),
    "comment inside": changed(zero_optimization={"stage": 2, "_comment": "why"}),
    "short of it": changed(train_micro_batch_size=4),
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
    "max_grad_norm": changed(
        optimizer={"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}
    ),
    "tag": changed(checkpoint={"tag_validation": "Strict"}),
    "nan": changed(fp16={"enabled": True, "loss_scale": "NaN"}, bf16={"enabled": False}),
    "types": changed(zero_optimization=["stage", 3]),
    "nowhere": changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
}
HJSON = {
    "hjson": "# a comment\n{\n  train_batch_size: 8 // another\n  zero_optimization: {stage: 2}\n}",
    "hjson twice": "{\n  bf16: {enabled: true}\n  bf16: {enabled: false}\n}",
    "broken": '{"train_batch_size": 8,, "bf16"}',
    "hjson deep": "[" * 60 + "\n#",
}
"""Texts that are no JSON; DeepSpeed takes the first."""
RANKS = 8
MENDED = {
    "british": ("config-keys", changed()),
    "deprecated": (
        "config-keys",
        changed(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ),
    "removed": ("config-conflicts", changed()),
    "both halves": ("config-conflicts", changed(fp16={"enabled": False})),
    "nowhere": (
        "config-conflicts",
        changed(
            zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
        ),
    ),
}
"""The check that finds a case, and the configuration with the line changed that its remedy
shows."""


@pytest.fixture(scope="module")
def inspected() -> dict[str, Inspection]:
    """Return what the installed DeepSpeed says of each case, faulty and mended."""
    documents = {**CASES, **{f"{case}, mended": MENDED[case][1] for case in MENDED}}
    requests = [{"document": document, "ranks": RANKS} for document in documents.values()]
    requests += [{"text": text, "ranks": RANKS} for text in HJSON.values()]
    return dict(zip((*documents, *HJSON), inspect_many(requests), strict=True))


@pytest.mark.parametrize("case", ["healthy", "minimal", "comments"])
@pytest.mark.parametrize("check", ["config-file", "config-keys", "config-conflicts", "batch-sizes"])
def test_no_false_alarm(inspected: dict[str, Inspection], case: str, check: str) -> None:
    """A configuration that DeepSpeed takes and reads is ok by every check."""
    job = with_config(CASES[case], inspected[case], ranks=RANKS)
    assert outcomes(check, job) == [OK]


@pytest.mark.parametrize(
    ("case", "check", "outcome", "words"),
    [
        ("british", "config-keys", CRITICAL, "mean 'zero_optimization'"),
        ("own key", "config-keys", WARNING, "nothing reads 'my_own_settings'"),
        ("guide", "config-keys", WARNING, "nothing reads 'communication_backend'"),
        ("inner", "config-keys", CRITICAL, "mean 'reduce_bucket_size'"),
        ("short of it", "config-keys", WARNING, "mean 'train_micro_batch_size_per_gpu'"),
        ("aio", "config-keys", WARNING, "nothing reads 'aio.thread_count'"),
        ("deprecated", "config-keys", WARNING, "use 'offload_optimizer'"),
        ("removed", "config-conflicts", CRITICAL, "DeepSpeed refuses amp: "),
        ("removed inner", "config-conflicts", CRITICAL, "MiCS"),
        ("both halves", "config-conflicts", CRITICAL, "fp16 and bf16 are both enabled"),
        ("both halves", "config-keys", CRITICAL, "mean 'zero_optimization'"),
        ("offload_param", "config-conflicts", WARNING,
         "offload_param needs ZeRO stage 3 or higher"),
        ("ratio", "config-conflicts", CRITICAL, "Partial offloading"),
        ("stage", "config-conflicts", CRITICAL, "zero_optimization.stage"),
        ("max_grad_norm", "config-conflicts", WARNING, "gradient_clipping at top level"),
        ("tag", "config-conflicts", CRITICAL, "tag_validation is Strict"),
        ("nan", "config-conflicts", CRITICAL, "finite"),
        ("types", "config-conflicts", CRITICAL, "refuses"),
        ("nowhere", "config-conflicts", CRITICAL,
         "offload_param goes to NVMe but has no nvme_path"),
    ],
)  # fmt: skip
def test_fault(
    inspected: dict[str, Inspection], case: str, check: str, outcome: State, words: str
) -> None:
    """A fault is found by DeepSpeed's own reading, named with its key, and has a remedy."""
    job = with_config(CASES[case], inspected[case], ranks=RANKS, gpus=Source("NVML", 8))
    found = results(check, job)
    (result,) = (result for result in found if words in result.text)
    assert result.outcome is outcome
    assert NAME in result.text or result.component
    assert result.remedy


@pytest.mark.parametrize(
    ("alike", "length", "suggested", "certain"),
    [(22, 25, True, True), (21, 25, True, False), (15, 20, True, False), (14, 20, False, False)],
)
def test_how_alike_a_misspelt_key_is(
    alike: int, length: int, *, suggested: bool, certain: bool
) -> None:
    """From three quarters of its letters on a key is suggested, from 88 % on it is certain."""
    known, key = "a" * length, "a" * alike + "b" * (length - alike)
    assert config._nearest(key, [known]) == (known if suggested else "", certain)


def test_refused_comment(inspected: dict[str, Inspection]) -> None:
    """A comment in a block that DeepSpeed validates is refused; no key is suggested for it."""
    (found,) = results(
        "config-keys", with_config(CASES["comment inside"], inspected["comment inside"])
    )[:1]
    assert found.outcome is CRITICAL
    assert "did you mean" not in found.text
    assert found.remedy.startswith("grep")


@pytest.mark.parametrize("case", MENDED)
def test_mended_key(
    inspected: dict[str, Inspection], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy shows the line of the fault; the check is ok once that line is changed."""
    check, mended = MENDED[case]
    (tmp_path / NAME).write_text(json.dumps(CASES[case], indent=2))
    monkeypatch.chdir(tmp_path)
    for one in results(check, with_config(CASES[case], inspected[case], ranks=RANKS)):
        apply(one)  # grep fails where it shows nothing
    found = results(check, with_config(mended, inspected[f"{case}, mended"], ranks=RANKS))
    assert [one.outcome for one in found] == [OK], texts(found)


def test_mended_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that stands twice is shown, and passes once it stands once."""
    monkeypatch.chdir(tmp_path)
    text, right = '{"bf16": {},\n"bf16": {}}', '{"bf16": {}}'
    (tmp_path / NAME).write_text(text)
    (found,) = results("config-file", JobContext(config=Source(NAME, deepspeed_config.parse(text))))
    assert found.outcome is CRITICAL
    apply(found)
    job = JobContext(config=Source(NAME, deepspeed_config.parse(right)))
    assert outcomes("config-file", job) == [OK]
    many = ", ".join(f'"k{number}": 1, "k{number}": 2' for number in range(21))
    assert len(deepspeed_config.parse(f"{{{many}}}")["duplicates"]) == 20


@pytest.mark.parametrize(
    ("batch", "ranks", "outcome", "words"),
    [
        ((64, 4, 2), 8, OK, "fit the number of ranks"),
        ((64, 4, 2), 16, CRITICAL, "gradient_accumulation_steps 1"),
        ((64, 4, 2), 4, CRITICAL, "gradient_accumulation_steps 4"),
        ((64, 4, 2), 3, CRITICAL, "possible fixes: train_batch_size 24"),
        ((64, 4, None), 8, OK, "fit the number of ranks"),
        ((64, 4, None), 3, CRITICAL, "train_batch_size 60"),
        ((70, 4, None), 3, CRITICAL, "train_batch_size 72"),
        ((100, None, None), 8, CRITICAL, "train_batch_size 96"),
        ((None, 4, 2), 8, OK, "fit the number of ranks"),
        ((64, 4, 2), None, UNKNOWN,
         "is for 8 data-parallel ranks, but the job's number of ranks is unknown"),
        ((65, 4, 2), None, CRITICAL, "fits no number of ranks"),
        ((None, None, 2), 8, CRITICAL, "neither train_batch_size nor"),
        (("auto", "auto", "auto"), 8, OK, "fit the number of ranks"),
        ((64.0, 4, 2), 8, CRITICAL, "'64.0', not a whole number"),
        ((True, 4, 2), 8, CRITICAL, "not a whole number"),
        ((-64, 4, 2), 8, CRITICAL, "not a whole number"),
        (("64", 4, 2), 8, CRITICAL, "not a whole number"),
        ((64, 0, 2), 8, CRITICAL, "train_micro_batch_size_per_gpu is '0'"),
    ],
)  # fmt: skip
def test_batch(
    batch: tuple[object, object, object], ranks: int | None, outcome: State, words: str
) -> None:
    """What does not add up is critical, with numbers that would; it takes no DeepSpeed."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document = {key: value for key, value in zip(keys, batch, strict=True) if value is not None}
    (result,) = results("batch-sizes", with_config(document, ranks=ranks))
    assert result.outcome is outcome, result.text
    assert words in result.text


def test_model_parallel() -> None:
    """Ranks that share a copy of the model count once."""
    document = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    good = with_config(document, ranks=16, model_parallel=2)
    assert outcomes("batch-sizes", good) == [OK]
    bad = with_config(document, ranks=16, model_parallel=3)
    assert "cannot be split into groups of 3" in texts(results("batch-sizes", bad))


def test_batch_offers() -> None:
    """Each number that the finding offers makes the others fit."""
    document = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    for more, ranks in (({}, 3), ({"gradient_accumulation_steps": 4}, 8)):
        faulty = {**document, **more}
        (result,) = results("batch-sizes", with_config(faulty, ranks=ranks))
        assert result.outcome is CRITICAL
        offers = re.findall(r"(\w+) (\d+)", result.text.partition("possible fixes: ")[2])
        assert offers
        for key, value in offers:
            job = with_config({**faulty, key: int(value)}, ranks=ranks)
            assert outcomes("batch-sizes", job) == [OK], (key, value)


def hjson_job(inspected: dict[str, Inspection], case: str) -> JobContext:
    """Return a job with a configuration that is no JSON."""
    parsed = deepspeed_config.parse(HJSON[case])
    assert parsed["document"] is None
    return JobContext(
        config=Source(NAME, parsed), inspected=Source("python", inspected[case]), ranks=RANKS
    )


def test_hjson(inspected: dict[str, Inspection]) -> None:
    """Hjson with comments is what DeepSpeed takes too: read by its own parser."""
    job = hjson_job(inspected, "hjson")
    for check in ("config-file", "config-keys", "config-conflicts", "batch-sizes"):
        assert outcomes(check, job) == [OK]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hjson twice", "Duplicate keys in DeepSpeed config: ['bf16']"),
        ("broken", "is neither JSON nor Hjson"),
        ("hjson deep", "is neither JSON nor Hjson"),
    ],
)
def test_neither(inspected: dict[str, Inspection], case: str, words: str) -> None:
    """What DeepSpeed's parser refuses is critical, with its words."""
    (result,) = results("config-file", hjson_job(inspected, case))
    assert result.outcome is CRITICAL
    assert words in result.text
    for check in ("config-keys", "config-conflicts", "batch-sizes"):
        assert outcomes(check, hjson_job(inspected, case)) == [UNKNOWN]


def test_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that hangs at its import is killed with what it started, and named."""
    monkeypatch.setattr("dshealthd.doctor.job.sources.inspection.DEADLINE", 4.0)
    python, pids = tmp_path / "python", tmp_path / "pids"
    shell_script(python, f"sleep 600 &\necho $$ $! > {pids}\nwait")
    file = tmp_path / NAME
    file.write_text('{"train_batch_size": 8}')
    job = asked("--deepspeed-config", str(file), "--python", str(python))
    (result,) = results("config-keys", job)
    assert result.outcome is UNKNOWN
    assert "no answer within 4 s" in result.text
    until(lambda: not any(runs(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (4 << 20, f"exited with status 0 without an answer: {'0' * 2048}"),
        ((4 << 20) + 1, "answered with more than 4194304 bytes"),
    ],
)
def test_answer_without_end(tmp_path: Path, size: int, words: str) -> None:
    """Of what an interpreter says, so much is read, and of its errors the end of the last line."""
    says = f"cat > /dev/null\nprintf %03000d 0 >&2\nhead -c {size} /dev/zero"
    python, file = shell_script(tmp_path / "python", says), tmp_path / NAME
    file.write_text("{}")
    job = asked("--deepspeed-config", str(file), "--python", str(python))
    assert job.why_not_inspected == f"{python} {words}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_interpreter_of_a_user(public_path: Path) -> None:
    """Root runs an interpreter that others can reach as its environment's owner, or as nobody, and
    as itself only where none but root gets to: it cannot know who may write what it imports.
    """
    python = shell_script(
        public_path / "environment/bin/python",
        "cat > /dev/null\necho I am $(id -u) $(id -G) >&2\nexit 3",
    )
    file = public_path / NAME
    file.write_text("{}")
    arguments = ("--deepspeed-config", str(file), "--python", str(python))
    why = asked(*arguments).why_not_inspected
    assert "exited with status 3 without an answer: I am 65534 65534" in why
    os.chown(python.parent.parent, 1001, 1001)
    assert "I am 1001 " in asked(*arguments).why_not_inspected
    os.chown(python.parent.parent, 0, 0)
    public_path.chmod(0o700)
    assert "I am 0 0" in asked(*arguments).why_not_inspected
    public_path.chmod(0o755)
    python.chmod(0o700)
    why = asked(*arguments).why_not_inspected
    assert "cannot be started as nobody: Permission denied" in why
    assert "run the doctor as the user of the job" in why


def test_no_file_of_ours_shadows_a_module(tmp_path: Path) -> None:
    """In the user's interpreter no module is found in the folder of the program that we run there.

    Its files have names that libraries have too: shell, source, layout.
    """
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib.util, pathlib, sys\n"
        f"files = pathlib.Path({str(inspection.PROGRAM.parent)!r}).glob('*.py')\n"
        "found = {file.stem: importlib.util.find_spec(file.stem) for file in files}\n"
        "__version__ = [name for name, spec in found.items() if spec is not None]\n"
        "assert len(found) > 5 and 'shell' in found\n"
    )
    for program in (inspection.PROGRAM, tmp_path / "link" / inspection.PROGRAM.name):
        if not program.exists():
            program.parent.symlink_to(inspection.PROGRAM.parent)
        done = subprocess.run(
            [sys.executable, str(program)],
            input=json.dumps({"document": None}),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert json.loads(done.stdout)["version"] == []


@pytest.mark.timeout(600)
def test_file_through_an_interpreter(tmp_path: Path) -> None:
    """From the file to the finding through an interpreter, and ok once the key is right."""
    if os.geteuid() == 0 and not runs_as_nobody(sys.executable):
        pytest.skip(f"{sys.executable} is closed to nobody, as whom root runs it")
    file = tmp_path / NAME
    file.write_text('{"train_batch_size": 8, "gradient_cliping": 1.0}')
    arguments = ("--deepspeed-config", str(file), "--python", sys.executable, "--ranks", "8")
    (result,) = results("config-keys", asked(*arguments))
    assert result.outcome is CRITICAL
    assert "0.19" in result.source
    file.write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    assert outcomes("config-keys", asked(*arguments)) == [OK]


def test_without_deepspeed(tmp_path: Path) -> None:
    """An interpreter without DeepSpeed leaves keys unknown and says why; never ok."""
    file = tmp_path / NAME
    file.write_text('{"train_batch_size": 8}')
    for python, why in (
        ("/usr/bin/python3", "DeepSpeed cannot be imported"),
        ("/usr/bin/true", "without an answer"),
        (str(tmp_path / "none"), "is not a program"),
    ):
        job = asked("--deepspeed-config", str(file), "--python", python)
        for check in ("config-keys", "config-conflicts"):
            (result,) = results(check, job)
            assert result.outcome is UNKNOWN
            assert why in result.text
    assert "--python" in texts(results("config-keys", asked("--deepspeed-config", str(file))))


def test_keys_are_those_of_the_installed_deepspeed(inspected: dict[str, Inspection]) -> None:
    """The keys that are known without an interpreter are those that it reports."""
    answer = inspected["healthy"]
    ours = deepspeed_config.keys()
    read = {key for one in inspected.values() for key in one.looked_up.get("", ())}
    assert sorted(ours[deepspeed_config.TOP]) == sorted(read)
    for block, model in (
        ("zero_optimization", "DeepSpeedZeroConfig"),
        ("fp16", "DeepSpeedFP16Config"),
        ("bf16", "DeepSpeedBF16Config"),
        ("offload_param", "DeepSpeedZeroOffloadParamConfig"),
        ("offload_optimizer", "DeepSpeedZeroOffloadOptimizerConfig"),
    ):
        assert sorted(ours[block]) == answer.models[model]


STAGE_2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ({}, "config-keys", ""),
        ({}, "config-conflicts", ""),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "config-keys", "overlap_comm"),
        ({"zero_optimisation": STAGE_2}, "config-keys", "did you mean 'zero_optimization'?"),
        ({"overlap_comm": True}, "config-keys", "it belongs in zero_optimization"),
        ({"zero_optimization": {"stage": 4}}, "config-conflicts",
         "stage is 4, but ZeRO has stages 0 to 3"),
        ({"zero_optimization": {**STAGE_2, "offload_param": {"device": "cpu"}}}, "config-conflicts",
         "offload_param needs ZeRO stage 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
         "config-conflicts", "offload_optimizer needs ZeRO stage 1"),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
                }
            },
            "config-conflicts",
            "offload_optimizer needs ZeRO stage 3",
        ),
        ({"scheduler": {"params": {"warmup_num_steps": 11, "total_num_steps": 10}}},
         "config-conflicts", "warmup_num_steps 11 is above total_num_steps"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 64}}, "config-conflicts",
         "so DeepSpeed refuses train_batch_size beside it"),
        ({"elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}},
         "config-conflicts", ""),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "config-conflicts",
         "WarmupDecayLR has no total_num_steps"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
         "config-conflicts", ""),
        ({"pipeline": {"stages": 2}}, "config-conflicts", "ZeRO stage 2 shards gradients"),
        ({"pipeline": {"stages": 1}}, "config-conflicts", ""),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
         "config-conflicts", "offload_param needs ZeRO stage 3 or higher"),
        ({"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}},
         "config-conflicts", ""),
        ({"optimizer": {"type": "SGD"}}, "config-conflicts", "no SGD for the CPU"),
        ({"optimizer": {"type": "auto"}}, "config-conflicts", ""),
    ],
)  # fmt: skip
def test_rules_without_an_interpreter(change: dict[str, Any], check: str, words: str) -> None:
    """What the file itself contradicts is found without DeepSpeed, and nothing in a right one."""
    right = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "my_own_key": 1,
        "zero_optimization": STAGE_2,
        "scheduler": {"params": {"warmup_num_steps": 10, "total_num_steps": 10}},
    }
    *found, rest = results(check, with_config({**right, **change}))
    assert rest.outcome is UNKNOWN
    assert [words in one.text for one in found] == [True] * bool(words), found
    assert {one.outcome for one in found} <= {WARNING, CRITICAL}


def test_truth_value_that_is_a_string() -> None:
    """A truth value in quotes is named with its path: Python takes "false" for true."""
    for value in ("false", False):
        job = with_config({"train_batch_size": 8, "bf16": {"enabled": value}})
        said = "bf16.enabled is the string 'false'" in texts(faults("config-conflicts", job))
        assert said == (value == "false")


_TRAINER = "--per_device_train_batch_size 4"


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ("--per_device_train_batch_size 8 --bf16", CRITICAL),
        (f"{_TRAINER} --bf16", OK),
        (f"{_TRAINER} --bf16 True", OK),
        (f"{_TRAINER} --bf16 $HALF", OK),
        (_TRAINER, CRITICAL),
        (f"{_TRAINER} --bf16 False", CRITICAL),
        (f"{_TRAINER} --bf16 --fp16", CRITICAL),
        (f"{_TRAINER} --pure_bf16", OK),
        (f"{_TRAINER} --bf16 --learning_rate 1e-5", OK),
        (f"{_TRAINER} --bf16 --learning_rate 2e-5", CRITICAL),
        (f"{_TRAINER} --bf16 --learning_rate $LR", OK),
        ("--bf16 --learning_rate 2e-5", OK),  # no other program compares
    ],
)
def test_arguments_of_the_trainer(tmp_path: Path, arguments: str, outcome: State) -> None:
    """Hugging Face's Trainer refuses other values than the configuration's."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},'
        ' "fp16": {"enabled": false}, "optimizer": {"params": {"lr": 0.00001}}}'
    )
    job = asked(launch=f"deepspeed --num_gpus=1 x.py {arguments} --deepspeed {file}")
    assert outcomes("batch-sizes", job) == [outcome]
