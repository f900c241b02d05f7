"""Without `/dev/null`, which each start of a child opens, in a namespace of the agent's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import RunningAgent, running
from tests.kernel_log import KernelLog

CONFIG = """
[path]
dev = "{dev}"
[collectors.network]
interval = "200ms"
[collectors.memory]
interval = "200ms"
[collectors.kernel_log]
interval = "{interval}"
"""
XIDS = "dshealthd_xid_errors_total"
WRITTEN = "dshealthd_state_write_last_success_timestamp_seconds"
FAILED = "dshealthd_state_write_failures_total"


def apart(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command in a mount namespace of its own."""
    return subprocess.Popen(["unshare", "--mount", *command], **options)


def mount_namespace(pid: int | str) -> str:
    """Return which mount namespace a process is in."""
    return os.readlink(f"/proc/{pid}/ns/mnt")


@contextlib.contextmanager
def without_null(agent: RunningAgent) -> Iterator[None]:
    """Have the agent, and nobody else, find nothing in /dev; its namespace ends with it."""
    assert mount_namespace(agent.pid) != mount_namespace("self")
    within = ["nsenter", f"--target={agent.pid}", "--mount"]
    subprocess.run([*within, "mount", "-t", "tmpfs", "none", "/dev"], check=True, timeout=60)
    yield
    subprocess.run([*within, "umount", "/dev"], check=True, timeout=60)


def test_49_dev_null_is_gone(tmp_path: Path) -> None:
    """Workers say that they cannot start; state is neither kept nor taken for none; all recover."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, timeout=60).returncode:
        pytest.skip("a mount namespace is not permitted here")
    dev, up = tmp_path / "dev", {"collector": "network"}
    with (
        contextlib.closing(KernelLog(dev / "kmsg")) as kernel,
        running(tmp_path, CONFIG.format(dev=dev, interval="100ms"), popen=apart) as agent,
    ):
        kernel.say("NVRM: Xid (PCI:0000:66:00): 79, pid=1, name=x, test")
        agent.wait(lambda s: s.value("dshealthd_collector_up", **up) == 1)
        agent.wait(lambda s: s.value(XIDS) == 1 and s.value(WRITTEN, file="kernel_log"))
        with without_null(agent):
            for worker in agent.workers():
                os.kill(worker, signal.SIGKILL)
            why = {**up, "reason": "cannot_start"}
            agent.wait(lambda s: s.value("dshealthd_collector_failing", **why) == 1)
            status = agent.get("/api/v1/status")
            assert "cannot be started: [Errno 2] No such file or directory: '/dev/null'" in status
            kernel.say("NVRM: Xid (PCI:0000:66:00): 79, pid=1, name=x, test")
            scrape = agent.wait(lambda s: s.value(FAILED, file="kernel_log"))
            assert scrape.value(XIDS) == 2
            assert scrape.value("dshealthd_collector_up", collector="memory") == 1
            (tmp_path / "dshealthd.toml").write_text(CONFIG.format(dev=dev, interval="101ms"))
            agent.process.send_signal(signal.SIGHUP)
            agent.wait_log("the saved position cannot be read")
        assert agent.process.poll() is None
        kernel.say("NVRM: Xid (PCI:0000:66:00): 79, pid=1, name=x, test")
        before = agent.scrape().value(WRITTEN, file="kernel_log") or 0.0
        agent.wait(lambda s: (s.value(WRITTEN, file="kernel_log") or 0.0) > before)
        agent.wait(lambda s: s.value("dshealthd_collector_up", **up) == 1, 70.0)
