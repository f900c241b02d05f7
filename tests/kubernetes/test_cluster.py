"""What `./dev test-kubernetes` does with a cluster, against a stand-in for kubectl: there is no
cluster here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KUBECTL = shutil.which("kubectl")
STANDS_IN = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
kustomize*) exec "$REAL" "$@" ;;
"get pods --all-namespaces"*) printf "$OTHER" ;;
"get namespace"*) exit 1 ;;
*"get pods"*) echo "agent-$(grep -c '^apply.*first' "$CALLS") node-1" ;;
apply*) cat >"$CALLS.objects" ;;
*proxy/-/ready) echo "$READY" ;;
*proxy/metrics) echo "dshealthd_collector_up 1" ;;
esac
"""

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")


def cluster(
    tmp_path: Path, ready: str = "ready", other: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return how the script ends and what it has kubectl do."""
    kubectl, calls = tmp_path / "kubectl", tmp_path / "calls"
    kubectl.write_text(STANDS_IN, encoding="utf-8")
    kubectl.chmod(0o755)
    (tmp_path / "sleep").symlink_to("/bin/true")
    environment = {"CALLS": str(calls), "REAL": str(KUBECTL), "READY": ready, "OTHER": other}
    done = subprocess.run(
        ["sh", ROOT / "tests/kubernetes/cluster.sh", "registry:5000/dshealthd:1.2"],
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done, calls.read_text(encoding="utf-8").splitlines()


def test_a_cluster_is_left_as_it_was(tmp_path: Path) -> None:
    """Manifests are this checkout's, with the given image; taint and namespace go at the end."""
    done, calls = cluster(tmp_path)
    assert done.returncode == 0, done.stderr
    objects = (tmp_path / "calls.objects").read_text(encoding="utf-8")
    assert "image: registry:5000/dshealthd:1.2" in objects
    assert 'interval = "45s"' in objects
    assert "path: /var/lib/dshealthd" not in objects
    assert calls[-2:] == [
        "taint node node-1 dshealthd.io/maintenance-",
        "delete namespace dshealthd-test --timeout 120s",
    ]


@pytest.mark.parametrize(
    ("ready", "other", "says"),
    [("starting", "", "does not say ready"), ("ready", "pod/dshealthd-x\\n", "already")],
)
def test_what_fails_is_said_and_removed(tmp_path: Path, ready: str, other: str, says: str) -> None:
    """Agents that are not ready fail the run, and what it made goes; somebody else's stay."""
    done, calls = cluster(tmp_path, ready, other)
    assert done.returncode == 1
    assert says in done.stderr
    assert ("delete namespace" in calls[-1]) == (not other)
