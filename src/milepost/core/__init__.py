"""The torch-free core: cache, checkpoints, scheduling. Usable as a library."""
