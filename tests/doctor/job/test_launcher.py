"""Launcher commands and batch scripts, held against the launchers' own parsers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dshealthd.doctor.job.sources import launcher_command, slurm_script
from dshealthd.doctor.job.sources.launcher_command import FLAGS, VALUED
from dshealthd.doctor.job.sources.layout import layout
from dshealthd.findings.finding import State
from dshealthd.probe.members.membership import parse_hostfile
from tests.doctor.job.asking import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    asked,
    asked_of_script,
    environment_after,
    faults,
    outcomes,
    results,
    texts,
)

POOL = {"a": 4, "b": 4, "c": 8}
HOSTFILE = "".join(f"{name} slots={slots}\n" for name, slots in POOL.items())
FILTERS: list[dict[str, Any]] = [
    {},
    {"include": "a"},
    {"include": "a@c:0,2"},
    {"include": "c:7@a:1"},
    {"include": "a:1,1"},
    {"include": "a:0@a:1"},
    {"exclude": "b"},
    {"exclude": "b:0@a"},
    {"exclude": "a@b@c"},
    {"num_nodes": 2},
    {"num_gpus": 2},
    {"num_nodes": 1, "num_gpus": 8},
    {"num_nodes": 9},
    {"include": "d"},
    {"include": "a:4"},
    {"exclude": "a:9"},
    {"include": "a", "exclude": "b"},
]
ORACLE = """
import argparse, json, sys
import torch.distributed.run as torchrun
from deepspeed.launcher import runner
class Stop(Exception):
    pass
def stop(parser, *_, **__):
    raise Stop(parser)
def options(parser, flags):
    return sorted({option.lstrip("-").replace("_", "-") for action in parser._actions
                   if (action.nargs == 0) == flags for option in action.option_strings})
argparse.ArgumentParser.parse_args = stop
try:
    runner.parse_args([])
except Stop as stop:
    deepspeed = stop.args[0]
pool, filters = json.load(sys.stdin)
found = []
for one in filters:
    try:
        active = runner.parse_inclusion_exclusion(
            pool, one.get("include", ""), one.get("exclude", ""))
        active = runner.apply_num_nodes_and_gpus(
            active, one.get("num_nodes", -1), one.get("num_gpus", -1))
        found.append({name: len(slots) for name, slots in active.items()})
    except ValueError as error:
        found.append(str(error))
print(json.dumps({
    program: {"flags": options(parser, True), "valued": options(parser, False)}
    for program, parser in (("deepspeed", deepspeed), ("torchrun", torchrun.get_args_parser()))
} | {"filtered": found}))
"""


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    """Return what the installed launchers' own code says of options and filters."""
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, "-c", ORACLE],
        input=json.dumps([POOL, FILTERS]).encode(),
        capture_output=True,
        check=True,
        timeout=100,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("program", ["deepspeed", "torchrun"])
def test_flags_are_the_launchers_own(oracle: dict[str, Any], program: str) -> None:
    """Options without a value are those of the installed launcher; what is read exists there."""
    # torch.distributed.launch, which is torchrun otherwise, has it
    assert sorted(FLAGS[program] - {"use-env"}) == oracle[program]["flags"]
    assert sorted(VALUED[program]) == oracle[program]["valued"]


def test_options_of_accelerate() -> None:
    """All options of the installed Accelerate are known, each with or without a value."""
    launch: Any = pytest.importorskip("accelerate.commands.launch", reason="takes accelerate")
    actions = launch.launch_command_parser()._actions
    for action in actions:
        names = {one.lstrip("-").replace("_", "-") for one in action.option_strings}
        assert names <= (FLAGS if action.nargs == 0 else VALUED)["accelerate"]


def test_filters_as_deepspeed_applies_them(oracle: dict[str, Any]) -> None:
    """Hosts and slots are what DeepSpeed makes of them; none where it refuses."""
    for options, theirs in zip(FILTERS, oracle["filtered"], strict=True):
        words = [f"--{name}={value}" for name, value in options.items()]
        found = layout(
            ranks=None,
            command=launcher_command.parse(["deepspeed", *words, "train.py"], {}),
            requested={},
            members=parse_hostfile(HOSTFILE, "hostfile"),
            variables={},
            gpus=None,
        )
        slots = {} if isinstance(theirs, str) else theirs
        assert dict(found.hosts) == slots, options
        assert found.ranks_per_node == max(slots.values(), default=None), options


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["--hostfile=hosts"], 32),
        (["--hostfile=hosts", "--include=a"], None),
        (["--hostfile=hosts", "$ARGS"], None),
        ([], None),
    ],
)
def test_hostfile_that_the_job_writes(options: list[str], ranks: int | None) -> None:
    """All that Slurm gives the job, unless an option takes a part of it."""
    found = layout(
        ranks=None,
        command=launcher_command.parse(["deepspeed", *options, "train.py"], {}),
        requested={"nodes": "4", "gpus-per-node": "8"},
        members=[],
        variables={},
        gpus=None,
    )
    assert found.ranks == ranks


@pytest.mark.parametrize(
    ("command", "ranks", "nodes"),
    [
        ("torchrun --nnodes=4 --nproc-per-node=8 train.py", 32, 4),
        ("torchrun --nnodes 4 --nproc_per_node 8 train.py", 32, 4),
        ("torchrun --standalone --nproc-per-node=gpu train.py", 8, 1),
        ("torchrun --nnodes=1:4 --nproc-per-node=8 train.py", None, None),
        ("torchrun --nnodes=$N --nproc-per-node=8 train.py", None, None),
        ("python -m torch.distributed.run --nproc-per-node=2 -m package.train", 2, 1),
        ("FOO=1 exec python3.11 -u -m torch.distributed.launch --nproc_per_node=2 x.py", 2, 1),
        ("deepspeed --num_gpus=4 train.py --num_nodes 9", 4, 1),
        ("deepspeed --num_gpu 4 train.py", 4, 1),
        ("deepspeed train.py", 8, 1),
        ("deepspeed '$ARGS' train.py", None, None),
        ("torchrun --nproc-per-node=8 '$DIR/train.py'", 8, 1),  # a path holds no options
        ("srun -N2 --ntasks-per-node=8 python train.py", 16, 2),
        ("srun --nodes=2 --ntasks=16 -l python train.py", 16, 2),
        ("srun -N 2 bash -c 'torchrun --nnodes=2 --nproc-per-node=8 train.py'", 16, 2),
        ("srun -N2 --ntasks-per-node=8 bash -c 'python3 -u train.py --nodes 9'", 16, 2),
        ("srun -N2 -n16 sh -lc 'nvidia-smi; export A=1; exec python train.py'", 16, 2),
        ("srun -n16 -N2 --no-container-mount-home bash -c 'python train.py'", 16, 2),
        ("srun -n16 -N2 --new-flag --other-flag=1 python train.py", 16, 2),
        ("srun --new-flag --nodes=2 --new-option value -n 16 -X numactl -N0 python a.py", 16, 2),
        ("srun --container-image a/b:1 --no-x -N2 --ntasks 16 -J python /bin/python a.py", 16, 2),
        ("srun -N2 --ntasks-per-node=8 --new-option value --new-flag python train.py", 16, 2),
        ("bash -c 'python train.py'", None, None),
        ("accelerate launch --num_processes 16 --num_machines 2 -m train --num_machines 3", 16, 2),
        ("accelerate launch --config_file a.yaml train.py", None, None),
        ("bash -c 'cd /x && torchrun --nproc-per-node=3 t.py > log 2>&1 &'", 3, 1),
    ],
)
def test_ranks(command: str, ranks: int | None, nodes: int | None) -> None:
    """Ranks and nodes come from the launcher's options, never from the script's."""
    found = asked("--gpus-per-node", "8", launch=command).layout
    assert (found.ranks, found.nodes) == (ranks, nodes)


SCRIPT = """
#SBATCH --job-name=train
#SBATCH -N 4
#SBATCH --ntasks-per-node=1 --gres=gpu:h100:8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500 NCCL_DEBUG="INFO"
if [ -n "$X" ]; then echo "don't"; fi

srun torchrun \\
    --nnodes=$SLURM_NNODES --nproc-per-node=8 \\
    --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py --text "a
b"
"""


