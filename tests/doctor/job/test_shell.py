"""Scripts, held against bash: it runs the same commands with the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.doctor.job.sources import expansion, launcher_command, shell
from dshealthd.findings.finding import State
from tests.doctor.job.asking import asked_of_script, outcomes, results

RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
PROGRAMS = ("srun", "torchrun", "deepspeed")
SCRIPTS = {
    "quotes": 'srun \'a b\' "c d" e\\ f "g\\"h" \'i\'"j"k \'\' ""',
    "continuations": 'torchrun \\\n  --nnodes=2 \\\n --text "a\nb" \'c\\\nd\' "e\\\nf"',
    "comments": "# srun no\nsrun a#b # c\nsrun '#d' \\\n  # e\nsrun f",
    "variables": 'A="x y"; B=$A; srun $A "$A" ${B} "${B}z" A="$A"',
    "several lines": 'A="\n  --a 1\n  --b 2\n"\nsrun $A x',
    "substitution": (
        'X=$(srun hidden >/dev/null; echo "a ) b"); echo "`true` $(echo \')\')"; srun a'
    ),
    "function not called": "f() { srun never; }\nfunction g\n{ srun never; }\nsrun now",
    "a command in a variable": 'CMD="torchrun --nnodes 2"; srun $CMD train.py; $CMD x',
    "here": "srun a <<EOF b\ntorchrun no '\nEOF\ncat <<-'E' >/dev/null\n\tsrun \"no\n\tE\nsrun c",
    "texts of here-documents": (
        'A=$(cat <<\'E\'\nx "$Y" \'z\'\n\nE\n); srun "$A"; B="$(cat <<-E\n$A "q"\n\tE\n)"\n'
        "read -r -d '' C <<'E' || srun \"$B\"\n c $D\nE\n"
        'srun "$C"\ncat <<F | srun\nsrun never\nF\n'
    ),
    "here string": 'srun a <<< "b c" d',
    "redirections": (
        "srun a 2>&1 >/dev/null b; srun c 2>/dev/null& wait; srun d &>/dev/null; srun 2 >&2"
    ),
    "operators": "true && srun a || srun never; (srun b; srun c) | cat; srun d|cat",
    "keywords": (
        "if true; then srun a; fi; for i in 1; do srun b; done; while srun c && false; do :; done"
    ),
    "case": "case x in x) srun a;; esac; ! srun b; { srun c; }",
    "patterns": (
        "A=x; case $A in\n  (y|srun) srun never;;\n  x | torchrun)\n  srun a; (srun b);;\n"
        "  -x|[yz]*) ;;\nesac\nsrun c"
    ),
    "known tests": (
        'A=4; B=; if [ -n "$A" ]; then P=8; srun $P; fi\n'
        'if [[ -z "$A" ]]; then srun no; else srun a; fi\n'
        "if [ $A -gt 5 ]; then srun no; elif test $A -ne 4; then srun no\n"
        "else srun b; P=1; fi; srun $P\n"
        'if [ "$B" != "" ]; then if [ $A = 4 ]; then srun no; fi; elif [ 4 -le $A ]; then srun c\n'
        "elif [ 1 = 1 ]; then srun no; else srun no; fi; if ! [ $A -eq 4 ]; then srun never; fi\n"
        "if [ $A = 5 ] || [ $A = 4 ]; then P=2; fi; case $P in 2) srun d;; esac\n"
        "for A in 5; do if [ $A = 4 ]; then srun never; else srun e; fi; done"
    ),
    "arithmetic": "((1 < 2)) && srun a; i=3; ((i++)); srun b",
    "own": "export A=1 B=2; C=3 srun $A$B; readonly D=4; declare -x E=5; srun $D $E",
    "arrays": ('A=(a "b c" \'d\'  # e\n f)\nA+=(g=h); B=(); srun "${A[@]}" x ${A[*]} "${B[@]}"'),
    "a function that prints": (
        'f() {\n  echo --a "$A" b\n}; A=1; srun $(f) "$(f)"\n'
        "g() { echo a; echo b; }; h() { echo $(f); }; true || srun never $(g) $(h)"
    ),
    "keys": ("declare -A A; A[a]=6; srun ${A[a]}; B=(1 2); B[1]=7; srun ${B[0]} ${B[1]}"),
    "locals": (
        "N=2; f() { local N=8 K; K=1; M=3; srun $N $K; }; f; srun $N $M\n"
        'g() { srun "$1" $#; f a; srun "$1"; }; set -- x; g y z; srun "$1"; (M=4); bash -c "M=5"\n'
        'h() { srun "$7" "${9:-d}" $9; }; h x'
    ),
    "set again": 'A=1; A=2; B=$A; B+=3; true && A=2; srun $A "$B"',
    "quoted for another shell": "A=1; srun '$A' \"\\$A $A\" \\$A '\\'",
    "tests": (
        "A=a; if [[ -n x && $A = a ]]; then srun a; fi; [[ $A =~ ^(a|srun)$ ]] && srun b\n"
        "[[ b < $A || x > y ]] || srun c; [[ -n '' ||\n x ]] && srun d; srun e"
    ),
    "braces": (
        'srun ${X:-a b} "${Y:-c d}"; A=1234; B=1${A:(-2)}; C=${A#*(}; D=${Z:-$A ${Y} e}; srun g $A'
    ),
    "delimiters": (
        "srun a <<+ b\nsrun no\n+\ncat <<'END-OF.IT' >/dev/null\nsrun no\nEND-OF.IT\n"
        "X=$((1<<2)); srun c"
    ),
    "loops that count": (
        "for ((i = 0; i < $((2 - 1)); i++)); do srun a; done; for((;;)); do srun b; break; done"
    ),
    "an assignment in a variable": "A=B=1; $A || srun a",
    "dollars": 'srun "$" a$ "b$" \'$x\'',
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_commands_are_those_that_bash_runs(case: str, tmp_path: Path) -> None:
    """Words of each command are what bash makes of them; nothing inside `$(...)` is a command."""
    for program in PROGRAMS:
        (tmp_path / program).write_text(RECORDER.format(python=sys.executable))
        (tmp_path / program).chmod(0o755)
    record = tmp_path / "record"
    record.touch()
    subprocess.run(
        ["bash", "-c", SCRIPTS[case]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(record)},
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    theirs = [json.loads(line) for line in record.read_text().splitlines()]
    ours = [
        list(command.words)
        for command in shell.commands(SCRIPTS[case], {})
        if command.words[0] in PROGRAMS and "never" not in command.words
    ]
    assert ours == [words for words in theirs if words != ["srun", "hidden"]]


HEAD = "#SBATCH --nodes=4 --ntasks-per-node=1\n"
ADDRESS = 'head=$(srun --nodes=1 --ntasks=1 -w "$node" hostname --ip-address)\n'


@pytest.mark.parametrize(
    ("script", "program", "ranks"),
    [
        (ADDRESS + "srun torchrun --nnodes 4 --nproc_per_node 8 x.py", "torchrun", 32),
        ("srun hostname\nsrun -l env\nsrun TORCHRUN=2 x.py", "torchrun", 8),
        ("srun ls /data\nsrun nvidia-smi -L", "srun", None),
        ("srun -N1 -n1 python prepare.py\nsrun -N4 --ntasks-per-node=8 python x.py", "srun", 32),
        ("srun -n1 -N1 torchrun a.py\nsrun TORCHRUN=8 b.py", "torchrun", 32),
        ("run() { srun torchrun --nnodes=$1 --nproc-per-node=8 x.py; }\nrun 4", "torchrun", 32),
        ("run() {\n  TORCHRUN=8 x.py\n}\nexport -f run\nsrun bash -c run", "torchrun", 32),
        ("tee n.sh <<'E' >/dev/null\nTORCHRUN=8 x.py\nE\nsrun ./n.sh", "torchrun", 32),
        ("cat > n.sh <<'E'\ntorchrun --nproc-per-node=8 $@ x.py\nE\nsrun bash n.sh --nnodes=4",
         "torchrun", 32),
        ('L=\'torchrun\n --nnodes=4 --nproc-per-node=8\'\nsrun bash -c "$(echo $L) x.py"',
         "torchrun", 32),
        ("P=4\nf() { P=8; }\nif $X; then f; fi\nsrun TORCHRUN=$P x.py", "torchrun", None),
        ("xargs -I{} ssh {} torchrun --nnodes=2 --nproc-per-node=8 x.py < hosts", "torchrun", 16),
        ("pdsh -w n[1-2] 'cd a; torchrun --nnodes=2 --nproc-per-node=8 x.py'", "torchrun", 16),
        (("f() { if (( $1 > 1 )); then srun torchrun --nnodes=$1 --nproc-per-node=$2 x.py; fi; }\n"
         "f 1 2\nf 4 8"), "torchrun", 32),
        ("srun python -c a\nsrun --nodes=4 --ntasks-per-node=8 -- python x.py", "python", 32),
        ('f() { shift; srun "$@"; }\nf a TORCHRUN=8 x.py', "torchrun", 32),
        ("f() { f; f; }\nf\nsrun TORCHRUN=8 x.py", "torchrun", 32),
        ("exec srun TORCHRUN=8 x.py", "torchrun", 32),
        ("eval 'srun TORCHRUN=8 x.py'", "torchrun", 32),
        ('C="TORCHRUN=8 x.py"; eval srun "$C"', "torchrun", 32),
        ('A=(--nnodes=4 --nproc-per-node=8)\nsrun torchrun "${A[@]}" x.py', "torchrun", 32),
        ('A=(torchrun --nnodes=4)\nsrun "${A[@]}" x.py', "torchrun", 4),
        ('A=(--nnodes=4)\n$X && A+=($Y)\nsrun torchrun "${A[@]}" x.py', "torchrun", None),
        ('A=$(x)\nsrun torchrun "${A[@]}" x.py', "torchrun", None),
        ("P=${P:-8}\nsrun TORCHRUN=$P x.py", "torchrun", 32),
        ("P=2\nsrun TORCHRUN=${P:-8} x.py", "torchrun", 8),
        ("P=\nsrun TORCHRUN=${P-8} x.py", "torchrun", None),
        ("srun TORCHRUN=${SLURM_GPUS_ON_NODE:-8} x.py", "torchrun", None),
        ("srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$((2 * (SLURM_NNODES - 1))) x.py",
         "torchrun", 24),
        ("srun TORCHRUN=$((X * 2)) x.py", "torchrun", None),
        ("srun TORCHRUN=$((4 / 0)) x.py", "torchrun", None),
        ("P=8; P=4\nsrun TORCHRUN=$P x.py", "torchrun", 16),
        ("P=8; $X && P=4\nsrun TORCHRUN=$P x.py", "torchrun", None),
        ("P=8; P+=0\nsrun TORCHRUN=$P x.py", "torchrun", 320),
        ("P=8; unset P\nsrun TORCHRUN=$P x.py", "torchrun", None),
        ("for P in 1 8; do srun TORCHRUN=$P x.py; done", "torchrun", None),
        ('srun bash -c "TORCHRUN=8 x.py"', "torchrun", 32),
        ("srun apptainer exec --nv -B /opt/deepspeed img TORCHRUN=8 x.py", "torchrun", 32),
        ("srun numactl -N0 env A=1 TORCHRUN=8 x.py", "torchrun", 32),
        ("srun python -W ignore -m torch.distributed.run --nnodes=4 --nproc-per-node=8 x.py",
         "torchrun", 32),
        ("srun $SRUN_ARGS TORCHRUN=8 x.py", "torchrun", 32),
        ("srun torchrun $DISTRIBUTED_ARGS x.py", "torchrun", None),
        ("srun bash run.sh", "srun", None),
        ("pip install deepspeed\necho torchrun\nwhich deepspeed", "", None),
        ("if [ $N = 1 ]; then torchrun --standalone x.py; else srun torchrun --nnodes=4 x.py; fi",
         "", None),
        ("if [ $N = 1 ]; then P=1; else P=8; fi\nsrun TORCHRUN=$P x.py", "torchrun", None),
        ('P=4\nif [ -n "$SLURM_NNODES" ]; then P=$SLURM_NNODES; fi\nsrun TORCHRUN=$P x.py',
         "torchrun", 16),
        ('P=4\nif [ -n "${OF_USER:-}" ]; then P=8; fi\nsrun TORCHRUN=$P x.py', "torchrun", None),
        ("f() { srun TORCHRUN=8 x.py; }\ncase $X in\na|deepspeed) f;;\nesac", "torchrun", 32),
        ("for i in 1 2; do srun TORCHRUN=8 x.py; done", "torchrun", 32),
        ("srun TORCHRUN=8 x.py\nsrun torchrun --nnodes=4 'eval", "torchrun", 32),
    ],
)  # fmt: skip
def test_launch_of_a_script(script: str, program: str, ranks: int | None, tmp_path: Path) -> None:
    """The launch is what starts the job: no query, no function that nobody calls, no branch."""
    script = script.replace("TORCHRUN", "torchrun --nnodes=4 --nproc-per-node")
    job = asked_of_script(tmp_path, f"{HEAD}{script}")
    launcher = job.launcher
    assert (launcher is None) == (not program)
    if launcher is not None:
        assert launcher.find(program)
    assert job.layout.ranks == ranks


def test_variables_that_only_a_shell_knows(tmp_path: Path) -> None:
    """A variable that the script computes is unknown, even if the user's shell has a value."""
    text = f"{HEAD}export MASTER_ADDR=$(hostname) MASTER_PORT=29500\nsrun python x.py"
    job = asked_of_script(tmp_path, text, environment={"MASTER_ADDR": "old"})
    assert (job.rendezvous.address, job.rendezvous.port) == ("", 29500)
    (found,) = results("launcher", job)
    assert found.text.endswith("only the shell that runs it knows MASTER_ADDR: not checked here")


