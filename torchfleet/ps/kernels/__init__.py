"""Hot loops, compiled by numba: flat arrays in, flat arrays out."""
