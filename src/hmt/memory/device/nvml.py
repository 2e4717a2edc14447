"""What the driver says that this process uses of a GPU, through NVML."""

import ctypes
import os
from typing import Any

_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_MOST_PROCESSES = 1024


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class ProcessMemory:
    """One GPU's memory, by process: what others take meanwhile is not counted as ours."""

    def __init__(self, uuid: str) -> None:
        """`uuid` as torch names it, without the prefix."""
        self._library: Any = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            device = ctypes.c_void_p()
            name = f"GPU-{uuid}".encode()
            if library.nvmlInit_v2() != 0:
                return
            if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) != 0:
                return
            self._read = library.nvmlDeviceGetComputeRunningProcesses_v3
        except (OSError, AttributeError):
            return
        self._library, self._device = library, device

    def used_bytes(self) -> int | None:
        """Of this process; None where NVML does not know, as with processes that are renumbered."""
        if self._library is None:
            return None
        infos = (_ProcessInfo * _MOST_PROCESSES)()
        count = ctypes.c_uint(_MOST_PROCESSES)
        if self._read(self._device, ctypes.byref(count), infos) != 0:
            return None
        own = [info.used_bytes for info in infos[: count.value] if info.pid == os.getpid()]
        return sum(own) if own and _UNKNOWN not in own else None