def test_good_script(tmp_path: Path) -> None:
    """A script as Slurm's users write it is understood and has nothing wrong."""
    job = asked_of_script(tmp_path, SCRIPT, "--gpus-per-node", "8")
    assert (job.layout.ranks, job.layout.nodes, job.layout.ranks_per_node) == (32, 4, 8)
    assert job.variables["NCCL_DEBUG"] == "INFO"
    assert job.rendezvous.port == 29500
    assert job.rendezvous.address == ""  # only a shell knows
    assert outcomes("ranks-and-gpus", job) == [OK]
    (found,) = results("launcher", job)
    assert found.outcome is UNKNOWN
    assert "only the shell that runs it knows --rdzv-endpoint" in found.text
    assert found.remedy.startswith("dshealthd doctor --job -- COMMAND")


STATIC = "torchrun --nnodes=2 --nproc-per-node=8 --master-addr=n1"
ELASTIC = "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=n1:29500"
_ACCELERATE = "accelerate launch --num_machines=2 --num_processes=16 --main_process_ip=n1"
_FROM_HOSTS = "deepspeed --hostfile HOSTFILE"
_SAME = "every node gets --node-rank 0"
COMMANDS = (
    # what stands in the words of srun is one on all nodes, and the static rendezvous needs two
    (f"srun -N2 {STATIC} x.py", _SAME),
    (f"srun -N2 {STATIC} --node_rank=0 x.py", _SAME),
    (f"srun -N2 bash -c '{STATIC} --node-rank=$SLURM_NODEID x.py'", ""),
    (f"srun -N2 env PET_NODE_RANK=$X {STATIC} x.py", ""),
    (f"srun -N2 {ELASTIC} --node_rank=0 x.py", ""),
    (f"srun -N2 {ELASTIC} x.py", ""),
    ("srun -N1 torchrun --nproc-per-node=8 x.py", ""),
    (f"{STATIC} --node_rank=0 x.py", ""),
    (f"srun -N2 {_ACCELERATE} --machine_rank 0 x.py", "every node gets machine_rank 0"),
    (f"srun -N2 {_ACCELERATE} --machine_rank 0 --rdzv_backend c10d x.py", ""),
    (f"srun -N2 {_ACCELERATE} x.py", ""),  # its configuration may say which
    (f"srun -N2 bash -c '{_ACCELERATE} --machine_rank $SLURM_PROCID x.py'", ""),
    # deepspeed reaches all nodes itself
    ("srun -N2 --ntasks-per-node=1 deepspeed x.py", "srun starts deepspeed on each of 2 nodes"),
    ("srun -N2 --ntasks-per-node=1 deepspeed --no_ssh --node_rank=0 x.py", ""),
    ("srun -N1 -n1 deepspeed x.py", ""),
    ("deepspeed x.py", ""),
    # what its launcher refuses
    ("deepspeed --include localhost:0 --num_gpus 1 x.py", "--include and --num_gpus exclude each"),
    ("deepspeed --include localhost:0 x.py", ""),
    ("torchrun --nproc-per-node=8", "is given no script"),
    ("torchrun --nprocs-per-node=8 x.py", "did you mean --nproc-per-node?"),
    ("torchrun --num_gpus=8 x.py", "torchrun has no option --num-gpus: it is one of deepspeed"),
    ("torchrun --of-next-year=8 x.py", ""),
    ("torchrun -e 8 x.py", ""),
    ("torchrun --nproc_per_node= x.py", "--nproc-per-node of torchrun is empty"),
    ("torchrun --nproc_per_node=gpu --nnodes=1:4 x.py", ""),
    ("torchrun x.py --nproc_per_node=8", "--nproc_per_node stands behind the script"),
    ('deepspeed x.py "${ARGS[@]}" --hostfile hosts', "--hostfile stands behind the script"),
    ("torchrun --nproc_per_node=2 x.py --nnodes=8", ""),
    ("accelerate launch --num_proceses 8 x.py", "did you mean --num-processes?"),
    ("accelerate launch --use_fsdp --fsdp_activation_checkpointing_offload true x.py", ""),
    ("accelerate launch --num_process 8 --same_network x.py", ""),  # a prefix of one alone
    ("srun -N1 -n1 bash -c 'python x.py' --lr 1", "bash -c runs 'python x.py' alone"),
    ("srun -N1 -n1 bash -c 'python x.py $@' -- --lr 1", ""),
    ("torchrun $ARGS", ""),
    ("torchrun --nproc-per-node=1 - x", ""),
    # a file, or a variable, may say where ranks run
    ("accelerate launch x.py --num_processes 8", "--num_processes stands behind the script"),
    ("accelerate launch --config_file a.yaml x.py --num_processes 8", ""),
    ("torchrun '$ARGS' x.py --nnodes 2", ""),
    # hosts and slots that are chosen must be in the hostfile
    (f"{_FROM_HOSTS} --include=a:3@c:0,8 x.py", "c has no slot 8: the hostfile gives it 8"),
    (f"{_FROM_HOSTS} --exclude a:4 x.py", "a has no slot 4: the hostfile gives it 4"),
    (f"{_FROM_HOSTS} --include d x.py", "d is not in the hostfile"),
    (f"{_FROM_HOSTS} --include a --exclude b x.py", "--exclude and --include exclude each other"),
    (f"{_FROM_HOSTS} --include=a:3@c:0,7 x.py", ""),
    (f"{_FROM_HOSTS} --exclude '$BAD' x.py", ""),
)
"""Commands, and what is wrong with them."""


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_commands(tmp_path: Path, command: str, words: str) -> None:
    """What a launcher refuses, or cannot start, is found before the job waits for its nodes."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(HOSTFILE)
    (found,) = results("launcher", asked(launch=command.replace("HOSTFILE", str(hostfile))))
    assert found.outcome is (CRITICAL if words else OK)
    assert words in found.text


def test_command_that_is_no_launcher() -> None:
    """A command that starts no launcher is unknown."""
    (found,) = results("launcher", asked(launch="python train.py"))
    assert found.outcome is UNKNOWN
    assert "does not call deepspeed, torchrun or srun" in found.text


def test_inside_the_job() -> None:
    """In a job's own script, Slurm's variables say what the job was given."""
    allocation = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "NCCL_SOCKET_IFNAME": "nosuch0",
    }
    job = asked(launch="srun python train.py", environment=allocation)
    assert (job.layout.ranks, job.layout.nodes, job.gpus_per_node) == (16, 2, 4)
    assert job.hosts == ["n1", "n2"]
    assert len(asked(environment={**allocation, "SLURM_JOB_NODELIST": "n[1-257]"}).hosts) == 256
    alone = asked(environment={**allocation, "MASTER_ADDR": "127.0.0.1"})
    assert outcomes("master-address", alone) == [CRITICAL]
    assert outcomes("ranks-and-gpus", job) == [CRITICAL]
    assert outcomes("nccl-variables", job) == [CRITICAL]  # this node is one of the job's
    tasks = "srun bash -c 'torchrun --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID x.py'"
    job = asked(launch=tasks, environment=allocation)
    torchrun = job.launcher.find("torchrun") if job.launcher else None
    assert torchrun is not None
    assert torchrun.options["node-rank"] == "$SLURM_NODEID"  # another one in each task
    assert torchrun.number("nnodes") == 2
    (found,) = results("launcher", asked(launch="torchrun --nnodes=2 x.py", environment=allocation))
    assert "srun is missing" in found.text


_IN_TURN = "#SBATCH -N 1 --gres=gpu:8\n" + "torchrun --nproc-per-node=4 {0} x.py\n" * 2
_AT_ONCE = _IN_TURN.replace("x.py", "x.py &") + "wait"
_STEP = f"srun --nodes=1 -w $h {STATIC.replace('=2', '=4')} --node-rank=$r x.py"
_LOOP = (
    "#SBATCH --nodes=4 --gpus-per-node=8\nr=0\nfor h in $(scontrol show hostnames); do\n{}\n((r++))"
    "\ndone\nwait"
)
_TASK_OF_EIGHT = "#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=8\n"
_FOUR, _EIGHT = "#SBATCH --gres=gpu:a100:4\n", "#SBATCH --gpus-per-node=8\n"
_BY_SSH = (
    "HOSTS=({hosts})\nfor h in ${{HOSTS[@]}}; do\nssh $h bash -s <<EOF\ndocker run --gpus all"
    " {options} x \\\n  torchrun --nnodes=${{#HOSTS[@]}} --nproc-per-node=1"
    " --master_addr=${{HOSTS[0]}} x.py\nEOF\ndone"
)
_NONE = "#SBATCH -n 2 --export=NONE\nexport MASTER_ADDR=a\nsrun python x.py"
_COMPONENTS = (
    "#SBATCH --nodes=1 --ntasks=1\n#SBATCH hetjob\n#SBATCH --nodes=2\n"
    "HOST=$(scontrol show hostnames $SLURM_JOB_NODELIST_HET_GROUP_1 | head -n 1)\n"
)
_ONE_PORT = "launches at once on one node share the port 29500"
_NO_DRIVER, _BRIDGE = "without --nv has no driver", "without --network has a bridge of its own"
_OF_JOB = "localhost has no slot 2: the job gives it 2"
SCRIPTS = (
    # deepspeed without a hostfile starts on one node
    ("#SBATCH -N 2\ndeepspeed x.py", WARNING, "deepspeed starts on the first alone"),
    ("#SBATCH -N 2 --gpus-per-node=8\ndeepspeed x.py", WARNING, "starts on the first alone"),
    ("#SBATCH -N 2\ndeepspeed -H hosts x.py", OK, ""),
    ("#SBATCH -N 1\ndeepspeed x.py", OK, ""),
    # a step has no more nodes than tasks, and Slurm chooses the nodes of a range
    ("#SBATCH -N 2\nsrun deepspeed -H hosts x.py", CRITICAL, "deepspeed on each of 2 nodes"),
    ("#SBATCH -N 2\nsrun -n 1 deepspeed -H hosts x.py", OK, ""),
    ("#SBATCH -N 2\nsrun -n 1 torchrun --nnodes=2 x.py", CRITICAL, "waits for 2 nodes, but Slurm"),
    (_LOOP.format(f"{_STEP.replace('--nodes=1', '-n 1')} &"), OK, ""),
    (f"#SBATCH -N 2-4\nsrun {ELASTIC.replace('=2', '=$SLURM_NNODES')} x.py", OK, ""),
    # what runs on the first node before the launch is none of it
    (f"#SBATCH -N 2\ntorchrun --standalone prepare.py\nsrun {ELASTIC} x.py", OK, ""),
    # a task with several GPUs may start a process for each
    *(
        (f"{_TASK_OF_EIGHT}export WORLD_SIZE={size}\nsrun python x.py", outcome, words)
        for size, outcome, words in ((16, OK, ""), (8, CRITICAL, "WORLD_SIZE=8, but 2 ranks start"))
    ),
    (f"{_TASK_OF_EIGHT}srun python x.py --devices 0", OK, ""),
    (f"{_TASK_OF_EIGHT}srun python x.py --devices 2", CRITICAL, "wants 2 processes (devices)"),
    # a program without a GPU does not load torch
    ("#SBATCH -N 1 -n 1 --mem=100\nsrun python x.py", OK, ""),
    ("#SBATCH -N 1 -n 1 --gres=gpu:1 --mem=100\nsrun python x.py", CRITICAL, "100 MiB of memory"),
    ("#SBATCH --cluster=a\ntorchrun x.py", OK, ""),
    ("torchrun x.py\n--nnodes=2", CRITICAL, "bash runs --nnodes=2 as a command"),
    ("date\nexport PORT=1${SLURM_JOB_ID:(-4)}\ntorchrun x.py", OK, ""),
    ("date\nBIND='bind --cpu=bind.sh --'\n$LOGGER $BIND torchrun x.py", OK, ""),
    # GPUs that are chosen must be among those that Slurm gives, which begin with 0
    *(
        (f"#SBATCH -N 1 --gres=gpu:a100:2\ndeepspeed {options} x.py", outcome, words)
        for options, outcome, words in (
            ("--include localhost:2,3", CRITICAL, _OF_JOB),
            ("--exclude localhost:2", CRITICAL, _OF_JOB),
            ("--include localhost:0,1", OK, ""),
            ("--include n1:2,3", OK, ""),  # of a hostfile where the job runs
            ("--hostfile later --include localhost:2,3", OK, ""),
        )
    ),
    # without its variable, what `#SBATCH --export` says holds for the job alone
    (_NONE, CRITICAL, "--export=NONE holds for srun, too"),
    (_NONE.replace("srun", "unset SLURM_EXPORT_ENV\nsrun"), OK, ""),
    # what only shows a variable does not pass it on
    (_NONE.replace("srun", "echo $MASTER_ADDR\nsrun"), CRITICAL, "holds for srun, too"),
    (_NONE.replace("srun", "echo $MASTER_ADDR > here\nsrun"), OK, ""),
    # launches that run at once on a node cannot share a port
    (_AT_ONCE.format(""), CRITICAL, _ONE_PORT),
    (_AT_ONCE.format("--standalone"), OK, ""),
    (_AT_ONCE.format("--rdzv-endpoint=localhost:0"), OK, ""),
    (_AT_ONCE.format("--master-port=$1"), OK, ""),
    (_AT_ONCE.format("$ARGS"), OK, ""),
    (_IN_TURN.format(""), OK, ""),
    # steps of one node each, that run at once, are all nodes for which torchrun waits
    *(
        (_LOOP.format(run.format(_STEP)), OK, "")
        for run in ("{} &", "({}) &", "{{ {}; }} > log 2>&1 &", "(\n{}\n) &")
    ),
    # a runtime gives a container GPUs, shared memory and a network as its options say
    (f"{_FOUR}srun apptainer exec --bind /a:/b x.sif bash -c 'torchrun x.py'", WARNING, _NO_DRIVER),
    ("#SBATCH --gpus-per-node=H100:4\nsrun /opt/bin/singularity exec x.sif python x.py", WARNING,
     _NO_DRIVER),
    (f"{_FOUR}srun apptainer exec x.sif torchrun --nproc-per-node=4 x.py --run=$NAME", WARNING,
     _NO_DRIVER),
    *(
        (f"{_FOUR}srun apptainer exec {options} torchrun --nproc-per-node=4 x.py", outcome, words)
        for options, outcome, words in (
            ("-B /a:/b,$PWD:/c -B $HOME/a:/d x.sif", WARNING, _NO_DRIVER),
            ("-B $HOME/a:/d $ROCM_IMAGES/x.sif", OK, ""),
            ("-B $HOME/a:/d ${NV:+--nv} x.sif", OK, ""),
        )
    ),
    (f"{_FOUR}srun apptainer exec --nvccli x.sif torchrun x.py", OK, ""),
    (f"{_FOUR}srun apptainer exec $FLAGS x.sif torchrun x.py", OK, ""),
    (f"{_FOUR}export APPTAINER_NV=1\nsrun apptainer run x.sif torchrun x.py", OK, ""),
    (f"{_FOUR}srun torchrun x.py", OK, ""),
    ("#SBATCH --gres=gpu:mi250:8\nsrun singularity exec x.sif torchrun x.py", OK, ""),
    (f"{_EIGHT}srun singularity exec rocm6.sif torchrun x.py", OK, ""),
    (f"{_EIGHT}srun singularity exec --rocm x.sif torchrun x.py", OK, ""),
    (f"{_FOUR}docker run --gpus all x torchrun --nproc-per-node=4 x.py", WARNING, "without --ipc"),
    (f"{_FOUR}docker run --ipc=host x torchrun --nproc-per-node=4 x.py", WARNING, "without --gpus"),
    (f"{_FOUR}docker run $ARGS x torchrun --nproc-per-node=4 x.py", OK, ""),
    (f"{_FOUR}docker exec a torchrun --nproc-per-node=4 x.py", OK, ""),  # of one that runs
    (f"{_FOUR}export MIOPEN_USER_DB=/a\nsrun singularity exec x.sif torchrun x.py", OK, ""),
    (f"{_FOUR}srun bash -c 'docker run --ipc=host x torchrun --nproc-per-node=4 x.py'", WARNING,
     "without --gpus"),
    # what ssh has a shell read is a script: of a container there, with the hosts of an array
    *(
        (_BY_SSH.format(options=options, hosts=hosts), outcome, words)
        for options, hosts, outcome, words in (
            ("", "n1 n2", WARNING, _BRIDGE),
            ("--network=host", "n1 n2", OK, ""),
            ("-p 29500:29500", "n1 n2", WARNING, _BRIDGE),
            ("", "n1", OK, ""),
            ("--network=host --device=/dev/infiniband", "n1 n2", WARNING, "without --ulimit"),
            ("--network=host --device=/dev/infiniband --ulimit memlock=-1", "n1 n2", OK, ""),
        )
    ),
    # without #SBATCH, nothing is known of the job that it runs in
    (f"srun -N2 {ELASTIC.replace('=2', '=$SLURM_NNODES')} x.py", OK, ""),
    # a step has the nodes of its component of a heterogeneous job, if that is known
    *(
        (f"{_COMPONENTS}srun {of} -N 2 {ELASTIC.replace('n1', '$HOST')} x.py", outcome, words)
        for of, outcome, words in (
            ("--het-group=0", CRITICAL, "srun asks for 2 nodes, but the job has 1"),
            ("--het-group=1", OK, ""),
            ("--het-group=2", OK, ""),
            ("--het-group=0,1", OK, ""),
        )
    ),
    # what the shell of the script computes is one value for all nodes
    *(
        (f"{head}\nPORT={port}\nsrun -N2 {ELASTIC.replace('29500', '$PORT')} x.py", OK, "")
        for head in ("#SBATCH --nodes=2", "")
        for port in (
            *("$((20000 + RANDOM % 10000))", "$((20000 + $$ % 10000))", "$RANDOM"),
            "$(hostname | cksum)",
        )
    ),
)  # fmt: skip
"""Scripts, and what is wrong with them."""


@pytest.mark.parametrize(("text", "outcome", "words"), SCRIPTS)
def test_scripts(tmp_path: Path, text: str, outcome: State, words: str) -> None:
    """A script that cannot do what it says has one result, and none in another form."""
    found = faults("launcher", asked_of_script(tmp_path, text))
    assert [one.outcome for one in found] == [outcome] * bool(words), found
    assert words in texts(found)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("-N 2", "srun is missing"),
        *(
            (head, "srun starts torchrun 2 times on each node")
            for head in ("--nodes=2 --ntasks=4", "--ntasks=4", "-N2 -n4", "-N2 --ntasks-per-node=2")
        ),
    ],
)
def test_torchrun_once_on_each_node(tmp_path: Path, head: str, words: str) -> None:
    """Torchrun starts once on each node, however tasks are requested; the remedy does it."""
    step = "torchrun" if "missing" in words else "srun torchrun"
    text = f"#SBATCH {head}\n{step} --nnodes=2 --rdzv-backend=c10d x.py"
    (found,) = results("launcher", asked_of_script(tmp_path, text))
    assert words in found.text
    mended = text.replace(step, found.remedy.removesuffix(" ..."))
    assert outcomes("launcher", asked_of_script(tmp_path, mended)) == [OK]


@pytest.mark.parametrize(
    ("first", "program"),
    [
        ("#!/bin/tcsh -f", "tcsh"),
        ("#!/usr/bin/env -S LANG=C python3 -u", "python3"),
        ("#! /usr/bin/zsh", "zsh"),
        ("#!/usr/bin/env fish", "fish"),
        ("#!/usr/bin/env bash", ""),
        ("#! /bin/sh -e", ""),
    ],
)  # fmt: skip
def test_script_of_another_language(tmp_path: Path, first: str, program: str) -> None:
    """What is no script for sh is not judged as one, nor where another script runs it."""
    job, inner = tmp_path / "job.sh", tmp_path / "node.sh"
    job.write_text(f"{first}\n#SBATCH --nodes=2 --signal=B:USR1@60\ntorchrun\n")
    said = texts(results("launcher", asked(str(job))))
    assert (f"only #SBATCH lines of a script for {program} are read" in said) == bool(program)
    assert ("srun is missing" in said) == ("nothing traps USR1" in said) == (not program)
    assert asked(str(job)).layout.nodes == (2 if program else 1)
    inner.write_text(f"{first}\ntorchrun --nnodes=3\n")
    job.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun ./node.sh\n")
    assert asked(str(job)).layout.nodes == (2 if program else 3)


def test_step_of_each_node_in_a_loop(tmp_path: Path) -> None:
    """Steps that a loop starts one after the other are each one node of those that it waits for."""
    found = faults("launcher", asked_of_script(tmp_path, _LOOP.format(_STEP)))
    says = ["the loop waits for each node's torchrun", "waits for 4 nodes, but Slurm gives"]
    assert [words in one.text for words, one in zip(says, found, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("ranks", "launch", "words"),
    [
        (8, "python x.py", "mpirun -np 8, but its nodes have 16 GPUs: idle"),
        (16, "python x.py", ""),
        (2, "python x.py", ""),  # one on each node may start the others
        (8, "torchrun --nproc-per-node=8 x.py", ""),
        (8, "./all_reduce_perf -g 2", ""),
    ],
)
def test_ranks_of_mpirun(tmp_path: Path, ranks: int, launch: str, words: str) -> None:
    """What mpirun starts has a rank for each GPU of the job."""
    text = f"#SBATCH -N 2 --gpus-per-node=8\nmpirun -np {ranks} {launch}"
    found = [one.text for one in faults("launcher", asked_of_script(tmp_path, text))]
    assert any("idle GPUs" in one for one in found) == bool(words)
    assert words in " ".join(found)


def test_hosts_of_a_loop_over_ssh(tmp_path: Path) -> None:
    """What ssh starts on the hosts of an array has its nodes and its first host."""
    made = asked_of_script(tmp_path, _BY_SSH.format(hosts="n1 n2", options=""))
    assert (made.rendezvous.address, made.layout.nodes) == ("n1", 2)
    for hosts, nodes in (("n1 n2 n3", 3), ("$(cat hosts)", 1)):
        text = f'H="{hosts}"\nssh n1 torchrun --nnodes=$(echo $H | wc -w) --node-rank=0 x.py'
        assert asked_of_script(tmp_path, text).nodes == nodes


WHOLE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --time=1-0 --signal=B:USR1@300
trap 'scontrol requeue $SLURM_JOB_ID' USR1
export MASTER_ADDR=$(hostname) MASTER_PORT=29500 WORLD_SIZE=16
ARGS=(--tensor-model-parallel-size 4 --global-batch-size=64 --micro-batch-size 2)
srun --export=ALL bash -c 'python train.py trainer.num_nodes=2 '"${ARGS[*]}" & wait
"""


