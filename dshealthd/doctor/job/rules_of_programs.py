"""What launchers, trainings and runtimes of containers do with options and variables."""

from __future__ import annotations

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.rules import JobRule, rows

_MEGATRON = "github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py, validate_args"
_STAGES = "pipeline-model-parallel-size"
_UNEVEN = (
    " & !decoder-first-pipeline-num-layers & !decoder-last-pipeline-num-layers"
    " & !account-for-embedding-in-pipeline-split & !account-for-loss-in-pipeline-split"
    " & !pipeline-model-parallel-layout"
)
"""Options of Megatron with which stages need not have as many layers as each other."""
_TRAINER = "huggingface.co/docs/transformers/main_classes/trainer, TrainingArguments"
_FSDP = "github.com/huggingface/accelerate, utils/dataclasses.py, FullyShardedDataParallelPlugin"
_PYXIS = "github.com/NVIDIA/pyxis, README, args.c"
_SLURM = "slurm.schedmd.com/sbatch.html"
_RUN = "docs.pytorch.org/docs/stable/elastic/run.html"
_DOCKER = "docs.docker.com/reference/cli/docker/container/run"
_RAY = "docs.ray.io/en/latest/cluster/vms/user-guides/community/slurm.html"
OF_PROGRAMS = (
    *rows(
        "sbatch", _SLURM,
        ("job-name=bash|interactive & script:text~lightning",
         "Lightning takes a job named {0} for an interactive one, and ignores Slurm's ranks"),
        (("ntasks>1 & !ntasks-per-node & script:text~(?m)^\\s*(import|from)"
         " (lightning|pytorch_lightning)\\b"),
         "Lightning refuses --ntasks={0} without --ntasks-per-node"),
    ),
    *rows(
        "srun", _PYXIS,
        (r"container-image~^[\w.-]+\.(sqsh|sqfs|squashfs)$",
         "--container-image={0} is taken for an image of Docker Hub: a file begins with / or ./"),
        ("container-env~=", "--container-env={0} takes names of variables alone"),
        (r"container-mounts~\s", "--container-mounts={0} has a blank: mounts are joined by commas"),
    ),
    *rows(
        "srun", "docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html",
        (("gpus-per-task=1 & sbatch:ntasks-per-node>1 & !gpu-bind & !$CUDA_VISIBLE_DEVICES"
         r" & !$LOCAL_RANK=0 & script:text~(?i)set_device\([^)]*local & !script:text~device_count"),
         ("with --gpus-per-task=1 a task sees one GPU, which is device 0, but the program chooses"
         " its device by its local rank: `invalid device ordinal`")),
    ),
    *rows(
        "torchrun", _RUN,
        ("rdzv-backend & !rdzv-backend=c10d|etcd|etcd-v2|static|zeus",
         "there is no rendezvous backend {0}"),
        ("m & arguments~^\\S+\\.py$", "-m takes a module, a.b, not the file {1}"),
    ),
    *(
        JobRule(
            launcher, "!no-python & !m & !module & arguments=python|python3",
            f"{launcher} runs Python itself: it takes {{3}} for the script, which it cannot open",
            "--help of the launcher")
        for launcher in ("torchrun", "deepspeed", "accelerate")
    ),
    *rows(
        "deepspeed", "github.com/deepspeedai/DeepSpeed, deepspeed/launcher/runner.py",
        ("launcher & !launcher=pdsh|openmpi|mvapich|slurm|mpich|impi|mosaicml",
         "there is no launcher {0}"),
        ("no-ssh & !node-rank", "--no_ssh takes --node_rank"),
    ),
    *rows(
        "accelerate", _FSDP,
        ("fsdp-cpu-ram-efficient-loading=true|True & fsdp-sync-module-states=false|False",
         "fsdp_cpu_ram_efficient_loading takes fsdp_sync_module_states: true"),
        (("fsdp-auto-wrap-policy & !fsdp-auto-wrap-policy~"
         r"(?i)^(TRANSFORMER_BASED_WRAP|SIZE_BASED_WRAP|NO_WRAP|\d)$"),
         "there is no fsdp_auto_wrap_policy {0}"),
        (("fsdp-state-dict-type & !fsdp-state-dict-type~"
         r"(?i)^((FULL|LOCAL|SHARDED)_STATE_DICT|\d)$"),
         "there is no fsdp_state_dict_type {0}"),
        ("fsdp-activation-checkpointing=true|True & training:gradient-checkpointing=|true|True|1",
         ("activation checkpointing is on in FSDP and in the training (gradient_checkpointing):"
         " Transformers refuses both")),
    ),
    *rows(
        "accelerate", "github.com/huggingface/accelerate, commands/launch.py",
        ("mixed-precision & !mixed-precision=no|False|fp16|bf16|fp8",
         "there is no mixed_precision {0}"),
        (("srun:program & deepspeed-multinode-launcher & nnodes>1"
         " & !deepspeed-multinode-launcher=standard"),
         ("deepspeed_multinode_launcher {1} starts all nodes over SSH, and srun starts it on each"
         " node: everything runs more than once, on the same ports; `standard` starts one node")),
    ),
    *rows(
        "docker", _DOCKER,
        ("sbatch:program & run & tty",
         "docker -t finds no terminal in a batch job: `the input device is not a TTY`"),
        (r"gpus~^device=\w+,\w",
         "--gpus {0}: docker takes a list of devices only in inner quotes, '\"device=0,1\"'"),
    ),
    *rows(
        "ray", _RAY,
        ("start & !block & by=srun",
         "ray start ends at once without --block, and Slurm then ends what srun started"),
        ("start & head & block & by=srun & !end=&",
         "ray start --block never ends, and what follows it never starts: & is missing"),
    ),
    *rows(
        "training", _MEGATRON,
        (("sequence-parallel & tensor-model-parallel-size>1 & $CUDA_DEVICE_MAX_CONNECTIONS"
         " & !$CUDA_DEVICE_MAX_CONNECTIONS=1"),
         ("Megatron takes CUDA_DEVICE_MAX_CONNECTIONS=1 with --sequence-parallel before Blackwell,"
         " not {2}")),
        *(
            (f"num-layers%{stages} & !deepspeed & !pp-partition-method{_UNEVEN}",
             f"{{0}} layers cannot be divided among the {what} of the pipeline")
            for stages, what in (
                (_STAGES, "stages"),
                (f"{_STAGES}*num-layers-per-virtual-pipeline-stage", "virtual stages"))
        ),
        ("num-attention-heads%tensor-model-parallel-size & tensor-model-parallel-size",
         "num_attention_heads {0} is not a multiple of tensor_model_parallel_size {1}"),
        ("hidden-size%num-attention-heads & !kv-channels & tensor-model-parallel-size",
         "hidden size {0} is not a multiple of the attention heads"),
        ("num-experts%expert-model-parallel-size",
         "{0} experts cannot be divided by expert_model_parallel_size"),
        (("expert-model-parallel-size>1 & !num-experts & micro-batch-size"
         " & !use-checkpoint-args"),
         "expert_model_parallel_size {0} takes --num-experts"),
        (("num-experts & tensor-model-parallel-size>1 & !sequence-parallel & micro-batch-size"
          " & !deepspeed"),
         "experts with tensor parallelism take --sequence-parallel"),
        ("seq-length>max-position-embeddings & micro-batch-size",
         "sequences of {0} tokens pass max_position_embeddings"),
        ("save & !save-interval & tensor-model-parallel-size & micro-batch-size",
         "--save takes --save-interval"),
        ("fp16 & bf16 & tensor-model-parallel-size", "fp16 and bf16 are both given"),
        (r"exit-duration-in-mins>job:minutes & sbatch:time~^\d+:\d+$",
         ("--exit-duration-in-mins {0} comes after the end of the job, whose --time={1} is in"
         " minutes and seconds: it is killed before it saves")),
        ("num-layers-per-virtual-pipeline-stage & !pipeline-model-parallel-size>1",
         "virtual stages take a pipeline of several stages"),
    ),
    *rows(
        "training", "github.com/deepspeedai/DeepSpeed, deepspeed/runtime/pipe/engine.py",
        (f"deepspeed & {_STAGES}>1 & !no-pipeline-parallel & config:zero_optimization.stage>1",
         ("ZeRO stage {3} shards gradients, which DeepSpeed's pipeline of {1} stages refuses: it"
          " takes stage 0 or 1")),
    ),
    *rows(
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
    *rows(
        "environment", "docs.pytorch.org/docs/stable/notes/cuda.html",
        ((r"$PYTORCH_CUDA_ALLOC_CONF & !$PYTORCH_CUDA_ALLOC_CONF"
         r"~^\s*\w+:(\w+|[\d.]+|\[[^]]*\])(\s*,\s*\w+:(\w+|[\d.]+|\[[^]]*\]))*\s*,?\s*$"),
         "PYTORCH_CUDA_ALLOC_CONF is NAME:VALUE,..., not {0}"),
        (r"$PYTORCH_CUDA_ALLOC_CONF~expandable_segments:(?!True|False)",
         "expandable_segments is True or False in PYTORCH_CUDA_ALLOC_CONF, not as in {0}"),
    ),
)  # fmt: skip
"""What programs refuse, or do otherwise than is meant, with what they are given."""
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
