from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from latte_convert.recipe import Recipe
from latte_convert.report.html import (
    VERDICTS,
    block_chart,
    render_html,
    sensitivity_bars,
    sensitivity_scale,
    verdict_of,
    write_html,
)
from latte_convert.report.schema import (
    AgreementReport,
    CalibrationReport,
    CostReport,
    FidelityReport,
    FitReport,
    FlopsReport,
    Report,
    ScoreReport,
    SiteReport,
    SourceReport,
)

LONG = "model.vision_tower.backbone.stages.encoder.layers.{}.self_attn"
VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}
DASH = "\u2013"
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def site(name: str, score: float | None, *, converted: bool, reason: str | None = None) -> SiteReport:
    eligible = reason is None
    return SiteReport(
        name=name,
        tower="vision",
        kind="self",
        causal=False,
        heads=6,
        head_dim=64,
        eligible=eligible,
        reason=reason,
        converted=converted,
        score=ScoreReport(value=score, cosine=None, mse=0.001) if eligible else None,
        fit=FitReport(alpha=[0.41], ratio=[18.7], calibration_error=0.0312, heldout_cosine=0.971 if converted else None)
        if eligible
        else None,
    )


def scores(count: int) -> list[float]:
    """From 0.0021 up to 2.3, with the bumps that real models have: more than two decades."""
    return [0.0021 * 1100 ** (((i * 7) % count) / max(count - 1, 1)) for i in range(count)]


def make_report(
    *,
    sites: int = 12,
    convert: int = 8,
    pattern: str = "encoder.layer.{}.attention.attention",
    cosine: float = 0.9341,
    fidelity: bool = True,
    forward_ms: tuple[float, float] = (41.2, 36.9),
    **changes: object,
) -> Report:
    values = scores(sites)
    robust = set(sorted(range(sites), key=values.__getitem__)[:convert])
    rows = [site(pattern.format(i), values[i], converted=i in robust) for i in range(sites)]
    blocks = {
        pattern.format(i).rsplit(".attention.attention", 1)[0].removesuffix(".self_attn"): AgreementReport(
            cosine=1 - (1 - cosine) * (i + 1) / sites, relative_error=0.04 + 0.3 * i / sites
        )
        for i in range(sites)
    }
    measured = FidelityReport(
        samples=8,
        primary="last_hidden_state",
        outputs={
            "last_hidden_state": AgreementReport(cosine=cosine, relative_error=0.3521),
            "last_hidden_state.prefix": AgreementReport(cosine=cosine - 0.02, relative_error=0.4127),
            "pooler_output": AgreementReport(cosine=cosine - 0.02, relative_error=None),
        },
        blocks=blocks,
    )
    cost = CostReport(
        parameters=22_056_576,
        parameters_added=3112,
        tokens={row.name: 785.0 for row in rows},
        flops=FlopsReport(original=11.358e9, hybrid=5.107e9),
        flops_paper=FlopsReport(original=2.8394e9, hybrid=1.1063e9),
        forward_ms=dict(zip(("original", "hybrid"), forward_ms, strict=True)),
        seconds={"load": 0.61, "calibrate": 14.2, "score": 9.83, "measure": 5.02},
        peak_memory_bytes=1_417_339_904,
        device="cpu",
        threads=2,
    )
    report = Report(
        tool_version="0.1.0",
        library_versions={"torch": "2.14.1", "transformers": "5.24.0", "datasets": "5.2.0"},
        created="2026-01-15T09:30:00+00:00",
        source=SourceReport(
            id="facebook/dinov2-small",
            revision="ed25f3a31f01632728cabb09d1542f84ab7b0056",
            library="transformers",
            model_class="Dinov2Model",
            sha256={"model.safetensors": HEX},
        ),
        recipe=Recipe().model_dump(mode="json"),
        calibration=CalibrationReport(
            source="photos/",
            modality="images",
            requested=32,
            used=23,
            held_out=8,
            truncated=0,
            skipped=[{"id": "IMG_0042.jpg", "reason": "truncated file: 12 of 48 kB"}],
            fingerprint=HEX,
        ),
        sites=rows,
        converted=[row.name for row in rows if row.converted],
        fidelity=measured if fidelity else None,
        cost=cost if fidelity else None,
        warnings=[],
    )
    return report.model_copy(update=changes)


