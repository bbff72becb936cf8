"""Latency of the parts of a draft step and of the serial heads the transition cache replaces.

    python bench/latency.py                          # both sizes; CPU, and CUDA if there is one
    python bench/latency.py --sizes default --dtype float32 --json runs/latency.json

Random weights. All rows of a table are timed in turn, again and again, and a row's figure is its
median: a slow minute then hits every row alike. Before each call a write empties the caches, as
the rest of a step would; without it a row would gain from what the one before it read. On CUDA
each row is one CUDA graph, timed by events.

Rows of one draft step with one request (kernels.py on CUDA, PyTorch on a CPU):

    backbone       the layers over anchor + T masks and the context's keys and values
    injections     all L of them, on the states the backbone left
    head + top-k   the target's head (default: its 8,192 rows) over T positions, K candidates each
    cache + path   transition cache and the walk through it: the tokens are chosen
    draft step     DSpine.propose (CUDA: GraphedDraft): the above, new context, the codes' look-up

and what chooses the tokens elsewhere, one position after the other, given the same logits [T, V]
or candidates [T, K]:

    Markov head    logits_t + W2 W1[x_{t-1}], rank 256 (DSpark)
    GRU head       logits_t + W2 s_t, s_t = GRU(s_{t-1}, E[x_{t-1}]), rank 256 (Domino)
    refinement     candidates scored by refine(pre_t, x_{t-1}): the cache's own scores, serially;
                   once as it is written, once with the half that needs no token done beforehand

and the target: a forward of B tokens against one of 1 token, and the acceptance rule.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import dspine  # noqa: E402
from dspine import DraftState, DSpine, DSpineConfig, Plain, Proposal, operations  # noqa: E402
from evaluate import commit, machine  # noqa: E402
from generate import guarded  # noqa: E402
from train_small import write_json  # noqa: E402

RANK = 256  # of the Markov and GRU heads
SIZES = {
    "default": dict(hidden_size=576, num_hidden_layers=3, intermediate_size=1536,
                    num_attention_heads=9, num_key_value_heads=3, head_dim=64, transfer_rank=256,
                    message_size=192, top_k=16, block_size=8, vocab_size=49152,
                    num_target_layers=30),
    "published": dict(hidden_size=4096, num_hidden_layers=5, intermediate_size=12288,
                      num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                      transfer_rank=1024, message_size=512, top_k=16, block_size=16,
                      vocab_size=151936, num_target_layers=36)}
DRAFT_VOCAB = 8192  # of the default draft; its serial heads score no more tokens either
H200_BYTES = 4.8e12  # a second

# -------------------------------------------------------------------------------------------------
# What is timed
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def random_draft(size: str, device, dtype, **overrides) -> DSpine:
    c = SIZES[size] | overrides
    c.setdefault("target_layer_ids", list(range(c["num_hidden_layers"])))
    config = DSpineConfig(mask_token_id=c["vocab_size"] - 1, **c)
    with torch.device("meta"):
        draft = DSpine(config)
    draft = draft.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    frequencies, draft.rope_scale = dspine.rope_frequencies(config)
    draft.inv_freq = frequencies.to(device)
    for parameter in draft.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    draft.injection.bias.zero_()
    draft.transfer_codes.copy_(F.normalize(draft.transfer_codes.normal_(), dim=-1))
    draft.transfer_ready.fill_(True)
    if size == "default":
        draft.set_draft_vocab(torch.arange(min(DRAFT_VOCAB, config.vocab_size)))
    return draft


def markov_head(logits, anchor, first, second) -> torch.Tensor:
    """logits [T, V], anchor [1], W1 [V, rank], W2 [V, rank] -> tokens [T]."""
    token, tokens = anchor, []
    for row in logits:
        token = (row + F.linear(first[token], second)).argmax(-1)
        tokens.append(token)
    return torch.cat(tokens)


def gru_head(logits, anchor, embed, cell, second) -> torch.Tensor:
    """logits [T, V], E [V, rank], a GRU cell, W2 [V, rank] -> tokens [T]."""
    token, state, tokens = anchor, embed.new_zeros(1, embed.shape[1]), []
    for row in logits:
        state = cell(embed[token], state)
        token = (row + F.linear(state, second)).argmax(-1)
        tokens.append(token)
    return torch.cat(tokens)


def refinement(draft, pre, candidate_ids, anchor, lm_head) -> torch.Tensor:
    """Last-write refinement, position by position: [T, H], [T, K] -> tokens [T]."""
    token, tokens = anchor, []
    for state, candidates in zip(pre, candidate_ids):
        scores = F.linear(draft.refine(state[None], token), lm_head[candidates])
        token = candidates[scores.argmax(-1)]
        tokens.append(token)
    return torch.cat(tokens)


def prepared_refinement(draft, pre, candidate_ids, anchor, lm_head) -> torch.Tensor:
    """The same tokens; receivers' features and gates, heads and lengths for all T at once."""
    injection, W = draft.injection, draft.injection.writes[-1].weight
    feature = injection.feature(draft.config.num_hidden_layers - 1, pre)
    received = F.linear(feature, injection.receiver_gate.weight, injection.bias)
    scale = (pre.float().norm(dim=-1, keepdim=True) / math.sqrt(pre.shape[-1])).to(pre.dtype)
    heads, token, tokens = lm_head[candidate_ids], anchor, []
    for t in range(len(pre)):
        code = draft.code(token)
        gate = torch.sigmoid(received[t] + F.linear(code, injection.predecessor_gate.weight))
        delta = F.linear(gate * F.linear(code, injection.message.weight), W)
        scores = F.linear(draft.norm(pre[t] + scale[t] * delta), heads[t])
        token = candidate_ids[t][scores.argmax(-1)]
        tokens.append(token)
    return torch.cat(tokens)


