"""Samples that came as columns, as rows of words: what an InMemoryDataset keeps, shuffles and exchanges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.data.column_samples import Column, ColumnSamples, Lists
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import SampleLayout
from torchfleet.ps.kernels import batches


def rows_of(samples: ColumnSamples, layout: SampleLayout) -> SampleRows:
    """A copy of the samples, each of its slots behind the other."""
    columns = [_words(samples.columns[slot.name]) for slot in layout.slots]
    lengths = np.zeros(samples.num, np.int64)
    for (_, bounds), dim in zip(columns, layout.dims, strict=True):
        lengths += np.diff(bounds) + (dim < 0)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    words, ats = np.empty(starts[-1], np.uint32), starts[:-1].copy()
    for (values, bounds), dim, size in zip(columns, layout.dims, layout.sizes, strict=True):
        batches.put_slot(values, bounds, dim < 0, size, ats, words)
    return SampleRows(words, starts)


def _words(column: Column) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """A slot's values as words, and where those of each sample begin; one bound more than there are samples."""
    values, offsets = column if isinstance(column, Lists) else (column, None)
    words = np.ascontiguousarray(values.numpy()).reshape(-1).view(np.uint32)
    size = values.element_size() // 4
    if offsets is None:
        return words, np.arange(len(values) + 1) * (values.shape[1] * size)
    return words, offsets * size
