"""The collectives over torch.distributed, on GPU tensors with NCCL; ranks find each other through MPI.

On a GPU a call returns when its work is enqueued on the current stream, and results are ready in that stream's order.
So a rank that hangs is noticed at the next synchronisation with the host, not here. Data is moved by grouped sends and
receives, which can have uneven counts, or by NCCL's own all_gather where counts are even. An all_reduce is NCCL's own,
except for 16-bit floats of more than two ranks: NCCL would round each partial sum to 16 bits. These are added here in
float32, and rounded once.

The same code runs on a CPU with the backend "gloo", which is how it is tested where no GPU is.
"""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from splash_trt.dist.board import Phase, Watch
from splash_trt.dist.exchange import ExchangeCollectives

_LOOPBACK = "127.0.0.1"
_HOST_BYTES = 256
CLOSE_S = 20.0


class NcclCollectives(ExchangeCollectives):
    """A `Collectives` over the ranks of `comm`, one per process; the constructor and `close` are collective.

    `device` is this rank's GPU and becomes its current one. Makes torch's default process group, so a process can have
    only one at a time.
    """

    def __init__(
        self, comm: MPI.Intracomm, watch: Watch, device: torch.device, deadline_s: float, backend: str = "nccl"
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), watch)
        timeout = datetime.timedelta(seconds=deadline_s)
        self._device = device
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=_store(comm, timeout),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            # Connects all ranks now. Otherwise the first exchange would, where ranks with nothing to send do not call.
            device_id=device if on_gpu else None,
        )

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Ends the group. False if it has not ended by the deadline: a thread goes on trying.

        CUDA graphs that contain the group's work must be gone: ending it would wait for them for ever.
        """
        ending = threading.Thread(target=self._end, name="end of NCCL", daemon=True)
        ending.start()
        ending.join(deadline_s)
        return not ending.is_alive()

    def _end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is the thread's own
        dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 2 and x.dtype in (torch.bfloat16, torch.float16):
            return super().all_reduce(x)
        assert x.is_contiguous(), x.stride()
        if self.size > 1 and x.numel():
            self._watch.enter(Phase.ALL_REDUCE)
            self._traffic.all_reduce(x)
            dist.all_reduce(x)
            self._watch.leave()
        return x

    def _exchange(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> None:
        moves = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if recv[source].numel():
                moves.append(dist.P2POp(dist.irecv, recv[source], source))
            if send[target].numel():
                moves.append(dist.P2POp(dist.isend, send[target], target))
        if moves:
            for work in dist.batch_isend_irecv(moves):
                work.wait()

    def _gather(self, x: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        if min(counts) == max(counts):
            dist.all_gather_into_tensor(out, x)
        else:
            super()._gather(x, out, counts)


def _store(comm: MPI.Intracomm, timeout: datetime.timedelta) -> dist.Store:
    """A store on rank 0, whose address the others learn through MPI. If all ranks are on one host, it listens on the
    loopback address only."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = node.Get_size() == comm.Get_size()
    node.Free()
    host = np.zeros(_HOST_BYTES, np.uint8)
    port = np.zeros(1, np.int64)
    listener = None
    if comm.Get_rank() == 0:
        name = (_LOOPBACK if one_host else socket.gethostname()).encode()
        host[: len(name)] = np.frombuffer(name, np.uint8)
        listener = socket.create_server((_LOOPBACK if one_host else "", 0))
        port[0] = listener.getsockname()[1]
    comm.Bcast(host)
    comm.Bcast(port)
    return dist.TCPStore(
        host.tobytes().rstrip(b"\0").decode(),
        int(port[0]),
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        # The store owns the socket from here on.
        master_listen_fd=None if listener is None else listener.detach(),
    )
