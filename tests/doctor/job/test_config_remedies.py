"""Each fault of a configuration, mended as its remedy says: DeepSpeed then takes the file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.core.host import Host
from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.sources import deepspeed_config, remedies
from dshealthd.doctor.job.sources.source import Source
from dshealthd.findings.finding import State
from tests.doctor.job.asking import NAME, inspect_many, outcomes, results, texts, with_config
from tests.doctor.job.test_config import CASES, GIB, HJSON, PARAMETERS, RANKS, SHAPE, changed
from tests.doctor.looks import apply

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.doctor.job.sources.inspection import Inspection

# Its import here would take seconds, and in each worker of the tests.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("takes DeepSpeed", allow_module_level=True)

EDITED = "untested"
"""The case whose remedy edits the file; those of the others show the line to change."""
SGD = changed(
    "zero_allow_untested_optimizer",
    optimizer={"type": "SGD", "params": {"lr": 1e-3}},
    zero_optimization={"stage": 2},  # without offload, which is another fault
)
FAULTY = {**CASES, EDITED: SGD}
MENDED: dict[str, dict[str, Any]] = {
    "deprecated": changed(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "removed": changed(),
    "removed inner": changed(zero_optimization={"stage": 3}),
    "both halves": changed(fp16={"enabled": False}),
    "offload_param": changed(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
    "ratio": changed(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    ),
    "torch's scheduler": changed(scheduler={"type": "WarmupCosineLR", "params": {}}),
    "no scheduler": changed(scheduler={"type": "WarmupLR", "params": {}}),
    "ratio to nvme": changed(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    ),
    "ratio of lion": changed(
        optimizer={"type": "Lion", "params": {"lr": 1e-4}},
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}},
    ),
    "stage": changed(zero_optimization={"stage": 3}),
    "optimizer": changed(optimizer={"type": "Adam", "params": {"lr": 1e-3}}),
    EDITED: {**SGD, "zero_allow_untested_optimizer": True},
    "max_grad_norm": changed(
        optimizer={"type": "Adam", "params": {"lr": 1e-3}}, gradient_clipping=1.0
    ),
    "tag": changed(checkpoint={"tag_validation": "Fail"}),
    "nan": changed(fp16={"enabled": True, "loss_scale": 0}, bf16={"enabled": False}),
    "types": changed(zero_optimization={"stage": 3}),
    "nowhere": changed(
        zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    ),
}
"""Each configuration with the line changed that its remedy shows, or as its remedy edits it."""
MENDED_TEXTS = {
    "hjson twice": HJSON["hjson twice"].replace("  bf16: {enabled: false}\n", ""),
    "broken": '{"train_batch_size": 8, "bf16": {"enabled": true}}',
    "hjson deep": HJSON["hjson"],
}
EDITS = {
    "rename": lambda config: remedies.rename_key(config, "zero_optimisation", "zero_optimization"),
    "number": lambda config: remedies.set_number(config, "train_batch_size", 32),
    "add": lambda config: remedies.add_key(config, "zero_allow_untested_optimizer", "true"),
}
DEPRECATED = ("deprecated", "removed", "removed inner")


def faulty(inspected: dict[str, Inspection], case: str) -> JobContext:
    """Return the job with the faulty configuration."""
    return with_config(FAULTY[case], inspected[case], ranks=RANKS)


def as_text(text: str, answer: Inspection) -> JobContext:
    """Return a job with a configuration of this text."""
    config = Source(NAME, deepspeed_config.parse(text, NAME))
    return JobContext(config=config, inspected=Source("python", answer), ranks=RANKS)


@pytest.fixture(scope="module")
def inspected() -> dict[str, Inspection]:
    """Return what the installed DeepSpeed says of each configuration, faulty and mended."""
    documents = {**FAULTY, **{f"{case}, mended": one for case, one in MENDED.items()}}
    requests = [
        {"document": document, "ranks": RANKS, "estimate": SHAPE} for document in documents.values()
    ]
    written = {**HJSON, **{f"{case}, mended": one for case, one in MENDED_TEXTS.items()}}
    requests += [{"text": text, "ranks": RANKS} for text in written.values()]
    return dict(zip((*documents, *written), inspect_many(requests), strict=True))


@pytest.mark.parametrize("case", MENDED)
def test_mended_key(
    inspected: dict[str, Inspection], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy shows the line of the fault, or edits it; the check is ok once that is changed."""
    check = "config-deprecated" if case in DEPRECATED else "config-conflicts"
    found = results(check, faulty(inspected, case))
    assert {one.outcome for one in found} <= {State.WARNING, State.CRITICAL}, texts(found)
    (tmp_path / NAME).write_text(json.dumps(FAULTY[case], indent=2))
    monkeypatch.chdir(tmp_path)
    for one in found:
        apply(one)  # grep fails where it shows nothing
    if case == EDITED:
        assert json.loads((tmp_path / NAME).read_text()) == MENDED[EDITED]
    job = with_config(MENDED[case], inspected[f"{case}, mended"], ranks=RANKS)
    found = results(check, job)
    assert [one.outcome for one in found] == [State.OK], texts(found)


