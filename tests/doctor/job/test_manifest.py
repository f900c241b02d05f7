"""Manifests of Kubernetes: pods of any kind of job, with one mistake each, and mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dshealthd.doctor.job.context import JobContext
from dshealthd.findings.finding import State
from tests.doctor.job.asking import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    asked,
    outcomes,
    results,
)

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
    ("llm-workers-0-0.", "llm-workers-0-2.", CRITICAL, "which has llm-workers-0-0, llm-workers"),
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
    ("spec:\n", "spec:\n  hostNetwork: true\n", CRITICAL,
     "only with dnsPolicy: ClusterFirstWithHostNet"),
    ("spec:\n", "spec:\n  hostNetwork: true\n  dnsPolicy: ClusterFirstWithHostNet\n", OK, "2 pods"),
    ("    resources", "    livenessProbe: {failureThreshold: 59}\n    resources", WARNING,
     "does not answer for 590 s"),
    ("    resources", "    livenessProbe: {failureThreshold: 60}\n    resources", OK, "2 pods"),
    ("    resources", "    livenessProbe: {periodSeconds: 199}\n    resources", WARNING,
     "does not answer for 597 s"),
    ("    resources", "    livenessProbe: {periodSeconds: 200}\n    resources", OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", memory: 1023Mi', CRITICAL, "1023 MiB of memory on a node"),
    ('gpu: "8"', 'gpu: "8", memory: 64', CRITICAL, "one of Kubernetes in bytes"),
    ('gpu: "8"', 'gpu: "8", memory: 2Gi', OK, "2 pods"),
    ('gpu: "8"', 'gpu: "8", memory: 0.5Ti', OK, "2 pods"),
    ("valueFrom: {}}", "value: $(B)}, {name: B, value: c}", CRITICAL,
     "POD refers to B, which is defined after it"),
    ("valueFrom: {}", "value: '${MASTER_ADDR}'", CRITICAL,
     "POD has ${MASTER_ADDR} as it stands: Kubernetes expands $(MASTER_ADDR) alone"),
    ("valueFrom: {}", "value: $(MASTER_ADDR)", OK, "2 pods"),
    ("=c10d", "=c10d --rdzv-id=$SLURM_JOB_ID", CRITICAL, "which only Slurm sets"),
    ('{limits: {nvidia.com/gpu: "8"}}', '{limits: &gpus {nvidia.com/gpu: "8"}, requests: *gpus}',
     OK, "2 pods"),
    ("emptyDir: {medium: Memory", "persistentVolumeClaim: {claimName: x", OK, "2 pods"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "outcome", "words"), FAULTS)
def test_faults(tmp_path: Path, old: str, new: str, outcome: State, words: str) -> None:
    """A manifest with one mistake has one result that names it, and none once it is mended."""
    assert old in POD
    assert outcomes("manifest", manifest(tmp_path, jobset(POD))) == [OK]
    (found,) = results("manifest", manifest(tmp_path, jobset(POD.replace(old, new))))
    assert (found.outcome, words in found.text) == (outcome, True), found
    assert outcome is OK or "JobSet llm" in found.text


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


SERVICE = "kind: Service\nmetadata: {name: llm}\n"
CLAIM = """kind: PersistentVolumeClaim
metadata: {name: x}
spec: {accessModes: [ReadWriteOnce]}
"""
CLAIMED = "volumes: [{name: c, persistentVolumeClaim: {claimName: x}}, "
LIMITED = POD.replace('gpu: "8"', 'gpu: "8", memory: 8Gi').replace(
    "Memory}", "Memory, sizeLimit: 9Gi}"
)


_NAMESPACE = "kind: Namespace\nmetadata: {name: m, "
_IN_NAMESPACE = f"}}\n---{jobset(POD)}".replace("name: llm}", "name: llm, namespace: m}")
_INDEXED = POD.replace("$(MASTER_ADDR):1", "$A --node-rank=$JOB_COMPLETION_INDEX")
_PROBED = POD.replace("    resources", "    readinessProbe: {x: y}\n    resources")
PODS = (
    (jobset(POD).replace("  replicated", "  network: {enableDNSHostnames: false}\n  replicated"),
     "false", "true", "pods of this JobSet have no subdomain"),
    (jobset(LIMITED), "sizeLimit: 9Gi", "sizeLimit: 8Gi", "which count as memory of the"),
    (JOB.replace("spec:", "spec:\n  completionMode: NonIndexed", 1) + inside(_INDEXED, 4),
     "NonIndexed", "Indexed",
     "it uses JOB_COMPLETION_INDEX, which only completionMode: Indexed sets"),
    (f"{_NAMESPACE}labels: {{istio-injection: enabled}}{_IN_NAMESPACE}", "enabled", "disabled",
     "Istio puts its sidecar into it"),
    (f"{_NAMESPACE}annotations: {{linkerd.io/inject: enabled}}{_IN_NAMESPACE}",
     "name: m, a", "name: other, a", "Linkerd puts its sidecar into it"),
    (f"{SERVICE}spec: {{clusterIP: None, publishNotReadyAddresses: false}}\n---{jobset(_PROBED)}",
     "publishNotReadyAddresses: false", "publishNotReadyAddresses: true",
     "does not resolve until its pod is ready (readinessProbe)"),
    (f"{SERVICE}spec: {{clusterIP: 192.0.2.1}}\n---{jobset(POD)}", "192.0.2.1", "None",
     "the Service llm is not headless"),
    (f"{SERVICE}spec: {{clusterIP: None, selector: {{app: llm}}}}\n---{jobset(POD)}",
     "selector: {app: llm}", "selector: {jobset.sigs.k8s.io/jobset-name: llm}",
     "the Service llm selects app=llm, which these pods are not"),
    (f"{CLAIM}---{jobset(POD.replace('volumes: [', CLAIMED))}", "ReadWriteOnce", "ReadWriteMany",
     "the claim x is ReadWriteOnce, so only pods of one node can mount it"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "words"), PODS)
def test_pods_that_do_not_start_or_last(
    tmp_path: Path, text: str, old: str, new: str, words: str
) -> None:
    """What keeps pods from starting or lasting is found, and passes once it is mended."""
    (found,) = results("manifest", manifest(tmp_path, text))
    assert words in found.text
    assert old in text
    assert outcomes("manifest", manifest(tmp_path, text.replace(old, new))) == [OK]


KUBEFLOW = "apiVersion: kubeflow.org/v1\n" + pytorchjob(
    POD.replace("name: train", "name: pytorch")
    .replace("MASTER_ADDR):1", "MASTER):1")
    .replace("spec:", "spec:\n  hostNetwork: true\n  dnsPolicy: ClusterFirstWithHostNet")
)


def changed(text: str, *pairs: tuple[str, str], count: int = -1) -> str:
    """Return a text with some of it replaced, which must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, count)
    return text


