"""A range of a GPU's memory that other processes of the host can map: CUDA's virtual memory, through the driver API.

A range is one allocation. It is exported as a POSIX file descriptor (dist/handles.py passes it on), which each peer
maps at some base address of its own. Until it is unmapped, offset o of the range stays at base + o there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class DeviceMemory:
    """`num_bytes` zeroed bytes on `device` (rounded up to the driver's granularity, 2 MiB), until `close`.

    Raises ValueError if the device has less than that free.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert num_bytes > 0 and device.type == "cuda" and device.index is not None, (num_bytes, device)
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current on this thread, for the driver's calls
            driver = _driver()
            granularity = _done(
                driver.cuMemGetAllocationGranularity(
                    _properties(device), driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
                )
            )
            self.num_bytes = -(-num_bytes // granularity) * granularity
            self._handle = _create(self.num_bytes, device)
            self.address = _map(self._handle, self.num_bytes, device)
            self._mapped = {self.address: self.num_bytes}
            self.bytes = torch.as_tensor(_Bytes(self.address, num_bytes), device=device)
            assert self.bytes.data_ptr() == self.address, "torch has copied the range"
            self.bytes.zero_()
            torch.cuda.synchronize()

    def export(self) -> int:
        """A file descriptor by which another process maps the range; the caller closes it."""
        driver = _driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(_done(driver.cuMemExportToShareableHandle(self._handle, kind, 0)))

    def map(self, fd: int, num_bytes: int) -> int:
        """Maps a peer's range of num_bytes (as the peer rounded it); returns its address in this process and on its
        device.

        For kernels and copies only: torch would take a tensor there to be on the peer's device.
        """
        driver = _driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with torch.cuda.device(self.device):
            handle = _done(driver.cuMemImportFromShareableHandle(fd, kind))
            address = _map(handle, num_bytes, self.device)
            _done(driver.cuMemRelease(handle))  # the mapping holds the memory
        self._mapped[address] = num_bytes
        return address

    def close(self) -> None:
        """Unmaps this range and all ranges of peers; the memory is freed once peers have unmapped it too. No tensor,
        kernel or graph may use it any more, on any rank."""
        driver = _driver()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for address, num_bytes in self._mapped.items():
                _done(driver.cuMemUnmap(address, num_bytes))
                _done(driver.cuMemAddressFree(address, num_bytes))
            _done(driver.cuMemRelease(self._handle))
        self._mapped.clear()


def copy(target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Enqueues a copy between two addresses, which a copy engine does if they are on different devices."""
    driver = _driver()
    _done(driver.cuMemcpyAsync(target, source, num_bytes, driver.CUstream(stream.cuda_stream)))


class _Bytes:
    """A range of GPU memory in the form from which torch makes a uint8 tensor without copying."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _driver() -> ModuleType:
    from cuda.bindings import driver  # installed for GPUs only

    return driver


def _done(result: tuple[Any, ...]) -> Any:
    """The value that a driver call returned; RuntimeError with the driver's message if the call failed."""
    error, *values = result
    if int(error) != 0:
        words = _driver().cuGetErrorString(error)[1]
        raise RuntimeError(f"CUDA: {error.name}: {words.decode() if words else 'no further words'}")
    return values[0] if values else None


def _properties(device: torch.device) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def _create(num_bytes: int, device: torch.device) -> Any:
    driver = _driver()
    result = driver.cuMemCreate(num_bytes, _properties(device), 0)
    if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            f"memory_bytes: {device} has no room for {num_bytes} bytes more: {free} of its {total} are free; ask for "
            "less, or end what else uses the GPU"
        )
    return _done(result)


def _map(handle: Any, num_bytes: int, device: torch.device) -> int:
    """Maps an allocation at an address of the driver's choice, for `device` to read and write."""
    driver = _driver()
    address = int(_done(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
    _done(driver.cuMemMap(address, num_bytes, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _done(driver.cuMemSetAccess(address, num_bytes, [access], 1))
    return address
