"""The rules as PrometheusRules: `python -m deploy.kubernetes.rules [--check]`.

Each file of `deploy/prometheus` becomes one resource, word for word.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generate import files

SOURCE = Path(__file__).parents[1] / "prometheus"
TARGET = Path(__file__).parent / "components" / "prometheus-operator" / "rules.yaml"
FILES = ("thresholds.yml", "recording.yml", "alerts.yml")
HEADER = "# Made from deploy/prometheus/*.yml by `./dev generate`; do not edit.\n"


def manifest(name: str, rules: str) -> str:
    """Return the PrometheusRule with the text of a rule file as its spec."""
    lines = (f"  {line}".rstrip() for line in rules.splitlines())
    return "\n".join(
        (
            "apiVersion: monitoring.coreos.com/v1",
            "kind: PrometheusRule",
            "metadata:",
            f"  name: dshealthd-{name}",
            "  namespace: dshealthd",
            "  labels:",
            "    app.kubernetes.io/name: dshealthd",
            "spec:",
            *lines,
            "",
        )
    )


def documents() -> dict[Path, str]:
    """Return the text of the generated file: all PrometheusRules."""
    texts = (
        manifest(name.removesuffix(".yml"), (SOURCE / name).read_text(encoding="utf-8"))
        for name in FILES
    )
    return {TARGET: HEADER + "---\n".join(texts)}


if __name__ == "__main__":
    sys.exit(files.main("deploy.kubernetes.rules", documents))
