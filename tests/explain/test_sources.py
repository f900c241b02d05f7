"""Logs of pods, and the kernel's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.explaining import explained, explained_text

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("prefix", "host"),
    [
        ("2026-01-05 10:00:00,123 ERROR train: ", None),
        ("2026-01-05T10:00:00.123Z WARNING engine.core: ", None),
        ("2026-01-05 10:00:00 info train: ", None),
        ("2026-01-05 10:00:00,123 train.py ERROR: ", None),
        ("Jan  5 10:00:00 CRITICAL train: ", None),
        ("2026-01-05T10:00:00+0000 gpu-7 train[12]: ", "gpu-7"),
        ("2026-01-05T10:00:00+0000 node train[12]: ", "node"),
        ("Jan  5 10:00:00 GPU7 train[12]: ", "GPU7"),
    ],
)
def test_a_level_is_no_host(prefix: str, host: str | None) -> None:
    """Python's loggers put a level where syslog puts a host: a field counts by what it can be."""
    finding = explained(f"{prefix}OSError: [Errno 28] No space left on device: '/ckpt/x.pt'")
    assert (finding.slug, finding.host) == ("disk-full", host)


def test_addresses_before_lines_that_are_numbered_are_hosts() -> None:
    """They are no mark, although they are nothing but numbers."""
    lines = [f"10.4.7.{11 + number % 2} | starting {number}" for number in range(8)]
    lines += [f"10.4.7.12 | {OOM}"]
    assert explained(*lines).host == "10.4.7.12"
    assert explained(*(f"{n:>6}  {line}" for n, line in enumerate(lines, 1))).host == "10.4.7.12"


def test_the_fields_of_a_description_are_no_hosts() -> None:
    """`kubectl describe` puts a word and a colon before each line, as pdsh does with hosts."""
    finding = explained(
        "Name:             trainer-3",
        "Namespace:        training",
        "Status:           Failed",
        "Reason:           Evicted",
        "Message:          The node was low on resource: memory. Threshold quantity: 100Mi",
        "Labels:           app=trainer",
    )
    assert (finding.slug, finding.host) == ("host-memory-pressure", None)


def test_only_a_port_of_the_store_is_of_rank_0() -> None:
    """Any other server of any rank may want a port that is taken."""
    store = explained("RuntimeError: Address already in use")
    assert (store.slug, store.ranks) == ("address-in-use", (0,))
    other = explained("zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.4:4101')")
    assert (other.slug, other.ranks) == ("address-in-use", ())


@pytest.mark.parametrize(("rank", "ranks"), [(3, (3,)), (1, (0, 1)), (0, (0, 1))])
def test_the_ranks_of_a_group_are_not_those_of_the_job(rank: int, ranks: tuple[int, ...]) -> None:
    """NCCL names the ranks of a communicator: if its reporter is neither, they are others."""
    prefix = f"[rank{rank}]: "
    finding = explained(
        f"{prefix}torch.distributed.DistBackendError: NCCL error in: a.cpp:94, invalid usage",
        f"{prefix}Last error:",
        f"{prefix}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000",
    )
    assert (finding.slug, finding.ranks) == ("device-ordinal", ranks)


def test_each_file_that_tail_heads_is_a_log_of_its_own(tmp_path: Path) -> None:
    """`tail -n 100 *.log` puts a line before each file, which tells whose lines follow."""
    lines = ["==> rank1.log <==", "step 1 | loss 2.1", "RuntimeError: NCCL error: remote", ""]
    lines += ["==> rank2.log <==", "step 1 | loss 2.1", OOM, ""]
    finding = explained_text(tmp_path, "\n".join(lines))
    assert (finding.slug, finding.ranks) == ("cuda-oom", (2,))
    assert finding.proof[0].file.endswith("job.out")
    assert finding.proof[0].line == lines.index(OOM) + 1


def test_a_head_far_from_any_failure_is_read(tmp_path: Path) -> None:
    """It tells the rank of what fails long after it."""
    steps = "".join(f"step {number} | loss 2.1\n" for number in range(20_000))
    text = f"==> rank1.log <==\n{steps}==> rank2.log <==\n{steps}{OOM}\n"
    assert explained_text(tmp_path, text).ranks == (2,)
