"""Word vectors (W1-W10): from text to trained, saved and judged vectors. docs/word2vec.md walks through it."""