WRONG = (
    ("num_nodes=2", "num_nodes=4", "python waits for 4 nodes, but Slurm gives the job 2"),
    ("ARGS=(", "#SBATCH --exclusive\nARGS=(", ":6: Slurm ignores #SBATCH after the first command"),
    ("WORLD_SIZE=16", "WORLD_SIZE=2", "WORLD_SIZE=2, but 16 ranks start"),
    ("-size 4", "-size 3", "16 ranks (srun) cannot be divided into groups of tensor_model"),
    ("=64", "=63 --local_batch_size=2", "global_batch_size 63 is not a multiple of micro_batch_s"),
    ("=64", "=60",
     "global_batch_size 60 is not a multiple of micro_batch_size x data-parallel ranks = 8"),
    ("WORLD_SIZE=16", "WORLD_SIZE=$((SLURM_NTASKS * 2))", "WORLD_SIZE=32, but 16 ranks start"),
    ("export MASTER", "MASTER", "sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, but does not pass"),
    ("=ALL", "=WORLD_SIZE", "sets MASTER_ADDR, MASTER_PORT, but does not pass them on"),
    *(
        ("trap 'scontrol requeue $SLURM_JOB_ID' USR1", other, "nothing traps USR1, which ends")
        for other in ('eval "$(conda shell.bash hook)"', 'export "$1"=2')
    ),
    ("B:USR1", "USR1", "only srun's tasks get it, not the shell that traps it: B: is missing"),
    ("& wait", "", "the trap runs only when srun ends"),
    ("B:USR1", "B:USR2", "nothing traps USR2, which ends the shell: the trap is for USR1"),
    ("B:USR1", "B:12", "nothing traps USR2, which ends the shell: the trap is for USR1"),
    ("USR1\n", "ERR\n", "nothing traps USR1, which ends the shell"),
    ("trap 'scontrol requeue $SLURM_JOB_ID' USR1\n", "source /opt/conda/bin/activate\n",
     "nothing traps USR1, which ends the shell"),
    ("--time", "--mem=8G --mem-per-cpu=1G --time", "--mem and --mem-per-cpu exclude each other"),
    ("--time", "-c 4 --cpus-per-gpu=4 --time", "--cpus-per-gpu and --cpus-per-task exclude"),
    ("srun", "srun --mem=0 --mem-per-gpu=9G", "--mem and --mem-per-gpu exclude each other: srun"),
    ("=ALL bash", "=WORLD_SIZE container --module=gpu bash",
     "sets MASTER_ADDR, MASTER_PORT, but does not pass them on"),
    *(
        ("$(hostname)", address, f"MASTER_ADDR {shown}")
        for address, shown in (
            (
                "$(echo $SLURM_JOB_NODELIST | cut -d, -f1)",
                "${SLURM_JOB_NODELIST} is a list of nodes",
            ),
            ("${SLURM_NODELIST%%,*}", "${SLURM_NODELIST%%,*} is a list of nodes"),
            ("$(scontrol show hostnames)", "${NAMES_OF_ALL_NODES} is a list of nodes"),
            ("$(hostname -I)", "${ALL_OWN_ADDRESSES} is a list of all addresses"),
            ("'n1 n2'", "n1 n2 cannot be a host"),
        )
    ),
    ("--time", "--gpu-per-node=8 --time", "no option --gpu-per-node: did you mean --gpus-per"),
    ("--time=1-0", "-t=1-0", "--time of sbatch is '=1-0', which it cannot be"),
    ("srun", "srun -n $SLURM_TASKS_PER_NODE", "--ntasks of srun is '8(x2)', which it cannot"),
    ("srun", "srun --gpus-per-task=$SLURM_GPUS_PER_TASK",
     "--gpus-per-task of srun is empty: Slurm sets SLURM_GPUS_PER_TASK only with --gpus-per"),
    ("JOB_ID'", "JOB_ID_$SLURM_NODEID'", "reads SLURM_JOB_ID_, which is never set: ${SLURM_J"),
    ("JOB_ID'", "JOB_ID_HET_GROUP'", "reads SLURM_JOB_ID_HET_GROUP, which is never set"),
    ("srun", "srun --het-group=0 --nodes=4", "srun asks for 4 nodes, but the job has 2"),
    ("JOB_ID'", "JOBS_ID'", "reads SLURM_JOBS_ID, which is never set: ${SLURM_JOB_ID} is meant"),
    ("JOB_ID'", "START_TIME'", "reads SLURM_START_TIME, which is never set: ${SLURM_JOB_START"),
    ("JOB_ID'", "JOB_ID $RUN_'", "reads RUN_, which is never set: ${RUN} is meant"),
    ("'python", "'RANK=$SLURM_LOCALID python", "RANK $SLURM_LOCALID is another number: SLURM_L"),
    ("'python", "'LOCAL_RANK=$SLURM_PROCID python", "LOCAL_RANK $SLURM_PROCID is another numb"),
    *(
        ("PORT=29500", f"PORT={port}", " is the job's number, which passes 65535")
        for port in ("$SLURM_JOB_ID", "$((10000 + SLURM_JOBID))")
    ),
    ("#!/bin/bash\n", "\n", "does not begin with #!: sbatch refuses it"),
    ("#!/bin/bash\n", "#!/bin/bash\r\n", "lines that end with CR LF: sbatch refuses it"),
    ("'python", "'RANK=$OMPI_COMM_WORLD_RANK python", "reads OMPI_COMM_WORLD_RANK, which is n"),
    ("srun", "N=2\ncat > n.sh <<'EOF'\necho $N $M ${D:-1}\nEOF\nsrun bash n.sh\nsrun",
     "sets N, but does not pass it on to the ranks: `export` is missing"),
    *(
        ("srun", f"N=2\n{text}\nsrun", "sets N, but does not pass it on to the ranks")
        for text in (
            "B=$(cat <<'E'\necho $N\nE\n)\nsrun bash -c \"$B\"",
            'B="$(cat <<E\necho \\$N\nE\n)"\nsrun bash -c "$B"',
            "read -r -d '' B <<'E' || true\necho $N\nE\nsrun bash -c \"$B\"",
            'B=\'echo $N\'\nC="$B; date"\nsrun bash -c "$C"',
            "srun bash -c 'echo $N'",
            "srun bash <<'E' | tee log\necho $N\nE",
            "cat <<E | srun bash\necho \\$N\nE",
            "cat > n.sh <<'E'\necho $N\nE\nsrun ./n.sh",
        )
    ),
    ("srun", "A1=1 B2=1 C3=1 D4=1 E5=1\nsrun bash -c 'echo $D4 $B2 $E5 $A1 $C3'\nsrun",
     "sets A1, B2, C3, D4, E5, but does not pass them on"),
    ("--export=ALL bash", "--export=NONE bash", "--export=NONE holds for srun, too"),
    *(
        ("srun", f"srun {options} nvidia-smi dmon &\nsrun", "the next srun waits until it ends")
        for options in ("", "--gpus-per-node=4", "-N1 -n1", "-c 1 --exact", "--gpus=1 --nodes=1")
    ),
    ("@300\n", "@300\n#SBATCH hetjob\n#SBATCH -N 1 --gpus=8\n",
     "component 1 of the job has 8 GPUs, but its steps take none"),
    ("srun", "srun --gpus-per-node=4", "the job has 16 GPUs, but its steps take 8 of them"),
    ("1-0", "5", "it comes 300 s before the end of a job that has 300 s"),
    ("1-0 --signal=B:USR1@300", "1 --signal=B:USR1", "it comes 60 s before the end of a job that"),
    *(
        ("1-0 --signal=B:USR1@300", f"{limit} --signal=B:USR1@{shown}",
         f"it comes {shown} s before the end of a job that has {shown} s")
        for limit, shown in (("1-0", 86_400), ("1:00:00", 3600))
    ),
    ("1-0", "00:04:59", "it comes 300 s before the end of a job that has 299 s"),
    ("--nodes=2 --n", "--nodes=$N --n", "#SBATCH --nodes=$N is read as it stands"),
    ("--nodes=2 --ntasks-per-node=8", "--nodes=2 --ntasks=1", "1 task for 2 nodes: Slurm"),
    ("srun", "srun --nodes=4", "srun asks for 4 nodes, but the job has 2"),
    ("srun", "srun --gres=gpu:9", "srun asks for 9 GPUs on each node, but the job has 8"),
    ("=2 '", "=2 trainer.devices=4 '", "wants 4 processes (devices), but srun starts 8"),
    ("--time", "--mem=2047 --time",
     "2047 MiB of memory on a node, where its processes take more than 2048"),
    ("--time", "--mem-per-cpu=255M --time", "2040 MiB of memory on a node"),
    ("wait", "true", "starts the job in the background and ends"),
    *(
        ("srun", f"{run}srun python prepare.py\n--export=NONE \nsrun", "bash runs --export=NONE as")
        for run in ("", 'run() { "$@"; }\nrun ')
    ),
    ("bash -c 'python", "bash -c 'MASTER_PORT=$(shuf -i 20000-30000 -n 1) python",
     "MASTER_PORT ${RANDOM} is another on each node"),
    ("bash -c 'python", "bash -c 'MASTER_ADDR=$(hostname) python",
     "MASTER_ADDR ${HOSTNAME} is another on each node"),
    ("bash -c 'python", "bash -c 'MASTER_PORT=$((20000 + RANDOM % 10000)) python",
     "MASTER_PORT ${RANDOM} is another on each node"),
    ("bash -c 'python", "bash -c 'MASTER_PORT=$((20000 + $$ % 10000)) python",
     "MASTER_PORT ${BASHPID} is another on each node"),
)  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "words"), WRONG)
def test_quantities_that_disagree(tmp_path: Path, right: str, wrong: str, words: str) -> None:
    """Each quantity of a script that another source contradicts has one result, and no other."""
    file = tmp_path / "job.sh"
    assert right in WHOLE
    file.write_text(WHOLE.replace(right, wrong))
    found = faults("launcher", asked(str(file)))
    assert [words in one.text for one in found] == [True], texts(found)


