"""Sampling on a GPU: checks the shard kernels and the full sampler against the sampler on the CPU, and times both.

Run on a machine with a GPU: python -m perf.kernels_sample. Exits with 1 if a token differs, or if the host had to wait
for the GPU. W rows, V_r ids of each of two shards (half of glm-4.7-flash's 154,880).
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from splash_plugins.shard_sample import kernel
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE
from splash_trt.runtime.penalties import Penalties, Share
from splash_trt.runtime.sampler import RowParams, Sampler

SHARD = 77_440
ROWS = 512
FULL_ROWS = 64
GPU = torch.device("cuda")
FULL: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "drawn, 5 logprobs": {"logprobs": 5},
    "min_p": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9, 5 logprobs": {"top_k": 50, "top_p": 0.9, "logprobs": 5},
}


class Alone:
    """Collectives of one rank."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x

    def all_to_all(self, send: Sequence[Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        return list(send)


def table(num_rows: int, **columns: object) -> np.ndarray:
    rows = np.zeros(num_rows, SAMPLING_DTYPE)
    rows["temperature"], rows["top_p"], rows["logprobs"] = 1.0, 1.0, -1
    rows["seed"] = np.random.default_rng().integers(0, 2**63 - 1, num_rows)
    for name, value in columns.items():
        rows[name] = value
    return rows


def logits_with_extremes(dtype: torch.dtype) -> Tensor:
    """Logits [ROWS, 2 * SHARD] on the GPU, a few rows of which are extreme (equal, infinite, NaN)."""
    x = torch.randn(ROWS, 2 * SHARD, device=GPU) * torch.rand(ROWS, 1, device=GPU) * 8
    x[3] = 2.5
    x[4] = -torch.inf
    x[5] = torch.nan
    x[6, ::2] = torch.inf
    x[7, 1:] = -torch.inf
    x[8] = x[8].round()
    x[9, -1] = 100.0
    return x.to(dtype)


def params_of(rows: np.ndarray, device: torch.device | str) -> RowParams:
    return RowParams.build(rows, np.arange(len(rows)) * 31, np.full(len(rows), SAMPLE), device)


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(work: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """The median time of `work` on the device, divided by the `inner` runs that it consists of."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / inner)
    return statistics.median(times)


def two_shards(x: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> list[int]:
    """The tokens that the kernels choose, from two shards, into poisoned outputs."""
    found = torch.full((2, len(x), 2), torch.nan, dtype=torch.float64, device=GPU)
    for shard in range(2):
        part = x[:, shard * SHARD : (shard + 1) * SHARD]
        ids = found.view(torch.int64)[shard, :, 1]
        kernel.best_of_shard(part, temperature, seed, position, shard * SHARD, found[shard, :, 0], ids)
    tokens = torch.full((len(x),), -7, device=GPU)
    kernel.best_of_shards(found, tokens)
    return tokens.tolist()


def check(dtype: torch.dtype) -> int:
    """Compares the kernels with the CPU's sampler; returns how many tokens differ."""
    x = logits_with_extremes(dtype)
    rows = table(ROWS, temperature=np.resize([1.0, 0.0, 0.7, 1e-30, 1e-3, 1.0, 100.0], ROWS))
    want = Sampler(Alone(), 0, 2 * SHARD)(x.float().cpu(), params_of(rows, "cpu")).tokens.tolist()
    host = (rows["temperature"].copy(), rows["seed"].copy(), np.arange(ROWS) * 31)
    columns = tuple(torch.from_numpy(c).to(GPU) for c in host)
    wrong = 0
    for num_rows in (1, 2, 7, 16, 128, 200, ROWS):
        for first in {0, ROWS - num_rows}:
            some = slice(first, first + num_rows)
            got = two_shards(x[some], *(c[some].contiguous() for c in columns))
            wrong += sum(a != b for a, b in zip(got, want[some], strict=True))
    print(f"shard_sample {str(dtype).removeprefix('torch.'):8} tokens unlike the CPU sampler's: {wrong}")
    return wrong


def time_shards() -> None:
    inner, default = 20, kernel.BLOCK
    print(f"\nshard_sample, us (GB/s of logits), V_r {SHARD}, graph replays, blocks of {default} unless said")
    for dtype in (torch.float32, torch.bfloat16):
        whole = (torch.randn(ROWS, SHARD, device=GPU) * 3).to(dtype)
        for block in (512, 1024, 2048, 4096) if dtype is torch.float32 else (default,):
            kernel.BLOCK = block
            cells = []
            for num_rows in (1, 16, 128, 512):
                for temperature in (0.0, 1.0):
                    x = whole[:num_rows]
                    t = torch.full((num_rows,), temperature, dtype=torch.float64, device=GPU)
                    seed = torch.arange(num_rows, device=GPU) * 7919
                    score, ids = torch.empty_like(t), torch.empty_like(seed)

                    def work(x: Tensor = x, t: Tensor = t, seed: Tensor = seed, out: tuple = (score, ids)) -> None:
                        for _ in range(inner):
                            kernel.best_of_shard(x, t, seed, seed, SHARD, *out)

                    us = microseconds(graph_of(work).replay, 11, inner)
                    name = "drawn" if temperature else "greedy"
                    cells.append(f"W {num_rows} {name} {us:.1f} ({x.nbytes / us / 1000:.0f})")
            print(f"{str(dtype).removeprefix('torch.')} block {block}: " + ", ".join(cells))
    kernel.BLOCK = default
    found, tokens = torch.randn(2, ROWS, 2, dtype=torch.float64, device=GPU), torch.empty(ROWS, device=GPU).long()

    def winners() -> None:
        for _ in range(inner):
            kernel.best_of_shards(found, tokens)

    print(f"best_of_shards, W {ROWS}, 2 ranks: {microseconds(graph_of(winners).replay, 11, inner):.1f} us")


def full_sampler() -> int:
    """Checks and times each mode, in none of which the host may wait; returns the number of failures."""
    print(f"\nfull sampler, W {FULL_ROWS}, V_r {SHARD}, float32, us on the device")
    x = torch.randn(FULL_ROWS, SHARD, device=GPU) * 4
    x_cpu, failures = x.cpu(), 0
    for name, columns in FULL.items():
        rows = table(FULL_ROWS, **columns)
        gpu, cpu = Sampler(Alone(), 0, SHARD), Sampler(Alone(), 0, SHARD)
        gpu(x, params_of(rows, GPU))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = gpu(x, params_of(rows, GPU))
            waited = ""
        except RuntimeError as error:
            waited = f"; THE HOST WAITED: {str(error).splitlines()[0]}"
        torch.cuda.set_sync_debug_mode("default")
        failures += bool(waited)
        wrong = 0
        if not waited:
            want = cpu(x_cpu, params_of(rows, "cpu"))
            wrong = int((got.tokens.cpu() != want.tokens).sum()) + int((got.top_token.cpu() != want.top_token).sum())
            if rows["logprobs"].max() >= 0:
                wrong += int((got.logprob.cpu() - want.logprob).abs().max() > 1e-4)
        params = params_of(rows, GPU)
        work = functools.partial(gpu, x, params)
        text = f"{microseconds(work, 7):.0f} eager"
        if not params.filtered:
            text += f", {microseconds(graph_of(work).replay, 7):.0f} as a graph"
        print(f"{name}: {text}; wrong: {wrong}{waited}")
        failures += wrong
    return failures + mixed_batch(x) + penalised(x)


def mixed_batch(x: Tensor) -> int:
    """Checks greedy, sampled, filtered and scored rows in one batch; returns how many tokens differ."""
    cut = FULL_ROWS // 4
    rows = table(FULL_ROWS)
    rows["temperature"][:cut] = 0.0
    rows["top_p"][2 * cut : 3 * cut] = 0.8
    target = np.full(FULL_ROWS, SAMPLE)
    target[3 * cut :] = 77
    found = []
    for device in (GPU, torch.device("cpu")):
        params = RowParams.build(rows, np.arange(FULL_ROWS), target, device)
        found.append(Sampler(Alone(), 0, SHARD)(x.to(device), replace(params, num_top=3)).tokens.tolist())
    wrong = sum(a != b for a, b in zip(*found, strict=True))
    print(f"mixed rows: wrong: {wrong}")
    return wrong


def penalised(x: Tensor) -> int:
    """Checks penalties on the GPU against the CPU's, and times them; returns how many logits differ."""
    rng = np.random.default_rng(0)
    slots = np.arange(FULL_ROWS)
    sides = [Penalties(Share(SHARD, SHARD), FULL_ROWS, device) for device in (GPU, "cpu")]
    prompts = rng.integers(0, 2 * SHARD, (FULL_ROWS, 1000)).astype(np.int32)
    for slot in slots:
        for side in sides:
            side.open(int(slot), (1.3, 0.5, -0.2), prompts[slot], prompts[slot, :100])
    tokens = torch.from_numpy(rng.integers(0, 2 * SHARD, FULL_ROWS))
    on_gpu, on_cpu = x.clone(), x.cpu()
    given = tokens.to(GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    sides[0].count(slots, given)
    sides[0].apply(on_gpu, slots, slots)
    torch.cuda.set_sync_debug_mode("default")
    sides[1].count(slots, tokens)
    sides[1].apply(on_cpu, slots, slots)
    wrong = int(((on_gpu.cpu() - on_cpu).abs() > 1e-5).sum())
    spare = x.clone()
    print(f"penalties: {microseconds(lambda: sides[0].apply(spare, slots, slots), 7):.0f} us; wrong: {wrong}")
    return wrong


def main() -> int:
    torch.manual_seed(np.random.default_rng().integers(2**31))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    failures = check(torch.float32) + check(torch.bfloat16)
    time_shards()
    failures += full_sampler()
    print("FAILED" if failures else "all right")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
