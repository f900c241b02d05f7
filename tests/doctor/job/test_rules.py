"""Each row of the table of rules, with a case on either side of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
import yaml

from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.facts import fields
from dshealthd.doctor.job.rules import JobRule, broken
from dshealthd.doctor.job.rules_of_kubernetes import OF_OBJECTS
from dshealthd.doctor.job.rules_of_programs import OF_PROGRAMS, OF_SETTINGS
from dshealthd.doctor.job.sources import slurm_script
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.source import Source
from tests.doctor.job.asking import results

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEMPLATE = "template: {spec: {restartPolicy: Never, containers: [{name: a}]}}"
_QUEUE = "metadata: {name: a, labels: {kueue.x-k8s.io/queue-name: q}}"
OBJECTS: Sequence[tuple[str, str]] = (
    ("podFailurePolicy: {}\ntemplate: {spec: {restartPolicy: OnFailure}}",
     "podFailurePolicy: {}\ntemplate: {spec: {restartPolicy: Never}}"),
    ("completionMode: Indexed", "completionMode: Indexed\ncompletions: 2"),
    ("backoffLimitPerIndex: 1", "backoffLimitPerIndex: 1\ncompletionMode: Indexed"),
    ("successPolicy: {}", "successPolicy: {}\ncompletionMode: Indexed"),
    (f"podFailurePolicy: {{rules: [{{onExitCodes: {{containerName: b}}}}]}}\n{_TEMPLATE}",
     f"podFailurePolicy: {{rules: [{{onExitCodes: {{containerName: a}}}}]}}\n{_TEMPLATE}"),
    ("spec: {template: {spec: {containers: [{image: a}]}}}",
     "spec: {template: {spec: {restartPolicy: Never, containers: [{image: a}]}}}"),
    ("containers: [{name: a}, {name: a}]", "containers: [{name: a}, {name: b}]"),
    ("volumes: [{name: a}, {name: a}]", "volumes: [{name: a}, {name: b}]"),
    ("{image: a, name: my_trainer}", "{image: a, name: my-trainer}"),
    ("volumeMounts: [{mountPath: /a}, {mountPath: /a}]", "volumeMounts: [{mountPath: /a}]"),
    ("{name: A, value: b, valueFrom: {}}", "{name: A, valueFrom: {}}"),
    ("fieldPath: metadata.podName", "fieldPath: metadata.labels['a']"),
    ("name: torch-rendezvous-1", "name: torch-rdzv"),
    ('{requests: {cpu: "9"}, limits: {cpu: 8500m}}', '{requests: {cpu: "8"}, limits: {cpu: "8"}}'),
    ("{requests: {memory: 2Ti}, limits: {memory: 2047Gi}}",
     "{requests: {memory: 2Ti}, limits: {memory: 2048Gi}}"),
    ("{requests: {ephemeral-storage: 2Gi}, limits: {ephemeral-storage: 2G}}",
     "{requests: {ephemeral-storage: 2G}, limits: {ephemeral-storage: 2Gi}}"),
    *(
        (f"limits: {{hugepages-{size}: 4Gi}}", f"limits: {{hugepages-{size}: 4Gi, memory: 9Gi}}")
        for size in ("2Mi", "1Gi")
    ),
    ("name: My_Job", "name: my-job"),
    ("medium: memory", "medium: Memory"),
    ("clusterIP: none", 'clusterIP: "None"'),
    *([("metadata: {name: 3d-unet}", "metadata: {name: unet-3d}")] * 5),
    *(
        (f"{key.format('b')}\nreplicatedJobs: [{{name: a}}]", f"{key.format('a')}\n{more}")
        for key, more in (
            ("successPolicy: {{targetReplicatedJobs: [{0}]}}", "replicatedJobs: [{name: a}]"),
            (
                "failurePolicy: {{rules: [{{targetReplicatedJobs: [{0}]}}]}}",
                "replicatedJobs: [{name: a}]",
            ),
            ("coordinator: {{replicatedJob: {0}}}", "replicatedJobs: [{name: a}]"),
        )
    ),
    ("replicatedJobs: [{name: a, dependsOn: [{name: b}]}]",
     "replicatedJobs: [{name: a}, {name: c, dependsOn: [{name: a}]}]"),
    ("pytorchReplicaSpecs: {Master: {replicas: 2}}",
     "pytorchReplicaSpecs: {Master: {replicas: 1}}"),
    ("elasticPolicy: {minReplicas: 3, maxReplicas: 2}",
     "elasticPolicy: {minReplicas: 2, maxReplicas: 2}"),
    ("mpiReplicaSpecs: {Worker: {}}", "mpiReplicaSpecs: {Launcher: {}}"),
    ("ttlSecondsAfterFinished: 1", "{ttlSecondsAfterFinished: 1, shutdownAfterJobFinishes: true}"),
    ("rayClusterSpec: {}", "entrypoint: a"),
    (f"{_QUEUE}\nspec: {{}}", f"{_QUEUE}\nspec: {{shutdownAfterJobFinishes: true}}"),
    ("{minReplicas: 3, maxReplicas: 2}", "{minReplicas: 2, maxReplicas: 2}"),
    ("{replicas: 3, maxReplicas: 2}", "{replicas: 2, maxReplicas: 2}"),
    ("env: [{name: PET_NNODES}]", "env: [{name: NCCL_DEBUG}]"),
)  # fmt: skip
"""A mapping that breaks the row, and one that does not, in the table's order."""


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [(rule, *case) for rule, case in zip(OF_OBJECTS, OBJECTS, strict=True)],
    ids=[f"{rule.subject} {rule.when}"[:60] for rule in OF_OBJECTS],
)
def test_objects(rule: JobRule, wrong: str, right: str) -> None:
    """A row speaks of the object that breaks it, not of one that a word changes."""
    of = {name: fields(ManifestFields(yaml.safe_load(name))) for name in (wrong, right)}
    assert broken(rule, of[wrong])
    assert "{" not in broken(rule, of[wrong])
    assert not broken(rule, of[right])


