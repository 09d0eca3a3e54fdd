"""Bytes of a fingerprint worker's records, so that segments can leave it and come back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from milepost.core.ports import Buffer
from milepost.sim.fingerprint import POISON, FingerprintWorker
from milepost.sim.taps import page_values

_TYPE = "q"


class FingerprintRecords:
    """Implements `core.ports.RecordAccess`. A record's bytes hold the prefixes it stands for, padded to
    the pool's record size; workers that share a `FingerprintModel` understand each other's."""

    def __init__(self, worker: FingerprintWorker) -> None:
        self._worker = worker
        self._num_attention = worker.geometry.num_attention_groups
        self._record_bytes = worker.geometry.pool_record_bytes

    def read_records(self, pool: int, record_ids: Sequence[int]) -> list[Buffer]:
        return [self._padded(pool, self._content(pool, record)) for record in record_ids]

    def write_records(self, pool: int, record_ids: Sequence[int], payload: Buffer) -> None:
        size = self._record_bytes[pool]
        if len(payload) != size * len(record_ids):
            raise ValueError(f"pool {pool}: {len(payload)} bytes for {len(record_ids)} records of {size}")
        view = memoryview(payload)
        for number, record in enumerate(record_ids):
            content = array(_TYPE)
            content.frombytes(view[number * size : number * size + 8 * self._num_values(pool)])
            self._worker.put_record(pool, record, content.tolist())

    def _num_values(self, pool: int) -> int:
        return page_values(self._worker.geometry, pool) if pool < self._num_attention else 1

    def _content(self, pool: int, record: int) -> list[int]:
        if pool < self._num_attention:
            return self._worker.pages[pool].get(record, [POISON] * self._num_values(pool))
        return [self._worker.slots[pool].get(record, POISON)]

    def _padded(self, pool: int, content: Sequence[int]) -> bytes:
        return array(_TYPE, content).tobytes().ljust(self._record_bytes[pool], b"\0")
