"""The functions of `import torchfleet as fleet`, by subject, and the jobs behind them."""
