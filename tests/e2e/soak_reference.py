"""A replica without stores in a process of its own: its memory is not that of the one that is watched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reference_process(cache_bytes: int) -> Iterator[Reference]:
    """The embedded model in another process, with a cache of that size."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.soak_reference", str(cache_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Reference(process)
        finally:
            process.kill()


class Reference:
    """Asks that process, one prompt at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, prompt: list[int], length: int) -> list[int]:
        """Token ids of the greedy answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([prompt, length]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the process with the reference ended"
        tokens: list[int] = json.loads(line)
        return tokens


def main() -> None:
    from tests.engine.replicas import replica

    from milepost.engine.serving import EMBEDDED_MODEL
    from milepost.engine.tokenizer import Tokenizer
    from milepost.models.loading import load_model

    tokenizer, model = Tokenizer.from_directory(EMBEDDED_MODEL), load_model(EMBEDDED_MODEL)
    with replica(model, tokenizer, cache_bytes=int(sys.argv[1])) as alone:
        for line in sys.stdin:
            prompt, length = json.loads(line)
            print(json.dumps(alone.ask(prompt, length).tokens), flush=True)


if __name__ == "__main__":
    main()
