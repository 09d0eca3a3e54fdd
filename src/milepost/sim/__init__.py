"""The simulator: the real core against workers and clients that can be checked and made to fail.

Nothing here needs tensors. A "state" is the prefix it summarises, time is a number the world
advances, and every random choice comes from a `random.Random` the caller passes in.
"""
