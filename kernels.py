"""The injection, the transition cache, the path and the verification as fused Triton kernels.

Every function here has a plain PyTorch twin in dspine.py with the same signature and meaning:

    adjacent_injection(injection, l, h, ..)   Injection.forward            3 launches
    transition_cache(draft, pre, ..)          DSpine.transition_cache      5 launches
    select_path(cache, candidate_ids, ..)     select_path                  1 launch
    verify_greedy(logits, proposals)          verify_greedy                1 launch
    verify_sampled(probs, proposal, uniform)  verify_sampled               1 launch

`DSpine.use_kernels("auto" | "off" | "on")` chooses; "auto" compares them with their twins once
(`agree`). What a kernel does not cover (float64, filters on the draft, ...) goes to the twin.
GraphedDraft replays a whole draft step as one CUDA graph.
This module imports anywhere: without Triton its kernels are plain functions that nobody calls.

Departures from the twins:
* Sums are kept in float32 and rounded once; the twins round after every operation. In bfloat16
  the two differ by rounding, in float32 by about 1e-6.
* Features are normalised after the gate products, which are linear in them: 1/|R h| is a number
  a row, so that the first kernel needs no second pass over its own output.
* Cumulative probabilities are summed in float64 and rounded to float32, which is what PyTorch
  does on a CPU: the twins' choices there, token for token.

Floors are bytes moved over 4.8 TB/s (an H200) at the published size (H 4096, r 1024, m 512, K 16,
B 16, V 151936, bfloat16), one request. With so few rows the weights are nearly all the bytes.
"""

from __future__ import annotations

import copy
import functools
import importlib.machinery
import math
import os
import sys
import warnings

import torch
import torch.nn.functional as F

import dspine
from dspine import DraftState, DSpine, DSpineConfig, Proposal

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except Exception:  # Mac, Windows, a build of PyTorch without it, an installation that is broken
    triton, jit = None, lambda function: function

if __name__ == "kernels":
    # Hugging Face has a package of this name, and transformers imports it. This file hides it, so
    # it stands in for it: the package's modules are found through __path__, its names through
    # __getattr__ (the package's own file is then the module `kernels.__init__`).
    _package = importlib.machinery.PathFinder.find_spec(__name__, [
        folder for folder in sys.path if not os.path.exists(os.path.join(folder, "kernels.py"))])
    __path__ = _package.submodule_search_locations if _package and _package.has_location else []

    def __getattr__(name):
        if __path__ and (name == "__version__" or not name.startswith("__")):
            return getattr(importlib.import_module("kernels.__init__"), name)
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: on the CPU, to test


def available(x: torch.Tensor) -> bool:
    """Can the kernels run where x lives? Triton launches on the current CUDA device alone."""
    if triton is None or x.is_cuda == INTERPRET:
        return False
    return INTERPRET or x.is_cuda and x.device.index == torch.cuda.current_device() and (
        torch.version.hip is not None or torch.cuda.get_device_capability(x.device) >= (8, 0))


def covered(*tensors: torch.Tensor) -> bool:
    """Floating point tensors the kernels are written for; bfloat16 is beyond the interpreter."""
    dtypes = {torch.float32, torch.float16} | (set() if INTERPRET else {torch.bfloat16})
    return all(x.dtype in dtypes for x in tensors)


