"""Rules of single programs and controllers: one table, read by one evaluator.

A row holds where all of its terms, joined by ` & `, hold. A term is `KEY`, which is given;
`KEY=a|b`, whose value is one of these; `KEY~PATTERN`, in which the pattern
is found; `KEY<OTHER`, `KEY>OTHER`, `KEY%OTHER`: a number below, above, or no multiple of another;
`KEY@OTHER`: a value that is none of those of the other key; `KEY*`: a value that is there twice. A
`!` in front says that it is not so. No row speaks of a value that only a shell or a template knows.

A key is a field or option of the row's subject: a type of Kubernetes' objects
(`kubernetes_fields.toml`), with a dotted path below it, or a program. `PROGRAM:KEY` is an option of
another program, `$NAME` a variable of the processes, `script:text` the training's program.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.check import Result, critical, warning
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Values = Callable[[str], Sequence[str]]
    """The values of a key; none where it is not given."""

_TERM = re.compile(r"(!?)(\S+?)(?:(=|~|<|>|%|@)(.*)|(\*))?", re.DOTALL)
_OPEN = re.compile(r"\$|\{\{|^<.*>$|^%")
"""In a value that is filled in before it is read."""


_API = "kubernetes.io/docs/reference/kubernetes-api; validation.go of its types"
_NAMES = "kubernetes.io/docs/concepts/overview/working-with-objects/names"
_KUBERAY = "github.com/ray-project/kuberay, ray-operator/controllers/ray/utils/validation.go"
_MEGATRON = "github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py, validate_args"
_TRAINER = "huggingface.co/docs/transformers/main_classes/trainer, TrainingArguments"
_FSDP = "github.com/huggingface/accelerate, utils/dataclasses.py, FullyShardedDataParallelPlugin"
_PYXIS = "github.com/NVIDIA/pyxis, README, args.c"
_SLURM = "slurm.schedmd.com/sbatch.html"
_RUN = "docs.pytorch.org/docs/stable/elastic/run.html"
_DOCKER = "docs.docker.com/reference/cli/docker/container/run"
_RAY = "docs.ray.io/en/latest/cluster/vms/user-guides/community/slurm.html"
NAMES = {
    "JobSet": ("{job}-{part}-{group}-{pod}-xxxxx", 63, "the name of its pods"),
    "Job": ("{job}-{pod}", 63, "the host name of its pods"),
    "PyTorchJob": ("{job}-{role}-{pod}", 63, "the name of its Services"),
    "MPIJob": ("{job}-{role}-{pod}", 63, "the host name of its pods"),
    "CronJob": ("{job}", 52, "its name"),
    "StatefulSet": ("{job}", 52, "its name"),
    "RayJob": ("{job}", 47, "its name"),
    "RayCluster": ("{job}", 53, "its name"),
    "LeaderWorkerSet": ("{job}-{group}-{pod}", 63, "the host name of its pods"),
}
"""Names that controllers make for an object, by kind, the characters that they may have, and what
they are. JobSet and KubeRay refuse longer ones in their own validation; RFC 1123 limits a label.
"""


class JobRule(NamedTuple):
    """Something that one program or controller does with what it is given."""

    subject: str
    when: str
    text: str
    """What happens; `{0}` is the value of the first term's key, and so on."""
    source: str
    make: Callable[..., Result] = critical


def broken(rule: JobRule, values: Values) -> str:
    """Return what a rule says of these values; empty where it does not hold."""
    found = []
    for term in rule.when.split(" & "):
        if (value := _held(term, values)) is None:
            return ""
        found.append(value[:60])
    return rule.text.format(*found)


def _held(term: str, values: Values) -> str | None:
    """Return the value for which a term holds; None where it does not."""
    match = _TERM.fullmatch(term)
    assert match, term  # noqa: S101 - the table is ours
    denied, key, relation, other, twice = match.groups()
    given = values(key)
    if relation is None and twice is None:
        return None if bool(given) == bool(denied) else (given or ("",))[0]
    known = [value for value in given if not _OPEN.search(value)]
    if len(known) < len(given) and relation not in {None, "~"}:
        return None
    holding = [one for one in known if known.count(one) > 1] if twice else []
    if relation:
        holding = [one for one in known if _related(one, relation, other, values)]
    if denied:
        return (known or [""])[0] if not holding and len(known) == len(given) else None
    return holding[0] if holding else None


