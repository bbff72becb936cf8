"""What the injection carries: when positions form, and whose message matters.

    python bench/probe.py --corpus runs/draft/corpus.jsonl

Teacher-forced blocks of held-out rows, the drafter's own forward, no second copy of it: all that
an experiment changes is `prev`, what positions RECEIVE (see `received`). Position t = 1 .. T of a
block receives, after each layer, the feature of t-1 (position 1: the token code of the anchor).
Attention inside the block is left alone. Read is the draft's parallel forward; the transition
cache, which redoes the last message with a real token, is not.

(a) Formation. Position t holds at layer l, after the layer's injection, the feature f_lt. Its
    nearest token code argmax_v e(v) . f_lt is compared with the true token, and with what the
    draft finally prefers there, the top-1 of its logits, whose own accuracy is the last row.

(b) Corruption. The message j -> j+1 is replaced at every layer, then every position t is read.
    t - j is the distance: at 1 the predecessor's feature is corrupted in what t receives, at 2
    that of the position before it in what t-1 receives, and so on; what reaches t from there is
    what t-1, t-2, .. pass on. Replaced by the message that another block of the same row, drawn
    at random, sends from the same place at the same layer in the clean run ("other block"), or by
    a random direction of the same length ("noise"). The three distances are compared on the same
    tokens: those of positions from 4 on, whose messages at all three are features.

(c) True predecessor. Every position receives the code of its true predecessor, sqrt(r) e(y_{t-1}),
    at one layer alone or at all of them (in training: predecessor replacement, sec. 6). Position
    1 receives it anyway.

Each figure is a mean over tokens of all rows, +- its standard error with rows as the sampling
unit (blocks of a row overlap); changes are paired, each token with itself in the clean run. With
a draft vocabulary only the tokens it holds are read, among themselves.

Writes probe.json and a figure to --out. Rows done are kept there: the same command goes on.
"""

import argparse
import hashlib
import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from dspine import DSpine, columns, gather_blocks, sample_anchors, supervised_slots  # noqa: E402
from evaluate import commit, machine  # noqa: E402
from generate import (DEFAULT_DRAFT, HelpFormatter, default_device, guarded,  # noqa: E402
                      load_draft, load_target)
from train_small import (TargetStates, answer_tokens, drop_cut_line, fingerprint,  # noqa: E402
                         follow_own_distribution, read_corpus, read_rows, replacing,
                         write_json)

CORRUPTIONS = "other block", "noise"

# -------------------------------------------------------------------------------------------------
# Interventions
# -------------------------------------------------------------------------------------------------


@contextmanager
def received(draft: DSpine, edit):
    """Within it, positions receive edit(l, prev) in place of prev [N, A, T, r] at each layer l.

    prev[.., t-1, :] is what position t receives. Kernels, which would pass it by, are off.
    """
    write, kernels, draft.kernels = draft.injection.write, draft.kernels, "off"
    draft.injection.write = lambda l, h, prev, feature=None: write(l, h, edit(l, prev), feature)
    try:
        yield
    finally:
        del draft.injection.write  # the instance's; the class's is there again
        draft.kernels = kernels


def replaced(messages: dict, to):
    """Edit: positions in `to` [T, 1] receive messages[l] [N, A, T, r], at each layer l it has."""
    return lambda l, prev: (torch.where(to, messages[l].to(prev.dtype), prev)
                            if l in messages else prev)


def corrupted(sent: dict, kind: str, generator) -> dict:
    """Messages [1, A, T, r] a layer to replace those of a clean run, `sent`, with.

    "other block": each block gets those of another one, the same at every layer; needs A >= 2.
    "noise": random directions of a message's length, sqrt(r).
    """
    A, _, r = next(iter(sent.values())).shape[1:]
    if kind == "noise":
        draw = lambda x: torch.randn(x.shape, generator=generator).to(x.device)
        return {l: F.normalize(draw(x), dim=-1) * math.sqrt(r) for l, x in sent.items()}
    order = torch.randperm(A, generator=generator)
    donor = torch.empty_like(order).scatter_(0, order, order.roll(1))       # [A], never itself
    return {l: x[:, donor.to(x.device)] for l, x in sent.items()}


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


