"""Train a DSpine draft for any target, from nothing:  python train_small.py

Three stages, each resumable and skipped when its result exists in --out:
    1. corpus.jsonl      the target writes prompts and answers them itself (no data set is needed)
    2. checkpoint.pt     training; objective, schedules, anchors and masks are those of dspine.py
    3. evaluation.json   held-out prompts decoded for real, then the export generate.py loads

Several GPUs or processes:  torchrun --nproc_per_node N train_small.py ...

Where this leaves the published recipe, because a laptop has no 512 anchors times 8 GPUs:
    - the draft starts as a copy of the target's last layers (--init random: from noise);
    - the weight of ce starts at --ce-start and falls to the published 0.1 (l1 alone has no gradient
      where the draft puts no mass, so a cold start barely learns from it);
    - stopgrad(ce) * alignment is formed per row, not per batch, so that accumulating 4 x 1 rows is
      exactly a batch of 4.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from dspine import (DSpine, DSpineConfig, DraftOutput, alignment_beta, candidate_losses, collect, cosine_alignment,
                    gather_blocks, generate, generate_plain, objective, replacement_rate, sample_anchors,
                    supervised_slots, teacher_distribution, token_id_set)
from generate import build_prompt, default_device, eos_ids, load_draft, load_target

# Openers that steer what the target asks; the empty one lets it choose, half of the time.
OPENERS = ("A train", "If a", "A store sells", "Tom has", "How many", "Solve", "What is", "Find the", "Compute", "Prove that",
           "Write a Python function", "Write a function that", "def ", "Implement", "Fix this code", "You are given an array",
           "Explain", "Explain why", "Explain how", "Describe", "Compare", "Why", "How do I", "How does", "What are the",
           "Rewrite", "Edit the following", "Translate", "Summarize", "Classify", "Write a short story", "Write an email",
           "Write a", "Create a list of", "List", "Give me", "Plan", "Suggest", "Design", "Imagine you are", "Can you", "Please")

# ---------------------------------------------------------------------------------------------
# Stage 1: a corpus from the target itself
# ---------------------------------------------------------------------------------------------


def cut_loop(ids: list[int]) -> list[int]:
    """Cut where a pattern of up to 32 tokens comes for the third time in a row (at least 12 tokens)."""
    for i in range(len(ids)):
        for period in range(1, 33):
            end = i + max(3 * period, 12)
            if end <= len(ids) and ids[i:end - period] == ids[i + period:end]:
                return ids[:i + period]
    return ids


def is_held_out(prompt: str) -> bool:
    """One prompt in twenty, chosen by its text, never trained on."""
    return hashlib.sha256(prompt.strip().lower().encode()).digest()[0] < 13


@torch.no_grad()
def continue_batch(target, prompts: list[list[int]], eos: list[int], **sampling) -> list[list[int]]:
    """The target's continuations of several prompts, the end token included where it came."""
    width, pad = max(map(len, prompts)), eos[0] if eos else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    out = target.generate(input_ids=ids, attention_mask=mask, pad_token_id=pad, eos_token_id=eos or None, **sampling)
    rows = []
    for row in out[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in eos), None)
        rows.append(row if stop is None else row[:stop + 1])
    return rows


def sampling_options(temperature: float, max_new_tokens: int) -> dict:
    return dict(do_sample=temperature > 0, max_new_tokens=max_new_tokens,
                **(dict(temperature=temperature, top_k=0, top_p=1.0) if temperature > 0 else {}))


