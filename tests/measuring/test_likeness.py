"""What gates look at: a measure that fits each output, with right values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from latte_convert.measuring.agreement import Agreement, kind_of, overlap, sureness


def test_an_output_is_known_by_its_name_and_width() -> None:
    assert kind_of("pred_boxes", torch.zeros(1, 9, 4)) == "boxes"
    assert kind_of("text.logits", torch.zeros(1, 9)) == "logits"
    assert kind_of("last_hidden_state", torch.zeros(1, 9, 4)) == "features"
    assert kind_of("pred_boxes", torch.zeros(1, 9, 5)) == "features"


def test_overlap_of_boxes() -> None:
    box = torch.tensor([[0.5, 0.5, 0.4, 0.2]], dtype=torch.double)
    moved = box + torch.tensor([0.2, 0.0, 0.0, 0.0], dtype=torch.double)  # by half its width: 0.04 of 0.12 is shared
    assert overlap(box, moved).tolist() == pytest.approx([1 / 3])
    assert overlap(box, box).tolist() == [1.0]
    assert overlap(box, box + torch.tensor([0.5, 0.0, 0.0, 0.0])).tolist() == [0.0]


def test_a_cosine_is_blind_to_boxes_that_move_by_half_their_width() -> None:
    boxes = torch.tensor([[[0.5, 0.5, 0.1, 0.1], [0.2, 0.8, 0.1, 0.1]]])
    moved = boxes + torch.tensor([0.05, 0.0, 0.0, 0.0])
    agreement = Agreement("boxes")
    agreement.add(boxes, moved, torch.tensor([[1.0, 1.0]]))
    assert agreement.cosine > 0.99
    assert agreement.likeness == pytest.approx(1 / 3)
    assert agreement.distance == pytest.approx(2 * 0.05)


def test_a_box_that_the_original_is_not_sure_of_hardly_counts() -> None:
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.2, 0.8, 0.2, 0.2]]])
    moved = boxes.clone()
    moved[0, 1, 0] += 0.2
    agreement = Agreement("boxes")
    agreement.add(boxes, moved, torch.tensor([[0.9, 0.1]]))
    assert agreement.agreed == pytest.approx(0.9)


def test_logits_are_compared_as_probabilities() -> None:
    a = torch.log(torch.tensor([[0.7, 0.2, 0.1]]))
    b = torch.log(torch.tensor([[0.2, 0.7, 0.1]]))
    agreement = Agreement("logits")
    agreement.add(a, b)
    assert agreement.agreed == pytest.approx(0.5)  # 0.2 + 0.2 + 0.1
    assert agreement.divergence == pytest.approx(0.7 * math.log(3.5) + 0.2 * math.log(1 / 3.5))
    assert agreement.top1 == 0
    same = Agreement("logits")
    same.add(a, a)
    assert same.likeness == same.agreed == 1.0


def test_how_sure_a_detector_is() -> None:
    logits = torch.log(torch.tensor([[[0.6, 0.1, 0.3]]]))
    assert sureness(logits, 2).item() == pytest.approx(0.6)  # the last of three is "no object"
    assert sureness(torch.tensor([[[0.0, -9.0]]]), 2).item() == pytest.approx(0.5)  # a sigmoid for each class


def test_the_interval_of_equal_samples_has_no_width_and_one_sample_has_none() -> None:
    agreement = Agreement()
    agreement.add(torch.ones(1, 2), torch.ones(1, 2))
    assert agreement.interval is None
    agreement.add(torch.ones(1, 2), torch.ones(1, 2))
    assert agreement.interval == (1.0, 1.0)
    agreement.add(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    low, high = agreement.interval
    assert low < 2 / 3 < high
