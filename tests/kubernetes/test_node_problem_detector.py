"""The plugin of node-problem-detector: its exit status and its line, by what the agent answers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import agents
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "node-problem-detector"
NVML_ERROR_GPU_IS_LOST = 15


def plugin(port: int) -> tuple[int, str]:
    """Run the plugin as node-problem-detector does; return its exit status and its line."""
    done = subprocess.run(
        [str(DIRECTORY / "dshealthd-fit")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "DSHEALTHD_PORT": str(port)},
    )
    (line,) = done.stdout.splitlines()
    assert len(line) <= 80
    assert not done.stderr
    return done.returncode, line


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """Yield a port that nobody listens on, nor will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def answering(text: bytes | None) -> Iterator[int]:
    """Answer with these bytes, or with None never; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    asked = b""
                    while not asked.endswith(b"\r\n\r\n"):
                        asked += connection.recv(4096)
                    if text is None:
                        done.wait(120)
                    else:
                        connection.sendall(text)

        thread = threading.Thread(target=run)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "status", "line"),
    [
        (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nfit\n", 0, "fit"),
        (
            b"HTTP/1.1 503 Service Unavailable\r\n\r\nunfit: gpu_lost (GPU 3)\n",
            1,
            "unfit: gpu_lost (GPU 3)",
        ),
        (b"HTTP/1.1 503 x\r\n\r\nunknown: gpu: timeout\n", 2, "unknown: gpu: timeout"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>\n", 2, "unknown: the agent answers 200 <html>"),
        (b"HTTP/1.1 401 x\r\n\r\nUnauthorized\n", 2, "unknown: the agent answers 401 Unauthorized"),
        (b"HTTP/1.1 503 x\r\n\r\nunfit: " + b"x" * 200 + b"\n", 1, "unfit: " + "x" * 73),
        (b"nonsense", 2, None),
        (b"", 2, None),
        (None, 2, None),
    ],
)
def test_answers(answer: bytes | None, status: int, line: str | None) -> None:
    """Only `fit` is 0 and only `unfit` is 1; all else, nobody too, is unknown within seconds."""
    started = time.monotonic()
    with nobody() as port:
        assert plugin(port) == (2, f"unknown: the agent on 127.0.0.1:{port} does not answer")
    alone = time.monotonic() - started
    with answering(answer) as port:
        found = plugin(port)
    assert found[0] == status
    assert found[1] == (line or f"unknown: the agent on 127.0.0.1:{port} does not answer")
    assert time.monotonic() - started < 10 + 20 * alone  # of bash, on a busy machine


def test_agent(tmp_path: Path) -> None:
    """A real agent: fit, unfit with the GPU that is lost, and fit again."""
    gpus = Simulator(tmp_path, 2)
    gpus.pci_sysfs(tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    config = f'[path]\nsysfs = "{tmp_path}/sys"\ndev = "{tmp_path}/dev"\n'
    with agents.running(tmp_path, config, environment=gpus.environment()) as agent:

        def await_(wanted: tuple[int, str]) -> None:
            end = time.monotonic() + 120
            while (found := plugin(agent.port)) != wanted:
                assert time.monotonic() < end, found
                time.sleep(0.3)

        await_((0, "fit"))
        gpus.fault("fail", NVML_ERROR_GPU_IS_LOST, gpu=1)
        await_((1, "unfit: gpu_lost (GPU 1)"))
        gpus.clear_faults()
        await_((0, "fit"))


def test_its_configuration() -> None:
    """What node-problem-detector reads. The plugin's place, and no more characters than it takes."""
    document = json.loads((DIRECTORY / "dshealthd.json").read_text(encoding="utf-8"))
    assert document["pluginConfig"]["max_output_length"] == 80
    assert Path(document["rules"][0]["path"]).name == "dshealthd-fit"
