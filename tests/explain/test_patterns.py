"""Patterns: their own examples, the words that lead to them, and their time on hostile input."""

from __future__ import annotations

import importlib
import itertools
import re
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dshealthd import symptoms
from dshealthd.explain import patterns
from dshealthd.explain.patterns import Pattern, PatternError
from dshealthd.explain.prefilter import bare, needed
from dshealthd.explain.recognition import Recognizer

sre: Any = importlib.import_module("re._parser")  # what a pattern is made of

LOADED = patterns.load()
EVERY = LOADED.every
IDS = [f"{pattern.slug}/{pattern.name}" for pattern in EVERY]


def test_examples_match_and_others_do_not() -> None:
    """Every pattern matches its own examples, which have what it needs, or their lines would not be
    examined; and it matches none of the look-alikes beside them.
    """
    for pattern in EVERY:
        assert pattern.match, pattern.id
        assert pattern.no_match, pattern.id
        assert pattern.need.anchors, pattern.id
        for example in pattern.match:
            assert pattern.regex.search(example), (pattern.id, example)
            assert pattern.need.fits(bare(example)), (pattern.id, example)
            assert pattern in LOADED.candidates(bare(example))[0], example
        for example in pattern.no_match:
            assert not pattern.regex.search(example), (pattern.id, example)


@pytest.mark.parametrize("pattern", EVERY, ids=IDS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=st.data())
def test_whatever_a_pattern_matches_has_what_it_needs(
    pattern: Pattern, drawn: st.DataObject
) -> None:
    """What is needed is worked out from the expression, so any text that it matches has it."""
    text = drawn.draw(st.from_regex(re.compile(pattern.expression, re.ASCII)))
    assert pattern.need.fits(bare(text))
    assert pattern in LOADED.candidates(bare(text))[0]


@pytest.mark.parametrize(
    "pattern", [one for one in EVERY if one.role == "loss" and r"\d" not in one.expression]
)
@settings(max_examples=100)
@given(drawn=st.data())
def test_a_value_without_digits_is_found_without_them(
    pattern: Pattern, drawn: st.DataObject
) -> None:
    """So the search through a log decides once for all lines that differ in their digits."""
    before, after = drawn.draw(st.text("a 1_|")), drawn.draw(st.text("a 1_|"))
    text = before + drawn.draw(st.from_regex(re.compile(pattern.expression, re.ASCII))) + after
    if pattern.regex.search(text):
        assert pattern.regex.search(bare(text))


@pytest.mark.parametrize(
    ("regex", "anchors"),
    [
        ("Xid .* fell off", {" fell off"}),
        ("(?:error|lost): [ab]ox", {"error: aox", "error: box", "lost: aox", "lost: box"}),
        ("(?:out of memory|OOMKilled)", {"out of memory", "OOMKilled"}),
        ("a(?:bcd)?e+fgh", {"fgh"}),
        (r"\d+|abc", set()),
    ],
)
def test_anchors_of_an_expression(regex: str, anchors: set[str]) -> None:
    """Of what a match needs, the part whose shortest wording is longest."""
    assert set(needed(regex).anchors) == anchors


WORDS_OF = {
    "EFA": ("efa",), "DeepSpeed": ("deepspeed", "ds_"),
    "Slurm": ("slurm", "srun", "salloc", "launch for"),
    "Kubernetes": ("kube", "pod"), "vLLM": ("vllm", "engine"), "Lustre": ("lustre",),
    "Triton": ("triton",), "AMD": ("amd", "hip", "gpu node", "hw exception"), "gloo": ("gloo",),
    "InfiniBand": ("ib", "mlx5"), "Hugging Face": ("hugging",),
}  # fmt: skip
"""Components, and what shows them in a text."""


def test_no_component_is_blamed_that_the_text_does_not_show() -> None:
    """An extension that does not build is not DeepSpeed's, nor is a plug-in for libfabric EFA's."""
    for pattern, (component, words) in itertools.product(EVERY, WORDS_OF.items()):
        if component in f"{pattern.title} {pattern.says[-1]}":
            for example in pattern.match:
                assert any(word in example.lower() for word in words), (component, example)


