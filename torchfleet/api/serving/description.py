"""`serving.json` of a save: what `fleet serve` needs to know of a model besides its tables and parameters.

Where it lies, and why it belongs to its save: ps/checkpoint/save_files.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from msgspec.structs import replace

from torchfleet.api.serving.model_inputs import ModelInputs, inputs_of
from torchfleet.api.serving.network_graph import NetworkGraph
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.data.features import Feature, FormerFeature, SampleText, as_in_text
from torchfleet.data.model_features import ModelFeatures, checked, features_in
from torchfleet.ps.checkpoint.manifest import FILE, Manifest, Parameter
from torchfleet.ps.checkpoint.manifest_file import has_manifest
from torchfleet.ps.checkpoint.save_files import SERVING, SERVING_FORMAT, SERVING_VERSION, NotDescribed, read_model
from torchfleet.ps.worker.lookup.plan import Plan

FORMAT = SERVING_FORMAT
VERSION = SERVING_VERSION  # in version 1, requests had another rule for numbers: FormerFeature


class ServingDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs of a model, and its network, or why that could not be saved."""

    features: list[Feature]
    call: Literal["batch", "arguments", "nested"]  # model(batch of features), model(feature=...), or otherwise
    network: NetworkGraph | None = None
    reason: str = ""
    text: SampleText | None = None  # the format of lines that a request may have in place of the features
    format: str = FORMAT
    version: int = VERSION


class _FormerDescription(ServingDescription, frozen=True, forbid_unknown_fields=True):
    """Version 1, whose features keep the rule of then."""

    features: list[FormerFeature]  # type: ignore[assignment]


class _Head(msgspec.Struct):
    version: int


def read_description(storage: Storage) -> ServingDescription:
    """Read the description of a saved model. Raises CheckpointError if it is missing or cannot be read."""
    return read_saved(storage)[1]


def read_saved(storage: Storage) -> tuple[Manifest, ServingDescription]:
    """The manifest and the description of one save. Raises CheckpointError as read_description does."""
    manifest, body = read_model(storage)
    if body is None:
        raise CheckpointError(not_there(storage.place(SERVING)))
    return manifest, decoded_description(body, storage.place(f"{manifest.save}/{SERVING}"))


def not_there(place: str) -> str:
    """What to do about a saved model without a description."""
    return (
        f"{place} is missing: it has the inputs of the model and its network. A job writes it with each save, once its "
        "worker 0 has called the model. Save the model again, by fleet.save_inference_model"
    )


