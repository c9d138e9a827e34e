from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from report.samples import HEX, LONG, fit, make_evaluation, make_full, make_report, site

from latte_convert.recipe import Recipe
from latte_convert.report.html import render_comparison, render_html, write_html
from latte_convert.report.schema import AgreementReport, FlopsReport, Report, SourceReport
from latte_convert.report.verdict import LEVELS

VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}
DASH = "\u2013"


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
        if tag in ("td", "th", "li", "br", "dt", "dd", "p", "small"):
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
    "full": make_full(),
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
        assert all(link is not None and link.startswith(("#", "data:image/png;base64,")) for link in links)
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
            graphics = {"exact": 3.0, "third": 3.0, "fourth": 3.0, "fifth": 3.0}
            for front, least in {"text": 4.5, "muted": 4.5, "accent": 4.5, **graphics}.items():
                bright, dark = sorted((luminance(front), luminance(back)), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) >= least, (front, back)


class TestVerdict:
    def test_page_documents_the_levels_and_marks_one(self) -> None:
        page = Page(render_html(make_report(cosine=0.96)))
        assert all(level.span in page.words for level in LEVELS)
        assert "close (this hybrid)" in page.words
        assert sum("aria-current" in li for li in page.all("li")) == 1

    def test_cosine_is_rounded_down(self) -> None:
        words = Page(render_html(make_report(cosine=0.98999))).words
        assert "0.9899 close:" in words
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
        assert "0.9341 noticeably different:" in words

    def test_scored_only(self) -> None:
        words = Page(render_html(make_report(fidelity=False))).words
        assert "nothing was converted" in words
        assert "Fidelity not measured" in words
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
            site("b", 0.5, converted=False).model_copy(update={"fit": fit(parameters={}, calibration_error=None)}),
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
            "this system does not tell",
            "not set",
            "no scalars",
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
        assert f"logits mean cosine 0.9900 {DASH} not measured 0.9900 0.100 87.5 %" in words
        assert f"{DASH} not logits" in words

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
            "vision, self, 6 \u00d7 64, 37 \u00d7 37 + 1 prefix",
            "torch 2.14.1",
            "1 warning came up",
            "mind the gap",
        ):
            assert text in words

    def test_the_likeness_that_fits_an_output_and_its_interval(self) -> None:
        """Boxes are as alike as they overlap, however near 1 their cosine is."""
        report = make_report()
        assert report.fidelity is not None
        boxes = AgreementReport(
            cosine=0.9996, relative_error=0.02, agreed=0.8731, distance=0.04, likeness=0.8731, interval=(0.841, 0.9012)
        )
        outputs = {**report.fidelity.outputs, "pred_boxes": boxes}
        words = Page(render_html(with_fidelity(report, outputs=outputs, primary="pred_boxes"))).words
        assert "Fidelity 0.8731 noticeably different: mean overlap of boxes of pred_boxes" in words
        assert "95 % interval 0.8410 to 0.9012" in words
        assert "mean overlap of boxes, L1 distance 0.0400 0.8731 0.8410 to 0.9012 0.9996 0.0200" in words

    def test_values_per_head_are_a_range(self) -> None:
        row = site("a", 0.1, converted=True).model_copy(
            update={"fit": fit(parameters={"alpha": [0.5, -1.25, 0.1], "ratio": [2.0]})}
        )
        html = render_html(make_report().model_copy(update={"sites": [row]}))
        words = Page(html).words
        assert "Every site was fitted with latte: sigma, granularity layer, tte, no jpn." in words
        assert "converted alpha -1.25 to 0.500 (3 heads) ratio 2.00" in words

    def test_kernels_that_differ_have_a_column(self) -> None:
        rows = [
            site("a", 0.1, converted=True),
            site("b", 0.2, converted=True).model_copy(
                update={"fit": fit(kernel="near_far", options={"window": 8}, parameters={})}
            ),
        ]
        words = Page(render_html(make_report().model_copy(update={"sites": rows}))).words
        assert "converted latte sigma, granularity layer, tte, no jpn alpha 0.410 ratio 18.7 0.0312" in words
        assert f"converted near_far window 8 {DASH} no scalars 0.0312" in words
        assert "Every site was fitted" not in words