@torch.no_grad()
def draft_rows(draft: DSpine, context: int, kernels: str) -> dict[str, Callable]:
    """name -> a function without arguments, on fixed inputs."""
    c, weight = draft.config, draft.fc.weight
    new = lambda *shape: torch.randn(shape, dtype=weight.dtype, device=weight.device)
    B, H, T, L = c.block_size, c.hidden_size, c.block_size - 1, c.num_hidden_layers
    draft.use_kernels(kernels)
    ops = operations(kernels, weight)
    embed, lm_head = new(c.vocab_size, H), new(c.vocab_size, H).mul_(0.02)
    state = DraftState(embed, lm_head, draft.draft_head(lm_head))
    draft.extend_context(state, new(context, draft.fc.in_features))
    kept, token = state.keys_values, torch.tensor([5], device=weight.device)
    anchor, code = token[0], draft.code(token)[None]
    start = torch.tensor([[context]], device=weight.device)
    mask = dspine.block_mask(start, context, B)
    cos, sin = draft.rope(start + torch.arange(B, device=weight.device))
    x, taps = new(1, B, H), new(3, draft.fc.in_features)

    def backbone():
        h = x
        for layer, kv in zip(draft.layers, kept):
            h = layer(h, cos, sin, kv, mask)
        return draft.norm(h)

    def injections():
        h = x[None]
        for l in range(L):
            h = ops.adjacent_injection(draft.injection, l, h, code)
        return h

    pre, hidden = new(T, H), new(T, H)
    logits, candidate_ids = (F.linear(hidden, state.draft_head),
                             draft.candidates(hidden, state.draft_head)[1])
    first, second, gru_embed = (new(logits.shape[1], RANK).mul_(0.1) for _ in range(3))
    cell = nn.GRUCell(RANK, RANK, device=weight.device, dtype=weight.dtype).requires_grad_(False)

    def path(table):
        return lambda: ops.select_path(table(pre, candidate_ids, anchor, lm_head), candidate_ids)

    rows = {
        "backbone": backbone,
        "injections": injections,
        "head + top-k": lambda: draft.candidates(hidden, state.draft_head),
        "cache + path": path(lambda *a: ops.transition_cache(draft, *a))}
    if ops is Plain:
        rows["cache + path, message space"] = path(draft.message_space_cache)

        def step():
            state.keys_values, state.length = kept, context
            return draft.propose(state, taps, 5, T)
    else:
        rows["cache + path, PyTorch"] = lambda: Plain.select_path(
            Plain.transition_cache(draft, pre, candidate_ids, anchor, lm_head), candidate_ids)

        def plain_injections():
            h = x[None]
            for l in range(L):
                h = Plain.adjacent_injection(draft.injection, l, h, code)
            return h
        rows["injections, PyTorch"] = plain_injections
        step = graphed_step(draft, state, taps, context)
    return rows | {
        "draft step": step,
        "Markov head": lambda: markov_head(logits, token, first, second),
        "GRU head": lambda: gru_head(logits, token, gru_embed, cell, second),
        "refinement": lambda: refinement(draft, pre, candidate_ids, token, lm_head),
        "refinement, prepared": lambda: prepared_refinement(draft, pre, candidate_ids, token,
                                                            lm_head)}


