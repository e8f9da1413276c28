"""What processes of a job give to each other beside tables and gradients: plain values, as bytes."""
