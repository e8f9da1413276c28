"""fleet.metrics in one process: histograms against numpy, areas against scikit-learn, windows against a plain
recomputation, scores of every shape, what is refused, threads; and the ratios of a process without a fleet."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.extras import Late
from support.messages import naming
from support.searches import examples

from torchfleet import metrics
from torchfleet.api.metrics import AUC, area
from torchfleet.base.errors import FleetError

oracle = Late("sklearn.metrics")

Floats = npt.NDArray[np.float64]
SMALL = settings(max_examples=examples(60))


def pairwise_auc(scores: Floats, labels: npt.NDArray[Any]) -> float:
    """The share of pairs of a positive and a negative in the right order, ties half; 0.5 without pairs."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    if not len(positive) or not len(negative):
        return 0.5
    difference = positive[:, None] - negative[None, :]
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def histogram(probabilities: Floats, num_thresholds: int) -> Floats:
    """How many scores fall into each of the bins [i / n, (i + 1) / n), and 1 into the last, one by one."""
    counts = np.zeros(num_thresholds + 1)
    for probability in probabilities.tolist():
        counts[math.floor(probability * num_thresholds)] += 1
    return counts


def batch(seed: int, num: int, steepness: float = 2.0) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Logits, and labels that depend on them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=num) * steepness
    return logits, (rng.random(num) < 1 / (1 + np.exp(-logits + rng.normal(size=num)))).astype(np.int64)


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(torch.sigmoid(torch.from_numpy(logits)).numpy())


# Against scikit-learn and numpy


@pytest.mark.slow
def test_the_area_is_that_of_all_predictions_put_together() -> None:
    meter = AUC()
    batches = [batch(seed, num) for seed, num in enumerate([1000, 1, 37, 5000, 256])]
    for number, (logits, labels) in enumerate(batches):
        returned = meter.update(logits, labels)
        so_far = [np.concatenate(column) for column in zip(*batches[: number + 1], strict=True)]
        if len(set(so_far[1].tolist())) == 2:
            assert returned == pytest.approx(oracle.roc_auc_score(so_far[1], so_far[0]), abs=1e-4)
        assert meter.compute()[0] == returned


@SMALL
@given(
    pairs=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1)), max_size=60),
    num_thresholds=st.integers(1, 300),
)
def test_histograms_are_exact_and_the_area_is_that_of_the_binned_scores(
    pairs: list[tuple[float, int]], num_thresholds: int
) -> None:
    probabilities = np.array([probability for probability, _ in pairs])
    labels = np.array([label for _, label in pairs], np.int64)
    meter = AUC(num_thresholds, from_logits=False)
    returned = meter.update(probabilities, labels)
    auc, batch_auc, (batch_pos, batch_neg, pos, neg) = meter.compute()
    np.testing.assert_array_equal(pos, histogram(probabilities[labels == 1], num_thresholds))
    np.testing.assert_array_equal(neg, histogram(probabilities[labels == 0], num_thresholds))
    np.testing.assert_array_equal(batch_pos, pos)
    np.testing.assert_array_equal(batch_neg, neg)
    binned = np.floor(probabilities * num_thresholds)
    assert auc == pytest.approx(pairwise_auc(binned, labels), abs=1e-12)
    assert returned == auc == batch_auc


@SMALL
@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20),
    factor=st.sampled_from([1.0, 1e9]),
)
def test_the_area_of_histograms_counts_pairs(counts: list[tuple[int, int]], factor: float) -> None:
    positive, negative = np.array(counts, np.float64).T
    bins = np.arange(len(counts))
    scores = np.concatenate([np.repeat(bins, positive.astype(int)), np.repeat(bins, negative.astype(int))])
    labels = np.repeat([1, 0], [int(positive.sum()), int(negative.sum())])
    expected = pairwise_auc(scores.astype(np.float64), labels)
    assert area(positive * factor, negative * factor) == pytest.approx(expected, abs=1e-12)
    assert metrics.auc(positive * factor, negative * factor) == pytest.approx(expected, abs=1e-12)


def test_samples_of_one_bin_are_ties_and_count_half() -> None:
    meter = AUC(from_logits=False)
    assert meter.update([0.25] * 10, [1, 0] * 5) == 0.5
    assert meter.update([0.75], [1]) == pytest.approx((5 * 5 / 2 + 5) / (6 * 5))


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_alone_has_the_area_of_a_coin(label: int) -> None:
    meter = AUC()
    assert meter.update([3.0, -1.0], [label, label]) == 0.5
    assert meter.compute()[:2] == (0.5, 0.5)
    assert meter.compute()[2][3 - label].sum() == 2


