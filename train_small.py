"""Train a DSpine draft for any target, from nothing:  python train_small.py

Three stages, in the folder --out. The same command goes on where a stopped run was:
    1. corpus.jsonl      the target writes prompts and answers them itself (no data set is needed)
    2. checkpoint.pt     training; objective, schedules, anchors and masks are those of dspine.py
    3. model.safetensors and config.json, which generate.py loads; evaluation.json: held-out
       prompts decoded for real

Several GPUs or processes:  torchrun --nproc_per_node N train_small.py ...

Where this leaves the published recipe, because a laptop has no 512 anchors times 8 GPUs:
    - the draft starts as a copy of the target's last layers (--init random: from noise);
    - the weight of ce starts at --ce-start and falls to the published 0.1 (l1 alone has no
      gradient where the draft puts no mass, so a cold start barely learns from it);
    - stopgrad(ce) * alignment is formed per row, not per batch, so that accumulating 4 x 1 rows
      is exactly a batch of 4.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from dspine import (DSpine, DSpineConfig, DraftOutput, alignment_beta, candidate_losses, collect,
                    columns, cosine_alignment, gather_blocks, generate, generate_plain, objective,
                    replacement_rate, sample_anchors, supervised_slots, teacher_distribution,
                    teacher_logits, token_id_set)
from generate import (HelpFormatter, build_prompt, default_block_size, default_device, eos_ids,
                      first_line, guarded, load_draft, load_target)

# Openers that steer what the target asks; the empty one lets it choose, half of the time.
OPENERS = (
    "A train", "If a", "A store sells", "Tom has", "How many", "Solve", "What is", "Find the",
    "Compute", "Prove that", "Write a Python function", "Write a function that", "def ",
    "Implement", "Fix this code", "You are given an array", "Explain", "Explain why",
    "Explain how", "Describe", "Compare", "Why", "How do I", "How does", "What are the",
    "Rewrite", "Edit the following", "Translate", "Summarize", "Classify", "Write a short story",
    "Write an email", "Write a", "Create a list of", "List", "Give me", "Plan", "Suggest",
    "Design", "Imagine you are", "Can you", "Please")

# -------------------------------------------------------------------------------------------------
# Files: nothing is ever left half-written
# -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path):
    """A temporary name to write to: renamed to `path` after the block, removed if it fails."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_lines(path) -> list[str]:
    """The lines of a text file, with their ends. ValueError where it is not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            return list(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def parse_line(line: str, path, number: int) -> dict:
    """One JSON line; ValueError naming file and line where it is none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg})") from None


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSON-lines file, none if it is missing; one cut by a kill is left out."""
    lines = read_lines(path) if path.exists() else []
    return [parse_line(line, path, number) for number, line in enumerate(lines, 1)
            if line.endswith("\n")]


def read_corpus(path: Path, target) -> list[dict]:
    """The rows of a corpus, none if the file is missing; ValueError naming a line that is none."""
    rows, vocab_size = read_rows(path), target.get_output_embeddings().weight.shape[0]
    for number, row in enumerate(rows, 1):
        ids, length = (row.get(k) if isinstance(row, dict) else None
                       for k in ("ids", "prompt_length"))
        if not (isinstance(ids, list) and isinstance(length, int) and 0 <= length <= len(ids)
                and all(isinstance(i, int) and 0 <= i < vocab_size for i in ids)):
            raise ValueError(f"{path}, line {number}: needs ids (token ids below {vocab_size}) "
                             "and prompt_length, as train_small.py writes them")
    return rows


def drop_cut_line(path: Path):
    """Before appending to a JSON-lines file: remove the last line if a kill cut it."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        with replacing(path) as part:
            part.write_bytes(data[:data.rfind(b"\n") + 1])


def drop_steps_after(path: Path, step: int):
    """Before a resumed run appends to its log: remove what the last checkpoint did not see."""
    kept = [row for row in read_rows(path) if row["step"] <= step]
    with replacing(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def write_json(path: Path, value):
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_prompts(path) -> list[str]:
    """First user turns of a file: JSON lines with `turns`, `messages` or `prompt`, or plain text,
    one a line. ValueError where it holds none or a line is something else."""
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        text = line.strip()
        if text.startswith("{"):
            row = parse_line(text, path, number)
            try:
                users = [m["content"] for m in row.get("messages", ()) if m["role"] == "user"]
                text = (row.get("turns") or users or [row.get("prompt")])[0]
            except (KeyError, TypeError):
                text = None
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{path}, line {number}: neither turns, messages nor prompt")
        if text:
            prompts.append(text)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


# -------------------------------------------------------------------------------------------------
# Stage 1: a corpus from the target itself
# -------------------------------------------------------------------------------------------------


def cut_loop(ids: list[int]) -> list[int]:
    """Cut where up to 32 tokens come for the third time in a row (at least 12 tokens of it)."""
    for i in range(len(ids)):
        for period in range(1, 33):
            end = i + max(3 * period, 12)
            if end <= len(ids) and ids[i:end - period] == ids[i + period:end]:
                return ids[:i + period]
    return ids


def is_held_out(prompt: str) -> bool:
    """One prompt in twenty, chosen by its text, never trained on."""
    return hashlib.sha256(prompt.strip().lower().encode()).digest()[0] < 13


def follow_own_distribution(target):
    """Drop the penalties and filters of the target's generation_config, which generate() would
    apply and dspine's loop does not; its end tokens stay."""
    from transformers import GenerationConfig
    old = target.generation_config
    target.generation_config = GenerationConfig(eos_token_id=old.eos_token_id,
                                                pad_token_id=old.pad_token_id)


@torch.no_grad()
def continue_batch(target, prompts: list, eos: list[int], temperature: float,
                   max_new_tokens: int) -> list[list[int]]:
    """The target's continuations of several prompts (token ids each), padded on the left.

    A continuation includes its end token where one came. Temperature 0 is greedy.
    """
    width, pad = max(map(len, prompts)), eos[0] if eos else 0
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])   # [rows, width]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampling = dict(temperature=temperature, top_k=0, top_p=1.0) if temperature > 0 else {}
    # transformers hands the head a strided view of the prompts' last states, for which torch
    # multiplies row by row, with a copy of the whole head for each
    packed = target.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0].contiguous(),))
    try:
        out = target.generate(
            input_ids=ids.to(target.device), attention_mask=mask.to(target.device),
            pad_token_id=pad, eos_token_id=eos or None, max_new_tokens=max_new_tokens,
            do_sample=temperature > 0, **sampling)
    finally:
        packed.remove()
    rows = []
    for row in out[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:stop + 1])
    return rows