def _related(value: str, relation: str, other: str, values: Values) -> bool:
    if relation == "=":
        return value in other.split("|")
    if relation == "~":
        return re.search(other, value) is not None
    others = [other] if natural(other) is not None else list(values(other))
    if any(_OPEN.search(one) for one in others) or not others:
        return False
    if relation == "@":
        return value not in others
    left, right = natural(value), natural(others[0])
    if left is None or right is None:
        return False
    return {"<": left < right, ">": left > right, "%": bool(right) and left % right != 0}[relation]


def _rows(
    subject: str, source: str, *rows: tuple[str, str], make: Callable[..., Result] = critical
) -> Iterator[JobRule]:
    yield from (JobRule(subject, when, text, source, make) for when, text in rows)


OF_OBJECTS = (
    *_rows(
        "JobSpec", _API,
        ("podFailurePolicy & template.spec.restartPolicy=OnFailure|Always",
         "podFailurePolicy takes restartPolicy: Never, not {1}"),
        ("completionMode=Indexed & !completions", "completionMode: Indexed takes completions"),
        ("backoffLimitPerIndex & !completionMode=Indexed",
         "backoffLimitPerIndex takes completionMode: Indexed"),
        ("maxFailedIndexes & !backoffLimitPerIndex",
         "maxFailedIndexes takes backoffLimitPerIndex"),
        ("successPolicy & !completionMode=Indexed", "successPolicy takes completionMode: Indexed"),
        ("podFailurePolicy.rules.action=FailIndex & !backoffLimitPerIndex",
         "the action FailIndex takes backoffLimitPerIndex"),
        ("podFailurePolicy.rules.onExitCodes.containerName@template.spec.containers.name",
         "podFailurePolicy names the container {0}, which these pods do not have"),
        ("completionMode & !completionMode=Indexed|NonIndexed", "there is no completionMode {0}"),
    ),
    *_rows(
        "JobSpec object", _API,
        ("spec.template.spec.containers.image & !spec.template.spec.restartPolicy=Never|OnFailure",
         "restartPolicy of a Job must be Never or OnFailure"),
    ),
    *_rows(
        "PodFailurePolicyRule", _API,
        ("action & !action=FailJob|FailIndex|Ignore|Count", "there is no action {0}"),
        ("onExitCodes & onPodConditions", "a rule has onExitCodes or onPodConditions, not both"),
        ("onExitCodes.operator=In & onExitCodes.values=0",
         "values of onExitCodes must not contain 0 with the operator In"),
    ),
    *_rows(
        "PodSpec", _API,
        ("restartPolicy & !restartPolicy=Always|OnFailure|Never|ExitCode",
         "there is no restartPolicy {0}"),
        ("dnsPolicy & !dnsPolicy=ClusterFirst|ClusterFirstWithHostNet|Default|None",
         "there is no dnsPolicy {0}"),
        ("dnsPolicy=None & !dnsConfig.nameservers", "dnsPolicy: None takes dnsConfig.nameservers"),
        ("containers.name*", "two containers are named {0}"),
        ("volumes.name*", "two volumes are named {0}"),
        ("shareProcessNamespace=true & hostPID=true",
         "shareProcessNamespace and hostPID exclude each other"),
        ("hostNetwork=true & containers.ports.hostPort@containers.ports.containerPort",
         "with hostNetwork a hostPort, {1}, is the containerPort"),
    ),
    *_rows(
        "Container", _API,
        ("image & !name~^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
         "a container's name, {1}, has lower-case letters, digits, and at most 63 characters"),
        ("volumeMounts.mountPath*", "{0} is mounted twice"),
        ("imagePullPolicy & !imagePullPolicy=Always|IfNotPresent|Never",
         "there is no imagePullPolicy {0}"),
        ("livenessProbe.successThreshold>1", "successThreshold of a livenessProbe is 1, not {0}"),
        ("securityContext.privileged=true & securityContext.allowPrivilegeEscalation=false",
         "a privileged container cannot have allowPrivilegeEscalation: false"),
    ),
    *_rows(
        "EnvVar", _API,
        ("value~. & valueFrom", "a variable has value or valueFrom, not both"),
        ("!name", "a variable has no name"),
    ),
    *_rows(
        "ObjectFieldSelector", "kubernetes.io/docs/concepts/workloads/pods/downward-api",
        ((r"fieldPath & !fieldPath~^(metadata\.(name|namespace|uid|(labels|annotations)(\['.+'\])?)"
         r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$"),
         "fieldRef cannot take {0}"),
    ),
    *_rows(
        "ContainerPort", _API,
        ("name~^.{16,}", "the name {0} of a port has more than 15 characters"),
        ("!containerPort", "a port has no containerPort"),
        ("containerPort>65535", "{0} is no port"),
    ),
    *_rows(
        "Toleration", _API,
        ("operator=Exists & value~.", "operator: Exists takes no value, but it is {1}"),
        ("tolerationSeconds & effect & !effect=NoExecute",
         "tolerationSeconds takes effect: NoExecute, not {1}"),
        ("effect & !effect=NoSchedule|PreferNoSchedule|NoExecute", "there is no effect {0}"),
        ("!key & !operator=Exists", "a toleration without a key takes operator: Exists"),
    ),
    *_rows(
        "ResourceRequirements", _API,
        ("requests.cpu>limits.cpu", "{0} cpu in requests is above its limit"),
    ),
    *_rows(
        "ObjectMeta", _NAMES,
        ("name & !name~^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
         "the name {0} has other characters than lower-case letters, digits, - and ."),
    ),
    *_rows(
        "EmptyDirVolumeSource", _API,
        ("medium~. & !medium~^(Memory|HugePages(-.*)?)$", "there is no medium {0}: it is Memory"),
    ),
    *_rows(
        "ServiceSpec", _API,
        ("clusterIP=none|NONE|headless", "a headless Service has clusterIP: None, not {0}"),
    ),
    *(
        JobRule(f"{kind} object", r"metadata.name~^\d",
             "its name, {0}, begins with a digit: its Services' names must not", _NAMES)
        for kind in ("JobSetSpec", "PyTorchJobSpec", "RayJobSpec", "RayClusterSpec", "MPIJobSpec")
    ),
    *_rows(
        "ReplicaSpec", "kubeflow.org/docs/components/trainer/legacy-v1",
        ("restartPolicy & !restartPolicy=Always|OnFailure|Never|ExitCode",
         "there is no restartPolicy {0}"),
    ),
    *_rows(
        "TrainJobSpec", "kubeflow.org/docs/components/trainer",
        ("!runtimeRef.name", "it has no runtimeRef"),
    ),
    *_rows(
        "JobSetSpec", "github.com/kubernetes-sigs/jobset, pkg/webhooks/jobset_webhook.go",
        ("successPolicy.targetReplicatedJobs@replicatedJobs.name",
         "successPolicy names {0}, which is none of its replicatedJobs"),
        ("failurePolicy.rules.targetReplicatedJobs@replicatedJobs.name",
         "failurePolicy names {0}, which is none of its replicatedJobs"),
        ("coordinator.replicatedJob@replicatedJobs.name",
         "coordinator names {0}, which is none of its replicatedJobs"),
        ("replicatedJobs.dependsOn.name@replicatedJobs.name",
         "dependsOn names {0}, which is none of its replicatedJobs"),
        ("successPolicy & !successPolicy.operator=All|Any",
         "the operator of successPolicy is All or Any"),
        ("startupPolicy & !startupPolicy.startupPolicyOrder=AnyOrder|InOrder",
         "startupPolicyOrder is AnyOrder or InOrder"),
    ),
    *_rows(
        "PyTorchJobSpec", "github.com/kubeflow/training-operator, pkg/webhooks/pytorch",
        ("pytorchReplicaSpecs.Master.replicas & !pytorchReplicaSpecs.Master.replicas=1",
         "{0} replicas of Master: there is one"),
        ("elasticPolicy.minReplicas>elasticPolicy.maxReplicas",
         "minReplicas {0} is above maxReplicas"),
    ),
    *_rows(
        "RunPolicy", "kubeflow.org/docs/components/trainer/legacy-v1",
        ("cleanPodPolicy & !cleanPodPolicy=All|Running|None", "there is no cleanPodPolicy {0}"),
    ),
    *_rows(
        "MPIJobSpec", "github.com/kubeflow/mpi-operator, pkg/apis/kubeflow/validation",
        ("!mpiReplicaSpecs.Launcher", "there is no Launcher in mpiReplicaSpecs"),
        ("mpiReplicaSpecs.Launcher.replicas & !mpiReplicaSpecs.Launcher.replicas=1",
         "{0} replicas of Launcher: there is one"),
        ("mpiImplementation & !mpiImplementation=OpenMPI|Intel|MPICH",
         "there is no mpiImplementation {0}"),
    ),
    *_rows(
        "RayJobSpec", _KUBERAY,
        ("ttlSecondsAfterFinished>0 & !shutdownAfterJobFinishes=true & !deletionStrategy",
         ("ttlSecondsAfterFinished takes shutdownAfterJobFinishes: true: KubeRay refuses it, and"
         " before 1.4 keeps the cluster and its GPUs")),
        ("suspend=true & !shutdownAfterJobFinishes=true",
         "suspend takes shutdownAfterJobFinishes: true"),
        ("!rayClusterSpec & !clusterSelector", "it has neither rayClusterSpec nor clusterSelector"),
        ("!entrypoint & !submissionMode=InteractiveMode & !submitterPodTemplate",
         "it has no entrypoint"),
        ("backoffLimit>0 & clusterSelector", "backoffLimit is refused with clusterSelector"),
        ("submissionMode & !submissionMode=K8sJobMode|HTTPMode|InteractiveMode|SidecarMode",
         "there is no submissionMode {0}"),
        ("submissionMode=SidecarMode & submitterPodTemplate",
         "SidecarMode takes no submitterPodTemplate"),
    ),
    *_rows(
        "RayJobSpec object",
        "github.com/kubernetes-sigs/kueue, pkg/controller/jobs/rayjob/rayjob_webhook.go",
        ("metadata.labels[kueue.x-k8s.io/queue-name] & !spec.shutdownAfterJobFinishes=true",
         "Kueue refuses a RayJob without shutdownAfterJobFinishes: true"),
        ("metadata.labels[kueue.x-k8s.io/queue-name] & spec.clusterSelector",
         "Kueue refuses a RayJob with clusterSelector"),
    ),
    *_rows(
        "WorkerGroupSpec", _KUBERAY,
        ("minReplicas>maxReplicas", "minReplicas {0} is above maxReplicas"),
        ("replicas>maxReplicas", "replicas {0} is above maxReplicas"),
    ),
    *_rows(
        "Trainer",
        "github.com/kubeflow/trainer, pkg/runtime/framework/plugins/torch",
        ("env.name=PET_NNODES|PET_NPROC_PER_NODE|PET_NODE_RANK|PET_MASTER_ADDR|PET_MASTER_PORT",
         "{0} is reserved: the controller sets it itself"),
    ),
)  # fmt: skip
"""What controllers and the API server refuse."""

OF_PROGRAMS = (
    *_rows(
        "sbatch", _SLURM,
        ("array~[-,] & !array~%1$ & output & !output~%[ajJAx]|\\$",
         "all tasks of the array write into one file, {2}: %a or %j is missing"),
        ("array~[-,] & !array~%1$ & output~%A & !output~%[aj]",
         "all tasks of the array write into one file, {2}: %a or %j is missing"),
        ("job-name=bash|interactive & script:text~lightning",
         "Lightning takes a job named {0} for an interactive one, and ignores Slurm's ranks"),
        (("ntasks>1 & !ntasks-per-node & script:text~(?m)^\\s*(import|from)"
         " (lightning|pytorch_lightning)\\b"),
         "Lightning refuses --ntasks={0} without --ntasks-per-node"),
    ),
    *_rows(
        "srun", _PYXIS,
        (r"container-image~^[\w.-]+\.(sqsh|sqfs|squashfs)$",
         "--container-image={0} is taken for an image of Docker Hub: a file begins with / or ./"),
        ("container-env~=", "--container-env={0} takes names of variables alone"),
        (r"container-mounts~\s", "--container-mounts={0} has a blank: mounts are joined by commas"),
    ),
    *_rows(
        "srun", "github.com/NVIDIA/enroot, doc/cmd/import.md",
        (r"container-image~^(docker://)?[\w-]+(\.[\w-]+)+(:\d+)?/[^#]*$",
         ("--container-image={0}: enroot before 4.1 takes a registry only before a #, as in"
         " nvcr.io#nvidia/pytorch, and asks Docker Hub for it: 401 Unauthorized")),
    ),
    *_rows(
        "srun", "docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html",
        (r"gpus-per-task=1 & sbatch:ntasks-per-node>1 & script:text~(?i)set_device\([^)]*local",
         ("with --gpus-per-task=1 a task sees one GPU, which is device 0, but the program chooses"
         " its device by its local rank: `invalid device ordinal`")),
    ),
    *_rows(
        "torchrun", _RUN,
        ("rdzv-backend & !rdzv-backend=c10d|etcd|etcd-v2|static|zeus",
         "there is no rendezvous backend {0}"),
        ("m & arguments~^\\S+\\.py$", "-m takes a module, a.b, not the file {1}"),
        ("module & arguments~^\\S+\\.py$", "--module takes a module, a.b, not the file {1}"),
        ("!no-python & !m & !module & arguments=python|python3",
         "torchrun runs Python itself: it takes {3} for the script, which it cannot open"),
        ("redirects & !redirects~^([0-3]|\\d+:[0-3](,\\d+:[0-3])*)$",
         "--redirects is 0 to 3, or RANK:KIND,..., not {0}"),
        ("tee & !tee~^([0-3]|\\d+:[0-3](,\\d+:[0-3])*)$",
         "--tee is 0 to 3, or RANK:KIND,..., not {0}"),
        ("rdzv-conf & !rdzv-conf~^[\\w.]+=[^,=]+(,[\\w.]+=[^,=]+)*$",
         "--rdzv-conf is KEY=VALUE,..., not {0}"),
        ("start-method & !start-method=spawn|fork|forkserver", "there is no start method {0}"),
    ),
    *_rows(
        "deepspeed", "github.com/deepspeedai/DeepSpeed, deepspeed/launcher/runner.py",
        ("!no-python & !module & arguments=python|python3",
         "deepspeed runs Python itself: it takes {2} for the script, which it cannot open"),
        ("launcher & !launcher=pdsh|openmpi|mvapich|slurm|mpich|impi|mosaicml",
         "there is no launcher {0}"),
        ("no-ssh & !node-rank", "--no_ssh takes --node_rank"),
    ),
    *_rows(
        "accelerate", _FSDP,
        ("fsdp-cpu-ram-efficient-loading=true|True & fsdp-sync-module-states=false|False",
         "fsdp_cpu_ram_efficient_loading takes fsdp_sync_module_states: true"),
        (("fsdp-auto-wrap-policy & !fsdp-auto-wrap-policy~"
         r"(?i)^(TRANSFORMER_BASED_WRAP|SIZE_BASED_WRAP|NO_WRAP|\d)$"),
         "there is no fsdp_auto_wrap_policy {0}"),
        (("fsdp-state-dict-type & !fsdp-state-dict-type~"
         r"(?i)^((FULL|LOCAL|SHARDED)_STATE_DICT|\d)$"),
         "there is no fsdp_state_dict_type {0}"),
        ("fsdp-version=2 & fsdp-state-dict-type=LOCAL_STATE_DICT",
         "FSDP2 has no LOCAL_STATE_DICT"),
        ("fsdp-activation-checkpointing=true|True & training:gradient-checkpointing=|true|True|1",
         ("activation checkpointing is on in FSDP and in the training (gradient_checkpointing):"
         " Transformers refuses both")),
    ),
    *_rows(
        "accelerate", "github.com/huggingface/accelerate, commands/launch.py",
        ("mixed-precision & !mixed-precision=no|False|fp16|bf16|fp8",
         "there is no mixed_precision {0}"),
        ("!no-python & !m & !module & arguments=python|python3",
         "accelerate launch runs Python itself: it takes {3} for the script"),
        (("srun:program & deepspeed-multinode-launcher & nnodes>1"
         " & !deepspeed-multinode-launcher=standard"),
         ("deepspeed_multinode_launcher {1} starts all nodes over SSH, and srun starts it on each"
         " node: everything runs more than once, on the same ports; `standard` starts one node")),
    ),
    *_rows(
        "docker", _DOCKER,
        ("sbatch:program & run & tty",
         "docker -t finds no terminal in a batch job: `the input device is not a TTY`"),
        (r"gpus~^device=\w+,\w",
         "--gpus {0}: docker takes a list of devices only in inner quotes, '\"device=0,1\"'"),
    ),
    *_rows(
        "ray", _RAY,
        ("start & !block & by=srun",
         "ray start ends at once without --block, and Slurm then ends what srun started"),
        ("start & head & block & by=srun & !end=&",
         "ray start --block never ends, and what follows it never starts: & is missing"),
    ),
    *_rows(
        "training", _MEGATRON,
        (("sequence-parallel & tensor-model-parallel-size>1 & $CUDA_DEVICE_MAX_CONNECTIONS"
         " & !$CUDA_DEVICE_MAX_CONNECTIONS=1"),
         ("Megatron takes CUDA_DEVICE_MAX_CONNECTIONS=1 with --sequence-parallel before Blackwell,"
         " not {2}")),
        (("num-layers%pipeline-model-parallel-size & !deepspeed & !pp-partition-method"
         " & !decoder-first-pipeline-num-layers & !decoder-last-pipeline-num-layers"
         " & !account-for-embedding-in-pipeline-split"
         " & !pipeline-model-parallel-layout"),
         "{0} layers cannot be divided among the stages of the pipeline"),
        ("hidden-size%num-attention-heads & !kv-channels & tensor-model-parallel-size",
         "hidden size {0} is not a multiple of the attention heads"),
        ("num-experts%expert-model-parallel-size",
         "{0} experts cannot be divided by expert_model_parallel_size"),
        (("expert-model-parallel-size>1 & !num-experts & micro-batch-size"
         " & !use-checkpoint-args"),
         "expert_model_parallel_size {0} takes --num-experts"),
        ("num-experts & tensor-model-parallel-size>1 & !sequence-parallel & micro-batch-size",
         "experts with tensor parallelism take --sequence-parallel"),
        ("seq-length>max-position-embeddings & micro-batch-size",
         "sequences of {0} tokens pass max_position_embeddings"),
        ("overlap-param-gather & !overlap-grad-reduce & !use-megatron-fsdp",
         "--overlap-param-gather takes --overlap-grad-reduce"),
        (("overlap-param-gather & !use-distributed-optimizer & !use-megatron-fsdp"
         " & !use-torch-fsdp2 & micro-batch-size"),
         "--overlap-param-gather takes --use-distributed-optimizer"),
        ("tp-comm-overlap & !sequence-parallel", "--tp-comm-overlap takes --sequence-parallel"),
        ("train-iters & train-samples", "--train-iters and --train-samples exclude each other"),
        ("train-iters & lr-warmup-samples>0", "--lr-warmup-samples goes with --train-samples"),
        ("train-samples & lr-decay-iters", "--lr-decay-iters goes with --train-iters"),
        ("lr-warmup-fraction & lr-warmup-iters>0",
         "--lr-warmup-fraction and --lr-warmup-iters exclude each other"),
        ("recompute-granularity=full & !recompute-method",
         "--recompute-granularity full takes --recompute-method"),
        ("recompute-granularity=selective & recompute-method",
         "--recompute-granularity selective takes no --recompute-method"),
        ("save & !save-interval & tensor-model-parallel-size & micro-batch-size",
         "--save takes --save-interval"),
        ("fp16 & bf16 & tensor-model-parallel-size", "fp16 and bf16 are both given"),
        ("exit-duration-in-mins>job:minutes",
         ("--exit-duration-in-mins {0} comes after the end of the job, whose --time is shorter (two"
         " parts are MINUTES:SECONDS): it is killed before it saves")),
        ("num-layers-per-virtual-pipeline-stage & !pipeline-model-parallel-size>1",
         "virtual stages take a pipeline of several stages"),
    ),
    *_rows(
        "training", _TRAINER,
        ("fp16=|true|True|1 & bf16=|true|True|1 & per-device-train-batch-size",
         "fp16 and bf16 are both given: the Trainer takes one of them"),
        (("load-best-model-at-end=|true|True|1 & save-strategy & eval-strategy"
         " & !save-strategy=best & save-strategy@eval-strategy"),
         "load_best_model_at_end takes the same strategy to save as to evaluate, not {1} and {2}"),
        ("load-best-model-at-end=|true|True|1 & save-strategy=steps & save-steps%eval-steps",
         "load_best_model_at_end takes save_steps, {2}, that are a multiple of eval_steps"),
        ("deepspeed & fsdp & per-device-train-batch-size",
         "--deepspeed and --fsdp exclude each other"),
        ("push-to-hub=|true|True|1 & $HF_HUB_OFFLINE~(?i)^(1|true|yes|on)$",
         "HF_HUB_OFFLINE={1} lets nothing reach the hub: --push_to_hub fails at its end"),
    ),
    *_rows(
        "environment", "docs.pytorch.org/docs/stable/distributed.html",
        ("$GLOO_SOCKET_IFNAME~[\\^=]",
         "GLOO_SOCKET_IFNAME={0}: Gloo takes names of interfaces alone, without ^ or ="),
        ("$TORCH_DISTRIBUTED_DEBUG & !$TORCH_DISTRIBUTED_DEBUG~(?i)^(OFF|INFO|DETAIL)$",
         "TORCH_DISTRIBUTED_DEBUG is OFF, INFO or DETAIL, not {0}: init_process_group fails"),
    ),
    *_rows(
        "environment", "docs.pytorch.org/docs/stable/notes/cuda.html",
        ((r"$PYTORCH_CUDA_ALLOC_CONF & !$PYTORCH_CUDA_ALLOC_CONF"
         r"~^\s*\w+:(\w+|[\d.]+|\[[^]]*\])(\s*,\s*\w+:(\w+|[\d.]+|\[[^]]*\]))*\s*,?\s*$"),
         "PYTORCH_CUDA_ALLOC_CONF is NAME:VALUE,..., not {0}"),
        (r"$PYTORCH_CUDA_ALLOC_CONF~expandable_segments:(?!True|False)",
         "expandable_segments is True or False in PYTORCH_CUDA_ALLOC_CONF, not as in {0}"),
    ),
)  # fmt: skip
"""What programs refuse, or do otherwise than is meant, with what they are given."""
_AMD = r"(?i)rocm|rocr|hip_|rccl|(?<![a-z])(amd|mi\d{2,3}\w?)(?![a-z])"
"""Names of AMD's, whose GPUs a container may see without an option."""
_TRAINS = (
    "program & trains & !build & !open & job:gpus>0"
    f" & !words~{_AMD} & !sbatch:gres~{_AMD} & !sbatch:gpus-per-node~{_AMD}"
)
OF_SETTINGS = (
    *_rows(
        "environment", "docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables",
        ("$CUDA_LAUNCH_BLOCKING=1",
         "CUDA_LAUNCH_BLOCKING=1 has each kernel waited for: it is for debugging, and slow"),
        make=warning,
    ),
    *_rows(
        "docker", _DOCKER,
        (f"{_TRAINS} & !gpus & !runtime & !device & !privileged",
         ("{0} without --gpus has no GPU in the container, unless the runtime of NVIDIA is its"
         " default")),
        ("program & job:nodes>1 & !network & !net & trains & !open",
         ("{0} without --network has a bridge of its own, where other nodes reach the ports that"
         " are published, but NCCL takes any: --network=host shares theirs")),
        ("program & job:processes>1 & !ipc & !shm-size & !v & !volume & !mount & trains & !open",
         ("{0} without --ipc has 64 MB of shared memory: too few for NCCL between the GPUs of a"
         " node")),
        ("program & words~/dev/infiniband & !ulimit & !cap-add & !privileged & trains & !open",
         ("{0} without --ulimit has RDMA devices, but cannot lock memory for them beyond the"
         " daemon's limit")),
        make=warning,
    ),
    *_rows(
        "apptainer", "apptainer.org/docs/user/main/gpu.html",
        ((f"{_TRAINS} & !nv & !nvccli & !rocm & !$APPTAINER_NV & !$APPTAINER_NVCCLI"
          " & !$SINGULARITY_NV & !$SINGULARITY_NVCCLI"),
         "{0} without --nv has no driver in the container, unless apptainer.conf says so"),
        make=warning,
    ),
)  # fmt: skip
"""Settings with which a training is slow, or may lack something."""
