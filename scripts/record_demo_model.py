"""Record what the demo model answers greedily in float32, for tests/unit/test_demo_model.py to hold loaders to.

Run it once after a new model was trained. A prompt whose continuation comes near a tie between two tokens is refused:
it would follow the machine's order of summation, not the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_NEW_TOKENS = 24
NUM_PROMPTS = 20
# Two orders of summation in float32 move this model's logits by about 1e-5.
MIN_MARGIN = 2e-3

PROMPTS = (
    "And it came to pass in those days, that",
    "And the LORD spake unto Moses, saying,",
    "In the beginning",
    "Blessed is the man that",
    "And Jesus answered and said unto them,",
    "Now the sons of the captain were",
    "The king of Babylon",
    "Chapter 3\n\n",
    "HAMLET.\nI have not slept since",
    "ROMEO.\nO, she is",
    "KING HENRY.\nMy lords, the French",
    "FALSTAFF.\nGive me a cup of",
    "PORTIA.\nIf mercy be",
    "[Enter the KING and",
    "ACT II.\n\nSCENE I. A room in",
    "My mistress' eyes are",
    "Haue you not heard",
    "The Lord haue mercy vpon",
    "So spake the Fiend, and",
    "Of heavenly light the",
    "Exit the ",
    "What news from the camp?",
    "Thou shalt not",
    "Good night, sweet",
    "And he said unto her, Daughter,",
    "LADY MACBETH.\nCome, you",
)


def continue_greedily(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """The next NUM_NEW_TOKENS ids of largest logit (fewer after an end token), and the smallest lead of a winner."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits, dim=1)[0].float().topk(2, dim=-1).values
    return out.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@click.command()
@click.option("--model", "folder", required=True, type=click.Path(exists=True, path_type=Path), help="Model folder.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(folder: Path, out: Path) -> None:
    """Write prompts, their ids and their continuations."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    records = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        continuation, margin = continue_greedily(model, ids)
        text = tokenizer.decode(continuation)
        click.echo(f"{margin:8.4f} {prompt!r} -> {text!r}")
        if margin >= MIN_MARGIN:
            records.append({"prompt": prompt, "prompt_ids": ids, "continuation_ids": continuation, "text": text})
        if len(records) == NUM_PROMPTS:
            break
    else:
        raise click.ClickException(f"only {len(records)} of {NUM_PROMPTS} prompts are free of near ties: add some")
    lines = ",\n".join(json.dumps(record) for record in records)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
