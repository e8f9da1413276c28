"""`serving.json` beside a manifest: what `fleet serve` needs to know of a model besides its tables and parameters."""

from __future__ import annotations

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
from torchfleet.data.features import Feature, SampleText, as_in_text
from torchfleet.ps.checkpoint.manifest_file import SERVING, read_body
from torchfleet.ps.checkpoint.part_writer import write_file

FORMAT = "torchfleet serving"
VERSION = 1


class ServingDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs of a model, and its network, or why that could not be saved."""

    features: list[Feature]
    call: Literal["batch", "arguments", "nested"]  # model(batch of features), model(feature=...), or otherwise
    network: NetworkGraph | None = None
    reason: str = ""
    text: SampleText | None = None  # the format of lines that a request may have in place of the features
    format: str = FORMAT
    version: int = VERSION


def read_description(storage: Storage) -> ServingDescription:
    """Read the description of a saved model. Raises CheckpointError if it is missing, cannot be read, or is a link out
    of the folder.
    """
    place = storage.place(SERVING)
    if not storage.exists(SERVING):
        read_body(storage)  # raises if there is no model at all
        raise CheckpointError(
            f"{place} is missing: it has the inputs of the model and its network. A job writes it with each save, once "
            "its worker 0 has called the model. Save the model again, by fleet.save_inference_model"
        )
    storage.check_own(SERVING)
    try:
        found = msgspec.json.decode(storage.read(SERVING), type=prepared(ServingDescription))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{place} is not a description of this version: {error}") from None
    if (found.format, found.version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{place}: expected {FORMAT} version {VERSION}, found {found.format} version {found.version}"
        )
    return found


class ModelDescriber:
    """Watches how a model is called, and writes its description with saves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._inputs: ModelInputs | None = None
        self._call: Literal["batch", "arguments", "nested"] = "nested"
        self._reason = ""
        self._network: NetworkGraph | None = None
        self._is_traced = False
        self._written: dict[str, bytes] = {}  # by folder
        self.text: SampleText | None = None  # what the dataset of the last pass reads
        self._given: dict[str, Feature] = {}  # features that the user describes

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

    def describe(self, features: Sequence[Feature]) -> None:
        """Take hashes and defaults from these features, from now on. Raises ModelError for one that is not an input."""
        if isinstance(features, (str, Feature)) or not all(isinstance(feature, Feature) for feature in features):
            raise ModelError(f"features: expected a list of fleet.Feature, found {features!r:.80}")
        known = None if self._inputs is None or self._reason else {feature.name for feature in self._inputs.features}
        for feature in features:
            if known is not None and feature.name not in known:
                raise ModelError(
                    f"features: the model was called with {', '.join(sorted(known))}, and not with '{feature.name}'"
                )
            self._given[feature.name] = feature

    def write(self, storage: Storage) -> None:
        """Write the description, unless it is there already. Nothing is written if the model was never called."""
        if self._inputs is None:
            return
        body = msgspec.json.encode(self._described())
        if self._written.get(storage.path) != body or not storage.exists(SERVING):
            write_file(storage, SERVING, [body])
            self._written[storage.path] = body

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
        given = self._given.get(feature.name)
        if given is None:
            return feature
        default = feature.default if given.default is None else given.default
        names = ("hash_seed", "hash_size", "vocabulary", "buckets")
        return replace(feature, default=default, **{name: getattr(given, name) for name in names})

    def _as_read(self, feature: Feature) -> Feature:
        return feature if self.text is None else as_in_text(feature, self.text)
