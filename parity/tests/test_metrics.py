from __future__ import annotations

import math

import numpy as np
import pytest

from parity.findings import measure
from parity.metrics import cosine, relative_rms, worst_element


def test_relative_rms_is_a_ratio_of_rms():
    truth = np.array([3.0, 4.0])
    assert relative_rms(truth + [0.3, 0.4], truth) == pytest.approx(0.1)


def test_relative_rms_sees_scale_where_cosine_is_blind():
    truth = np.random.default_rng(0).standard_normal(1000)
    assert cosine(1.5 * truth, truth) == pytest.approx(1.0)
    assert relative_rms(1.5 * truth, truth) == pytest.approx(0.5)


def test_many_float32_values_are_summed_in_float64():
    """2^25 ones add up to 2^24 in a float32 running sum."""
    truth = np.ones(2**25, np.float32)
    assert relative_rms(truth * np.float32(1.5), truth) == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_truth_does_not_have_is_infinitely_wrong(bad):
    assert relative_rms(np.array([1.0, bad]), np.array([1.0, 2.0])) == math.inf


def test_shared_infinities_are_equal_and_have_no_scale():
    truth = np.array([1.0, -np.inf, 2.0])
    assert relative_rms(truth, truth) == 0.0
    assert relative_rms(np.array([1.0, -np.inf, 2.2]), truth) == pytest.approx(0.2 / math.sqrt(5))
    assert relative_rms(np.array([1.0, -1e30, 2.0]), truth) == math.inf


def test_zero_truth_has_no_scale():
    zero = np.zeros(3)
    assert relative_rms(zero, zero) == 0.0
    assert relative_rms(np.array([0, 0, 1e-30]), zero) == math.inf


def test_worst_element_names_the_nan():
    found, truth = np.ones((2, 3)), np.ones((2, 3))
    found[0, 1], found[1, 2] = 9.0, np.nan
    index, value, expected = worst_element(found, truth)
    assert index == (1, 2) and math.isnan(value) and expected == 1.0


def test_another_shape_is_infinitely_far_and_says_so():
    result = measure(np.ones((2, 3)), np.ones((3, 2)))
    assert result["error"] == math.inf and "[2, 3]" in result["note"] and "[3, 2]" in result["note"]
