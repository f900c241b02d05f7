"""What reaches the processes that a script starts elsewhere, and what its shell does otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.doctor.job.sources import slurm_script
from dshealthd.findings.finding import State
from tests.doctor.job.asking import asked_of_script, outcomes

_MPI = "mpirun --hostfile hosts -np 16 --bind-to none"
_SET = "export MASTER_ADDR=a\nexport NCCL_DEBUG=WARN\n"
_TMPFS = "apptainer exec --nv --writable-tmpfs"
_PYXIS = "srun --container-image=./a.sqsh --container-mounts=/c:/out/c"
_ON_HOST = "srun --nodes=1 --nodelist=$h torchrun --nnodes=$N --node-rank=0"
_OF_PORT = "docker run --gpus all a bash -c 'torchrun --master-port=$PORT t.py'"
_WITH_PORT = _OF_PORT.replace("--gpus", "-e PORT --gpus")
_REMOTE = "torchrun --nnodes=2 --nproc-per-node=8 --node-rank=$n --master-addr=a t.py"


def said(text: str) -> str:
    """Return what is wrong with a script."""
    return " ".join(one.text for one in slurm_script.parse(f"#!/bin/bash\n{text}\n").faults)


_HOSTS = (
    "ssh a torchrun --nnodes={0} --node-rank=0 --master-addr=a --master-port=2 t.py &\n"
    "ssh b torchrun --nnodes={0} --node-rank={1} --master-addr={2} --master-port={3} t.py &\nwait"
)
_STEPS = "#SBATCH -N 1 {}\nsrun {} python a.py &\nsrun --gpus=8 torchrun --nproc-per-node=8 t.py"
_OTHERS = (
    "\nfor ((i = 1; i < N; i++)); do\n  srun -N1 -n1 -w ${H[$i]} ray start --block &\ndone\nwait  #"
)
CASES = (
    (f"{_SET}{_MPI} python t.py", f"{_SET}{_MPI} -x MASTER_ADDR -x NCCL_DEBUG python t.py",
     "MASTER_ADDR, NCCL_DEBUG, but mpirun does not pass them on"),
    (f"{_SET}{_MPI} python t.py", f"#SBATCH -N 2\n{_SET}{_MPI} python t.py", "but mpirun does not"),
    (f"{_SET}docker run --gpus all a torchrun t.py",
     f"{_SET}docker run --gpus all -e MASTER_ADDR -e NCCL_DEBUG a torchrun t.py",
     "docker run does not pass them on"),
    (f"PORT=$(x)\n{_OF_PORT}",
     "if b; then\n  DATA=/d\nfi\ndocker run --gpus all --volume=$DATA:/e a torchrun t.py",
     "sets PORT, but docker run does not pass it on"),
    (f"PORT=1\n{_OF_PORT}",
     'PORT=1\ndocker run --gpus all a bash -c "torchrun --master-port=$PORT t.py"',
     "sets PORT, but docker run does not pass it on"),
    *(
        (f"PORT=1\n{run.format(_OF_PORT)}", f"export PORT=1\n{run.format(_WITH_PORT)}",
         "sets PORT, but docker run does not pass it on")
        for run in ('run() {{ "$@"; }}\nrun {}', 'set -- {}\n"$@"')
    ),
    ("export MASTER_ADDR=${MASTER_ADDR:-a}\napptainer exec --nv --cleanenv a.sif python t.py",
     "export MASTER_ADDR=${MASTER_ADDR:-a}\napptainer exec --nv a.sif python t.py",
     "MASTER_ADDR, but apptainer --cleanenv does not pass it on"),
    (f"{_SET}apptainer exec --nv --cleanenv a.sif python t.py",
     f"{_SET}apptainer run --nv a.sif python t.py", "apptainer --cleanenv does not pass them on"),
    (f"{_SET}apptainer exec --nv --cleanenv a.sif python t.py",
     (f"{_SET}export APPTAINERENV_NCCL_DEBUG=WARN\n"
      "SINGULARITYENV_MASTER_ADDR=a apptainer exec --nv --cleanenv a.sif python t.py"),
     "apptainer --cleanenv does not pass them on"),
    *(
        (f"{before}MASTER_ADDR=a apptainer exec --nv --cleanenv a.sif python t.py",
         "export MASTER_ADDR=a\napptainer exec --nv --cleanenv a.sif env MASTER_ADDR=a python t.py",
         "sets MASTER_ADDR, but apptainer --cleanenv does not pass it on")
        for before in ("", "env ")
    ),
    ("srun --export=ALL,NCCL_IB_HCA=mlx5_0,mlx5_1 python t.py",
     "srun --export=ALL,NCCL_IB_HCA=mlx5_0,PATH python t.py",
     "the tasks get NCCL_IB_HCA=mlx5_0, without mlx5_1"),
    ("srun --container-mounts=/lustre/data:/data python t.py --data /lustre/data/c4",
     "srun --container-mounts=/lustre/data:/data python t.py --data /data/c4",
     "the container has no /lustre/data/c4: /lustre/data is mounted at /data"),
    ("docker run -v /lustre/data:/data a python t.py --data /lustre/data/c4",
     "docker run -v /lustre/data:/lustre/data a python t.py --data /lustre/data/c4",
     "the container has no /lustre/data/c4"),
    (f"{_TMPFS} -B /c:/out/c a.sif python t.py --output-dir /out/ckpt",
     f"{_TMPFS} -B /c:/out/c -B /d:/out/ckpt a.sif python t.py --output-dir /out/ckpt",
     "--output_dir /out/ckpt is lost when its container ends"),
    ("docker run --gpus all --rm -v /c:/out/c a python t.py --save=/out/ckpt",
     "docker run --gpus all -v /c:/out/c a python t.py --save=/out/ckpt",
     "--save /out/ckpt is lost when its container ends"),
    (f"{_PYXIS} python t.py --save /out/ckpt",
     f"{_PYXIS} --container-name=a python t.py --save /out/ckpt",
     "--save /out/ckpt is lost when its container ends"),
    (f"{_PYXIS} python t.py --save /out/ckpt", f"{_PYXIS} python t.py --save /lustre/ckpt",
     "--save /out/ckpt is lost"),
    ("#SBATCH -N 1\nsrun python t.py --save_dir $SLURM_TMPDIR/a",
     "#SBATCH -N 1\nsrun python t.py --save_dir $SLURM_TMPDIR/a\ncp -r $SLURM_TMPDIR/a .",
     "--save_dir $SLURM_TMPDIR/a is of one node"),
    ("#SBATCH -N 1\nsrun python t.py --ckpt=/tmp/a",
     "#SBATCH -N 1\nsrun python t.py --ckpt=/tmpfs/a --output_dir /tmp/a",
     "--ckpt /tmp/a is of one node"),
    *(
        ("#SBATCH -N 1\nsrun python t.py --save_dir /tmp/a\nA",
         f"#SBATCH -N 1\n{right}", "--save_dir /tmp/a is of one node")
        for right in (
            "srun python t.py --save_dir /tmp/a\ncd /tmp/a\ntar cf /c/a.tar .",
            "while b; do\n  rclone sync /tmp/a /c\ndone &\nsrun python t.py --save_dir /tmp/a",
            "f() {\n  cp -r /tmp/a $HOME\n}\ntrap f EXIT\nsrun python t.py --save_dir /tmp/a",
            "srun python t.py --save_dir /tmp/a\nsrun bash -c 'mv /tmp/a/* /c'",
            "srun python t.py --save_dir /tmp/a\n./upload.sh /tmp/a",
            "srun python t.py --non-persistent-local-ckpt-dir /tmp/a",
        )
    ),
    # what is copied into the folder, or removed before, is not what it saves there
    *(
        (f"W=/n/$USER\n{wrong}", f"W=/n/$USER\n{right}",
         "--ckpt /n/$USER/c is removed behind the training: nothing copies it")
        for wrong, right in (
            ("tar -xf d.tar -C $W\npython t.py --ckpt $W/c\nrm -rf $W",
             "rm -r $W\npython t.py --ckpt $W/c\nif b; then\n  rm -r $W\nfi"),
            ("rsync d/ $W/\ntrap 'rm -r $W' EXIT\npython t.py --ckpt $W/c",
             "rsync d/ $W/d\ntrap 'rm -r $W/d' EXIT\npython t.py --ckpt $W/c"),
            ("python t.py --ckpt $W/c\nA=$(a)\nrm -r $W",
             "A=$(a)\npython t.py --ckpt $A/c\nA=$(b)\nrm -r $A"),
            ("f() {\n  rm -rf $W/*\n}\ntrap f 0 TERM\npython t.py --ckpt $W/c",
             "f() {\n  rm -rf $W/*\n}\npython t.py --ckpt $W/c"),
        )
    ),
    *(
        (_STEPS.format("--gpus=8", "--gpus=4"), right, "the next srun waits until it ends")
        for right in (
            _STEPS.format("--gpus=12", "--gpus=4"),
            _STEPS.format("--exclusive", "--gpus=4"),  # as many as the node has
            _STEPS.format("--gpus=8", "--gpus=4 --overlap"),
            _STEPS.format("--gpus=8", "--gpus=4").replace("\nsrun --gpus=8", _OTHERS),
            _STEPS.format("--gpus=8", "--gpus=4").replace("srun", "if a; then\nsrun", 1) + "\nfi",
        )
    ),
    # tasks of an array that run at once save in one folder each
    *(
        ("#SBATCH --array=0-3%2\nsrun python t.py --save /c/r --lr $SLURM_ARRAY_TASK_ID",
         right, "all tasks of the array save in --save /c/r at once")
        for right in (
            "#SBATCH --array=0-3%1\nsrun python t.py --save /c/r",
            "#SBATCH --array=0-3\nsrun python t.py --save /c/$SLURM_ARRAY_TASK_ID",
            "#SBATCH --array=0-3\nsrun python t.py --save /c/$SLURM_JOB_ID",
            "#SBATCH --array=0-3\nsrun python t.py --save /c --name r$SLURM_ARRAY_TASK_ID",
        )
    ),
    # what the script's own shell puts into a folder of its node is on no other
    *(
        (f"#SBATCH -N 2\n{fills}\nsrun {reads}", right, "is of each node alone")
        for fills, reads, right in (
            ("tar xf d.tar -C /tmp/d", "python t.py --data /tmp/d/train",
             "#SBATCH -N 1\ntar xf d.tar -C /tmp/d\nsrun python t.py --data /tmp/d/train"),
            ("cat > $TMPDIR/r.sh <<'E'\npython t.py\nE", "bash $TMPDIR/r.sh",
             "#SBATCH -N 2\ncat > r.sh <<'E'\npython t.py\nE\nsrun bash r.sh"),
            ("cp -r d /dev/shm/d", "bash -c 'python t.py --data=/dev/shm/d'",
             "#SBATCH -N 2\nsrun cp -r d /dev/shm/d\nsrun python t.py --data=/dev/shm/d"),
            ("cp d /tmp/d", "python t.py /tmp/d",
             "#SBATCH -N 2\ncp d /tmp/d\nsbcast /tmp/d /tmp/d\nsrun python t.py /tmp/d"),
        )
    ),
    *(
        (f"srun --container-image=a {options} {run}",
         f"srun --container-image=a --container-mounts=$HOME/a:$HOME/a {options} {run}",
         "is lost when its container ends: with --no-container-mount-home its home is its own")
        for options, run in (
            ("--no-container-mount-home", "torchrun t.py --exp-dir=$HOME/a/c"),
            ("--container-writable --no-container-mount-home",
             "bash -c 'torchrun t.py --save $HOME/a'"),
        )
    ),
    ("docker run --gpus all --rm -v /c:/c a python t.py --save=/out",
     "docker run --gpus all --rm -v /c:/c --volumes-from b a python t.py --save=/out",
     "--save /out is lost when its container ends"),
    ("#SBATCH -N 2 --gpus-per-node=8\npython t.py", "#SBATCH -N 1 --gpus-per-node=8\npython t.py",
     "asks for 2 tasks, but starts `python t.py` once: srun is missing"),
    ("#SBATCH -N 1 --ntasks-per-node=8 --gres=gpu:8\npython -u t.py",
     "#SBATCH -N 1 --ntasks-per-node=8 --gres=gpu:8\nexport N=1\nsrun python -u t.py",
     "asks for 8 tasks"),
    *(
        ("#SBATCH -N 1 -n 8 --gres=gpu:8\npython t.py",
         f"#SBATCH -N 1 -n 8 --gres=gpu:8\n{right}", "asks for 8 tasks, but starts `python t.py`")
        for right in (
            "python t.py --seed 1 &\npython t.py --seed 2 &\nwait",
            "for i in 1 2; do\n  CUDA_VISIBLE_DEVICES=$i python t.py &\ndone\nwait",
            "parallel -j 8 python t.py --seed {} ::: 1 2",
        )
    ),
    ("srun cd /a && python t.py", "cd /a && srun python t.py", "srun cannot run cd /a"),
    ("srun source venv/bin/activate && python t.py",
     "srun bash -c 'source venv/bin/activate && python t.py'",
     "srun cannot run source venv/bin/activate"),
    ("srun ray stop && ray start --address=a --block &",
     "srun bash -c 'ray stop && ray start --address=a --block' &\nwait",
     "srun runs only what is before &&: ray start"),
    *(
        (f'for n in 0 1; do\n  ssh node$n "{_REMOTE}"\ndone',
         f"for n in 0 1; do\n  {right}\ndone\nwait",
         "the loop waits for each node's torchrun")
        for right in (
            f'ssh node$n "{_REMOTE}" &',
            f'ssh node$n "{_REMOTE} &"',
            f'ssh node$n "{_REMOTE.replace("--nnodes=2", "--nnodes=1")}"',
            f"srun --nodes=2 {_REMOTE}",
        )
    ),
    *(
        (_HOSTS.format(2, 1, *wrong), _HOSTS.format(2, 1, "a", 2), words)
        for wrong, words in (
            (("a", 3), "--master-port is 2 here but 3 there: nodes of one launch never meet"),
            (("b", 2), "--master-addr is a here but b there"),
        )
    ),
    (_HOSTS.format(3, 1, "a", 2), "./start.sh 2 &\n" + _HOSTS.format(3, 1, "a", 2),
     "torchrun waits for 3 nodes, but the script starts it on 2"),
    ("while read -r host; do\n  ssh $host nvidia-smi\ndone < hosts",
     "while read -r host; do\n  ssh -n $host nvidia-smi\ndone < hosts",
     "ssh in a loop of `read` takes the other lines"),
    ("while read -r host; do\n  ssh $host nvidia-smi\ndone < hosts",
     "while read -r host <&3; do\n  ssh $host nvidia-smi\ndone 3< hosts",
     "ssh in a loop of `read` takes the other lines"),
    ("srun python t.py | tee log\nif [ $? -ne 0 ]; then\n  a\nfi",
     "set -o pipefail\nsrun python t.py | tee log\nif [ $? -ne 0 ]; then\n  a\nfi",
     "$? is the status of tee, not of srun"),
    ("srun bash -c 'RANK=$OMPI_COMM_WORLD_RANK python t.py'",
     "bash -c 'RANK=$OMPI_COMM_WORLD_RANK python t.py'",
     "reads OMPI_COMM_WORLD_RANK, which is never set"),
    ("apptainer exec -C --nv a.sif torchrun t.py --save $HOME/c",
     "apptainer exec -C --nv -B $HOME/c a.sif torchrun t.py --save $HOME/c",
     "--save $HOME/c is lost when its container ends: with -C its home"),
    ("apptainer exec --contain --nv a.sif torchrun t.py --output_dir /tmp/c",
     "apptainer exec --contain --workdir /d --nv a.sif torchrun t.py --output_dir /tmp/c",
     "--output_dir /tmp/c is lost when its container ends"),
    (f"for h in $HOSTS; do\n{_ON_HOST} t.py\ndone",
     f"for h in $HOSTS; do\n{_ON_HOST} t.py &\ndone\nwait",
     "the loop waits for each node's torchrun"),
    ("#SBATCH --requeue\nD=/c/$(date +%s)\nsrun python t.py --save $D --resume_from $D/last",
     "#SBATCH --requeue\nD=/c/$SLURM_JOB_ID\nsrun python t.py --save $D --resume_from $D/last",
     "--resume_from is a new directory each time"),
    ("#SBATCH --requeue\nD=/c/$(date +%s)\nsrun --output=$D t --save $D --auto_resume",
     "#SBATCH --requeue\nD=/c/$(date +%s)\nsrun --output=$D t --save /c --auto_resume",
     "--save is a new directory each time"),
    ("#SBATCH --requeue\nsrun t --save /c/$(date +%s) --resume_from latest",
     "#SBATCH --requeue\nsrun t --save /c/$(date +%s) --resume_from none",
     "--save is a new directory each time"),
    ("D=/c/$SLURM_RESTART_COUNT\nscontrol requeue 1\nsrun python t.py --load $D",
     "D=/c/$(date +%s)\nsrun python t.py --load $D", "--load is a new directory each time"),
)  # fmt: skip
"""A script, the same without its mistake, and words of the result."""


@pytest.mark.parametrize(("wrong", "right", "words"), CASES)
def test_reach(wrong: str, right: str, words: str) -> None:
    """What cannot arrive is told; what arrives is not."""
    assert words in said(wrong)
    assert not said(right)


def test_launch_on_other_hosts(tmp_path: Path) -> None:
    """What ssh starts on each host needs no srun."""
    launch = "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=a:1 t.py"
    for runs, outcome in ((launch, State.CRITICAL), (f"ssh n1 {launch} &\nwait", State.OK)):
        job = asked_of_script(tmp_path, f"#SBATCH --nodes=2\n{runs}")
        assert outcomes("launcher", job) == [outcome]


def test_variable_that_is_unset() -> None:
    """A variable that a script unsets is none that it has to export."""
    script = "if a; then\n  unset CUDA_DEVICE_MAX_CONNECTIONS\nfi\n$PREFIX torchrun t.py"
    parsed = slurm_script.parse(f"#!/bin/bash\n{script}\n")
    assert parsed.command is not None
    assert not parsed.carried