@pytest.mark.parametrize(
    ("limit", "argument", "words"),
    [
        # an hour
        ("60:00", "--exit-duration-in-mins 61", "--time=60:00 is 1 hour"),
        ("60:00", "--exit-duration-in-mins 60", ""),
        ("60:00", "--exit-duration-in-mins 61 --exit-signal-handler", ""),
        ("60:00 --signal=USR1@60", "--exit-duration-in-mins 61", ""),
        # the program's own unit, in its name, behind its value, or a clock's
        ("24:00", "--save-every-minutes=120", "--save-every-minutes 120 comes after the end of"),
        ("48", "trainer.max_time=01:23:30:00", "--time=48 is 48 minutes"),
        ("2-0", "trainer.max_time=01:23:30:00", ""),
        ("2-0", "trainer.max_time=02:00:00:01", "--time=2-0 is 2 days"),
        ("90", "--ckpt_interval 1.5h", ""),
        ("90", "--ckpt_interval 1.6h", "--time=90 is 1 hour and 30 minutes"),
        ("0", "--max-hours 9", ""),  # no limit
        # what is no time, or of something else
        ("90", "--save-interval 1000 --max-steps 9d --max_audio_hours 960", ""),
        ("90", "--save-timeout-minutes 120 --checkpoint-wait-hours 3", ""),
    ],
)
def test_time_that_a_training_does_not_have(
    tmp_path: Path, limit: str, argument: str, words: str
) -> None:
    """What saves or ends only after the job's end, as Slurm reads it, does not happen."""
    text = f"#SBATCH --time={limit}\nsrun torchrun --nproc-per-node=8 x.py {argument}"
    found = faults("launcher", asked_of_script(tmp_path, text))
    assert [words in one.text for one in found] == [True] * bool(words), found


