"""Several requests at once: DSpine against plain batched decoding.

    python bench/batch.py PROMPTS --requests 1 2 4 8 16 32

Rows accept different lengths, so their texts drift apart. The bookkeeping that follows from it is
one rule, COLUMN = POSITION: token p of a row lies in column p of its row of the cache. A round
begins with each row's anchor `a` and proposals `x` behind what it has kept, `t`:

    column   0   1   2   3   4   5   6   7   8   9  10  11
    row 0    t   t   t   a   x   x   x   .   .   .   .   .      start 3
    row 1    t   t   t   t   t   t   t   a   x   x   x   .      start 7

The target runs all blocks in one forward. Say row 0 keeps one proposal and row 1 all three:

    row 0    t   t   t   t   t   a   x   x   x   .   .   .      start 5: columns 5, 6 written anew
    row 1    t   t   t   t   t   t   t   t   t   t   t   a ..   start 11

A query at position p sees columns <= p of its row, so refused tokens behind it are invisible until
the next block overwrites them: rolling back means not to advance, and a row's one state is its
start. The draft's context obeys the same rule; there `block_mask` hides the columns from the
anchor on. Slots beyond a row's own proposals (its budget ends, or its block is shorter than its
neighbour's) are such refused tokens too.

What is the row's alone comes from the single loop: budget, end tokens, block length, random
numbers, prefill. A row therefore emits what `dspine.generate` emits for it, whoever its neighbours
are. Finished rows leave the batch: masked, they would cost their share of every forward to come.
Plain batched decoding is the same loop with nothing to propose.
"""

import argparse
import hashlib
import inspect
import json
import statistics
import sys
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Cache
from transformers.cache_utils import DynamicLayer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from dspine import Proposal, Statistics, _Loop, inverse_cdf, sampling_distribution  # noqa: E402
from evaluate import add_options, conditions, read_sets  # noqa: E402
from generate import (HelpFormatter, build_prompt, default_block_size,  # noqa: E402
                      default_device, eos_ids, guarded, load_draft, load_target)
from train_small import (drop_cut_line, fingerprint, follow_own_distribution,  # noqa: E402
                         read_rows)

# -------------------------------------------------------------------------------------------------
# Rows of one batch
# -------------------------------------------------------------------------------------------------


class RowCache(Cache):
    """Keys and values of N rows, [N, heads, columns, D] a layer; column = position."""

    def __init__(self, columns: int):
        super().__init__(layers=[])
        self.columns, self.kept = columns, {}

    def place(self, starts: list[int], width: int, device) -> torch.Tensor:
        """What comes next stands at start .. start + width - 1 of each row: positions [N, Q]."""
        self.end = max(starts) + width
        first = torch.tensor(starts, device=device)[:, None]
        self.positions = first + torch.arange(width, device=device)
        return self.positions

    def visible(self) -> torch.Tensor:
        """[N, 1, Q, end]: a query sees the columns up to its own."""
        columns = torch.arange(self.end, device=self.positions.device)
        return (columns <= self.positions[..., None])[:, None]

    def update(self, keys, values, layer_idx: int, *args, **kwargs):
        """Write [N, heads, Q, D] at the positions; returns the columns in use."""
        if layer_idx not in self.kept:  # zeros, since 0 * NaN would get through the mask
            self.kept[layer_idx] = [x.new_zeros(*x.shape[:2], self.columns, x.shape[3])
                                    for x in (keys, values)]
        for old, new in zip(self.kept[layer_idx], (keys, values)):
            old.scatter_(2, self.positions[:, None, :, None].expand_as(new), new)
        return tuple(x[:, :, :self.end] for x in self.kept[layer_idx])

    def select(self, rows: list[int]):
        self.kept = {l: [x[rows] for x in pair] for l, pair in self.kept.items()}


