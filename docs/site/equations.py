"""Equations as MathML, written when the site is built: no script and no font is loaded to show them."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<way>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)

_NORM = "&#x02016;"
"""The bars of a norm: browsers stretch them to the height of the line unless told not to."""


def on_page_content(html: str, **_: Any) -> str:
    """Replace what `pymdownx.arithmatex` marked as LaTeX (a hook of MkDocs)."""
    return _EQUATION.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    block = found["way"] == "["
    mathml = convert(unescape(found["latex"]).strip(), display="block" if block else "inline")
    mathml = mathml.replace(f"<mo>{_NORM}</mo>", f'<mo stretchy="false">{_NORM}</mo>')
    return f'<div class="equation">{mathml}</div>' if block else mathml
