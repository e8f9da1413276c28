"""The Open Inference Protocol v2: requests into samples, results into responses. JSON, and the binary extension."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.request_inputs import InputParameters, RequestInput, as_feature, data_of, utf8
from torchfleet.apps.serve.endpoints.request_templates import LEARN_PAUSE, RequestTemplates
from torchfleet.apps.serve.samples import Packing, Samples
from torchfleet.apps.serve.tensors import datatype_of, flat_decoder, may_have, num_elements
from torchfleet.base.errors import DataError
from torchfleet.base.prepared_types import prepared
from torchfleet.data.features import Feature, SampleText, TextSamples
from torchfleet.data.slots import Ragged

TEXT = "text"  # the input with lines as training reads them
OFFSETS = ".offsets"  # ends the name of the input that says where each sample's values of a ragged feature begin
MAX_INPUTS = 10_000
MAX_RAGGED = 1024  # values of a ragged feature, times max_batch
_NUMBER, _STRING = 128, 1024  # bytes of JSON that are enough for a value, with blanks and brackets
_SLACK = 1 << 16  # bytes, and 1 KiB for each feature: names, ids of requests and parameters
_MAX_SHAPE = 1024  # bytes


class OutputParameters(msgspec.Struct, frozen=True):
    """The parameters of an output, or of all, that are known here. Others are skipped, and take no memory."""

    binary_data: bool | None = None
    binary_data_output: bool = False
    classification: Any = None


class RequestOutput(msgspec.Struct):
    name: str
    parameters: OutputParameters = OutputParameters()


class InferBody(msgspec.Struct):
    inputs: list[RequestInput]
    id: str = ""
    outputs: list[RequestOutput] = []
    parameters: OutputParameters = OutputParameters()


class _Left(threading.local):
    """How many more inputs and outputs the request may have that this thread decodes."""

    num = 0

    def take(self) -> None:
        self.num -= 1
        if self.num < 0:
            raise ValueError(f"expected at most {MAX_INPUTS:,} inputs and outputs")


_LEFT = _Left()


class _LargeInput(msgspec.Struct):
    """As RequestInput, with the shape as text; decoding ends with an error at the first one that is too many."""

    name: str
    shape: msgspec.Raw
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: InputParameters = InputParameters()

    def __post_init__(self) -> None:
        _LEFT.take()


class _LargeOutput(RequestOutput):
    def __post_init__(self) -> None:
        _LEFT.take()


class _LargeBody(msgspec.Struct):
    inputs: list[_LargeInput]
    id: str = ""
    outputs: list[_LargeOutput] = []
    parameters: OutputParameters = OutputParameters()


class InferRequest(msgspec.Struct):
    """A request that is ready for a batch, and the form of its response."""

    samples: Samples
    id: str
    outputs: list[tuple[str, bool]]  # names, and whether as bytes


class _PlainInput:
    """How a feature is read from JSON values of its own type."""

    def __init__(self, feature: Feature) -> None:
        self.datatype, self.shape, self.num_values = datatype_of(feature.dtype), feature.shape or [], feature.num_values
        self.decode = flat_decoder(self.datatype).decode

    def fits(self, one: RequestInput, num: int) -> bool:
        """Whether an input may be such values of `num` samples, as far as can be seen before they are decoded."""
        is_same = one.datatype == self.datatype and one.shape == [num, *self.shape]
        return is_same and one.parameters.binary_data_size is None and may_have(one.data, num * self.num_values)


class _Texts(threading.local):
    """The parser of each thread."""

    def __init__(self, described: SampleText) -> None:
        self.parser = TextSamples(described)


_DECODER = msgspec.json.Decoder(prepared(InferBody))
_LARGE_DECODER = msgspec.json.Decoder(prepared(_LargeBody))
_SHAPE_DECODER = msgspec.json.Decoder(prepared(list[int]))
_NO_NUMBER = re.compile(rb"-?(?:nan|inf)", re.IGNORECASE)
_ENCODER = msgspec.json.Encoder()


class InferenceProtocol:
    """Decodes and encodes for one model. Used by one thread; `parsed_large` and `request` by others, too."""

    def __init__(
        self,
        described: ServingDescription,
        outputs: Sequence[str],
        max_batch: int,
        learn_pause: float = LEARN_PAUSE,
    ) -> None:
        """`outputs`: names, in the order of responses. `max_batch`: samples of a request. `learn_pause`: seconds
        between two requests that are learned as templates.
        """
        self._features = {feature.name: feature for feature in described.features}
        self._needed = [feature.name for feature in described.features if feature.default is None]
        self._outputs, self._max_batch = list(outputs), max_batch
        has_text = described.text is not None and TEXT not in self._features
        self._texts = _Texts(described.text) if has_text and described.text is not None else None
        self._packing = Packing(described.features)
        self._templates = RequestTemplates(self._packing, learn_pause)
        values = sum(_bytes_of(feature) for feature in described.features)
        own = max_batch * values + _SLACK + (len(described.features) << 10)
        self.max_bytes = 1 << 62 if self._texts is not None else own  # of a request
        self._plain = {feature.name: _PlainInput(feature) for feature in described.features if feature.is_plain}

    def decode(self, body: bytes, json_size: int | None) -> InferRequest:
        """`json_size`: bytes of JSON, which binary tensors follow; None: all of `body` is JSON. Raises DataError."""
        known = self.known(body, json_size)
        if known is not None:
            return known
        text, rest = _parts(body, json_size)
        found = _decoded(_DECODER, text)
        request = self.request(found, rest)
        if json_size is None:
            self.learn(body, request, found)
        return request

    def known(self, body: bytes, json_size: int | None) -> InferRequest | None:
        """As decode, of a request that is like an earlier one; None for others."""
        if json_size is not None or (known := self._templates.read(body)) is None:
            return None
        self._packing.check(known[0].packed or {})
        return InferRequest(known[0], "", known[1])

    def parsed_large(self, body: bytes, json_size: int | None) -> tuple[InferRequest, InferBody]:
        """As decode, with what `learn` takes: by another thread, and in bounded memory also for wrong requests."""
        text, rest = _parts(body, json_size)
        _LEFT.num = MAX_INPUTS
        large = _decoded(_LARGE_DECODER, text)
        inputs = [
            RequestInput(one.name, _shape_of(one), one.datatype, one.data, one.parameters) for one in large.inputs
        ]
        found = InferBody(inputs, large.id, list(large.outputs), large.parameters)
        return self.request(found, rest), found

    def learn(self, body: bytes, request: InferRequest, found: InferBody) -> None:
        """Read requests that are like this one by a template from now on, if that is possible."""
        if request.samples.packed is not None and not request.id:
            arrays = [(one.name, one.data) for one in found.inputs]
            self._templates.learn(body, arrays, request.samples.num, request.outputs)

    def request(self, found: InferBody, rest: memoryview) -> InferRequest:
        """`rest`: the bytes of binary tensors, one after another. Raises DataError."""
        if not 0 < len(found.inputs) <= MAX_INPUTS:
            raise DataError(f"expected 1 to {MAX_INPUTS:,} inputs, found {len(found.inputs)}")
        samples = (None if len(rest) else self._packed(found.inputs)) or self._samples(found.inputs, rest)
        return InferRequest(samples, found.id, self._asked(found))

    def encode(
        self, request: InferRequest, results: Mapping[str, npt.NDArray[Any]], model: str, version: str
    ) -> tuple[bytes, int | None]:
        """(the body, and the bytes of its JSON if binary tensors follow)."""
        outputs, tails = [], []
        for name, is_binary in request.outputs:
            array = results[name]
            if is_binary:
                tail = np.ascontiguousarray(array).tobytes()
                rest = b',"parameters":{"binary_data_size":%d}}' % len(tail)
                tails.append(tail)
            else:
                rest = b',"data":%b}' % _ENCODER.encode(array.reshape(-1).tolist())
            outputs.append(_output_head(name, array.dtype.name, array.shape) + rest)
        head = b'{%b,"outputs":[%b]%b}' % (
            _names_of(model, version),
            b",".join(outputs),
            b',"id":%b' % _ENCODER.encode(request.id) if request.id else b"",
        )
        return (head, None) if not tails else (b"".join((head, *tails)), len(head))

    def _asked(self, found: InferBody) -> list[tuple[str, bool]]:
        is_binary = found.parameters.binary_data_output
        if not found.outputs:
            return [(name, is_binary) for name in self._outputs]
        asked = []
        for output in found.outputs:
            if output.name not in self._outputs:
                raise DataError(f"there is no output '{output.name:.80}'; there is {', '.join(self._outputs)}")
            if output.parameters.classification is not None:
                raise DataError(f"output '{output.name}': the classification extension is not supported")
            own = output.parameters.binary_data
            asked.append((output.name, is_binary if own is None else own))
        if len({name for name, _ in asked}) < len(asked):
            raise DataError("an output is asked for twice")
        return asked

    def _packed(self, inputs: Sequence[RequestInput]) -> Samples | None:
        """Samples of a request that gives each feature as JSON of its own type; None for others, also invalid ones."""
        num = inputs[0].shape[0] if inputs[0].shape else 0
        if not self._packing.is_possible or len(inputs) != len(self._features) or not 0 < num <= self._max_batch:
            return None
        found: dict[str, list[Any]] = {}
        for one in inputs:
            plain = self._plain.get(one.name)
            if plain is None or not plain.fits(one, num):
                return None
            try:
                data = plain.decode(one.data)
            except (msgspec.MsgspecError, RecursionError):
                return None
            if len(data) != num * plain.num_values:
                return None
            found[one.name] = data
        if len(found) < len(inputs):
            return None
        blocks = self._packing.packed(num, found)
        self._packing.check(blocks)
        return Samples(num, {}, packed=blocks)

    def _samples(self, inputs: Sequence[RequestInput], rest: memoryview) -> Samples:
        given: dict[str, tuple[RequestInput, Any]] = {}
        for one in inputs:
            if one.name in given:
                raise DataError(f"input '{one.name:.80}' is given twice")
            self._check_size(one)
            data, rest = data_of(one, rest)
            given[one.name] = one, data
        if len(rest):
            raise DataError(f"{len(rest)} bytes follow the last binary tensor")
        if self._texts is not None and TEXT in given:
            return self._from_text(given, self._texts.parser)
        samples = Samples(-1, {})
        for name, (one, data) in given.items():
            if name in self._features:
                self._add(samples, self._features[name], one, data, given)
            elif name[: -len(OFFSETS)] not in given:
                raise self._unknown(name)
        self._check(samples)
        return samples

    def _check_size(self, one: RequestInput) -> None:
        """Raise DataError for an input that the model does not take, or that has more values than a request may have:
        before its values are decoded.
        """
        base = one.name[: -len(OFFSETS)] if one.name.endswith(OFFSETS) else ""
        feature = self._features.get(one.name)
        if feature is not None:
            of_sample = MAX_RAGGED if feature.shape is None else feature.num_values
        elif base in self._features or (one.name == TEXT and self._texts is not None):
            of_sample = 1
        else:
            raise self._unknown(one.name)
        if (found := num_elements(one.shape, one.name)) > self._max_batch * of_sample:
            raise DataError(
                f"input '{one.name}': expected at most {self._max_batch * of_sample:,} values (1 to {self._max_batch} "
                f"samples in a request, times {of_sample:,}), found {found:,}: shape {one.shape!r:.80}"
            )

    def _unknown(self, name: str) -> DataError:
        return DataError(f"there is no input '{name:.80}'; there is {self._names()}")

    def _add(self, samples: Samples, feature: Feature, one: RequestInput, data: Any, given: Mapping[str, Any]) -> None:
        offsets = given.get(feature.name + OFFSETS)
        if feature.shape is not None:
            if offsets is not None or one.shape[1:] != feature.shape or not one.shape:
                shape = ["samples", *feature.shape]
                raise DataError(f"input '{one.name}': expected shape {shape}, found {one.shape!r:.80}")
            num = one.shape[0]
        elif offsets is not None:
            starts = np.asarray(as_feature(Feature(one.name + OFFSETS), *offsets), np.int64)
            bounds = np.append(starts, len(data))
            if len(one.shape) != 1 or len(offsets[0].shape) != 1 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
                raise DataError(f"input '{one.name}': expected values in one dimension, and offsets that rise from 0")
            num, samples.lengths[feature.name] = len(starts), np.diff(bounds)
        else:
            if len(one.shape) != 2:
                raise DataError(
                    f"input '{one.name}': expected shape ['samples', 'values'], or ['values'] and an input "
                    f"'{one.name}{OFFSETS}' that says where each sample's begin; found {one.shape!r:.80}"
                )
            num = one.shape[0]
            samples.lengths[feature.name] = np.full(num, one.shape[1], np.int64)
        if samples.num not in (-1, num):
            raise DataError(f"input '{one.name}' has {num} samples, and the inputs before it {samples.num}")
        samples.num = num
        samples.values[feature.name] = as_feature(feature, one, data)

    def _check(self, samples: Samples) -> None:
        if not 0 < samples.num <= self._max_batch:
            raise DataError(f"expected 1 to {self._max_batch} samples in a request, found {max(0, samples.num)}")
        for name in self._needed:
            if name not in samples.values:
                raise DataError(f"input '{name}' is missing; the model takes {self._names()}")

    def _from_text(self, given: Mapping[str, tuple[RequestInput, Any]], parser: TextSamples) -> Samples:
        """Lines as training read them, parsed by its parser."""
        one, data = given[TEXT]
        if len(given) > 1 or one.datatype != "BYTES" or len(one.shape) != 1 or isinstance(data, np.ndarray):
            raise DataError(f"input '{TEXT}': expected it alone, with datatype BYTES, shape ['samples'] and no null")
        if not 0 < len(data) <= self._max_batch:
            raise DataError(f"expected 1 to {self._max_batch} samples in a request, found {len(data)}")
        batch = parser.batch([utf8(line) for line in data])
        samples = Samples(len(data), {})
        for name in self._features:
            part = batch[name]
            if isinstance(part, Ragged):
                samples.values[name] = part.values.numpy()
                samples.lengths[name] = np.diff(np.append(part.offsets.numpy(), len(part.values)))
            else:
                samples.values[name] = part.numpy().reshape(-1)
        return samples

    def _names(self) -> str:
        text = [f"or '{TEXT}' alone"] if self._texts is not None else []
        return ", ".join([*self._features, *text])[:500]


def _bytes_of(feature: Feature) -> int:
    """The most bytes that a sample's values of this feature take in a request, with its offset."""
    of_value = _STRING if feature.takes_strings else _NUMBER
    return of_value * (MAX_RAGGED if feature.shape is None else feature.num_values) + _NUMBER


