"""Train a DSpine draft for any target, from nothing:  python train_small.py"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from dspine import (DSpine, DSpineConfig, alignment_beta, gather_blocks, objective, replacement_rate, sample_anchors,
                    supervised_slots)
from generate import load_target

# ---------------------------------------------------------------------------------------------
# Stage 2: training
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def warm_start(draft: DSpine, target):
    """Begin as the target's own last layers reading its last tap (Llama-like targets only).

    layers = the target's last L; q_norm, k_norm = the rms of its q and k, measured at unit input; fc = identity on the last
    tap; hidden_norm = mean of the copied input norms; norm = the target's final norm.
    """
    c, decoder = draft.config, target.get_decoder()
    source = decoder.layers[-c.num_hidden_layers:]
    for mine, theirs in zip(draft.layers, source):
        state = {k: v.float() for k, v in theirs.state_dict().items()}
        x = torch.randn(256, c.hidden_size) * state["input_layernorm.weight"]
        for p in "qk":
            name = f"self_attn.{p}_norm.weight"
            if name not in state:
                out = (x @ state[f"self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, c.head_dim))
                state[name] = torch.full((c.head_dim,), out.square().mean(-1).sqrt().mean().item())
        mine.load_state_dict(state)
    draft.fc.weight.zero_()
    draft.fc.weight[:, -c.hidden_size:] = torch.eye(c.hidden_size)
    draft.hidden_norm.weight.copy_(torch.stack([s.input_layernorm.weight.float() for s in source]).mean(0))
    draft.norm.weight.copy_(decoder.norm.weight)


class TargetStates:
    """Taps and last hidden state of every corpus row, computed once and kept in a memory-mapped file."""

    def __init__(self, target, rows, layer_ids, path: Path):
        self.target, self.rows, self.taps = target, rows, layer_ids
        self.width = (len(layer_ids) + 1) * target.config.hidden_size
        self.kept = {}

    @torch.no_grad()
    def __getitem__(self, i):
        """taps [1, S, n*H] and last hidden state [1, S, H] of row i."""
        if i not in self.kept:
            ids = torch.tensor([self.rows[i]["ids"]])
            out = self.target.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False)
            self.kept[i] = torch.cat([*(out.hidden_states[l + 1][0] for l in self.taps), out.last_hidden_state[0]], -1)
        part = self.kept[i]
        H = self.target.config.hidden_size
        return part[None, :, :-H], part[None, :, -H:]


def top_k_grouped(x, K, group=256):
    """torch.topk, exact, several times as fast on long rows: the K largest lie in the K groups of largest maxima."""
    C, V = x.shape
    if V % group or V // group < K:
        return x.topk(K, dim=-1)
    top = x.view(C, V // group, group).amax(-1).topk(K, dim=-1, sorted=False).indices
    values, i = x.view(C, V // group, group).gather(1, top[..., None].expand(-1, -1, group)).flatten(1).topk(K, dim=-1)
    return values, top.gather(1, i // group) * group + i % group


def _fused(hidden, lm_head, p, index, labels, weights, a):
    """ce, l1 and their gradient with respect to the logits, in one pass where a compiler fuses it.

        d ce / d logits = Q - onehot(y);   d l1 / d logits = 2 Q ([Q > P] - A),  A = sum of Q over Q > P
    """
    logits = F.linear(hidden, lm_head)
    q = torch.softmax(logits, -1, dtype=torch.float32)
    pg = p[index]
    over = q > pg
    A = (q * over).sum(-1)
    l1 = 2 * (A - (pg * over).sum(-1))
    base = a - 2 * (1 - a) * A
    grad = (q * (base[:, None] + over * (2 * (1 - a))) * weights[:, None]).to(lm_head.dtype)
    return logits, q.gather(1, labels[:, None])[:, 0], l1, grad


class _FastLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, labels, weights, teacher, index, lm_head, a, K, fused, chunk):
        """teacher [U, H] distinct positions, index [tokens] into it. tokens sorted by index."""
        grads, ces, l1s, cands, p2s = [], [], [], [], []
        hidden = hidden.to(lm_head.dtype)
        a_t = torch.tensor(a)
        cuts = list(range(0, len(hidden), chunk)) + [len(hidden)]
        for lo, hi in zip(cuts, cuts[1:]):
            part = slice(lo, hi)
            first, last = int(index[lo]), int(index[hi - 1])
            p = torch.softmax(F.linear(teacher[first:last + 1], lm_head), -1, dtype=torch.float32)
            at = index[part] - first
            logits, qy, l1, grad = fused(hidden[part], lm_head, p, at, labels[part], weights[part], a_t)
            g = grad @ lm_head - (a * weights[part])[:, None] * lm_head[labels[part]]
            cand = top_k_grouped(logits, K)[1]
            grads.append(g), ces.append(-qy.clamp_min(1e-30).log()), l1s.append(l1), cands.append(cand)
            p2s.append(p[at[:, None], cand])
        ctx.save_for_backward(torch.cat(grads))
        ce, l1, cand, p2 = (torch.cat(x) for x in (ces, l1s, cands, p2s))
        sums = torch.stack((ce @ weights, l1 @ weights))
        ctx.mark_non_differentiable(sums, cand, p2)
        return a * sums[0] + (1 - a) * sums[1], sums, cand, p2

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0] * grad, *[None] * 9


def fast_objective(draft, out, ids, anchors, supervised, teacher_hidden, lm_head, beta, a, fused, chunk=256):
    c, B = draft.config, out.hidden_states.shape[2]
    keep = supervised.flatten().nonzero()[:, 0]
    blocks = gather_blocks(ids, anchors, B)
    at = (anchors[..., None] + torch.arange(B - 1)).flatten()[keep]      # teacher position
    order = at.argsort(stable=True)
    keep, at = keep[order], at[order]
    pick = lambda x: x.flatten(0, 2)[keep]
    labels = pick(blocks[..., 1:])
    w = torch.exp(-torch.arange(B - 1) / 7).expand(supervised.shape).flatten()[keep]
    total = w.sum(); wn = w / total
    uniq, index = at.unique_consecutive(return_inverse=True)
    loss, (ce, l1), cand, p2 = _FastLosses.apply(pick(out.hidden_states[..., 1:, :]), labels, wn, teacher_hidden[0, uniq], index, lm_head, a, c.top_k, fused, chunk)
    refined = draft.refine(pick(out.pre_injection[..., 1:, :]), pick(blocks[..., :-1]))
    log_q2 = (lm_head[cand] @ refined[..., None].to(lm_head.dtype)).squeeze(-1).float().log_softmax(-1)
    hit = cand == labels[:, None]
    ce2 = -(log_q2 * hit).sum(-1)
    mass = p2.sum(-1, keepdim=True)
    l12 = (log_q2.exp() - p2 / mass.clamp_min(1e-20)).abs().sum(-1) * (mass[:, 0] > c.candidate_mass_threshold)
    ref = (a * ce2 + (1 - a) * l12) @ wn
    codes = draft.transfer_codes[labels].float()
    cos = torch.stack([F.cosine_similarity(pick(f[..., 1:, :]).float(), codes, dim=-1) for f in out.layer_features])
    align = (1 - cos) @ wn
    loss = loss + ref + beta * ce * align.sum()
    t = (torch.arange(B - 1).expand(supervised.shape).flatten()[keep])
    top1 = cand[:, 0] == labels
    stats = dict(ce=ce.item(), l1=l1.item(), refinement=ref.item(), alignment=align.tolist(), weight=total.item(), tokens=len(keep),
                 coverage=hit.any(-1).float().mean().item(), top1=[top1[t == i].float().mean().item() if (t == i).any() else 0.0 for i in range(B - 1)])
    return loss, stats


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="runs/draft"); p.add_argument("--corpus", default="runs/corpus.jsonl")
    p.add_argument("--minutes", type=float, default=30); p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--rows-per-step", type=int, default=2); p.add_argument("--anchors", type=int, default=128)
    p.add_argument("--layers", type=int, default=3); p.add_argument("--block", type=int, default=8)
    p.add_argument("--rank", type=int, default=256); p.add_argument("--message", type=int, default=192)
    p.add_argument("--init"); p.add_argument("--no-compile", action="store_true"); p.add_argument("--ce0", type=float, default=0.5)
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    target, tok = load_target(None, torch.bfloat16)
    cfg = DSpineConfig.for_target(target, a.layers, block_size=a.block, transfer_rank=a.rank, message_size=a.message, mask_token_id=16)
    out = Path(a.out); out.mkdir(parents=True, exist_ok=True)
    if a.init:
        draft = DSpine.from_pretrained(a.init, target).float().requires_grad_(True).train()
    else:
        draft = DSpine.for_target(cfg, target); warm_start(draft, target)
    def read():
        rows = [json.loads(l) for l in open(a.corpus, encoding="utf-8").read().splitlines(True) if l.endswith("\n")]
        return [r for r in rows if len(r["ids"]) > r["prompt_length"] + 8]
    rows = read()
    print(len(rows), "rows", sum(len(r["ids"]) - r["prompt_length"] for r in rows), "answer tokens", sum(p.numel() for p in draft.parameters()) / 1e6, "M")
    states = TargetStates(target, rows, cfg.target_layer_ids, out / "states.bin")
    embed, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    opt = torch.optim.AdamW(draft.parameters(), lr=a.lr, weight_decay=0.0, betas=(0.9, 0.95))
    fused = _fused if a.no_compile else torch.compile(_fused, dynamic=True)
    step, tokens, spent, order, epoch = 0, 0, 0.0, [], 0
    ck = out / "state.pt"
    if a.resume and ck.exists():
        s = torch.load(ck); draft.load_state_dict(s["draft"]); opt.load_state_dict(s["opt"]); step, tokens, spent, epoch = s["n"]
    log = open(out / "log.jsonl", "a", encoding="utf-8")
    t0 = time.time(); last = t0; bar = tqdm(total=int(a.minutes * 60), unit="s", mininterval=10)
    while spent < a.minutes * 60:
        progress = spent / (a.minutes * 60)
        lr = a.lr * min(1, progress / 0.03 + 0.02) * (0.5 + 0.5 * math.cos(math.pi * progress)); 
        for g in opt.param_groups: g["lr"] = lr
        cew = max(cfg.ce_weight, a.ce0 + (cfg.ce_weight - a.ce0) * progress / 0.6)
        gen = torch.Generator().manual_seed(step)
        agg = []
        batch = []
        for _ in range(a.rows_per_step):
            if not order:
                rows = states.rows = read()
                order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1000 + epoch)).tolist(); epoch += 1
            batch.append(order.pop())
        opt.zero_grad()
        for i in batch:
            taps, last_h = states[i]
            ids = torch.tensor([rows[i]["ids"]]); mask = torch.arange(ids.shape[1])[None] >= rows[i]["prompt_length"]
            anchors, valid = sample_anchors(mask, a.anchors, gen)
            sup = supervised_slots(mask, anchors, valid, cfg.block_size)
            rep = torch.rand(anchors.shape, generator=gen) < replacement_rate(progress, cfg)
            with torch.autocast("cpu", torch.bfloat16):
                o = draft(gather_blocks(ids, anchors, cfg.block_size), taps, anchors, embed, rep)
                loss, st = fast_objective(draft, o, ids, anchors, sup, last_h, head, alignment_beta(step, cfg), cew, fused)
            if not torch.isfinite(loss): print("non-finite", step); sys.exit(1)
            (loss / len(batch)).backward()
            agg.append(st); tokens += st["tokens"]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        opt.step(); step += 1
        now = time.time(); bar.update(int(now - t0) - bar.n); spent += now - last; last = now
        if step % 20 == 0:
            mean = {k: (sum(x[k] for x in agg) / len(agg) if not isinstance(agg[0][k], list) else [round(sum(v) / len(agg), 3) for v in zip(*(x[k] for x in agg))]) for k in agg[0]}
            rec = dict(step=step, tokens=tokens, tps=tokens / (now - t0), lr=lr, **mean); log.write(json.dumps(rec) + "\n"); log.flush()
            if step % 100 == 0: print(json.dumps(rec), flush=True)
        if step % 300 == 0 or spent >= a.minutes * 60:
            torch.save({"draft": draft.state_dict(), "opt": opt.state_dict(), "n": [step, tokens, spent, epoch]}, str(ck) + ".tmp"); os.replace(str(ck) + ".tmp", ck)
            import copy
            e = copy.deepcopy(draft).bfloat16(); e.save_pretrained(out / "export", slim=True)


if __name__ == "__main__":
    main()