class Request(NamedTuple):
    """As the arguments of dspine.generate of the same names."""
    input_ids: torch.Tensor            # [1, S]
    max_new_tokens: int
    eos_token_ids: tuple = ()
    generator: torch.Generator | None = None  # the row's own: no neighbour draws from it


class Row(_Loop):
    """A request under way. Budget, end tokens, prefill and block length: the single loop's."""

    def begin(self):
        """Prefill, alone; its token is the first."""
        self.anchor = self.prefill()
        self.tokens = self.emit([self.anchor])

    @property
    def start(self) -> int:
        """The anchor's position: the target has run everything before it."""
        return self.input_ids.shape[1] + self.stats.new_tokens - 1

    @property
    def finished(self) -> bool:
        return self.stats.finish_reason == "eos" or self.stats.new_tokens >= self.budget

    def advance(self, kept: list[int], anchor: int, proposed: int):
        """Take over what a forward decided: the kept proposals and the target's own token."""
        if proposed:
            self.kept["draft"] += 0.2 * (len(kept) - self.kept["draft"])
        new = self.emit([*kept, anchor], len(kept), "draft")
        self.stats.target_forwards += 1
        self.stats.accept_lengths.append(len(new))
        self.tokens += new
        self.anchor = anchor


def verify_rows(logits, proposal: Proposal, lengths, filters: dict, uniform=None):
    """dspine.verify_greedy and verify_sampled for rows of different numbers of proposals.

    logits [N, T+1, V]; proposal: tokens [N, T], candidate_ids and probs [N, T, K], of which row n
    proposed the first lengths[n]; uniform [N, T+1], where row n's number at lengths[n] decides its
    last draw. Returns accepted [N] and the next token [N].
    """
    tokens, candidate_ids, draft_probs = proposal
    proposed = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # [N, T]
    if filters["temperature"] == 0:
        best = logits.argmax(-1)                                            # [N, T+1]
        accepted = ((best[:, :-1] == tokens) & proposed).cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None])[:, 0]
    target_probs = sampling_distribution(logits, **filters)                 # [N, T+1, V]
    p = target_probs[:, :-1].gather(-1, tokens[..., None])[..., 0]          # [N, T]
    q = (draft_probs * (candidate_ids == tokens[..., None])).sum(-1)        # [N, T]
    accepted = ((uniform[:, :-1] * q < p) & proposed).cumprod(1).sum(1)
    # normalize(max(p - q, 0)) at the first refusal; behind a row's last proposal q is 0
    n = torch.arange(len(tokens), device=tokens.device)
    minus = F.pad(-draft_probs * proposed[..., None], (0, 0, 0, 1))[n, accepted]  # [N, K]
    ids = F.pad(candidate_ids, (0, 0, 0, 1))[n, accepted]                   # [N, K]
    probs = target_probs[n, accepted]                                       # [N, V]
    residual = probs.scatter_add(1, ids, minus.to(probs.dtype)).clamp_(min=0)
    probs = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs)
    return accepted, inverse_cdf(probs, uniform[n, lengths])


def check_rows(target, cache):
    """Refuse targets for which a mask and positions do not say all (ValueError)."""
    name, config = type(target).__name__, target.config.get_text_config()
    kinds = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    for ok, why in (
            (not kinds, f"keeps more than keys and values of all positions ({sorted(kinds)})"),
            (config._attn_implementation == "sdpa", "needs attn_implementation sdpa for its mask"),
            ("position_ids" in inspect.signature(target.forward).parameters,
             "takes no position_ids"),
            (rope != "longrope", "has longrope, whose frequencies follow the longest row")):
        if not ok:
            raise ValueError(f"{name} {why}: decode one request at a time (dspine.generate)")