_ALONE = changed(POD, ("[bash, -c]", "[python, t.py]"), ("- torchrun", "- --lr=1 --n"))
_ENTRYPOINT = changed(_ALONE, ("    command: [python, t.py]\n", ""))
_PATCH = (
    "spec: {containers: [{name: pytorch, resources: {limits: {nvidia.com/gpu: 8, rdma/hca: 1}}}]}"
)
_PLAIN = "kind: Pod\nmetadata: {name: a}\n" + POD.replace("MASTER_ADDR):1", "MASTER):1")
_OTHER = changed(pytorchjob(POD), ("name: llm}", "name: b}"), ("llm-master-0", "b-master-0"))
_EVALUATOR = """
  - name: eval
    template: {spec: {template: {spec: {containers: [{name: a, image: a, resources: {limits: {
      nvidia.com/gpu: 1}}}]}}}}
"""
_PROCESSES = 'spec:\n  nprocPerNode: "{}"\n'
_OF_LEADER = POD.replace("MASTER_ADDR):1", "LEADER):1")
_JOB = JOB + inside(_OF_LEADER, 4)
_GANG = changed(
    _JOB,
    ("kind: Job", "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job"),
    ("\nspec:", "\nspec:\n  minAvailable: 3"),
)
_STATEFUL = (
    "kind: StatefulSet\nmetadata: {name: a}\nspec:\n  replicas: 2\n  serviceName: llm\n"
    "  template:\n    " + inside(changed(POD, ("llm-workers-0-0.llm", "a-0.llm")), 4)
)
_WRITES = changed(POD, (":1 x", ":1 x --output_dir /data/run --data /data/in"))
_SAVES = changed(POD, ("/dev/shm}", "/dev/shm}, {name: data, mountPath: /data}"))
_CLAIM = "persistentVolumeClaim: {claimName: x}"
_BY_INDEX = jobset(changed(POD, ("rdzv-backend=c10d", "node-rank=$JOB_COMPLETION_INDEX")))
_WORLD = changed(POD, ("--nnodes=2 --nproc-per-node=8", "--nnodes=$WORLD_SIZE"))
_READ_ONLY = "securityContext: {readOnlyRootFilesystem: true}"
_OF_GROUP = changed(
    _OF_LEADER.replace("{", "{{").replace("}", "}}"),
    ("=2 ", "=$LWS_GROUP_SIZE "),
    ("$(LEADER):1", "$LWS_LEADER_ADDRESS:{}"),
)
_RAY = """
kind: RayCluster
spec:
  workerGroupSpecs:
  - replicas: 2
    rayStartParams: {{num-gpus: "{}"}}
    template:
      spec: {{containers: [{{image: a, resources: {{limits: {{nvidia.com/gpu: 8}}}}}}]}}
"""
_TWO_LAUNCHES = jobset(POD) + changed(
    jobset(POD).partition("replicatedJobs:\n")[2],
    *((("name: workers"), ("name: reward")), (":1 x", ":2 x"), ("llm-workers", "llm-reward")),
)
MANIFESTS = (
    # without a launcher, the operator of a PyTorchJob starts one process
    (pytorchjob(POD), OK, "2 pods with 16 GPUs"),
    (changed(pytorchjob(POD), ("llm-master-0", "llm-master-1")), CRITICAL,
     "is no pod of this manifest, which has llm-master-0, llm-worker-0"),
    (pytorchjob(_ALONE), WARNING,
     "PyTorchJob llm, Master and Worker: 1 process (PyTorchJob) for 8 GPUs"),
    (changed(pytorchjob(_ALONE), ("spec:\n", _PROCESSES.format(8)), count=1), OK, "2 pods"),
    (pytorchjob(_ENTRYPOINT), OK, "2 pods"),  # which may be torchrun, for all GPUs
    # what a template fills in is no host yet
    (jobset(changed(POD, ("$(MASTER_ADDR):1", "{{ .Release.Name }}-0.a:1"))), OK, "2 pods"),
    # of a patch, only what it states is judged
    (pytorchjob(_PATCH), OK, "2 pods with 16 GPUs"),
    # pods of another job, or beside the launch, are none that torchrun waits for
    (f"{pytorchjob(POD)}---\n{_OTHER}", OK, "4 pods with 32 GPUs"),
    (f"{pytorchjob(POD)}---\n{_OTHER}".replace("nnodes=2", "nnodes=5"), CRITICAL,
     "waits for 5 nodes, but 4 pods have GPUs"),
    (f"{_PLAIN}---\n{_PLAIN}", OK, "2 pods with 16 GPUs"),
    (f"{_PLAIN}---\n{_PLAIN}".replace("nnodes=2", "nnodes=3"), CRITICAL, "3 nodes, but 2 pods"),
    (jobset(POD) + _EVALUATOR, OK, "3 pods with 17 GPUs"),
    (changed(jobset(POD), ("parallelism: 2", "parallelism: 3")) + _EVALUATOR, CRITICAL,
     "waits for 2 nodes, but 3 pods have GPUs"),
    # a TrainJob has a trainer, groups have a size, a Job no more pods than completions
    (TRAIN_JOB.format(processes=8), OK, "4 pods with 32 GPUs"),
    (TRAIN_JOB.format(processes=9), CRITICAL, "9 processes (torchrun) for 8 GPUs"),
    ("kind: TrainJob\nspec: {trainer: {command: [python t.py]}}", CRITICAL, "no program is named"),
    (GROUPS + inside(_OF_LEADER, 6), OK, "2 pods with 16 GPUs"),
    (changed(GROUPS, ("workerT", "leaderT")) + inside(_OF_LEADER, 6)
     + f"\n    workerTemplate:\n      {inside(_OF_LEADER, 6)}", OK, "2 pods with 16 GPUs"),
    (_JOB, OK, "2 pods"),
    (changed(_JOB, ("torchrun --n", "deepspeed --num_gpus=9 x --n")), CRITICAL,
     "9 processes (deepspeed) for 8 GPUs"),
    # pods of a StatefulSet have the domain of its Service
    (_STATEFUL, OK, "2 pods"),
    (changed(_STATEFUL, ("serviceName: llm", "serviceName: other")), CRITICAL, "subdomain other"),
    # names of pods are those of the API's own Job
    *(
        (changed(_JOB, ("$(LEADER):1", "j-worker-0.j:1"), ("kind: Job", f"{of}kind: Job")), *says)
        for of, *says in (
            ("apiVersion: batch/v1\n", CRITICAL, "is no pod of this manifest, which has j-0, j-1"),
            ("apiVersion: batch.volcano.sh/v1alpha1\n", OK, "2 pods"),
        )
    ),
    # names of very many pods are not made, so that none is missed among them
    *(
        (changed(jobset(POD), ("0-0.llm", "0-9999.llm"), ("nnodes=2", f"nnodes={count}"),
                 ("parallelism: 2", f"parallelism: {count}")), *says)
        for count, *says in (
            (4096, CRITICAL, "is no pod of this manifest"), (4097, OK, "4,097 pods")
        )
    ),
    # a variable may come from elsewhere, and a script may ask for it
    *(
        (changed(_JOB, ("- torchrun", f"- {before}torchrun --rdzv-id=$SLURM_JOB_ID"),
                 ("    env:", f"    envFrom: [{source}]\n        env:")), *says)
        for before, source, *says in (
            ("", "", CRITICAL, "it uses SLURM_JOB_ID, which only Slurm sets"),
            ("", "secretRef: {name: s}", OK, "2 pods"),
            (". /etc/a; ", "", OK, "2 pods"),
            ("test -z $SLURM_NNODES || ", "", OK, "2 pods"),
        )
    ),
    # a gang is not larger than the job; Ray has shared memory
    (_GANG, CRITICAL, "starts only once 3 pods are placed (minAvailable), but has 2"),
    (changed(_JOB, ("kind: Job", "kind: RayJob"), ("mountPath: /dev/shm", "mountPath: /x")), OK,
     "2 pods"),
    # mpirun starts no more processes than its workers have slots
    (mpijob(16), OK, "3 pods"),
    (mpijob(17), CRITICAL, "mpirun -np 17, but workers have 16 slots"),
    *(
        (changed(mpijob(17), *pairs, count=1), OK, "3 pods")
        for pairs in (
            [("mpirun, -np,", "mpirun, --oversubscribe, -np,")],
            [("mpirun, -np,", "mpirun, --map-by, 'slot:OVERSUBSCRIBE', -np,")],
            [("mpirun, -np,", "mpirun, --hostfile, hosts, -np,")],
            [("spec:\n", "spec:\n  mpiImplementation: Intel\n")],
            [('-np, "17", all_reduce_perf', '-np, $NP, all_reduce_perf, -n, "50"')],
        )
    ),
    *(
        (changed(mpijob(count), ("all_reduce_perf", "python, x.py"),
                 ("name: l,", "name: l, image: a,"), ("mpirun,", f"mpirun, -hostfile, {hosts},")),
         *says)
        for count, hosts, *says in (
            (17, "/etc/mpi/hostfile", CRITICAL, "mpirun -np 17, but workers have 16 slots"),
            (8, "/etc/mpi/hostfile", WARNING, "mpirun -np 8, but its nodes have 16 GPUs: idle"),
            (8, "hosts", OK, "3 pods"),
        )
    ),
    (mpijob(8), OK, "3 pods"),  # of a test, which may take several GPUs itself
    (changed(mpijob(17), ("spec:\n", "spec:\n  runLauncherAsWorker: true\n"), count=1), OK, ""),
    # a training cannot write where its container has a mount that is read-only
    *(
        (jobset(changed(_WRITES, ("/dev/shm}", f"/dev/shm}}, {{name: shm, {mount}}}"))),
         CRITICAL if words else OK, words)
        for mount, words in (
            ("mountPath: /data, readOnly: true", "/data/run cannot be written"),
            ("mountPath: /data, readOnly: false", ""),
            ("mountPath: /data, subPath: x", ""),
            ("mountPath: /data, readOnly: true}, {name: shm, mountPath: /data/run", ""),
        )
    ),
    # what is saved beside a volume that lasts is lost with the container
    *(
        (jobset(changed(_SAVES, (":1 x", f":1 x --save_dir {path} --log /a"),
                        ("volumes: [", f"volumes: [{{name: data, {volume}}}, "))),
         WARNING if words else OK, words)
        for path, volume, words in (
            ("/ckpt/run", _CLAIM, "--save_dir /ckpt/run is lost"),
            ("/data/run", _CLAIM, ""),
            ("ckpt", _CLAIM, ""),
            ("/ckpt/run", "emptyDir: {}", ""),
            ("/data/run", "emptyDir: {}", "/data/run is lost with its pod: /data is of kind empty"),
            ("/data/run", "ephemeral: {volumeClaimTemplate: {}}", "/data is of kind ephemeral"),
            ("a --save_steps 5 --output_dir /data", "emptyDir: {}", "--output_dir /data is lost"),
            ("/data/run; aws s3 sync /data s3://a", "emptyDir: {}", ""),
            ("/data/run --upload-to gs://a", "emptyDir: {}", ""),
        )
    ),
    # another container of the pod may copy what is there
    (jobset(changed(_SAVES, (":1 x", ":1 x --ckpt /data"),
                    ("volumes: [", "volumes: [{name: data, emptyDir: {}}, "),
                    ("name: sidecar", "name: s\n    volumeMounts: [{name: data, mountPath: /a}]"))),
     OK, "2 pods"),
    # a shell inside the container says where it saves
    (jobset(changed(_SAVES, ("- torchrun", "- D=/data; torchrun"), (":1 x", ":1 x --ckpt $D/a"),
                    ("volumes: [", "volumes: [{name: data, emptyDir: {}}, "))),
     WARNING, "--ckpt /data/a is lost with its pod"),
    # some kinds of volumes, and the image itself, may be read-only
    *(
        (jobset(changed(_SAVES, (":1 x", ":1 x --output_dir /data/run"),
                        ("volumes: [", f"volumes: [{{name: data, {kind}: {{}}}}, "))), *says)
        for kind, *says in (
            ("configMap", CRITICAL, "/data/run cannot be written: /data is a configMap"),
            ("projected", CRITICAL, "/data is a projected"), ("csi", OK, "2 pods"),
        )
    ),
    *(
        (jobset(changed(POD, (":1 x", f":1 x --output_dir {path}"),
                        ("image", f"{_READ_ONLY}\n    image"))), *says)
        for path, *says in (
            ("/out", CRITICAL, "/out cannot be written: readOnlyRootFilesystem is true"),
            ("/dev/shm/out", OK, "2 pods"),
        )
    ),
    # a training is told to stop before it is killed
    *(
        (jobset(changed(POD, ("image", f"lifecycle: {{preStop: {hook}}}\n    image"))), *says)
        for hook, *says in (
            ("{exec: {command: [sh, -c, touch a && sleep 30]}}", WARNING,
             "preStop waits for 30 s of the 30 s of terminationGracePeriodSeconds"),
            ("{sleep: {seconds: 31}}", WARNING, "preStop waits for 31 s"),
            ("{sleep: {seconds: 29}}", OK, "2 pods"),
        )
    ),
    # it does nothing after its deadline, wherever that stands
    *(
        (changed(jobset(changed(POD, (":1 x", ":1 x --save-every-minutes 61"))), *pairs), *says)
        for pairs, *says in (
            ([("        parallelism", "        activeDeadlineSeconds: 3600\n        parallelism")],
             WARNING, "--save-every-minutes 61 comes after the end of the job: activeDeadlineSec"),
            ([("  containers", "  activeDeadlineSeconds: 7200\n            containers")],
             OK, "2 pods"),
        )
    ),
    # a setting that chooses a network of devices takes one
    *(
        (pytorchjob(changed(POD, ("env: [", f"env: [{{name: {name}, value: {value}}}, "), *pairs)),
         *says)
        for name, value, pairs, *says in (
            ("FI_PROVIDER", "efa", [], WARNING, "Master and Worker: FI_PROVIDER=efa takes a netw"),
            ("NCCL_NET", "IB", [], WARNING, "NCCL_NET=IB takes a network device"),
            ("NCCL_IB_HCA", "^mlx5_0", [], OK, "2 pods"),
            ("NCCL_NET", "Socket", [], OK, "2 pods"),
            ("FI_PROVIDER", "efa", [('gpu: "8"', 'gpu: "8", vpc.amazonaws.com/efa: 1')], OK, "2"),
            ("FI_PROVIDER", "efa", [("env", "securityContext: {privileged: true}\n    env")], OK,
             "2 pods"),
        )
    ),
    # Ray counts the GPUs that it is told
    *(
        (_RAY.format(count), *says)
        for count, *says in (
            ("1", WARNING, "rayStartParams.num-gpus is 1, but the pod has 8 GPUs: Ray leaves"),
            ("9", WARNING, "num-gpus is 9, but the pod has 8 GPUs: Ray starts workers without"),
            ("8", OK, "2 pods"), ("0", OK, "2 pods"), ("$N", OK, "2 pods"),
        )
    ),
    # templates of one launch meet at one place; launches beside each other have their own
    (changed(pytorchjob(POD), (":1 x", ":2 x"), count=1), CRITICAL,
     "PyTorchJob llm, Master and Worker: port is 2 in Master but 1 in Worker: pods of one"),
    (changed(pytorchjob(POD), ("=c10d", "=c10d --rdzv-id=a"), count=1), OK, "2 pods"),
    *(
        (changed(scene, ("--nnodes=2", given)), *says)
        for given in ("--standalone", "--nnodes=1")
        for scene, *says in (
            (pytorchjob(POD), CRITICAL, f"torchrun {given} meets within its pod: each of 2 trains"),
            (changed(pytorchjob(POD), ("Worker:\n      replicas: 1", "Worker:\n      replicas: 0")),
             OK, "1 pod with"),
        )
    ),
    *(
        (changed(GROUPS, ("workerT", "leaderT")) + inside(_OF_GROUP.format(1), 6)
         + f"\n    workerTemplate:\n      {inside(_OF_GROUP.format(port), 6)}", *says)
        for port, *says in ((1, OK, "2 pods"), (2, CRITICAL, "port is 1 in leaderTemplate but 2"))
    ),
    # Lightning starts a process for each of its devices
    *(
        (jobset(changed(POD, ("[bash, -c]", f"[python, t.py, trainer.devices={count}]"),
                        ("- torchrun --nnodes=2 --nproc-per-node=8 ", "- "))), *says)
        for count, *says in (
            (4, WARNING, "4 processes (devices of Lightning) for 8 GPUs: idle"),
            (8, OK, "2 pods"), ("auto", OK, "2 pods"),
        )
    ),
    (_TWO_LAUNCHES, OK, "4 pods with 32 GPUs"),
    # an index begins with 0 in each job of a JobSet
    (_BY_INDEX, OK, "2 pods"),
    (changed(_BY_INDEX, ("replicas: 1", "replicas: 2"), ("parallelism: 2", "parallelism: 1")),
     CRITICAL, "JOB_COMPLETION_INDEX is the same in several of its groups"),
    # pods of one job have the same network, by whatever name its vendor gives a device
    *(
        case
        for device in ("rdma/ib", "vpc.amazonaws.com/efa")
        for asks in [pytorchjob(changed(POD, ('gpu: "8"', f'gpu: "8", {device}: 1')))]
        for case in (
            (asks, OK, "2 pods"),
            (changed(asks, (f", {device}: 1", ", cpu: 9"), count=1), WARNING,
             f"PyTorchJob llm, Master: pods beside it have {device}"),
        )
    ),
    # /dev/shm is memory only where its volume says so
    (jobset(changed(LIMITED, ("medium: Memory, sizeLimit: 9Gi", "sizeLimit: 9Gi"))), OK, "2 pods"),
    # WORLD_SIZE counts processes once a pod has several, so it is not a number of nodes
    *(
        (changed(pytorchjob(changed(_WORLD, ('gpu: "8"', f'gpu: "{processes}"'))),
                 ("spec:\n", _PROCESSES.format(processes)), count=1), outcome, words)
        for processes, outcome, words in (
            (8, CRITICAL, "is the number of processes, not of nodes"), (1, OK, "2 pods"),
        )
    ),
    # pods of Kubeflow's operator resolve the name of the master
    (KUBEFLOW, OK, "2 pods"),
    (changed(KUBEFLOW, ("=c10d", "=c10d --rdzv-id=$SLURM_JOB_ID")), CRITICAL, "only Slurm sets"),
    (changed(KUBEFLOW, ("  dnsPolicy: ClusterFirstWithHostNet", "  dnsPolicy: ClusterFirst")),
     CRITICAL, "Worker: the Service at which pods of a PyTorchJob meet does not resolve"),
    (changed(KUBEFLOW, ("$(MASTER):1", "192.0.2.1:1"), ("FirstWithHostNet", "First")), OK, ""),
)  # fmt: skip
"""Manifests, and what is wrong with them."""


@pytest.mark.parametrize(("text", "outcome", "words"), MANIFESTS)
def test_manifests(tmp_path: Path, text: str, outcome: State, words: str) -> None:
    """Pods of any kind have one result, which names what is wrong with them."""
    (found,) = results("manifest", manifest(tmp_path, text))
    assert (found.outcome, words in found.text) == (outcome, True), found


def test_variables_of_pods(tmp_path: Path) -> None:
    """Variables of NCCL in a pod are judged like those of a script."""
    pod = POD.replace("env: [", "env: [{name: NCCL_SOCKET_IFNAME, value: lo}, ")
    (found,) = results("nccl-variables", manifest(tmp_path, jobset(pod)))
    assert found.outcome is CRITICAL
    assert "only an interface inside the node" in found.text
    (found,) = results("nccl-variables", manifest(tmp_path, jobset(pod.replace("lo}", "^lo}"))))
    assert found.outcome is OK
    adapter = pod.replace("NCCL_SOCKET_IFNAME, value: lo}", "NCCL_IB_HCA, value: mlx5_0}")
    (found,) = results("nccl-variables", manifest(tmp_path, jobset(adapter)))
    assert found.outcome is UNKNOWN  # the pods run on other nodes


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