def read_prompts(path: str) -> list[str]:
    """First user turns of a file: JSON lines with `turns`, `messages` or `prompt`, or plain text, one a line."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(line.strip())
            continue
        row = json.loads(line)
        users = [m["content"] for m in row.get("messages", ()) if m["role"] == "user"]
        text = (row.get("turns") or users or [row.get("prompt")])[0]
        if not text:
            raise ValueError(f"{path}, line {number}: neither turns, messages nor prompt")
        prompts.append(text)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def prompt_batches(args, target, tokenizer, eos, rng: random.Random):
    """Endless or finite batches of prompts, as texts (chat) or token lists (raw text)."""
    if args.text:
        ids = tokenizer(Path(args.text).read_text(encoding="utf-8")).input_ids
        pieces = [ids[i:i + args.prompt_tokens] for i in range(0, len(ids), args.prompt_tokens)]
    elif args.prompts:
        pieces = read_prompts(args.prompts)
    elif tokenizer.chat_template:
        mark = "\x02"  # what stands before it in the laid-out prompt is the bare chat prefix
        prefix = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).split(mark)[0]
        while True:
            opened = [rng.choice(OPENERS) if rng.random() < 0.5 else "" for _ in range(args.rows)]
            tokens = [tokenizer(prefix + o, add_special_tokens=False).input_ids for o in opened]
            turns = continue_batch(target, tokens, eos, **sampling_options(rng.choice((0.8, 0.9, 1.0)), args.prompt_tokens))
            yield [o + tokenizer.decode(t[:-1], skip_special_tokens=True) for o, t in zip(opened, turns)
                   if t and t[-1] in eos]  # an unfinished turn is no prompt
    else:
        raise ValueError("this target has no chat template to write prompts with: pass --text FILE or --prompts FILE")
    rng.shuffle(pieces)
    for i in range(0, len(pieces), args.rows):
        yield pieces[i:i + args.rows]


def read_rows(path: Path) -> list[dict]:
    """The complete rows of a corpus; a line cut short by a kill is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_corpus(args, target, tokenizer, path: Path) -> list[dict]:
    """Append rows {ids, prompt_length, temperature, held_out, cut, batch} until --corpus-tokens answers are there."""
    rows, eos = read_rows(path), eos_ids(target, tokenizer)
    have = sum(len(r["ids"]) - r["prompt_length"] for r in rows)
    if have >= args.corpus_tokens:
        return rows
    part = path.with_suffix(".part")  # drops an unfinished last line before appending
    part.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    os.replace(part, path)
    seen = {tuple(r["ids"][:r["prompt_length"]]) for r in rows}
    batch = 1 + max((r["batch"] for r in rows), default=-1)
    rng = random.Random(f"{args.seed} {batch}")
    torch.manual_seed(args.seed * 1_000_003 + batch)
    cut = sum(r["cut"] for r in rows)
    with open(path, "a", encoding="utf-8") as file, tqdm(
            total=args.corpus_tokens, initial=have, unit="tok", desc="corpus", disable=args.no_progress) as bar:
        for prompts in prompt_batches(args, target, tokenizer, eos, rng):
            texts = [p for p in prompts if not isinstance(p, str) or len(p.strip()) >= 8]
            chats = [p if isinstance(p, list) else build_prompt(tokenizer, p)[0].tolist() for p in texts]
            fresh = {tuple(ids): p for p, ids in zip(texts, chats) if tuple(ids) not in seen}
            if not fresh:
                continue
            seen |= set(fresh)
            temperature = 0.0 if rng.random() < 0.6 else rng.uniform(0.7, 1.0)
            answers = continue_batch(target, [list(ids) for ids in fresh], eos,
                                     **sampling_options(temperature, args.answer_tokens))
            for (ids, prompt), answer in zip(fresh.items(), answers):
                kept = cut_loop(answer)
                cut += len(kept) < len(answer)
                row = {"ids": [*ids, *kept], "prompt_length": len(ids), "temperature": round(temperature, 3),
                       "held_out": is_held_out(prompt if isinstance(prompt, str) else str(prompt)),
                       "cut": len(kept) < len(answer), "batch": batch}
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                bar.update(len(kept))
                have += len(kept)
            file.flush()
            batch += 1
            if have >= args.corpus_tokens:
                break
    tqdm.write(f"corpus: {len(rows)} rows, {have} answer tokens, {cut / max(1, len(rows)):.1%} of rows cut where they loop")
    return rows


# ---------------------------------------------------------------------------------------------
# Stage 2: the loss, fused (plain twin: dspine.chunked_losses)
# ---------------------------------------------------------------------------------------------