_HEAD = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
_TORCHRUN = "torchrun --nproc-per-node=4"
_MEGATRON = f"{_TORCHRUN} pretrain.py --micro-batch-size 1 --tensor-model-parallel-size 2"
_TRAINER = f"{_TORCHRUN} train.py --per_device_train_batch_size 1"
_ACCELERATE = "accelerate launch --num_processes 4"
_ARRAY = "#SBATCH --array=0-3\n#SBATCH --output="
_TWO = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n"
_LIGHTNING = "import lightning as L\n"
_PER_TASK = "#SBATCH --gpus-per-task=1\nsrun bash -c '"
_DEVICE = "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
_VIRTUAL = (
    "--num-layers 48 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage"
)
_ZERO = (
    'cat > d.json <<E\n{{"zero_optimization": {{"stage": {0}}}}}\nE\ndeepspeed t.py --deepspeed'
    " --deepspeed_config d.json --pipeline-model-parallel-size 4"
)
PROGRAMS: Sequence[tuple[str, str]] = (
    (f"{_ARRAY}run-%A.log\nsrun python train.py", f"{_ARRAY}%A_%a.log\nsrun python train.py"),
    (f"#SBATCH --job-name=bash\nsrun python train.py\n# {_LIGHTNING}",
     f"#SBATCH --job-name=unet\nsrun python train.py\n# {_LIGHTNING}"),
    (f"#SBATCH --ntasks=8\nsrun python train.py\n# {_LIGHTNING}",
     f"#SBATCH --ntasks-per-node=8\nsrun python train.py\n# {_LIGHTNING}"),
    ("srun --container-image=a.sqsh python train.py",
     "srun --container-image=./a.sqsh python train.py"),
    ("srun --container-env=A=1 python train.py", "srun --container-env=A python train.py"),
    ("srun --container-mounts='/a:/a /b:/b' python train.py",
     "srun --container-mounts=/a:/a,/b:/b python train.py"),
    ("srun --container-image=nvcr.io/nvidia/pytorch:24.07-py3 python train.py",
     "srun --container-image='nvcr.io#nvidia/pytorch:24.07-py3' python train.py"),
    (f"{_HEAD}{_PER_TASK} LOCAL_RANK=$SLURM_LOCALID python train.py'\n# {_DEVICE}",
     f"{_HEAD}{_PER_TASK} LOCAL_RANK=0 python train.py'\n# {_DEVICE}"),
    (f"{_TORCHRUN} --rdzv-backend=nccl train.py", f"{_TORCHRUN} --rdzv-backend=c10d train.py"),
    (f"{_TORCHRUN} -m train.py", f"{_TORCHRUN} -m train"),
    (f"{_TORCHRUN} python train.py", f"{_TORCHRUN} --no-python python train.py"),
    ("deepspeed python train.py", "deepspeed train.py"),
    (f"{_ACCELERATE} python train.py", f"{_ACCELERATE} train.py"),
    ("deepspeed --launcher=openMPI train.py", "deepspeed --launcher=openmpi train.py"),
    ("deepspeed --no_ssh train.py", "deepspeed --no_ssh --node_rank=0 train.py"),
    (
        (
            f"{_ACCELERATE} --use_fsdp --fsdp_cpu_ram_efficient_loading true"
            " --fsdp_sync_module_states false train.py"
        ),
        (
            f"{_ACCELERATE} --use_fsdp --fsdp_cpu_ram_efficient_loading true"
            " --fsdp_sync_module_states true train.py"
        ),
    ),
    (f"{_ACCELERATE} --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_WRAP train.py",
     f"{_ACCELERATE} --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP train.py"),
    (f"{_ACCELERATE} --use_fsdp --fsdp_state_dict_type FULL train.py",
     f"{_ACCELERATE} --use_fsdp --fsdp_state_dict_type FULL_STATE_DICT train.py"),
    (
        (
            f"{_ACCELERATE} --use_fsdp --fsdp_activation_checkpointing true a.py"
            " --gradient_checkpointing true"
        ),
        f"{_ACCELERATE} --use_fsdp --fsdp_activation_checkpointing true a.py",
    ),
    (f"{_ACCELERATE} --mixed_precision bfloat16 a.py",
     f"{_ACCELERATE} --mixed_precision bf16 a.py"),
    (
        f"srun {_ACCELERATE} --num_machines 2 --deepspeed_multinode_launcher pdsh a.py",
        (
            f"srun {_ACCELERATE} --num_machines 2 --use_deepspeed --deepspeed_multinode_launcher"
            " standard a.py"
        ),
    ),
    (f"{_HEAD}docker run -it --gpus all a python b.py", f"{_HEAD}docker run -i a python b.py"),
    ("docker run --gpus device=0,1 a python b.py", "docker run --gpus device=0 a python b.py"),
    ("srun ray start --address=a:6379 &", "srun ray start --address=a:6379 --block &"),
    ("srun ray start --head --block\npython a.py", "srun ray start --head --block &\npython a.py"),
    (f"export CUDA_DEVICE_MAX_CONNECTIONS=8\n{_MEGATRON} --sequence-parallel",
     f"export CUDA_DEVICE_MAX_CONNECTIONS=1\n{_MEGATRON} --sequence-parallel"),
    *(
        (f"#SBATCH --time=60:00\n{_MEGATRON} {wrong}", f"#SBATCH -t 1:0:0\n{_MEGATRON} {right}")
        for wrong, right in (
            (
                "--num-layers 30 --pipeline-model-parallel-size 4",
                "--num-layers 32 --pipeline-model-parallel-size 4",
            ),
            (f"{_VIRTUAL} 5", f"{_VIRTUAL} 6"),
            ("--num-attention-heads 7", "--num-attention-heads 8"),
            (
                "--hidden-size 1000 --num-attention-heads 16",
                "--hidden-size 1024 --num-attention-heads 16",
            ),
            (
                "--num-experts 6 --expert-model-parallel-size 4 --sequence-parallel",
                "--num-experts 8 --expert-model-parallel-size 4 --sequence-parallel",
            ),
            ("--expert-model-parallel-size 2", "--expert-model-parallel-size 1"),
            ("--num-experts 8", "--num-experts 8 --sequence-parallel"),
            (
                "--seq-length 4097 --max-position-embeddings 4096",
                "--seq-length 4096 --max-position-embeddings 4096",
            ),
            ("--save /a", "--save /a --save-interval 9"),
            ("--fp16 --bf16", "--bf16"),
            ("--exit-duration-in-mins 61", "--exit-duration-in-mins 60"),
            (
                "--num-layers-per-virtual-pipeline-stage 2",
                "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2",
            ),
        )
    ),
    (_ZERO.format(2), _ZERO.format(1)),
    *(
        (f"{_TRAINER} {wrong}", f"{_TRAINER} {right}")
        for wrong, right in (
            ("--fp16 true --bf16 true", "--fp16 false --bf16 true"),
            (
                "--load_best_model_at_end true --save_strategy steps --eval_strategy epoch",
                "--load_best_model_at_end true --save_strategy epoch --eval_strategy epoch",
            ),
            (
                (
                    "--load_best_model_at_end true --save_strategy steps --save_steps 500"
                    " --eval_steps 200"
                ),
                (
                    "--load_best_model_at_end true --save_strategy steps --save_steps 400"
                    " --eval_steps 200"
                ),
            ),
            ("--deepspeed a.json --fsdp full_shard", "--fsdp full_shard"),
        )
    ),
    (f"export HF_HUB_OFFLINE=1\n{_TRAINER} --push_to_hub true",
     f"export HF_HUB_OFFLINE=0\n{_TRAINER} --push_to_hub true"),
    *(
        (f"export {name}={wrong}\n{_TORCHRUN} a.py", f"export {name}={right}\n{_TORCHRUN} a.py")
        for name, wrong, right in (
            ("NCCL_NET=ib NCCL_IB_DISABLE", "1", "0"),
            ("GLOO_SOCKET_IFNAME", "^docker0", "eth0"),
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "expandable_segments=True",
                "max_split_size_mb:128,expandable_segments:True",
            ),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:1", "expandable_segments:True"),
            ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        )
    ),
    (f"{_TWO}docker run a torchrun b.py", f"{_TWO}podman run --gpus all a torchrun b.py"),
    *(
        (
            f"{_TWO}docker run {wrong} a torchrun --nnodes=2 --nproc-per-node=4 b.py",
            f"{_TWO}docker run {right} a torchrun --nnodes=2 --nproc-per-node=4 b.py",
        )
        for wrong, right in (
            ("-p 29500:29500", "--network=host"),
            ("--gpus all", "--ipc=host"),
            ("--device=/dev/infiniband", "--device=/dev/infiniband --ulimit memlock=-1"),
        )
    ),
    (f"{_TWO}srun apptainer exec --bind /a:/b x.sif torchrun b.py",
     f"{_TWO}srun apptainer exec --nv x.sif torchrun b.py"),
)  # fmt: skip
"""A script that breaks the row, and one that does not, in the table's order."""


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("--save $DIR", True),
        ("--save /a --bf16 --data ${DATA[1]}", True),
        ("--save /a $MORE", False),
        ("--save /a --bf16 $EXTRA_ARGS", False),
        ('--save /a --bf16 "${MORE[@]}"', False),
        ("--save /a --bf16 $@", False),
    ],
)
def test_options_that_a_variable_may_hold(words: str, *, is_told: bool) -> None:
    """An option is not missing where a variable, which is no value, may hold it."""
    parsed = slurm_script.parse(f"#!/bin/bash\n{_MEGATRON} {words}\n", {})
    said = " ".join(one.text for one in results("launcher", JobContext(script=Source("a", parsed))))
    assert ("--save takes --save-interval" in said) == is_told


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [(rule, *case) for rule, case in zip((*OF_PROGRAMS, *OF_SETTINGS), PROGRAMS, strict=True)],
    ids=[f"{rule.subject} {rule.when}"[:60] for rule in (*OF_PROGRAMS, *OF_SETTINGS)],
)
def test_programs(rule: JobRule, wrong: str, right: str) -> None:
    """A row speaks of the script that breaks it, not of one that a word changes."""
    start = rule.text.partition("{")[0][:30] or rule.text.partition("}")[2][:20]
    for name, text in (("wrong", wrong), ("right", right)):
        script, _, program = text.partition("\n# ")
        files = defaultdict(str, {"train.py": program})
        parsed = slurm_script.parse(f"#!/bin/bash\n{script}\n", {}, files.__getitem__)
        given = JobContext(script=Source("job", parsed))
        said = " ".join(one.text for one in results("launcher", given))
        assert (start in said) == (name == "wrong"), (name, said)