def written_prompts(args, target, tokenizer, eos, rng: random.Random):
    """Batches of prompts that the target writes, without end: user turns after an opener."""
    if not tokenizer.chat_template:
        raise ValueError("this target has no chat template to write prompts with: "
                         "pass --text FILE or --prompts FILE")
    mark = "\x02"  # what stands before it in the laid-out prompt is the bare chat prefix
    prefix = tokenizer.apply_chat_template([{"role": "user", "content": mark}],
                                           tokenize=False).split(mark)[0]
    while True:
        openers = [rng.choice(OPENERS) if rng.random() < 0.5 else "" for _ in range(args.rows)]
        ids = [tokenizer(prefix + o, add_special_tokens=False).input_ids for o in openers]
        turns = continue_batch(target, ids, eos, rng.choice((0.8, 0.9, 1.0)), args.prompt_tokens)
        yield [o + tokenizer.decode(turn[:-1], skip_special_tokens=True)
               for o, turn in zip(openers, turns) if turn and turn[-1] in eos]  # finished ones


def prompt_batches(args, target, tokenizer, eos, rng: random.Random):
    """Batches of prompts: texts to lay out as a user turn, or token ids to continue (--text)."""
    if args.text:
        ids = tokenizer("".join(read_lines(args.text))).input_ids
        pieces = [ids[i:i + args.prompt_tokens] for i in range(0, len(ids), args.prompt_tokens)]
    elif args.prompts:
        pieces = read_prompts(args.prompts)
    else:
        yield from written_prompts(args, target, tokenizer, eos, rng)
    rng.shuffle(pieces)
    for i in range(0, len(pieces), args.rows):
        yield pieces[i:i + args.rows]


def answer_batch(args, target, prompts: dict, eos, rng: random.Random, batch: int) -> list[dict]:
    """Rows {ids, prompt_length, temperature, held_out, cut, batch}, all of one temperature.

    prompts: token ids -> what is_held_out decides by.
    """
    temperature = 0.0 if rng.random() < 0.6 else rng.uniform(0.7, 1.0)
    rows = []
    for (ids, text), answer in zip(prompts.items(), continue_batch(
            target, list(prompts), eos, temperature, args.answer_tokens)):
        kept = cut_loop(answer)
        rows.append({"ids": [*ids, *kept], "prompt_length": len(ids),
                     "temperature": round(temperature, 3), "held_out": is_held_out(text),
                     "cut": len(kept) < len(answer), "batch": batch})
    return rows


def answer_tokens(rows: list[dict]) -> int:
    return sum(len(r["ids"]) - r["prompt_length"] for r in rows)


def write_corpus(args, target, tokenizer, path: Path) -> list[dict]:
    """Append answered prompts to `path` until it holds --corpus-tokens answer tokens; all rows.

    A finite source of prompts may end before. Prompts that have an answer are skipped.
    """
    rows, eos = read_corpus(path, target), eos_ids(target, tokenizer)
    if answer_tokens(rows) >= args.corpus_tokens:
        return rows
    drop_cut_line(path)
    seen = {tuple(r["ids"][:r["prompt_length"]]) for r in rows}
    batch, idle = 1 + max((r.get("batch", 0) for r in rows), default=-1), 0
    rng = random.Random(f"{args.seed} {batch}")
    torch.manual_seed(args.seed * 1_000_003 + batch)
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or math.inf
    with open(path, "a", encoding="utf-8") as file, tqdm(
            total=args.corpus_tokens, initial=answer_tokens(rows), unit="tok", desc="corpus",
            disable=args.no_progress) as bar:
        for pieces in prompt_batches(args, target, tokenizer, eos, rng):
            fresh = {}
            for piece in pieces:
                if isinstance(piece, list):
                    fresh[tuple(piece)] = str(piece)
                elif len(piece.strip()) >= 8:
                    fresh[tuple(build_prompt(tokenizer, piece)[0].tolist())] = piece
            fresh = {ids: text for ids, text in fresh.items()
                     if ids not in seen and len(ids) + args.answer_tokens <= limit}
            idle = 0 if fresh else idle + 1
            if idle == 30 and not (args.text or args.prompts):
                raise ValueError("the target wrote no new prompt in 30 batches: "
                                 "raise --prompt-tokens, or pass --prompts FILE or --text FILE")
            if not fresh:
                continue
            seen |= set(fresh)
            new = answer_batch(args, target, fresh, eos, rng, batch)
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            bar.update(answer_tokens(new))
            rows, batch = rows + new, batch + 1
            if answer_tokens(rows) >= args.corpus_tokens:
                break
    cut = sum(r.get("cut", False) for r in rows) / max(1, len(rows))
    tqdm.write(f"corpus: {len(rows)} rows, {answer_tokens(rows)} answer tokens, "
               f"{cut:.1%} of rows cut where they loop")
    return rows


def rows_to_train_on(rows: list[dict], path: Path) -> list[dict]:
    """Those that are not held out and have a token to predict; ValueError where there are none."""
    usable = [r for r in rows if not r.get("held_out") and answer_tokens([r]) >= 2]
    if not usable:
        raise ValueError(f"{path} holds no row with two answer tokens: nothing to train on")
    return usable


# -------------------------------------------------------------------------------------------------
# Stage 2: the loss, fused (plain twin: dspine.chunked_losses)
# -------------------------------------------------------------------------------------------------