def test_without_any_sample_the_area_is_one_half_and_the_histograms_are_empty() -> None:
    auc, batch_auc, stats = AUC(num_thresholds=10).compute()
    assert (auc, batch_auc) == (0.5, 0.5)
    assert [stat.tolist() for stat in stats] == [[0.0] * 11] * 4


@each_of("num_thresholds", [1, 2, 200, 4095, 100_000])
def test_there_is_one_bin_more_than_thresholds_and_probability_one_is_in_the_last(num_thresholds: int) -> None:
    meter = AUC(num_thresholds, from_logits=False)
    meter.update([0.0, 1.0], [0, 1])
    _, _, (_, _, pos, neg) = meter.compute()
    assert pos.shape == neg.shape == (num_thresholds + 1,)
    assert pos[-1] == 1
    assert neg[0] == 1


@pytest.mark.slow
def test_more_thresholds_come_closer_to_the_exact_area() -> None:
    logits, labels = batch(3, 20_000)
    exact = oracle.roc_auc_score(labels, logits)
    errors = [abs(AUC(num).update(logits, labels) - exact) for num in (2, 20, 200, 20_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[3] < 1e-5


# The window of the last updates


@each_of(("slide_steps", "num_updates"), [(20, 19), (20, 20), (20, 21), (20, 57), (1, 3), (3, 2)])
def test_the_batch_statistics_are_those_of_the_last_updates(slide_steps: int, num_updates: int) -> None:
    meter = AUC(num_thresholds=500, slide_steps=slide_steps)
    batches = [batch(seed, 10 + seed % 7) for seed in range(num_updates)]
    for logits, labels in batches:
        meter.update(logits, labels)
    auc, batch_auc, (batch_pos, batch_neg, pos, neg) = meter.compute()
    for recent, (positive, negative), found in (
        (batches[-slide_steps:], (batch_pos, batch_neg), batch_auc),
        (batches, (pos, neg), auc),
    ):
        logits, labels = (np.concatenate(column) for column in zip(*recent, strict=True))
        binned = np.floor(sigmoid(logits) * 500)
        np.testing.assert_array_equal(positive, np.bincount(binned[labels == 1].astype(int), minlength=501))
        np.testing.assert_array_equal(negative, np.bincount(binned[labels == 0].astype(int), minlength=501))
        assert found == pytest.approx(oracle.roc_auc_score(labels, binned), abs=1e-12)


def test_twenty_updates_is_the_window_that_nobody_asked_for() -> None:
    meter = AUC()
    for number in range(25):
        meter.update([float(number)], [1])
    assert meter.compute()[2][0].sum() == 20


def test_reset_forgets_the_window_too() -> None:
    meter = AUC(num_thresholds=10)
    meter.update([1.0, -1.0], [0, 1])
    meter.reset()
    assert meter.compute()[:2] == (0.5, 0.5)
    assert all(not stat.any() for stat in meter.compute()[2])
    assert meter.update([1.0, -1.0], [1, 0]) == 1.0
    assert meter.compute()[:2] == (1.0, 1.0)


def test_what_compute_returned_does_not_change_afterwards() -> None:
    meter = AUC(num_thresholds=4)
    meter.update([1.0, -1.0], [1, 0])
    stats = meter.compute()[2]
    before = [stat.copy() for stat in stats]
    meter.update([1.0, -1.0], [0, 1])
    for stat, was in zip(stats, before, strict=True):
        np.testing.assert_array_equal(stat, was)
        stat[:] = 100  # nor does the meter, when its statistics are changed
    assert meter.compute()[0] == 0.5
    assert sum(stat.sum() for stat in meter.compute()[2][2:]) == 4


# Scores and labels of every kind


KINDS = {
    "one logit": lambda x: x,
    "a column of logits": lambda x: x[:, None],
    "two logits": lambda x: np.stack([np.full_like(x, 0.5), x + 0.5], axis=1),
    "a list": lambda x: x.tolist(),
    "a tensor": torch.from_numpy,
    "a tensor with a gradient": lambda x: torch.from_numpy(x).requires_grad_(),
    "a tensor that is not contiguous": lambda x: torch.from_numpy(np.repeat(x, 2))[::2],
    "a tensor of two logits": lambda x: torch.from_numpy(np.stack([-x / 2, x / 2], axis=1)),
}


@each_of("kind", KINDS)
def test_logits_of_every_shape_count_alike(kind: str) -> None:
    # Logits halfway between two bins: no rounding can move them.
    bins = np.random.default_rng(0).integers(0, 100, 300)
    probabilities = (bins + 0.5) / 100
    labels = np.random.default_rng(1).integers(0, 2, 300)
    meter = AUC(num_thresholds=100)
    meter.update(KINDS[kind](np.log(probabilities / (1 - probabilities))), labels)
    _, _, (_, _, pos, neg) = meter.compute()
    np.testing.assert_array_equal(pos, np.bincount(bins[labels == 1], minlength=101))
    np.testing.assert_array_equal(neg, np.bincount(bins[labels == 0], minlength=101))


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 2)])
def test_probabilities_are_taken_as_they_are(shape: tuple[int, ...]) -> None:
    probabilities = np.arange(8) / 8
    given_ = probabilities.reshape(shape) if shape != (8, 2) else np.stack([1 - probabilities, probabilities], axis=1)
    meter = AUC(num_thresholds=8, from_logits=False)
    meter.update(torch.from_numpy(given_), np.ones(8))
    assert meter.compute()[2][2].tolist() == [1.0] * 8 + [0.0]


