from __future__ import annotations

from typing import Any

import pytest
from report.samples import make_bench, make_evaluation, make_report

from latte_convert.report.schema import Report
from latte_convert.report.verdict import LEVELS, level_of, next_step, worth_of


def worth(**changes: Any) -> Any:
    found = worth_of(make_report(**changes))
    assert found is not None
    return found


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
def test_levels(cosine: float, label: str) -> None:
    assert level_of(cosine).label == label
    assert level_of(cosine) in LEVELS


class TestVerdict:
    @pytest.mark.parametrize(
        ("times", "cosine", "verdict"),
        [
            ((40.0, 32.0), 0.995, "Worth it if your task holds: 1.25 times faster, outputs very close."),
            ((40.0, 32.0), 0.96, "Worth it if your task holds: 1.25 times faster, outputs close."),
            ((40.0, 32.0), 0.6, "Doubtful: 1.25 times faster, but the outputs are far from the original."),
            ((40.0, 41.0), 0.995, "Not worth it at this size: the hybrid is as fast as the original."),
            ((40.0, 50.0), 0.995, "Not worth it at this size: the hybrid is 1.25 times slower."),
        ],
    )
    def test_speed_and_fidelity(self, times: tuple[float, float], cosine: float, verdict: str) -> None:
        assert worth(forward_ms=times, cosine=cosine).verdict.startswith(verdict)

    @pytest.mark.parametrize(
        ("retention", "verdict"), [(0.98, "Worth it: 1.25 times faster"), (0.5, "Not worth it: 1.25 times faster")]
    )
    def test_a_measured_task_decides(self, retention: float, verdict: str) -> None:
        found = worth(forward_ms=(40.0, 32.0), cosine=0.6, evaluations=[make_evaluation(retention=retention)])
        assert found.verdict.startswith(verdict)

    def test_nothing_converted(self) -> None:
        assert "this hybrid is the original" in worth(convert=0, cosine=1.0).verdict

    def test_a_scoring_has_none(self) -> None:
        assert worth_of(make_report(fidelity=False)) is None


class TestSize:
    """The held-out samples have 785 tokens, as has one length of the bench."""

    def test_bench_at_the_users_size_wins(self) -> None:
        found = worth(bench=make_bench())
        # 785² / 50000 = 12.3245 ms of exact attention, 785 / 45 = 17.444 ms of the hybrid's, 40 ms beside them.
        assert found.speedup == pytest.approx(52.3245 / 57.4444, abs=1e-4)
        assert found.memory == pytest.approx((40 * 2**20 + 785 * 3000) / (40 * 2**20 + 785**2 * 24))
        assert "392 px (785 tokens)" in found.speed_detail
        assert found.verdict.endswith("It needs 21.9 % less memory. It pays from 1,370 tokens on.")

    def test_amdahl(self) -> None:
        # Attention is 12.3245 of 52.3245 ms: without it 40 ms are left.
        limit = worth(bench=make_bench()).limit
        assert limit.startswith("The converted attention takes 23.6 % of the original's time")
        assert "1.31 times as fast" in limit
        assert worth().limit is None

    def test_amdahl_on_held_out_samples(self) -> None:
        """41.2 ms with attention, 30.9 ms without: a quarter of the time, so at most 4/3 times as fast."""
        report = make_report()
        assert report.cost is not None
        times = {**report.cost.forward_ms, "without_attention": 30.9}
        found = worth(cost=report.cost.model_copy(update={"forward_ms": times}))
        assert found.limit.startswith("All attention takes 25.0 % of the original's time")
        assert "1.33 times as fast" in found.limit

    def test_a_bench_at_other_lengths_only_does_not_count(self) -> None:
        bench = make_bench()
        other = bench.model_copy(update={"lengths": [each for each in bench.lengths if each.tokens != 785]})
        found = worth(bench=other)
        assert found.speedup == pytest.approx(41.2 / 36.9)
        assert found.memory is None
        assert found.speed_detail == "41.2 → 36.9 ms a held-out sample, 785 tokens, cpu, 2 threads"


class TestNextStep:
    @pytest.mark.parametrize(
        ("changes", "command"),
        [
            ({"cosine": 0.99}, "latte eval out --task knn --data LABELLED --out out/eval-knn.json"),
            ({"cosine": 0.99, "forward_ms": (40.0, 50.0)}, "latte bench out --save"),
            ({"cosine": 0.7}, "latte convert facebook/dinov2-small --calib photos/ --ratio 0.33 --out hybrid-2"),
            ({"evaluations": [make_evaluation()]}, "latte bench out --save"),
            (
                {"evaluations": [make_evaluation(retention=0.5)]},
                "latte convert facebook/dinov2-small --calib photos/ --ratio 0.33 --out hybrid-2",
            ),
            ({"evaluations": [make_evaluation()], "bench": make_bench()}, "latte bench out --write"),
            ({"evaluations": [make_evaluation()], "bench": make_bench(crossover=None)}, "latte verify out"),
            (
                {"convert": 0, "cosine": 1.0},
                "latte convert facebook/dinov2-small --calib photos/ --ratio 0.5 --out hybrid-2",
            ),
        ],
    )
    def test_command(self, changes: dict[str, Any], command: str) -> None:
        assert next_step(make_report(**changes), "out")[1] == command

    @pytest.mark.parametrize(
        ("model_class", "modality", "task"),
        [
            ("DetrForObjectDetection", "image", "detection"),
            ("WhisperModel", "audio", "asr"),
            ("BertModel", "text", "sts"),
            ("CLIPModel", "image, text", "zero-shot"),
            ("Wav2Vec2Model", "audio", "fidelity"),
        ],
    )
    def test_the_task_fits_the_model(self, model_class: str, modality: str, task: str) -> None:
        start = make_report(cosine=0.99)
        report = start.model_copy(
            update={
                "source": start.source.model_copy(update={"model_class": model_class}),
                "calibration": start.calibration.model_copy(update={"modality": modality}),
            }
        )
        assert f"--task {task} " in next_step(report)[1]

    def test_in_the_artifacts_own_folder(self) -> None:
        assert next_step(make_report(cosine=0.99))[1] == "latte eval . --task knn --data LABELLED --out eval-knn.json"

    def test_two_sources_of_samples_and_names_that_need_quotes(self) -> None:
        start = make_report(cosine=0.5)
        report = start.model_copy(
            update={"calibration": start.calibration.model_copy(update={"source": "my photos/, texts.txt"})}
        )
        assert "--calib 'my photos/' --calib texts.txt --ratio" in next_step(report)[1]

    def test_a_model_in_memory_is_converted_in_python(self) -> None:
        start: Report = make_report(cosine=0.5)
        source = start.source.model_copy(update={"id": "in memory", "sha256": {}})
        assert next_step(start.model_copy(update={"source": source}))[1] == (
            "convert(model, batches, recipe=Recipe(ratio=0.33))"
        )