def graphed_step(draft, state, taps, context: int) -> Callable:
    """GraphedDraft's forward on filled buffers, for graph() below to capture."""
    import kernels

    class Pair:  # all that DSpine.start asks of a target
        def __init__(self):
            holder = lambda weight: type("", (), {"weight": weight})()
            c = type("", (), {"num_hidden_layers": draft.config.num_target_layers})()
            self.config = type("", (), {"get_text_config": lambda self: c})()
            self.get_input_embeddings = lambda: holder(state.embed)
            self.get_output_embeddings = lambda: holder(state.lm_head)

    size = 1 << (context + draft.config.block_size).bit_length()
    graphed = kernels.GraphedDraft(draft, Pair(), max_context=size)
    graphed.load(0, state)
    graphed.taps[:, :len(taps)] = taps
    graphed.starts.fill_(context)
    graphed.counts.fill_(len(taps))
    graphed.anchor_ids.fill_(5)
    return lambda: graphed.forward(size, False)


@torch.no_grad()
def target_rows(size: str, layers: int, context: int, device, dtype, kernels: str) -> dict:
    """A target of such layers and its head, over B tokens and over 1; the acceptance rule."""
    draft = random_draft(size, device, dtype, num_hidden_layers=layers,
                         target_layer_ids=[0], transfer_rank=1)
    c, new = draft.config, lambda *s: torch.randn(s, dtype=dtype, device=device)
    B, V, H = c.block_size, c.vocab_size, c.hidden_size
    lm_head, states = new(V, H).mul_(0.02), new(1, B, H)
    kept = [tuple(new(1, c.num_key_value_heads, context, c.head_dim) for _ in "kv")
            for _ in range(layers)]

    def forward(n: int):
        positions = torch.arange(context, context + n, device=device)[None]
        mask = dspine.block_mask(positions[:, :1], context, n)

        def run():
            x, (cos, sin) = states[:, :n], draft.rope(positions)
            for layer, kv in zip(draft.layers, kept):
                x = layer(x, cos, sin, kv, mask)
            return F.linear(draft.norm(x), lm_head)
        return run

    ops, K = operations(kernels, torch.empty(0, device=device)), c.top_k
    probs = torch.randn(B, V, device=device).softmax(-1)
    best = probs.topk(K, dim=-1).indices[:-1]                               # [T, K]
    proposal = Proposal(best[:, 0], best, torch.full((B - 1, K), 1 / K, device=device))
    uniform = torch.rand(B, device=device) / 1e4
    return {f"target, {B} tokens": forward(B), "target, 1 token": forward(1),
            "acceptance rule, greedy": lambda: ops.verify_greedy(probs, proposal.tokens),
            "acceptance rule, sampled": lambda: ops.verify_sampled(probs, proposal, uniform)}


# -------------------------------------------------------------------------------------------------
# Timing
# -------------------------------------------------------------------------------------------------