def decoded_description(body: bytes, place: str) -> ServingDescription:
    """Raises CheckpointError, which names `place`, for what is not a description, or says that there is none."""
    missing = _missing_in(body)
    if missing:
        raise CheckpointError(f"{place} has neither inputs nor network: {missing}")
    try:
        is_former = msgspec.json.decode(body, type=prepared(_Head)).version == 1
        kind = _FormerDescription if is_former else ServingDescription
        found: ServingDescription = msgspec.json.decode(body, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{place} is not a description of this version: {error}") from None
    if found.format != FORMAT or found.version not in (1, VERSION):
        raise CheckpointError(
            f"{place}: expected {FORMAT} version {VERSION} or 1, found {found.format} version {found.version}"
        )
    return found


def _missing_in(body: bytes) -> str:
    """Why the save with this serving.json cannot be served; empty if it may be."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
        return msgspec.json.decode(body, type=prepared(NotDescribed)).missing
    return ""


def saved_features(storage: Storage) -> list[Feature]:
    """The features that belong to the model that is saved there; none without a complete save."""
    if not has_manifest(storage):
        return []
    manifest, body = read_model(storage)
    if manifest.features or body is None or _missing_in(body):
        return features_in(manifest.features, storage.place(FILE))
    described = decoded_description(body, storage.place(f"{manifest.save}/{SERVING}"))
    return _described_formerly(described) if described.version == 1 else []


def _described_formerly(described: ServingDescription) -> list[Feature]:
    """The features of a save whose manifest did not have them yet: those with more than the model and its text say."""
    found = []
    for feature in described.features:
        said = Feature(feature.name, feature.dtype, feature.shape, default=[] if feature.shape is None else None)
        if described.text is not None:
            said = as_in_text(said, described.text)
        fields = {name: getattr(feature, name) for name in Feature.__struct_fields__}
        if fields != {name: getattr(said, name) for name in Feature.__struct_fields__}:
            found.append(Feature(**fields))
    return found


class ModelDescriber:
    """Watches how a model is called, and describes it for saves."""

    def __init__(self, model: torch.nn.Module, features: ModelFeatures) -> None:
        """`features`: that belong to the model."""
        self._model, self.features = model, features
        self._inputs: ModelInputs | None = None
        self._call: Literal["batch", "arguments", "nested"] = "nested"
        self._reason = ""
        self._network: NetworkGraph | None = None
        self._is_traced = False
        self._loaded: tuple[Manifest, ServingDescription] | None = None  # of the save that the job continues
        self.text: SampleText | None = None  # what the dataset of the last pass reads

    def note_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called when the model is called for the first time."""
        values = [*args, *kwargs.values()]
        if all(isinstance(value, torch.Tensor) for value in values):
            self._call = "arguments"
        elif len(values) == 1 and isinstance(values[0], Mapping):
            self._call = "batch"
        try:
            self._inputs = inputs_of(self._model, args, kwargs)
        except ModelError as error:
            self._inputs, self._reason = ModelInputs(), str(error)
        self._check_inputs(self.features.names)

    def describe(self, features: Sequence[Feature]) -> None:
        """Add features to those of the model. Raises ModelError for one that is not an input, or known as another."""
        self._check_inputs([feature.name for feature in checked(features)])
        self.features.give(features)

    def replace(self, features: Sequence[Feature]) -> None:
        """Replace the features of the model. Raises ModelError for one that is not an input."""
        self._check_inputs([feature.name for feature in checked(features)])
        self.features.replace(features)

    def _check_inputs(self, names: Sequence[str]) -> None:
        if self._inputs is None or self._reason:
            return
        known = {feature.name for feature in self._inputs.features}
        others = [name for name in names if name not in known]
        if others:
            raise ModelError(
                f"features: expected names of the model's inputs, which are {', '.join(sorted(known))}, found "
                f"{', '.join(others)}. If a save has these, and the model no longer takes them: "
                "fleet.replace_features(features)"
            )

    def load(self, storage: Storage) -> None:
        """Note the save that the job continues, if this process can read it: servers may load from where it cannot."""
        with contextlib.suppress(CheckpointError, OSError):
            manifest, body = read_model(storage)
            if body is not None:
                self._loaded = manifest, decoded_description(body, storage.place(SERVING))

    def encoded(self, plan: Plan) -> bytes | None:
        """The serving.json of a save that is made now.

        A model that was not called keeps the description of the save that the job continues, if its tables, parameters
        and buffers have the same names and shapes. None: it has none.
        """
        if self._inputs is not None:
            return msgspec.json.encode(self._described())
        if self._loaded is not None and _named(self._loaded[0]) == _planned(plan):
            described = self._loaded[1]
            if described.version == VERSION:  # features of version 1 keep their rule
                described = replace(described, features=[self._as_given(feature) for feature in described.features])
            return msgspec.json.encode(described)
        return None

    def _described(self) -> ServingDescription:
        assert self._inputs is not None
        if not self._is_traced and not self._reason:
            self._trace(self._inputs)
        used = {source.feature for source in self._network.inputs} if self._network is not None else None
        found = [feature for feature in self._inputs.features if used is None or feature.name in used]
        features = [self._as_given(self._as_read(feature)) for feature in found]
        return ServingDescription(features, self._call, self._network, self._reason, self.text)

    def _trace(self, inputs: ModelInputs) -> None:
        from torchfleet.api.serving.network_trace import traced  # imports torch.export, so only on demand

        self._is_traced = True
        try:
            self._network = traced(self._model, inputs)
        except ModelError as error:
            self._reason = str(error)

    def _as_given(self, feature: Feature) -> Feature:
        given = self.features.get(feature.name)
        if given is None:
            return feature
        ways = {name: getattr(given, name) for name in ("hash_seed", "hash_size", "vocabulary", "buckets")}
        rest = {name: value for name in ("default", "missing") if (value := getattr(given, name)) is not None}
        return replace(feature, **(ways if any(ways.values()) else {}), **rest)

    def _as_read(self, feature: Feature) -> Feature:
        return feature if self.text is None else as_in_text(feature, self.text)


def _named(manifest: Manifest) -> tuple[dict[str, int], dict[str, str]]:
    """Widths of the tables with rows, and kinds of parameters and buffers, by name."""
    parameters = [own for table in manifest.tables for own in table.parameters]
    return {table.name: table.dim for table in manifest.tables if not table.is_dense}, _kinds(parameters)


def _planned(plan: Plan) -> tuple[dict[str, int], dict[str, str]]:
    """As `_named`, of the tables of a job."""
    parameters = [own for layout in plan.layouts.values() for own in layout]
    return {name: group.spec.dim for name, group in plan.sparse.items()}, _kinds(parameters)


def _kinds(parameters: Sequence[Parameter]) -> dict[str, str]:
    return {parameter.name: parameter.described for parameter in parameters}
