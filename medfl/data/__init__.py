"""Images prepared, cached and transformed in batches."""
