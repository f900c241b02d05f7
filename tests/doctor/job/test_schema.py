"""Fields of Kubernetes' objects by type, names that controllers make, and variables in order."""

from __future__ import annotations

import pytest
import yaml

from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.sources import manifest
from dshealthd.doctor.job.sources.source import Source
from tests.doctor.job.asking import results

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: a
        image: a
        env: [{name: A, value: b}]
        command: [python, t.py]
"""
JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: NAME}
spec:
  replicatedJobs:
  - name: trainer
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: 11
        parallelism: 11
        template: {spec: {containers: [{name: a, image: a}]}}
"""


def said(text: str) -> str:
    """Return what is wrong with a manifest."""
    found = manifest.from_json({"documents": list(yaml.safe_load_all(text))})
    outcome = results("manifest", JobContext(manifest=Source("job.yaml", found)))
    return " ".join(one.text for one in outcome if one.outcome.value != "ok")


FIELDS = (
    ("restartPolicy:", "restartPolcy:", "no field restartPolcy: did you mean restartPolicy?"),
    ("  parallelism: 2", "  hostNetwork: true", "no field hostNetwork here: it is one of PodSp"),
    ("completions: 2", 'completions: "2"', "completions is '2', not a whole number"),
    ("[{name: A, value: b}]", "{A: b}", "env is \"{'A': 'b'}\", not a list"),
    ("value: b", "value: 1", "containers[a].env[A]: it is refused: value is 1, not a string"),
    ("Policy: Never", "Policy: never", "restartPolicy is never, none of Always, OnFailure, Never"),
    ("Policy: Never", "Policy: Never\n      affinity: []", "affinity is '[]', not a mapping"),
    ("Mode: Indexed", "Mode: indexed", "completionMode is indexed, none of Indexed, NonIndexed"),
    ("[python, t.py]", "python t.py", "command is 'python t.py', not a list"),
    ("{name: train}", "{name: train, labels: {a: 1}}", "labels is a mapping with a 1"),
    ("[{name: A, value: b}]", "[{name: A, value: $(B)}, {name: B, value: c}]",
     "A refers to B, which is defined after it"),
    ("[{name: A, value: b}]", "[{name: B, value: c}, {name: A, value: '${B}'}]",
     "A has ${B} as it stands: Kubernetes expands $(B) alone"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), FIELDS)
def test_fields(old: str, new: str, words: str) -> None:
    """A field that is misspelt, at another place or of another type is told."""
    assert not said(JOB)
    assert old in JOB
    assert words in said(JOB.replace(old, new, 1))


def test_templates_and_unknown_fields() -> None:
    """What a template fills in, and a field that no type has, are none that is judged."""
    assert not said(JOB.replace("completions: 2", 'completions: "{{ nodes }}"'))
    assert not said(JOB.replace("Policy: Never", "Policy: OnFailure"))
    assert not said(JOB.replace("completions: 2", "completions: 2\n  newerThanThisTable: 1"))
    in_order = "[{name: B, value: c}, {name: A, value: $(B)}]"
    assert not said(JOB.replace("[{name: A, value: b}]", in_order))


@pytest.mark.parametrize(("length", "is_told"), [(44, False), (45, True)])
def test_names_of_pods(length: int, *, is_told: bool) -> None:
    """JobSet makes NAME-trainer-0-10-xxxxx, which has 19 characters more, of at most 63."""
    assert ("63 are allowed" in said(JOBSET.replace("NAME", "n" * length))) == is_told


@pytest.mark.parametrize(
    ("kind", "most"),
    [("CronJob", 52), ("StatefulSet", 52), ("RayJob", 47), ("RayCluster", 53)],
)
def test_names_of_objects(kind: str, most: int) -> None:
    """Names from which a controller makes longer ones have a limit of their own."""
    for length in (most, most + 1):
        text = (
            f"kind: {kind}\nmetadata: {{name: {'n' * length}}}\n"
            "spec: {template: {spec: {containers: [{name: a}]}}}"
        )
        assert (f"{most} are allowed" in said(text)) == (length > most)
