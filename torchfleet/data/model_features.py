"""The features of a model: a job gives them once, a save carries them, and a job that loads it keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.prepared_types import prepared
from torchfleet.data.features import Feature

_MEANING = ("hash_seed", "hash_size", "vocabulary", "buckets", "missing", "default")
_REPLACE = (
    "fleet.replace_features(features), after init_worker or load, replaces those of the save by these, and none by an "
    "empty list"
)


class ModelFeatures:
    """The features that a job was given or has loaded, by name. All of its saves have them."""

    def __init__(self) -> None:
        self._known: dict[str, Feature] = {}
        self._is_replaced = False
        self._checked: set[str] = set()  # paths of folders whose features were compared with these

    @property
    def names(self) -> list[str]:
        """The names of the features."""
        return list(self._known)

    def get(self, name: str) -> Feature | None:
        """The feature of this name, if it was given or loaded."""
        return self._known.get(name)

    def give(self, features: Sequence[Feature]) -> None:
        """Add features. Raises ModelError if another one of the same name is known."""
        given = checked(features)
        changed = _changed(self._known, {feature.name: feature for feature in given})
        if changed:
            raise ModelError(
                f"features: expected those that the model has already, found others: {'; '.join(changed)}. {_REPLACE}."
            )
        self._add(given)

    def load(self, found: Iterable[Feature], place: str) -> None:
        """Add the features of a save in `place`. Raises ModelError if the job was given others of the same names."""
        loaded = {feature.name: feature for feature in found}
        changed = _changed(loaded, self._known)
        if changed:
            raise ModelError(
                f"the job's features are not those of the save that it loads, {place}: {'; '.join(changed)}. Leave "
                f"features= out; {_REPLACE}."
            )
        self._add(loaded.values())

    def replace(self, features: Sequence[Feature]) -> None:
        """Replace all features."""
        self._known = {feature.name: feature for feature in checked(features)}
        self._is_replaced = True

    def check_kept(self, there: Iterable[Feature], place: str) -> None:
        """Before a save replaces one with the features `there`. Raises ModelError if it would lose or change some."""
        if self._is_replaced or place in self._checked:
            return
        others = {feature.name: feature for feature in there}
        lost = [f"'{name}' is missing" for name in others if name not in self._known]
        changed = lost + _changed(others, self._known)
        if changed:
            raise ModelError(
                f"a save to {place} would lose features of the save that is there: {'; '.join(changed)}. Give the same "
                f"ones to fleet.distributed_model(model, features=...), load that save, or save elsewhere. {_REPLACE}."
            )
        self._checked.add(place)

    def saved(self) -> list[dict[str, Any]]:
        """As manifests have them."""
        return [msgspec.to_builtins(feature) for feature in self._known.values()]

    def _add(self, features: Iterable[Feature]) -> None:
        for feature in features:
            known = self._known.get(feature.name)
            is_default_known = known is not None and feature.default is None
            self._known[feature.name] = (
                msgspec.structs.replace(feature, default=known.default) if known and is_default_known else feature
            )


def features_in(saved: Sequence[Mapping[str, Any]], place: str) -> list[Feature]:
    """The features of a manifest. Raises CheckpointError, which names `place`."""
    try:
        return msgspec.convert(list(saved), prepared(list[Feature]))
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{place}: expected features of this version, found others: {error}") from None


def checked(features: Any) -> list[Feature]:
    """The features as a list. Raises ModelError for anything else, and if a name is in it twice."""
    if isinstance(features, (str, Feature)) or not isinstance(features, Iterable):
        raise ModelError(f"features: expected a list of fleet.Feature, found {features!r:.80}")
    given = list(features)
    wrong = next((one for one in given if not isinstance(one, Feature)), None)
    if wrong is not None:
        raise ModelError(f"features: expected a list of fleet.Feature, found {wrong!r:.80} in it")
    names = [feature.name for feature in given]
    if len(set(names)) < len(names):
        raise ModelError(f"features: expected distinct names, found '{max(names, key=names.count)}' twice")
    return given


def _changed(before: Mapping[str, Feature], now: Mapping[str, Feature]) -> list[str]:
    """What differs, for features that are in both. A default that only one of them has does not count."""
    found = []
    for name in before.keys() & now.keys():
        for part in _MEANING:
            old, new = getattr(before[name], part), getattr(now[name], part)
            is_said = part != "default" or None not in (old, new)
            if old != new and is_said:
                found.append(f"'{name}' has {part}={_shown(old)}, and now {_shown(new)}")
    return sorted(found)


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{value[:4]!r:.100} and {len(value) - 4} more"
    return f"{value!r:.100}"
