"""The answer's bytes, read by protobuf, and what NVRx concludes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.options import Errors, decode
from dshealthd.nvrx.fitness import FailedCheck, Fitness, FitnessCheck
from dshealthd.nvrx.frames import answer
from dshealthd.nvrx.options import NvrxOptions
from tests.nvrx.client import Response, Said

MAX_FAILURES = 32


def said(*findings: FailedCheck) -> Said:
    """Return what a client reads of the answer for these findings."""
    return Said(Response.FromString(answer(Fitness(findings, ()))["response"].encode("latin-1")))


def test_fit() -> None:
    """A node without findings is healthy to NVRx."""
    answer = said()
    assert answer.healthy
    assert (answer.response.success, answer.response.exit_code, answer.response.error) == (
        True,
        0,
        "",
    )
    assert json.loads(answer.response.output)["fail_count"] == 0


def test_unfit() -> None:
    """A node with a finding is not, by each of the signs that NVRx looks at, and the launcher's log
    names the part.
    """
    answer = said(FailedCheck(FitnessCheck.GPU_LOST, "gpu 3", "GPU-abc is lost to NVML"))
    assert not answer.healthy
    assert (answer.response.success, answer.response.exit_code) == (False, 1)
    assert json.loads(answer.response.output) == {
        "fail_count": 1,
        "failed_checks": ["gpu_lost (gpu 3): GPU-abc is lost to NVML"],
        "source": "dshealthd",
    }
    assert answer.response.error == "gpu_lost (gpu 3): GPU-abc is lost to NVML"


@given(
    st.lists(
        st.builds(FailedCheck, st.sampled_from(FitnessCheck), st.text(), st.text(max_size=5000)),
        min_size=1,
        max_size=100,
    )
)
def test_any_text(findings: list[FailedCheck]) -> None:
    """Whatever findings say and however many they are, protobuf reads the answer and NVRx the
    number.
    """
    answer = said(*findings)
    assert not answer.healthy
    output = json.loads(answer.response.output)
    assert (output["fail_count"], len(output["failed_checks"])) == (
        len(findings),
        min(len(findings), MAX_FAILURES),
    )


@pytest.mark.parametrize(("findings", "named"), [(32, 32), (33, 32)])
def test_few_failures_are_named(findings: int, named: int) -> None:
    """The launcher prints what an answer names into its log; all are counted."""
    answer = said(*[FailedCheck(FitnessCheck.GPU_LOST, "gpu 3", "lost")] * findings)
    output = json.loads(answer.response.output)
    assert (output["fail_count"], len(output["failed_checks"])) == (findings, named)


def test_unknown_has_no_answer() -> None:
    """What is not known is neither healthy nor unhealthy: the frame says why."""
    made = answer(Fitness((), ("gpu: not sampled yet", "x" * 5000)))
    said = f"dshealthd does not know: gpu: not sampled yet; {'x' * 4074}"
    assert made == {"unknown": said}


@pytest.mark.parametrize(
    ("path", "usable"), [("/" + "x" * 106, True), ("/" + "x" * 107, False), ("nvhcd.sock", False)]
)
def test_paths_of_the_socket(path: str, *, usable: bool) -> None:
    """A Unix socket's path has at most 107 bytes, and depends on no working directory."""
    errors = Errors()
    decode(NvrxOptions, {"socket": path}, "nvrx", errors)
    assert errors == (
        [] if usable else ["nvrx.socket: must be an absolute path of at most 107 bytes"]
    )
