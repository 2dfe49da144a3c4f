"""Whatever an expression says, reading it ends in a report or in a refusal."""

from __future__ import annotations

import platform
import re
import string

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from medfl.core.untrusted import Refused
from medfl.policy import expressions
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses

MEMBERS = (
    "os.path.join", "glob.glob", "json.load", "math.pi", "np.where", "torch.where", "monai.transforms.Flip",
    "monai.utils.first", "torch.nn.functional.pad", "os.listdir",
)  # fmt: skip
NAMES = {
    **DEFAULT_NAMES,
    "os": "os",
    "Path": "pathlib.Path",
    "glob": "glob",
    "json": "json",
    "math": "math",
}
LEAVES = st.one_of(
    st.sampled_from(
        [
            "@number",
            "@text",
            "@path",
            "@tensor",
            "@array",
            "@network",
            "@list",
            "@dict",
            "x",
            "...",
            "None",
        ]
    ),
    st.sampled_from(MEMBERS),
    st.sampled_from(sorted(expressions._BUILTINS)),
    st.sampled_from(
        [
            "os.system",
            "__import__('os')",
            "open",
            "setattr",
            "print",
            "exec",
            "@nowhere",
            "@",
            "torch.save",
        ]
    ),
    st.integers(-(10**12), 10**12).map(str),
    st.floats(allow_nan=False).map(repr),
    st.text(string.printable, max_size=12).map(repr),
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Grow an expression around others, in all the ways that Python has."""
    name = st.sampled_from(
        [
            *("shape", "item", "parameters", "exists", "append", "sort", "to"),
            "replace",
            "format",
            "write_text",
            "chmod",
            "f_back",
            "gi_frame",
            "__class__",
        ]
    )
    operator = st.sampled_from(
        ["+", "-", "*", "/", "//", "%", "**", "@", "<<", "&", "|", "and", "or", "in", "is not", "<"]
    )
    return st.one_of(
        st.tuples(inner, name).map(lambda p: f"{p[0]}.{p[1]}"),
        st.tuples(inner, name, inner).map(lambda p: f"{p[0]}.{p[1]}({p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}({p[1]})"),
        st.tuples(inner, inner, inner).map(lambda p: f"{p[0]}({p[1]}, mode={p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}(*{p[1]})"),
        st.tuples(inner, operator, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}[{p[1]}]"),
        st.tuples(inner, inner, inner).map(lambda p: f"[{p[0]} for x in {p[1]} if {p[2]}]"),
        st.tuples(inner, inner).map(lambda p: f"{{{p[0]}: {p[1]}}}"),
        st.tuples(inner, inner).map(lambda p: f"(lambda x={p[1]}: {p[0]})"),
        st.tuples(inner, inner).map(lambda p: f"list(map({p[0]}, [{p[1]}]))"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        inner.map(lambda p: f'f"{{{p}:03d}}"'),
        inner.map(lambda p: f"-{p}"),
        inner.map(lambda p: f"[{p}, *{p}]"),
    )


EXPRESSIONS = st.recursive(LEAVES, combined, max_leaves=8)


def attempt(text: str) -> bool:
    """Read an expression, and return whether it is let through; it is not evaluated."""
    try:
        ExpressionFilter(NAMES).check(text, Uses())
    except Refused:
        return False
    assert "__" not in text
    return True


def fuzz(count: int) -> None:
    let_through: list[str] = []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(EXPRESSIONS)
    def each(text: str) -> None:
        if attempt(text):
            let_through.append(text)

    each()
    assert len(let_through) > count / 20


def test_expressions_end_in_a_report_or_a_refusal() -> None:
    fuzz(500)


def test_a_grammar_of_newer_pythons_is_said_with_this_ones_version() -> None:
    version = ".".join(platform.python_version_tuple()[:2])
    with pytest.raises(Refused, match=rf"Python {re.escape(version)} does not parse"):
        ExpressionFilter(NAMES).check("f'{@text!}'", Uses())


@pytest.mark.slow
def test_many_expressions_end_in_a_report_or_a_refusal() -> None:
    fuzz(5_000)
