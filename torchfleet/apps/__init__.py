"""Applications of the public API: word vectors, online learning, classification, trainers of other libraries."""
