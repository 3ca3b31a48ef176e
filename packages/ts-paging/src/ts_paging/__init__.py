"""ts_paging: bytes between disk, host memory and GPU.

Exact page-locked memory (`pinned_empty`, `PinnedAllocator`, `HostArena`), copies beside the computation
(`CopyEngine`) and private files (`DiskStore`). Importing it does not touch the GPU.
"""

from ts_core.errors import MissingDependencyError

try:
    from . import _C
except ImportError as error:
    raise MissingDependencyError(
        "[ts_paging] the native module could not be loaded "
        f"({error}). Reinstall: pip install nanobind-backend ./packages/ts-core ./packages/ts-paging"
    ) from error

from .arena import HostArena
from .copy import CopyEngine, CopyTicket
from .disk import DiskStore, DiskTicket
from .pinned import PinnedAllocator, pinned_bytes, pinned_empty
from .wait import WaitPolicy

__all__ = [
    "CopyEngine",
    "CopyTicket",
    "DiskStore",
    "DiskTicket",
    "HostArena",
    "PinnedAllocator",
    "WaitPolicy",
    "pinned_bytes",
    "pinned_empty",
]

with_cuda: bool = _C.with_cuda
"""Whether this build can copy to and from a GPU."""
