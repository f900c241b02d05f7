"""What crosses between worker and agent arrives as it was sent, and what is nonsense is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core import documents, wire
from dshealthd.core.collector import Fault, Reason, gauge
from dshealthd.core.result import CollectionOutcome, CollectionResult

A = gauge("x_a", "A.", "part")
B = gauge("x_b", "B.")
METRICS = {"c": {"x_a": A, "x_b": B}}


def sent(encoder: wire.Encoder, result: CollectionResult) -> dict[str, Any]:
    """Return the message that a frame of this result carries."""
    frame = encoder.pack("c", result)
    (size,) = wire.LENGTH.unpack(frame[: wire.LENGTH.size])
    assert size == len(frame) - wire.LENGTH.size
    message: dict[str, Any] = json.loads(frame[wire.LENGTH.size :])
    return message


samples = st.builds(
    lambda label, value: A(value, label), st.text(max_size=5), st.floats(allow_nan=False)
) | st.builds(B, st.floats(allow_nan=False))
results = st.builds(
    CollectionResult,
    outcome=st.sampled_from(CollectionOutcome),
    samples=st.lists(samples, max_size=6).map(tuple),
    faults=st.lists(
        st.builds(Fault, st.text(max_size=3), st.sampled_from(Reason), st.text(max_size=3)),
        max_size=2,
    ).map(tuple),
    reason=st.none() | st.sampled_from(Reason),
    detail=st.text(max_size=5),
    duration=st.floats(0, 10),
    replace_worker=st.booleans(),
)


@given(st.lists(results, max_size=4))
def test_results_arrive_as_they_were(sweeps: list[CollectionResult]) -> None:
    """A sequence of results is equal on the other side, although a series is not
    named each time.
    """
    encoder, decoder = wire.Encoder(), wire.Decoder(METRICS)
    for result in sweeps:
        assert decoder.unpack(sent(encoder, result)) == result


def test_a_series_is_named_once() -> None:
    """From the second sweep on only values cross, while the series are the same."""
    encoder = wire.Encoder()
    result = CollectionResult(CollectionOutcome.OK, (A(1.0, "p"), B(2.0)))
    first, second = sent(encoder, result), sent(encoder, result)
    assert first["series"] == [["x_a", ["p"]], ["x_b", []]]
    assert second["series"] is None
    assert second["values"] == [1.0, 2.0]


def test_series_of_ended_jobs_are_forgotten() -> None:
    """Of thousands of short jobs neither side remembers more than the last collection's series."""
    encoder, decoder = wire.Encoder(), wire.Decoder(METRICS)
    for job in range(500):
        samples = tuple(A(float(rank), f"{job}/{rank}") for rank in range(8))
        message = sent(encoder, CollectionResult(CollectionOutcome.OK, samples))
        decoder.unpack(message)
    (kept,), (read,) = encoder._last.values(), decoder._last.values()
    assert len(kept) == len(read) == 8


@pytest.mark.parametrize("nonsense", [
    {"series": []},
    {"series": None},
    {"series": [7]},
    {"series": [["x_b", 7]]},
    {"series": [["x_b", []], ["x_b", []]]},
    {"values": []},
    {"values": [1.0, 2.0]},
    {"values": ["a"]},
    {"values": None},
    {"series": [["x_z", []]]},
    {"series": 5},
    {"outcome": "fine"},
    {"reason": "because"},
    {"duration": "long"},
    {"result": "d"},
])  # fmt: skip
def test_nonsense_is_refused(nonsense: dict[str, Any]) -> None:
    """A frame of the wrong shape raises one of the errors that the supervisor turns into
    `malformed`.
    """
    message = sent(wire.Encoder(), CollectionResult(CollectionOutcome.OK, (B(1.0),)))
    with pytest.raises(documents.MISSHAPEN):
        wire.Decoder(METRICS).unpack({**message, **nonsense})


def test_figures_that_json_lacks_arrive() -> None:
    """What is no number is told as such; the frame is JSON all the same."""
    values = (1.5, math.nan, math.inf, -math.inf)
    odd = tuple(A(value, str(place)) for place, value in enumerate(values))
    frame = wire.Encoder().pack("c", CollectionResult(CollectionOutcome.OK, odd))[
        wire.LENGTH.size :
    ]
    message = json.loads(frame, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    arrived = [sample.value for sample in wire.Decoder(METRICS).unpack(message).samples]
    assert [*map(str, arrived)] == [*map(str, values)]
