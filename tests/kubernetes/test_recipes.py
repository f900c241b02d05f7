"""The recipes of the README: what they say must fit what this project ships, and their scripts
run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.http.impostors import nobody
from tests.kubernetes.test_node_problem_detector import answering
from tests.symptoms.promtool import asking, promtool

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
README = (KUBERNETES / "README.md").read_text(encoding="utf-8")


def recipe(word: str) -> Any:
    """Return the YAML of the recipe that has this word."""
    (found,) = (
        block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if word in block
    )
    return yaml.safe_load(found)


def test_nvsentinel_looks_for_the_condition_that_the_plugin_sets() -> None:
    """Type and reason are those of the monitor that is shipped; unknown is no reason."""
    monitor = json.loads((KUBERNETES / "node-problem-detector/dshealthd.json").read_text("utf-8"))
    (rule,) = monitor["rules"]
    (policy,) = recipe("predicate")
    compared = dict(re.findall(r'c\.(\w+) == "(\w+)"', policy["predicate"]["expression"]))
    assert compared == {"type": rule["condition"], "status": "True", "reason": rule["reason"]}


@pytest.mark.parametrize(("answer", "status"), [
    (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nfit\n", 0),
    (b"HTTP/1.1 503 x\r\nServer: x\r\n\r\nunfit: gpu_lost (GPU 3)\n", 1),
    (b"HTTP/1.1 503 x\r\n\r\nunknown: gpu: timeout\n", 0),
    (b"HTTP/1.1 401 x\r\n\r\nUnauthorized\n", 0),
    (b"", 0),
    (None, 0),
])  # fmt: skip
def test_the_prolog_for_slinky(answer: bytes | None, status: int) -> None:
    """Only a node that is unfit fails the prolog, which drains it."""
    (script,) = recipe("prologScripts")["prologScripts"].values()

    def run(port: int) -> int:
        text = script.replace("/10061", f"/{port}").replace("logger -t dshealthd", "echo")
        return subprocess.run(
            ["bash", "-c", text], check=False, capture_output=True, timeout=120
        ).returncode

    with answering(answer) as port:
        assert run(port) == status
    with nobody() as port:
        assert run(port) == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_which_pod_has_the_gpu(tmp_path: Path) -> None:
    """The query joins our GPUs with the pods of DCGM's exporter; a GPU without a pod is left
    out.
    """
    (query,) = re.findall(r"```\n(max by .*?)```", README, re.DOTALL)
    info = 'dshealthd_gpu_info{{instance="a:1", node="a", gpu="{0}", uuid="GPU-{0}"}}'
    taken = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-0", gpu="0", namespace="ml", pod="bert", container="c"}'
    series = {
        **{info.format(gpu): "1x3" for gpu in "01"},
        taken: "41x3",
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1", gpu="1"}': "40x3",
    }
    rows = [{"series": name, "values": values} for name, values in series.items()]
    found = '{node="a", gpu="0", uuid="GPU-0", namespace="ml", pod="bert", container="c"}'
    test = {"evaluation_interval": "1m", "tests": [asking(query, "2m", rows, {found: 1})]}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", file)
