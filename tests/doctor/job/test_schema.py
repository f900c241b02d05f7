"""Fields of Kubernetes' objects by type, names that controllers make, and variables in order."""

from __future__ import annotations

import pytest

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
    found = manifest.from_json(manifest.parse(text))
    outcome = results("manifest", JobContext(manifest=Source("job.yaml", found)))
    return " ".join(one.text for one in outcome if one.outcome.value != "ok")


FIELDS = (
    ("restartPolicy:", "restartPolcy:", "no field restartPolcy: did you mean restartPolicy?"),
    ("  parallelism: 2", "  hostNetwork: true", "no field hostNetwork here: it is one of PodSp"),
    ("completions: 2", 'completions: "2"', "completions is '2', not a whole number"),
    ("[{name: A, value: b}]", "{A: b}", "env is \"{'A': 'b'}\", not a list"),
    ("value: b", "value: 1", "containers[a].env[A]: it is refused: value is 1, not a string"),
    # scalars are those that kubectl reads, not those of YAML 1.1
    ("value: b", "value: 1e-4", "value is 0.0001, not a string: quote it"),
    ("value: b", "value: y", "value is True, not a string: quote it"),
    ("value: b", "value: off", "value is False, not a string: quote it"),
    ("value: b", "value: 0x1f", "value is 31, not a string: quote it"),
    ("t.py]", "t.py, --lr, 3.]", "command is a list with 3.0, which is no string: quote it"),
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


@pytest.mark.parametrize("value", ["1:30:00", "2026-01-01", "1e", "yep", "0.1.2", "'y'", "~"])
def test_scalars_that_are_strings(value: str) -> None:
    """What kubectl reads as a string is none that has to be quoted."""
    assert not said(JOB.replace("value: b", f"value: {value}"))


PREDICTOR = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: a}
spec:
  predictor:
    minReplicas: 1
    volumeMounts: []
    containers: [{name: a, image: a}]
"""
TRAINJOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: a}
spec:
  activeDeadlineSeconds: 9
  trainer: {resourcesPerNode: {}}
"""


@pytest.mark.parametrize(
    ("group", "is_told"), [("rbac.authorization.k8s.io/v1", False), ("v1", True)]
)
def test_names_of_rights(group: str, *, is_told: bool) -> None:
    """Roles and their bindings may have other names than the rest of the objects."""
    other = f"apiVersion: {group}\nkind: Other\nmetadata: {{name: 'train:Edit'}}\n---"
    assert ("other characters" in said(other + JOB)) == is_told


def test_fields_that_the_table_does_not_have() -> None:
    """A field of an object that the table does not know, or of a newer one, is not refused for
    being one of another object.
    """
    assert not said(PREDICTOR)
    assert "no field minReplics: did you" not in said(PREDICTOR.replace("Replicas", "Replics"))
    assert not said(TRAINJOB)
    assert "numNodes here: it is one of Trainer" in said(
        TRAINJOB.replace("active", "numNodes: 2 #")
    )
    rules = "successPolicy: {rules: [{succeededIndexes: '0'}]}"
    assert not said(JOB.replace("parallelism: 2", rules))
    assert "no field rules" in said(
        JOBSET.replace("  replicatedJobs", f"  {rules}\n  replicatedJobs")
    )


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