def fit(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; tensor cores want at least 16."""
    return max(least, 1 << max(0, size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@jit
def tile(pointer, row, column, stride, rows, columns):
    """pointer[row, column], zero where row >= rows or column >= columns. Offsets are int64."""
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride + column[None, :],
                   mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


# -------------------------------------------------------------------------------------------------
# 1. Adjacent injection (sec. 5): three launches a layer
# -------------------------------------------------------------------------------------------------


@jit
def readout_kernel(h, readout, partial, square, rows, H, r, stride, chunk,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y = R h, and |h|^2 on the way, summed over slices of H so that every processor has work.

        partial[s, row, :] = R[:, slice s] h[row, slice s]      square[s, row] = |h[row, slice s]|^2

    h [rows, H], R [r, H]. Bytes: R, r H 2 = 8.4 MB; floor 1.7 us.
    |R h|^2 needs the sum over slices first: gate_kernel takes it while it reads them.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    y = tl.zeros((BM, BN), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, H), BK):
        i = start + tl.arange(0, BK)
        x = tile(h, row, i, stride, rows, H)                                # [BM, BK]
        w = tile(readout, out, i, H, r, H)                                  # [BN, BK]
        y = tl.dot(x.to(w.dtype), tl.trans(w), y, input_precision="ieee")
        x = x.to(tl.float32)
        norm += tl.sum(x * x, 1)
    at = (part * rows + row).to(tl.int64)
    tl.store(partial + at[:, None] * r + out[None, :], y,
             mask=(row < rows)[:, None] & (out < r)[None, :])
    if tl.program_id(1) == 0:
        tl.store(square + at, norm, mask=row < rows)


@jit
def gate_kernel(partial, anchor_code, true_prev, replace, receiver_gate, predecessor_gate, message,
                bias, u, rows, r, m, root, B, PARTS: tl.constexpr, REPLACE: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The message of every row's left neighbour, gated; y = R h, prev as in Injection.forward.

        f = sqrt(r) y / |y|       prev = f of the row before, or a known token's code
        u = sigmoid(G_r f + G_p prev + b) * (M prev)

    partial [PARTS, rows, r] sums to y; anchor_code [blocks, r], true_prev [blocks, B-1, r], replace
    [blocks]; G_r, G_p, M [m, r]; u [rows, m]. Row 0 of a block is the anchor: its u is not used.
    Bytes: three weights, 3 m r 2 = 3.1 MB; floor 0.7 us.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    block, position = row // B, row % B
    known = position == 1
    if REPLACE:
        true = (tl.load(replace + block, mask=row < rows, other=0) != 0) & (position > 0)
        known = known | true
    received = tl.zeros((BM, BN), tl.float32)                               # G_r y
    asked = tl.zeros((BM, BN), tl.float32)                                  # G_p prev
    said = tl.zeros((BM, BN), tl.float32)                                   # M prev
    own = tl.zeros((BM,), tl.float32)                                       # |y|^2
    other = tl.zeros((BM,), tl.float32)                                     # that of the row before
    for start in range(0, r, BK):
        i = start + tl.arange(0, BK)
        y = tl.zeros((BM, BK), tl.float32)
        prev = tl.zeros((BM, BK), tl.float32)
        for s in tl.static_range(PARTS):
            y += tile(partial + s * rows * r, row, i, r, rows, r)
            prev += tile(partial + s * rows * r, tl.maximum(row - 1, 0), i, r, rows, r)
        own += tl.sum(y * y, 1)
        other += tl.sum(prev * prev, 1)
        code = tile(anchor_code, block, i, r, rows // B, r).to(tl.float32)
        if REPLACE:
            at = tl.where(true, block * (B - 1) + position - 1, 0)
            given = tile(true_prev, at, i, r, rows // B * (B - 1), r)
            code = tl.where(true[:, None], given.to(tl.float32), code)
        prev = tl.where(known[:, None], code, prev)
        w = tile(receiver_gate, out, i, r, m, r)                            # [BN, BK]
        received = tl.dot(y.to(w.dtype), tl.trans(w), received, input_precision="ieee")
        w = tile(predecessor_gate, out, i, r, m, r)
        asked = tl.dot(prev.to(w.dtype), tl.trans(w), asked, input_precision="ieee")
        w = tile(message, out, i, r, m, r)
        said = tl.dot(prev.to(w.dtype), tl.trans(w), said, input_precision="ieee")
    scale = root / tl.maximum(tl.sqrt(own), 1e-12)                          # as F.normalize does
    prev_scale = tl.where(known, 1.0, root / tl.maximum(tl.sqrt(other), 1e-12))[:, None]
    b = tl.load(bias + out, mask=out < m, other=0.0).to(tl.float32)
    gate = tl.sigmoid(received * scale[:, None] + asked * prev_scale + b[None, :])
    tl.store(u + row.to(tl.int64)[:, None] * m + out[None, :],
             (gate * said * prev_scale).to(u.dtype.element_ty),
             mask=(row < rows)[:, None] & (out < m)[None, :])


@jit
def write_kernel(u, write, h, square, result, rows, H, m, stride, B, PARTS: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The write, and the residual in its epilogue; the anchor's row passes through.

        h <- h + (|h| / sqrt(H)) W u

    u [rows, m], W [H, m], h [rows, H], square [PARTS, rows] sums to |h|^2.
    Bytes: W, H m 2 = 4.2 MB; floor 0.9 us.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    delta = tl.zeros((BM, BN), tl.float32)
    for start in range(0, m, BK):
        j = start + tl.arange(0, BK)
        x = tile(u, row, j, m, rows, m)                                     # [BM, BK]
        w = tile(write, out, j, m, H, m)                                    # [BN, BK]
        delta = tl.dot(x, tl.trans(w), delta, input_precision="ieee")
    norm = tl.zeros((BM,), tl.float32)
    for s in tl.static_range(PARTS):
        norm += tl.load(square + s * rows + row, mask=row < rows, other=0.0)
    old = tile(h, row, out, stride, rows, H)
    new = old.to(tl.float32) + tl.sqrt(norm / H)[:, None] * delta
    new = tl.where((row % B == 0)[:, None], old, new.to(old.dtype))
    tl.store(result + row.to(tl.int64)[:, None] * H + out[None, :], new,
             mask=(row < rows)[:, None] & (out < H)[None, :])


def blocking(rows: int, weight: torch.Tensor) -> dict:
    """Tile sizes: with few rows a program streams weights, with many it reuses them.

    float32 goes without tensor cores, whose products need more registers: smaller tiles.
    """
    half = weight.itemsize == 2
    if rows <= 16:
        return dict(BM=16, BN=16, BK=128 if half else 64, num_warps=2, num_stages=4)
    side = 64 if half else 32
    return dict(BM=side, BN=side, BK=32, num_warps=4, num_stages=3)


def run_readout(h: torch.Tensor, readout: torch.Tensor):
    """y = R h and |h|^2 of rows h [rows, H], as partial sums [parts, rows, r] and [parts, rows]."""
    (rows, H), r, tiles = h.shape, len(readout), blocking(len(h), readout)
    programs = ceil_div(rows, tiles["BM"]) * ceil_div(r, tiles["BN"])
    parts = max(1, min(H // 512, 128 // programs))
    chunk = ceil_div(ceil_div(H, parts), tiles["BK"]) * tiles["BK"]
    parts = ceil_div(H, chunk)
    partial = torch.empty(parts, rows, r, dtype=torch.float32, device=h.device)
    square = torch.empty(parts, rows, dtype=torch.float32, device=h.device)
    grid = ceil_div(rows, tiles["BM"]), ceil_div(r, tiles["BN"]), parts
    readout_kernel[grid](h, readout, partial, square, rows, H, r, h.stride(0), chunk, **tiles)
    return partial, square


def run_injection(h, anchor_code, true_prev, replace, readout, receiver_gate, predecessor_gate,
                  message, bias, write) -> torch.Tensor:
    """The three launches; h [.., B, H], the other arguments as in Injection.forward."""
    B, H = h.shape[-2:]
    r, m, rows = len(readout), len(message), h.numel() // H
    if rows == 0 or B < 2:
        return h.clone()
    flat = h.reshape(rows, H)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    anchor_code = anchor_code.expand(*h.shape[:-2], r).reshape(-1, r).contiguous()
    if replace is not None:
        replace = replace.expand(*h.shape[:-2], 1, 1).reshape(-1).to(torch.uint8)
        true_prev = true_prev.expand(*h.shape[:-2], B - 1, r).reshape(-1, r).contiguous()
    readout, receiver_gate, predecessor_gate, message, write = (
        w.contiguous() for w in (readout, receiver_gate, predecessor_gate, message, write))
    partial, square = run_readout(flat, readout)
    tiles, parts = blocking(rows, write), len(partial)
    row_tiles = ceil_div(rows, tiles["BM"])
    u = torch.empty(rows, m, dtype=write.dtype, device=h.device)
    gates = tiles | (dict(BK=64, num_warps=4, num_stages=3) if rows <= 16 else dict(BN=32))
    gate_kernel[row_tiles, ceil_div(m, gates["BN"])](
        partial, anchor_code, anchor_code if replace is None else true_prev,
        anchor_code if replace is None else replace, receiver_gate, predecessor_gate, message,
        bias, u, rows, r, m, math.sqrt(r), B, PARTS=parts, REPLACE=replace is not None, **gates)
    result = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    write_kernel[row_tiles, ceil_div(H, tiles["BN"])](
        u, write, flat, square, result, rows, H, m, flat.stride(0), B, PARTS=parts, **tiles)
    return result


class AdjacentInjection(torch.autograd.Function):
    """run_injection with a backward pass. It saves h alone and computes the rest again.

    Writing y = R h, n = |y|, z = G_r f + G_p prev + b, gate = sigmoid(z), said = M prev,
    u = gate said, s = |h| / sqrt(H), and d for the gradient of the loss:

        d delta = s dh'                       ds = delta . dh'         du = W^T d delta
        d said  = gate du                     dz = said gate (1 - gate) du
        d prev  = G_p^T dz + M^T d said       df = G_r^T dz + d prev of the row after
        dy      = sqrt(r) / n (df - (df . y) y / n^2)
        dh      = dh' + ds h / (|h| sqrt(H)) + R^T dy

    and for each weight the outer products of what it put out and what it read. Training runs
    thousands of rows at a time, where these products are bound by arithmetic: plain matmuls.
    """

    @staticmethod
    def forward(ctx, h, anchor_code, true_prev, replace, *weights):
        ctx.save_for_backward(h, anchor_code, true_prev, replace, *weights)
        return run_injection(h, anchor_code, true_prev, replace, *weights)

    @staticmethod
    def backward(ctx, grad):
        h, anchor_code, true_prev, replace, R, Gr, Gp, M, bias, W = ctx.saved_tensors
        B, H, r, dtype = *h.shape[-2:], len(R), R.dtype
        x = h[..., 1:, :].to(dtype)                                         # [.., T, H]
        y = F.linear(x, R)                                                  # [.., T, r]
        n = y.float().norm(dim=-1, keepdim=True).clamp_min(1e-12)
        f = (y.float() * (math.sqrt(r) / n)).to(dtype)
        prev = torch.cat((anchor_code[..., None, :].to(dtype).expand_as(f[..., :1, :]),
                          f[..., :-1, :]), dim=-2)
        if replace is not None:
            prev = torch.where(replace, true_prev.to(dtype), prev)
        gate = torch.sigmoid(F.linear(f, Gr, bias.to(dtype)) + F.linear(prev, Gp))
        said = F.linear(prev, M)
        u = gate * said
        length = x.float().norm(dim=-1, keepdim=True).clamp_min(1e-30)      # |h|
        d_out = grad[..., 1:, :]
        d_delta = (d_out.float() * (length / math.sqrt(H))).to(dtype)
        ds = (F.linear(u, W).float() * d_out.float()).sum(-1, keepdim=True)
        du = d_delta @ W
        d_said, dz = gate * du, said * gate * (1 - gate) * du
        d_prev = dz @ Gp + d_said @ M
        df, passed = dz @ Gr, d_prev
        if replace is not None:  # a token's code stood in: nothing flows to the neighbour
            passed = d_prev.masked_fill(replace, 0.0)
        df = df + F.pad(passed[..., 1:, :], (0, 0, 0, 1))
        y, df = y.float(), df.float()
        dy = (math.sqrt(r) / n * (df - (df * y).sum(-1, keepdim=True) * y / n ** 2)).to(dtype)
        dh = grad.clone()
        dh[..., 1:, :] += (ds * x.float() / (length * math.sqrt(H)) + (dy @ R).float()).to(h.dtype)
        outer = lambda out, read: out.flatten(0, -2).T @ read.flatten(0, -2)
        d_anchor, d_true = passed[..., 0, :], None
        if replace is not None and ctx.needs_input_grad[2]:
            d_true = d_prev.masked_fill(~replace, 0.0).sum_to_size(true_prev.shape)
        return (dh, d_anchor.sum_to_size(anchor_code.shape).to(anchor_code.dtype), d_true, None,
                outer(dy, x), outer(dz, f), outer(dz, prev), outer(d_said, prev),
                dz.flatten(0, -2).sum(0).to(bias.dtype), outer(d_delta, u))


def adjacent_injection(injection, l: int, h, anchor_code, true_prev=None, replace=None):
    """Injection.forward(l, h, ..): three launches, differentiable.

    Five layers read 5 (8.4 + 4.2) MB, and 3.1 MB of shared weights each time: 79 MB, floor 16 us.
    """
    weights = (injection.readouts[l].weight, injection.receiver_gate.weight,
               injection.predecessor_gate.weight, injection.message.weight, injection.bias,
               injection.writes[l].weight)
    if torch.is_autocast_enabled(h.device.type):
        weights = [w.to(torch.get_autocast_dtype(h.device.type)) for w in weights]
    if not covered(h, *weights):
        return dspine.Injection.forward(injection, l, h, anchor_code, true_prev, replace)
    return AdjacentInjection.apply(h, anchor_code, true_prev, replace, *weights)


# -------------------------------------------------------------------------------------------------
# 2. Transition cache in message space (sec. 7)
# -------------------------------------------------------------------------------------------------


@jit
def message_kernel(partial, codes, candidate_ids, anchor_ids, receiver_gate, predecessor_gate,
                   message, bias, u, rows, r, m, root, T, K, PARTS: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr):
    """gate_kernel where candidate a of position t-1 sends to position t: pair (t, a).

        u[t, a] = sigmoid(G_r f_t + G_p prev + b) * (M prev),    prev = sqrt(r) e(C_{t-1}[a])

    with the anchor in place of every C_0[a]. partial [PARTS, rows, r] of the rows = blocks T
    positions, codes [V, r], candidate_ids [rows, K], anchor_ids [blocks], u [rows K, m].
    Bytes: 3 m r 2 + rows K r 2 = 3.6 MB; floor 0.8 us.
    """
    pair = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    row = pair // K                                                         # the receiver
    first = row % T == 0
    token = tl.load(candidate_ids + pair - K, mask=(pair < rows * K) & (first == 0), other=0)
    anchor = tl.load(anchor_ids + row // T, mask=(pair < rows * K) & first, other=0)
    token = tl.where(first, anchor, token)
    received = tl.zeros((BM, BN), tl.float32)
    asked = tl.zeros((BM, BN), tl.float32)
    said = tl.zeros((BM, BN), tl.float32)
    own = tl.zeros((BM,), tl.float32)
    for start in range(0, r, BK):
        i = start + tl.arange(0, BK)
        y = tl.zeros((BM, BK), tl.float32)
        for s in tl.static_range(PARTS):
            y += tile(partial + s * rows * r, row, i, r, rows, r)
        own += tl.sum(y * y, 1)
        prev = tl.load(codes + token.to(tl.int64)[:, None] * r + i[None, :],
                       mask=(pair < rows * K)[:, None] & (i < r)[None, :], other=0.0)
        prev = prev.to(tl.float32) * root
        w = tile(receiver_gate, out, i, r, m, r)
        received = tl.dot(y.to(w.dtype), tl.trans(w), received, input_precision="ieee")
        w = tile(predecessor_gate, out, i, r, m, r)
        asked = tl.dot(prev.to(w.dtype), tl.trans(w), asked, input_precision="ieee")
        w = tile(message, out, i, r, m, r)
        said = tl.dot(prev.to(w.dtype), tl.trans(w), said, input_precision="ieee")
    scale = root / tl.maximum(tl.sqrt(own), 1e-12)
    b = tl.load(bias + out, mask=out < m, other=0.0).to(tl.float32)
    gate = tl.sigmoid(received * scale[:, None] + asked + b[None, :])
    tl.store(u + pair.to(tl.int64)[:, None] * m + out[None, :],
             (gate * said).to(u.dtype.element_ty),
             mask=(pair < rows * K)[:, None] & (out < m)[None, :])


@jit
def head_kernel(lm_head, candidate_ids, norm, pre, write, z, x, rows, H, m, stride, K, chunk,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Candidates' rows of the head, and the states, seen from message space.

        z[t, b] = W^T (g * w_b)        x[t, b] = pre_t . (g * w_b)         lines 0 .. rows K - 1
        z[t]    = W^T pre_t            x[t]    = |pre_t|^2                 the `rows` lines after

    lm_head [V, H], candidate_ids [rows, K], g = norm [H], pre [rows, H], W [H, m]; partial sums
    over slices of H: z [parts, rows K + rows, m], x [parts, rows K + rows].
    Bytes: rows K H 2 + H m 2 = 6.1 MB; floor 1.3 us.
    """
    line = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    lines, is_head = rows * K + rows, line < rows * K
    state = tl.where(is_head, line // K, line - rows * K)
    token = tl.load(candidate_ids + line, mask=is_head, other=0).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    dot = tl.zeros((BM,), tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, H), BK):
        i = start + tl.arange(0, BK)
        p = tile(pre, state, i, stride, rows, H).to(tl.float32)             # [BM, BK]
        g = tl.load(norm + i, mask=i < H, other=0.0).to(tl.float32)
        w = tl.load(lm_head + token[:, None] * H + i[None, :],
                    mask=is_head[:, None] & (i < H)[None, :], other=0.0).to(tl.float32)
        v = tl.where(is_head[:, None], w * g[None, :], p)
        dot += tl.sum(v * p, 1)
        w = tile(write, i, out, m, H, m)                                    # [BK, BN]
        acc = tl.dot(v.to(w.dtype), w, acc, input_precision="ieee")
    at = (part * lines + line).to(tl.int64)
    tl.store(z + at[:, None] * m + out[None, :], acc,
             mask=(line < lines)[:, None] & (out < m)[None, :])
    if tl.program_id(1) == 0:
        tl.store(x + at, dot, mask=line < lines)


@jit
def pair_kernel(u, z, x, gram, scores, norms, rows, H, m, K, PARTS: tl.constexpr,
                BC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The K x K part, one slice of message space a program; s_t = |pre_t| / sqrt(H).

        scores[slice, t, a, b] = s_t u[t, a] . z[t, b]
        norms[slice, t, a]     = 2 s_t u[t, a] . z[t] + s_t^2 u[t, a] . (W^T W u[t, a])

    u [rows K, m], z and x from head_kernel, W^T W [m, m]. Bytes: rows K m (2 + 4 parts), from the
    second-level cache mostly, and m^2 2 = 0.5 MB; floor 0.1 us.
    """
    t = tl.program_id(0)
    a = tl.arange(0, BC)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    pair = tl.where(a < K, t * K + a, rows * K)                             # past the end: masked
    lines = rows * K + rows
    heads = tl.zeros((BC, BN), tl.float32)                                  # z[t, b]
    state = tl.zeros((BN,), tl.float32)                                     # z[t]
    square = 0.0                                                            # |pre_t|^2
    for s in tl.static_range(PARTS):
        base = s * lines
        heads += tile(z + base * m, pair, i, m, rows * K, m)
        state += tl.load(z + (base + rows * K + t).to(tl.int64) * m + i, mask=i < m, other=0.0)
        square += tl.load(x + base + rows * K + t)
    product = tl.zeros((BC, BN), tl.float32)                                # W^T W u
    for start in range(0, m, BK):
        j = start + tl.arange(0, BK)
        product = tl.dot(tile(u, pair, j, m, rows * K, m), tile(gram, j, i, m, m, m), product,
                         input_precision="ieee")
    mine = tile(u, pair, i, m, rows * K, m).to(tl.float32)
    s = tl.sqrt(square / H)
    score = s * tl.dot(mine, tl.trans(heads), input_precision="ieee")       # [BC, BC]
    norm = tl.sum(mine * (2 * s * state[None, :] + s * s * product), 1)     # [BC]
    at = (tl.program_id(1) * rows + t).to(tl.int64) * K + a
    tl.store(scores + at[:, None] * K + a[None, :], score, mask=(a < K)[:, None] & (a < K)[None, :])
    tl.store(norms + at, norm, mask=a < K)


@jit
def finish_kernel(scores, norms, x, cache, rows, H, K, eps, PARTS: tl.constexpr,
                  SLICES: tl.constexpr, BC: tl.constexpr):
    """Sum the slices and divide by rms(pre_t + s_t W u), whose square is the bracket over H.

        cache[t, a, b] = (x[t, b] + scores[t, a, b]) / sqrt((|pre_t|^2 + norms[t, a]) / H + eps)
    """
    t = tl.program_id(0)
    a = tl.arange(0, BC)
    inside = (a < K)[:, None] & (a < K)[None, :]
    lines = rows * K + rows
    score = tl.zeros((BC, BC), tl.float32)
    norm = tl.zeros((BC,), tl.float32)
    for s in tl.static_range(SLICES):
        at = (s * rows + t).to(tl.int64) * K + a
        score += tl.load(scores + at[:, None] * K + a[None, :], mask=inside, other=0.0)
        norm += tl.load(norms + at, mask=a < K, other=0.0)
    plain = tl.zeros((BC,), tl.float32)
    for s in tl.static_range(PARTS):
        base = s * lines
        plain += tl.load(x + base + t * K + a, mask=a < K, other=0.0)
        norm += tl.load(x + base + rows * K + t)
    result = (score + plain[None, :]) / tl.sqrt(tl.maximum(norm / H, 0.0) + eps)[:, None]
    at = t.to(tl.int64) * K + a
    tl.store(cache + at[:, None] * K + a[None, :], result, mask=inside)


def transition_cache(draft: DSpine, pre, candidate_ids, anchor_ids, lm_head) -> torch.Tensor:
    """DSpine.transition_cache(pre, ..) by the identity of section 7; five launches, no gradient.

        cache[t, a, b] = (pre_t . (g w_b) + s_t u_ta . W^T (g w_b)) / rms(pre_t + s_t W u_ta)

    Bytes: R 8.4 MB, G_r G_p M 3.1 MB, W 4.2 MB, W^T W 0.5 MB, head rows and codes 2.5 MB; floor
    3.9 us. W^T W is computed once a checkpoint (DSpine.message_space).
    """
    c, injection, W = draft.config, draft.injection, draft.injection.writes[-1].weight
    gradient = torch.is_grad_enabled() and (pre.requires_grad or W.requires_grad)
    if (c.inject == "none" or gradient or candidate_ids.numel() == 0
            or not covered(pre, lm_head, draft.transfer_codes, W)):
        return DSpine.transition_cache(draft, pre, candidate_ids, anchor_ids, lm_head)
    *_, T, K = candidate_ids.shape
    H, m, r, device = c.hidden_size, c.message_size, c.transfer_rank, pre.device
    candidate_ids, anchor_ids = candidate_ids.contiguous(), anchor_ids.contiguous()
    flat, lm_head, W = pre.reshape(-1, H).contiguous(), lm_head.contiguous(), W.contiguous()
    rows, pairs = len(flat), len(flat) * K
    partial, _ = run_readout(flat, injection.readouts[-1].weight.contiguous())
    tiles = dict(BM=32, BN=32, BK=32, num_warps=4, num_stages=3)
    grid = ceil_div(pairs, tiles["BM"]), ceil_div(m, tiles["BN"])
    u = torch.empty(pairs, m, dtype=W.dtype, device=device)
    message_kernel[grid](
        partial, draft.transfer_codes.contiguous(), candidate_ids, anchor_ids,
        injection.receiver_gate.weight.contiguous(),
        injection.predecessor_gate.weight.contiguous(), injection.message.weight.contiguous(),
        injection.bias, u, rows, r, m, math.sqrt(r), T, K, PARTS=len(partial),
        **tiles)

    tiles |= dict(BM=64, BK=64) if W.itemsize == 2 else {}
    grid = ceil_div(pairs + rows, tiles["BM"]), ceil_div(m, tiles["BN"])
    parts = max(1, min(H // 512, 256 // (grid[0] * grid[1])))
    chunk = ceil_div(ceil_div(H, parts), tiles["BK"]) * tiles["BK"]
    parts = ceil_div(H, chunk)
    z = torch.empty(parts, pairs + rows, m, dtype=torch.float32, device=device)
    x = torch.empty(parts, pairs + rows, dtype=torch.float32, device=device)
    head_kernel[*grid, parts](lm_head, candidate_ids, draft.norm.weight, flat, W, z, x, rows, H, m,
                              flat.stride(0), K, chunk, **tiles)

    slices = ceil_div(m, 64)
    scores = torch.empty(slices, rows, K, K, dtype=torch.float32, device=device)
    norms = torch.empty(slices, rows, K, dtype=torch.float32, device=device)
    gram = draft.message_space().gram
    pair_kernel[rows, slices](u, z, x, gram, scores, norms, rows, H, m, K, PARTS=parts, BC=fit(K),
                              BN=64, BK=64, num_warps=4, num_stages=3)
    cache = torch.empty(*candidate_ids.shape, K, dtype=torch.float32, device=device)
    finish_kernel[(rows,)](scores, norms, x, cache, rows, H, K, c.rms_norm_eps, PARTS=parts,
                           SLICES=slices, BC=fit(K), num_warps=1)
    return cache


# -------------------------------------------------------------------------------------------------
# 3. The path (sec. 7): the whole left-to-right walk in one launch
# -------------------------------------------------------------------------------------------------


@jit
def path_kernel(cache, candidate_ids, uniform, tokens, rows, probs, T, K, temperature,
                SAMPLE: tl.constexpr, BC: tl.constexpr):
    """One request a program; row a of position t belongs to the candidate chosen at t-1.

        q = softmax(cache[t, a] / temperature)
        b = first index whose cumulative q exceeds uniform[t] * total        (or the argmax)
        a <- b, and on to t + 1

    Bytes: T K^2 4 = 15 kB; bound by the latency of T dependent steps, so a position's whole table
    is fetched while the position before is decided.
    """
    request = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BC)
    inside = (b < K)[:, None] & (b < K)[None, :]
    at = cache + request * T * K * K + b[:, None] * K + b[None, :]
    row = 0
    table = tl.load(at, mask=inside, other=float("-inf"))                   # [BC, BC]
    for t in range(T):
        following = tl.load(at + min(t + 1, T - 1) * K * K, mask=inside, other=float("-inf"))
        scores = tl.sum(tl.where((b == row)[:, None], table, 0.0), 0)       # [BC]
        if SAMPLE:
            scores = tl.div_rn(scores, temperature + tl.zeros((BC,), tl.float32))
            q = tl.exp(scores - tl.max(scores, 0))
            q = tl.div_rn(q, tl.sum(q, 0) + tl.zeros((BC,), tl.float32))    # rounded as the twin's
            cdf = tl.cumsum(q.to(tl.float64), 0).to(tl.float32)
            total = tl.sum(tl.where(b == K - 1, cdf, 0.0), 0)
            below = cdf <= tl.load(uniform + request * T + t) * total
            row = tl.minimum(tl.sum((below & (b < K)).to(tl.int32), 0), K - 1)
        else:
            row = tl.argmax(scores, 0)
            q = (b == row).to(tl.float32)
        step = request * T + t
        tl.store(probs + step * K + b, q, mask=b < K)
        tl.store(rows + step, row.to(tl.int64))
        tl.store(tokens + step, tl.load(candidate_ids + step * K + row))
        table = following


def select_path(cache, candidate_ids, temperature: float = 0.0, generator=None, *, top_k: int = 0,
                top_p: float = 1.0, uniform=None):
    """select_path of dspine.py in one launch; filters on the draft go to the twin."""
    *lead, T, K = candidate_ids.shape
    if 0 < top_k < K or top_p < 1 or cache.dtype != torch.float32 or candidate_ids.numel() == 0:
        return dspine.select_path(cache, candidate_ids, temperature, generator, top_k=top_k,
                                  top_p=top_p, uniform=uniform)
    if temperature and uniform is None:
        uniform = torch.rand((*lead, T), generator=generator, device=cache.device)
    cache, candidate_ids = cache.contiguous(), candidate_ids.contiguous()
    tokens = torch.empty((*lead, T), dtype=torch.long, device=cache.device)
    rows, probs = torch.empty_like(tokens), cache.new_empty(*lead, T, K)
    path_kernel[(math.prod(lead),)](
        cache, candidate_ids, uniform.contiguous() if temperature else cache, tokens, rows, probs,
        T, K, float(temperature or 1.0), SAMPLE=bool(temperature), BC=fit(K, 2), num_warps=1)
    return tokens, rows, probs


# -------------------------------------------------------------------------------------------------
# 4. Verification (sec. 8): the last program to finish combines what all of them found
# -------------------------------------------------------------------------------------------------

_tickets: dict = {}


def ticket(device) -> torch.Tensor:
    """A counter by which programs tell who is last; each kernel leaves it at zero.

    One a stream, where launches follow each other.
    """
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if key not in _tickets:
        _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _tickets[key]


@jit
def greedy_kernel(logits, proposals, values, indices, counter, result, V, T,
                  BV: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr):
    """best_t = argmax of logits[t]; accepted = leading t with proposal_t = best_t; next token best.

    Program (t, n) looks at slice n of row t. logits [T+1, V], proposals [T], values and indices
    [T+1, slices], result [2]. Bytes: (T+1) V 4 = 9.7 MB; floor 2.0 us.
    """
    t, n, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    v = n * BV + tl.arange(0, BV)
    x = tl.load(logits + t.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)                                   # as torch.argmax
    most = tl.max(x, 0)
    tl.store(values + t * slices + n, most)
    tl.store(indices + t * slices + n, tl.min(tl.where((x == most) & (v < V), v, V), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == (T + 1) * slices - 1:
        tl.store(counter, 0)
        row, part = tl.arange(0, BT), tl.arange(0, BP)
        at = row[:, None] * slices + part[None, :]
        inside = (row <= T)[:, None] & (part < slices)[None, :]
        each = tl.load(values + at, mask=inside, other=float("-inf"), volatile=True)
        where = tl.load(indices + at, mask=inside, other=V, volatile=True)  # [BT, BP]
        best = tl.min(tl.where(each == tl.max(each, 1)[:, None], where, V), 1)  # the first of ties
        proposed = tl.load(proposals + row, mask=row < T, other=-1)
        accepted = tl.min(tl.where((row < T) & (best == proposed), T, row), 0)
        tl.store(result, accepted.to(tl.int64))
        tl.store(result + 1, tl.sum(tl.where(row == accepted, best, 0), 0).to(tl.int64))


@jit
def residual(target_probs, candidate_ids, draft_probs, accepted, v, T, V, K: tl.constexpr):
    """max(p - q, 0) at the refused position for tokens v, and p itself. q is zero but at K ids."""
    p = tl.load(target_probs + accepted.to(tl.int64) * V + v, mask=v < V, other=0.0)
    left = p
    for k in tl.static_range(K):
        at = accepted * K + k
        refused = accepted < T
        token = tl.load(candidate_ids + at, mask=refused, other=-1)
        left = tl.where(v == token, p - tl.load(draft_probs + at, mask=refused, other=0.0), left)
    return tl.maximum(left, 0.0), p


@jit
def sampled_kernel(target_probs, tokens, candidate_ids, draft_probs, uniform, sums, counter, result,
                   T, V, K: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                   BP: tl.constexpr):
    """Accept x_t while uniform_t q(x_t) < p(x_t); sample the token after the last accepted.

        n     = accepted
        left  = max(p_n - q_n, 0), or p_n after a full block (and where rounding emptied it)
        token = first v whose cumulative left exceeds uniform_T * total

    Every program finds n itself (T numbers) and sums its slice of the vocabulary; the last one
    finds the slice that holds the draw, then the token in it. target_probs [T+1, V], tokens [T],
    candidate_ids and draft_probs [T, K], uniform [T+1], sums [2, slices] float64, result [2].
    Bytes: V 4 = 0.6 MB; floor 0.1 us.
    """
    t, k = tl.arange(0, BT), tl.arange(0, BC)
    token = tl.load(tokens + t, mask=t < T, other=0)
    p = tl.load(target_probs + t.to(tl.int64) * V + token, mask=t < T, other=0.0)
    inside = (t < T)[:, None] & (k < K)[None, :]
    ids = tl.load(candidate_ids + t[:, None] * K + k[None, :], mask=inside, other=-1)
    q = tl.load(draft_probs + t[:, None] * K + k[None, :], mask=inside, other=0.0)
    q = tl.sum(tl.where(ids == token[:, None], q, 0.0), 1)                  # [BT]
    u = tl.load(uniform + t, mask=t < T, other=0.0)
    accepted = tl.min(tl.where((t < T) & (u * q < p), T, t), 0)

    n, slices = tl.program_id(0), tl.num_programs(0)
    left, p = residual(target_probs, candidate_ids, draft_probs, accepted,
                       n * BV + tl.arange(0, BV), T, V, K)
    tl.store(sums + n, tl.sum(left.to(tl.float64), 0))
    tl.store(sums + slices + n, tl.sum(p.to(tl.float64), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == slices - 1:
        tl.store(counter, 0)
        part = tl.arange(0, BP)
        mass = tl.load(sums + part, mask=part < slices, other=0.0, volatile=True)
        empty = tl.sum(mass, 0) == 0.0
        if empty:
            mass = tl.load(sums + slices + part, mask=part < slices, other=0.0, volatile=True)
        draw = tl.load(uniform + T) * tl.sum(mass, 0).to(tl.float32)
        below = tl.cumsum(mass, 0).to(tl.float32) <= draw
        n = tl.minimum(tl.sum(below.to(tl.int32), 0), slices - 1)
        v = n * BV + tl.arange(0, BV)
        left, p = residual(target_probs, candidate_ids, draft_probs, accepted, v, T, V, K)
        left = tl.where(empty, p, left)
        before = tl.sum(tl.where(part < n, mass, 0.0), 0)
        cdf = (before + tl.cumsum(left.to(tl.float64), 0)).to(tl.float32)
        found = n * BV + tl.sum((cdf <= draw).to(tl.int32), 0)
        last = tl.max(tl.where(left > 0, v, 0), 0)                          # never one of mass 0
        tl.store(result, accepted.to(tl.int64))
        tl.store(result + 1, tl.minimum(found, last).to(tl.int64))


def verify_greedy(logits: torch.Tensor, proposals: torch.Tensor) -> tuple[int, int]:
    """verify_greedy of dspine.py in one launch."""
    (rows, V), device = logits.shape, logits.device
    if logits.dtype != torch.float32:
        return dspine.verify_greedy(logits, proposals)
    BV = 4096
    slices = ceil_div(V, BV)
    values = torch.empty(rows, slices, dtype=torch.float32, device=device)
    indices = torch.empty(rows, slices, dtype=torch.int32, device=device)
    result = torch.empty(2, dtype=torch.long, device=device)
    greedy_kernel[rows, slices](
        logits.contiguous(), proposals.contiguous(), values, indices, ticket(device), result, V,
        rows - 1, BV=BV, BT=fit(rows, 1), BP=fit(slices, 1), num_warps=8)
    return tuple(result.tolist())


def verify_sampled(target_probs, proposal: Proposal, uniform) -> tuple[int, int]:
    """verify_sampled of dspine.py in one launch."""
    tokens, candidate_ids, draft_probs = proposal
    (rows, V), K, device = target_probs.shape, candidate_ids.shape[-1], target_probs.device
    if {x.dtype for x in (target_probs, draft_probs, uniform)} != {torch.float32}:
        return dspine.verify_sampled(target_probs, proposal, uniform)
    BV = 2048
    slices = ceil_div(V, BV)
    sums = torch.empty(2, slices, dtype=torch.float64, device=device)
    result = torch.empty(2, dtype=torch.long, device=device)
    sampled_kernel[(slices,)](
        target_probs.contiguous(), tokens.contiguous(), candidate_ids.contiguous(),
        draft_probs.contiguous(), uniform.contiguous(), sums, ticket(device), result, rows - 1, V,
        K=K, BV=BV, BT=fit(rows, 1), BC=fit(K, 1), BP=fit(slices, 1), num_warps=8)
    return tuple(result.tolist())


# -------------------------------------------------------------------------------------------------
# 5. Do they agree with their twins on this device?
# -------------------------------------------------------------------------------------------------


@functools.cache
def agree(device: torch.device) -> bool:
    """Asked by "auto" before the kernels are used on `device`: once, mostly compiling.

    Where they differ from their twins, or Triton raises, a warning says so, and they stay off.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # Triton's own, of its settings
            wrong = ", ".join(disagreements(device))
    except Exception as error:  # Triton, a driver or a compiler: many types
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    if wrong:
        warnings.warn(f"kernels are off on {device}, they do not do there what PyTorch does: "
                      f"{wrong}", stacklevel=2)
    return not wrong


@torch.no_grad()
def disagreements(device: torch.device):
    """Names of the functions that differ from their twins on a small random case.

    Compared with float64 on the CPU, relative to the largest value: 1e-4 in float32, 3e-2 in
    bfloat16 and in float32 under autocast, as in training. Choices must be equal. Sizes are
    multiples of 16, for which Triton compiles as for real ones, and of no tile.
    """
    c = DSpineConfig(
        vocab_size=5008, hidden_size=1040, num_target_layers=2, target_layer_ids=[0],
        mask_token_id=0, num_hidden_layers=1, intermediate_size=16, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, block_size=16, transfer_rank=80, message_size=48)
    N, T, K, V, H = 2, c.block_size - 1, c.top_k, c.vocab_size, c.hidden_size
    this, cpu = sys.modules[__name__], torch.device("cpu")
    on = lambda device, *tensors: [x.to(device) for x in tensors]
    with torch.random.fork_rng(devices=[]), cpu, torch.autocast(device.type, enabled=False):
        torch.default_generator.manual_seed(0)  # the CPU's alone
        draft = DSpine(c).float().requires_grad_(False)
        draft.injection.bias.normal_()
        new = lambda *size: torch.randn(*size, dtype=torch.float32)
        draft.transfer_codes = F.normalize(new(V, c.transfer_rank), dim=-1)
        h, head, cache, logits = new(N, 1, T + 1, H), new(V, H), new(N, T, K, K), new(T + 1, V)
        uniform = torch.rand(T + 1, dtype=torch.float32)
        ids, anchors = new(N, T, V).topk(K).indices, torch.arange(N)        # ids [N, T, K]
        codes, replace = draft.code(ids[:, None, :, 0]), (anchors == 1)[:, None, None, None]
        tokens, _, probs = dspine.select_path(cache[0], ids[0], 0.8, uniform=uniform[:T])
        logits[torch.arange(4), tokens[:4]] += 20                           # four are accepted
        path = Proposal(tokens, ids[0], probs)
        copied = Proposal(tokens, tokens[:, None], torch.ones_like(probs[:, :1]))
        nothing = Proposal(*(x[:0] for x in path))

        def values(ops, dtype, device):
            own = copy.deepcopy(draft).to(device, dtype)
            x, true, w = on(device, *(x.to(dtype) for x in (h, codes, head)))
            known, after, swap = on(device, ids, anchors, replace)
            inject = lambda n, *more: ops.adjacent_injection(own.injection, 0, x[:n],
                                                             true[:n, :, 0], *more)
            yield "adjacent_injection", torch.cat((inject(1), inject(N, true, swap)))
            yield "transition_cache", ops.transition_cache(own, x[:, 0, 1:], known, after, w)

        def choices(ops, device):
            table, known, u, z = on(device, cache, ids, uniform, logits)
            p = z.softmax(-1)
            yield "select_path", ops.select_path(table, known)[0]
            yield "select_path, sampled", ops.select_path(
                table, known, 0.8, uniform=u[:T].expand(N, T))[0]
            for offer in path, copied, nothing:
                offer = Proposal(*on(device, *offer))
                rows = len(offer.tokens) + 1
                yield "verify_greedy", ops.verify_greedy(z[:rows], offer.tokens)
                yield "verify_sampled", ops.verify_sampled(p[:rows], offer, u[:rows])

        half = torch.float16 if INTERPRET else torch.bfloat16
        exact = dict(values(dspine.Plain, torch.float64, cpu))
        for dtype, cast in (torch.float32, False), (half, False), (torch.float32, True):
            with torch.autocast(device.type, half, enabled=cast):
                for name, got in values(this, dtype, device):
                    far = (got.cpu() - exact[name]).abs().max() / exact[name].abs().max()
                    if not far < (1e-4 if dtype == torch.float32 and not cast else 3e-2):
                        yield f"{name} in {dtype}{' under autocast' * cast}"
        for (name, got), (_, want) in zip(choices(this, device), choices(dspine.Plain, cpu)):
            if torch.as_tensor(got).tolist() != torch.as_tensor(want).tolist():
                yield name


# -------------------------------------------------------------------------------------------------
# 6. A draft step as one CUDA graph
# -------------------------------------------------------------------------------------------------


class GraphedDraft:
    """A draft whose steps replay a CUDA graph: one launch for the host, not several hundred.

        draft = GraphedDraft(DSpine.from_pretrained(folder, target), target)
        generate(target, draft, input_ids, max_new_tokens=100)

    A graph repeats the same kernels on the same addresses, so everything a step reads or writes
    lives in buffers that stay: anchors, new taps (padded to B positions), uniforms, the context's
    keys and values [N, kv_heads, max_context + B, D], the outputs. Padding goes into the context
    behind its end, where no query looks and the next step writes. One graph is captured for each
    context bucket (256, 512, ..) and for greedy and sampled choice, at its first use. Whatever
    does not fit goes to DSpine.propose: a shorter block, filters, long contexts, ablations, and
    every step while somebody watches (draft.watch).

    Weights must not change once a graph is captured. capture=False runs the same steps on the
    same buffers without graphs, on any device.
    """

    def __init__(self, draft: DSpine, target, requests: int = 1, max_context: int = 4096,
                 capture: bool = True):
        if capture and not (triton is not None and draft.fc.weight.is_cuda):
            raise ValueError("GraphedDraft needs Triton and a draft on CUDA: use the draft itself")
        c, N, weight = draft.config, requests, draft.fc.weight
        self.draft, self.config, self.capture = draft, c, capture
        first = draft.start(target)
        self.embed, self.lm_head, self.draft_head = first.embed, first.lm_head, first.draft_head
        draft.inv_freq = draft.inv_freq.to(weight.device)  # a copy from the host is no part of it
        new = lambda *shape, like=weight: torch.zeros(shape, dtype=like.dtype, device=weight.device)
        ids = torch.zeros(0, dtype=torch.long)
        self.anchor_ids, self.starts, self.counts = (new(N, like=ids) for _ in range(3))
        self.taps = new(N, c.block_size, draft.fc.in_features)
        self.uniform = new(N, c.block_size - 1, like=torch.zeros(0))
        self.temperature = torch.ones(1, device=weight.device)
        size = N, c.num_key_value_heads, max_context + c.block_size, c.head_dim
        self.keys_values = [(new(*size), new(*size)) for _ in range(c.num_hidden_layers)]
        self.buckets = [b for i in range(8, 40) if (b := 1 << i) < max_context] + [max_context]
        self.graphs, self.pool, self.live, self.filled = {}, None, None, 0

    @property
    def kernels(self) -> str:
        return self.draft.kernels

    def start(self, target) -> DraftState:
        return self.draft.start(target)

    def load(self, request: int, state: DraftState):
        """Copy a state's context into the buffers, as that of request 0 .. N-1."""
        for kept, pair in zip(self.keys_values, state.keys_values):
            for buffer, values in zip(kept, pair):
                buffer[request, :, :state.length].copy_(values[0])

    # -- what a graph holds -----------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, bucket: int, sample: bool):
        """Append the new taps, run the blocks, choose. All sizes are fixed, all inputs buffers."""
        draft, c, device = self.draft, self.config, self.taps.device
        ops, (N, B, _) = dspine.operations(draft.kernels, self.taps), self.taps.shape
        at = self.starts[:, None] + torch.arange(B, device=device)          # [N, B] positions
        context, (cos, sin) = draft.encode_context(self.taps), draft.rope(at)
        for layer, kept in zip(draft.layers, self.keys_values):
            for old, add in zip(kept, layer.self_attn.keys_values(context, cos, sin)):
                old.scatter_(2, at[:, None, :, None].expand_as(add), add)   # [N, kv_heads, B, D]
        anchors = (self.starts + self.counts)[:, None]                      # [N, 1]
        inputs = torch.full((N, 1, B), c.mask_token_id, device=device)
        inputs[..., 0] = self.anchor_ids[:, None]
        out = draft.forward_blocks(
            F.embedding(inputs, self.embed), anchors,
            [(k[:, :, :bucket], v[:, :, :bucket]) for k, v in self.keys_values],
            dspine.block_mask(anchors, bucket, B), draft.code(inputs[..., 0]), features=False)
        dense = lambda x: x[:, 0, 1:].clone(memory_format=torch.contiguous_format)
        hidden, pre = dense(out.hidden_states), dense(out.pre_injection)    # [N, T, H]
        scores, candidate_ids = draft.candidates(hidden, self.draft_head)
        cache = ops.transition_cache(draft, pre, candidate_ids, self.anchor_ids, self.lm_head)
        if sample:  # a buffer, unlike an argument, may change from replay to replay
            cache = cache / self.temperature
        tokens, _, probs = ops.select_path(cache, candidate_ids, float(sample),
                                           uniform=self.uniform if sample else None)
        return tokens, candidate_ids, probs, scores.isfinite().all()

    def replay(self, bucket: int, sample: bool):
        """forward() as a graph, captured at first use (or eagerly where capture is off)."""
        if not self.capture:
            return self.forward(bucket, sample)
        if (bucket, sample) not in self.graphs:
            side = torch.cuda.Stream()  # compile and warm up where nothing else runs
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.forward(bucket, sample)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = self.forward(bucket, sample)
            self.pool = self.pool or graph.pool()
            self.graphs[bucket, sample] = graph, outputs
        graph, outputs = self.graphs[bucket, sample]
        graph.replay()
        return outputs

    # -- steps ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, taps, starts, counts, anchor_ids, temperature: float = 0.0, generator=None):
        """One step of N requests whose contexts lie in the buffers (load) up to starts [N].

        taps [N, s, n*H] holds counts [N] <= s <= B new positions of each, anchor_ids [N] the
        anchors behind them. Returns a Proposal of tokens [N, T], candidate_ids and probs [N, T, K],
        which the next step overwrites.
        """
        longest = int(torch.as_tensor(starts).max()) + self.config.block_size
        bucket = next(b for b in self.buckets if b >= min(longest, self.buckets[-1]))
        self.taps[:, :taps.shape[1]].copy_(taps)
        for buffer, values in ((self.starts, starts), (self.counts, counts),
                               (self.anchor_ids, anchor_ids)):
            buffer.copy_(torch.as_tensor(values))
        if temperature:
            self.temperature.fill_(temperature)
            self.uniform.copy_(torch.rand(self.uniform.shape, generator=generator,
                                          device=self.uniform.device))
        tokens, candidate_ids, probs, finite = self.replay(bucket, bool(temperature))
        if not finite:
            raise FloatingPointError("the draft's scores are not finite (float16 overflow?): "
                                     "use bfloat16 or float32")
        return Proposal(tokens, candidate_ids, probs)

    def fits(self, state, new: int, length: int, top_k: int, top_p: float) -> bool:
        c = self.config
        return (length == c.block_size - 1 and 0 < new <= c.block_size and state.length > 0
                and state.length + new <= self.buckets[-1] and len(self.anchor_ids) == 1
                and c.attention == "causal" and c.select == "cache" and self.draft.watch is None
                and not 0 < top_k < c.top_k and top_p == 1)

    @torch.no_grad()
    def propose(self, state: DraftState, context_states, anchor_id: int, length: int, *,
                temperature=0.0, top_k=0, top_p=1.0, generator=None) -> Proposal:
        """DSpine.propose, by one replay where the step fits."""
        new = len(context_states)
        if not self.fits(state, new, length, top_k, top_p):
            return self.draft.propose(state, context_states, anchor_id, length, generator=generator,
                                      temperature=temperature, top_k=top_k, top_p=top_p)
        if self.live is not state or self.filled != state.length:  # the buffers hold another's
            if self.live is not None:  # whose state may look into them
                self.live.keys_values = [tuple(x.clone() for x in pair)
                                         for pair in self.live.keys_values]
            self.load(0, state)
            self.live = state
        proposal = self.step(context_states[None], [state.length], [new], [anchor_id], temperature,
                             generator)
        state.length = self.filled = state.length + new
        state.keys_values = [tuple(x[:, :, :state.length] for x in pair)
                             for pair in self.keys_values]
        return Proposal(*(x[0].clone() for x in proposal))
