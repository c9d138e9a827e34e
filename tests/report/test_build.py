"""What a report says of itself."""

from __future__ import annotations

import pytest
from report.samples import make_report

from latte_convert.report.build import no_saving
from latte_convert.report.schema import FlopsReport


@pytest.mark.parametrize(("hybrid", "warned"), [(5.1e9, False), (11.4e9, True), (12e9, True)])
def test_fidelity_that_comes_from_short_samples_is_called_so(hybrid: float, warned: bool) -> None:
    report = make_report()
    assert report.cost is not None
    cost = report.cost.model_copy(update={"flops": FlopsReport(original=11.4e9, hybrid=hybrid)})
    found = no_saving(cost, report.converted)
    assert len(found) == warned
    assert all("(785 keys)" in text for text in found)
    assert no_saving(cost, []) == []
