"""What the API server and controllers refuse of objects of Kubernetes."""

from __future__ import annotations

from dshealthd.doctor.job.rules import JobRule, rows

_API = "kubernetes.io/docs/reference/kubernetes-api; validation.go of its types"
_NAMES = "kubernetes.io/docs/concepts/overview/working-with-objects/names"
_KUBERAY = "github.com/ray-project/kuberay, ray-operator/controllers/ray/utils/validation.go"
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
OF_OBJECTS = (
    *rows(
        "JobSpec", _API,
        ("podFailurePolicy & template.spec.restartPolicy=OnFailure|Always",
         "podFailurePolicy takes restartPolicy: Never, not {1}"),
        ("completionMode=Indexed & !completions", "completionMode: Indexed takes completions"),
        ("backoffLimitPerIndex & !completionMode=Indexed",
         "backoffLimitPerIndex takes completionMode: Indexed"),
        ("successPolicy & !completionMode=Indexed", "successPolicy takes completionMode: Indexed"),
        ("podFailurePolicy.rules.onExitCodes.containerName@template.spec.containers.name",
         "podFailurePolicy names the container {0}, which these pods do not have"),
    ),
    *rows(
        "JobSpec object", _API,
        ("spec.template.spec.containers.image & !spec.template.spec.restartPolicy=Never|OnFailure",
         "restartPolicy of a Job must be Never or OnFailure"),
    ),
    *rows(
        "PodSpec", _API,
        ("containers.name*", "two containers are named {0}"),
        ("volumes.name*", "two volumes are named {0}"),
    ),
    *rows(
        "Container", _API,
        ("image & !name~^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
         "a container's name, {1}, has lower-case letters, digits, and at most 63 characters"),
        ("volumeMounts.mountPath*", "{0} is mounted twice"),
    ),
    *rows(
        "EnvVar", _API,
        ("value~. & valueFrom", "a variable has value or valueFrom, not both"),
    ),
    *rows(
        "ObjectFieldSelector", "kubernetes.io/docs/concepts/workloads/pods/downward-api",
        ((r"fieldPath & !fieldPath~^(metadata\.(name|namespace|uid|(labels|annotations)(\['.+'\])?)"
         r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$"),
         "fieldRef cannot take {0}"),
    ),
    *rows(
        "ContainerPort", _API,
        ("name~^.{16,}", "the name {0} of a port has more than 15 characters"),
    ),
    *rows(
        "ResourceRequirements", _API,
        *(
            (f"requests.{name}>limits.{name}", f"{{0}} {name} in requests is above its limit")
            for name in ("cpu", "memory", "ephemeral-storage")
        ),
        *(
            ((f"limits.hugepages-{size} & !limits.cpu & !limits.memory & !requests.cpu"
             " & !requests.memory"), f"hugepages-{size} takes cpu or memory beside it")
            for size in ("2Mi", "1Gi")
        ),
    ),
    *rows(
        "ObjectMeta", _NAMES,
        ("name & !name~^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
         "the name {0} has other characters than lower-case letters, digits, - and ."),
    ),
    *rows(
        "EmptyDirVolumeSource", _API,
        ("medium~. & !medium~^(Memory|HugePages(-.*)?)$", "there is no medium {0}: it is Memory"),
    ),
    *rows(
        "ServiceSpec", _API,
        ("clusterIP=none|NONE|headless", "a headless Service has clusterIP: None, not {0}"),
    ),
    *(
        JobRule(f"{kind} object", r"metadata.name~^\d",
             "its name, {0}, begins with a digit: its Services' names must not", _NAMES)
        for kind in ("JobSetSpec", "PyTorchJobSpec", "RayJobSpec", "RayClusterSpec", "MPIJobSpec")
    ),
    *rows(
        "JobSetSpec", "github.com/kubernetes-sigs/jobset, pkg/webhooks/jobset_webhook.go",
        ("successPolicy.targetReplicatedJobs@replicatedJobs.name",
         "successPolicy names {0}, which is none of its replicatedJobs"),
        ("failurePolicy.rules.targetReplicatedJobs@replicatedJobs.name",
         "failurePolicy names {0}, which is none of its replicatedJobs"),
        ("coordinator.replicatedJob@replicatedJobs.name",
         "coordinator names {0}, which is none of its replicatedJobs"),
        ("replicatedJobs.dependsOn.name@replicatedJobs.name",
         "dependsOn names {0}, which is none of its replicatedJobs"),
    ),
    *rows(
        "PyTorchJobSpec", "github.com/kubeflow/training-operator, pkg/webhooks/pytorch",
        ("pytorchReplicaSpecs.Master.replicas & !pytorchReplicaSpecs.Master.replicas=1",
         "{0} replicas of Master: there is one"),
        ("elasticPolicy.minReplicas>elasticPolicy.maxReplicas",
         "minReplicas {0} is above maxReplicas"),
    ),
    *rows(
        "MPIJobSpec", "github.com/kubeflow/mpi-operator, pkg/apis/kubeflow/validation",
        ("!mpiReplicaSpecs.Launcher", "there is no Launcher in mpiReplicaSpecs"),
    ),
    *rows(
        "RayJobSpec", _KUBERAY,
        ("ttlSecondsAfterFinished>0 & !shutdownAfterJobFinishes=true & !deletionStrategy",
         ("ttlSecondsAfterFinished takes shutdownAfterJobFinishes: true: KubeRay refuses it, and"
         " before 1.4 keeps the cluster and its GPUs")),
        ("!entrypoint & !submissionMode=InteractiveMode & !submitterPodTemplate",
         "it has no entrypoint"),
    ),
    *rows(
        "RayJobSpec object",
        "github.com/kubernetes-sigs/kueue, pkg/controller/jobs/rayjob/rayjob_webhook.go",
        ("metadata.labels[kueue.x-k8s.io/queue-name] & !spec.shutdownAfterJobFinishes=true",
         "Kueue refuses a RayJob without shutdownAfterJobFinishes: true"),
    ),
    *rows(
        "WorkerGroupSpec", _KUBERAY,
        ("minReplicas>maxReplicas", "minReplicas {0} is above maxReplicas"),
        ("replicas>maxReplicas", "replicas {0} is above maxReplicas"),
    ),
    *rows(
        "Trainer",
        "github.com/kubeflow/trainer, pkg/runtime/framework/plugins/torch",
        ("env.name=PET_NNODES|PET_NPROC_PER_NODE|PET_NODE_RANK|PET_MASTER_ADDR|PET_MASTER_PORT",
         "{0} is reserved: the controller sets it itself"),
    ),
)  # fmt: skip
"""What controllers and the API server refuse."""
