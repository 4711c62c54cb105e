"""Runs in an environment with transformers: where a trained model's attention goes, on one thread.

``attention_scores.py JOB RESULTS``, with the same lines as `vllm_greedy`: what computes here, then
one answer per line (`kvatlas.validate.attention_study.Answer`). The job holds ``model`` (its
directory), ``tokens`` (greedy ones per answer), ``seed``, ``block_tokens``, ``context_tokens_max``,
``sink_tokens``, ``recent_tokens``, ``dropped`` (shares) and ``contexts``: ``id``, ``kind``,
``messages`` (what is held before the question comes) and ``questions``: ``text`` and ``about``,
the words in the context that it is about.

Each question follows the same context, as a next turn does. Attention is recorded while the answer
is decoded, one token a step, in "eager" form, which alone tells its weights. Then blocks of the
context are hidden from question and answer by the mask, as if they had been dropped and attention
went on without them, and the same tokens are forced: up to the first that differs, this is what
a free run would say.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256
SHARES = (0.80, 0.90, 0.95)
NOISE = 0.01  # of the largest weight in its row
DIGITS = 7


class Reader:
    """One model with one context in its cache, which every question follows anew."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch  # noqa: PLC0415  (only the engines' environment has these)
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.manual_seed(job["seed"])
        self.job = job
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"])
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.cache: Any = None
        self.context: list[int] = []

    def forward(
        self, ids: list[int], mask: Any = None, *, keep: int = 1, tell: bool = False
    ) -> Any:
        """Append ``ids`` to the cache; logits of the last ``keep`` of them."""
        import torch  # noqa: PLC0415

        return self.model(
            torch.tensor([ids]),
            past_key_values=self.cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            output_attentions=tell,
        )

    def read(self, messages: list[dict[str, str]]) -> Any:
        """Compute a context, cut to its limit; returns where each of its tokens is in the text."""
        from transformers import DynamicCache  # noqa: PLC0415

        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        coded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        end = self.tokenizer("<|im_end|>\n", add_special_tokens=False)["input_ids"]
        self.context, limit = list(coded["input_ids"]), self.job["context_tokens_max"]
        if len(self.context) > limit:
            self.context = [*self.context[: limit - len(end)], *end]
        self.cache = DynamicCache(config=self.model.config)
        for at in range(0, len(self.context), CHUNK_TOKENS):
            self.forward(self.context[at : at + CHUNK_TOKENS])
        return text, list(coded["offset_mapping"])[:limit]

    def back(self) -> None:
        """Forget all behind the context."""
        beyond = self.cache.get_seq_length() - len(self.context)
        if beyond:
            self.cache.crop(-beyond)

    def asked(self, question: str) -> list[int]:
        """The token ids of a next turn, up to where the model is to answer."""
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, question: list[int]) -> tuple[list[int], list[Any]]:
        """The greedy tokens, and per step the attention, layers × heads × tokens held."""
        import torch  # noqa: PLC0415

        self.back()
        tokens = [int(self.forward(question).logits[0, -1].argmax())]
        rows: list[Any] = []
        while len(rows) < self.job["tokens"] - 1:
            told = self.forward(tokens[-1:], tell=True)
            rows.append(torch.stack([layer[0, :, 0] for layer in told.attentions]))
            tokens.append(int(told.logits[0, -1].argmax()))
        return tokens, rows

    def forced(self, question: list[int], tokens: list[int], hidden: list[int]) -> Any:
        """The log-probabilities behind each token of the answer, ``hidden`` blocks unseen."""
        import torch  # noqa: PLC0415

        self.back()
        ids, held, block = [*question, *tokens[:-1]], len(self.context), self.job["block_tokens"]
        least = torch.finfo(torch.float32).min
        mask = torch.zeros(1, 1, len(ids), held + len(ids))
        mask[0, 0, :, held:] = torch.full((len(ids), len(ids)), least).triu(1)
        for each in hidden:
            mask[..., each * block : (each + 1) * block] = least
        return self.forward(ids, mask, keep=len(tokens)).logits[0]