def test_the_recipe_shows_what_was_applied() -> None:
    report = make_report(recipe=Recipe().model_dump(mode="json"), min_tokens=856)
    words = Page(render_html(report)).words
    assert "ratio 0.667 (8 of 12 eligible sites)" in words
    assert "min_tokens 856" in words


def test_the_first_screen_answers_and_cost_comes_before_maps() -> None:
    page = Page(render_html(make_full()))
    headings = [attrs["id"] for tag, attrs in page.tags if tag == "h2"]
    assert headings == [
        "tasks", "cost", "bench", "fidelity", "sensitivity", "frontier", "maps", "stripes", "calibration", "provenance",
    ]  # fmt: skip
    head = page.words[: page.words.index("The task itself")]
    for part in (
        "Not worth it at this size",
        "Speed 0.91x",
        "Memory 78.1 %",
        "Fidelity 0.9341",
        "latte bench . --write",
    ):
        assert part in head


def test_synthetic_samples_give_no_second_cosine() -> None:
    full = make_full()
    assert full.bench is not None
    assert "0.9840" not in Page(render_html(full)).words
    real = full.model_copy(update={"bench": full.bench.model_copy(update={"data": "photos/"})})
    assert "0.9840" in Page(render_html(real)).words


def test_a_local_model_goes_by_its_name() -> None:
    report = make_report()
    local = report.source.model_copy(update={"id": "/home/me/models/tiny"})
    page = render_html(report.model_copy(update={"source": local}))
    assert "<h1>tiny</h1>" in page
    assert "<code>/home/me/models/tiny</code>" in page, "provenance gives all of it"


class TestSections:
    def test_what_was_not_measured_has_no_section(self) -> None:
        page = Page(render_html(make_report()))
        assert not {"tasks", "frontier", "maps", "stripes", "bench"} & {attrs.get("id") for _, attrs in page.tags}

    def test_tasks(self) -> None:
        words = Page(render_html(make_full())).words
        assert "knn, top1: 0.859, original 0.871; 98.6 % retained (95 % interval 95.6 % to 100.6 %)" in words
        assert f"error knn, 179 samples of clothing/, lower is better 0.129 0.140 {DASH} not defined" in words

    def test_frontier(self) -> None:
        words = Page(render_html(make_full())).words
        assert "8 near_far this hybrid 8 55.0 % 0.9901 0.9341" in words, (
            "the held-out cosine is the only one of the hybrid"
        )
        assert f"4 near_far 4 78.0 % 0.9989 {DASH} not measured" in words
        assert "open: predicted from the scores, not measured" in words

    def test_maps_say_in_words_what_they_show(self) -> None:
        page = Page(render_html(make_full()))
        labels = [
            attrs["aria-label"] for attrs in page.all("svg") if "Attention map" in (attrs.get("aria-label") or "")
        ]
        assert len(labels) == 6
        assert labels[0] == (
            "Attention map, softmax: 1 column stripes with 50.0 % of the attention, 1 row stripes with 2.0 %; "
            "the largest cell holds 31.0 %"
        )
        assert "head 6 of 6: 30.0 % of the attention goes elsewhere" in page.words
        assert "head 2 10.0 % 9.0 % 2.0 % < 0.1 % 30.0 %" in page.words

    def test_map_image_has_the_cells(self) -> None:
        href = Page(render_html(make_full())).all("image")[0]["href"]
        assert href is not None
        image = Image.open(io.BytesIO(base64.b64decode(href.partition(",")[2]))).convert("RGB")
        assert image.size == (64, 64)
        light = [sum(image.getpixel((x, 9))) for x in (40, 9, 0)]  # background, diagonal, stripe: 30, 120, 200 of 255
        assert light == sorted(light, reverse=True)
        assert len(set(light)) == 3

    def test_stripes(self) -> None:
        words = Page(render_html(make_full())).words
        assert "rank correlation of +0.58" in words
        # Columns: mean of 0 to 0.60 in steps of 0.12, and the last; rows likewise from 0 to 0.05.
        assert "30.0 % 60.0 % 2.5 % 5.0 % 0, 411, 37" in words

    def test_bench(self) -> None:
        words = Page(render_html(make_full())).words
        assert "hybrid is faster from 1,370 tokens on" in words
        assert "8,282 tokens, original 1274 px; out of memory" in words
        assert "785 tokens, hybrid 392 px 57.4 ms 55.7 to 59.7 ms 17.4 ms" in words

    def test_few_samples_are_admitted(self) -> None:
        report = make_report()
        assert report.fidelity is not None
        assert "8 held-out samples are few" in Page(render_html(report)).words
        assert "held-out samples are few" not in Page(render_html(with_fidelity(report, samples=64))).words

    def test_several_kernels_are_counted_and_named(self) -> None:
        report = make_report()
        names = iter(["near_far", "near_far", "monarch"] + 5 * ["latte"])
        rows = [
            row.model_copy(update={"fit": fit(kernel=next(names))}) if row.converted else row for row in report.sites
        ]
        words = Page(render_html(report.model_copy(update={"sites": rows}))).words
        assert "8 of 12 attention sites \u2192 5 latte, 2 near_far, 1 monarch" in words

    def test_the_worst_case_stays_small(self) -> None:
        report = make_full(sites=96, convert=64, pattern=LONG)
        assert len(render_html(report).encode()) < 500_000
        assert len(report.model_dump_json()) < 500_000


