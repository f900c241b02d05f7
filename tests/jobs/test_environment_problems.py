"""What is wrong with environments, whatever stands in them.

Case by case it is tested with the collector that tells it.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.environment import ALLOWED, NCCL_COMMON, Launch, Launcher
from dshealthd.jobs.environment_problems import (
    Problem,
    adapters,
    differing,
    interface,
    names,
    place,
    values,
)
from dshealthd.jobs.nccl.names import Misnomer
from dshealthd.jobs.nccl.settings import Misfit

ENVIRONMENTS = st.dictionaries(st.sampled_from(sorted(ALLOWED)), st.text(max_size=40))
NUMBERS = st.none() | st.integers(0, 10**12)
WRONG = {*Problem, *Misfit, *Misnomer}


@given(ENVIRONMENTS, st.integers(0, 10**12), NUMBERS, NUMBERS, st.none() | st.integers(0, 16))
def test_any_environment_is_judged(
    environment: dict[str, str], rank: int, local: int | None, size: int | None, gpus: int | None
) -> None:
    """Whatever a user writes, what is told are names of ours and problems of ours, and nothing is
    raised.
    """
    launch = Launch(Launcher.TORCH, rank, local, size)
    found = {
        *names(environment),
        *values(environment),
        *place(launch, environment, gpus),
        *interface(
            environment.get("NCCL_SOCKET_IFNAME", ""), {"lo": True, "eth0": None}, many_nodes=True
        ),
        *adapters(environment.get("NCCL_IB_HCA", ""), {("mlx5_0", 1): True, ("mlx5_1", 1): False}),
    }
    assert {variable for variable, _ in found} <= ALLOWED | {"other"}
    assert {problem for _, problem in found} <= WRONG


@given(st.dictionaries(st.integers(0, 20), ENVIRONMENTS))
def test_ranks_with_the_same_settings_never_differ(settings: dict[int, dict[str, str]]) -> None:
    """A rank differs only if another has another value."""
    found = set(differing(settings))
    for name in NCCL_COMMON:
        those = {rank for rank, (variable, _) in found if variable == name}
        rest = {rank: settings[rank].get(name) for rank in settings.keys() - those}
        assert len(set(rest.values())) <= 1
        assert bool(those) == (len({values.get(name) for values in settings.values()}) > 1)


def test_of_two_the_first_is_right() -> None:
    """Where as many have one value as the other, those are told that do not have the lowest
    rank's.
    """
    found = list(differing({0: {"NCCL_ALGO": "Ring"}, 1: {}}))
    assert found == [(1, ("NCCL_ALGO", Problem.DIFFERS))]


def test_unknown_is_not_down() -> None:
    """An interface or a port of which it is not known whether it works is not told as down."""
    assert list(interface("eth0", {"eth0": None}, many_nodes=True)) == []
    assert list(adapters("=mlx5_0", {("mlx5_0", 1): None})) == []
