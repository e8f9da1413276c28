"""The kernels of tables in GPU memory, in Triton and in plain torch, and the choice between the two."""
