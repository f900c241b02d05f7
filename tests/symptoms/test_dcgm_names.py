"""The rules that give GPUs' readings the names of NVIDIA's DCGM exporter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from generate import reference
from tests.symptoms.promtool import promtool

FILE = Path(__file__).parents[2] / "deploy/prometheus/dcgm.yml"
SELECTED = re.compile(r"(dshealthd_\w+)(?:\{([^}]*)\})?")
READINGS = {
    'dshealthd_gpu_temperature_celsius{sensor="core"}': ("DCGM_FI_DEV_GPU_TEMP", 65, 65),
    "dshealthd_gpu_power_watts": ("DCGM_FI_DEV_POWER_USAGE", 700, 700),
    "dshealthd_gpu_energy_joules_total": ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 12, 12000),
    'dshealthd_gpu_clock_hertz{domain="sm"}': ("DCGM_FI_DEV_SM_CLOCK", 1980000000, 1980),
    "dshealthd_gpu_utilization_ratio": ("DCGM_FI_DEV_GPU_UTIL", 0.5, 50),
    "dshealthd_gpu_memory_used_bytes": ("DCGM_FI_DEV_FB_USED", 2097152, 2),
    'dshealthd_gpu_ecc_errors_total{type="uncorrected", counter="volatile"}': (
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        3,
        3,
    ),
}
"""What an agent exports: the name that DCGM has for it, its value, and the value in DCGM's unit."""
ID = 'instance="a:10061", node="node-1", job="x", gpu="3", uuid="GPU-1"'
LABELS = (
    '{instance="a:10061", node="node-1", gpu="3", uuid="GPU-1", UUID="GPU-1", device="nvidia3",'
    ' Hostname="node-1", hostname="node-1", name="H100", modelName="H100"}'
)


def expressions() -> dict[str, str]:
    """Return the rules' expressions by what they record."""
    groups = yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("name", expressions())
def test_reads_what_agents_export(name: str) -> None:
    """Each metric in a rule is one of the agent's, with the labels that the rule selects by."""
    known = reference.all_metrics()
    found = SELECTED.findall(expressions()[name].replace("dshealthd:dcgm_labels", ""))
    assert found
    for metric, selector in found:
        assert set(re.findall(r"(\w+)=", selector)) <= set(known[metric].labels)


def test_values_have_dcgms_names_labels_and_units(tmp_path: Path) -> None:
    """A GPU's readings appear under DCGM's names, once each, in its units and with its labels."""
    series = [{"series": f'dshealthd_gpu_info{{{ID}, name="H100", serial="1"}}', "values": "1 1"}]
    asked = []
    for selector, (name, value, wanted) in READINGS.items():
        metric, _, labels = selector.removesuffix("}").partition("{")
        given = ", ".join(filter(None, (ID, labels)))
        series.append({"series": f"{metric}{{{given}}}", "values": f"{value} {value}"})
        asked.append(
            {
                "expr": name,
                "eval_time": "1m",
                "exp_samples": [{"labels": f"{name}{LABELS}", "value": wanted}],
            }
        )
    scene: dict[str, Any] = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "30s",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}],
    }
    path = tmp_path / "scene.yml"
    path.write_text(yaml.safe_dump(scene), encoding="utf-8")
    promtool("check", "rules", "--lint=all", FILE)
    promtool("test", "rules", path)
