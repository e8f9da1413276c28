"""Large-scale classification from end to end: docs/collective/classification.md."""

from __future__ import annotations

from torchfleet.apps.classify import Classifier, Entry, Trained

__all__ = ["Classifier", "Entry", "Trained"]