_NEW_PORT = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))  # in the script"
_FIRST_HOST = "scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script"


@pytest.mark.parametrize(
    ("launch", "words", "remedy"),
    [
        ("srun deepspeed -H a x.py", "on each of 2 nodes",
         "deepspeed --hostfile=FILE ...  # no srun"),
        ("srun --ntasks-per-node=2 deepspeed --no_ssh --node_rank=0 x.py", "2 times on each node",
         "srun --ntasks-per-node=1 deepspeed ..."),
        ("srun --ntasks-per-node=2 python x.py --num_nodes 4", "python waits for 4 nodes",
         "srun python SCRIPT --num_nodes=2 ..."),
        (f"srun {ELASTIC.replace('=2', '=4')} x.py", "torchrun waits for 4 nodes",
         "torchrun --nnodes=2 ..."),
        ("deepspeed x.py", "deepspeed", "deepspeed --hostfile=FILE ..."),
        ("deepspeed --num_gpus=8 x.py", "deepspeed", "deepspeed --hostfile=FILE ..."),
        # what each node's shell makes anew: a port, or a host
        (f"srun bash -c '{ELASTIC.replace('29500', '$(shuf -i 20000-30000 -n 1)')} x.py'",
         "n1:${RANDOM} is another on each node", _NEW_PORT),
        (f"srun bash -c '{ELASTIC.replace('n1', '$(hostname)')} x.py'",
         "${HOSTNAME}:29500 is another on each node", _FIRST_HOST),
    ],
)  # fmt: skip
def test_remedies(tmp_path: Path, launch: str, words: str, remedy: str) -> None:
    """What a launcher does wrong has a remedy of this launcher, for what it is."""
    job = asked_of_script(tmp_path, f"#SBATCH -N 2 --gpus-per-node=8\n{launch}")
    said = [one for one in results("launcher", job) if words in one.text]
    assert [one.remedy for one in said] == [remedy]


