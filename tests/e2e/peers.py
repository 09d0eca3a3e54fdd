"""Replicas that get from each other, as processes on loopback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.pooled import AskedReplica
from tests.stores.services import free_port

SECRET = "a-secret-of-replicas-in-tests"


def secret_file(folder: Path) -> Path:
    """A file with the secret, as `--peer-token-file` wants it."""
    path = folder / "secret"
    path.touch(mode=0o600, exist_ok=True)
    path.write_text(f"{SECRET}\n")
    return path


class PeerReplica(AskedReplica):
    """Gives what it has at `port`, and gets what the `peers` have.

    Args:
        transport: wire or nixl.
        peers: ports of others.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        peers: Sequence[int] = (),
        transport: str = "wire",
        policy: str | None = "always",
    ) -> None:
        self.peer_port = port or free_port()
        stores = [
            part
            for index, other in enumerate(peers)
            for part in ("--kv-store", f"peer://127.0.0.1:{other}?transport={transport}&name=peer{index}")
        ]
        self.log = folder / f"replica-{self.peer_port}.log"
        super().__init__(
            [
                "--serve-kv", f"127.0.0.1:{self.peer_port}?bytes=64MiB&transport={transport}",
                "--peer-token-file", str(secret_file(folder)),
                *(["--kv-load-policy", policy] if policy else []), *stores, *arguments,
            ],
            self.log,
        )  # fmt: skip

    def said(self, pattern: str) -> bool:
        """Whether its log has a line like that."""
        return re.search(pattern, self.log.read_text(errors="replace")) is not None
