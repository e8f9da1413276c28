"""What is built on the public functions: word vectors, online learning, classification, trainers of other libraries."""