RIGHT = (
    ("B:USR1", "B:USR1"),
    # a signal 300 s before the end comes while the job runs, in each form of the limit
    ("1-0", "6"),
    ("1-0", "05:01"),
    ("1-0", "0-1"),
    ("B:USR1", "B:10"),
    ("USR1\n", "usr1\n"),
    ("USR1\n", "EXIT\n"),
    ("USR1\n", "$SENT\n"),
    ("trap 'scontrol requeue $SLURM_JOB_ID' USR1\n", ". ./traps.sh\n"),
    ("trap 'scontrol requeue $SLURM_JOB_ID' USR1\n", 'eval "$(traps)"\n'),
    ("trap 'scontrol requeue $SLURM_JOB_ID' USR1\n", "exec 2>&1\nexec ./run\n"),
    ("--time", "--mem-per-gpu=9G --cpus-per-gpu=4 --time"),
    ("--time", "--mem=2G --time"),
    (" MASTER_PORT", " \\\n MASTER_PORT"),
    ("PORT=29500", "PORT=$((10000 + SLURM_JOB_ID % 10000))"),
    ("PORT=29500", "PORT=${SLURM_JOB_ID: -4}"),
    ("PORT=29500", "PORT=$((10000 + ${SLURM_JOB_ID: -4}))"),
    ("$(hostname)", "$(echo $SLURM_JOB_NODELIST | cut -d'[' -f1)"),
    ("$(hostname)", "$(echo $SLURM_JOB_NODELIST | cut -c1-4)"),
    ("$(hostname)", "${SLURM_NODELIST:0:4}"),
    ("$(hostname)", "$(hostname -I | awk '{print $1}')"),
    ("$(hostname)", "$(scontrol show hostnames | head -n 1)"),
    ("--time", "--tasks-per-node=8 --of-a-plugin --time"),
    ("trap", "unset SLURM_EXPORT_ENV\ntrap"),
    ("'python", "'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python"),
    ("trap", "echo ${SLURM_JOB_ID}_$SLURM_TMPDIR $SLURM_PARTITION\ntrap"),
    ("--time", "--mem=0 --time"),
    ("--time", "--mem-per-cpu=256 --time"),
    ("=2 '", "=2 trainer.devices=8 '"),
    ("srun", "srun --nodes=2 --gres=gpu:8"),
    ("srun", "export N=2\ncat > n.sh <<'EOF'\necho $N\nEOF\nsrun bash n.sh\nsrun"),
    ("srun", "N=2\nB=$(cat <<'E'\nN=3\necho $N\nE\n)\nsrun bash -c \"$B\"\nsrun"),
    ("srun", "N=2\nB='for N in 1 2; do echo $N; done'\nsrun bash -c \"$B\"\nsrun"),
    ("srun", "B=$(cat <<'E'\nN=3\nE\n)\nsrun bash -c 'echo $N'\nsrun"),
    ("srun", 'N=2\nB=\'echo $N\'\neval "$B"\nB=$N\nsrun bash -c "$B"\nsrun'),
    ("srun", 'N=2\nB=$(cat <<E\necho $N\nE\n)\nsrun bash -c "$B"\nsrun'),
    ("srun", "N=2\ncat > n.sh <<EOF\necho $N\nEOF\nsrun bash n.sh\nsrun"),
    ("srun", "N=2\ncat > n.csh <<'E'\nset N = 1\necho $N\nE\nsrun tcsh n.csh\nsrun"),
    ("srun", "N=2\ncat > n.yaml <<'E'\nlr: ${N}\nE\nsrun python x.py --config n.yaml\nsrun"),
    ("srun", "perl <<'E'\nprint $x_ + $SLURM_NODE_ID;\nE\nsrun"),
    ("srun", "srun --overlap nvidia-smi dmon &\nsrun"),
    ("srun", "export SLURM_OVERLAP=1\nsrun nvidia-smi dmon &\nsrun"),
    ("srun", "srun --gres=gpu:0 -c 1 nvidia-smi dmon &\nsrun"),
    ("srun", "srun --gres=none nvidia-smi dmon &\nsrun"),
    ("srun", "srun nvidia-smi dmon &\nkill $!\nsrun"),
    ("--nodes=2 --n", "--ntasks=16 --n"),
    ("srun", "srun python copy.py &\nwait\nsrun"),
    ("& wait", "& while sleep 9; do date; done"),
    ("\nARGS", "\ncase $X in\n--train) ;;\n-e) Y=1;;\nesac\nARGS"),
    ("srun", "srun --mem=0"),
    ("=ALL bash -c '", "=WORLD_SIZE x bash -c 'export MASTER_ADDR=n1 MASTER_PORT=29500; "),
)  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), RIGHT)
def test_script_without_faults(tmp_path: Path, right: str, wrong: str) -> None:
    """What a script says in another way is right too."""
    file = tmp_path / "job.sh"
    text = WHOLE.replace("--time", "--mem-per-cpu=1G --time") if right == "srun" else WHOLE
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert {*outcomes("launcher", asked(str(file)))} <= {OK, UNKNOWN}


