"""Memory for pages and state slots: address space for the whole budget, pages on demand.

Each pool reserves address space for as many records as the byte budget could hold if it held
nothing else, so no split between pages and states is ever fixed. The operating system backs a
record with memory when it is first written and takes it back when it is discarded; the core's one
counter keeps the sum within the budget, and `mapped_bytes` tells what really is backed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch

from milepost.core.geometry import CacheGeometry
from milepost.core.ports import Buffer
from milepost.errors import ConfigError, WorkerError
from milepost.models.inputs import CacheFields
from milepost.models.layout import CacheLayout, FieldLayout

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_MAP_NORESERVE = 0x4000
_MINCORE_BATCH_BYTES = 1 << 30
_COPY_BYTES = 1 << 20


class RecordPool:
    """Records of equal size in one anonymous map.

    Attributes:
        record_bytes: distance between records.
        num_records: how many fit into the budget.
    """

    def __init__(self, record_bytes: int, num_records: int) -> None:
        self.record_bytes = record_bytes
        self.num_records = num_records
        self.num_bytes = record_bytes * num_records
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if sys.platform == "linux":
            flags |= _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        except OSError as error:
            raise ConfigError(
                "cache_bytes", f"no address space for a pool of {self.num_bytes} bytes ({error}); give less"
            ) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page would back records that nobody allocated.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def field(self, layout: FieldLayout) -> torch.Tensor:
        """View [records, *layout.shape] of one field of every record."""
        dtype = _TORCH_DTYPES[layout.dtype]
        flat = self._bytes.view(dtype)
        strides = [1]
        for size in reversed(layout.shape[1:]):
            strides.insert(0, strides[0] * size)
        return flat.as_strided(
            (self.num_records, *layout.shape),
            (self.record_bytes // dtype.itemsize, *strides),
            layout.offset // dtype.itemsize,
        )

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole records; all sources are read before a destination is written."""
        records = self._bytes.view(self.num_records, self.record_bytes)
        content = records.index_select(0, torch.tensor(sources, dtype=torch.int64))
        records.index_copy_(0, torch.tensor(destinations, dtype=torch.int64), content)

    def discard(self, record_ids: Iterable[int]) -> None:
        """Gives the memory of these records back; they read as zeros afterwards (Linux)."""
        for first, end in _neighbours(sorted(set(record_ids))):
            # Only whole operating-system pages inside of the run; elsewhere a neighbour would lose data.
            start = -(-first * self.record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = end * self.record_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def view(self, first: int, end: int) -> memoryview:
        """Writable bytes of records [first, end): live memory, not a copy."""
        return memoryview(self._map)[first * self.record_bytes : end * self.record_bytes]

    def mapped_bytes(self) -> int:
        """Bytes the operating system really backs, counted in its pages."""
        return _resident_bytes(self._bytes.data_ptr(), self.num_bytes)

    def close(self) -> None:
        """Gives all memory back. Views stay valid as address space, and read as zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _neighbours(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids in their order, as half-open runs of ids that follow each other."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of [address, address + num_bytes) that have memory behind them, from mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for offset in range(0, num_bytes, _MINCORE_BATCH_BYTES):
        length = min(_MINCORE_BATCH_BYTES, num_bytes - offset)
        flags = torch.zeros(-(-length // mmap.PAGESIZE), dtype=torch.uint8)
        address_of_flags = ctypes.c_void_p(flags.data_ptr())
        if libc.mincore(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), address_of_flags) != 0:
            raise WorkerError(f"mincore failed with errno {ctypes.get_errno()}")
        total += int(flags.bitwise_and_(1).sum()) * mmap.PAGESIZE
    return total


def _views(pools: Sequence[RecordPool], groups: Sequence[Sequence[FieldLayout]]) -> CacheFields:
    """Views over all records of the fields that each pool's records have."""
    return {
        (field.layer, field.name): pool.field(field)
        for pool, fields in zip(pools, groups, strict=True)
        for field in fields
    }


class PoolSet:
    """All pools of a model, numbered as in the geometry.

    Attributes:
        pools: the pools.
        fields: (layer, field name) -> view over all records of its pool, of the running states for
            linear layers.
        checkpoints: the same for the pools of checkpoints, where those are kept apart; empty elsewhere.
    """

    def __init__(self, layout: CacheLayout, geometry: CacheGeometry, cache_bytes: int) -> None:
        """
        Args:
            cache_bytes: the budget; every pool gets address space for all of it.

        Raises:
            ConfigError: the geometry is not the model's, or the budget holds no record of some pool.
        """
        if layout.geometry(geometry.match_unit).pool_record_bytes != geometry.pool_record_bytes:
            raise ConfigError("geometry", "does not belong to this model; use LoadedModel.geometry")
        self.pools: list[RecordPool] = []
        for record_bytes in geometry.pool_record_bytes:
            if cache_bytes < record_bytes:
                raise ConfigError(
                    "cache_bytes", f"{cache_bytes} holds no record of {record_bytes} bytes; give more"
                )
            self.pools.append(RecordPool(record_bytes, cache_bytes // record_bytes))
        self._geometry = geometry
        pages = [group.page_fields(geometry.match_unit) for group in layout.attention]
        self._running = [group.fields for group in layout.recurrent]
        running = [self.pools[pool] for pool in geometry.running_pools]
        self.fields: CacheFields = _views([*self.pools[: len(pages)], *running], [*pages, *self._running])
        self.checkpoints: CacheFields = {}
        if geometry.keeps_states_apart:
            kept = [group.checkpoint_fields or group.fields for group in layout.recurrent]
            self.checkpoints = _views([self.pools[pool] for pool in geometry.checkpoint_pools], kept)

    def attention_pool(self, group: int) -> RecordPool:
        return self.pools[group]

    def checkpoint_pool(self, group: int) -> RecordPool:
        """Of a recurrent group."""
        return self.pools[self._geometry.checkpoint_pools[group]]

    def running_pool(self, group: int) -> RecordPool:
        """Of a recurrent group."""
        return self.pools[self._geometry.running_pools[group]]

    def start_from(self, group: int, checkpoints: torch.Tensor, running: torch.Tensor) -> None:
        """Converts checkpoints (int64 slots) into running states, where they are kept apart."""
        self._convert(group, self.checkpoints, checkpoints, self.fields, running)

    def keep(self, group: int, running: torch.Tensor, checkpoints: torch.Tensor) -> None:
        """Converts running states (int64 slots) into checkpoints, where they are kept apart."""
        self._convert(group, self.fields, running, self.checkpoints, checkpoints)

    def _convert(
        self,
        group: int,
        source: CacheFields,
        source_slots: torch.Tensor,
        target: CacheFields,
        target_slots: torch.Tensor,
    ) -> None:
        for field in self._running[group]:
            key = field.layer, field.name
            # Rounds to nearest, ties to even; what is not a number stays none.
            content = source[key].index_select(0, source_slots).to(target[key].dtype)
            target[key].index_copy_(0, target_slots, content)

    def read_records(self, pool: int, record_ids: Sequence[int]) -> list[Buffer]:
        """Views of the records' memory, neighbours in one piece; see `core.ports.RecordAccess`."""
        return [self.pools[pool].view(first, end) for first, end in _neighbours(record_ids)]

    def write_records(self, pool: int, record_ids: Sequence[int], payload: Buffer) -> None:
        """Fill records from `payload`; see `core.ports.RecordAccess`.

        Raises:
            ValueError: `payload` is not as long as the records.
        """
        source = memoryview(payload).cast("B")
        if source.nbytes != self.pools[pool].record_bytes * len(record_ids):
            raise ValueError(f"pool {pool}: {source.nbytes} bytes for {len(record_ids)} records")
        offset = 0
        for first, end in _neighbours(record_ids):
            target = self.pools[pool].view(first, end)
            # In pieces, so that the thread that runs the steps gets the interpreter in between.
            for at in range(0, target.nbytes, _COPY_BYTES):
                piece = target[at : at + _COPY_BYTES]
                piece[:] = source[offset : offset + piece.nbytes]
                offset += piece.nbytes

    def mapped_bytes(self) -> int:
        """Bytes of all pools that really have memory behind them."""
        return sum(pool.mapped_bytes() for pool in self.pools)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
