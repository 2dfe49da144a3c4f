"""Charts of pages are left blank in the files whose tests read what a page says, but where a test asks for `drawn`."""

from __future__ import annotations

import pytest

from tests.support.figures import blank_charts

READ = {
    "test_differences.py",
    "test_prediction_analysis.py",
    "test_report.py",
    "test_structures.py",
}


@pytest.fixture
def drawn() -> None:
    """For tests that look at the charts, or at data of which one might not be drawn."""


@pytest.fixture(autouse=True)
def pages_are_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts blank: drawing them takes far longer than all else of a page."""
    if request.path.name in READ and "drawn" not in request.fixturenames:
        blank_charts(monkeypatch)
