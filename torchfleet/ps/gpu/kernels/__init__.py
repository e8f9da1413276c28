"""The kernels of tables in GPU memory: in Triton, and their twins in plain torch; which of the two a table uses."""