def top_k_grouped(x: torch.Tensor, k: int, group: int = 256) -> torch.Tensor:
    """Indices [C, k] of torch.topk(x [C, V], k), exact and faster.

    The k largest lie in the k groups with the largest maxima.
    """
    C, V = x.shape
    if V % group or V // group < k:
        return x.topk(k, dim=-1).indices
    groups = x.view(C, V // group, group)
    best = groups.amax(-1).topk(k, dim=-1, sorted=False).indices            # [C, k] groups
    inside = groups.gather(1, best[..., None].expand(-1, -1, group))        # [C, k, group]
    top = inside.flatten(1).topk(k, dim=-1).indices                         # [C, k]
    return best.gather(1, top // group) * group + top % group


def vocabulary_pass(logits, p, index, labels, known, weights, a):
    """ce, l1 [C] and their gradient at the logits [C, V], in few passes a compiler can fuse.

        A  = sum of Q where Q > P
        l1 = 2 (A - sum of P where Q > P)
        d (a ce + (1-a) l1) / d logits = a (Q - onehot(y)) + 2 (1-a) Q ([Q > P] - A)

    The onehot part is left to the caller. p [U, V] holds each target position once, index [C]
    points into it; the gradient is multiplied by weights [C]. Tokens not `known` [C], whose label
    can not be proposed, have no ce.
    """
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    q = (logits - top).exp()
    z = q.sum(-1, keepdim=True)
    q = q / z                                                               # [C, V]
    p = p[index]                                                            # [C, V]
    over = q > p
    A = (q * over).sum(-1)
    l1 = 2 * (A - (p * over).sum(-1))
    ce = (z.log() + top - logits.gather(1, labels[:, None]))[:, 0] * known
    grad = q * ((a * known - 2 * (1 - a) * A)[:, None] + over * (2 * (1 - a))) * weights[:, None]
    return ce, l1, grad


_vocabulary_pass = vocabulary_pass  # or its compiled form, see use_compiler


def use_compiler(device: str) -> bool:
    """Compile vocabulary_pass if this machine can; True if it did."""
    global _vocabulary_pass
    _vocabulary_pass = vocabulary_pass
    compilers = os.environ.get("CXX", "g++"), "g++", "clang++"
    if not device.startswith("cuda") and not any(map(shutil.which, compilers)):
        return False
    compiled = torch.compile(vocabulary_pass, dynamic=True)
    try:
        x, i = torch.randn(3, 64, device=device), torch.arange(3, device=device)
        compiled(x, x.softmax(-1), i, i, i > 0, torch.ones(3, device=device),
                 torch.tensor(0.5, device=device))
    except Exception as error:  # no working compiler, no Triton: many types
        tqdm.write(f"torch.compile is not usable here ({type(error).__name__}): "
                   "the loss runs uncompiled")
        return False
    _vocabulary_pass = compiled
    return True


class _FusedVocabulary(torch.autograd.Function):
    """ce and l1 against the whole vocabulary, `chunk` tokens at a time, gradient included."""

    @staticmethod
    def forward(ctx, hidden, labels, weights, teacher, index, lm_head, vocab, a, k, softcap,
                chunk):
        hidden, outputs, H = hidden.to(lm_head.dtype), [], lm_head.shape[1]
        head = lm_head if vocab is None else lm_head[vocab]                 # [V', H]
        (labels, known), at = columns(labels, vocab), torch.tensor(a, device=hidden.device)
        for part in torch.arange(len(labels), device=labels.device).split(chunk):
            y, yes, w = labels[part], known[part], weights[part]
            low, high = index[part[0]], index[part[-1]]
            here = index[part] - low
            t, log_z = teacher[low:high + 1].split((H, teacher.shape[1] - H), dim=1)
            t = t.to(head.dtype)                                            # each position once
            if log_z.shape[1]:
                p = (teacher_logits(t, head, softcap) - log_z).exp()        # [U, V']
            else:
                p = teacher_distribution(t, lm_head, softcap)
                p = p if vocab is None else p[:, vocab]
            logits = F.linear(hidden[part], head)                           # [C, V']
            ce, l1, grad = _vocabulary_pass(logits, p, here, y, yes, w, at)
            grad = grad.to(head.dtype) @ head - (a * w * yes)[:, None] * head[y]  # [C, H]
            top = top_k_grouped(logits, k)                                  # [C, K]
            outputs.append((grad, ce, l1, top, p[here[:, None], top]))
        gradient, ce, l1, candidates, p = (torch.cat(x) for x in zip(*outputs))
        candidates = candidates if vocab is None else vocab[candidates]
        ctx.save_for_backward(gradient)
        sums = torch.stack((ce @ weights, l1 @ weights))
        ctx.mark_non_differentiable(sums, candidates, p)
        return a * sums[0] + (1 - a) * sums[1], sums, candidates, p

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0] * grad, *[None] * 10


def fused_losses(hidden, refined, labels, weights, teacher, index, lm_head, c, a, softcap, chunk,
                 vocab=None):
    """Values and gradients of dspine.chunked_losses; the logits' gradient is written by hand.

    teacher may be [U, H+1], ending in log Z (TargetStates.log_z): P on the V' tokens of a draft
    vocabulary is then computed from their logits alone.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        loss, sums, candidates, p = _FusedVocabulary.apply(
            hidden, labels, weights, teacher, index, lm_head, vocab, a, c.top_k, softcap, chunk)
        ce, l1 = candidate_losses(refined, labels, candidates, p, lm_head, c)
    ce, l1 = ce @ weights, l1 @ weights
    sums = torch.cat((sums, torch.stack((ce, l1)).detach()))                # [4]
    return loss + a * ce + (1 - a) * l1, sums, candidates


def token_ce_alignment(features, labels, codes, vocab=None, chunk: int = 512) -> torch.Tensor:
    """Ablation: token cross-entropy of every layer's readout, softmax over the codes.

    features [L, tokens, r], labels [tokens], codes [V, r] -> [L, tokens]. With a draft vocabulary
    [V'] the softmax is over its codes; labels outside have none, as in ce.
    """
    codes = (codes if vocab is None else codes[vocab]).to(features.dtype)   # [V', r]
    at, known = columns(labels, vocab)
    scores = lambda f, y: F.cross_entropy(F.linear(f, codes).float(), y, reduction="none")
    return known * torch.stack([
        torch.cat([checkpoint(scores, f, y, use_reentrant=False)
                   for f, y in zip(layer.split(chunk), at.split(chunk))])
        for layer in features])


def no_alignment(features, labels, codes) -> torch.Tensor:
    """Ablation: features learn from the token losses alone: zeros [L, tokens]."""
    return features.new_zeros(features.shape[:2], dtype=torch.float32)


ALIGNMENTS = {"cosine": cosine_alignment, "token-ce": token_ce_alignment, "none": no_alignment}

# -------------------------------------------------------------------------------------------------
# Stage 2: training
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def warm_start(draft: DSpine, target):
    """Begin as the target's own last L layers reading its last tap.

    q_norm and k_norm, where the target has none, get the rms of its q and k (for a normalised
    input), fc the identity on the last tap, hidden_norm the mean of the copied input norms.
    Raises ValueError where the layers' names, shapes or activation differ.
    """
    c, decoder = draft.config, target.get_decoder()
    source = getattr(decoder, "layers", [])[-c.num_hidden_layers:]
    try:
        if (act := getattr(target.config.get_text_config(), "hidden_act", None)) != "silu":
            raise ValueError(f"activation {act}, not silu")
        for mine, theirs in zip(draft.layers, source, strict=True):
            state = {k: v.float().cpu() for k, v in theirs.state_dict().items()}
            x = torch.randn(256, c.hidden_size) * state["input_layernorm.weight"]
            for p in "qk":
                if f"self_attn.{p}_norm.weight" not in state:
                    out = x @ state[f"self_attn.{p}_proj.weight"].T         # [256, heads*D]
                    rms = out.unflatten(-1, (-1, c.head_dim)).square().mean().sqrt()
                    state[f"self_attn.{p}_norm.weight"] = rms.expand(c.head_dim)
            mine.load_state_dict(state)
        norms = [layer.input_layernorm.weight.float().cpu() for layer in source]
        draft.hidden_norm.weight.copy_(torch.stack(norms).mean(0))
        draft.norm.weight.copy_(decoder.norm.weight)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the layers of {type(target).__name__} have another form than the "
                         f"draft's: use --init random ({first_line(error)})") from None
    draft.fc.weight.zero_()
    draft.fc.weight[:, -c.hidden_size:] = torch.eye(c.hidden_size)


def fingerprint(target) -> str:
    """Tells one target from another of the same shape."""
    weights = torch.stack([p.detach().double().sum().cpu() for p in target.parameters()])
    return f"{type(target).__name__} {target.dtype} {weights.sum().item():.12g}"


def softcap(target) -> float | None:
    """The cap that Gemma puts on its logits; None elsewhere."""
    return getattr(target.config.get_text_config(), "final_logit_softcapping", None)


@torch.no_grad()
def check_head(target):
    """ValueError where the target's logits are not head . last hidden state: P would be wrong."""
    ids = torch.arange(8, device=target.device)[None]
    last = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    found = teacher_distribution(last, target.get_output_embeddings().weight, softcap(target))
    true = target(input_ids=ids, use_cache=False).logits[0].float().softmax(-1)
    if (difference := float((found - true).abs().sum(-1).mean())) > 0.05:
        raise ValueError(f"{type(target).__name__} scales or shifts its logits beside the head "
                         f"(L1 distance {difference:.2f}): training does not support that")


def frequent_tokens(rows: list[dict], count: int, vocab_size: int) -> torch.Tensor:
    """The `count` token ids that answers hold most often, a draft vocabulary."""
    answers = [torch.tensor(r["ids"][r["prompt_length"]:], dtype=torch.long) for r in rows]
    return torch.cat(answers).bincount(minlength=vocab_size).argsort(
        descending=True, stable=True)[:count]


class TargetStates:
    """Taps [1, S, n*H] and last hidden state [1, S, H] of each row, computed once, kept on disk.

    So is log Z, where a draft vocabulary asks for it. Where they exceed `limit_gb` or the free
    disk, nothing is stored and every visit runs the target again.
    """

    def __init__(self, target, rows: list[dict], layer_ids: list[int], path: Path,
                 limit_gb: float):
        self.decoder, self.rows, self.taps = target.get_decoder(), rows, layer_ids
        self.head, self.softcap = target.get_output_embeddings().weight.detach(), softcap(target)
        self.device, self.hidden = target.device, target.config.get_text_config().hidden_size
        self.ends = torch.tensor([0] + [len(r["ids"]) for r in rows]).cumsum(0).tolist()
        self.data = self.done = None
        width = (len(layer_ids) + 1) * self.hidden
        key = json.dumps([fingerprint(target), layer_ids, [r["ids"] for r in rows]])
        path = path.with_suffix("." + hashlib.sha256(key.encode()).hexdigest()[:12])
        free = shutil.disk_usage(path.parent).free + (path.stat().st_size if path.exists() else 0)
        size = self.ends[-1] * width
        if size * target.dtype.itemsize <= min(limit_gb * 1e9, free):
            if not path.exists():  # an empty file will stand in: nothing of it is done
                for beside in ("done", "log_z"):
                    Path(f"{path}.{beside}").unlink(missing_ok=True)
            mapped = lambda name, dtype, size: torch.from_file(name, True, size, dtype=dtype)
            self.data = mapped(str(path), target.dtype, size).view(-1, width)
            self.done = mapped(f"{path}.done", torch.uint8, len(rows))
            self.log_zs = mapped(f"{path}.log_z", torch.float32, self.ends[-1])

    @torch.no_grad()
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = None if self.data is None else self.data[self.ends[i]:self.ends[i + 1]]
        if kept is not None and self.done[i]:
            states = kept.to(self.device)                                   # [S, (n+1)*H]
        else:
            ids = torch.tensor([self.rows[i]["ids"]], device=self.device)
            out = self.decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
            taps = [out.hidden_states[l + 1][0] for l in self.taps]
            states = torch.cat([*taps, out.last_hidden_state[0]], dim=-1)
            if kept is not None:
                kept.copy_(states)
                self.done[i] = 1
        return states[None, :, :-self.hidden], states[None, :, -self.hidden:]

    @torch.no_grad()
    def log_z(self, i: int, last: torch.Tensor) -> torch.Tensor:
        """log sum_v exp(logit_v) [S] of row i with last hidden states [1, S, H]; kept like them."""
        kept = None if self.data is None else self.log_zs[self.ends[i]:self.ends[i + 1]]
        if kept is not None and kept.all():                                 # 0: not yet computed
            return kept.to(self.device)
        log_z = torch.cat([teacher_logits(part, self.head, self.softcap).logsumexp(-1)
                           for part in last[0].split(256)])
        if kept is not None:
            kept.copy_(log_z)
        return log_z


class Trainer:
    """Model, optimizer and counters of a run: everything a checkpoint holds."""

    losses = staticmethod(fused_losses)

    def __init__(self, args, draft: DSpine, target, rows: list[dict], out: Path,
                 states: Path | None = None):
        """Checkpoint and log go to `out`; the target's states too, or to `states`, for sharing."""
        self.args, self.draft, self.target, self.rows, self.out = args, draft, target, rows, out
        self.device = target.device
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if args.batch_rows < self.world:
            raise ValueError(f"--batch-rows {args.batch_rows}: give each of the {self.world} "
                             "processes at least one row")
        self.model = draft
        if self.world > 1:
            unused = draft.config.inject != "every" or args.supervise == "none"
            self.model = torch.nn.parallel.DistributedDataParallel(
                draft, find_unused_parameters=unused)
        self.states = TargetStates(target, rows, draft.config.target_layer_ids,
                                   (states or out) / f"states{self.rank}", args.cache_gb)
        self.embed = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()
        self.softcap = softcap(target)
        self.alignment = ALIGNMENTS[args.supervise]
        if args.supervise == "token-ce" and draft.draft_vocab is not None:
            self.alignment = functools.partial(token_ce_alignment, vocab=draft.draft_vocab)
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                           weight_decay=0.0)
        self.step = self.tokens = 0
        self.seconds = 0.0

    # -- schedules --------------------------------------------------------------------------------

    def progress(self) -> float:
        """Share of the budget that is spent, 0 .. 1."""
        a = self.args
        spent = ((self.step, a.steps), (self.tokens, a.tokens), (self.seconds / 60, a.minutes))
        return min(1.0, max(have / budget if budget else 0 for have, budget in spent))

    def learning_rate(self) -> float:
        """Linear warm-up, times a cosine to 0 over the whole budget."""
        a, progress = self.args, self.progress()
        warmup = min(1.0, (progress + 0.002) / a.warmup) if a.warmup else 1.0
        return a.lr * warmup * (0.5 + 0.5 * math.cos(math.pi * progress))

    def ce_weight(self) -> float:
        """Linear from --ce-start to the draft's ce_weight at --ce-ramp, then constant."""
        start, end = self.args.ce_start, self.draft.config.ce_weight
        return max(end, start + (end - start) * self.progress() / self.args.ce_ramp)

    # -- one step ---------------------------------------------------------------------------------

    def row_ids(self) -> list[int]:
        """This step's rows, from a shuffle that depends on the seed and the epoch alone."""
        n, count = len(self.rows), self.args.batch_rows
        shuffle = lambda epoch: torch.randperm(
            n, generator=torch.Generator().manual_seed(self.args.seed * 7919 + epoch))
        at = range(self.step * count, (self.step + 1) * count)
        return [int(shuffle(i // n)[i % n]) for i in at]

    def my_rows(self) -> list[int]:
        """This process's share of them: dealt out by length, there and back, so that no process
        waits long for another."""
        rows = sorted(self.row_ids(), key=lambda i: len(self.rows[i]["ids"]))
        there, back, turn = self.rank, 2 * self.world - 1 - self.rank, 2 * self.world
        return rows[there::turn] + rows[back::turn]

    def blocks(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What row i trains on at this step.

        Anchors [1, A], supervised slots [1, A, T], and the blocks [1, A] whose predecessors are
        replaced.
        """
        a, c, row = self.args, self.draft.config, self.rows[i]
        generator = torch.Generator().manual_seed(hash((a.seed, self.step, i)) & 0x7FFFFFFF)
        mask = (torch.arange(len(row["ids"])) >= row["prompt_length"])[None]  # [1, S]
        anchors, valid = sample_anchors(mask, a.anchors, generator)
        supervised = supervised_slots(mask, anchors, valid, c.block_size)
        rate = replacement_rate(self.progress(), c)
        replace = torch.rand(anchors.shape, generator=generator) < rate
        return tuple(x.to(self.device) for x in (anchors, supervised, replace))

    def teacher(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        """What self.losses reads P of row i from: hidden [1, S, H], with a draft vocabulary log Z
        behind it."""
        if self.draft.draft_vocab is None:
            return hidden
        return torch.cat((hidden, self.states.log_z(i, hidden)[None, :, None]), dim=-1)

    def forward(self, rows: list[int], plans: list) -> list:
        """(loss, terms) of each row; the rows run as one padded batch."""
        c, a = self.draft.config, self.args
        pad = lambda xs: pad_sequence([x[0] for x in xs], batch_first=True)
        taps, last = zip(*(self.states[i] for i in rows))
        taps = pad(taps)                                                    # [N, S, n*H]
        ids = pad([torch.tensor([self.rows[i]["ids"]], device=self.device) for i in rows])
        anchors, supervised, replace = (pad(x) for x in zip(*plans))
        half = self.target.dtype == torch.bfloat16
        results = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            blocks = gather_blocks(ids, anchors, c.block_size)              # [N, A, B]
            out = self.model(blocks, taps, anchors, self.embed, replace)
            for i, hidden in enumerate(last):                               # [1, S of row i, H]
                n = slice(i, i + 1)
                row = DraftOutput(out.hidden_states[n], out.pre_injection[n],
                                  out.layer_features[:, n])
                results.append(objective(
                    self.draft, row, ids[n, :hidden.shape[1]], anchors[n], supervised[n],
                    self.teacher(rows[i], hidden), self.head, beta=alignment_beta(self.step, c),
                    ce_weight=self.ce_weight(), softcap=self.softcap, chunk=a.chunk,
                    losses=self.losses, alignment=self.alignment))
        return results

    def sum_over_processes(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world > 1:
            sums = sums.to(self.device)
            dist.all_reduce(sums)
        return sums.tolist()

    def train_step(self) -> list[dict]:
        """One optimizer step; the terms of this process's rows.

        The batch's loss is the mean over its supervised tokens, weighted by w_t, however the rows
        are spread over micro-batches and processes. FloatingPointError where it is not finite.
        """
        a, B, terms = self.args, self.draft.config.block_size, []
        mine = self.my_rows()
        plans = [self.blocks(i) for i in mine]
        decay = torch.exp(-torch.arange(B - 1) / 7)                         # w_t
        weights = torch.stack([(s.cpu() * decay).sum() for _, s, _ in plans])  # of each row
        tokens = sum(int(s.sum()) for _, s, _ in plans)
        total, tokens = self.sum_over_processes(weights.sum().item(), tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        for start in range(0, len(mine), a.micro_rows):
            part = slice(start, start + a.micro_rows)
            wait = self.world > 1 and part.stop < len(mine)  # exchange gradients once, at last
            with self.model.no_sync() if wait else contextlib.nullcontext():
                results = self.forward(mine[part], plans[part])
                loss = sum(l * w for (l, _), w in zip(results, weights[part].tolist()))
                loss = loss / max(total, 1e-9)
                self.check_finite(loss, "loss")
                (loss * self.world).backward()  # DDP averages, we sum
            terms += [t for _, t in results]
        if total > 0:
            norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            self.check_finite(norm, "gradient")
            self.optimizer.step()
        self.step += 1
        self.tokens += int(tokens)
        return terms

    def check_finite(self, value: torch.Tensor, what: str):
        if not torch.isfinite(value):
            raise FloatingPointError(f"the {what} is not finite at step {self.step}: lower --lr")

    # -- checkpoints ------------------------------------------------------------------------------

    def made_for(self) -> str:
        vocab = self.draft.draft_vocab
        return json.dumps([self.draft.config.to_dict(), fingerprint(self.target),
                           self.args.supervise, None if vocab is None else len(vocab)])

    def save(self, path: Path):
        """Write the checkpoint under a temporary name, then rename. OSError where it can not."""
        state = {"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
                 "transfer": [self.draft.transfer_mean, self.draft.transfer_directions],
                 "made_for": self.made_for()}
        with replacing(path) as part:
            try:
                torch.save(state, part)
            except RuntimeError as error:  # what torch makes of a full disk
                raise OSError(f"{path} can not be written, is the disk full? "
                              f"({first_line(error)})") from None

    def load(self, path: Path):
        """Go on from a checkpoint; ValueError where it belongs to another draft."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["made_for"] != self.made_for():
            raise ValueError(f"{path} was trained with other sizes, options or another target: "
                             "use another --out or remove it")
        self.draft.load_state_dict(state["draft"])
        self.draft.transfer_mean, self.draft.transfer_directions = state["transfer"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = (state[k] for k in ("step", "tokens", "seconds"))


def mean_terms(terms: list[dict]) -> dict:
    """Weighted means of the objective's terms over rows; empty if nothing was supervised."""
    terms = [t for t in terms if t["weight"] > 0]
    if not terms:
        return {}
    weights = [t["weight"] for t in terms]
    mean = lambda values: round(sum(v * w for v, w in zip(values, weights)) / sum(weights), 4)
    columns = {k: [t[k] for t in terms] for k in terms[0] if k not in ("weight", "tokens")}
    return {k: [mean(xs) for xs in zip(*values)] if isinstance(values[0], list) else mean(values)
            for k, values in columns.items()}


def train(trainer: Trainer, stop_at: int | None = None):
    """Run to the end of the budget (or to step `stop_at`), saving as it goes."""
    a, path, main = trainer.args, trainer.out / "checkpoint.pt", trainer.rank == 0
    if path.exists():
        trainer.load(path)
    if main:
        drop_steps_after(trainer.out / "log.jsonl", trainer.step)
    began, saved, start_tokens = time.time(), time.time(), trainer.tokens
    with open(trainer.out / "log.jsonl", "a", encoding="utf-8") as log, tqdm(
            total=1000, desc="train", disable=a.no_progress or not main,
            bar_format="{desc} {percentage:3.1f}% {elapsed}<{remaining} {postfix}") as bar:
        while trainer.progress() < 1 and trainer.step != stop_at:
            clock = time.time()
            terms = mean_terms(trainer.train_step())
            # the mean over processes, so that all agree on the schedules and on the end
            trainer.seconds += trainer.sum_over_processes(time.time() - clock)[0] / trainer.world
            if not terms:
                tqdm.write(f"step {trainer.step}: nothing supervised in these rows, skipped")
                continue
            if not main:
                continue
            rate = (trainer.tokens - start_tokens) / max(1e-9, time.time() - began)
            bar.n = round(1000 * trainer.progress())
            bar.set_postfix_str(
                f"step {trainer.step} {rate:.0f} tok/s ce {terms['ce']:.2f} l1 {terms['l1']:.2f} "
                f"top1 {terms['top1_by_slot'][0]:.2f}")
            log.write(json.dumps({
                "step": trainer.step, "tokens": trainer.tokens,
                "seconds": round(trainer.seconds, 1), "tokens_per_second": round(rate),
                "lr": trainer.optimizer.param_groups[0]["lr"], **terms}) + "\n")
            if time.time() - saved > a.save_seconds:
                log.flush()
                trainer.save(path)
                saved = time.time()
    if main:
        trainer.save(path)


# -------------------------------------------------------------------------------------------------
# Stage 3: evaluation by decoding
# -------------------------------------------------------------------------------------------------


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text: loops flatter a draft."""
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def decode_in_turn(methods: dict, ids: torch.Tensor) -> dict:
    """One prompt by every method, one right after the other: name -> counts and seconds.

    methods: name -> callable(input_ids [1, S]) -> (tokens, Statistics).
    """
    records = {}
    for name, decode in methods.items():
        tokens, s = decode(ids)
        records[name] = {
            "accept_lengths": s.accept_lengths, "new_tokens": s.new_tokens,
            "decode_seconds": s.draft_seconds + s.verify_seconds,
            "draft_seconds": s.draft_seconds, "prefill_seconds": s.prefill_seconds,
            "repetition": repetition(tokens), "emitted_by": s.emitted_by, "tokens": tokens}
    return records


def summarise(runs: list[dict]) -> dict:
    """A table over prompts from records of decode_in_turn; ratios refer to the first method.

    acceptance_length: emitted tokens after the first, over target forwards. tokens_per_second: of
    those tokens after prefill, median over prompts. ratio: median of the per-prompt ratios, whose
    two sides are of the same turn, so that a slowly drifting machine cancels. draft_milliseconds:
    spent proposing for a target forward, median over prompts.
    """
    median = lambda xs: statistics.median(xs) if xs else float("nan")
    speed = lambda r: sum(r["accept_lengths"]) / max(1e-9, r["decode_seconds"])
    bases, table = [next(iter(run.values())) for run in runs], {}
    for name in runs[0]:
        records = [run[name] for run in runs]
        lengths = [n for r in records for n in r["accept_lengths"]]
        pairs = [(r, base) for r, base in zip(records, bases)
                 if r["accept_lengths"] and base["accept_lengths"]]
        table[name] = {
            "acceptance_length": round(sum(lengths) / max(1, len(lengths)), 3),
            "tokens_per_second": round(median([speed(r) for r, _ in pairs]), 2),
            "ratio": round(median([speed(r) / speed(base) for r, base in pairs]), 3),
            "draft_milliseconds": round(median(
                [1000 * r["draft_seconds"] / len(r["accept_lengths"]) for r, _ in pairs]), 2),
            "prefill_seconds": round(median([r["prefill_seconds"] for r in records]), 3),
            "repetition": round(sum(r["repetition"] for r in records) / len(records), 3),
            "new_tokens": sum(r["new_tokens"] for r in records),
            "histogram": {n: lengths.count(n) for n in sorted(set(lengths))}}
    return table


def decoding_methods(target, draft, eos, max_new_tokens: int, temperature: float,
                     seed: int = 0, block_size: int | str | None = None) -> dict:
    """plain, DSpine, copying alone and both, with the same budget and seed.

    Blocks are those of generate.py: adaptive on a CPU unless block_size is given.
    """
    options = dict(max_new_tokens=max_new_tokens, temperature=temperature, eos_token_ids=eos)
    block_size = default_block_size(target, block_size)
    seeded = lambda: torch.Generator(target.device).manual_seed(seed)
    run = lambda draft, copy: lambda ids: collect(
        generate(target, draft, ids, generator=seeded(), copy=copy, block_size=block_size,
                 **options))
    plain = lambda ids: collect(generate_plain(target, ids, generator=seeded(), **options))
    return {"plain": plain, "DSpine": run(draft, False), "copy": run(None, True),
            "DSpine + copy": run(draft, True)}


def evaluate(target, draft: DSpine, prompts: list[torch.Tensor], eos, max_new_tokens: int,
             seed: int = 0, progress: bool = True) -> dict:
    """Tables of `summarise` at temperature 0 and 1: plain decoding beside DSpine."""
    tables = {}
    for temperature in (0.0, 1.0):
        methods = decoding_methods(target, draft, eos, max_new_tokens, temperature, seed)
        methods = {name: methods[name] for name in ("plain", "DSpine")}
        bar = tqdm(prompts, desc="decode", disable=not progress)
        tables[f"temperature {temperature:g}"] = summarise(
            [decode_in_turn(methods, ids) for ids in bar])
    return tables


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description="Train a DSpine draft: corpus, training, evaluation, export.",
        formatter_class=HelpFormatter)
    add = p.add_argument
    add("--target", help="Hub id, local folder or .gguf file (default: SmolLM2-135M-Instruct)")
    add("--out", default="runs/draft", help="folder for everything, in the end also config.json "
        "and model.safetensors")
    add("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the target and of autocast; the "
        "draft's master weights are float32 (default: bfloat16 on CUDA and on CPUs with AMX or "
        "AVX512-BF16, else float32)")
    add("--seed", type=int, default=0, help="of corpus, initialisation, anchors and order")
    add("--no-progress", action="store_true", help="no bars")

    add = p.add_argument_group("stage 1, the corpus").add_argument
    add("--prompts", help="prompts to answer, JSON lines with turns, messages or prompt; "
        "or text, one a line (default: the target writes them)")
    add("--text", help="for a base model: a text file whose pieces it continues")
    add("--corpus-tokens", type=int, default=400_000, help="answer tokens to collect")
    add("--answer-tokens", type=int, default=256, help="longest answer")
    add("--prompt-tokens", type=int, default=96,
        help="longest prompt the target writes; length of --text pieces")
    add("--rows", type=int, default=48, help="rows a batch")
    add_training_options(p)

    add = p.add_argument_group("stage 3, evaluation and export").add_argument
    add("--eval-prompts", type=int, default=24, help="held-out prompts to decode; 0: none")
    add("--eval-tokens", type=int, default=128, help="new tokens each")
    add("--slim", action="store_true",
        help="export without the token codes (rebuilt from the target at load)")
    args = p.parse_args(argv)
    if not (args.steps or args.tokens or args.minutes):
        args.minutes = 60
    return args


def add_training_options(p: argparse.ArgumentParser):
    add = p.add_argument_group("the draft").add_argument
    add("--init", default="target", help="target (its last layers), random, or a folder with a "
        "draft, whose sizes and form are then kept")
    add("--layers", type=int, default=3, help="draft layers L")
    add("--block-size", type=int, default=8, help="B")
    add("--rank", type=int, default=256, help="r, rank of the transfer space")
    add("--message", type=int, default=192, help="m, message size")
    add("--top-k", type=int, default=16, help="K, candidates a position")
    add("--draft-vocab", type=int, default=0, help="propose only the N tokens that answers hold "
        "most often: faster for small targets, needs --slim; 0: all")
    add("--mask-token", type=int, help="id of the mask token (default: the target's last special "
        "token that is not in use)")
    add("--inject", choices=("every", "last", "none"), default="every",
        help="ablation: layers that inject")
    add("--attention", choices=("causal", "bidirectional"), default="causal",
        help="ablation: inside the block")
    add("--select", choices=("cache", "argmax"), default="cache",
        help="ablation: how tokens are chosen")

    add = p.add_argument_group("stage 2, training").add_argument
    add("--steps", type=int, default=0, help="budget in optimizer steps; 0: not limited by it")
    add("--tokens", type=int, default=0, help="... in draft tokens")
    add("--minutes", type=float, default=0, help="... in minutes (60 if no budget is given)")
    add("--lr", type=float, default=1.5e-3, help="peak learning rate of AdamW; cosine to 0")
    add("--warmup", type=float, default=0.04, help="share of the budget over which it rises")
    add("--batch-rows", type=int, default=2, help="rows an optimizer step, over all processes")
    add("--micro-rows", type=int, default=1,
        help="rows a forward; more for a GPU, 1 is fastest on a CPU")
    add("--anchors", type=int, default=128, help="blocks a row")
    add("--chunk", type=int, default=256, help="tokens whose logits are alive at once")
    add("--ce-start", type=float, default=0.5, help="weight of ce at the start")
    add("--ce-end", type=float, default=0.1, help="weight of ce at the end (published: 0.1)")
    add("--ce-ramp", type=float, default=0.6, help="share of the budget until the end is reached")
    add("--supervise", choices=tuple(ALIGNMENTS), default="cosine",
        help="ablation: what the layers' features learn")
    add("--cache-gb", type=float, default=8,
        help="disk for target states; beyond it they are computed anew each time")
    add("--save-seconds", type=float, default=120, help="between checkpoints")
    add("--no-compile", action="store_true", help="do not compile the loss")


def check_args(args: argparse.Namespace):
    """ValueError or OSError for numbers and files that no stage could work with.

    The draft's sizes are left to DSpineConfig.
    """
    bounds = dict.fromkeys(("corpus_tokens", "answer_tokens", "prompt_tokens", "rows",
                            "batch_rows", "micro_rows", "anchors", "chunk", "eval_tokens"), 1)
    bounds |= dict.fromkeys(("steps", "tokens", "minutes", "eval_prompts", "lr", "warmup",
                             "draft_vocab"), 0)
    bounds |= {"ce_ramp": 1e-6, "ce_start": 0, "ce_end": 0}
    for name, least in bounds.items():
        if not getattr(args, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: "
                             f"must be at least {least}")
    for name in ("ce_start", "ce_end"):
        if getattr(args, name) > 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at most 1")
    if 0 < args.draft_vocab < args.top_k:
        raise ValueError(f"--draft-vocab {args.draft_vocab}: must be at least --top-k {args.top_k}")
    if args.draft_vocab and not args.slim:
        raise ValueError(f"--draft-vocab {args.draft_vocab}: only the slim layout can hold one, "
                         "add --slim")
    if args.prompts:
        read_prompts(args.prompts)
    if args.text:
        read_lines(args.text)


def mask_token(tokenizer, eos: list[int]) -> int:
    """A special token that text never holds: the last that is no start, end or padding token."""
    used = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    used = set(eos).union(*map(token_id_set, used))
    template = tokenizer.chat_template or ""
    free = [i for i, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.special and i not in used and token.content not in template]
    if not free:
        raise ValueError("this tokenizer has no spare special token: choose a token id that text "
                         "never holds with --mask-token")
    return free[-1]


def make_draft(args, target, tokenizer) -> DSpine:
    """The draft that training starts from, float32, on the target's device.

    It decodes one block here: whatever makes this target unfit shows now, not after hours. Raises
    ValueError.
    """
    torch.manual_seed(args.seed)
    check_head(target)
    if args.init in ("target", "random"):
        mask = args.mask_token
        if mask is None:
            mask = mask_token(tokenizer, eos_ids(target, tokenizer))
        try:
            config = DSpineConfig.for_target(
                target, args.layers, block_size=args.block_size, transfer_rank=args.rank,
                message_size=args.message, top_k=args.top_k, ce_weight=args.ce_end,
                inject=args.inject, attention=args.attention, select=args.select,
                mask_token_id=mask)
        except AttributeError as error:  # a config without the usual sizes
            raise ValueError(f"no draft fits {type(target).__name__}: {error}") from None
        draft = DSpine.for_target(config, target)
        if args.init == "target":
            warm_start(draft, target)
    elif Path(args.init).is_dir():
        draft = load_draft(args.init, target)
        for name in ("inject", "attention", "select"):
            asked, has = getattr(args, name), getattr(draft.config, name)
            if asked not in (has, getattr(DSpineConfig, name)):  # the latter: nothing was asked
                raise ValueError(f"--{name} {asked}: the draft in {args.init} has {has}")
        draft.config.ce_weight = args.ce_end
        if draft.draft_vocab is not None and not args.slim:
            raise ValueError(f"--init {args.init}: it has a draft vocabulary, which only the slim "
                             "layout can hold: add --slim")
    else:
        raise ValueError(f"--init {args.init}: neither target, random nor a folder with a draft")
    if args.slim and draft.transfer_directions is None:
        raise ValueError(f"--slim: the draft in {args.init} does not hold what its token codes "
                         "are rebuilt from; leave --slim out")
    draft = draft.to(target.device).float().requires_grad_(True).train()
    ids = torch.tensor([[draft.config.mask_token_id]])
    collect(generate(target, draft, ids, max_new_tokens=draft.config.block_size + 1))
    return draft


def join_processes(name: str | None) -> tuple[str, bool]:
    """(device of this process, whether it is the one that writes), under torchrun or alone."""
    device = default_device(name)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return device, True
    if device == "cuda":
        device = default_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    # the others wait for process 0 to write the corpus: hours, more than the default timeout
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo",
                            timeout=timedelta(days=7))
    return device, dist.get_rank() == 0


def export(args, target, draft: DSpine, rows: list[dict], eos: list[int], out: Path):
    """Stage 3: model.safetensors and config.json, then evaluation.json and its lines."""
    draft = draft.to(target.dtype).requires_grad_(False).eval()
    draft.save_pretrained(out, slim=args.slim)
    held_out = [r for r in rows if r.get("held_out")][:args.eval_prompts]
    if args.eval_prompts and not held_out:
        print("no evaluation: so small a corpus holds no held-out prompt")
    if not held_out:
        return
    prompts = [torch.tensor([r["ids"][:r["prompt_length"]]]) for r in held_out]
    tables = evaluate(target, draft, prompts, eos, args.eval_tokens, args.seed,
                      not args.no_progress)
    write_json(out / "evaluation.json", tables)
    for name, table in tables.items():
        for method, t in table.items():
            print(f"{name}  {method:7s} acceptance {t['acceptance_length']:.2f}  "
                  f"{t['tokens_per_second']:.1f} tokens/s  ratio {t['ratio']:.2f}  "
                  f"repetition {t['repetition']:.2f}")


def run(args) -> int:
    check_args(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    device, main = join_processes(args.device)
    dtype = args.dtype and getattr(torch, args.dtype)
    target, tokenizer = load_target(args.target, dtype, device)
    follow_own_distribution(target)
    draft = make_draft(args, target, tokenizer)

    path = out / "corpus.jsonl"
    rows = write_corpus(args, target, tokenizer, path) if main else []
    if dist.is_initialized():
        dist.barrier()
        rows = read_corpus(path, target)
    usable = rows_to_train_on(rows, path)
    if args.draft_vocab:
        draft.set_draft_vocab(frequent_tokens(usable, args.draft_vocab, draft.config.vocab_size))

    if not args.no_compile:
        use_compiler(device)
    trainer = Trainer(args, draft, target, usable, out)
    if main:
        millions = sum(p.numel() for p in draft.parameters()) / 1e6
        tqdm.write(f"{millions:.1f} M parameters, {len(usable)} rows")
    train(trainer)
    if main:
        export(args, target, draft, rows, eos_ids(target, tokenizer), out)
        print(f"done: python generate.py --draft {out} --prompt ...")
    if dist.is_initialized():
        dist.barrier()  # torchrun ends all when one ends badly: none leaves before the export
    return 0


def main(argv=None) -> int:
    try:
        return guarded("train_small.py", run, parse_args(argv),
                       "stopped; the same command goes on from the last checkpoint")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a thread of Gloo that still holds a Python object
        sys.stdout.flush()                   # can abort the interpreter's farewell: skip it
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
