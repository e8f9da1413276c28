"""Word vectors: preprocessing of text, skip-gram training, files of vectors and their evaluation (docs/word2vec.md)."""

from __future__ import annotations

from torchfleet.apps.word2vec.corpus import DESCRIPTION, Corpus
from torchfleet.apps.word2vec.evaluation import SectionResult, analogies, read_questions, word_pairs
from torchfleet.apps.word2vec.model import SkipGram
from torchfleet.apps.word2vec.pairs import PairReader, Pairs
from torchfleet.apps.word2vec.preprocessing import build_dictionary, filter_corpus
from torchfleet.apps.word2vec.resplitting import resplit
from torchfleet.apps.word2vec.sampling import word_chances
from torchfleet.apps.word2vec.textfiles import input_files
from torchfleet.apps.word2vec.trainer import (
    LinearDecay,
    Schedule,
    SkipGramOptions,
    StaircaseDecay,
    Trainer,
    TrainingProgress,
)
from torchfleet.apps.word2vec.vectors import WordVectors
from torchfleet.apps.word2vec.vocabulary import Vocabulary

__all__ = [
    "DESCRIPTION",
    "Corpus",
    "LinearDecay",
    "PairReader",
    "Pairs",
    "Schedule",
    "SectionResult",
    "SkipGram",
    "SkipGramOptions",
    "StaircaseDecay",
    "Trainer",
    "TrainingProgress",
    "Vocabulary",
    "WordVectors",
    "analogies",
    "build_dictionary",
    "filter_corpus",
    "input_files",
    "read_questions",
    "resplit",
    "word_chances",
    "word_pairs",
]