@each_of("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_scores_of_every_kind_of_number_count(dtype: torch.dtype) -> None:
    meter = AUC()
    assert meter.update(torch.tensor([2, 1, -1, -2]).to(dtype), torch.tensor([1, 1, 0, 0])) == 1.0


@each_of(
    "labels",
    [
        [1, 0, 1],
        [1.0, 0.0, 1.0],
        [True, False, True],
        [[1], [0], [1]],
        torch.tensor([[1], [0], [1]]),
        torch.tensor([True, False, True]),
        np.array([1, 0, 1], np.uint8),
        torch.tensor([1, 0, 1], dtype=torch.bfloat16),
    ],
    ids=lambda labels: f"{type(labels).__name__} {getattr(labels, 'dtype', '')}",
)
def test_labels_may_be_of_any_kind(labels: Any) -> None:
    meter = AUC(num_thresholds=10)
    assert meter.update([2.0, -2.0, 1.0], labels) == 1.0
    assert [stat.sum() for stat in meter.compute()[2][2:]] == [2, 1]


EXTREME = {
    "one huge logit": [1e4, -1e4],
    "the largest": [3.4e38, -3.4e38],
    "infinite": [math.inf, -math.inf],
    "two huge logits": [[-1e4, 1e4], [1e4, -1e4]],
    "two with an infinite one": [[0.0, math.inf], [math.inf, 0.0]],
    "two of which one is minus infinity": [[-math.inf, 0.0], [0.0, -math.inf]],
    "the largest doubles": [[-1.7e308, 1.7e308], [1.7e308, -1.7e308]],
}


@each_of("kind", EXTREME)
def test_extreme_logits_go_to_the_outer_bins_without_a_warning(kind: str) -> None:
    meter = AUC(num_thresholds=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert meter.update(EXTREME[kind], [1, 0]) == 1.0
    assert meter.compute()[2][2][-1] == 1
    assert meter.compute()[2][3][0] == 1


@pytest.mark.parametrize("shape", [(0,), (0, 1), (0, 2)])
def test_an_empty_batch_counts_nothing_and_is_an_update(shape: tuple[int, ...]) -> None:
    meter = AUC(slide_steps=2)
    meter.update([1.0, -1.0], [1, 0])
    assert meter.update(torch.zeros(shape), torch.zeros(0, 1, dtype=torch.int64)) == 1.0
    assert meter.compute()[1] == 1.0
    assert meter.update([], []) == 1.0
    assert meter.compute()[:2] == (1.0, 0.5)


REFUSED: dict[str, tuple[Any, Any, bool, str]] = {
    "scores that are not numbers": ([math.nan, 1.0], [1, 0], True, "scores"),
    "one of two logits that is no number": ([[math.nan, 1.0]], [1], True, "scores"),
    "two infinite logits": ([[math.inf, math.inf]], [1], True, "scores"),
    "a probability that is no number": ([math.nan], [1], False, "scores"),
    "logits as probabilities": ([1.5, 0.2], [1, 0], False, "from_logits=True"),
    "negative probabilities": ([-0.1, 0.2], [1, 0], False, "probabilities"),
    "text as scores": (["high"], [1], True, "scores"),
    "no scores": (None, [1], True, "scores"),
    "a label 2": ([1.0, 2.0], [1, 2], True, "labels 0 1"),
    "a label -1": ([1.0, 2.0], [1, -1], True, "labels 0 1"),
    "a label 0.5": ([1.0, 2.0], [1, 0.5], True, "labels 0 1"),
    "a label that is no number": ([1.0, 2.0], [1, math.nan], True, "labels 0 1"),
    "text as labels": ([1.0, 2.0], ["1", "0"], True, "labels 0 1"),
    "fewer labels than scores": ([1.0, 2.0], [1], True, "2 1"),
    "one-hot labels": ([1.0, 2.0], [[1, 0], [0, 1]], True, "2 4"),
    "three classes": (np.zeros((4, 3)), [0, 1, 0, 1], True, "(4, 3)"),
    "three dimensions": (np.zeros((4, 2, 1)), [0, 1, 0, 1], True, "(4, 2, 1)"),
    "one number": (0.5, 1, True, "()"),
}


@pytest.mark.filterwarnings("error")
@each_of("mistake", REFUSED)
def test_a_batch_that_makes_no_sense_is_refused_and_counts_nothing(mistake: str) -> None:
    scores, labels, from_logits, text = REFUSED[mistake]
    meter = AUC(from_logits=from_logits)
    with pytest.raises(FleetError, match=naming(*text.split())):
        meter.update(scores, labels)
    assert sum(stat.sum() for stat in meter.compute()[2]) == 0


@each_of(
    "options",
    [
        {"num_thresholds": 0},
        {"num_thresholds": -1},
        {"slide_steps": 0},
        {"num_thresholds": 1.5},
        {"slide_steps": 2.5},
        {"num_thresholds": "many"},
        {"slide_steps": None},
    ],
    ids=str,
)
def test_options_that_are_no_counts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FleetError, match=naming("num_thresholds", "slide_steps")):
        AUC(**options)


@SMALL
@given(
    sizes=st.lists(st.integers(0, 12), max_size=8),
    slide_steps=st.integers(1, 4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_sequence_of_updates_and_resets_is_a_plain_recount(
    sizes: list[int], slide_steps: int, seed: int, data: st.DataObject
) -> None:
    meter = AUC(50, slide_steps, from_logits=False)
    rng = np.random.default_rng(seed)
    kept: list[tuple[Floats, npt.NDArray[np.int64]]] = []
    for size in sizes:
        if data.draw(st.integers(0, 4)) == 0:
            meter.reset()
            kept.clear()
        kept.append((rng.random(size), rng.integers(0, 2, size)))
        meter.update(*kept[-1])
    auc, batch_auc, stats = meter.compute()
    for recent, found, (positive, negative) in (
        (kept[-slide_steps:], batch_auc, stats[:2]),
        (kept, auc, stats[2:]),
    ):
        scores = np.concatenate([np.zeros(0), *(scores for scores, _ in recent)])
        labels = np.concatenate([np.zeros(0, np.int64), *(labels for _, labels in recent)])
        np.testing.assert_array_equal(positive, histogram(scores[labels == 1], 50))
        np.testing.assert_array_equal(negative, histogram(scores[labels == 0], 50))
        assert found == pytest.approx(pairwise_auc(np.floor(scores * 50), labels), abs=1e-12)


# Threads


def in_threads(work: Any, num: int) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,), daemon=True) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_updates_from_several_threads_lose_nothing() -> None:
    meter = AUC(slide_steps=1000)
    batches = [batch(seed, 64) for seed in range(160)]

    def work(index: int) -> None:
        for logits, labels in batches[index::4]:
            meter.update(logits, labels)

    in_threads(work, 4)
    logits, labels = (np.concatenate(column) for column in zip(*batches, strict=True))
    alone = AUC()
    alone.update(logits, labels)
    for found, expected in zip(meter.compute()[2], alone.compute()[2], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_update_returns_belongs_to_one_moment() -> None:
    """In every moment all positives are above all negatives: whatever is counted meanwhile, the area is 1."""
    meter = AUC(num_thresholds=20_000, from_logits=False)
    scores, labels = np.array([0.1] * 50 + [0.9] * 50), np.array([0] * 50 + [1] * 50)
    wrong: list[float] = []

    def work(index: int) -> None:
        for _ in range(150):
            found = meter.update(scores, labels)
            if found != 1.0:
                wrong.append(found)

    in_threads(work, 4)
    assert not wrong


def test_a_reset_by_another_thread_does_not_change_what_this_update_returns() -> None:
    """A lock that lets a reset in as soon as an update lets go of it."""
    meter = AUC()
    real = meter._lock

    class Lock:
        armed = True

        def __enter__(self) -> None:
            real.acquire()

        def __exit__(self, *_: object) -> None:
            real.release()
            if self.armed:
                self.armed = False
                meter.reset()

    meter._lock = Lock()  # type: ignore[assignment]
    assert meter.update([1.0, -1.0], [1, 0]) == 1.0


# Without a fleet: this process's own


def as_number(x: float) -> Any:
    return x


WAYS: dict[str, Any] = {
    "a number": as_number,
    "a numpy number": np.float64,
    "a numpy integer": np.int64,
    "an array of one": lambda x: np.array([x]),
    "an array without dimensions": np.array,
    "an array of parts": lambda x: np.array([x - 1, 1]),
    "a list": lambda x: [x],
    "a tensor": lambda x: torch.tensor([float(x)]),
    "a tensor without dimensions": torch.tensor,
    "a tensor of parts": lambda x: torch.tensor([x - 1, 1]),
}


@each_of("way", WAYS)
def test_ratios_of_one_process_are_plain_divisions(way: str) -> None:
    made = WAYS[way]
    for name, expected in (("acc", 9 / 12), ("mae", 9 / 12), ("mse", 9 / 12), ("rmse", math.sqrt(9 / 12))):
        found = getattr(metrics, name)(made(9), made(12))
        assert isinstance(found, float), name
        assert found == pytest.approx(expected), name


@each_of("name", ["sum", "max", "min"])
@each_of("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_reductions_of_one_process_return_what_was_given(name: str, shape: tuple[int, ...]) -> None:
    function = getattr(metrics, name)
    array = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    found = function(array)
    assert isinstance(found, np.ndarray)
    assert found.shape == shape
    np.testing.assert_array_equal(found, array)
    tensor = function(torch.from_numpy(array.astype(np.float32)))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.float32
    assert tensor.shape == shape
    assert torch.equal(tensor.double(), torch.from_numpy(array))


@each_of("value", [3, 2.5, True, np.float32(1.5), np.int64(7)], ids=repr)
def test_numbers_stay_numbers(value: Any) -> None:
    for function in (metrics.sum, metrics.max, metrics.min):
        found = function(value)
        assert isinstance(found, (int, float))
        assert found == value


def test_transposed_arrays_keep_their_order() -> None:
    array = np.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(metrics.sum(array), array)
    assert torch.equal(metrics.sum(torch.arange(6.0).reshape(2, 3).T), torch.arange(6.0).reshape(2, 3).T)


def test_a_bfloat16_tensor_can_be_summed() -> None:
    found = metrics.sum(torch.tensor([1.5, 2.0], dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, 2.0]


def test_what_was_given_is_not_changed_when_the_result_is() -> None:
    array, tensor = np.ones(2), torch.ones(2)
    metrics.sum(array)[:] = 5
    metrics.sum(tensor)[:] = 5
    assert array.tolist() == [1, 1]
    assert tensor.tolist() == [1, 1]


@each_of("name", ["acc", "mae", "mse", "rmse"])
@each_of("total", [0, -1, 0.0], ids=str)
def test_no_samples_is_an_error_that_names_the_metric(name: str, total: float) -> None:
    with pytest.raises(FleetError, match=naming(f"fleet.metrics.{name}")):
        getattr(metrics, name)(3, total)


@each_of("name", ["sum", "max", "min"])
@each_of("value", ["three", None, [1, "a"], 1j, print, [[1, 2], [3]]], ids=str)
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FleetError, match=r"fleet.metrics"):
        getattr(metrics, name)(value)


def test_histograms_of_different_lengths_are_refused() -> None:
    with pytest.raises(FleetError, match=naming(3, 2)):
        metrics.auc([1, 2, 3], [1, 2])


def test_histograms_may_be_lists_arrays_or_tensors() -> None:
    for made in (list, np.array, torch.tensor):
        assert metrics.auc(made([0, 1, 3]), made([2, 1, 1])) == pytest.approx((2 * 4 + 1 * 3.5 + 1 * 1.5) / 16)
    assert metrics.auc([0, 0], [0, 0]) == 0.5
    assert metrics.auc([5, 0], [0, 0]) == 0.5
