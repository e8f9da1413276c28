"""Word vectors: preprocessing of text, skip-gram training, files of vectors and their evaluation (docs/word2vec.md)."""