def nearest_token(features, codes, chunk: int = 256) -> torch.Tensor:
    """argmax_v e(v) . f: features [tokens, r], codes [V, r] -> [tokens]."""
    return torch.cat([F.linear(f, codes).argmax(-1) for f in features.split(chunk)])


def top1_and_ce(hidden, head, labels, chunk: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """argmax and -log softmax at the label of W hidden: [tokens, H], [V, H], [tokens]."""
    top, ce = [], []
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        logits = F.linear(h, head).float()                                  # [chunk, V]
        top.append(logits.argmax(-1))
        ce.append(F.cross_entropy(logits, y, reduction="none"))
    return torch.cat(top), torch.cat(ce)


@torch.no_grad()
def probe_row(draft: DSpine, taps, ids, anchors, supervised, embed, lm_head, generator) -> dict:
    """All experiments on one row: taps [1, S, n*H], ids [1, S], anchors [1, A], [1, A, T].

    Sums over the tokens of each position, as lists [.., T]: "tokens"; "formation" [L, 2, T] of
    (nearest code is the true token, is the final top-1); and of (right, cross-entropy, top-1 as
    in the clean run): "clean" [3, T], "true" [L + 1, 3, T] at each layer alone and at all, and a
    kind of corruption [T + 1, 3, T] of each message 0 -> 1, 1 -> 2, .. alone and of all.
    """
    L, T = draft.config.num_hidden_layers, draft.config.block_size - 1
    blocks = gather_blocks(ids, anchors, T + 1)                             # [1, A, B]
    labels, known = columns(blocks[..., 1:].contiguous(), draft.draft_vocab)  # [1, A, T]
    keep = supervised & known
    labels, slot = labels[keep], keep.nonzero()[:, 2]                       # [tokens]
    head, codes = draft.draft_head(lm_head), draft.draft_head(draft.transfer_codes)
    sums = lambda x: torch.zeros(T, dtype=torch.float64, device=x.device).index_add_(
        0, slot, x.double()).tolist()

    def run(edit):
        with received(draft, edit):
            out = draft(blocks, taps, anchors, embed)
        return out, *top1_and_ce(out.hidden_states[..., 1:, :][keep], head, labels)

    def outcome(edit):
        _, top, ce = run(edit)
        return [sums(top == labels), sums(ce), sums(top == final)]

    sent = {}  # a layer that injects: its clean messages [1, A, T, r]
    out, final, ce = run(lambda l, prev: sent.setdefault(l, prev))
    nearest = [nearest_token(f[..., 1:, :][keep], codes) for f in out.layer_features]
    true, slots = draft.code(blocks[..., :-1]), torch.arange(T, device=ids.device)[:, None]
    anywhere = slots >= 0                                                   # [T, 1]
    layers = [{l: true} for l in range(L)] + [{l: true for l in range(L)}]
    found = {
        "tokens": sums(torch.ones_like(ce)),
        "formation": [[sums(v == labels), sums(v == final)] for v in nearest],
        "clean": [sums(final == labels), sums(ce), sums(final == final)],
        "true": [outcome(replaced(messages, anywhere)) for messages in layers]}
    for kind in CORRUPTIONS:
        messages = corrupted(sent, kind, generator)
        found[kind] = [outcome(replaced(messages, to))
                       for to in [*(slots == j for j in range(T)), anywhere]]
    return found


# -------------------------------------------------------------------------------------------------
# Tables
# -------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    title: str
    rows: list[str]
    columns: list[str]
    mean: torch.Tensor                 # [rows, columns]
    error: torch.Tensor                # its standard error over rows of text


def estimate(sums, counts) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of tokens and its standard error, n rows of text being what was sampled.

        mean  = sum_i x_i / sum_i m_i
        error = sqrt(n / (n-1) sum_i (x_i - mean m_i)^2) / sum_i m_i        (ratio estimator)

    sums x and counts m [n, ..] of the same shape or broadcast -> [..]; nan where no token is.
    """
    n, total = len(sums), counts.sum(0)
    mean = sums.sum(0) / total
    return mean, ((sums - mean * counts).square().sum(0) * n / (n - 1)).sqrt() / total


def make_tables(records: list[dict]) -> dict[str, Table]:
    """The tables of all experiments, from probe_row of each row of text."""
    x = {k: torch.tensor([r[k] for r in records], dtype=torch.float64) for k in records[0]}
    tokens, clean = x["tokens"], x["clean"]                                 # [n, T], [n, 3, T]
    (n, T), L = tokens.shape, x["formation"].shape[1]
    at = [str(t) for t in range(1, T + 1)]
    names = [f"layer {l}" for l in range(1, L + 1)]

    def table(title, rows, sums, scale=1.0, since=None):  # sums [n, rows, T]
        m, head = tokens[:, None], at
        if since is not None:  # one more column: all positions from `since` on
            join = lambda v: torch.cat((v, v[..., since - 1:].sum(-1, keepdim=True)), dim=-1)
            sums, m, head = join(sums), join(m), [*at, f"{since}..{T}"]
        mean, error = estimate(sums, m)
        return Table(title, rows, head, mean * scale, error * scale)

    with_final = torch.cat((x["formation"][:, :, 0], clean[:, None, 0]), dim=1)  # [n, L+1, T]
    only = [f"{name} only" for name in names] + ["every layer"]
    gain = x["true"] - clean[:, None]                                       # [n, L+1, 3, T]
    other = x["other block"] - clean[:, None]                               # [n, T+1, 3, T]
    edges = ["anchor → 1", *(f"{j} → {j + 1}" for j in range(1, T)), "all"]
    return {
        "formation": table("Nearest token code is the true token, % (last: top-1 of the logits)",
                           [*names, "logits"], with_final, 100),
        "settled": table("Nearest token code is already the draft's final top-1, %",
                         names, x["formation"][:, :, 1], 100),
        "corruption": table("Top-1 accuracy after corrupting one message (other block), change "
                            "in points", edges, other[:, :, 0], 100),
        "changed": table("Final top-1 changed by corrupting one message (other block), %",
                         edges, clean[:, None, 2] - x["other block"][:, :, 2], 100),
        "distance": distances(x, tokens, clean),
        "true": table("Top-1 accuracy given the true predecessor, %", ["nowhere", *only],
                      torch.cat((clean[:, None], x["true"]), dim=1)[:, :, 0], 100, since=2),
        "true_gain": table("... change in points", only, gain[:, :, 0], 100, since=2),
        "true_ce": table("... change of cross-entropy, nats", only, gain[:, :, 1], since=2)}


def distances(x: dict, tokens, clean) -> Table:
    """Corruption at distance 1, 2, .. before a position, on the same tokens."""
    T = tokens.shape[1]
    D = min(3, T - 1)
    rows, sums = [], []
    for kind in CORRUPTIONS:
        change = x[kind] - clean[:, None]                                   # [n, T+1, 3, T]
        for d in range(1, D + 1):  # position t = i + 1 and the message (t-d) -> (t-d+1)
            rows.append(f"{kind}, distance {d}")
            sums.append(sum(change[:, i + 1 - d, :, i] for i in range(D, T)))
    sums, count = torch.stack(sums, 1), tokens[:, D:].sum(1)[:, None, None]  # [n, rows, 3]
    scale = torch.tensor([100.0, 1.0, 100.0]).double()
    mean, error = estimate(sums, count)
    return Table(f"Corrupting one message, positions {D + 1}..{T}", rows,
                 ["top-1 accuracy, points", "cross-entropy, nats", "same top-1, points"],
                 mean * scale, error * scale)


def print_table(table: Table):
    """Markdown; a change that is exactly zero, as causality demands, stands as 0."""
    def cell(mean, error):
        if math.isnan(mean):
            return "–"
        return "0" if mean == error == 0 else f"{mean:.2f} ± {error:.2f}"
    print(f"\n{table.title}\n\n|   | {' | '.join(table.columns)} |"
          f"\n{'|---' * (len(table.columns) + 1)}|")
    for name, mean, error in zip(table.rows, table.mean.tolist(), table.error.tolist()):
        print(f"| {name} | {' | '.join(map(cell, mean, error))} |")


def write_tables(path: Path, conditions: str, tokens: list, tables: dict):
    listed = lambda x: [[None if math.isnan(v) else v for v in row] for row in x.tolist()]
    found = {name: {"title": t.title, "rows": t.rows, "columns": t.columns,
                    "mean": listed(t.mean), "standard_error": listed(t.error)}
             for name, t in tables.items()}
    write_json(path, {"conditions": conditions, "tokens": tokens, "tables": found})


# -------------------------------------------------------------------------------------------------
# Figure
# -------------------------------------------------------------------------------------------------


def draw(tables: dict, path: Path) -> bool:
    """Left: formation. Right: what corruption costs and the true predecessor gains. False: not
    drawn, since matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.8), layout="constrained")

    def line(axis, x, mean, error, colour, label, **style):
        axis.plot(x, mean, color=colour, label=label, markersize=5, linewidth=1.7, **style)
        axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)

    t = tables["formation"]
    T, layers = len(t.columns), len(t.rows) - 1
    position = torch.arange(1, T + 1)
    for l, name in enumerate(t.rows[:-1]):
        shade = plt.get_cmap("viridis_r")(0.15 + 0.7 * l / max(1, layers - 1))
        line(left, position, t.mean[l], t.error[l], shade, name, marker="os^Dv"[l % 5])
    line(left, position, t.mean[-1], t.error[-1], "black", "final logits", marker="x",
         linestyle="--")
    left.set(ylabel="tokens whose top-1 is the true token, %", ylim=(0, None))
    left.set_title("Nearest token code, layer by layer", loc="left", fontsize=11)

    left.text(1, 0.99, "bands: ± 1 standard error", transform=left.transAxes, ha="right",
              va="top", fontsize=8.5, color="0.35")

    given, kept = tables["true_gain"], tables["corruption"]
    for row, label, colour, marker, style in (
            (-1, "true predecessor, all layers", "#009E73", "^", "-"),
            (-2, "... last layer only", "#0072B2", "D", "--"),
            (0, "... layer 1 only", "#56B4E9", "s", "-")):
        line(right, position, given.mean[row, :T], given.error[row, :T], colour, label,
             marker=marker, linestyle=style)
    for d, label, colour, marker in ((1, "predecessor corrupted", "#D55E00", "v"),
                                     (2, "... the position 2 before", "#E69F00", "o"),
                                     (3, "... the position 3 before", "#CC79A7", "x")):
        pick = lambda x: x.diagonal(d - 1)[:T]  # [T - d + 1]: message t-d -> t-d+1 read at t
        line(right, position[d - 1:], pick(kept.mean), pick(kept.error), colour, label,
             marker=marker)
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set_ylabel("change of top-1 accuracy, points")
    right.set_title("What positions receive, replaced", loc="left", fontsize=11)
    for axis in (left, right):
        axis.set(xlabel="position in the block", xticks=position.tolist())
        axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16),
                    ncols=2, handlelength=2.6)
    with replacing(path) as part:
        figure.savefig(part, dpi=200, format=path.suffix[1:] or "png")
    plt.close(figure)
    return True


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="When positions form, and whose message matters.",
                                formatter_class=HelpFormatter)
    add = p.add_argument
    add("--corpus", required=True,
        help="a corpus.jsonl of train_small.py, whose held-out rows are read")
    add("--rows", type=int, default=40, help="held-out rows to read")
    add("--anchors", type=int, default=32, help="blocks a row")
    add("--target", help="as in generate.py")
    add("--draft", default=str(DEFAULT_DRAFT), help="folder of the draft")
    add("--seed", type=int, default=0, help="of anchors, donors and noise")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"),
        help="of both; bfloat16 settles near-ties by rounding")
    add("--out", default="runs/probe", help="folder for probe.json, the figure and finished rows")
    add("--figure", help="file for the figure, .png or .svg (default: probe.png in --out)")
    return p.parse_args(argv)


