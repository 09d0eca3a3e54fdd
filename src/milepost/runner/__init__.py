"""Execution of step plans: pools, batches, sampling, workers."""