@pytest.mark.parametrize("case", MENDED_TEXTS)
def test_mended_file(inspected: dict[str, Inspection], case: str) -> None:
    """A file that DeepSpeed cannot read passes once what its parser names is put right."""
    (found,) = results("config-file", as_text(HJSON[case], inspected[case]))
    assert found.outcome is State.CRITICAL
    assert found.remedy
    job = as_text(MENDED_TEXTS[case], inspected[f"{case}, mended"])
    found_then = results("config-file", job)
    assert [one.outcome for one in found_then] == [State.OK], texts(found_then)


def test_mended_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that stands twice and a number that JSON lacks are shown, and pass once changed."""
    monkeypatch.chdir(tmp_path)
    for text, right in (
        ('{"train_batch_size": 8,\n"train_batch_size": 8}', '{"train_batch_size": 8}'),
        ('{"gradient_clipping":\nNaN}', '{"gradient_clipping": 1.0}'),
    ):
        (tmp_path / NAME).write_text(text)
        job = JobContext(config=Source(NAME, deepspeed_config.parse(text, NAME)))
        (found,) = results("config-file", job)
        assert found.outcome is State.CRITICAL
        apply(found)
        job = JobContext(config=Source(NAME, deepspeed_config.parse(right, NAME)))
        assert outcomes("config-file", job) == [State.OK]


@pytest.mark.parametrize(
    ("case", "memory", "then"),
    [
        ("zero 1", 24, "zero 3"),  # a higher stage
        ("zero 3", 16, "healthy"),  # offload_optimizer and offload_param
        ("zero 3", 12, "healthy"),
        ("healthy", 80, "zero 3"),  # what is offloaded exceeds the memory of the host
    ],
)
def test_mended_memory(
    inspected: dict[str, Inspection], case: str, memory: int, then: str, tmp_path: Path
) -> None:
    """States that do not fit do once the stage is higher, or what is offloaded has a place."""

    def found(case: str, host: int) -> set[State]:
        (tmp_path / "meminfo").write_text(f"MemTotal: {host << 20} kB\n")
        job = with_config(
            CASES[case],
            inspected[case],
            ranks=RANKS,
            parameters=PARAMETERS,
            gpu_memory=memory * GIB,
            host=Host(procfs=tmp_path),
        )
        return {one.outcome for one in results("model-memory", job)}

    small, large = 64, 512
    assert found(case, small) & {State.WARNING, State.CRITICAL}
    assert found(then, large) == {State.OK}


@pytest.mark.parametrize(
    ("edit", "text", "after"),
    [
        ("rename", '{"x": "zero_optimisation", "zero_optimisation": {}}', "zero_optimization"),
        ("rename", '{"zero_optimisation": {}, "zero_optimization": {}}', None),
        ("rename", '{"a": {"zero_optimisation": 1}, "zero_optimisation": {}}', None),
        ("rename", '{"a": [{"zero_optimisation": 1}], "zero_optimisation": {}}', None),
        ("rename", "{zero_optimisation: {}}", None),
        ("number", '{"x": "train_batch_size", "train_batch_size" : 64}', 32),
        ("number", '{"a": {"train_batch_size": 8}, "train_batch_size": 64}', None),
        ("number", '{"train_batch_size": 8, "train_batch_size": 64}', None),
        ("number", "# train_batch_size\n{train_batch_size: 64}", None),
        ("add", '{"train_batch_size": 8}', True),
        ("add", '{"zero_allow_untested_optimizer": false}', None),
        ("add", "{}", None),
        ("add", "# {\n{train_batch_size: 8}", None),
    ],
)
def test_edit_changes_one_key_or_nothing(
    edit: str, text: str, after: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remedy edits only where sed hits the key that is meant; a link stays a link."""
    real = tmp_path / "shared.json"
    real.write_text(text)
    (tmp_path / NAME).symlink_to(real)
    monkeypatch.chdir(tmp_path)
    command = EDITS[edit](Source(NAME, deepspeed_config.parse(text, NAME)))
    if after is None:
        assert command.startswith(("grep -nF", "cat -- "))
        return
    subprocess.run(command, shell=True, check=True, timeout=60)
    key = {"rename": "zero_optimization", "number": "train_batch_size"}.get(
        edit, "zero_allow_untested_optimizer"
    )
    assert (tmp_path / NAME).is_symlink()
    made = json.loads(real.read_text())
    before = json.loads(text)
    for gone in ("zero_optimisation", key):
        before.pop(gone, None)
    assert made.pop(key) == ({} if edit == "rename" else after)
    assert made == before
