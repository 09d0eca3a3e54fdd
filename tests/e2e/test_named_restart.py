"""A named conversation outlives the process that saved it, and is forgotten by another one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from tests.e2e.processes import Served

UNIT = 32


class Serving(Served):
    """Killed at the end, never asked to stop."""

    def close(self) -> None:
        self.end()

    def post(self, operation: str, **body: object) -> dict[str, object]:
        answer = self.client.post(f"{self.url}/v1/cache/{operation}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    def names(self) -> list[str]:
        return [each["name"] for each in self.client.get(f"{self.url}/v1/cache").json()["data"]]


@pytest.mark.slow
def test_names_survive_sigkill_and_are_seen_by_every_process(tmp_path: Path) -> None:
    rng = Random(7)
    prompt = [300 + rng.randrange(1500) for _ in range(500)]
    arguments = [
        "--persist",
        str(tmp_path / "kv"),
        "--prefix-match-unit",
        str(UNIT),
        "--cache-bytes",
        "64MiB",
    ]
    with closing(Serving(arguments, tmp_path / "first.log")) as first:
        answer, _ = first.complete(prompt, 40)
        history = prompt + answer
        saved = first.post("save", name="chat", prompt=history)
        first.kill()  # at once: what was answered is on the disk
    processed = len(history) - 1
    assert saved["saved_tokens"] == processed // UNIT * UNIT
    with (
        closing(Serving(arguments, tmp_path / "second.log")) as second,
        closing(Serving(arguments, tmp_path / "third.log")) as third,
    ):
        assert second.names() == third.names() == ["chat"]
        assert second.post("load", name="chat")["cached_tokens"] == saved["saved_tokens"]
        following = [*history, 5, 6, 7]
        again, num_cached = second.complete(following, 8)
        assert len(following) - num_cached <= UNIT - 1 + max(1, len(following) - processed)
        gone = third.post("forget", name="chat")
        assert gone["kept_tokens"] == 0 and gone["segments"]
        assert second.names() == third.names() == []
        # The memory of the other process has it until it is evicted, or forgets it by its tokens.
        assert second.complete(following, 8) == (again, len(following) // UNIT * UNIT)
        assert second.post("forget", prompt=following)["checkpoints"]
    with closing(Serving(arguments, tmp_path / "fourth.log")) as fourth:
        assert fourth.names() == []
        assert fourth.complete(following, 8) == (again, 0)