class Batch:
    """Rows past prefill, their caches, and the round: propose, run the target, verify."""

    def __init__(self, target, draft, rows: list[Row], filters: dict):
        check_rows(target, rows[0].runner.cache)
        self.target, self.draft, self.rows, self.filters = target, draft, rows, filters
        self.device, self.state = rows[0].device, rows[0].state
        columns = max(row.input_ids.shape[1] + row.budget for row in rows) + rows[0].block_size
        self.cache, self.context = RowCache(columns), RowCache(columns)
        self.taps, self.taps_from = None, [0] * len(rows)  # those the context has not read yet
        self.cache.place(self.taps_from, max(row.start for row in rows), self.device)
        for l, layers in enumerate(zip(*(row.runner.cache.layers for row in rows))):
            self.cache.update(*(pad_sequence([x[0].transpose(0, 1) for x in kept], True)
                                .transpose(1, 2)                            # [N, heads, S, D]
                                for kept in zip(*((x.keys, x.values) for x in layers))), l)
        if draft is not None:
            self.taps = pad_sequence([row.waiting[0] for row in rows], True)  # [N, S, n*H]
        for row in rows:
            row.runner = row.state = row.waiting = None  # the batch has it all

    def each(self, value) -> torch.Tensor:
        """value(row) of every row: [N]."""
        return torch.tensor([value(row) for row in self.rows], device=self.device)

    def uniform(self, counts: list[int], width: int) -> torch.Tensor | None:
        """[N, width] in [0, 1): each row draws what it draws alone, in the same order."""
        if self.filters["temperature"]:
            drawn = [torch.rand(n, generator=row.generator, device=self.device)
                     for row, n in zip(self.rows, counts)]
            return torch.stack([F.pad(x, (0, width - len(x))) for x in drawn])

    def propose(self, lengths: list[int]) -> Proposal:
        """T = max(lengths) proposals a row, of which row n has asked for the first lengths[n]."""
        N, T = len(lengths), max(lengths)
        if T == 0:
            none = torch.zeros(N, 0, 1, dtype=torch.long, device=self.device)
            return Proposal(none[..., 0], none, none.float())
        at = self.context.place(self.taps_from, self.taps.shape[1], self.device)
        self.state.keys_values = [
            self.context.update(*pair, l)
            for l, pair in enumerate(self.draft.context_keys_values(self.taps, at[:, :1]))]
        sampled = self.draft.config.select == "cache"
        return self.draft.propose_rows(
            self.state, self.each(lambda row: row.anchor), self.each(lambda row: row.start), T,
            uniform=self.uniform(lengths, T) if sampled else None, **self.filters)

    def forward(self, proposal: Proposal) -> torch.Tensor:
        """The target over [anchor, proposals] of every row: logits [N, T+1, V]; keeps the taps."""
        blocks = torch.cat((self.each(lambda row: row.anchor)[:, None], proposal.tokens), dim=1)
        at = self.cache.place([row.start for row in self.rows], blocks.shape[1], self.device)
        last = self.each(lambda row: row.input_ids.shape[1] + row.budget - 1)[:, None]
        out = self.target(  # slots beyond a row's budget get a position that the target has
            input_ids=blocks, position_ids=torch.minimum(at, last), cache=self.cache,
            attention_mask=self.cache.visible(), use_cache=True,
            output_hidden_states=self.draft is not None)
        if self.draft is not None:
            self.taps = torch.cat([out.hidden_states[l + 1]
                                   for l in self.draft.config.target_layer_ids], dim=-1)
        return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))

    def round(self):
        """One target forward for all rows; those that are finished then leave."""
        lengths = [row.length("draft") if self.draft else 0 for row in self.rows]
        proposal = self.propose(lengths)
        logits = self.forward(proposal)
        uniform = self.uniform([n + 1 for n in lengths], max(lengths) + 1)
        counts = torch.tensor(lengths, device=self.device)
        accepted, tokens = verify_rows(logits, proposal, counts, self.filters, uniform)
        accepted, tokens, proposals = accepted.tolist(), tokens.tolist(), proposal.tokens.tolist()
        self.taps_from = [row.start for row in self.rows]
        for row, length, ids, n, token in zip(self.rows, lengths, proposals, accepted, tokens):
            row.advance(ids[:n], token, length)
        stay = [n for n, row in enumerate(self.rows) if not row.finished]
        if self.draft is not None:
            self.taps = self.taps[stay, :max(accepted) + 1]  # what a row refused: see above
        if len(stay) < len(self.rows):
            self.rows, self.taps_from = ([x[n] for n in stay] for x in (self.rows, self.taps_from))
            self.cache.select(stay)
            self.context.select(stay)