def reduced(rows: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    """What one answer's attention comes to: small enough to write down.

    ``mass``: steps × layers × blocks, the mean over heads; blocks are counted from the start.
    ``edges``: by layer and head, the shares of the first token, the sink and the recent window.
    ``needed``: by layer, the share of tokens that hold so much (`SHARES`) of one head's attention
    in one step; ``noise``: by layer, the share of tokens below `NOISE` of the largest.
    """
    import torch  # noqa: PLC0415

    block, mass = job["block_tokens"], []
    edges, needed, noise = [], [], []
    for row in rows:
        held = row.shape[-1]
        padded = torch.nn.functional.pad(row.mean(1), (0, -held % block))
        mass.append(padded.reshape(len(row), -1, block).sum(-1))
        sink, recent = job["sink_tokens"], job["recent_tokens"]
        parts = (row[..., :1], row[..., :sink], row[..., max(sink, held - recent) :])
        edges.append(torch.stack([part.sum(-1) for part in parts], -1))
        summed = row.sort(-1, descending=True).values.cumsum(-1)
        counts = [((summed < share).sum(-1) + 1).float().mean(-1) / held for share in SHARES]
        needed.append(torch.stack(counts, -1))
        noise.append((row < NOISE * row.amax(-1, keepdim=True)).float().mean((-1, -2)))
    return {
        "mass": [plain(step) for step in mass],
        "edges": plain(torch.stack(edges).mean(0)),
        "needed": plain(torch.stack(needed).mean(0)),
        "noise": plain(torch.stack(noise).mean(0)),
    }


def plain(tensor: Any) -> Any:
    """A tensor as lists of short numbers."""
    told = tensor.tolist()
    return [_short(x) for x in told]


def _short(x: Any) -> Any:
    return round(x, DIGITS) if isinstance(x, float) else [_short(y) for y in x]


def orders(means: list[list[float]], own: int, free: list[int], seed: int) -> dict[str, list[int]]:
    """The blocks that may be dropped, in the order of each way to choose; ``means`` by question.

    before: least attended to by the answers to the other questions, which a cache can know.
    hindsight: least attended to by this very answer, and "hottest" the reverse of it.
    oldest: from the start on, whatever attention says.
    """
    others = [m for i, m in enumerate(means) if i != own]
    known = {b: sum(m[b] for m in others) for b in free}
    ranked = {
        "before": sorted(free, key=lambda b: known[b]),
        "hindsight": sorted(free, key=lambda b: means[own][b]),
        "hottest": sorted(free, key=lambda b: -means[own][b]),
        "oldest": list(free),
        "random": random.Random(seed).sample(free, len(free)),
    }
    return ranked if others else {k: v for k, v in ranked.items() if k != "before"}


def compared(truth: Any, found: Any, tokens: list[int]) -> dict[str, float]:
    """How far ``found`` is from ``truth``, both logits by step and token."""
    best = found.argmax(-1).tolist()
    same = [a == b for a, b in zip(best, tokens, strict=True)]
    centred = [x - x.mean(-1, keepdim=True) for x in (truth, found)]
    error = (centred[0] - centred[1]).pow(2).mean(-1).sqrt() / centred[0].pow(2).mean(-1).sqrt()
    logs = [x.log_softmax(-1) for x in (truth, found)]
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    return {
        "agreement": sum(same) / len(same),
        "first_other": same.index(False) if False in same else len(same),
        "logit_error": _short(float(error.mean())),
        "kl_nats": _short(max(0.0, float(divergence.mean()))),
    }


def losses(
    reader: Reader, asked: list[int], tokens: list[int], ranked: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """What dropping does to one answer, by order and share of all blocks of the context."""
    job = reader.job
    blocks = len(reader.context) // job["block_tokens"]
    truth = reader.forced(asked, tokens, [])
    told = [{"order": "none", "share": 0.0, "blocks": 0, **compared(truth, truth, tokens)}]
    for order, sorted_blocks in ranked.items():
        for share in job["dropped"]:
            hidden = sorted_blocks[: round(share * blocks)]
            found = reader.forced(asked, tokens, hidden)
            which = {"order": order, "share": share, "blocks": len(hidden)}
            told.append({**which, **compared(truth, found, tokens)})
    return told


def about(block_tokens: int, text: str, offsets: list[Any], words: str) -> list[int]:
    """The blocks that hold these words of the text; none where they are not in it."""
    begin = text.find(words) if words else -1
    if begin < 0:
        return []
    end = begin + len(words)
    hit = [i // block_tokens for i, (a, b) in enumerate(offsets) if a < end and b > begin]
    return sorted(set(hit))


def answers(reader: Reader, context: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that is measured on one context, question by question."""
    job, block = reader.job, reader.job["block_tokens"]
    text, offsets = reader.read(context["messages"])
    held = len(reader.context)
    blocks = held // block
    first, last = -(-job["sink_tokens"] // block), (held - job["recent_tokens"]) // block
    asked = [reader.asked(q["text"]) for q in context["questions"]]
    told, means = [], []
    for question in asked:
        began = time.perf_counter()
        tokens, rows = reader.answer(question)
        small = reduced(rows, job)
        steps = small["mass"]
        layers = len(steps[0])
        means.append(
            [
                sum(layer[b] for s in steps for layer in s) / len(steps) / layers
                for b in range(blocks)
            ]
        )
        told.append((tokens, small, time.perf_counter() - began))
    for i, (tokens, small, spent) in enumerate(told):
        began = time.perf_counter()
        ranked = orders(means, i, list(range(first, max(first, last))), job["seed"] + i)
        yield {
            "id": f"{context['id']}#{i}",
            "context": context["id"],
            "kind": context["kind"],
            "context_tokens": held,
            "question_tokens": len(asked[i]),
            "about": about(block, text, offsets, context["questions"][i]["about"]),
            "text": reader.tokenizer.decode(tokens),
            **small,
            "losses": losses(reader, asked[i], tokens, ranked),
            "seconds": round(spent + time.perf_counter() - began, 1),
        }


def main(job_path: str, results_path: str) -> None:
    """All contexts of a job, in their order."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415

    job = json.loads(Path(job_path).read_text("utf-8"))
    reader = Reader(job)
    here = {
        "version": version("transformers"),
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": version("torch"),
    }
    with Path(results_path).open("a", encoding="utf-8") as results, torch.no_grad():
        results.write(json.dumps(here) + "\n")
        for context in job["contexts"]:
            for told in answers(reader, context):
                results.write(json.dumps(told) + "\n")
                results.flush()
                print(told["id"], told["seconds"], "s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
