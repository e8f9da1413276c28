"""The directory of a cache against a dict."""

from __future__ import annotations

import numpy as np
import torch

from torchfleet.ps.worker.cache import key_directory
from torchfleet.ps.worker.cache.key_directory import KeyDirectory


def test_keys_have_the_slots_of_a_dict_after_insertions_and_erasures(monkeypatch) -> None:
    monkeypatch.setattr(key_directory, "_LEAST_RECENT", 20)  # so that the two arrays are merged now and then
    draws = np.random.default_rng(3)
    directory, known, free = KeyDirectory(torch.device("cpu")), dict[int, int](), list(range(400))
    extremes = [-(1 << 63), (1 << 63) - 1, 0, -1]
    for turn in range(40):
        drawn = {*draws.integers(-60, 120, 9).tolist(), *extremes[: turn % 5]}
        new = [key for key in drawn if key not in known]
        slots = [free.pop(int(draws.integers(len(free)))) for _ in new]
        known.update(zip(new, slots, strict=True))
        directory.insert(torch.tensor(new, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64))
        if turn % 3 == 2:
            gone = {slot for slot in known.values() if draws.random() < 0.4}
            mask = torch.zeros(400, dtype=torch.bool)
            mask[list(gone)] = True
            keys, at = directory.erase(mask)
            assert dict(zip(keys.tolist(), at.tolist(), strict=True)) == {k: s for k, s in known.items() if s in gone}
            known = {key: slot for key, slot in known.items() if slot not in gone}
            free += gone
        asked = torch.tensor([*range(-70, 130), *extremes])
        assert directory.find(asked).tolist() == [known.get(key, -1) for key in asked.tolist()]
        assert len(directory) == len(known)
    keys, at = directory.items()
    assert dict(zip(keys.tolist(), at.tolist(), strict=True)) == known