class Outcome(NamedTuple):
    tokens: list[list[int]]            # of each request
    statistics: list[Statistics]       # of each; its seconds are not set, the batch shares them
    prefill_seconds: float
    decode_seconds: float


@torch.no_grad()
def generate_rows(target, draft, requests: list[Request], *, temperature: float = 0.0,
                  top_k: int = 0, top_p: float = 1.0,
                  block_size: int | str | None = None) -> Outcome:
    """Decode all requests in one batch, each to what `dspine.generate` gives for it alone.

    draft None is plain batched decoding. The draft is on the target's device. Raises ValueError
    for what the single loop refuses, and for targets that `check_rows` refuses.
    """
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = [Row(target, draft, r.input_ids, r.max_new_tokens, filters, r.eos_token_ids, block_size,
                r.generator, False) for r in requests]
    began = rows[0].clock()
    for row in rows:
        row.begin()
    running = [row for row in rows if not row.finished]
    batch = Batch(target, draft, running, filters) if running else None
    prefilled = rows[0].clock()
    while batch and batch.rows:
        batch.round()
    return Outcome([row.tokens for row in rows], [row.stats for row in rows],
                   prefilled - began, rows[0].clock() - prefilled)


# -------------------------------------------------------------------------------------------------
# Measurement
# -------------------------------------------------------------------------------------------------


def measure(target, drafts: dict, requests, **options) -> dict:
    """The same requests by every method of drafts (name -> draft or None): name -> record."""
    records = {}
    for name, draft in drafts.items():
        outcome = generate_rows(target, draft, requests(), **options)
        lengths = [n for s in outcome.statistics for n in s.accept_lengths]
        records[name] = {
            "emitted": sum(lengths), "forwards": len(lengths), "tokens": outcome.tokens,
            "prefill_seconds": outcome.prefill_seconds, "decode_seconds": outcome.decode_seconds}
    return records


def summarise(passes: list[list[dict]]) -> dict:
    """One number of requests, from passes of records of `measure` over the same prompts.

    plain, DSpine: tokens after the first over seconds after prefill, medians over passes; ratio:
    the median of each pass's own. prefill_seconds: a request's. equal: answers equal to plain's.
    """
    total = lambda one, name, key: sum(records[name][key] for records in one)
    speed = lambda name: [
        total(one, name, "emitted") / max(1e-9, total(one, name, "decode_seconds"))
        for one in passes]
    plain, ours = speed("plain"), speed("DSpine")
    pairs = [pair for one in passes for r in one
             for pair in zip(r["plain"]["tokens"], r["DSpine"]["tokens"])]
    return {
        "plain": statistics.median(plain), "DSpine": statistics.median(ours),
        "ratio": statistics.median(b / a if a else 1.0 for a, b in zip(plain, ours)),
        "acceptance_length": (sum(total(one, "DSpine", "emitted") for one in passes)
                              / max(1, sum(total(one, "DSpine", "forwards") for one in passes))),
        "prefill_seconds": sum(total(one, "DSpine", "prefill_seconds") for one in passes)
        / len(pairs), "equal": sum(a == b for a, b in pairs) / len(pairs)}


