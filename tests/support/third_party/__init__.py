"""Models and training loops of other libraries, unchanged, with the documented lines around them."""
