"""Samples as columns: from Arrow's arrays, and Parquet files, to batches without rows in between."""
