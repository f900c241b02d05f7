"""Manifests of Kubernetes: pods of any kind of job, with one mistake each, and mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dshealthd.doctor.job.context import JobContext
from dshealthd.findings.finding import State
from tests.doctor.job.asking import CRITICAL, OK, UNKNOWN, WARNING, asked, results

POD = """
spec:
  containers:
  - name: sidecar
  - name: train
    command: [bash, -c]
    image: train
    args:
    - torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$(MASTER_ADDR):1 x
    env: [{name: MASTER_ADDR, value: llm-workers-0-0.llm}, {name: POD, valueFrom: {}}]
    resources: {limits: {nvidia.com/gpu: "8"}}
    volumeMounts: [{name: shm, mountPath: /dev/shm}]
  volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""


def inside(pod: str, by: int) -> str:
    """Return the pod's lines, indented."""
    return pod.strip().replace("\n", f"\n{' ' * by}")


def jobset(pod: str) -> str:
    """Return a JobSet of two such pods, behind a document of another kind."""
    return f"""
kind: ConfigMap
---
kind: JobSet
metadata: {{name: llm}}
spec:
  replicatedJobs:
  - name: workers
    replicas: 1
    template:
      spec:
        parallelism: 2
        template:
          {inside(pod, 10)}
"""


def pytorchjob(pod: str) -> str:
    """Return a PyTorchJob of a master and a worker."""
    pod = pod.replace("llm-workers-0-0.llm", "llm-master-0")
    replicas = "".join(
        f"""
    {name}:
      replicas: 1
      template:
        {inside(pod, 8)}"""
        for name in ("Master", "Worker")
    )
    return f"kind: PyTorchJob\nmetadata: {{name: llm}}\nspec:\n  pytorchReplicaSpecs:{replicas}\n"


def mpijob(ranks: int) -> str:
    """Return an MPIJob of two workers with eight slots."""
    worker = POD.replace("torchrun", "sleep").replace("[bash, -c]", "[sleep]")
    return f"""
kind: MPIJob
metadata: {{name: bench}}
spec:
  slotsPerWorker: 8
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers: [{{name: l, command: [/usr/bin/mpirun, -np, "{ranks}", all_reduce_perf]}}]
    Worker:
      replicas: 2
      template:
        {inside(worker, 8)}
"""


def manifest(tmp_path: Path, text: str) -> JobContext:
    """Return a job of this manifest."""
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return asked(str(file))


