"""Images with classes: made up, or from a folder; each rank's share of them as batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchfleet as fleet

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of photographs (ImageNet)
SPREAD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

Sample = tuple[torch.Tensor, int]


class Generated(Dataset[Sample]):
    """Made-up images: the class is a coarse pattern of colours, in other places and brightness each time, under noise.

    Image i is the same whenever it is asked for, on every rank; `part` 1 has others than part 0, of the same classes.
    """

    def __init__(self, num: int, num_classes: int, size: int, part: int = 0, noise: float = 0.5) -> None:
        self._num, self._num_classes, self._size, self._part, self._noise = num, num_classes, size, part, noise
        coarse = torch.randn(num_classes, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self._patterns = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(2 * index + self._part)
        label = index % self._num_classes
        across, down = torch.randint(-(self._size // 8), self._size // 8 + 1, (2,), generator=random).tolist()
        brightness = 0.7 + 0.6 * torch.rand((), generator=random)
        image = brightness * self._patterns[label].roll((across, down), (1, 2))
        return image + self._noise * torch.randn(image.shape, generator=random), label


class Folder(Dataset[Sample]):
    """`folder/<class>/<image>`: .npy arrays (height × width × 3, bytes), or pictures if Pillow is installed.

    Images are scaled so that the shorter side fits, and cut to the middle; `flip` turns half of them around.
    """

    def __init__(self, folder: Path, classes: list[str], size: int, flip: bool) -> None:
        known = (".npy", *PICTURES)
        files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
        self._files = [(path, label) for path, label in files if path.suffix.lower() in known]
        if not self._files:
            raise SystemExit(f"no images in {folder}/*/: expected files that end in {', '.join(known)}")
        if any(path.suffix.lower() in PICTURES for path, _ in self._files):
            _pillow()
        self._size, self._flip = size, flip

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self._files[index]
        image = torch.from_numpy(_read(path)).permute(2, 0, 1).float() / 255
        scale = self._size / min(image.shape[1:])
        height, width = (max(self._size, round(side * scale)) for side in image.shape[1:])
        image = torch.nn.functional.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0]
        top, left = (height - self._size) // 2, (width - self._size) // 2
        image = (image[:, top : top + self._size, left : left + self._size] - MEAN) / SPREAD
        return image.flip(2) if self._flip and torch.rand(()) < 0.5 else image, label


def _read(path: Path) -> np.ndarray:
    if path.suffix.lower() != ".npy":
        with _pillow().open(path) as picture:
            return np.array(picture.convert("RGB"))
    array: np.ndarray = np.load(path, allow_pickle=False)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise SystemExit(f"{path}: expected bytes (uint8), height × width × 3, found {array.dtype} {array.shape}")
    return array


def _pillow():  # type: ignore[no-untyped-def]
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit("pictures need Pillow: `pip install pillow`, or store images as .npy arrays") from None
    return Image


def datasets(folder: str | None, num: int, num_classes: int, size: int) -> tuple[Dataset[Sample], Dataset[Sample], int]:
    """Images to train with, images to test with, and the number of classes."""
    if folder is None:
        return Generated(num, num_classes, size), Generated(max(1, num // 4), num_classes, size, part=1), num_classes
    parts = [Path(folder) / name for name in ("train", "val")]
    for part in parts:
        if not part.is_dir():
            raise SystemExit(
                f"no folder {part}: expected {folder}/train/<class>/<image> and {folder}/val/<class>/<image>"
            )
    classes = sorted(path.name for path in parts[0].iterdir() if path.is_dir())
    missing = [name for name in classes if not (parts[1] / name).is_dir()]
    if not classes or missing:
        raise SystemExit(
            f"{parts[0]} has the classes {classes or 'none'}, {parts[1]} lacks {', '.join(missing) or 'all'}"
        )
    train, test = (Folder(part, classes, size, flip=part is parts[0]) for part in parts)
    return train, test, len(classes)


def loader(dataset: Dataset[Sample], batch_size: int, train: bool, seed: int, processes: int) -> DataLoader[Sample]:
    """This rank's share as batches; shares have equal numbers of images, some of which come twice for that.

    Call `loader.sampler.set_epoch(epoch)` before each epoch for another order.
    """
    share, num_shares = fleet.data_shard()
    sampler: DistributedSampler[Sample] = DistributedSampler(dataset, num_shares, share, shuffle=train, seed=seed)
    if train and len(sampler) < batch_size:
        raise SystemExit(f"{len(sampler)} images per rank are less than one batch of {batch_size}: lower --batch_size")
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=processes,
        drop_last=train,
        pin_memory=torch.cuda.is_available(),
    )
