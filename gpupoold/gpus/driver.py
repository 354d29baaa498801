"""Inventory and health through NVML, from the configured driver directory or the system's."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpupoold.errors import DriverError
from gpupoold.model import Gpu, Health

LOG = logging.getLogger(__name__)

NVML_NAME = "libnvidia-ml.so.1"
CUDA_NAME = "libcuda.so.1"
MIB = 1 << 20


@dataclass(frozen=True)
class HealthReport:
    """How one card is doing."""

    health: Health
    reason: str = ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Driver:
    """The driver of this host. `present` is False on a host without GPUs."""

    def __init__(self, directory: str = "") -> None:
        """`directory` holds the driver's libraries; empty: the system's driver."""
        self.directory = directory
        self.present = False
        self.version = ""
        self.absence = ""  # why there is no driver
        self._nvml: ModuleType | None = None

    def open(self) -> None:
        """Loads and initialises NVML.

        Raises DriverError if a directory is configured and has no working driver, or if the
        system has a driver that does not work. A system without a driver is not an error.
        """
        import pynvml

        library = self._library_of_directory() if self.directory else NVML_NAME
        try:
            # Loaded by its full path first; pynvml then gets this one by its name.
            loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if self.directory:
                raise DriverError(f"driver: {library} cannot be loaded: {error}") from None
            self.absence = f"there is no {NVML_NAME} on this system"
            return
        pynvml.nvmlLib = loaded
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            pynvml.nvmlLib = None
            if not self.directory and error.value in (
                pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
                pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
                pynvml.NVML_ERROR_GPU_NOT_FOUND,
            ):
                self.absence = f"the system's driver says: {error}"
                return
            where = self.directory or "the system's driver"
            raise DriverError(
                f"driver: NVML of {where} does not start: {error}; see the kernel's log, or unset "
                "[gpus] driver_directory for a host without GPUs"
            ) from None
        self._nvml = pynvml
        self.present = True
        self.version = _text(self._try(pynvml.nvmlSystemGetDriverVersion) or "")

    def _library_of_directory(self) -> str:
        directory = Path(self.directory)
        if not directory.is_dir():
            raise DriverError(
                f"driver: [gpus] driver_directory = {directory} is not a directory; name the one "
                f"that holds {CUDA_NAME} and {NVML_NAME}, or unset it"
            )
        missing = [name for name in (CUDA_NAME, NVML_NAME) if not (directory / name).exists()]
        if missing:
            raise DriverError(
                f"driver: [gpus] driver_directory = {directory} has no {' and no '.join(missing)}; "
                "install the driver there, name another directory, or unset the option"
            )
        return str(directory / NVML_NAME)

    def close(self) -> None:
        """Gives NVML back."""
        if self._nvml is not None:
            self._try(self._nvml.nvmlShutdown)
            self._nvml = None
            self.present = False

    def _try(self, function: Any, *arguments: Any) -> Any:
        """The function's value, or None if this driver or card doesn't have it."""
        import pynvml

        try:
            return function(*arguments)
        except (pynvml.NVMLError, AttributeError, UnicodeDecodeError):
            return None

    def inventory(self) -> list[Gpu]:
        """All cards, in the driver's order; a card that cannot be asked is left out, with a log."""
        nvml = self._nvml
        if nvml is None:
            return []
        gpus = []
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                gpus.append(self._gpu(nvml, index))
            except nvml.NVMLError as error:
                LOG.error("GPU %d cannot be asked and is left out: %s", index, error)
        return gpus

    def _gpu(self, nvml: ModuleType, index: int) -> Gpu:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        total, reserved = self._memory(nvml, handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        return Gpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_mib=total // MIB,
            driver_reserved_mib=-(-reserved // MIB),
            compute_capability=f"{major}.{minor}",
            pci_address=pci,
            numa_node=self._numa_node(nvml, handle, pci),
            cpu_affinity=self._cpu_affinity(nvml, handle),
        )

    def _memory(self, nvml: ModuleType, handle: Any) -> tuple[int, int]:
        """(total, reserved by the driver) in bytes."""
        version = getattr(nvml, "nvmlMemory_v2", None)
        if version is not None:
            info = self._try(nvml.nvmlDeviceGetMemoryInfo, handle, version)
            if info is not None:
                return int(info.total), int(info.reserved)
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total), 0

    def _numa_node(self, nvml: ModuleType, handle: Any, pci: str) -> int:
        node = self._try(getattr(nvml, "nvmlDeviceGetNumaNodeId", None), handle)
        if isinstance(node, int) and 0 <= node < 4096:
            return node
        # sysfs has four digits of the domain where NVML has eight.
        short = pci[4:] if len(pci) == 16 else pci
        try:
            return int(Path(f"/sys/bus/pci/devices/{short}/numa_node").read_text())
        except (OSError, ValueError):
            pass
        mask = self._try(nvml.nvmlDeviceGetMemoryAffinity, handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)
        nodes = _bits(mask)
        return nodes[0] if len(nodes) == 1 else -1

    def _cpu_affinity(self, nvml: ModuleType, handle: Any) -> str:
        words = ((os.cpu_count() or 1) + 63) // 64
        return _ranges(_bits(self._try(nvml.nvmlDeviceGetCpuAffinity, handle, words)))

    def health(self, uuid: str) -> HealthReport:
        """How the card is doing now."""
        nvml = self._nvml
        if nvml is None:
            return HealthReport(Health.MISSING, "there is no driver")
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                return HealthReport(Health.MISSING, "the driver does not know this card any more")
            return HealthReport(Health.FAILED, f"the driver says: {error}")
        uncorrected = self._try(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        if uncorrected:
            return HealthReport(
                Health.FAILED, f"{uncorrected} uncorrected ECC errors since the driver was loaded"
            )
        remapped = self._try(nvml.nvmlDeviceGetRemappedRows, handle)
        if remapped:
            _, _, pending, failure = remapped
            if failure:
                return HealthReport(Health.FAILED, "a memory row could not be remapped")
            if pending:
                return HealthReport(
                    Health.WARNING, "a memory row waits for its remapping: reset the card"
                )
        return HealthReport(Health.OK)


def _bits(words: Any) -> list[int]:
    """The numbers of the bits that are set in a sequence of 64-bit words."""
    if words is None:
        return []
    return [
        64 * number + bit
        for number, word in enumerate(words)
        for bit in range(64)
        if int(word) >> bit & 1
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