ACCELERATE_FILE = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_param_device: cpu}
num_machines: 2
num_processes: 16
machine_rank: 1
main_process_ip: 192.0.2.1
main_process_port: 29500
gpu_ids: all
"""


@pytest.mark.parametrize(
    ("right", "wrong", "check", "words"),
    [
        ("processes: 16", "processes: 15", "launcher", "15 processes cannot be divided among 2"),
        ("rank: 1", "rank: 2", "launcher", "node 2 of 2 nodes"),
        ("stage: 3", "stage: 2", "launcher", "offload_param needs ZeRO stage 3"),
        ("192.0.2.1", "localhost", "master-address", "each node's own loopback"),
        ("port: 29500", "port: 70000", "master-port", "is not a port"),
        ("ids: all", "ids: 0,1", "ranks-and-gpus", "sum of all nodes, for 2 GPUs"),
    ],
)  # fmt: skip
def test_configuration_of_accelerate(
    tmp_path: Path, right: str, wrong: str, check: str, words: str
) -> None:
    """A configuration of Accelerate states the quantities of a launch, judged like any other."""
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE_FILE)
    job = asked(str(file), "--gpus-per-node", "8")
    assert (job.layout.ranks, outcomes(check, job)) == (16, [OK])
    file.write_text(ACCELERATE_FILE.replace(right, wrong))
    (found,) = results(check, asked(str(file), "--gpus-per-node", "8"))
    assert found.outcome in {WARNING, CRITICAL}
    assert words in found.text


def test_files_that_a_script_runs(tmp_path: Path) -> None:
    """What a script runs is read where it is named: a script for each node, Accelerate's
    configuration, that of DeepSpeed.
    """
    job, inner = tmp_path / "job.sh", tmp_path / "node.sh"
    job.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun bash node.sh 2\n")
    inner.write_text(
        "PORT=$(python -c 'import socket; s = socket.socket(); s.bind((\"\", 0))')\n"
        "torchrun --nnodes=$1 --rdzv-backend=c10d --rdzv-endpoint=n1:$PORT x.py\n"
    )
    (_, found) = results("launcher", asked(str(job)))
    assert "--rdzv-endpoint n1:${RANDOM} is another on each node" in found.text
    job.write_text('#!/bin/bash\n. "${SLURM_SUBMIT_DIR}/node.sh" 4\n')
    assert asked(str(job)).layout.nodes == 4
    inner.unlink()
    assert asked(str(job)).layout.ranks is None
    (tmp_path / "a.yaml").write_text(ACCELERATE_FILE.replace("num_machines: 2", "num_machines: 3"))
    (tmp_path / "ds.json").write_text('{"train_batch_size": 7}')
    job.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun accelerate launch --config_file a.yaml"
        " --num_processes 24 x.py --deepspeed ds.json\n"
    )
    made = asked(str(job))
    assert (made.layout.ranks, made.layout.nodes) == (24, 3)
    assert "train_batch_size 7 is not a multiple of 24" in results("batch-sizes", made)[0].text
    for size, says in (("$((4 + 5))", "train_batch_size 9 is not a multiple of 8"), ("$SIZE", "")):
        job.write_text(
            f'#!/bin/bash\ncat > own.json <<E\n{{"train_batch_size": {size}}}\nE\n'
            "deepspeed --num_gpus=8 x.py --deepspeed own.json\n"
        )
        made = asked(str(job))
        assert (made.config.name if made.config else "") == str(job) * bool(says)
        assert not says or says in results("batch-sizes", made)[0].text


def test_ranks_of_the_environment() -> None:
    """Without a launcher, a job's ranks are those that its environment states."""
    both = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    found = asked(environment=both).layout
    assert (found.ranks, found.ranks_per_node, found.source) == (16, 8, "WORLD_SIZE")
    launched = asked(launch="torchrun --nproc-per-node=2 x.py", environment=both).layout
    assert (launched.ranks, launched.source) == (2, "torchrun")


def test_default_that_the_shell_overrides(tmp_path: Path) -> None:
    """Sbatch passes this shell's variables on: a default counts where there is none."""
    text = "srun -N2 torchrun --nnodes=2 --nproc-per-node=${P:-8} x.py"
    for environment, ranks in (({}, 16), ({"P": "4"}, 8), ({"P": "a secret"}, None)):
        assert asked_of_script(tmp_path, text, environment=environment).layout.ranks == ranks


@pytest.mark.parametrize(("ranks", "outcome"), [(16, OK), (32, CRITICAL)])
def test_ranks_that_share_the_model(tmp_path: Path, ranks: int, outcome: State) -> None:
    """Copies of the model are ranks divided by what the training's arguments say of it."""
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}')
    words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2"
    made = asked(str(file), launch=f"torchrun --nproc-per-node={ranks} x.py {words}")
    assert made.data_parallel == ranks // 4
    assert outcomes("batch-sizes", made) == [outcome]
    made = asked(str(file), launch=f"torchrun --nproc-per-node={ranks} x.py {words[:-1]}'$PP'")
    assert made.data_parallel is None


def test_options_of_accelerate_that_exclude_each_other(tmp_path: Path) -> None:
    """Accelerate refuses what it would ignore beside a configuration of DeepSpeed's."""
    file = tmp_path / "a.yaml"
    text = "num_processes: 8\ndeepspeed_config: {deepspeed_config_file: x.json}\n"
    file.write_text(text)
    assert outcomes("launcher", asked(str(file))) == [OK]
    file.write_text(text.replace("json}", "json, zero_stage: 2}"))
    (found,) = results("launcher", asked(str(file)))
    words = "deepspeed_config_file and zero_stage exclude each other: accelerate refuses them"
    assert found.text == words


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ("FSDP", "", ""),
        ("FSDP", "--use_fsdp", ""),
        ("FSDP", "--multi_gpu", "--multi_gpu overrides distributed_type FSDP"),
        ("MULTI_GPU", "", "fsdp_sharding_strategy has no effect: distributed_type MULTI_GPU is no"),
        ("'NO'", "--num_processes 1", ""),
        ("MULTI_GPU", "--use_fsdp --zero_stage 3", "zero_stage has no effect"),
    ],
)  # fmt: skip
def test_kind_that_accelerate_starts(
    tmp_path: Path, settings: str, options: str, words: str
) -> None:
    """What a configuration states is in effect only for the kind of training that starts."""
    own = "" if "zero" in options else "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"
    (tmp_path / "a.yaml").write_text(
        f"distributed_type: {settings}\nnum_processes: 8\nnum_machines: 1\n{own}"
    )
    job = asked_of_script(tmp_path, f"accelerate launch --config_file a.yaml {options} x.py")
    found = faults("launcher", job)
    assert [words in one.text for one in found] == [True] * bool(words), found


def test_configuration_that_accelerate_names(tmp_path: Path) -> None:
    """A half precision that Accelerate is told is that of the configuration of DeepSpeed's."""
    for said, half in itertools.product(("bf16", "fp16"), repeat=2):
        (tmp_path / "z.json").write_text(f'{{"{half}": {{"enabled": true}}}}')
        (tmp_path / "a.yaml").write_text(
            f"distributed_type: DEEPSPEED\nmixed_precision: {said}\n"
            "deepspeed_config: {deepspeed_config_file: z.json}\n"
        )
        job = asked_of_script(tmp_path, "accelerate launch --config_file a.yaml x.py")
        outcome = UNKNOWN if said == half else CRITICAL
        assert outcomes("config-conflicts", job)[0] is outcome


@pytest.mark.parametrize(("address", "outcome"), [("localhost", CRITICAL), ("n1", UNKNOWN)])
def test_variable_of_tasks_in_the_batch_shell(tmp_path: Path, address: str, outcome: State) -> None:
    """Srun sets some variables for its tasks alone: the shell of the script uses its default."""
    launch = ELASTIC.replace("n1", f"${{SLURM_LAUNCH_NODE_IPADDR:-{address}}}")
    job = asked_of_script(tmp_path, f"#SBATCH -N 2\nsrun {launch} x.py")
    assert outcomes("master-address", job) == [outcome]