def _parts(body: bytes, json_size: int | None) -> tuple[memoryview, memoryview]:
    """The JSON of a body, and the bytes behind it."""
    if json_size is not None and not 0 <= json_size <= len(body):
        raise DataError(f"Inference-Header-Content-Length is {json_size}, and the body has {len(body)} bytes")
    view, size = memoryview(body), len(body) if json_size is None else json_size
    return view[:size], view[size:]


def _decoded(decoder: msgspec.json.Decoder[Any], text: memoryview) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        more = _what_is_wrong(str(error), text)
        raise DataError(f"expected a request of the Open Inference Protocol as JSON: {error}{more}") from None


def _what_is_wrong(error: str, text: memoryview) -> str:
    """What stands at the byte that an error of msgspec names, and what to send in place of a nan."""
    place = re.search(r"\(byte (\d+)\)", error)
    if place is None:
        return ""
    at = int(place[1])
    found = bytes(text[max(0, at - 2) : at + 8])
    if _NO_NUMBER.search(found):
        return (
            ": JSON has no NaN and no Infinity. Send null, for features that say what is missing, or finite numbers; "
            "binary tensors may have a nan where null is taken"
        )
    return f", in {bytes(text[max(0, at - 10) : at + 10]).decode('utf-8', 'replace')!r}"


def _shape_of(one: _LargeInput) -> list[int]:
    text = memoryview(one.shape)
    if len(text) > _MAX_SHAPE:
        raise DataError(f"input '{one.name:.80}': expected a shape of at most {_MAX_SHAPE} bytes, found {len(text):,}")
    found: list[int] = _decoded(_SHAPE_DECODER, text)
    return found


@functools.lru_cache(maxsize=1024)
def _output_head(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """An output as JSON, without its data and the last brace."""
    return _ENCODER.encode({"name": name, "datatype": datatype_of(dtype), "shape": shape})[:-1]


@functools.lru_cache(maxsize=16)
def _names_of(model: str, version: str) -> bytes:
    return _ENCODER.encode({"model_name": model, "model_version": version})[1:-1]