class Page(HTMLParser):
    """Parses strictly: every tag that opens must close, in order; collects text, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), f"repeated attribute in <{tag}>"
        if tag in ("td", "th", "li"):
            self.text.append(" ")  # cells stand apart without white space
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


CASES = {
    "plain": make_report(),
    "scored": make_report(fidelity=False),
    "nothing converted": make_report(convert=0, cosine=1.0),
    "48 sites": make_report(sites=48, convert=32, pattern=LONG),
    "one site": make_report(sites=1, convert=1),
    "no sites": make_report(fidelity=False, sites=0, convert=0),
    "warned": make_report(warnings=["3 tensors have no place in the model"]),
}


@pytest.fixture(params=CASES, ids=str)
def report(request: pytest.FixtureRequest) -> Report:
    return CASES[request.param]


def with_fidelity(report: Report, **changes: object) -> Report:
    assert report.fidelity is not None
    return report.model_copy(update={"fidelity": report.fidelity.model_copy(update=changes)})


def with_cost(report: Report, **changes: object) -> Report:
    assert report.cost is not None
    return report.model_copy(update={"cost": report.cost.model_copy(update=changes)})


class TestPage:
    def test_is_well_formed(self, report: Report) -> None:
        page = Page(render_html(report))
        assert page.all("html") == [{"lang": "en"}]
        assert [tag for tag, _ in page.tags if tag in ("h1", "main")] == ["h1", "main"]

    def test_is_self_contained(self, report: Report) -> None:
        html = render_html(report)
        page = Page(html)
        links = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href")]
        assert all(link is not None and link.startswith("#") for link in links)
        assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
        assert "@import" not in html
        assert set(re.findall(r"url\(([^)]*)\)", html)) == {"#hatch"}

    def test_ids_are_unique_and_references_resolve(self, report: Report) -> None:
        page = Page(render_html(report))
        ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
        assert len(ids) == len(set(ids))
        labels = [i for _, attrs in page.tags for i in (attrs.get("aria-labelledby") or "").split()]
        assert set(labels) | {a["href"][1:] for a in page.all("a") if a["href"]} <= set(ids)

    def test_every_drawing_and_table_header_is_labelled(self, report: Report) -> None:
        page = Page(render_html(report))
        for svg in page.all("svg"):
            nested = "viewbox" in svg or "y" in svg
            assert nested or svg.get("aria-hidden") or svg.get("aria-label") or svg.get("aria-labelledby")
        assert all(th.get("scope") in ("row", "col") for th in page.all("th"))

    def test_headings_do_not_skip_a_level(self, report: Report) -> None:
        levels = [int(tag[1]) for tag, _ in Page(render_html(report)).tags if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))

    def test_is_deterministic_and_small(self, report: Report) -> None:
        html = render_html(report)
        assert render_html(Report.model_validate_json(report.model_dump_json())) == html
        assert len(html.encode()) < 200_000

    def test_write_html(self, tmp_path: Path) -> None:
        report = make_report()
        write_html(report, tmp_path / "report.html")
        assert (tmp_path / "report.html").read_bytes().decode("utf-8") == render_html(report)

    def test_everything_from_outside_is_escaped(self) -> None:
        bad = "<script>alert('x')</script>\"&"
        report = make_report()
        rows = [
            site(f"a.{bad}", 0.1, converted=True),
            site(f"b.{bad}", None, converted=False, reason=f"reason {bad}"),
        ]
        assert report.fidelity is not None
        agreement = report.fidelity.outputs["last_hidden_state"]
        hostile = with_fidelity(report, outputs={bad: agreement}, blocks={bad: agreement}, primary=bad)
        skipped = [{"id": bad, "reason": bad}]
        hostile = hostile.model_copy(
            update={
                "source": SourceReport(id=bad, revision=bad, library=bad, model_class=bad, sha256={bad: bad}),
                "sites": rows,
                "converted": [rows[0].name],
                "warnings": [bad],
                "created": bad,
                "tool_version": bad,
                "recipe": {"kernel": bad, bad: [bad], "min_tokens": 0},
                "library_versions": {bad: bad},
                "calibration": report.calibration.model_copy(
                    update={"source": bad, "modality": bad, "fingerprint": bad, "skipped": skipped}
                ),
            }
        )
        html = render_html(hostile)
        page = Page(html)
        assert "<script" not in html
        assert page.words.count(f"a.{bad}") == 2  # sensitivity and fit
        assert f"reason {bad}" in page.words

    @pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
    def test_contrast(self, scheme: int) -> None:
        """WCAG 2.2: 4.5:1 for text, 3:1 for graphics; luminance by its formula."""
        blocks = re.findall(r":root \{([^}]*)\}", render_html(make_report()))
        color = dict(re.findall(r"--(\w+): #([0-9a-f]{6});", blocks[scheme]))

        def luminance(name: str) -> float:
            parts = [int(color[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for back in ("bg", "surface"):
            for front, least in (("text", 4.5), ("muted", 4.5), ("accent", 4.5), ("exact", 3.0)):
                bright, dark = sorted((luminance(front), luminance(back)), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) >= least, (front, back)


class TestVerdict:
    @pytest.mark.parametrize(
        ("cosine", "label"),
        [
            (1.0, "very close"),
            (0.99, "very close"),
            (0.98999, "close"),
            (0.95, "close"),
            (0.9499, "noticeably different"),
            (0.85, "noticeably different"),
            (0.8499, "far from the original"),
            (0.0, "far from the original"),
            (-1.0, "far from the original"),
        ],
    )
    def test_thresholds(self, cosine: float, label: str) -> None:
        assert verdict_of(cosine).label == label

    def test_worst_verdict_says_not_to_deploy(self) -> None:
        assert "Do not deploy without checking your task." in Page(render_html(make_report(cosine=0.6))).words

    def test_page_documents_the_levels_and_marks_one(self) -> None:
        page = Page(render_html(make_report(cosine=0.96)))
        assert all(verdict.span in page.words for verdict in VERDICTS)
        assert "close (this hybrid)" in page.words
        assert sum("aria-current" in li for li in page.all("li")) == 1

    def test_cosine_is_rounded_down(self) -> None:
        words = Page(render_html(make_report(cosine=0.98999))).words
        assert "0.9899 close" in words
        assert "0.9900" not in words

    def test_a_worse_output_is_named(self) -> None:
        # The prefix lies 0.02 below the primary output: 0.9675 is "close", 0.9475 is not.
        words = Page(render_html(make_report(cosine=0.9675))).words
        assert "Another output is further off: last_hidden_state.prefix has 0.9475" in words
        assert "further off" not in Page(render_html(make_report(cosine=0.975))).words

    def test_short_inputs_are_admitted(self) -> None:
        recipe = Recipe(min_tokens=1000).model_dump(mode="json")
        words = Page(render_html(make_report(recipe=recipe))).words
        assert "8 of 8 converted sites saw fewer than 1000 tokens" in words
        assert "saw fewer" not in Page(render_html(make_report())).words


class TestContent:
    def test_headline(self) -> None:
        words = Page(render_html(make_report())).words
        assert "8 of 12 attention sites → latte" in words
        assert "0.9341 noticeably different" in words

    def test_scored_only(self) -> None:
        words = Page(render_html(make_report(fidelity=False))).words
        assert "nothing was converted" in words
        assert "fidelity not measured" in words
        assert "8 of 12 attention sites would become latte" in words
        assert "would stay exact" in words
        assert "kept exact" not in words

    def test_ineligible_sites_are_listed_with_their_reason(self) -> None:
        report = make_report()
        extra = site("decoder.0.cross", None, converted=False, reason="relative position bias")
        words = Page(render_html(report.model_copy(update={"sites": [*report.sites, extra]}))).words
        assert "decoder.0.cross relative position bias" in words
        assert "8 of 13 attention sites" in words

    def test_bars_say_in_words_what_became_of_a_site(self) -> None:
        page = Page(render_html(make_report()))
        labels = [svg["aria-label"] for svg in page.all("svg") if "aria-label" in svg]
        assert len(labels) == 13  # 12 sites and the axis
        assert sum(str(label).endswith(", converted") for label in labels) == 8
        assert sum(str(label).endswith(", kept exact") for label in labels) == 4

    def test_missing_numbers_are_dashes_with_a_reason(self) -> None:
        report = make_report(converted=[])
        rows = [
            site("a", None, converted=False),
            site("b", 0.5, converted=False).model_copy(
                update={"fit": FitReport(alpha=[0.1], ratio=[1.0], calibration_error=None)}
            ),
        ]
        source = SourceReport(id="in memory", revision=None, library="hf", model_class="M", sha256={})
        calibration = report.calibration.model_copy(update={"fingerprint": ""})
        none = FlopsReport(original=0, hybrid=0)
        report = with_cost(report, forward_ms={}, peak_memory_bytes=0, flops=none)
        changes = {"sites": rows, "source": source, "calibration": calibration}
        words = Page(render_html(report.model_copy(update=changes))).words
        for reason in (
            "not finite",
            "original is 0",
            "kept exact",
            "none recorded",
            "the model was given in memory",
            "ready batches have no ids to hash",
            "forward time not measured",
            "this system does not tell",
            "not set",
        ):
            assert f"{DASH} {reason}" in words
        assert "None" not in words.replace("Warnings None.", "")
        assert "nan" not in words.split()

    def test_top1_has_a_column_only_where_it_was_measured(self) -> None:
        report = make_report()
        assert report.fidelity is not None
        assert "Same top-1" not in Page(render_html(report)).words
        logits = AgreementReport(cosine=0.99, relative_error=0.1, top1=0.875)
        outputs = {**report.fidelity.outputs, "logits": logits}
        words = Page(render_html(with_fidelity(report, outputs=outputs))).words
        assert "Same top-1" in words
        assert "logits 0.9900 0.100 87.5 %" in words
        assert f"{DASH} not logits" in words

    @pytest.mark.parametrize(
        ("hybrid", "sentence"),
        [
            (50.0, "The hybrid was 1.25 times slower here:"),
            (32.0, "The hybrid was 1.25 times faster here."),
            (41.0, "Original and hybrid took the same time here"),
        ],
    )
    def test_speed(self, hybrid: float, sentence: str) -> None:
        assert sentence in Page(render_html(make_report(forward_ms=(40.0, hybrid)))).words

    def test_cost_calibration_and_provenance(self) -> None:
        words = Page(render_html(make_report(warnings=["mind the gap"]))).words
        for text in (
            "11.358 GFLOPs 5.107 GFLOPs 0.450",
            "2.839 GFLOPs 1.106 GFLOPs 0.390",
            "41.2 ms 36.9 ms 0.896",
            "Parameters, 3,112 added 22,056,576 22,059,688",
            "1.32 GiB",
            "Stage: calibrate 14.2 s",
            "Requested 32",
            "Used for fits and scores 23",
            "Held out for fidelity 8",
            "IMG_0042.jpg truncated file: 12 of 48 kB",
            HEX,
            "granularity layer",
            "ratio 0.67",
            "torch 2.14.1",
            "1 warning came up",
            "mind the gap",
        ):
            assert text in words

    def test_values_per_head_are_a_range(self) -> None:
        row = site("a", 0.1, converted=True).model_copy(
            update={"fit": FitReport(alpha=[0.5, -1.25, 0.1], ratio=[2.0], calibration_error=0.1)}
        )
        html = render_html(make_report().model_copy(update={"sites": [row]}))
        assert "-1.25 to 0.500 (3 heads) 2.00" in Page(html).words


class TestGeometry:
    def test_linear_scale_starts_at_zero(self) -> None:
        scale = sensitivity_scale([0.02, 0.9, 1.9])
        assert not scale.log
        assert [tick.label for tick in scale.ticks] == ["0", "0.5", "1", "1.5", "2"]
        assert [tick.at for tick in scale.ticks] == [0, 25, 50, 75, 100]
        assert scale.position(0.5) == 25
        assert scale.position(0.0) == 0

    def test_log_scale_over_two_decades(self) -> None:
        scale = sensitivity_scale([0.01, 0.5, 5.0])
        assert scale.log
        assert [tick.label for tick in scale.ticks] == ["10⁻³", "10⁻²", "10⁻¹", "10⁰", "10¹"]
        assert scale.position(0.01) == 25  # a smallest value on a power of ten still has a bar
        assert scale.position(1.0) == 75
        assert scale.position(-1e-7) == 0

    def test_exactly_two_decades_stay_linear(self) -> None:
        assert not sensitivity_scale([0.01, 1.0]).log

    @pytest.mark.parametrize("values", [[], [0.0], [-1e-8, 0.0]])
    def test_nothing_positive(self, values: list[float]) -> None:
        scale = sensitivity_scale(values)
        assert [scale.position(value) for value in values] == [0] * len(values)

    @pytest.mark.parametrize("values", [[1e-12, 1e12], [3e-9, 7e-9], [9.99], [10.0], [1e-3, 2.5, 0.7]])
    def test_every_value_and_tick_lies_inside(self, values: list[float]) -> None:
        scale = sensitivity_scale(values)
        lengths = [scale.position(value) for value in sorted(values)]
        assert lengths == sorted(lengths)
        assert 0 < lengths[0] <= lengths[-1] <= 100
        assert 2 <= len(scale.ticks) <= 8
        assert all(0 <= tick.at <= 100 for tick in scale.ticks)

    def test_bars_keep_the_order_and_leave_out_the_ineligible(self) -> None:
        rows = [
            site("z", 1.0, converted=False),
            site("m", None, converted=False),
            site("a", 0.5, converted=True),
            site("x", None, converted=False, reason="no"),
        ]
        bars = sensitivity_bars(rows, sensitivity_scale([1.0, 0.5]))
        assert [(bar.site.name, bar.length) for bar in bars] == [("z", 100), ("m", None), ("a", 50)]

    def test_block_chart(self) -> None:
        report = make_report(sites=2, convert=1, cosine=0.93)  # blocks at 0.965 and 0.93
        chart = block_chart(report)
        assert chart is not None
        assert [tick.label for tick in chart.ticks] == ["1", "0.95", "0.9"]
        points = [(p.number, p.x, p.y, p.converted) for p in chart.points]
        assert points == [(1, 25, 35, True), (2, 75, 70, False)]

    def test_block_chart_of_a_name_that_begins_like_another(self) -> None:
        report = make_report(sites=12, convert=1)
        chart = block_chart(report.model_copy(update={"converted": ["encoder.layer.10.attention.attention"]}))
        assert chart is not None
        assert [point.number for point in chart.points if point.converted] == [11]

    def test_block_chart_holds_a_cosine_below_zero_and_one_above_one(self) -> None:
        blocks = {
            "a": AgreementReport(cosine=-0.5, relative_error=2.0),
            "b": AgreementReport(cosine=1.0000001, relative_error=0.0),
        }
        chart = block_chart(with_fidelity(make_report(), blocks=blocks))
        assert chart is not None
        assert chart.low == "-1"
        assert [point.y for point in chart.points] == [75, 0]

    def test_many_blocks_have_few_numbers(self) -> None:
        chart = block_chart(make_report(sites=48, pattern=LONG))
        assert chart is not None
        assert [point.number for point in chart.numbered] == list(range(1, 49, 4))


def test_an_axis_from_zero_needs_no_warning() -> None:
    assert "not at 0" not in render_html(make_report(cosine=0.3))
    assert "not at 0" in render_html(make_report(cosine=0.99))


def test_a_local_model_goes_by_its_name() -> None:
    report = make_report()
    local = report.source.model_copy(update={"id": "/home/me/models/tiny"})
    page = render_html(report.model_copy(update={"source": local}))
    assert "<h1>tiny</h1>" in page
    assert "<code>/home/me/models/tiny</code>" in page, "provenance gives all of it"