def test_components_of_a_step(tmp_path: Path) -> None:
    """A step has the nodes of the components that it names, which have variables of their own."""
    head = "#SBATCH -N 2 --gpus-per-node=8\n#SBATCH hetjob\n#SBATCH -N 4 --gpus-per-node=8"
    count = "N=$((SLURM_JOB_NUM_NODES_HET_GROUP_0 + SLURM_JOB_NUM_NODES_HET_GROUP_1))"
    for option, words in (
        ("", "torchrun waits for 6 nodes, but Slurm gives a step without more of the job's"),
        ("--het-group=1", "torchrun waits for 6 nodes, but Slurm gives a step"),
        ("--het-group=0,1", ""),
        ("--het-group=0-1", ""),
    ):
        launch = f"srun {option} {ELASTIC.replace('=2', '=$N')} x.py"
        found = texts(faults("launcher", asked_of_script(tmp_path, f"{head}\n{count}\n{launch}")))
        assert (words in found) if words else not found


def test_no_script() -> None:
    """What does not begin with #! is no batch script."""
    with pytest.raises(ValueError, match="does not begin with #!"):
        slurm_script.parse("torchrun x.py")


@pytest.mark.parametrize(
    ("head", "gpus"),
    [
        ("-N 2 --gres=gpu:a100:4", 4),
        ("-N 2 --gres=nvme:1,gpu:4", 4),
        ("-N 2 --gres=gpu:a100:2,gpu:v100:1", 3),
        ("-N 2 --gpus-per-node=a100:2,v100:2", 4),
        ("-N 2 --gpus=a100:4,v100:2", 3),
        ("-N 2 --gpus-per-node=h100:8", 8),
        ("-N 4 -n 4 --gpus-per-task=8", 8),
        ("-N 2 --ntasks-per-node=8 --gpus-per-task=h100:1", 8),
        ("-N 2 --gpus=16", 8),
        ("-n 4 --ntasks-per-node=2 -G 16", 8),
        ("-N 2 -G 3", None),
        ("-N 2", None),
    ],
)  # fmt: skip
def test_gpus_of_the_script(tmp_path: Path, head: str, gpus: int | None) -> None:
    """Without NVML, as on a login node, GPUs are those that the script requests of Slurm."""
    for ranks in (1, 9):
        text = f"#SBATCH {head}\nsrun torchrun --nproc-per-node={ranks} x"
        job = asked_of_script(tmp_path, text)
        assert job.gpus_per_node == gpus
        (found,) = results("ranks-and-gpus", job)
        expected = UNKNOWN if gpus is None else WARNING if ranks == 1 else CRITICAL
        assert found.outcome is expected, found
        if expected is CRITICAL:
            assert (found.remedy, found.limit) == ("sbatch --gpus-per-node=9 ...", str(gpus))
    text = f"#SBATCH {head}\ntorchrun --nproc-per-node=$SLURM_GPUS_ON_NODE x"
    assert asked_of_script(tmp_path, text).layout.ranks_per_node == gpus


@pytest.mark.parametrize(
    ("command", "mended", "variables", "gpus", "outcome", "words"),
    [
        ("torchrun --nproc-per-node=8 x.py", "", "", "8", OK, "own GPU"),
        ("torchrun --nproc-per-node=9 x.py", "torchrun --nproc-per-node=8 x.py", "", "8", CRITICAL,
         "each node: 9 processes"),
        ("torchrun --nproc-per-node=4 x.py", "torchrun --nproc-per-node=2 x.py",
         "CUDA_VISIBLE_DEVICES=0,1", "8", CRITICAL, "each node: 4 processes (torchrun) for 2 GPUs"),
        ("torchrun x.py", "", "CUDA_VISIBLE_DEVICES=0,0", "8", CRITICAL, "lists a GPU twice"),
        ("torchrun x.py", "", "CUDA_VISIBLE_DEVICES=8", "8", CRITICAL, "the node has 8"),
        ("deepspeed --num_gpus=2 x.py", "deepspeed --include localhost:6,7 x.py",
         "CUDA_VISIBLE_DEVICES=6,7", "8", WARNING,
         "deepspeed ignores CUDA_VISIBLE_DEVICES=6,7 because of --num_gpus"),
        ("torchrun --nproc-per-node=2 x.py", "", "", "", UNKNOWN, "--gpus-per-node"),
        # a container may have a part of them
        ("docker run --gpus 2 a torchrun --nproc-per-node=8 x.py",
         "docker run --gpus=all a torchrun --nproc-per-node=8 x.py", "", "8", CRITICAL,
         "8 processes (torchrun) for 2 GPUs"),
        ("docker run --gpus '\"device=0,3\"' a torchrun --nproc-per-node=4 x.py",
         "docker run --gpus '\"device=0,3\"' a torchrun --nproc-per-node=2 x.py", "", "8",
         CRITICAL, "4 processes (torchrun) for 2 GPUs"),
    ],
)  # fmt: skip
def test_ranks_and_gpus(
    command: str, mended: str, variables: str, gpus: str, outcome: State, words: str
) -> None:
    """Ranks of a node are compared with the GPUs that they see; the remedy ends a fault."""
    have = dict(pair.split("=") for pair in variables.split())
    more = ("--gpus-per-node", gpus) if gpus else ()
    found = results("ranks-and-gpus", asked(*more, launch=command, environment=have))
    found = [result for result in found if words in result.text]
    assert [result.outcome for result in found] == [outcome]
    if outcome is OK:
        return
    if found[0].remedy.startswith(("unset", "export")):
        have = environment_after(found[0].remedy, have)
    elif found[0].remedy.startswith("deepspeed"):
        assert found[0].remedy in mended
    job = asked("--gpus-per-node", gpus or "8", launch=mended or command, environment=have)
    assert outcomes("ranks-and-gpus", job) == [OK]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torchrun --nproc-per-node=4 x.py", 4),
        ("srun torchrun --nproc-per-node=4 x.py & wait", 4),
        ("torchrun --nproc-per-node=4 x.py &\ntorchrun --nproc-per-node=4 y.py & wait", 8),
        ("torchrun --nproc-per-node=3 x.py &\ntorchrun --nproc-per-node=3 y.py & wait", 6),
        ("torchrun --nproc-per-node=4 x.py &\nwait\ntorchrun --nproc-per-node=4 y.py", 4),
        ("torchrun --nproc-per-node=4 x.py\ntorchrun --nproc-per-node=4 y.py", 4),
        ("torchrun --nproc-per-node=3 x.py &\ntorchrun --nproc-per-node=2 y.py & wait", None),
        ("for i in 0 1; do torchrun --nproc-per-node=4 x.py & done; wait", None),
        ("run() {\n torchrun --nproc-per-node=4 x.py\n}\nrun 1 & run 2 & wait", 8),
        ("function run() {\n torchrun --nproc-per-node=4 x.py\n}\nrun 1 & run 2 & wait", 8),
        ("run() {\n torchrun --nproc-per-node=4 x.py &\n}\nrun 1\nrun 2\nwait", 8),
        ("run() {\n torchrun --nproc-per-node=4 x.py\n}\nrun 1\nrun 2", 4),
        ("run() {\n torchrun --nproc-per-node=4 x.py\n}\nfor i in 1 2; do run & done", None),
        ("srun bash -c 'torchrun --nproc-per-node=4 x & torchrun --nproc-per-node=4 y & wait'", 8),
    ],
)
def test_launches_at_once(tmp_path: Path, text: str, count: int | None) -> None:
    """Launches that run at once on a node share its GPUs; those after each other do not."""
    job = asked_of_script(tmp_path, f"#SBATCH -N 1 --ntasks=1 --gres=gpu:8\n{text}")
    (found,) = results("ranks-and-gpus", job)
    if count in {None, 8}:
        assert found.outcome is OK
    else:
        assert f"{count} processes (torchrun) for 8 GPUs: idle" in found.text


def test_files_beside_a_script(tmp_path: Path) -> None:
    """A script names files beside it by its own folder, and may write others itself."""
    (tmp_path / "hosts").write_text("n1 slot=8\n")
    for folder in ('$(dirname "$0")', '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'):
        job = asked_of_script(tmp_path, f"D={folder}\ndeepspeed --hostfile $D/hosts x.py")
        (found,) = results("hostfile", job)
        assert (found.outcome, "slot=8" in found.text) == (CRITICAL, True)
    (tmp_path / "env.sh").write_text("export SLURM_OVERLAP=1\n")
    steps = "srun nvidia-smi dmon &\nsrun torchrun --nproc-per-node=8 x.py"
    for first, waits in (("", True), (". ./env.sh", False)):
        job = asked_of_script(tmp_path, f"#SBATCH -N 1 --gres=gpu:8\n{first}\n{steps}")
        assert ("the next srun waits" in texts(results("launcher", job))) == waits