def test_launch_behind_a_condition_is_named(tmp_path: Path) -> None:
    """Where a condition decides between launchers, the result is unknown."""
    text = f"{HEAD}if $A; then\nsrun torchrun a.py\nelse\nsrun torchrun b.py\nfi"
    (found,) = results("launcher", asked_of_script(tmp_path, text))
    assert found.outcome is State.UNKNOWN
    assert "which of its launches runs depends on conditions" in found.text
    # which one runs may depend on the nodes, so these do not tell
    other = text.replace("srun torchrun a", "torchrun --nnodes=1 a")
    assert outcomes("launcher", asked_of_script(tmp_path, other)) == [State.UNKNOWN]
    other = text.replace(" b.py", " --nproc-per-node=h100:4 b.py")
    _, wrong = results("launcher", asked_of_script(tmp_path, other))
    assert "--nproc-per-node of torchrun is 'h100:4'" in wrong.text


@pytest.mark.parametrize(("commands", "is_read"), [(1 << 14, True), ((1 << 14) + 1, False)])
def test_commands_without_end(commands: int, *, is_read: bool) -> None:
    """A script is read up to a number of commands, with those of functions that it calls."""
    text = f"{'a;' * (commands - 1)} srun torchrun x.py"
    launch = launcher_command.find_launch(shell.commands(text, {}), {})
    assert (launch.command is not None) == is_read
    assert is_read or "more than 16384 commands" in launch.problem
    doubles = "".join(f"f{one + 1}() {{ f{one}; f{one}; }}\n" for one in range(7))
    assert len(list(shell.commands(f"f0() {{ a; }}\n{doubles}f7", {}))) == 1 << 7


def test_words_without_end() -> None:
    """An array has its words up to a size, and a command as many as the kernel runs."""
    for size, word in ((1 << 16, "x" * (1 << 16)), ((1 << 16) + 1, "${A[@]}")):
        (found,) = shell.commands(f'A=({"x" * size})\nsrun "${{A[@]}}"', {})
        assert found.words == ("srun", word)
    whole = "x" * ((1 << 21) - 1)
    assert list(expansion.all_expanded([whole], {})) == [whole]
    with pytest.raises(ValueError, match="longer than 2 MiB"):
        list(expansion.all_expanded([whole, ""], {}))


@pytest.mark.parametrize(("depth", "is_read"), [(8, True), (9, False)])
def test_functions_without_end(depth: int, *, is_read: bool) -> None:
    """Functions are read where they are called, up to a depth."""
    text = "".join(f"f{one}() {{ f{one - 1}; }}\n" for one in range(1, depth))
    found = list(shell.commands(f"f0() {{ srun a; }}\n{text}f{depth - 1}", {}))
    assert [one.words for one in found] == [("srun", "a") if is_read else ("f0",)]
