"""The scenes of `tests/symptoms` as their nodes judge them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.findings.service import exported
from tests.findings.player import METRICS, Scene, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Sample

OF_TARGETS = ("job", "instance", "node", "cluster", "leaf")


class PromtoolScene(Scene):
    """The series of one test of promtool."""

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        """Read a scene of a file of that name."""
        super().__init__(
            seconds(str(document["interval"])),
            [(row["series"], str(row["values"])) for row in document["input_series"]],
        )
        self.name = f"{name}: {document.get('name', '')}"

    def samples(self, node: str, at: float) -> Iterator[Sample]:
        """Yield what the agent of a node has at a time.

        What other agents say of suspects is among it, as if this one had found it too.
        """
        yield from super().samples(node, at)
        for other in self.nodes():
            if other != node:
                yield from (
                    sample
                    for sample in super().samples(other, at)
                    if sample.metric.name == "dshealthd_suspect"
                )


def finding_series(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the series that the judges of a promtool test's nodes export, in its notation.

    Not those that the test has itself.
    """
    scene = PromtoolScene("", document)
    told = {name for name, _, _ in scene.series}
    entries = (*document.get("alert_rule_test", ()), *document.get("promql_expr_test", ()))
    until = max(seconds(str(entry["eval_time"])) for entry in entries)
    targets = {
        labels["node"]: {key: labels[key] for key in OF_TARGETS if key in labels}
        for _, labels, _ in scene.series
        if labels.get("node")
    }
    for node, target in targets.items():
        history: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for step, (_, findings) in enumerate(scene.play(node, until)):
            for sample in (*exported(findings), *scene.derived):
                if sample.metric.name in told:
                    continue
                row = history.setdefault((sample.metric.name, sample.labels), ["_"] * step)
                row.append(f"{sample.value!r}")
            for row in history.values():
                if len(row) == step:
                    row.append("stale")
        for (name, values), row in history.items():
            labels = dict(zip(METRICS[name].dimensions, values, strict=True)) | target
            text = ", ".join(f'{key}="{_escaped(value)}"' for key, value in labels.items() if value)
            yield {"series": f"{name}{{{text}}}", "values": " ".join(row)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
