"""Each row of the table of rules, with a case on either side of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.doctor.job.rules import JobRule
from dshealthd.doctor.job.rules_of_programs import OF_PROGRAMS, OF_SETTINGS
from tests.doctor.job.asking import job_of_script, results, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TWO = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n"
_PER_TASK = "#SBATCH --ntasks-per-node=4 --gpus-per-task=1\nsrun bash -c '"
_DEVICE = "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"


def here(text: str, *changes: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a script that breaks a row, and one that does not, by what stands at HERE."""
    for wrong, right in changes:
        yield text.replace("HERE", wrong), text.replace("HERE", right)


PROGRAMS: Sequence[tuple[str, str]] = (
    *here("#SBATCH --job-name=HERE\nsrun python train.py\n# import lightning as L\n",
          ("bash", "unet")),
    *here("srun --container-env=HERE python train.py", ("A=1", "A")),
    *here(f"{_TWO}{_PER_TASK} LOCAL_RANK=HERE python train.py'\n# {_DEVICE}",
          ("$SLURM_LOCALID", "0")),
    *here("srun accelerate launch --num_processes 4 --num_machines 2 HERE a.py",
          ("--deepspeed_multinode_launcher pdsh",
           "--use_deepspeed --deepspeed_multinode_launcher standard")),
    *here("srun ray start HERE",
          ("--address=a:6379 &", "--address=a:6379 --block &"),
          ("--head --block\npython a.py", "--head --block &\npython a.py")),
    *here("export HERE\ntorchrun --nproc-per-node=4 a.py",
          ("NCCL_NET=ib NCCL_IB_DISABLE=1", "NCCL_NET=ib NCCL_IB_DISABLE=0"),
          ("GLOO_SOCKET_IFNAME=^docker0", "GLOO_SOCKET_IFNAME=eth0"),
          ("CUDA_LAUNCH_BLOCKING=1", "CUDA_LAUNCH_BLOCKING=0")),
    (f"{_TWO}docker run a torchrun b.py", f"{_TWO}podman run --gpus all a torchrun b.py"),
    *here(f"{_TWO}docker run HERE a torchrun --nnodes=2 --nproc-per-node=4 b.py",
          ("-p 29500:29500", "--network=host"), ("--gpus all", "--ipc=host"),
          ("--shm-size 64", "--shm-size 64g"),
          ("--device=/dev/infiniband", "--device=/dev/infiniband --ulimit memlock=-1")),
    *here(f"{_TWO}srun apptainer exec HERE x.sif torchrun b.py", ("--bind /a:/b", "--nv")),
)  # fmt: skip
"""A script that breaks the row, and one that does not, in the table's order."""


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