class TestComparison:
    def test_side_by_side(self) -> None:
        full, other = make_full(), make_report(convert=4, cosine=0.9912)
        page = Page(render_comparison({"one": full, "two": other, "scored": make_report(fidelity=False)}))
        words = page.words
        assert "3 artifacts side by side" in words
        assert "Converted 8 of 12 sites 4 of 12 sites 8 of 12 sites" in words
        assert f"Held-out fidelity 0.9341 noticeably different 0.9912 very close {DASH} nothing was converted" in words
        assert f"Faster from 1,370 tokens {DASH} no bench.json" in words
        assert f"knn top1, clothing/ 0.859 original 0.871 98.6 % {DASH} not evaluated" in words
        assert page.all("html") == [{"lang": "en"}]
        assert not {"script", "link", "img"} & {tag for tag, _ in page.tags}

    def test_evaluations_of_one_task_are_told_apart_by_their_data(self) -> None:
        both = [make_evaluation(retention=0.9), make_evaluation(retention=0.5, data=("cars/", "labels.csv"))]
        one, two = make_report(evaluations=both), make_report(evaluations=both[1:])
        words = Page(render_comparison({"one": one, "two": two})).words
        assert f"knn top1, clothing/ 0.784 original 0.871 90.0 % {DASH} not evaluated" in words
        assert "knn top1, cars/, labels.csv 0.435 original 0.871 50.0 % 0.435 original 0.871 50.0 %" in words
        words = Page(render_html(one)).words
        assert "top1 primary knn, 179 samples of clothing/ 0.871 0.784 90.0 %" in words
        assert "top1 primary knn, 179 samples of cars/, labels.csv 0.871 0.435 50.0 %" in words

    def test_evaluations_of_one_task_on_the_same_data_are_both_shown(self) -> None:
        both = [make_evaluation(retention=0.9), make_evaluation(retention=0.5)]
        words = Page(render_comparison({"one": make_report(evaluations=both), "two": make_report()})).words
        assert "clothing/ 0.784 original 0.871 90.0 % 0.435 original 0.871 50.0 %" in words

    def test_sites_that_only_one_has(self) -> None:
        short, long = make_report(sites=1, convert=1), make_report(sites=2, convert=1)
        words = Page(render_comparison({"short": short, "long": long})).words
        assert f"encoder.layer.1.attention.attention {DASH} no such site exact" in words

    def test_names_are_escaped(self) -> None:
        assert "<script" not in render_comparison({"<script>": make_report(), "b": make_report()})
