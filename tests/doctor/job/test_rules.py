"""Each row of the table of rules, with a case on either side of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.doctor.job.rules import JobRule
from dshealthd.doctor.job.rules_of_programs import OF_PROGRAMS, OF_SETTINGS
from tests.doctor.job.asking import job_of_script, results, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TORCHRUN = "torchrun --nproc-per-node=4"
_MEGATRON = f"{_TORCHRUN} pretrain.py --micro-batch-size 1 --tensor-model-parallel-size 2"
_TRAINER = f"{_TORCHRUN} train.py --per_device_train_batch_size 1"
_ACCELERATE = "accelerate launch --num_processes 4"
_TWO = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n"
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF="
_BEST = "--load_best_model_at_end true --save_strategy"
_LIGHTNING = "import lightning as L\n"
_PER_TASK = "#SBATCH --ntasks-per-node=4 --gpus-per-task=1\nsrun bash -c '"
_DEVICE = "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
_STAGES = "--pipeline-model-parallel-size"
_VIRTUAL = f"--num-layers 48 {_STAGES} 4 --num-layers-per-virtual-pipeline-stage"
_ZERO = (
    'cat > d.json <<E\n{"zero_optimization": {"stage": HERE}}\nE\ndeepspeed t.py --deepspeed'
    f" --deepspeed_config d.json {_STAGES} 4"
)


def here(text: str, *changes: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a script that breaks a row, and one that does not, by what stands at HERE."""
    for wrong, right in changes:
        yield text.replace("HERE", wrong), text.replace("HERE", right)


