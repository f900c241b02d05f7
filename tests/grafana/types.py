"""The types that Grafana publishes, over the checked-in dashboards.

    python -m tests.grafana.types [VERSION]...

Installs `@grafana/schema` and TypeScript in a temporary directory by npm, which is why it is not
among the tests, and prints each place whose type is wrong. Exit status: 0 none is, 1 one is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.grafana.documents import documents, panels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSIONS = ("12.4.0", "13.2.3")
TYPESCRIPT = "typescript@5"
PANEL = "./node_modules/@grafana/schema/dist/types/raw/composable/{kind}/panelcfg/x/types.gen"
PLANTED = (
    "export const one: Literal<Dashboard> = { schemaVersion: 42, refresh: 5 };",
    f"({{ legend: 5 }} satisfies Literal<import('{PANEL.format(kind='timeseries')}').Options>);",
)
"""Mistakes that are to be found, one a line: in a dashboard, and in the options of a panel."""
KNOWN = {
    "annotations": (
        *("expr", "instant", "legendFormat", "range", "step"),
        *("tagKeys", "textFormat", "titleFormat"),
    ),
    "variables": ("auto", "auto_count", "auto_min", "definition"),
}
"""Keys that the types lack: of the Prometheus data source's queries, and what the SDK writes."""
LITERALS = """
import type { Dashboard } from '@grafana/schema';
type Literal<T> = T extends string ? `${T}` : T extends number ? number
    : T extends (infer One)[] ? Literal<One>[]
    : T extends object ? { [Key in keyof T]?: Literal<T[Key]> } : T;
"""
"""JSON has the values of enumerations, which TypeScript tells from the enumerations themselves."""


def main(versions: Sequence[str]) -> int:
    """Check the dashboards against each version, and that a planted mistake is found."""
    failed = False
    for version in versions or VERSIONS:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            packages = [f"@grafana/schema@{version}", TYPESCRIPT]
            command = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", directory]
            subprocess.run([*command, *packages], check=True, timeout=600)
            lines = [*_lines(place)]
            found = _errors(place, lines)
            caught = len(_errors(place, PLANTED)) == len(PLANTED)
        print(
            f"@grafana/schema {version}: {len(lines)} values, {len(found)} errors", *found, sep="\n"
        )
        if not caught:
            print("a planted mistake is not found: this checks nothing", file=sys.stderr)
        failed |= bool(found) or not caught
    return int(failed)


def _lines(place: Path) -> Iterator[str]:
    """Yield a constant for each dashboard, and for the options of each panel."""
    for number, document in enumerate(documents().values()):
        known = _without_known(document)
        yield f"const dashboard{number}: Literal<Dashboard> = {json.dumps(known)};"
        for panel in panels(known):
            module = PANEL.format(kind=panel["type"])
            file = place / f"{module}.d.ts"
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
            for name, value in (("Options", panel.get("options", {})), ("FieldConfig", custom)):
                if f"interface {name} " in text:
                    kind = f"Literal<import('{module}').{name}>"
                    yield f"(({json.dumps(value)}) satisfies {kind});"


def _without_known(document: Any) -> Any:
    """Return a dashboard without the keys that these types do not have: KNOWN, and `footer` of
    tables, which these versions have for each column.
    """
    made = json.loads(json.dumps(document))
    annotations = made.get("annotations", {}).get("list", ())
    for one in (*annotations, *(annotation.get("target", {}) for annotation in annotations)):
        for key in KNOWN["annotations"]:
            one.pop(key, None)
    for variable in made.get("templating", {}).get("list", ()):
        for key in KNOWN["variables"]:
            variable.pop(key, None)
    for panel in panels(made):
        if panel["type"] == "table":
            panel.get("options", {}).pop("footer", None)
    return made


def _errors(place: Path, lines: Sequence[str]) -> list[str]:
    (place / "dashboards.ts").write_text(LITERALS + "\n".join(lines), encoding="utf-8")
    command = ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--pretty"]
    command += ["false", "--target", "es2022", "--moduleResolution", "bundler"]
    command += ["--module", "esnext", "dashboards.ts"]
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, timeout=600
    )
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
