"""What launchers, trainings and runtimes of containers do with options and variables."""

from __future__ import annotations

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.rules import rows

_PYXIS = "github.com/NVIDIA/pyxis, README, args.c"
_SLURM = "slurm.schedmd.com/sbatch.html"
_DOCKER = "docs.docker.com/reference/cli/docker/container/run"
_RAY = "docs.ray.io/en/latest/cluster/vms/user-guides/community/slurm.html"
OF_PROGRAMS = (
    *rows(
        "sbatch", _SLURM,
        ("job-name=bash|interactive & script:text~lightning",
         "Lightning takes a job named {0} for an interactive one, and ignores Slurm's ranks"),
    ),
    *rows(
        "srun", _PYXIS,
        ("container-env~=", "--container-env={0} takes names of variables alone"),
    ),
    *rows(
        "srun", "docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html",
        (("gpus-per-task=1 & sbatch:ntasks-per-node>1 & !gpu-bind & !$CUDA_VISIBLE_DEVICES"
         r" & !$LOCAL_RANK=0 & script:text~(?i)set_device\([^)]*local & !script:text~device_count"),
         ("with --gpus-per-task=1 a task sees one GPU, which is device 0, but the program chooses"
         " its device by its local rank: `invalid device ordinal`")),
    ),
    *rows(
        "accelerate", "github.com/huggingface/accelerate, commands/launch.py",
        (("srun:program & deepspeed-multinode-launcher & nnodes>1"
         " & !deepspeed-multinode-launcher=standard"),
         ("deepspeed_multinode_launcher {1} starts all nodes over SSH, and srun starts it on each"
         " node: everything runs more than once, on the same ports; `standard` starts one node")),
    ),
    *rows(
        "ray", _RAY,
        ("start & !block & by=srun",
         "ray start ends at once without --block, and Slurm then ends what srun started"),
        ("start & head & block & by=srun & !end=&",
         "ray start --block never ends, and what follows it never starts: & is missing"),
    ),
    *rows(
        "environment", "docs.nvidia.com/deeplearning/nccl/user-guide, NCCL_NET, NCCL_IB_DISABLE",
        ("$NCCL_NET~(?i)^ib$ & $NCCL_IB_DISABLE~^0*[1-9]",
         "NCCL_NET={0} takes InfiniBand alone, and NCCL_IB_DISABLE={1} disables it: no network"),
    ),
    *rows(
        "environment", "docs.pytorch.org/docs/stable/distributed.html",
        ("$GLOO_SOCKET_IFNAME~[\\^=]",
         "GLOO_SOCKET_IFNAME={0}: Gloo takes names of interfaces alone, without ^ or ="),
    ),
)  # fmt: skip
"""What programs do otherwise than is meant with what they are given."""
_AMD = r"(?i)rocm|rocr|hip_|rccl|miopen|(?<![a-z])(amd|mi\d{2,3}\w?)(?![a-z])"
"""Names of AMD's, whose GPUs a container may see without an option."""
_TRAINS = (
    "program & trains & !build & job:gpus>0"
    f" & !words~{_AMD} & !sbatch:gres~{_AMD} & !sbatch:gpus-per-node~{_AMD}"
    f" & !environment:names~{_AMD}"
)
OF_SETTINGS = (
    *rows(
        "environment", "docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables",
        ("$CUDA_LAUNCH_BLOCKING=1",
         "CUDA_LAUNCH_BLOCKING=1 has each kernel waited for: it is for debugging, and slow"),
        make=warning,
    ),
    *rows(
        "docker", _DOCKER,
        (f"{_TRAINS} & run & !gpus & !runtime & !device & !privileged",
         ("{0} without --gpus has no GPU in the container, unless the runtime of NVIDIA is its"
         " default")),
        ("program & run & job:nodes>1 & !network & !net & trains",
         ("{0} without --network has a bridge of its own, where other nodes reach the ports that"
         " are published, but NCCL takes any: --network=host shares theirs")),
        ("program & run & job:processes>1 & !ipc & !shm-size & !v & !volume & !mount & trains",
         ("{0} without --ipc has 64 MB of shared memory: too few for NCCL between the GPUs of a"
         " node")),
        (r"program & run & job:processes>1 & shm-size~(?i)^\d{1,8}b?$ & !ipc & trains",
         ("--shm-size={3} is in bytes, as it has no unit: too few for NCCL between the GPUs of a"
         " node")),
        ("program & run & words~/dev/infiniband & !ulimit & !cap-add & !privileged & trains",
         ("{0} without --ulimit has RDMA devices, but cannot lock memory for them beyond the"
         " daemon's limit")),
        make=warning,
    ),
    *rows(
        "apptainer", "apptainer.org/docs/user/main/gpu.html",
        ((f"{_TRAINS} & !nv & !nvccli & !rocm & !$APPTAINER_NV & !$APPTAINER_NVCCLI"
          " & !$SINGULARITY_NV & !$SINGULARITY_NVCCLI"),
         "{0} without --nv has no driver in the container, unless apptainer.conf says so"),
        make=warning,
    ),
)  # fmt: skip
"""Settings with which a training is slow, or may lack something."""