def top_k_grouped(x: torch.Tensor, k: int, group: int = 256) -> torch.Tensor:
    """Indices of torch.topk(x [C, V], k), exact: the k largest lie in the k groups with the largest maxima."""
    C, V = x.shape
    if V % group or V // group < k:
        return x.topk(k, dim=-1).indices
    groups = x.view(C, V // group, group)
    best = groups.amax(-1).topk(k, dim=-1, sorted=False).indices                  # [C, k] groups
    inside = groups.gather(1, best[..., None].expand(-1, -1, group)).flatten(1).topk(k, dim=-1).indices
    return best.gather(1, inside // group) * group + inside % group


def vocabulary_pass(logits, p, index, labels, weights, a):
    """ce, l1 and their gradient at the logits, in the few passes over [C, V] a compiler can fuse.

        A = sum of Q where Q > P
        l1 = 2 (A - sum of P where Q > P)
        d (a ce + (1-a) l1) / d logits = a (Q - onehot(y)) + 2 (1-a) Q ([Q > P] - A)

    The onehot part is left to the caller.
    """
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    q = (logits - top).exp()
    z = q.sum(-1, keepdim=True)
    q = q / z
    p = p[index]
    over = q > p
    A = (q * over).sum(-1)
    l1 = 2 * (A - (p * over).sum(-1))
    ce = (z.log() + top - logits.gather(1, labels[:, None]))[:, 0]
    grad = q * ((a - 2 * (1 - a) * A)[:, None] + over * (2 * (1 - a))) * weights[:, None]
    return ce, l1, grad


_vocabulary_pass = vocabulary_pass  # or its compiled form, see use_compiler


def use_compiler(device: str) -> bool:
    """Compile vocabulary_pass if this machine can; True if it did."""
    global _vocabulary_pass
    _vocabulary_pass = vocabulary_pass
    if not device.startswith("cuda") and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return False
    compiled = torch.compile(vocabulary_pass, dynamic=True)
    try:
        x = torch.randn(3, 64, device=device)
        i = torch.arange(3, device=device)
        compiled(x, x.softmax(-1), i, i, torch.ones(3, device=device), torch.tensor(0.5, device=device))
    except Exception as error:  # no working compiler, no Triton: many types
        tqdm.write(f"torch.compile is not usable here ({type(error).__name__}): the loss runs uncompiled")
        return False
    _vocabulary_pass = compiled
    return True


class _FusedVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, labels, weights, teacher, index, lm_head, a, k, softcap, chunk):
        hidden, gradient, ces, l1s, tops, masses = hidden.to(lm_head.dtype), [], [], [], [], []
        at = torch.tensor(a, device=hidden.device)
        for part in torch.arange(len(labels), device=labels.device).split(chunk):
            low, high = index[part[0]], index[part[-1]]
            p = teacher_distribution(teacher[low:high + 1], lm_head, softcap)     # a position once, not once a block
            logits = F.linear(hidden[part], lm_head)                              # [C, V]
            ce, l1, grad = _vocabulary_pass(logits, p, index[part] - low, labels[part], weights[part], at)
            grad = grad.to(lm_head.dtype) @ lm_head - (a * weights[part])[:, None] * lm_head[labels[part]]
            top = top_k_grouped(logits, k)
            for out, x in zip((gradient, ces, l1s, tops, masses), (grad, ce, l1, top, p[(index[part] - low)[:, None], top])):
                out.append(x)
        ctx.save_for_backward(torch.cat(gradient))
        ce, l1, tops, masses = (torch.cat(x) for x in (ces, l1s, tops, masses))
        sums = torch.stack((ce @ weights, l1 @ weights))
        ctx.mark_non_differentiable(sums, tops, masses)
        return a * sums[0] + (1 - a) * sums[1], sums, tops, masses

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0] * grad, *[None] * 9


def fused_losses(hidden, refined, labels, weights, teacher, index, lm_head, c, a, softcap, chunk):
    """Same values and gradients as dspine.chunked_losses, the logits' gradient written out by hand."""
    with torch.autocast(hidden.device.type, enabled=False):
        loss, sums, candidates, p = _FusedVocabulary.apply(
            hidden, labels, weights, teacher.to(lm_head.dtype), index, lm_head, a, c.top_k, softcap, chunk)
        ce, l1 = candidate_losses(refined, labels, candidates, p, lm_head, c)
    refinement = torch.stack((ce @ weights, l1 @ weights))
    return loss + a * refinement[0] + (1 - a) * refinement[1], torch.cat((sums, refinement.detach())), candidates


def token_ce_alignment(features, labels, codes, chunk: int = 512):
    """Ablation: token cross-entropy at every layer's readout, softmax over the codes: [L, tokens]."""
    scores = lambda f, y: F.cross_entropy(F.linear(f, codes.to(f.dtype)).float(), y, reduction="none")
    return torch.stack([torch.cat([torch.utils.checkpoint.checkpoint(scores, f, y, use_reentrant=False)
                                   for f, y in zip(layer.split(chunk), labels.split(chunk))]) for layer in features])