def test_every_symptom_that_explain_recognizes_has_patterns_and_a_title() -> None:
    """The rows of the symptom table with *explain* are all there, and each slug has a title."""
    slugs = {pattern.slug for pattern in EVERY}
    wanted = {
        symptom.slug for symptom in symptoms.all_symptoms().values() if "explain" in symptom.means
    }
    assert len(wanted) > 15
    assert wanted - slugs == set()
    for slug in slugs:
        title, _ = patterns.heading(slug)
        assert title != slug


def test_a_wrong_file_says_what_is_wrong() -> None:
    """An unknown key, a wrong role and a bad expression are each named with their file."""
    row = 'name="n"\nlayer="program"\nsource="s"\nregex="a"\nsays="b"\nmatch=["a"]\nno_match=[]\n'
    assert patterns.parse("x", f"[[pattern]]\n{row}")[0][0].name == "n"
    for change, message in (
        ('color="red"', "unexpected keyword argument 'color'"),
        ('role="guilty"', "'guilty' is not one of cause"),
    ):
        with pytest.raises(PatternError, match=rf"x\.toml: .*{message}"):
            patterns.parse("x", f"[[pattern]]\n{row}{change}\n")
    with pytest.raises(PatternError, match=r"x\.toml: .*[Ee]rror"):
        patterns.parse("x", "[[pattern]]\n" + row.replace('regex="a"', 'regex="("'))


def prefixes(pattern: re.Pattern[str]) -> list[str]:
    """Return short texts that begin as a pattern begins: hostile if repeated."""
    found: list[str] = []

    def literal(items: Any) -> str:
        text = ""
        for operation, value in items:
            name = str(operation)
            if name == "LITERAL":
                text += chr(value)
            elif name == "SUBPATTERN":
                text += literal(value[3])
            elif name in {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}:
                text += literal(value[2]) or "1"
            elif name == "BRANCH":
                found.extend(text + literal(branch) for branch in value[1])
                text += literal(value[1][0])
            elif name in {"IN", "ANY", "NOT_LITERAL", "CATEGORY"}:
                text += "1" if "DIGIT" in str(value) else "a"
            if len(text) > 3:
                found.append(text)
        return text

    found.append(literal(sre.parse(pattern.pattern)))
    return sorted({text for text in found if text}, key=len)[-40:]


LONG = 2000
"""Half of the longest line kept: what grows with the cube of it takes minutes all the same."""


@pytest.mark.parametrize("pattern", EVERY, ids=IDS)
def test_no_pattern_takes_long_on_its_own_beginnings(pattern: Pattern) -> None:
    """Time grows no faster than the square of a hostile line, up to long ones."""
    for text in prefixes(pattern.regex):
        hostile = (text * (LONG // len(text) + 1))[:LONG]
        for line in (hostile, *(text + letter * LONG for letter in " a1")):
            start = time.thread_time()
            pattern.regex.search(line)
            assert time.thread_time() - start < 0.5, (text, line[:80])


def test_no_line_takes_long_whatever_it_repeats() -> None:
    """A line of 64 KiB of one trigger or prefix after another passes the whole way in seconds."""
    words = [
        *sorted({anchor for pattern in EVERY for anchor in pattern.need.anchors}),
        "[rank1]: ",
        "[E1122 04:44:58.499 a.cpp:1] ",
        "1: ",
        "a:1:2 [3] ",
    ]
    recognizer = Recognizer()
    start = time.thread_time()
    text = "\n".join((word * (1 << 16))[: 1 << 16] for word in words)
    from dshealthd.explain.input import Raw

    recognizer.add("hostile", [Raw(n, line) for n, line in enumerate(text.split("\n"), 1)])
    assert time.thread_time() - start < 2.0 * len(words)
