"""hybrid/meeting_place.py: which backend the workers of a hybrid job exchange their network with."""

from __future__ import annotations

from support.cases import each_of

from torchfleet.api.hybrid.meeting_place import Place, usual_backend


@each_of(
    ("places", "backend"),
    [
        ([Place("cpu")], "gloo"),
        ([Place("cpu"), Place("cpu")], "gloo"),
        ([Place("cuda", "one")], "nccl"),
        ([Place("cuda", "one"), Place("cuda", "other")], "nccl"),
        ([Place("cuda", "one"), Place("cuda", "other"), Place("cuda", "one")], "gloo"),  # NCCL refuses to share a GPU
    ],
)
def test_gpus_use_nccl_unless_workers_share_one(places: list[Place], backend: str) -> None:
    assert usual_backend(places) == backend