ALIGNMENTS = {"cosine": cosine_alignment, "token-ce": token_ce_alignment,
              "none": lambda features, labels, codes: features.new_zeros(features.shape[:2], dtype=torch.float32)}

# ---------------------------------------------------------------------------------------------
# Stage 2: training
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def warm_start(draft: DSpine, target):
    """Begin as the target's own last L layers reading its last tap; ValueError where their shapes differ.

    q_norm and k_norm, where the target has none, get the rms of its q and k (for a normalised
    input), fc the identity on the last tap, hidden_norm the mean of the copied input norms.
    """
    c, decoder = draft.config, target.get_decoder()
    source = getattr(decoder, "layers", [])[-c.num_hidden_layers:]
    try:
        for mine, theirs in zip(draft.layers, source, strict=True):
            state = {k: v.float().cpu() for k, v in theirs.state_dict().items()}
            x = torch.randn(256, c.hidden_size) * state["input_layernorm.weight"]
            for p in "qk":
                if f"self_attn.{p}_norm.weight" not in state:
                    out = (x @ state[f"self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, c.head_dim))
                    state[f"self_attn.{p}_norm.weight"] = out.square().mean().sqrt().expand(c.head_dim)
            mine.load_state_dict(state)
        draft.hidden_norm.weight.copy_(torch.stack([s.input_layernorm.weight.float().cpu() for s in source]).mean(0))
        draft.norm.weight.copy_(decoder.norm.weight)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"the layers of {type(target).__name__} have another form than the draft's: use --init random "
                         f"({str(error).splitlines()[0]})") from None
    draft.fc.weight.zero_()
    draft.fc.weight[:, -c.hidden_size:] = torch.eye(c.hidden_size)


class TargetStates:
    """Taps [1, S, n*H] and last hidden state [1, S, H] of each row, computed once and memory-mapped.

    Beyond `limit_gb` nothing is stored and every visit runs the target again.
    """

    def __init__(self, target, rows: list[dict], layer_ids: list[int], path: Path, limit_gb: float):
        self.decoder, self.rows, self.taps = target.get_decoder(), rows, layer_ids
        self.device, self.hidden = target.device, target.config.get_text_config().hidden_size
        width = (len(layer_ids) + 1) * self.hidden
        self.ends = torch.tensor([0] + [len(r["ids"]) for r in rows]).cumsum(0).tolist()
        self.data = self.done = None
        if self.ends[-1] * width * target.dtype.itemsize <= limit_gb * 1e9:
            key = hashlib.sha256(json.dumps([layer_ids, str(target.dtype), [r["ids"] for r in rows]]).encode()).hexdigest()[:12]
            self.data = torch.from_file(str(path.with_suffix(f".{key}")), shared=True, dtype=target.dtype,
                                        size=self.ends[-1] * width).view(-1, width)
            self.done = torch.from_file(str(path.with_suffix(f".{key}.done")), shared=True, dtype=torch.uint8, size=len(rows))

    @torch.no_grad()
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.data[self.ends[i]:self.ends[i + 1]] if self.data is not None else None
        if kept is not None and self.done[i]:
            states = kept.to(self.device)
        else:
            ids = torch.tensor([self.rows[i]["ids"]], device=self.device)
            out = self.decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
            states = torch.cat([*(out.hidden_states[l + 1][0] for l in self.taps), out.last_hidden_state[0]], dim=-1)
            if kept is not None:
                kept.copy_(states)
                self.done[i] = 1
        return states[None, :, :-self.hidden], states[None, :, -self.hidden:]


class Trainer:
    """Model, optimizer and counters of a run: everything a checkpoint holds."""

    def __init__(self, args, draft: DSpine, target, rows: list[dict], out: Path):
        self.args, self.draft, self.target, self.rows, self.out = args, draft, target, rows, out
        self.device = target.device
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = draft
        if self.world > 1:
            unused = args.inject != "every" or args.supervise == "none"
            self.model = torch.nn.parallel.DistributedDataParallel(draft, find_unused_parameters=unused)
        self.states = TargetStates(target, rows, draft.config.target_layer_ids, out / f"states{self.rank}", args.cache_gb)
        self.embed = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()
        self.softcap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = self.tokens = 0
        self.seconds = 0.0

    def progress(self) -> float:
        """Share of the budget that is spent, 0 .. 1."""
        a = self.args
        return min(1.0, max(self.step / a.steps if a.steps else 0, self.tokens / a.tokens if a.tokens else 0,
                            self.seconds / 60 / a.minutes if a.minutes else 0))

    def row_ids(self) -> list[int]:
        """This step's rows, from a shuffle that depends on the seed and the epoch alone."""
        n, first = len(self.rows), self.step * self.args.batch_rows
        shuffle = lambda epoch: torch.randperm(n, generator=torch.Generator().manual_seed(self.args.seed * 7919 + epoch))
        return [int(shuffle(i // n)[i % n]) for i in range(first, first + self.args.batch_rows)]

    def blocks(self, i: int):
        """Anchors [1, A], supervised slots [1, A, T] and replaced blocks [1, A] of row i at this step."""
        a, c, row = self.args, self.draft.config, self.rows[i]
        generator = torch.Generator().manual_seed(hash((a.seed, self.step, i)) & 0x7FFFFFFF)
        mask = (torch.arange(len(row["ids"])) >= row["prompt_length"])[None]
        anchors, valid = sample_anchors(mask, a.anchors, generator)
        replace = torch.rand(anchors.shape, generator=generator) < replacement_rate(self.progress(), c)
        return tuple(x.to(self.device) for x in (anchors, supervised_slots(mask, anchors, valid, c.block_size), replace))

    def forward(self, rows: list[int], plans: list) -> list:
        """(loss, terms) of each row; the rows run as one padded batch."""
        c, a = self.draft.config, self.args
        pad = lambda xs: torch.nn.utils.rnn.pad_sequence([x[0] for x in xs], batch_first=True)
        ids = [torch.tensor([self.rows[i]["ids"]], device=self.device) for i in rows]
        taps, last = zip(*(self.states[i] for i in rows))
        anchors, supervised, replace = (pad(x) for x in zip(*plans))
        ids, taps = pad(ids), pad(taps)
        weight = max(c.ce_weight, a.ce_start + (c.ce_weight - a.ce_start) * self.progress() / a.ce_ramp)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.target.dtype == torch.bfloat16):
            out = self.model(gather_blocks(ids, anchors, c.block_size), taps, anchors, self.embed, replace)
            results = []
            for n, hidden in enumerate(last):
                row = DraftOutput(out.hidden_states[n:n + 1], out.pre_injection[n:n + 1], out.layer_features[:, n:n + 1])
                results.append(objective(
                    self.draft, row, ids[n:n + 1, :hidden.shape[1]], anchors[n:n + 1], supervised[n:n + 1], hidden, self.head,
                    beta=alignment_beta(self.step, c), ce_weight=weight, softcap=self.softcap, chunk=a.chunk,
                    losses=fused_losses, alignment=ALIGNMENTS[a.supervise]))
        return results

    def train_step(self) -> list[dict]:
        """One optimizer step; the terms of this process's rows. Raises FloatingPointError on a non-finite loss."""
        a, B = self.args, self.draft.config.block_size
        mine = self.row_ids()[self.rank::self.world]
        plans = [self.blocks(i) for i in mine]
        decay = torch.exp(-torch.arange(B - 1) / 7)
        weights = torch.stack([(s.cpu() * decay).sum() for _, s, _ in plans])     # of each row
        counts = torch.tensor([weights.sum(), sum(float(s.sum()) for _, s, _ in plans)], dtype=torch.float64)
        if self.world > 1:
            counts = counts.to(self.device)
            dist.all_reduce(counts)
        total, tokens = counts.tolist()
        progress = self.progress()
        warmup = min(1.0, (progress + 0.002) / a.warmup) if a.warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = a.lr * warmup * (0.5 + 0.5 * math.cos(math.pi * progress))
        self.optimizer.zero_grad()
        terms = []
        chunks = [slice(i, i + a.micro_rows) for i in range(0, len(mine), a.micro_rows)]
        for k, part in enumerate(chunks):
            quiet = self.model.no_sync() if self.world > 1 and k + 1 < len(chunks) else contextlib.nullcontext()
            with quiet:
                results = self.forward(mine[part], plans[part])
                loss = sum(l * w for (l, _), w in zip(results, weights[part].tolist())) / max(total, 1e-9)
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"the loss is not finite at step {self.step}: lower --lr")
                (loss * self.world).backward()                                    # DDP averages, we sum
            terms += [t for _, t in results]
        if total > 0:
            norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise FloatingPointError(f"the gradient is not finite at step {self.step}: lower --lr")
            self.optimizer.step()
        self.step += 1
        self.tokens += int(tokens)
        return terms

    def save(self, path: Path):
        """Write the checkpoint under a temporary name, then rename."""
        part = path.with_suffix(".part")
        torch.save({"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                    "tokens": self.tokens, "seconds": self.seconds, "config": json.dumps(self.draft.config.to_dict())}, part)
        os.replace(part, path)

    def load(self, path: Path):
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["config"] != json.dumps(self.draft.config.to_dict()):
            raise ValueError(f"{path} was trained with other sizes or options: use another --out or remove it")
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def mean_terms(terms: list[dict]) -> dict:
    """Weighted means of the objective's terms over rows."""
    total = sum(t["weight"] for t in terms)
    if total == 0:
        return {}
    mean = lambda values: sum(v * t["weight"] for v, t in zip(values, terms)) / total
    terms = [t for t in terms if t["weight"] > 0]
    return {k: [round(mean([t[k][i] for t in terms]), 4) for i in range(len(v))] if isinstance(v, list) else round(mean([t[k] for t in terms]), 4)
            for k, v in terms[0].items() if k not in ("weight", "tokens")}


def train(trainer: Trainer, stop_at: int | None = None):
    """Run to the end of the budget (or to step `stop_at`), saving as it goes."""
    a, path, main = trainer.args, trainer.out / "checkpoint.pt", trainer.rank == 0
    if path.exists():
        trainer.load(path)
    began, saved, start_tokens = time.time(), time.time(), trainer.tokens
    with open(trainer.out / "log.jsonl", "a", encoding="utf-8") as log, tqdm(
            total=1000, desc="train", disable=a.no_progress or not main, bar_format="{desc} {percentage:3.1f}% {elapsed}<{remaining} {postfix}") as bar:
        while trainer.progress() < 1 and trainer.step != stop_at:
            clock = time.time()
            terms = mean_terms(trainer.train_step())
            trainer.seconds += time.time() - clock
            if not terms:
                tqdm.write(f"step {trainer.step}: nothing supervised in these rows, skipped")
                continue
            bar.n = round(1000 * trainer.progress())
            rate = (trainer.tokens - start_tokens) / max(1e-9, time.time() - began)
            bar.set_postfix_str(f"step {trainer.step} {rate:.0f} tok/s ce {terms['ce']:.2f} l1 {terms['l1']:.2f} top1 {terms['top1_by_slot'][0]:.2f}")
            if main:
                log.write(json.dumps({"step": trainer.step, "tokens": trainer.tokens, "seconds": round(trainer.seconds, 1),
                                      "tokens_per_second": round(rate), "lr": trainer.optimizer.param_groups[0]["lr"], **terms}) + "\n")
                if time.time() - saved > a.save_seconds:
                    log.flush()
                    trainer.save(path)
                    saved = time.time()
    if main:
        trainer.save(path)


# ---------------------------------------------------------------------------------------------
# Stage 3: evaluation by decoding
# ---------------------------------------------------------------------------------------------


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text: loops flatter a draft, so it is printed."""
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def decode_in_turn(methods: dict, ids: torch.Tensor) -> dict:
    """One prompt by every method, one right after the other: name -> a record of counts and seconds.

    methods: name -> callable(input_ids) -> (tokens, Statistics).
    """
    records = {}
    for name, decode in methods.items():
        tokens, s = decode(ids)
        records[name] = {"accept_lengths": s.accept_lengths, "decode_seconds": s.draft_seconds + s.verify_seconds,
                         "draft_seconds": s.draft_seconds, "prefill_seconds": s.prefill_seconds, "new_tokens": s.new_tokens,
                         "repetition": repetition(tokens), "emitted_by": s.emitted_by, "tokens": tokens}
    return records


def summarise(runs: list[dict]) -> dict:
    """A table over prompts from records of decode_in_turn; the first method is what ratios refer to.

    acceptance_length: emitted tokens after the first, over target forwards. tokens_per_second: of
    those tokens after prefill, median over prompts. ratio: median of the per-prompt ratios, whose
    two sides are neighbours in time, so that a drifting machine cancels.
    """
    median = lambda xs: sorted(xs)[len(xs) // 2] if xs else float("nan")
    speed = lambda r: sum(r["accept_lengths"]) / max(1e-9, r["decode_seconds"])
    first, table = next(iter(runs[0])), {}
    for name in runs[0]:
        records = [run[name] for run in runs]
        lengths = [n for r in records for n in r["accept_lengths"]]
        pairs = [(r, run[first]) for r, run in zip(records, runs) if r["accept_lengths"] and run[first]["accept_lengths"]]
        table[name] = {
            "acceptance_length": round(sum(lengths) / max(1, len(lengths)), 3),
            "tokens_per_second": round(median([speed(r) for r, _ in pairs]), 2),
            "ratio": round(median([speed(r) / speed(b) for r, b in pairs]), 3),
            "prefill_seconds": round(median([r["prefill_seconds"] for r in records]), 3),
            "repetition": round(sum(r["repetition"] for r in records) / len(records), 3),
            "new_tokens": sum(r["new_tokens"] for r in records),
            "histogram": {n: lengths.count(n) for n in sorted(set(lengths))}}
    return table


def decoding_methods(target, draft, eos, max_new_tokens: int, temperature: float, seed: int = 0) -> dict:
    """plain, DSpine, copying alone and both, with the same budget and seed."""
    options = dict(max_new_tokens=max_new_tokens, temperature=temperature, eos_token_ids=eos)
    seeded = lambda: torch.Generator(target.device).manual_seed(seed)
    run = lambda d, copy: lambda ids: collect(generate(target, d, ids, generator=seeded(), copy=copy, **options))
    return {"plain": lambda ids: collect(generate_plain(target, ids, generator=seeded(), **options)),
            "DSpine": run(draft, False), "copy": run(None, True), "DSpine + copy": run(draft, True)}


def evaluate(target, draft: DSpine, prompts: list[torch.Tensor], eos, max_new_tokens: int, seed: int = 0,
             progress: bool = True) -> dict:
    """Tables of `summarise` at temperature 0 and 1: plain decoding beside DSpine."""
    tables = {}
    for temperature in (0.0, 1.0):
        methods = decoding_methods(target, draft, eos, max_new_tokens, temperature, seed)
        chosen = {name: methods[name] for name in ("plain", "DSpine")}
        tables[f"temperature {temperature:g}"] = summarise(
            [decode_in_turn(chosen, ids) for ids in tqdm(prompts, desc="decode", disable=not progress)])
    return tables


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Train a DSpine draft: corpus, training, evaluation, export.",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument
    add("--target", help="Hub id, local folder or .gguf file (default: SmolLM2-135M-Instruct)")
    add("--out", default="runs/draft", help="folder for everything, at the end also config.json and model.safetensors")
    add("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the target and of autocast; the draft's master weights are "
        "float32 (default: bfloat16 where it is fast)")
    add("--seed", type=int, default=0, help="of corpus, initialisation, anchors and order")
    add("--prompts", help="stage 1: prompts to answer, JSON lines with turns, messages or prompt; or text, one a line")
    add("--text", help="stage 1 for a base model: a text file whose pieces it continues")
    add("--corpus-tokens", type=int, default=400_000, help="answer tokens to collect")
    add("--answer-tokens", type=int, default=256, help="longest answer")
    add("--prompt-tokens", type=int, default=96, help="longest prompt the target writes; length of --text pieces")
    add("--rows", type=int, default=48, help="rows a batch in stage 1")
    add("--steps", type=int, default=0, help="training budget in optimizer steps; 0: not limited by it")
    add("--tokens", type=int, default=0, help="... in draft tokens")
    add("--minutes", type=float, default=0, help="... in minutes (60 if no budget is given)")
    add("--lr", type=float, default=1.5e-3, help="peak learning rate of AdamW; cosine to 0")
    add("--warmup", type=float, default=0.04, help="share of the budget over which the rate rises")
    add("--batch-rows", type=int, default=2, help="rows an optimizer step, over all processes")
    add("--micro-rows", type=int, default=1, help="rows a forward; more for a GPU, 1 is fastest on a CPU")
    add("--anchors", type=int, default=128, help="blocks a row")
    add("--chunk", type=int, default=256, help="tokens whose logits are alive at once")
    add("--ce-start", type=float, default=0.5, help="weight of ce at the start; ends at the published 0.1")
    add("--ce-end", type=float, default=0.1, help="weight of ce at the end")
    add("--ce-ramp", type=float, default=0.6, help="share of the budget after which the end is reached")
    add("--init", default="target", help="target (its last layers), random, or a folder with a draft")
    add("--layers", type=int, default=3, help="draft layers L")
    add("--block-size", type=int, default=8, help="B")
    add("--rank", type=int, default=256, help="r, rank of the transfer space")
    add("--message", type=int, default=192, help="m, message size")
    add("--top-k", type=int, default=16, help="K, candidates a position")
    add("--mask-token", type=int, help="id of the mask token (default: the target's last special token that is not in use)")
    add("--inject", choices=("every", "last", "none"), default="every", help="ablation: layers that inject")
    add("--supervise", choices=tuple(ALIGNMENTS), default="cosine", help="ablation: what the layers' features learn")
    add("--attention", choices=("causal", "bidirectional"), default="causal", help="ablation: inside the block")
    add("--select", choices=("cache", "argmax"), default="cache", help="ablation: how tokens are chosen")
    add("--cache-gb", type=float, default=8, help="disk for target states; beyond it they are computed anew each time")
    add("--save-seconds", type=float, default=120, help="between checkpoints")
    add("--eval-prompts", type=int, default=24, help="held-out prompts to decode in stage 3; 0 skips it")
    add("--eval-tokens", type=int, default=128, help="new tokens each")
    add("--slim", action="store_true", help="export without the token codes (rebuilt from the target at load)")
    add("--no-compile", action="store_true", help="do not compile the loss")
    add("--no-progress", action="store_true", help="no bars")
    args = p.parse_args(argv)
    if not (args.steps or args.tokens or args.minutes):
        args.minutes = 60
    return args


def mask_token(tokenizer, eos: list[int]) -> int:
    """A special token that text never holds: the last one that is not a start, end or padding token."""
    used = set(eos) | token_id_set([i for i in (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) if i is not None])
    template = tokenizer.chat_template or ""
    free = [i for i, t in sorted(tokenizer.added_tokens_decoder.items()) if t.special and i not in used and t.content not in template]
    if not free:
        raise ValueError("this tokenizer has no spare special token: choose a token id that text never holds with --mask-token")
    return free[-1]


def run(args) -> int:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = args.device or default_device()
    if distributed:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    main = not distributed or dist.get_rank() == 0
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype or "", None), device)
    eos = eos_ids(target, tokenizer)

    path = out / "corpus.jsonl"
    rows = write_corpus(args, target, tokenizer, path) if main else []
    if distributed:
        dist.barrier()
        rows = read_rows(path)
    usable = [r for r in rows if not r["held_out"] and len(r["ids"]) - r["prompt_length"] >= 2]
    if not usable:
        raise ValueError(f"{path} holds no row with two answer tokens: nothing to train on")

    torch.manual_seed(args.seed)
    config = DSpineConfig.for_target(
        target, args.layers, block_size=args.block_size, transfer_rank=args.rank, message_size=args.message, top_k=args.top_k,
        ce_weight=args.ce_end, inject=args.inject, attention=args.attention, select=args.select,
        mask_token_id=args.mask_token if args.mask_token is not None else mask_token(tokenizer, eos))
    if args.init in ("target", "random"):
        draft = DSpine.for_target(config, target)
        if args.init == "target":
            warm_start(draft, target)
    else:
        draft = load_draft(args.init, target)
    draft = draft.to(target.device).float().requires_grad_(True).train()
    if not args.no_compile:
        use_compiler(device)
    trainer = Trainer(args, draft, target, usable, out)
    if main:
        tqdm.write(f"{sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters, {len(usable)} rows")
    train(trainer)
    if not main:
        return 0

    draft = draft.to(target.dtype).requires_grad_(False).eval()
    draft.save_pretrained(out, slim=args.slim)
    held_out = [r for r in rows if r["held_out"]][:args.eval_prompts]
    if args.eval_prompts and not held_out:
        print("no evaluation: so small a corpus holds no held-out prompt")
    if held_out:
        prompts = [torch.tensor([r["ids"][:r["prompt_length"]]]) for r in held_out]
        tables = evaluate(target, draft, prompts, eos, args.eval_tokens, args.seed, not args.no_progress)
        part = out / "evaluation.json.part"
        part.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
        os.replace(part, out / "evaluation.json")
        for name, table in tables.items():
            for method, t in table.items():
                print(f"{name}  {method:7s} acceptance {t['acceptance_length']:.2f}  {t['tokens_per_second']:.1f} tokens/s  "
                      f"ratio {t['ratio']:.2f}  repetition {t['repetition']:.2f}")
    print(f"done: python generate.py --draft {out} --prompt ...")
    return 0


def main(argv=None) -> int:
    args = parse_args(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        print(f"train_small.py: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