FAULTS = (
    ('gpu: "8"', "gpu: 4", CRITICAL, "8 processes (torchrun) for 4 GPUs"),
    ('gpu: "8"', "gpu: 16", WARNING, "8 processes (torchrun) for 16 GPUs: idle"),
    ("mountPath: /dev/shm", "mountPath: /x", WARNING, "/dev/shm has 64 MB"),
    ("--nnodes=2", "--nnodes=3", CRITICAL, "waits for 3 nodes, but 2 pods have GPUs"),
    ("$(MASTER_ADDR):1", "localhost:1", CRITICAL, "each pod's own loopback"),
    ("llm-workers-0-0.llm", "old-workers-0-0.old", CRITICAL, "is no pod of this manifest"),
    ("llm-workers-0-0.llm", "llm-workers-0-0.old", CRITICAL, "are in the subdomain llm"),
    (
        "llm-workers-0-0.",
        "llm-workers-0-2.",
        CRITICAL,
        "which has llm-workers-0-0, llm-workers",
    ),
    ("=c10d", "=c10d --rdzv-id=$RANK", CRITICAL, "it uses RANK, which only a PyTorchJob sets"),
    ("=c10d", "=c10d --rdzv-id=$JOB_COMPLETION_INDEX", OK, "2 pods"),
    ("- torchrun", "- RANK=1; torchrun --rdzv-id=$RANK", OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", rdma/ib: 1', OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", rdma/hca: 1', WARNING, "RDMA devices but not the capability IPC_L"),
    ("[bash, -c]", '["bash -c"]', CRITICAL, "no program is named 'bash -c'"),
    ("MASTER_ADDR):1", "POD):1", OK, "2 pods with 16 GPUs"),  # only the cluster knows
    ("$(MASTER_ADDR):1", "$HOSTNAME:1", CRITICAL, "$HOSTNAME:1 is another on each node"),
    ("rdzv-backend=c10d", "node-rank=1", CRITICAL, "every node gets --node-rank 1"),
    ("medium: Memory", "sizeLimit: 64Mi", WARNING, "/dev/shm has 64 MB"),
    ("medium: Memory", "sizeLimit: 65Mi", OK, "2 pods"),
    ("name: shm, emptyDir", "name: x, emptyDir", CRITICAL, "the volume shm of /dev/shm is not"),
    ('{limits: {nvidia.com/gpu: "8"}}', "{requests: {nvidia.com/gpu: 8}}", CRITICAL, "none in"),
    (
        "spec:\n",
        "spec:\n  hostNetwork: true\n",
        CRITICAL,
        "only with dnsPolicy: ClusterFirstWithHostNet",
    ),
    (
        "spec:\n",
        "spec:\n  hostNetwork: true\n  dnsPolicy: ClusterFirstWithHostNet\n",
        OK,
        "2 pods",
    ),
    (
        "    resources",
        "    livenessProbe: {failureThreshold: 59}\n    resources",
        WARNING,
        "does not answer for 590 s",
    ),
    ("    resources", "    livenessProbe: {failureThreshold: 60}\n    resources", OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", memory: 1023Mi', CRITICAL, "1023 MiB of memory on a node"),
    ('gpu: "8"', 'gpu: "8", memory: 64', CRITICAL, "one of Kubernetes in bytes"),
    ('gpu: "8"', 'gpu: "8", memory: 2Gi', OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", memory: 0.5Ti', OK, "2 pods"),
    ("valueFrom: {}", "value: 29500", CRITICAL, "env[POD]: it is refused: value is 29500, not"),
    ("valueFrom: {}", 'value: "29500"', OK, "2 pods"),
    ("[bash, -c]", "[nice, -n, 7, bash, -c]", CRITICAL, "with 7, which is no string"),
    ("=c10d", "=c10d --rdzv-id=$SLURM_JOB_ID", CRITICAL, "which only Slurm sets"),
    ('gpu: "8"', 'gpu: "0.5"', CRITICAL, "0.5 nvidia.com/gpu in limits is no whole number"),
    ("emptyDir: {medium: Memory", "persistentVolumeClaim: {claimName: x", OK, "2 pods"),
)


@pytest.mark.parametrize(("old", "new", "outcome", "words"), FAULTS)
def test_faults(tmp_path: Path, old: str, new: str, outcome: State, words: str) -> None:
    """A manifest with one mistake has one result that names it, and none once it is mended."""
    assert old in POD
    assert [one.outcome for one in results("manifest", manifest(tmp_path, jobset(POD)))] == [OK]
    (found,) = results("manifest", manifest(tmp_path, jobset(POD.replace(old, new))))
    assert (found.outcome, words in found.text) == (outcome, True), found
    assert outcome is OK or "JobSet llm" in found.text


def test_kinds(tmp_path: Path) -> None:
    """PyTorchJob is read like a JobSet; without a launcher its operator starts one process."""
    (found,) = results("manifest", manifest(tmp_path, pytorchjob(POD)))
    assert (found.outcome, "2 pods with 16 GPUs" in found.text) == (OK, True)
    alone = POD.replace("    command: [bash, -c]\n    image: train\n", "").replace(
        "- torchrun", "- --lr 1; torchrun"
    )
    (found,) = results("manifest", manifest(tmp_path, pytorchjob(alone)))
    assert "PyTorchJob llm, Master and Worker: 1 process (PyTorchJob) for 8 GPUs" in found.text
    told = pytorchjob(alone).replace("spec:\n", 'spec:\n  nprocPerNode: "8"\n', 1)
    assert [one.outcome for one in results("manifest", manifest(tmp_path, told))] == [OK]


def test_manifest_in_json(tmp_path: Path) -> None:
    """A manifest may be JSON, as a configuration of DeepSpeed is."""
    file = tmp_path / "job.json"
    for gpus, outcome in (("8", OK), ("4", CRITICAL)):
        pod = POD.replace('gpu: "8"', f'gpu: "{gpus}"')
        file.write_text(json.dumps(yaml.safe_load(pytorchjob(pod))))
        (found,) = results("manifest", asked(str(file)))
        assert found.outcome is outcome
    file.write_text('{"train_batch_size": 8}')
    assert asked(str(file)).manifest is None


TRAIN_JOB = """
kind: TrainJob
spec:
  trainer:
    numNodes: 4
    numProcPerNode: {processes}
    command: [torchrun, train.py]
    resourcesPerNode: {{limits: {{nvidia.com/gpu: 8}}}}
"""


GROUPS = """
kind: LeaderWorkerSet
spec:
  replicas: 3
  leaderWorkerTemplate:
    size: 2
    workerTemplate:
      """
JOB = """
kind: Job
metadata: {name: j}
spec:
  completions: 2
  parallelism: 4
  template:
    """


def test_other_kinds(tmp_path: Path) -> None:
    """A TrainJob has a trainer, groups have a size, a Job restarts no finished pod, Ray has shared
    memory, and a gang is not larger than the job.
    """
    (found,) = results("manifest", manifest(tmp_path, TRAIN_JOB.format(processes=8)))
    assert (found.outcome, "4 pods with 32 GPUs" in found.text) == (OK, True)
    (found,) = results("manifest", manifest(tmp_path, TRAIN_JOB.format(processes=9)))
    assert "9 processes (torchrun) for 8 GPUs" in found.text
    pod = inside(POD.replace("MASTER_ADDR):1", "LEADER):1"), 6)
    groups = GROUPS + pod
    (found,) = results("manifest", manifest(tmp_path, groups))
    assert (found.outcome, "2 pods with 16 GPUs" in found.text) == (OK, True), found
    job = JOB + inside(POD, 4).replace("MASTER_ADDR):1", "LEADER):1")
    (found,) = results("manifest", manifest(tmp_path, job))
    assert "restartPolicy of a Job must be Never or OnFailure" in found.text
    right = job.replace("    spec:\n", "    spec:\n      restartPolicy: Never\n")
    (found,) = results("manifest", manifest(tmp_path, right))
    assert (found.outcome, "2 pods" in found.text) == (OK, True), found
    gang = right.replace("kind:", "apiVersion: batch.volcano.sh/v1alpha1\nkind:", 1)
    gang = gang.replace("spec:", "spec:\n  minAvailable: 3", 1)
    (found,) = results("manifest", manifest(tmp_path, gang))
    assert "starts only once 3 pods are placed (minAvailable), but has 2" in found.text
    ray = right.replace("kind: Job", "kind: RayJob").replace("mountPath: /dev/shm", "mountPath: /x")
    assert [one.outcome for one in results("manifest", manifest(tmp_path, ray))] == [OK]


def test_words_that_are_not_read_as_meant(tmp_path: Path) -> None:
    """Without a shell nothing expands a variable, and a shell runs one word alone."""
    alone = "[torchrun, --nnodes=2, --nproc-per-node=8, --rdzv-backend=c10d, '--rdzv-id={}', x]"
    for command, words in (
        (alone.format("$POD"), "no shell expands $POD in command or args: write $(POD)"),
        (alone.format("$(POD)"), ""),
        (alone.format("$OF_A_TEMPLATE"), ""),
        ("[bash, -c, torchrun x, x]", "bash -c runs 'torchrun x' alone"),
        ("[bash, -c, 'torchrun x', --, x]", "bash -c runs 'torchrun x' alone"),
        ("[bash, -lc, --]", ""),
    ):
        text = jobset(POD.replace("[bash, -c]", command).replace("    args:", "    more:"))
        found = [one.text for one in results("manifest", manifest(tmp_path, text))]
        assert (
            [text for text in found if words in text]
            if words
            else not any("no shell" in one or "alone" in one for one in found)
        )


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("readOnly: true", 1),
        ("readOnly: false", 0),
        ("subPath: x", 0),
        ("readOnly: true}, {name: shm, mountPath: /data/run", 0),
    ],
)
def test_output_on_a_read_only_mount(tmp_path: Path, mount: str, says: int) -> None:
    """A training cannot write where its container has a mount that is read-only."""
    pod = POD.replace(":1 x", ":1 x --output_dir /data/run --data /data/in").replace(
        "/dev/shm}", f"/dev/shm}}, {{name: shm, mountPath: /data, {mount}}}"
    )
    found = results("manifest", manifest(tmp_path, jobset(pod)))
    assert ["/data/run cannot be written" in one.text for one in found] == [bool(says)]


@pytest.mark.parametrize(
    ("path", "volume", "says"),
    [
        ("/ckpt/run", "persistentVolumeClaim: {claimName: x}", True),
        ("/data/run", "persistentVolumeClaim: {claimName: x}", False),
        ("ckpt", "persistentVolumeClaim: {claimName: x}", False),
        ("/ckpt/run", "emptyDir: {}", False),
    ],
)
def test_checkpoints_beside_the_volume(
    tmp_path: Path, path: str, volume: str, *, says: bool
) -> None:
    """What is saved beside a volume that lasts is lost with the container."""
    pod = POD.replace(":1 x", f":1 x --save_dir {path} --log /a").replace(
        "/dev/shm}", "/dev/shm}, {name: data, mountPath: /data}"
    )
    pod = pod.replace("volumes: [", f"volumes: [{{name: data, {volume}}}, ")
    found = results("manifest", manifest(tmp_path, jobset(pod)))
    assert [f"--save_dir {path} is lost" in one.text for one in found] == [says]


def test_index_that_several_jobs_share(tmp_path: Path) -> None:
    """An index begins with 0 in each job of a JobSet, so it is no rank among several jobs."""
    text = jobset(POD.replace("rdzv-backend=c10d", "node-rank=$JOB_COMPLETION_INDEX"))
    assert [one.outcome for one in results("manifest", manifest(tmp_path, text))] == [OK]
    text = text.replace("replicas: 1", "replicas: 2").replace("parallelism: 2", "parallelism: 1")
    (found,) = results("manifest", manifest(tmp_path, text))
    assert "JOB_COMPLETION_INDEX is the same in several of its groups" in found.text


SERVICE = "kind: Service\nmetadata: {name: llm}\n"
CLAIM = """kind: PersistentVolumeClaim
metadata: {name: x}
spec: {accessModes: [ReadWriteOnce]}
"""
CLAIMED = "volumes: [{name: c, persistentVolumeClaim: {claimName: x}}, "
LIMITED = POD.replace('gpu: "8"', 'gpu: "8", memory: 8Gi').replace(
    "Memory}", "Memory, sizeLimit: 9Gi}"
)


PODS = (
    (
        jobset(POD).replace("  replicated", "  network: {enableDNSHostnames: false}\n  replicated"),
        "false",
        "true",
        "pods of this JobSet have no subdomain",
    ),
    (jobset(LIMITED), "sizeLimit: 9Gi", "sizeLimit: 8Gi", "which count as memory of the"),
    (
        pytorchjob(POD.replace("image: train", "image: a/train:2.1")).replace(
            ":2.1", ":v2.0-gpu", 1
        ),
        ":v2.0-gpu",
        ":2.1-gpu",
        "different versions of a/train: 2.0 of Master, 2.1 of Worker",
    ),
    (
        JOB.replace("spec:", "spec:\n  completionMode: NonIndexed", 1)
        + inside(POD.replace("$(MASTER_ADDR):1", "$A --node-rank=$JOB_COMPLETION_INDEX"), 4)
        .replace("spec:", "spec:\n      restartPolicy: Never"),
        "NonIndexed",
        "Indexed",
        "it uses JOB_COMPLETION_INDEX, which only completionMode: Indexed sets",
    ),
    (
        "kind: Namespace\nmetadata: {name: m, labels: {istio-injection: enabled}}\n---"
        + jobset(POD).replace("name: llm}", "name: llm, namespace: m}"),
        "enabled",
        "disabled",
        "Istio puts its sidecar into it",
    ),
    (
        "kind: Namespace\nmetadata: {name: m, annotations: {linkerd.io/inject: enabled}}\n---"
        + jobset(POD).replace("name: llm}", "name: llm, namespace: m}"),
        "name: m, a",
        "name: other, a",
        "Linkerd puts its sidecar into it",
    ),
    (
        f"{SERVICE}spec: {{clusterIP: None, publishNotReadyAddresses: false}}\n---"
        + jobset(POD.replace("    resources", "    readinessProbe: {x: y}\n    resources")),
        "publishNotReadyAddresses: false",
        "publishNotReadyAddresses: true",
        "does not resolve until its pod is ready (readinessProbe)",
    ),
    (
        f"{SERVICE}spec: {{clusterIP: 192.0.2.1}}\n---{jobset(POD)}",
        "192.0.2.1",
        "None",
        "the Service llm is not headless",
    ),
    (
        f"{SERVICE}spec: {{clusterIP: None, selector: {{app: llm}}}}\n---{jobset(POD)}",
        "selector: {app: llm}",
        "selector: {jobset.sigs.k8s.io/jobset-name: llm}",
        "the Service llm selects app=llm, which these pods are not",
    ),
    (
        f"{CLAIM}---{jobset(POD.replace('volumes: [', CLAIMED))}",
        "ReadWriteOnce",
        "ReadWriteMany",
        "the claim x is ReadWriteOnce, so only pods of one node can mount it",
    ),
    (
        JOB.replace("name: j", "name: j, labels: {}")
        + "metadata: {labels: {kueue.x-k8s.io/queue-name: q}}\n"
        "    spec: {restartPolicy: Never, containers: [{}]}",
        "labels: {}",
        "labels: {kueue.x-k8s.io/queue-name: q}",
        "Kueue reads kueue.x-k8s.io/queue-name of the Job itself",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "words"), PODS)
def test_pods_that_do_not_start_or_last(
    tmp_path: Path, text: str, old: str, new: str, words: str
) -> None:
    """What keeps pods from starting or lasting is found, and passes once it is mended."""
    (found,) = results("manifest", manifest(tmp_path, text))
    assert words in found.text
    assert old in text
    assert [
        one.outcome for one in results("manifest", manifest(tmp_path, text.replace(old, new)))
    ] == [OK]


def test_devices_of_the_network(tmp_path: Path) -> None:
    """Pods of one job have the same network, by whatever name its vendor gives a device."""
    for device, name in (("rdma/ib", "rdma/ib"), ("vpc.amazonaws.com/efa", "amazonaws")):
        asks = pytorchjob(POD.replace('gpu: "8"', f'gpu: "8", {device}: 1'))
        assert [one.outcome for one in results("manifest", manifest(tmp_path, asks))] == [OK]
        (found,) = results(
            "manifest", manifest(tmp_path, asks.replace(f", {device}: 1", ", cpu: 9", 1))
        )
        assert (found.outcome, name in found.text) == (WARNING, True)
        assert "PyTorchJob llm, Master: pods beside it have" in found.text


@pytest.mark.parametrize(("processes", "outcome"), [("8", CRITICAL), ("1", OK)])
def test_world_that_counts_processes(tmp_path: Path, processes: str, outcome: State) -> None:
    """WORLD_SIZE counts processes once a pod has several, so it is not a number of nodes."""
    pod = POD.replace("--nnodes=2 --nproc-per-node=8", "--nnodes=$WORLD_SIZE")
    text = pytorchjob(pod.replace('gpu: "8"', f'gpu: "{processes}"'))
    text = text.replace("spec:\n", f'spec:\n  nprocPerNode: "{processes}"\n', 1)
    assert [one.outcome for one in results("manifest", manifest(tmp_path, text))] == [outcome]


def test_marks_that_are_no_text(tmp_path: Path) -> None:
    """Labels and annotations are text."""
    for value, outcome in (("false", CRITICAL), ('"false"', OK)):
        text = jobset(POD).replace("name: llm}", f"name: llm, annotations: {{a/b: {value}}}}}")
        assert [one.outcome for one in results("manifest", manifest(tmp_path, text))] == [outcome]


KUBEFLOW = "apiVersion: kubeflow.org/v1\n" + pytorchjob(
    POD.replace("name: train", "name: pytorch")
    .replace("MASTER_ADDR):1", "MASTER):1")
    .replace("spec:", "spec:\n  hostNetwork: true\n  dnsPolicy: ClusterFirstWithHostNet")
)


@pytest.mark.parametrize(
    ("old", "new", "count", "words"),
    [
        ("", "", 0, ""),
        ("name: pytorch\n", "name: trainer\n", 1, "no container is named 'pytorch'"),
        ("name: sidecar", "name: x", 0, ""),
        (
            "  dnsPolicy: ClusterFirstWithHostNet",
            "  dnsPolicy: ClusterFirst",
            1,
            "Worker: the Serv",
        ),
    ],
)
def test_what_an_operator_requires(
    tmp_path: Path, old: str, new: str, count: int, words: str
) -> None:
    """Pods of Kubeflow's operator have its container, and resolve the name of the master."""
    assert old in KUBEFLOW
    found = results("manifest", manifest(tmp_path, KUBEFLOW.replace(old, new) if old else KUBEFLOW))
    assert [words in one.text for one in found if one.outcome is CRITICAL] == [True] * count
    other = KUBEFLOW.replace("name: pytorch\n", "name: trainer\n")
    elsewhere = other.replace("kubeflow.org/v1", "training.kubedl.io/v1alpha1")
    assert [one.outcome for one in results("manifest", manifest(tmp_path, elsewhere))] == [OK]
    literal = KUBEFLOW.replace("$(MASTER):1", "192.0.2.1:1").replace("FirstWithHostNet", "First")
    assert [one.outcome for one in results("manifest", manifest(tmp_path, literal))] == [OK]


def test_volumes_of_claims(tmp_path: Path) -> None:
    """A volume that a controller makes from a template of claims is declared; no other word is."""
    text = jobset(POD.replace("{name: shm, emptyDir", "{name: x, emptyDir"))
    claims = "  volumeClaimPolicies: [{templates: [{metadata: {name: shm}}]}]\n  replicatedJobs"
    declared = text.replace("  replicatedJobs", claims)
    shared = "64 MB"  # a claim is no memory
    assert all(
        shared in one.text or one.outcome is OK
        for one in results("manifest", manifest(tmp_path, declared))
    )
    (found,) = results(
        "manifest", manifest(tmp_path, text.replace("kind: JobSet", "kind: JobSet\nvolumeClaim: x"))
    )
    assert "the volume shm of /dev/shm is not declared" in found.text


def test_variables_of_pods(tmp_path: Path) -> None:
    """Variables of NCCL in a pod are judged like those of a script."""
    pod = POD.replace("env: [", "env: [{name: NCCL_SOCKET_IFNAME, value: lo}, ")
    (found,) = results("nccl-variables", manifest(tmp_path, jobset(pod)))
    assert found.outcome is CRITICAL
    assert "only the loopback interface" in found.text
    (found,) = results("nccl-variables", manifest(tmp_path, jobset(pod.replace("lo}", "^lo}"))))
    assert found.outcome is OK


@pytest.mark.parametrize(("ranks", "outcome"), [(16, OK), (17, CRITICAL)])
def test_slots_of_an_mpijob(tmp_path: Path, ranks: int, outcome: State) -> None:
    """Mpirun starts no more processes than its workers have slots."""
    (found,) = results("manifest", manifest(tmp_path, mpijob(ranks)))
    assert found.outcome is outcome, found
    launcher = "spec:\n  runLauncherAsWorker: true\n"
    text = mpijob(ranks).replace("spec:\n", launcher, 1)
    assert launcher in text
    (found,) = results("manifest", manifest(tmp_path, text))
    assert found.outcome is OK, found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("kind: ConfigMap", "has no template of pods"),
        ("", "no template"),
        ("[" * 500, "has no fields of a Kubernetes manifest"),
        ("kind: Job\nspec: &s\n  template: {spec: *s}", "has no fields of a Kubernetes manifest"),
        ("kind: Pod\nspec: [containers: [a]]", "has no template of pods"),
    ],
)
def test_no_manifest(tmp_path: Path, text: str, words: str) -> None:
    """What is no manifest is unknown, with the reason."""
    (found,) = results("manifest", manifest(tmp_path, text))
    assert (found.outcome, words in found.text) == (UNKNOWN, True), found.text
