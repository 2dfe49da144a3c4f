"""The environment of the report's templates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import jinja2

from medfl.core import visible
from medfl.evaluation import metrics
from medfl.report import formatting


def rendered(template: str, values: Mapping[str, object]) -> bytes:
    """Return a page; a name missing from the values is an error, and values are escaped."""
    return visible(_environment().get_template(template).render(values)).encode()


@cache
def _environment() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "count", "each", "interval", "sd", "signed", "command"):
        templates.filters[name] = getattr(formatting, name)

    templates.filters |= {
        "bytes": formatting.size,
        "seconds": formatting.duration,
        "title": metrics.title,
    }
    return templates