def graph(function: Callable) -> Callable:
    """The function's kernels as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        captured.kept = function()  # its outputs live as long as it does
    return captured.replay


def clock(function: Callable, device, flush: torch.Tensor) -> float:
    """Milliseconds of one call, from cold caches: `flush` is written before it."""
    flush.zero_()
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@torch.no_grad()
def medians(rows: dict[str, Callable], device, repeats: int, seconds: float) -> dict[str, float]:
    """Interleaved, after warm-up: at least 5 rounds, then until `repeats` or `seconds`."""
    captured = dict(rows)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        for name in rows:
            if not name.startswith("acceptance"):  # which ends on the host
                try:
                    captured[name] = graph(rows[name])
                except RuntimeError as error:
                    print(f"  no graph for {name}, timed without: {str(error).splitlines()[0]}")
    for function in captured.values():
        for _ in range(2):
            function()
    times, began = {name: [] for name in rows}, time.perf_counter()
    for i in range(repeats):
        for name, function in captured.items():
            times[name].append(clock(function, device, flush))
        if i >= 4 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def injection_bytes(c: DSpineConfig, itemsize: int) -> int:
    """Weights that all injections read: readouts and writes once, the shared maps every layer."""
    H, r, m = c.hidden_size, c.transfer_rank, c.message_size
    return c.num_hidden_layers * (r * H + H * m + 3 * m * r) * itemsize


def bars(times: dict[str, float], c: DSpineConfig, size: str, device, itemsize: int) -> dict:
    """name -> (figure, met): the claims that this table supports or refutes."""
    result, chosen = {}, times["cache + path"]
    if size == "published":
        for head in ("Markov head", "GRU head", "refinement"):
            result[f"cache + path / {head}, under 0.5"] = chosen / times[head], \
                chosen < times[head] / 2
    if size == "default" and device.type == "cpu":
        share = times["injections"] / times["draft step"]
        result["injections / draft step, at most 0.2"] = share, share <= 0.2
    if size == "published" and device.type == "cuda":
        ms = times["injections"]
        result["five injections [ms], at most 0.10"] = ms, ms <= 0.10
        rate = injection_bytes(c, itemsize) / ms * 1e3 / H200_BYTES
        result["injections: share of 4.8 TB/s"] = rate, None
    return result


def conditions(device, dtype) -> dict:
    try:
        import triton
        version = triton.__version__
    except ImportError:
        version = None
    return dict(device=device.type, name=machine(device), dtype=str(dtype).removeprefix("torch."),
                torch=torch.__version__, triton=version, cuda=torch.version.cuda, commit=commit())


def measure(size: str, device, dtype, args) -> dict:
    """One table: printed, and returned for --json."""
    torch.manual_seed(0)
    draft = random_draft(size, device, dtype)
    times = medians(draft_rows(draft, args.context, args.kernels), device, args.repeats,
                    args.seconds)
    layers = SIZES[size]["num_target_layers"]
    if size == "published" and device.type == "cpu":
        layers = args.target_layers
    if layers:
        rows = target_rows(size, layers, args.context, device, dtype, args.kernels)
        times |= medians(rows, device, args.repeats, args.seconds)
    checked = bars(times, draft.config, size, device, dtype.itemsize)
    about = conditions(device, dtype)
    print(f"\n{size} size, {about['name']}, {about['dtype']}, torch {about['torch']}, triton "
          f"{about['triton']}, commit {about['commit']}; context {args.context}, target of "
          f"{layers} layers")
    for name, ms in times.items():
        print(f"  {name:30} {ms:9.3f} ms")
    for name, (figure, met) in checked.items():
        print(f"  {name:42} {figure:7.3f}  {'' if met is None else 'met' if met else 'NOT met'}")
    bars_met = {name: dict(figure=figure, met=met) for name, (figure, met) in checked.items()}
    return dict(size=size, context=args.context, target_layers=layers, kernels=args.kernels,
                milliseconds=times, bars=bars_met, **about)


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="(default: both)")
    p.add_argument("--devices", nargs="+", choices=("cpu", "cuda"),
                   default=["cpu"] + ["cuda"] * torch.cuda.is_available(),
                   help="(default: the CPU, and CUDA if there is one)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                   help="of weights and states (default bfloat16)")
    p.add_argument("--kernels", choices=("auto", "off", "on"), default="auto",
                   help="kernels.py on CUDA (auto), never (off), or fail without it (on)")
    p.add_argument("--context", type=int, default=512, help="tokens before the block (default 512)")
    p.add_argument("--repeats", type=int, default=200, help="rounds a table at most (default 200)")
    p.add_argument("--seconds", type=float, default=20.0,
                   help="after which no round starts, once 5 are done (default 20)")
    p.add_argument("--target-layers", type=int, default=2,
                   help="layers of the published target on a CPU, where 36 of them take 16 GB; 0 "
                   "leaves the target out (default 2)")
    p.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    p.add_argument("--json", help="also write the tables here")
    return p.parse_args(argv)


def run(args) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    results = [measure(size, torch.device(device), getattr(torch, args.dtype), args)
               for device in args.devices for size in args.sizes]
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(args.json), results)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("latency.py", run, parse_args()))