PROGRAMS: Sequence[tuple[str, str]] = (
    *here(f"#SBATCH HERE\nsrun python train.py\n# {_LIGHTNING}",
          ("--job-name=bash", "--job-name=unet"), ("--ntasks=8", "--ntasks-per-node=8")),
    *here("srun HERE python train.py",
          ("--container-image=a.sqsh", "--container-image=./a.sqsh"),
          ("--container-env=A=1", "--container-env=A"),
          ("--container-mounts='/a:/a /b:/b'", "--container-mounts=/a:/a,/b:/b")),
    *here(f"{_TWO}{_PER_TASK} LOCAL_RANK=HERE python train.py'\n# {_DEVICE}",
          ("$SLURM_LOCALID", "0")),
    *here(f"{_TORCHRUN} HERE",
          ("--rdzv-backend=nccl train.py", "--rdzv-backend=c10d train.py"),
          ("-m train.py", "-m train"), ("python train.py", "--no-python python train.py")),
    ("deepspeed python train.py", "deepspeed train.py"),
    (f"{_ACCELERATE} python train.py", f"{_ACCELERATE} train.py"),
    *here("deepspeed HERE train.py",
          ("--launcher=openMPI", "--launcher=openmpi"), ("--no_ssh", "--no_ssh --node_rank=0")),
    *here(f"{_ACCELERATE} --use_fsdp --fsdp_HERE",
          ("cpu_ram_efficient_loading true --fsdp_sync_module_states false a.py",
           "cpu_ram_efficient_loading true --fsdp_sync_module_states true a.py"),
          ("auto_wrap_policy TRANSFORMER_WRAP a.py",
           "auto_wrap_policy TRANSFORMER_BASED_WRAP a.py"),
          ("state_dict_type FULL a.py", "state_dict_type FULL_STATE_DICT a.py"),
          ("activation_checkpointing true a.py --gradient_checkpointing true",
           "activation_checkpointing true a.py")),
    *here(f"{_ACCELERATE} --mixed_precision HERE a.py", ("bfloat16", "bf16")),
    *here(f"srun {_ACCELERATE} --num_machines 2 HERE a.py",
          ("--deepspeed_multinode_launcher pdsh",
           "--use_deepspeed --deepspeed_multinode_launcher standard")),
    *here(f"{_TWO}docker run HERE --gpus all a python b.py", ("-it", "-i")),
    *here("docker run --gpus device=HERE a python b.py", ("0,1", "0")),
    *here("srun ray start HERE",
          ("--address=a:6379 &", "--address=a:6379 --block &"),
          ("--head --block\npython a.py", "--head --block &\npython a.py")),
    *here(f"export CUDA_DEVICE_MAX_CONNECTIONS=HERE\n{_MEGATRON} --sequence-parallel", ("8", "1")),
    *here(f"{_MEGATRON} HERE",
          (f"--num-layers 30 {_STAGES} 4", f"--num-layers 32 {_STAGES} 4"),
          (f"{_VIRTUAL} 5", f"{_VIRTUAL} 6"),
          ("--num-attention-heads 7", "--num-attention-heads 8"),
          ("--hidden-size 1000 --num-attention-heads 16",
           "--hidden-size 1024 --num-attention-heads 16"),
          ("--sequence-parallel --expert-model-parallel-size 4 --num-experts 6",
           "--sequence-parallel --expert-model-parallel-size 4 --num-experts 8"),
          ("--expert-model-parallel-size 2", "--expert-model-parallel-size 1"),
          ("--num-experts 8", "--num-experts 8 --sequence-parallel"),
          ("--max-position-embeddings 4096 --seq-length 4097",
           "--max-position-embeddings 4096 --seq-length 4096"),
          ("--save /a", "--save /a --save-interval 9"),
          ("--fp16 --bf16", "--bf16")),
    *here(f"#SBATCH --time=60:00\n{_MEGATRON} --exit-duration-in-mins HERE", ("61", "60")),
    *here(f"{_MEGATRON} --num-layers-per-virtual-pipeline-stage 2HERE", ("", f" {_STAGES} 2")),
    *here(_ZERO, ("2", "1")),
    *here(f"{_TRAINER} HERE",
          ("--fp16 true --bf16 true", "--fp16 false --bf16 true"),
          (f"{_BEST} steps --eval_strategy epoch", f"{_BEST} epoch --eval_strategy epoch"),
          (f"{_BEST} steps --eval_steps 200 --save_steps 500",
           f"{_BEST} steps --eval_steps 200 --save_steps 400"),
          ("--deepspeed a.json --fsdp full_shard", "--fsdp full_shard")),
    *here(f"export HERE\n{_TORCHRUN} a.py",
          ("NCCL_NET=ib NCCL_IB_DISABLE=1", "NCCL_NET=ib NCCL_IB_DISABLE=0"),
          ("GLOO_SOCKET_IFNAME=^docker0", "GLOO_SOCKET_IFNAME=eth0"),
          (f"{_ALLOCATOR}expandable_segments=True",
           f"{_ALLOCATOR}max_split_size_mb:128,expandable_segments:True"),
          (f"{_ALLOCATOR}expandable_segments:1", f"{_ALLOCATOR}expandable_segments:True"),
          ("CUDA_LAUNCH_BLOCKING=1", "CUDA_LAUNCH_BLOCKING=0")),
    (f"{_TWO}docker run a torchrun b.py", f"{_TWO}podman run --gpus all a torchrun b.py"),
    *here(f"{_TWO}docker run HERE a torchrun --nnodes=2 --nproc-per-node=4 b.py",
          ("-p 29500:29500", "--network=host"), ("--gpus all", "--ipc=host"),
          ("--device=/dev/infiniband", "--device=/dev/infiniband --ulimit memlock=-1")),
    *here(f"{_TWO}srun apptainer exec HERE x.sif torchrun b.py", ("--bind /a:/b", "--nv")),
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
    job = job_of_script({"job": f"#!/bin/bash\n{_MEGATRON} {words}\n"})
    assert ("--save takes --save-interval" in texts(results("launcher", job))) == is_told


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
        job = job_of_script({"job": f"#!/bin/bash\n{script}\n", "train.py": program})
        said = texts(results("launcher", job))
        assert (start in said) == (name == "wrong"), (name, said)
