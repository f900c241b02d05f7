"""Make genuine logs: real failures of real torch and DeepSpeed under three launchers.

`python -m tests.explain.genuine` runs each fault of `FAULTS` under torchrun (two agents of two
ranks), under DeepSpeed's launcher (three ranks) and with no launcher (three ranks), and keeps
every line with the time at which it arrived in `tests/explain/genuine.json.xz`. Takes 20 minutes
on two cores. Paths and names of the machine are replaced.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STORE = Path(__file__).with_name("genuine.json.xz")
JOB = Path(__file__).with_name("script_job.py")
LIMIT = 150
"""Seconds for one run: the ranks' own time-out is 8 s, imports take up to a minute under load."""

FAULTS: dict[str, tuple[str, int | None]] = {
    "none": ("", None),
    "user-error": ("child-failed", 1),
    "exit": ("child-failed", 1),
    "killed": ("child-failed", 2),
    "segfault": ("child-failed", 1),
    "oom-forward": ("cuda-oom", 2),
    "oom-backward": ("cuda-oom", 1),
    "host-allocation": ("host-memory-pressure", 1),
    "disk-full": ("disk-full", 2),
    "hang": ("nccl-timeout", 1),
    "hang-backward": ("gradient-sync-timeout", 2),
    "stuck-init": ("ranks-stuck-at-init", 1),
    "unreachable": ("rendezvous-unreachable", 2),
    "device-ordinal": ("device-ordinal", 1),
    "bad-shape": ("checkpoint-incompatible", 2),
    "checkpoint-missing": ("checkpoint-incompatible", 1),
    "half": ("unsupported-model", 1),
    "nan": ("loss-nan", None),
    "nan-stops": ("loss-nan", None),
    "address-in-use": ("address-in-use", 0),
}
ENGINE_FAULTS: dict[str, tuple[str, int | None]] = {
    "none": ("", None),
    "batch": ("batch-arithmetic", None),
    "stage": ("deepspeed-init", None),
    "config-missing": ("deepspeed-init", None),
    "fp16": ("deepspeed-init", None),
    "sparse": ("unsupported-model", None),
    "loss-scale": ("loss-scale-collapse", None),
    "checkpoint-world": ("checkpoint-incompatible", None),
    "user-error": ("child-failed", 2),
}
"""With DeepSpeed's engine. The rank is None where all ranks fail alike."""


class Capture:
    """Reads the output of several processes and stamps each line."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        """Start a process and read its output."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._rest[name] = b""
        self._selector.register(process.stdout, selectors.EVENT_READ, name)

    def wait(self, *, alone: bool) -> None:
        """Read until all have ended; with `alone`, end the rest 12 s after the first failure."""
        deadline = time.monotonic() + LIMIT
        grace = None
        while self._selector.get_map():
            for key, _ in self._selector.select(0.2):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fileobj)
                    continue
                *whole, self._rest[key.data] = (self._rest[key.data] + data).split(b"\n")
                now = time.time()
                self.lines += [(now, key.data, text.decode(errors="replace")) for text in whole]
            if alone and grace is None and any(p.poll() not in {None, 0} for p in self._processes):
                grace = time.monotonic() + 12
            if time.monotonic() > min(deadline, grace or deadline):
                for process in self._processes:
                    if process.poll() is None:
                        os.killpg(process.pid, 9)
        for process in self._processes:
            process.wait()


def run(launcher: str, fault: str, culprit: int | None, *, engine: bool) -> dict[str, object]:
    """Run one fault and return what was printed, by source, with arrival times."""
    folder = Path(tempfile.mkdtemp(prefix="explain-"))
    holder = socket.create_server(("", 0))
    port = int(holder.getsockname()[1])
    if fault != "address-in-use":
        holder.close()
    environment = os.environ | {
        "JOB_DIR": str(folder / "ckpt"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = [str(JOB), "--fault", fault, "--culprit", str(culprit or 0)]
    script += ["--deepspeed-engine"] * engine
    capture = Capture()
    bin_folder = Path(sys.executable).parent
    if launcher == "torchrun":
        for node in range(2):
            capture.start(
                f"node{node}",
                [
                    str(bin_folder / "torchrun"),
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    f"--node-rank={node}",
                    "--master-addr=127.0.0.1",
                    f"--master-port={port}",
                    "--tee=3",
                    f"--log-dir={folder}/logs{node}",
                    *script,
                ],
                environment,
            )
    elif launcher == "deepspeed":
        capture.start(
            "node0",
            [
                str(bin_folder / "deepspeed"),
                "--num_gpus=3",
                f"--master_port={port}",
                *([] if engine else [f"--enable_each_rank_log={folder}/logs0"]),
                *script,
            ],
            environment,
        )
    else:
        for rank in range(3):
            capture.start(
                f"rank{rank}",
                [sys.executable, *script],
                environment
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
    capture.wait(alone=launcher == "plain")
    holder.close()
    files = {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "ckpt" not in path.parts and path.stat().st_size
    }
    shutil.rmtree(folder)
    found = {
        "launcher": launcher,
        "fault": fault,
        "engine": engine,
        "lines": capture.lines,
        "files": files,
    }
    neutral: dict[str, object] = json.loads(_neutral(json.dumps(found), folder))
    return neutral


def _neutral(text: str, folder: Path) -> str:
    """Replace what is of this machine."""
    text = re.sub(r"/[\w./-]+?/site-packages", "/opt/env/lib/python3.11/site-packages", text)
    text = text.replace(str(Path(sys.executable).parent), "/opt/env/bin")
    text = text.replace(str(JOB.parent), "/srv/train").replace("script_job.py", "train.py")
    text = text.replace(str(folder), "/srv/run").replace(socket.gethostname(), "gpu-a")
    return re.sub(
        r"/[\w./-]*?/lib/python3\.11/(?!site-packages)", "/opt/python/lib/python3.11/", text
    )


def main(chosen: list[str]) -> None:
    """Run what is not there yet, or the runs whose names hold one of these words."""
    found = json.loads(lzma.decompress(STORE.read_bytes())) if STORE.exists() else {}
    for engine, faults in ((False, FAULTS), (True, ENGINE_FAULTS)):
        for fault, (_, culprit) in faults.items():
            for launcher in ("plain", "torchrun", "deepspeed"):
                key = f"{launcher} {'engine ' * engine}{fault}"
                if (chosen and not any(word in key for word in chosen)) or (
                    not chosen and key in found
                ):
                    continue
                start = time.monotonic()
                found[key] = run(launcher, fault, culprit, engine=engine)
                print(
                    f"{key}: {len(found[key]['lines'])} lines, {time.monotonic() - start:.0f} s",
                    flush=True,
                )
                STORE.write_bytes(lzma.compress(json.dumps(found).encode()))


if __name__ == "__main__":
    main(sys.argv[1:])