def held_out_rows(args, target) -> list[dict]:
    """Held-out rows with a prompt and two answer tokens, so each has two blocks. ValueError."""
    rows = [r for r in read_corpus(Path(args.corpus), target)
            if r.get("held_out") and r["prompt_length"] >= 1 and answer_tokens([r]) >= 2]
    if len(rows) < 2:
        raise ValueError(f"{args.corpus} has {len(rows)} held-out rows with two answer tokens, and "
                         "a standard error needs 2: give a corpus of train_small.py with more rows")
    return rows[:args.rows]


def check_args(args):
    """ValueError for numbers and files that no experiment could work with."""
    for name, least in (("rows", 2), ("anchors", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least {least}")
    if not Path(args.corpus).is_file():
        raise ValueError(f"--corpus {args.corpus}: no such file")
    if args.figure and Path(args.figure).suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {args.figure}: must end in .png or .svg")


def check_draft(draft: DSpine):
    """ValueError for a draft without messages between positions."""
    c = draft.config
    if c.inject == "none" or c.block_size < 3:
        raise ValueError("this draft passes no features between positions (inject "
                         f"{c.inject}, block size {c.block_size}): there is nothing to probe")


def probe(args, target, draft: DSpine, rows: list[dict], log_path: Path, key: str) -> list[dict]:
    """probe_row of every row, those in log_path under the same key read from there."""
    drop_cut_line(log_path)
    done = read_rows(log_path)
    done = {r["index"]: r["sums"] for r in done if r.get("key") == key}
    states = TargetStates(target, rows, draft.config.target_layer_ids, log_path, 0)
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    embed, lm_head = (m.weight.detach() for m in modules)
    with open(log_path, "a", encoding="utf-8") as log:
        for i, row in enumerate(tqdm(rows, desc="rows")):
            if i in done:
                continue
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + i)
            mask = (torch.arange(len(row["ids"])) >= row["prompt_length"])[None]  # [1, S]
            anchors, valid = sample_anchors(mask, args.anchors, generator)
            supervised = supervised_slots(mask, anchors, valid, draft.config.block_size)
            ids, anchors, supervised = (x.to(target.device) for x in (
                torch.tensor([row["ids"]]), anchors, supervised))
            done[i] = probe_row(draft, states[i][0], ids, anchors, supervised, embed, lm_head,
                                generator)
            log.write(json.dumps({"key": key, "index": i, "sums": done[i]}) + "\n")
            log.flush()
    return [done[i] for i in range(len(rows))]


def run(args) -> int:
    check_args(args)
    out = Path(args.out)
    target, _ = load_target(args.target, getattr(torch, args.dtype),
                                    default_device(args.device))
    follow_own_distribution(target)
    draft = load_draft(args.draft, target).use_kernels("off")
    check_draft(draft)
    out.mkdir(parents=True, exist_ok=True)
    rows = held_out_rows(args, target)
    weights = (Path(args.draft) / "model.safetensors").read_bytes()
    settings = json.dumps([fingerprint(target), args.anchors, args.seed, args.dtype, rows])
    key = hashlib.sha256(settings.encode() + weights).hexdigest()[:16]
    records = probe(args, target, draft, rows, out / "rows.jsonl", key)
    tokens = torch.tensor([r["tokens"] for r in records]).sum(0).int().tolist()
    conditions = (f"{len(rows)} held-out rows, up to {args.anchors} blocks each, "
                  f"{sum(tokens)} tokens ({', '.join(map(str, tokens))} by position); "
                  f"{machine(target.device)}; {args.dtype}; torch {torch.__version__}, "
                  f"transformers {transformers.__version__}; seed {args.seed}; commit {commit()}")
    tables = make_tables(records)
    print(conditions)
    for table in tables.values():
        print_table(table)
    write_tables(out / "probe.json", conditions, tokens, tables)
    figure = Path(args.figure or out / "probe.png")
    figure.parent.mkdir(parents=True, exist_ok=True)
    if draw(tables, figure):
        print(f"\nfigure: {figure}")
    return 0


def main(argv=None) -> int:
    return guarded("probe.py", run, parse_args(argv), "stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