def print_table(title: str, table: dict, greedy: bool):
    """table: number of requests -> summarise(...). Then where DSpine stops paying."""
    columns = ["requests", "plain tokens/s", "DSpine tokens/s", "ratio", "acceptance length",
               "prefill s/request"] + ["equal answers"] * greedy
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for N, row in table.items():
        cells = [str(N), f"{row['plain']:.1f}", f"{row['DSpine']:.1f}", f"{row['ratio']:.2f}",
                 f"{row['acceptance_length']:.2f}", f"{row['prefill_seconds']:.2f}"]
        print(f"| {' | '.join(cells + [format(row['equal'], '.0%')] * greedy)} |")
    paying = [N for N, row in table.items() if row["ratio"] > 1]
    print("\nDSpine is faster than plain batched decoding "
          + (f"up to {max(paying)} requests at once" if paying else "at none of these numbers"))


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Throughput of several requests at once.",
                                formatter_class=HelpFormatter)
    add_options(p, "runs/batch.jsonl")
    add = p.add_argument
    add("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32],
        help="numbers of requests at once; every one decodes as many prompts as the largest, "
        "batch after batch")
    add("--repeats", type=int, default=3, help="passes over all of it; medians over them")
    return p.parse_args(argv)


def read_pool(args) -> list[str]:
    """As many prompts as the largest batch holds, from the sets in turn (ValueError)."""
    if min(args.requests + [args.repeats]) < 1:
        raise ValueError("--requests and --repeats must be at least 1")
    count = max(args.requests)
    if uneven := [n for n in args.requests if count % n]:
        raise ValueError(f"--requests {uneven[0]}: must divide the largest, {count}, so that all "
                         "decode the same prompts")
    turns = zip_longest(*read_sets(args).values())
    pool = [text for turn in turns for text in turn if text is not None][:count]
    if len(pool) < count:
        raise ValueError(f"{len(pool)} prompts for {count} requests: raise --per-set, name more "
                         "--sets or ask for fewer --requests")
    return pool


def run(args) -> int:
    pool, draft_file = read_pool(args), Path(args.draft) / "model.safetensors"
    device = default_device(args.device)
    if not draft_file.is_file():
        raise ValueError(f"--draft {args.draft}: no folder with a draft")
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype), device)
    follow_own_distribution(target)
    drafts = {"plain": None, "DSpine": load_draft(args.draft, target)}
    eos = eos_ids(target, tokenizer)
    options = dict(temperature=args.temperature,
                   block_size=default_block_size(target, args.block_size))
    seeded = lambda seed: torch.Generator(target.device).manual_seed(seed)
    ask = lambda batch, count: lambda: [
        Request(build_prompt(tokenizer, pool[i]), count, eos, seeded(i)) for i in batch]

    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{conditions(target, args)}; {len(pool)} prompts, {args.repeats} passes"
    inputs = hashlib.sha256(json.dumps(pool).encode() + draft_file.read_bytes()).hexdigest()[:12]
    key = f"batch; {title}; {fingerprint(target)}; prompts and draft {inputs}"
    drop_cut_line(out)
    rows = read_rows(out)
    done = {tuple(r["work"]): r["records"] for r in rows if r.get("key") == key}
    work = [(repeat, N, first) for repeat in range(args.repeats) for N in args.requests
            for first in range(0, len(pool) - N + 1, N)]
    measure(target, drafts, ask([0], 8), **options)  # warm-up
    with open(out, "a", encoding="utf-8") as log:
        for repeat, N, first in tqdm(work, desc="batches"):
            if (repeat, N, first) not in done:
                turn = dict(list(drafts.items())[::-1 if repeat % 2 else 1])
                done[repeat, N, first] = measure(
                    target, turn, ask(range(first, first + N), args.max_new_tokens), **options)
                row = {"key": key, "work": (repeat, N, first), "records": done[repeat, N, first]}
                log.write(json.dumps(row) + "\n")
                log.flush()
    passes = lambda N: [[done[w] for w in work if w[:2] == (repeat, N)]
                        for repeat in range(args.repeats)]
    print_table(title, {N: summarise(passes(N)) for N in args.requests}, args.temperature == 0)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("batch.py", run, parse_args(), "stopped; the same command goes on"))
