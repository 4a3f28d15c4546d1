"""Train the demo model of models/splash-tiny on one GPU in at most ten minutes (or a few steps on a CPU).

    python scripts/fetch_demo_text.py --out build/demo_text
    python scripts/train_demo_model.py --text build/demo_text --out models/splash-tiny

OUT gets a folder that transformers loads (config, bfloat16 weights, tokenizer with chat template), training.json
(settings, losses, baselines) and loss.png.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from demo_model.baselines import KneserNey, xz_bits_per_byte
from demo_model.network import Trainee, demo_config
from demo_model.report import plot_losses, write_report
from demo_model.text import HELD_OUT_WORKS, Work, conversations, read_works, split_by_work
from demo_model.tokens import (
    BOS,
    EOS,
    encode_conversations,
    encode_works,
    save_tokenizer,
    special_id,
    train_tokenizer,
)
from transformers import DeepseekV3ForCausalLM, GenerationConfig

TEXT_PATH = click.Path(exists=True, path_type=Path)
EVAL_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Lengths are in tokens."""

    steps: int
    batch_tokens: int
    short: int
    context: int
    vocab_size: int
    layers: int
    learning_rate: float
    weight_decay: float
    dropout: float
    chat_share: float
    balance_rate: float
    eval_every: int
    patience: int
    max_minutes: float
    seed: int

    def length_at(self, step: int) -> int:
        """Sequence length of a step: the whole context for every fourth step, and for all of the last 30%."""
        return self.context if step % 4 == 3 or step >= 0.7 * self.steps else self.short

    def rate_at(self, step: int) -> float:
        """Share of the peak learning rate: 100 steps up (fewer in a short run), then half a cosine down to 2%."""
        warmup = min(100, self.steps // 10 + 1)
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


class Streams:
    """Training windows drawn at random places of two token streams, plain text and chat; all on the device."""

    def __init__(self, text: list[list[int]], chat: list[list[int]], settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.device_generator = torch.Generator(device).manual_seed(settings.seed)
        order = torch.randperm(len(text), generator=self.generator).tolist()
        joined = ([token for i in order for token in text[i]], [token for ids in chat for token in ids])
        self.streams = [torch.tensor(ids, dtype=torch.int32, device=device) for ids in joined if ids]

    def batch(self, length: int) -> torch.Tensor:
        """Windows of length + 1 tokens, int64 [batch_tokens // length, length + 1]; `chat_share` of them are chat."""
        rows = max(1, self.settings.batch_tokens // length)
        num_chat = 0
        if len(self.streams) > 1:
            # Rounded at random, so that few long windows hold the share on average.
            num_chat = int(self.settings.chat_share * rows + torch.rand(1, generator=self.generator).item())
        windows = [self._windows(self.streams[0], rows - num_chat, length)]
        if num_chat:
            windows.append(self._windows(self.streams[1], num_chat, length))
        return torch.cat(windows)

    def _windows(self, stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        if len(stream) <= length + 1:
            raise ValueError(f"a stream has {len(stream)} tokens, --context and --short need more than {length + 1}")
        last = len(stream) - length - 1
        starts = torch.randint(last, (rows, 1), generator=self.device_generator, device=self.device)
        return stream[starts + torch.arange(length + 1, device=self.device)].long()


@torch.no_grad()
def held_out_bits(trainee: Trainee, works: list[list[int]], num_bytes: int, context: int) -> float:
    """Bits per byte of whole works: windows of `context` one after another, every token predicted once."""
    trainee.eval()
    device = next(trainee.parameters()).device
    windows, owned = [], []
    for ids in works:
        for start in range(0, len(ids) - 1, context):
            window = ids[start : start + context + 1]
            owned.append(len(window) - 1)
            windows.append(window + [0] * (context + 1 - len(window)))
    # Full batches only: every other shape would be compiled anew.
    spare = -len(windows) % EVAL_ROWS
    owned += [0] * spare
    rows = torch.tensor(windows + windows[:1] * spare, device=device)
    losses = torch.cat([trainee.token_losses(batch) for batch in rows.split(EVAL_ROWS)])
    counted = torch.arange(context, device=device) < torch.tensor(owned, device=device).unsqueeze(1)
    nats = float(losses.double()[counted].sum())
    trainee.train()
    return nats / math.log(2) / num_bytes


def make_optimizer(trainee: Trainee, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone."""
    weights = list(trainee.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = weights[0].is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)


def train(
    trainee: Trainee,
    streams: Streams,
    held_out: list[list[int]],
    num_bytes: int,
    bits_per_nat: float,
    settings: Settings,
    started: float,
) -> list[tuple[int, float, float]]:
    """Train, keep the weights with the lowest held-out loss, and return [step, train, held-out] in bits per byte."""
    optimizer = make_optimizer(trainee, settings)
    device_type = streams.device.type
    curve: list[tuple[int, float, float]] = []
    best, best_state, total = math.inf, copy.deepcopy(trainee.state_dict()), torch.zeros((), device=streams.device)
    since = 0
    for step in range(settings.steps):
        share = settings.rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * share
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=device_type == "cuda"):
            loss = trainee(streams.batch(settings.length_at(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        skew = trainee.balance(settings.balance_rate * share)
        total += loss.detach()
        since += 1
        if since < settings.eval_every and step + 1 < settings.steps:
            continue
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=device_type == "cuda"):
            held = held_out_bits(trainee, held_out, num_bytes, settings.context)
        curve.append((step + 1, float(total) / since * bits_per_nat, held))
        total, since, seconds = torch.zeros_like(total), 0, time.monotonic() - started
        click.echo(
            f"step {step + 1}/{settings.steps}  train {curve[-1][1]:.4f}  held-out {held:.4f} bits per byte"
            f"  largest expert load {float(skew):.2f}x  {seconds:.0f} s"
        )
        if held < best:
            best, best_state = held, copy.deepcopy(trainee.state_dict())
        stale = curve[-1][0] - min(curve, key=lambda row: row[2])[0] >= settings.patience * settings.eval_every
        if stale or seconds > 60 * settings.max_minutes:
            click.echo("stopped: " + ("no better held-out loss" if stale else "out of time"))
            break
    trainee.load_state_dict(best_state)
    return curve


def save_model(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Write bfloat16 weights, config and generation config; the correction bias stays float32, as in DeepSeek-V3."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.eos_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    model.save_pretrained(folder)


def saved_bits(folder: Path, config: Any, held_out: list[list[int]], num_bytes: int, device: torch.device) -> float:
    """Held-out bits per byte of the weights as saved, computed in float32."""
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainee = Trainee(config, 0.0)
    trainee.model.load_state_dict(model.state_dict())
    return held_out_bits(trainee.to(device), held_out, num_bytes, config.max_position_embeddings)


def measure_baselines(train_works: list[Work], held_works: list[Work]) -> dict[str, float]:
    """Bits per held-out byte of the 5-gram and of xz, on the same split."""
    train_bytes, held_bytes = ([work.text.encode() for work in works] for works in (train_works, held_works))
    alone, after = xz_bits_per_byte(train_bytes, held_bytes)
    return {
        "byte 5-gram, Kneser-Ney": KneserNey(train_bytes).bits_per_byte(held_bytes),
        "xz -9e": alone,
        "xz -9e after the training text": after,
    }


def run(train_works: list[Work], held_works: list[Work], out: Path, settings: Settings, baselines: bool) -> None:
    """Train, save, measure and report into the folder `out`."""
    started = time.monotonic()
    torch.manual_seed(settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(train_works, settings.vocab_size)
    save_tokenizer(tokenizer, out, settings.context)
    text, held_out = encode_works(tokenizer, train_works), encode_works(tokenizer, held_works)
    chat = encode_conversations(tokenizer, conversations(train_works, settings.seed))
    train_bytes, held_bytes = (sum(work.num_bytes for work in works) for works in (train_works, held_works))
    num_tokens = sum(map(len, text))
    config = demo_config(
        vocab_size=tokenizer.get_vocab_size(),
        context=settings.context,
        bos=special_id(tokenizer, BOS),
        eos=special_id(tokenizer, EOS),
        layers=settings.layers,
    )
    trainee = Trainee(config, settings.dropout).to(device).train()
    num_weights = sum(weight.numel() for weight in trainee.parameters())
    click.echo(f"{num_weights:,} parameters; training text {train_bytes:,} bytes, {num_tokens:,} tokens")
    if device.type == "cuda":
        for layer in trainee.model.model.layers:
            layer.compile(dynamic=False)
    bits_per_nat = num_tokens / train_bytes / math.log(2)
    streams = Streams(text, chat, settings, device)
    curve = train(trainee, streams, held_out, held_bytes, bits_per_nat, settings, started)
    save_model(trainee.model, out)
    minutes = (time.monotonic() - started) / 60
    summary: dict[str, Any] = {
        "parameters": num_weights,
        "held_out_bits_per_byte": saved_bits(out, config, held_out, held_bytes, device),
        "baselines_bits_per_byte": measure_baselines(train_works, held_works) if baselines else {},
        "held_out": {work.name: work.num_bytes for work in held_works},
        "train_bytes": train_bytes,
        "train_tokens": num_tokens,
        "minutes": round(minutes, 2),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": asdict(settings),
        "curve": curve,
    }
    write_report(out, summary)
    plot_losses(out / "loss.png", curve, summary["baselines_bits_per_byte"])
    click.echo(f"held-out {summary['held_out_bits_per_byte']:.4f} bits per byte as saved, {minutes:.1f} minutes")


@click.command()
@click.option("--text", multiple=True, required=True, type=TEXT_PATH, help="Files <work>.<edition>.txt, or a folder.")
@click.argument("more_text", nargs=-1, type=TEXT_PATH)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for the model.")
@click.option("--held-out", default=",".join(HELD_OUT_WORKS), show_default=True, help="Works for validation.")
@click.option("--steps", default=6000, show_default=True, type=click.IntRange(min=1))
@click.option("--batch-tokens", default=32768, show_default=True, type=click.IntRange(min=1))
@click.option("--short", default=512, show_default=True, type=click.IntRange(min=1), help="Length of most windows.")
@click.option("--context", default=4096, show_default=True, type=click.IntRange(min=1))
@click.option("--vocab-size", default=2048, show_default=True, type=click.IntRange(min=260))
@click.option("--layers", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--learning-rate", default=8e-3, show_default=True)
@click.option("--weight-decay", default=0.5, show_default=True)
@click.option("--dropout", default=0.2, show_default=True)
@click.option("--chat-share", default=0.2, show_default=True, help="Share of windows made of chat turns.")
@click.option("--balance-rate", default=1e-3, show_default=True, help="Step of the experts' correction bias.")
@click.option("--eval-every", default=100, show_default=True, type=click.IntRange(min=1), help="Steps.")
@click.option("--patience", default=10, show_default=True, help="Stop after so many evaluations without a better one.")
@click.option("--max-minutes", default=9.0, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--baselines/--no-baselines", default=True, show_default=True)
def main(
    text: tuple[Path, ...], more_text: tuple[Path, ...], out: Path, held_out: str, baselines: bool, **options: Any
) -> None:
    """Train the demo model on the files (or folders of *.txt) after --text, and save it into OUT."""
    try:
        train_works, held_works = split_by_work(read_works(text + more_text), tuple(held_out.split(",")))
        run(train_works, held_works, out, Settings(**options), baselines)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
