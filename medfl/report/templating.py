"""The environment of the report's templates."""

from __future__ import annotations

from functools import cache

import jinja2

from medfl.evaluation import metrics
from medfl.report import formatting


@cache
def environment() -> jinja2.Environment:
    """Return the environment of the templates; a name that is not in the context is an error, values are escaped."""
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
