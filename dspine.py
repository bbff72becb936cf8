"""DSpine: a parallel drafter for lossless speculative decoding, in one file.

Paper: DSpine, arXiv 2609.36173. Sections are named after the parts of its method: 2 context,
3 backbone, 4 transfer space, 5 injection, 6 objective, 7 transition cache, 8 verification,
9 checkpoint. Lossless rule: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023
(arXiv 2302.01318).

One draft step: the target has emitted a token it has not run yet, the ANCHOR, at position p. The
draft sees the target's hidden states at positions < p (the CONTEXT) and a block of B inputs
[anchor, mask, mask, ...]. One parallel forward yields hidden states for positions p+1 .. p+B-1.
Each position passes its forming prediction to its successor, after every layer, through a gated
injection. A transition cache scores K candidates against K predecessors at every position, so
that choosing the B-1 PROPOSALS is a walk of look-ups. The target runs [anchor, proposals] once,
keeps the longest correct prefix and adds one token of its own: the next anchor.

Symbols, used for shapes throughout:
    N rows, A anchors (blocks) a row, B block size: 1 anchor + T = B-1 proposals, S context length,
    V vocabulary, H hidden size of target and draft, L draft layers, K candidates a position,
    r rank of the transfer space, m message size, D head dimension, n tapped target layers.

`import dspine` needs torch alone; transformers and safetensors are imported where they are used.
"""

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# -------------------------------------------------------------------------------------------------
# 1. Configuration (sec. 9: the published config.json)
# -------------------------------------------------------------------------------------------------

ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # those whose frequencies ignore the length


def tapped_layers(num_target_layers: int, num_taps: int) -> list[int]:
    """Target layers whose OUTPUT the draft reads (sec. 2): spread from layer 1 to layer T-3.

    n = 1 gives [T // 2], else round(1 + i * (T - 4) / (n - 1)) for i = 0 .. n-1. The last layer is
    never tapped: transformers reports it after the final norm, other engines before it.
    """
    T, n = num_target_layers, num_taps
    ids = [T // 2] if n == 1 else [round(1 + i * (T - 4) / (n - 1)) for i in range(n)]
    if n < 1 or len(set(ids)) < n or not 0 <= min(ids) <= max(ids) < T - 1:
        raise ValueError(f"a target of {T} layers has no {n} distinct layers to tap; give "
                         "target_layer_ids or use fewer draft layers")
    return ids


def token_id_set(ids) -> set[int]:
    """None, one id, or several (list, tensor) -> a set."""
    if ids is None:
        return set()
    ids = ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids
    return {int(i) for i in ([ids] if isinstance(ids, int) else ids)}


@dataclass
class DSpineConfig:
    """Sizes and constants of a draft. Invalid values raise ValueError naming the field."""

    # the target, which the draft must match
    vocab_size: int                    # V, rows of the target's output head
    hidden_size: int                   # H, shared: the draft uses the target's embedding and head
    num_target_layers: int             # refuses a draft made for another depth
    target_layer_ids: list[int]        # the n tapped layers; index l is the output of layer l
    mask_token_id: int                 # its embedding is the input of every position to be drafted
    # the backbone (sec. 3)
    num_hidden_layers: int             # L
    intermediate_size: int             # width of the SwiGLU MLP
    num_attention_heads: int
    num_key_value_heads: int           # grouped-query attention: fewer key/value heads
    head_dim: int                      # D; may differ from hidden_size / heads
    block_size: int = 16               # B: one anchor and B-1 proposals
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768  # read by yarn only
    rope_parameters: dict = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 1e4})
    # transfer space and injection (sec. 4, 5)
    transfer_rank: int = 1024          # r: principal directions of the head that are kept
    message_size: int = 512            # m: width of the gated message
    top_k: int = 16                    # K: candidates a position; the cache is K x K
    # objective (sec. 6)
    ce_weight: float = 0.1             # the rest, 0.9, goes to the L1 distance to the target
    alignment_weight: float = 0.5      # beta after its warm-up
    alignment_warmup_steps: int = 146
    replacement_layers: int = 3        # first layers that may read the true predecessor
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6
    replacement_end_ratio: float = 1 / 3
    candidate_mass_threshold: float = 1e-4  # below it the target says nothing about the candidates
    # ablations, not in published checkpoints (none + bidirectional + argmax is DFlash)
    inject: str = "every"              # "every" layer | "last" | "none"
    attention: str = "causal"          # inside the block: "causal" | "bidirectional"
    select: str = "cache"              # "cache" | "argmax" of each position on its own

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_target_layers", "num_hidden_layers",
                     "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                     "transfer_rank", "message_size", "top_k", "alignment_warmup_steps"):
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("ce_weight", "replacement_probability", "replacement_hold_ratio",
                     "replacement_end_ratio"):
            self._check(name, 0 <= getattr(self, name) <= 1, "must lie in 0 .. 1")
        for name, allowed in (("inject", ("every", "last", "none")),
                              ("attention", ("causal", "bidirectional")),
                              ("select", ("cache", "argmax"))):
            self._check(name, getattr(self, name) in allowed, f"must be one of {allowed}")
        V, T, taps, rope = (self.vocab_size, self.num_target_layers, self.target_layer_ids,
                            self.rope_parameters)
        self._check("block_size", self.block_size >= 2, "must be at least 2: anchor and proposal")
        self._check("head_dim", self.head_dim % 2 == 0, "must be even (rotary pairs)")
        self._check("num_key_value_heads",
                    self.num_attention_heads % self.num_key_value_heads == 0,
                    f"must divide num_attention_heads = {self.num_attention_heads}")
        self._check("top_k", self.top_k <= V, f"exceeds vocab_size = {V}")
        self._check("transfer_rank", self.transfer_rank <= min(self.hidden_size, V),
                    f"exceeds hidden_size = {self.hidden_size} or vocab_size = {V}")
        self._check("mask_token_id", 0 <= self.mask_token_id < V,
                    f"must be a row of the target's embedding, 0 .. {V - 1}; choose a special "
                    "token that never occurs in text, such as a reserved one")
        self._check("target_layer_ids", len(taps) > 0 and len(set(taps)) == len(taps)
                    and all(0 <= i < T - 1 for i in taps),
                    f"must be distinct and in 0 .. {T - 2} (the last layer's output is reported "
                    "after the final norm by some engines and before it by others)")
        self._check("rope_parameters", rope.get("rope_type") in ROPE_TYPES,
                    f"needs a rope_type in {ROPE_TYPES}")
        self._check("rope_parameters", rope.get("rope_theta", 0) > 0, "needs rope_theta")

    def _check(self, name: str, ok: bool, why: str):
        if not ok:
            raise ValueError(f"DSpineConfig.{name} = {getattr(self, name)!r}: {why}")

    @classmethod
    def for_target(cls, target, num_hidden_layers: int = 3, **overrides) -> "DSpineConfig":
        """Sizes that fit `target`, a transformers causal LM: its layer shape, taps spread over it.

        mask_token_id must be among the overrides, and be none of the target's own special ids.
        """
        c = target.config.get_text_config()
        get = lambda name, default: getattr(c, name, None) or default
        heads = getattr(c, "num_attention_heads", None)
        if heads is None:
            raise ValueError(f"{type(target).__name__} has no attention heads to size a draft by")
        sizes = dict(
            vocab_size=target.get_output_embeddings().weight.shape[0], hidden_size=c.hidden_size,
            num_target_layers=c.num_hidden_layers, num_hidden_layers=num_hidden_layers,
            intermediate_size=get("intermediate_size", 4 * c.hidden_size),
            num_attention_heads=heads, num_key_value_heads=get("num_key_value_heads", heads),
            head_dim=get("head_dim", c.hidden_size // heads),
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            rope_parameters={"rope_type": "default",
                             "rope_theta": get("rope_parameters", {}).get("rope_theta", 1e4)},
            max_position_embeddings=get("max_position_embeddings", 32768)) | overrides
        if "target_layer_ids" not in sizes:
            sizes["target_layer_ids"] = tapped_layers(c.num_hidden_layers, num_hidden_layers)
        special = set().union(*(token_id_set(getattr(c, name, None))
                                for name in ("eos_token_id", "bos_token_id", "pad_token_id")))
        if sizes.get("mask_token_id") in special | {None}:
            raise ValueError(f"mask_token_id = {sizes.get('mask_token_id')}: name a token id that "
                             "never occurs in text, such as a reserved one, and none of the "
                             f"target's own {sorted(special)}")
        return cls(**sizes)

    @classmethod
    def from_dict(cls, raw: dict) -> "DSpineConfig":
        """Read the published config.json, flat or under a key `config`, rope in v4 or v5 style."""
        raw = raw.get("config", raw) if isinstance(raw, dict) else {}
        raw = raw if isinstance(raw, dict) else {}
        needed = "dflash_config", "dspine_config", "hidden_size", "num_attention_heads"
        missing = [k for k in needed if not raw.get(k)]
        if missing:
            raise ValueError(f"config.json lacks {missing}: this is no DSpine draft")
        flat = {**raw, **raw["dflash_config"], **raw["dspine_config"]}
        if not flat.get("rope_parameters"):  # before transformers 5: beside rope_scaling
            scaling = dict(flat.get("rope_scaling") or {})
            scaling.setdefault("rope_type", scaling.pop("type", "default"))
            flat["rope_parameters"] = {"rope_theta": flat.get("rope_theta", 0), **scaling}
        sizes = {raw.get("block_size"), raw["dflash_config"].get("block_size")} - {None}
        if len(sizes) != 1:
            raise ValueError(f"config.json must state one block_size, found {sorted(sizes)}")
        flat["block_size"] = sizes.pop()
        if "head_dim" not in flat:
            flat["head_dim"] = flat["hidden_size"] // flat["num_attention_heads"]
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{k: v for k, v in flat.items() if k in known})
        except TypeError as error:  # a required field is absent; Python's message names it
            raise ValueError(f"config.json: {error}") from None

    def to_dict(self) -> dict:
        """The published config.json; ablation fields only where they leave the method."""
        values = asdict(self)
        for name, default in (("inject", "every"), ("attention", "causal"), ("select", "cache")):
            if values[name] == default:
                del values[name]
        take = lambda *names: {k: values.pop(k) for k in names if k in values}
        dflash = take("mask_token_id", "target_layer_ids") | {"block_size": self.block_size}
        dspine = take("transfer_rank", "message_size", "top_k", "ce_weight", "alignment_weight",
                      "alignment_warmup_steps", "replacement_layers", "replacement_probability",
                      "replacement_hold_ratio", "replacement_end_ratio",
                      "candidate_mass_threshold", "inject", "attention", "select")
        return {"architectures": ["DSpineDraftModel"], "model_type": "qwen3", **values,
                "hidden_act": "silu", "layer_types": ["full_attention"] * self.num_hidden_layers,
                "tie_word_embeddings": False, "dflash_config": dflash, "dspine_config": dspine}


# -------------------------------------------------------------------------------------------------
# 2. Backbone (sec. 3): Qwen3-style layers over [context; block]
# -------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight, with float32 master weights under bfloat16 autocast too."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rope_frequencies(config: DSpineConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin (1 but for yarn)."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponent = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        return rope["rope_theta"] ** -exponent, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    like = Qwen3Config(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope))
    with torch.device("cpu"):  # also while the draft is built on the meta device
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](like, device="cpu")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: x [N, heads, Q, D] with cos, sin [N, 1, Q, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and from the block."""

    def __init__(self, c: DSpineConfig):
        super().__init__()
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim, bias = c.head_dim, c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def split(self, x):
        """[N, S, heads*D] -> [N, S, heads, D]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x, cos, sin):
        """x [N, S, H] -> k, v [N, kv_heads, S, D]. Context comes raw, without input_layernorm."""
        k = self.k_norm(self.split(self.k_proj(x))).transpose(1, 2)
        return rotate(k, cos, sin), self.split(self.v_proj(x)).transpose(1, 2)

    def forward(self, x, cos, sin, context_kv, mask):
        """x [N, Q, H], context k, v [N, kv_heads, S, D], mask [N, 1, Q, S+Q] (True: visible)."""
        q = rotate(self.q_norm(self.split(self.q_proj(x))).transpose(1, 2), cos, sin)
        k, v = (torch.cat((old.to(new.dtype), new), dim=2)
                for old, new in zip(context_kv, self.keys_values(x, cos, sin)))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask,
                                             enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2))                  # [N, Q, H]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: DSpineConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm residual layer with the published parameter names."""

    def __init__(self, c: DSpineConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, context_kv, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context_kv, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def block_mask(anchors: torch.Tensor, S: int, B: int, causal: bool = True) -> torch.Tensor:
    """Who sees whom: anchors [N, A] -> [N, 1, A*B, S + A*B], True where visible.

    A query of block j sees context positions < anchors[j] and, inside its own block only, the
    positions up to itself (all of the block when not causal, as in DFlash).
    """
    (N, A), device = anchors.shape, anchors.device
    limit = anchors.repeat_interleave(B, dim=1)[..., None]                  # [N, A*B, 1]
    context = torch.arange(S, device=device) < limit                        # [N, A*B, S]
    i = torch.arange(A * B, device=device)
    inside = i[:, None] // B == i // B                                      # [A*B, A*B]
    if causal:
        inside = inside & (i <= i[:, None])
    return torch.cat((context, inside.expand(N, -1, -1)), dim=-1)[:, None]


# -------------------------------------------------------------------------------------------------
# 3. Unified transfer space (sec. 4): PCA-whitened token codes from the target's head
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def transfer_space(lm_head: torch.Tensor, rank: int, chunk: int = 8192):
    """Mean [H], whitening directions U / sqrt(eigenvalues) [H, r], basis U^T [r, H] of the head.

    With unit rows w_v/|w_v| of W [V, H] and their mean removed, U are the top r eigenvectors of
    the scatter matrix  sum_v x_v x_v^T  (not divided by V: the codes are normalised, so its scale
    is free). Raises ValueError for a head with fewer than r positive eigenvalues.
    """
    V, H = lm_head.shape
    rows = lambda i: F.normalize(lm_head[i:i + chunk].float(), dim=-1)      # [chunk, H]
    mean = sum(rows(i).sum(0) for i in range(0, V, chunk)) / V              # [H]
    scatter = torch.zeros(H, H, device=lm_head.device)
    for i in range(0, V, chunk):
        x = rows(i) - mean
        scatter += x.T @ x
    values, vectors = torch.linalg.eigh(scatter)                            # ascending
    positive = int((values > values[-1] * H * torch.finfo(torch.float32).eps).sum())
    if positive < rank:
        raise ValueError(f"the target's head has {positive} positive eigenvalues, fewer than "
                         f"transfer_rank = {rank}; use a transfer_rank of at most {positive}")
    values, vectors = values[-rank:].flip(0), vectors[:, -rank:].flip(1)    # [r], [H, r]
    return mean, vectors / values.sqrt(), vectors.T.contiguous()


@torch.no_grad()
def token_codes(lm_head, mean, directions, chunk: int = 8192) -> torch.Tensor:
    """e(v) = normalize((w_v/|w_v| - mean) @ U / sqrt(eigenvalues)), a unit vector a token.

    lm_head [V, H], mean [H], directions U / sqrt(eigenvalues) [H, r] -> [V, r], float32.
    """
    return torch.cat([F.normalize((F.normalize(w.float(), dim=-1) - mean) @ directions, dim=-1)
                      for w in lm_head.split(chunk)])


# -------------------------------------------------------------------------------------------------
# 4. Layer-wise gated adjacent injection (sec. 5)
# -------------------------------------------------------------------------------------------------


def unit_feature(h: torch.Tensor, readout: torch.Tensor) -> torch.Tensor:
    """f = sqrt(r) * normalize(R h): h [.., H], R [r, H] -> [.., r]. Normalised in float32."""
    f = F.linear(h, readout)
    return (F.normalize(f.float(), dim=-1) * math.sqrt(f.shape[-1])).to(f.dtype)


def gated_write(h, feature, prev, receiver_gate, predecessor_gate, bias, message, write):
    """Add to each receiver the message of its predecessor; h [.., H], feature and prev [.., r].

        gate  = sigmoid(G_r f + G_p prev + b)                                   [.., m]
        delta = W (gate * M prev)                                               [.., H]
        h    <- h + (|h| / sqrt(H)) * delta
    """
    gate = torch.sigmoid(F.linear(feature, receiver_gate, bias) + F.linear(prev, predecessor_gate))
    delta = F.linear(gate * F.linear(prev, message), write)
    scale = h.float().norm(dim=-1, keepdim=True) / math.sqrt(h.shape[-1])
    return h + (scale * delta).to(h.dtype)


class Injection(nn.Module):
    """Shared gate and message maps; a readout R_l and a write W_l a layer (published names)."""

    def __init__(self, c: DSpineConfig):
        super().__init__()
        H, r, m = c.hidden_size, c.transfer_rank, c.message_size
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.readouts = nn.ModuleList(linear(H, r) for _ in range(c.num_hidden_layers))
        self.writes = nn.ModuleList(linear(m, H) for _ in range(c.num_hidden_layers))
        self.message, self.receiver_gate, self.predecessor_gate = (linear(r, m) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(m))

    def feature(self, l: int, h: torch.Tensor) -> torch.Tensor:
        return unit_feature(h, self.readouts[l].weight)

    def write(self, l: int, h, prev, feature=None) -> torch.Tensor:
        """h [.., H] after receiving from prev [.., r] at layer l."""
        feature = self.feature(l, h) if feature is None else feature
        return gated_write(h, feature, prev, self.receiver_gate.weight,
                           self.predecessor_gate.weight, self.bias, self.message.weight,
                           self.writes[l].weight)

    def forward(self, l: int, h, anchor_code, true_prev=None, replace=None) -> torch.Tensor:
        """h [.., B, H] -> [.., B, H]: each position receives from its left neighbour, all at once.

        Position 1 receives the anchor's token code, sqrt(r) e(anchor) [.., r]; position t >= 2
        receives f_{t-1}, read before anybody is updated. Row 0, the anchor, never changes. Where
        `replace` [.., 1, 1] is True, true_prev [.., T, r] stands in for the predecessors (sec. 6).
        """
        receivers = h[..., 1:, :]                                           # [.., T, H]
        feature = self.feature(l, receivers)                                # [.., T, r]
        first = anchor_code[..., None, :].to(feature.dtype)
        prev = torch.cat((first, feature[..., :-1, :]), dim=-2)             # [.., T, r]
        if replace is not None:
            prev = torch.where(replace, true_prev.to(prev.dtype), prev)
        return torch.cat((h[..., :1, :], self.write(l, receivers, prev, feature)), dim=-2)


# -------------------------------------------------------------------------------------------------
# 5. The draft: parallel forward, refinement, transition cache
# -------------------------------------------------------------------------------------------------


class DraftOutput(NamedTuple):
    hidden_states: torch.Tensor        # [N, A, B, H] after the last injection and `norm`
    pre_injection: torch.Tensor        # [N, A, B, H] after the last layer, before its injection
    layer_features: torch.Tensor | None  # [L, N, A, B, r] R_l of the updated h, length sqrt(r)


class MessageSpace(NamedTuple):
    """What the identity of sec. 7 needs of a checkpoint, computed once."""
    gates: torch.Tensor                # sqrt(r) [G_p; M] [2m, r]
    heads: torch.Tensor                # (g * W)^T [m, H]
    gram: torch.Tensor                 # W^T W [m, m]


class Proposal(NamedTuple):
    tokens: torch.Tensor               # [T] proposed token ids (propose_rows: all with N in front)
    candidate_ids: torch.Tensor        # [T, K]
    probs: torch.Tensor                # [T, K] the distribution over candidates they came from


class DraftTrace(NamedTuple):
    """What a draft step went through, for whoever watches it (DSpine.watch)."""
    anchor_ids: torch.Tensor           # [N]
    layer_features: torch.Tensor       # [L, N, T, r] as in DraftOutput, of the proposed positions
    candidate_ids: torch.Tensor        # [N, T, K]
    cache: torch.Tensor                # [N, T, K, K] (select "argmax": all rows the same)
    rows: torch.Tensor                 # [N, T] the path: index chosen among the candidates


@dataclass
class DraftState:
    """What a draft keeps between steps: the context's keys and values, append-only (sec. 3).

    They depend on accepted tokens only, so nothing is ever rolled back.
    """
    embed: torch.Tensor                # [V, H] the target's, on the draft's device, in its dtype
    lm_head: torch.Tensor              # [V, H]
    draft_head: torch.Tensor           # its rows that may be proposed, all without a draft_vocab
    keys_values: list | None = None    # a layer: k, v [1, kv_heads, S, D] (see propose_rows)
    length: int = 0                    # S


class DSpine(nn.Module):
    """The drafter. Holds no embedding and no head: both are the target's and are passed in."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.injection = Injection(c)
        self.register_buffer("transfer_codes", torch.zeros(c.vocab_size, c.transfer_rank))
        self.register_buffer("transfer_ready", torch.tensor(False))
        # what the slim checkpoint stores in place of the codes (see set_transfer_space)
        # plain attributes, so that they stay float32 when the draft is cast
        self.transfer_mean = self.transfer_directions = None                # [H], [H, r]
        self.register_buffer("draft_vocab", None)                           # see set_draft_vocab
        self.inv_freq, self.rope_scale = rope_frequencies(c)
        self.kernels, self._message_space = "auto", None  # see use_kernels
        self.watch = None  # called with the DraftTrace of every draft step, where it is set

    def use_kernels(self, setting: str) -> "DSpine":
        """"auto": kernels.py where tensors are on CUDA, Triton is there, and a small case computed
        with it equals the plain code; "off"; "on": without that check, ValueError where it can not.
        """
        if setting not in ("auto", "off", "on"):
            raise ValueError(f"kernels = {setting!r}: must be 'auto', 'off' or 'on'")
        operations(setting, self.fc.weight)
        self.kernels = setting
        return self

    @classmethod
    @torch.no_grad()
    def for_target(cls, config: DSpineConfig, target) -> "DSpine":
        """A fresh draft (sec. 4, 5): random backbone, readouts at U^T, W_l and G_p at zero.

        The injection then adds nothing, so an untrained draft is the plain causal backbone.
        """
        check_pair(config, target)
        draft = cls(config)
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        lm_head = target.get_output_embeddings().weight
        mean, directions, basis = transfer_space(lm_head, config.transfer_rank)
        draft.set_transfer_space(lm_head, mean.cpu(), directions.cpu())
        for readout, write in zip(draft.injection.readouts, draft.injection.writes):
            readout.weight.copy_(basis)
            write.weight.zero_()
        draft.injection.predecessor_gate.weight.zero_()
        return draft

    def set_transfer_space(self, lm_head, mean, directions):
        """Fill the codes from the head; mean [H], directions [H, r] stay for save_pretrained."""
        self.transfer_mean = mean.detach().float().cpu()
        self.transfer_directions = directions.detach().float().cpu().contiguous()
        device = lm_head.device
        self.transfer_codes.copy_(token_codes(lm_head.detach(), self.transfer_mean.to(device),
                                              self.transfer_directions.to(device)))
        self.transfer_ready.fill_(True)

    def set_draft_vocab(self, ids: torch.Tensor):
        """Propose these tokens only, ids [V'], as EAGLE-3 does: a departure, for small targets.

        There the head is a large part of a step. The target still chooses among all V, so
        decoding stays lossless. ValueError where ids repeat, leave 0 .. V-1 or are fewer than K.
        """
        V, K, ids = self.config.vocab_size, self.config.top_k, ids.flatten().sort().values
        if len(ids) < K or len(ids.unique()) < len(ids) or not 0 <= ids[0] <= ids[-1] < V:
            raise ValueError(f"a draft vocabulary needs at least top_k = {K} distinct token ids "
                             f"in 0 .. {V - 1}")
        self.draft_vocab = ids.to(self.fc.weight.device, torch.long)

    def draft_head(self, lm_head: torch.Tensor) -> torch.Tensor:
        """The rows of lm_head [V, H] that may be proposed: [V', H], all where V' = V."""
        return lm_head if self.draft_vocab is None else lm_head[self.draft_vocab]

    def candidates(self, hidden, draft_head) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and token ids [.., K] of the likeliest tokens: hidden [.., H]."""
        scores, ids = F.linear(hidden, draft_head).topk(self.config.top_k, dim=-1)
        return scores, ids if self.draft_vocab is None else self.draft_vocab[ids]

    def code(self, ids: torch.Tensor) -> torch.Tensor:
        """sqrt(r) e(v) for ids [..] -> [.., r]: the feature a decided token sends."""
        return self.transfer_codes[ids] * math.sqrt(self.config.transfer_rank)

    # -- parallel forward -------------------------------------------------------------------------

    def encode_context(self, context_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm(fc(concatenated taps)): [N, S, n*H] -> [N, S, H] (sec. 2)."""
        return self.hidden_norm(self.fc(context_states.to(self.fc.weight.dtype)))

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [N, 1, Q, D] for absolute positions [N, Q]."""
        angles = positions[:, None, :, None].float() * self.inv_freq.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((x * self.rope_scale).to(self.fc.weight.dtype)
                     for x in (angles.cos(), angles.sin()))

    def context_keys_values(self, context_states: torch.Tensor, start: int | torch.Tensor = 0):
        """A layer: k, v [N, kv_heads, S, D] of taps [N, S, n*H] at positions start, start+1, ..

        start is one for all rows, or [N, 1].
        """
        context = self.encode_context(context_states)
        N, S = context.shape[:2]
        cos, sin = self.rope((start + torch.arange(S, device=context.device)).expand(N, S))
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def forward_blocks(self, x, anchors, keys_values, mask, anchor_code, true_prev=None,
                       replace=None, features: bool = True) -> DraftOutput:
        """The layers and their injections over embedded blocks x [N, A, B, H].

        A row's blocks may attend in groups of G: keys_values and mask then hold N A/G rows.
        features: compute layer_features, which training and watchers read, else they are None.
        """
        c, (N, A, B, H) = self.config, x.shape
        positions = anchors[..., None] + torch.arange(B, device=x.device)   # [N, A, B]
        rows = len(keys_values[0][0])                                       # N, or N A/G
        cos, sin = self.rope(positions.view(rows, -1))
        inject, formed = operations(self.kernels, x).adjacent_injection, []
        for l, (layer, kv) in enumerate(zip(self.layers, keys_values)):
            x = layer(x.view(rows, -1, H), cos, sin, kv, mask).view(N, A, B, H)
            pre = x
            if c.inject == "every" or (c.inject == "last" and l == c.num_hidden_layers - 1):
                x = inject(self.injection, l, x, anchor_code, true_prev,
                           replace if l < c.replacement_layers else None)
            if features:
                formed.append(self.injection.feature(l, x))
        return DraftOutput(self.norm(x), pre, torch.stack(formed) if features else None)

    def forward(self, block_ids, context_states, anchors, embed, replace=None) -> DraftOutput:
        """Draft many blocks at once, as in training.

        block_ids [N, A, B] holds the true tokens at anchors .. anchors+B-1, context_states
        [N, S, n*H] the taps of every position, anchors [N, A] absolute positions; embed [V, H].
        Block j sees context < anchors[j]. Of block_ids the forward reads column 0 (the anchor)
        and, in blocks where replace [N, A] is True, the true predecessors (sec. 6).
        """
        c, (N, A, B) = self.config, block_ids.shape
        S, width = context_states.shape[1:]
        if width != self.fc.in_features or anchors.shape != (N, A):
            raise ValueError(
                f"expected context_states [N, S, {self.fc.in_features}] and anchors [{N}, {A}], "
                f"got {list(context_states.shape)} and {list(anchors.shape)}")
        inputs = torch.full_like(block_ids, c.mask_token_id)
        inputs[..., 0] = block_ids[..., 0]
        codes = self.code(block_ids[..., :-1])                              # [N, A, T, r]
        # blocks do not see each other: in groups of G, each a row beside a copy of its context,
        # a query meets S + G B keys instead of S + A B
        G = max(g for g in range(1, min(A, 16) + 1) if A % g == 0)
        keys_values = [tuple(x.repeat_interleave(A // G, dim=0) for x in kv)
                       for kv in self.context_keys_values(context_states)]
        return self.forward_blocks(
            F.embedding(inputs, embed).to(self.fc.weight.dtype), anchors, keys_values,
            block_mask(anchors.view(-1, G), S, B, c.attention == "causal"), codes[..., 0, :],
            codes, None if replace is None else replace[..., None, None])

    # -- token choice (sec. 7) --------------------------------------------------------------------

    def refine(self, pre: torch.Tensor, prev_ids: torch.Tensor) -> torch.Tensor:
        """Last-write refinement: the last injection's write, redone with a real token v.

            refine(pre, v) = norm(inject(pre, prev = sqrt(r) e(v)))

        pre [.., H] and prev_ids [..] broadcast; returns [.., H].
        """
        if self.config.inject == "none":
            return self.norm(pre).expand(*prev_ids.shape, -1)
        last = self.config.num_hidden_layers - 1
        return self.norm(self.injection.write(last, pre, self.code(prev_ids).to(pre.dtype)))

    def transition_cache(self, pre, candidate_ids, anchor_ids, lm_head) -> torch.Tensor:
        """Score every candidate under every possible predecessor, all positions in parallel.

            cache[t, a, b] = lm_head[C_t[b]] . refine(pre_t, C_{t-1}[a])

        At t = 1 every row a is refine(pre_1, anchor). pre [.., T, H], candidate_ids C [.., T, K],
        anchor_ids [..], lm_head [V, H] -> [.., T, K, K], float32.
        """
        first = anchor_ids[..., None, None].expand_as(candidate_ids[..., :1, :])
        prev_ids = torch.cat((first, candidate_ids[..., :-1, :]), dim=-2)   # [.., T, K]
        refined = self.refine(pre[..., None, :], prev_ids)                  # [.., T, K, H] by a
        heads = lm_head[candidate_ids].to(refined.dtype)                    # [.., T, K, H] by b
        return (refined @ heads.transpose(-1, -2)).float()

    def message_space(self) -> MessageSpace:
        """Computed once; again when one of its weights has changed."""
        inj, g = self.injection, self.norm.weight
        W, r = inj.writes[-1].weight, self.config.transfer_rank
        used = [w.detach() for w in (inj.predecessor_gate.weight, inj.message.weight, g, W)]
        key = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in used]
        if self._message_space is None or self._message_space[0] != key:
            Gp, M, g, W = used  # kept: while they live, no other tensor has their address
            with torch.autocast(W.device.type, enabled=False):  # it outlives the caller's
                space = MessageSpace(torch.cat((Gp, M)) * math.sqrt(r),
                                     (g[:, None] * W).T.contiguous(), W.T @ W)
            self._message_space = key, used, space
        return self._message_space[2]

    def message_space_cache(self, pre, candidate_ids, anchor_ids, lm_head) -> torch.Tensor:
        """transition_cache by an identity: its K x K part needs m numbers a token, not H.

        With norm(x) = g * x / rms(x), s_t = |pre_t| / sqrt(H) and the message u = gate * M prev:

            cache[t, a, b] = (pre_t . (g w_b) + s_t u_ta . W^T (g w_b)) / rms(pre_t + s_t W u_ta)
            |pre + s W u|^2 = |pre|^2 + 2 s u . (W^T pre) + s^2 u . (W^T W u)

        Exact; no gradient reaches what is precomputed. bench/latency.py times both forms.
        """
        if self.config.inject == "none":
            return self.transition_cache(pre, candidate_ids, anchor_ids, lm_head)
        inj, space, H = self.injection, self.message_space(), pre.shape[-1]
        first = anchor_ids[..., None, None].expand_as(candidate_ids[..., :1, :])
        prev_ids = torch.cat((first, candidate_ids[..., :-1, :]), dim=-2)   # [.., T, K]
        feature = inj.feature(self.config.num_hidden_layers - 1, pre)       # [.., T, r]
        received = F.linear(feature, inj.receiver_gate.weight, inj.bias)    # [.., T, m]
        codes = self.transfer_codes[prev_ids].to(pre.dtype)                 # [.., T, K, r] by a
        asked, said = F.linear(codes, space.gates).chunk(2, dim=-1)
        u = torch.sigmoid(received[..., None, :] + asked) * said            # [.., T, K, m] by a
        heads = lm_head[candidate_ids].to(pre.dtype)                        # [.., T, K, H] by b
        plain = (heads @ (pre * self.norm.weight)[..., None]).squeeze(-1)   # [.., T, K] by b
        written = u @ F.linear(heads, space.heads).transpose(-1, -2)        # [.., T, K, K]
        cross = (u @ F.linear(pre, inj.writes[-1].weight.T)[..., None]).squeeze(-1)
        wide = torch.promote_types(pre.dtype, torch.float32)
        square = pre.to(wide).square().sum(-1, keepdim=True)                # [.., T, 1] |pre|^2
        s = (square / H).sqrt()
        norm = square + 2 * s * cross + s * s * (F.linear(u, space.gram) * u).sum(-1, dtype=wide)
        rms = (norm.clamp_min(0) / H + self.config.rms_norm_eps).sqrt()     # [.., T, K] by a
        return ((plain[..., None, :] + s[..., None] * written) / rms[..., None]).float()

    # -- incremental decoding ---------------------------------------------------------------------

    def start(self, target) -> DraftState:
        """A fresh decoding state; the target's embedding and head come to the draft's device."""
        check_pair(self.config, target)
        if not self.transfer_ready:
            raise ValueError("the draft's token codes are not set: build it with "
                             "DSpine.for_target or DSpine.from_pretrained")
        modules = target.get_input_embeddings(), target.get_output_embeddings()
        embed, lm_head = (m.weight.detach().to(self.fc.weight.device, self.fc.weight.dtype)
                          for m in modules)
        return DraftState(embed, lm_head, self.draft_head(lm_head))

    def extend_context(self, state: DraftState, context_states: torch.Tensor):
        """Append the taps [s, n*H] of newly accepted positions to the context."""
        states = context_states[None].to(self.fc.weight.device)
        new = self.context_keys_values(states, state.length)
        state.keys_values = new if state.keys_values is None else [
            tuple(torch.cat(pair, dim=2) for pair in zip(old, add))
            for old, add in zip(state.keys_values, new)]
        state.length += len(context_states)

    @torch.no_grad()
    def propose(self, state: DraftState, context_states, anchor_id: int, length: int, *,
                temperature=0.0, top_k=0, top_p=1.0, generator=None) -> Proposal:
        """One draft step: append the new context, run [anchor, mask * length], choose the tokens.

        context_states [s, n*H] are the taps of the positions accepted since the last step, so that
        the context covers every position before the anchor. length <= block_size - 1. Raises
        FloatingPointError when the draft's scores are not finite.
        """
        self.extend_context(state, context_states)
        one = lambda value: torch.tensor([value], device=self.fc.weight.device)
        proposal = self.propose_rows(state, one(anchor_id), one(state.length), length, top_k=top_k,
                                     temperature=temperature, top_p=top_p, generator=generator)
        return Proposal(*(x[0] for x in proposal))

    @torch.no_grad()
    def propose_rows(self, state: DraftState, anchor_ids, starts, length: int, *, temperature=0.0,
                     top_k=0, top_p=1.0, generator=None, uniform=None) -> Proposal:
        """The blocks of N rows whose contexts lie in state.keys_values, each up to its anchor.

        anchor_ids [N] stand at positions starts [N]; row n sees context columns < starts[n].
        uniform [N, T] as in select_path. Returns tokens [N, T], candidate_ids, probs [N, T, K].
        """
        c, ops = self.config, operations(self.kernels, self.fc.weight)
        hidden, pre, features = self.run_blocks(state, anchor_ids, starts, length)
        scores, candidate_ids = self.candidates(hidden, state.draft_head)   # [N, T, K]
        check_scores(scores)
        if c.select == "argmax":  # one-hot: sampling each position alone makes incoherent blocks
            cache, temperature = scores[..., None, :].float().expand(-1, -1, c.top_k, -1), 0.0
        else:
            cache = ops.transition_cache(self, pre, candidate_ids, anchor_ids, state.lm_head)
        tokens, rows, probs = ops.select_path(cache, candidate_ids, temperature, generator,
                                              top_k=top_k, top_p=top_p, uniform=uniform)
        if self.watch is not None:
            self.watch(DraftTrace(anchor_ids, features, candidate_ids, cache, rows))
        return Proposal(tokens, candidate_ids, probs)

    def run_blocks(self, state: DraftState, anchor_ids, starts, length: int) -> tuple:
        """The parallel half of propose_rows: everything before the choice of tokens.

        hidden_states and pre_injection [N, T, H] of the T = length proposed positions, and their
        layer_features [L, N, T, r] where somebody watches, else None.
        """
        c, device, N = self.config, self.fc.weight.device, len(anchor_ids)
        causal = c.attention == "causal"
        B = length + 1 if causal else c.block_size  # a causal prefix does not depend on the rest
        inputs = torch.full((N, 1, B), c.mask_token_id, device=device)
        inputs[:, 0, 0] = anchor_ids
        S, starts = state.keys_values[0][0].shape[2], starts[:, None]       # [N, 1]: A = 1 block
        out = self.forward_blocks(
            F.embedding(inputs, state.embed), starts, state.keys_values,
            block_mask(starts, S, B, causal), self.code(inputs[..., 0]),
            features=self.watch is not None)
        # dense copies: F.linear over a slice would give each row its own copy of the head
        dense = lambda x: x[:, 0, 1:length + 1].clone(memory_format=torch.contiguous_format)
        features = out.layer_features
        return (dense(out.hidden_states), dense(out.pre_injection),
                None if features is None else features[:, :, 0, 1:length + 1])

    def decoder(self, block_size: int | str | None = None) -> "TransformersDecoder":
        """For transformers: target.generate(**inputs, custom_generate=draft.decoder())."""
        return TransformersDecoder(self, block_size)

    # -- checkpoints (sec. 9) ---------------------------------------------------------------------

    def save_pretrained(self, folder, slim: bool = False):
        """Write config.json and model.safetensors; each to a temporary name first, then renamed.

        slim leaves out transfer_codes [V, r] and stores the mean and directions they are rebuilt
        from with the target's head at load: a few hundred kB instead of V*r numbers. ValueError
        for a slim draft without them, and for a published one with a draft vocabulary.
        """
        from safetensors.torch import save_file
        if self.draft_vocab is not None and not slim:
            raise ValueError("the published layout has no draft vocabulary: save it slim")
        tensors = {k: v.detach().contiguous() for k, v in self.state_dict().items()}
        if slim:
            if self.transfer_directions is None:
                raise ValueError("a slim checkpoint needs the transfer mean and directions, which "
                                 "a published one does not hold: start from DSpine.for_target")
            del tensors["transfer_codes"], tensors["transfer_ready"]
            tensors |= {"transfer_mean": self.transfer_mean,
                        "transfer_directions": self.transfer_directions}
        config = {**self.config.to_dict(),
                  "dtype": str(self.fc.weight.dtype).removeprefix("torch.")}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in (
                ("model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"})),
                ("config.json", lambda p: p.write_text(json.dumps(config, indent=2) + "\n",
                                                       encoding="utf-8"))):
            part = folder / f"{name}.part{os.getpid()}"
            try:
                write(part)
                os.replace(part, folder / name)
            finally:
                part.unlink(missing_ok=True)

    @classmethod
    def from_pretrained(cls, folder, target=None) -> "DSpine":
        """Load a draft, published or slim.

        With `target` the pairing is checked and the draft takes its dtype and device. Raises
        FileNotFoundError, or ValueError naming the tensors that are missing, unexpected or of the
        wrong shape, or both sides of a pairing that does not fit.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} holds no {name}: not a DSpine draft "
                                        "(train one with train_small.py)")
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        c = DSpineConfig.from_dict(raw)
        if target is not None:
            check_pair(c, target)
        try:
            tensors = load_file(folder / "model.safetensors")
            if (folder / "transfer.safetensors").is_file():  # some releases keep the codes apart
                tensors["transfer_codes"] = load_file(folder / "transfer.safetensors")["codes"]
                tensors["transfer_ready"] = torch.tensor(True)
        except SafetensorError as error:
            raise ValueError(f"{folder}: not a complete safetensors file ({error}): "
                             "fetch it again") from None
        with torch.device("meta"):
            draft = cls(c)
        shapes = {k: v.shape for k, v in draft.state_dict().items()}
        slim = "transfer_directions" in tensors
        if slim:
            if target is None:
                raise ValueError(f"{folder} is a slim draft: its token codes are rebuilt from the "
                                 "target's head, so pass the target")
            del shapes["transfer_codes"], shapes["transfer_ready"]
            shapes |= {"transfer_mean": (c.hidden_size,),
                       "transfer_directions": (c.hidden_size, c.transfer_rank)}
            if "draft_vocab" in tensors:
                shapes["draft_vocab"] = tensors["draft_vocab"].flatten().shape
        check_tensors(folder, tensors, shapes)
        draft.load_state_dict(tensors, strict=False, assign=True)
        if slim:
            draft.transfer_codes = torch.empty(c.vocab_size, c.transfer_rank)
            draft.transfer_ready = torch.tensor(False)
            draft.set_transfer_space(target.get_output_embeddings().weight,
                                     tensors["transfer_mean"], tensors["transfer_directions"])
            if "draft_vocab" in tensors:
                draft.set_draft_vocab(tensors["draft_vocab"])
        elif not draft.transfer_ready:
            raise ValueError(f"{folder}: transfer_ready is false, the codes were never computed")
        draft.requires_grad_(False).eval()
        return draft if target is None else draft.to(target.device, target.dtype)


def check_scores(scores: torch.Tensor):
    if not scores.isfinite().all():
        raise FloatingPointError("the draft's scores are not finite (float16 overflow?): "
                                 "use bfloat16 or float32")


def check_tensors(folder, tensors: dict, shapes: dict):
    """Raise one ValueError that names every missing, unexpected or wrongly shaped tensor."""
    wrong = [f"missing {k}" for k in shapes if k not in tensors]
    wrong += [f"unexpected {k}" for k in tensors if k not in shapes]
    wrong += [f"{k} has shape {tuple(v.shape)}, expected {tuple(shapes[k])}"
              for k, v in tensors.items() if k in shapes and tuple(v.shape) != tuple(shapes[k])]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{folder}/model.safetensors does not fit its config.json: "
                         f"{'; '.join(wrong[:8])}{more}")


def check_pair(config: DSpineConfig, target):
    """Refuse a draft made for another target, naming both values (ValueError)."""
    head = target.get_output_embeddings()
    if head is None or target.get_input_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no embedding or output head: not a causal "
                         "language model")
    V, H = head.weight.shape
    layers = target.config.get_text_config().num_hidden_layers
    for name, theirs in (("hidden_size", H), ("vocab_size", V), ("num_target_layers", layers)):
        if (mine := getattr(config, name)) != theirs:
            raise ValueError(f"the draft was made for another target: its {name} is {mine}, "
                             f"the target's is {theirs}")


# -------------------------------------------------------------------------------------------------
# 6. Training objective (sec. 6)
# -------------------------------------------------------------------------------------------------


def alignment_beta(step: int, c: DSpineConfig) -> float:
    """beta: linear from 0 to alignment_weight over alignment_warmup_steps optimizer steps."""
    return c.alignment_weight * min(1.0, step / c.alignment_warmup_steps)


def replacement_rate(progress: float, c: DSpineConfig) -> float:
    """rho at `progress` 0 .. 1: replacement_probability until 1/6, then linear to 0 at 1/3."""
    hold, end = c.replacement_hold_ratio, c.replacement_end_ratio
    falling = (end - progress) / max(end - hold, 1e-9)
    return c.replacement_probability * min(1.0, max(0.0, falling))


def sample_anchors(loss_mask: torch.Tensor, count: int, generator=None):
    """Up to `count` distinct anchors a row, where the FIRST proposal (position p+1) is supervised.

    loss_mask [N, S] -> anchors [N, A] ascending, and valid [N, A]; rows with fewer anchors are
    padded with invalid ones.
    """
    legal = F.pad(loss_mask[:, 1:], (0, 1)).bool()                          # [N, S]
    A = max(1, min(count, int(legal.sum(1).max())))
    order = torch.rand(legal.shape, generator=generator, device=legal.device)
    anchors = order.masked_fill(~legal, 2.0).argsort(dim=1)[:, :A].sort(dim=1).values
    return anchors, legal.gather(1, anchors)


def gather_blocks(row: torch.Tensor, anchors: torch.Tensor, B: int) -> torch.Tensor:
    """row [N, S, ..] at anchors .. anchors+B-1 -> [N, A, B, ..]; past the end: the last one."""
    at = anchors[..., None] + torch.arange(B, device=row.device)
    n = torch.arange(len(row), device=row.device)[:, None, None]
    return row[n, at.clamp_(max=row.shape[1] - 1)]


def supervised_slots(loss_mask, anchors, valid, B: int) -> torch.Tensor:
    """[N, A, T]: slot t of a block is supervised while every token up to p+t is."""
    at = anchors[..., None] + torch.arange(1, B, device=anchors.device)     # [N, A, T]
    inside = gather_blocks(loss_mask.bool(), anchors, B)[..., 1:] & (at < loss_mask.shape[1])
    return (inside & valid[..., None]).cumprod(dim=-1).bool()


def teacher_logits(teacher, lm_head, softcap: float | None = None) -> torch.Tensor:
    """W teacher: [.., H] -> [.., V], float32. softcap: the target's own (Gemma)."""
    logits = F.linear(teacher, lm_head).float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def teacher_distribution(teacher, lm_head, softcap: float | None = None) -> torch.Tensor:
    """P = softmax(W teacher): [.., H] -> [.., V], float32."""
    return teacher_logits(teacher, lm_head, softcap).softmax(-1)


def columns(labels, vocab) -> tuple[torch.Tensor, torch.Tensor]:
    """Where labels [tokens] stand in the draft vocabulary [V'], ascending, and whether they do."""
    if vocab is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    at = torch.searchsorted(vocab, labels).clamp_(max=len(vocab) - 1)
    return at, vocab[at] == labels


def ce_and_l1(log_q, labels, p, vocab=None) -> tuple[torch.Tensor, torch.Tensor]:
    """-log Q(y) and sum_v |Q(v) - P(v)| [tokens]: log Q and the target's P [tokens, V']."""
    at, known = columns(labels, vocab)
    ce = -log_q.gather(-1, at[:, None])[:, 0] * known
    return ce, 2 * (log_q.exp() - p).clamp_min(0).sum(-1)


def vocabulary_losses(hidden, refined, labels, teacher, lm_head, c: DSpineConfig, softcap=None,
                      vocab=None):
    """The four terms that look at logits, a value a token: [4, tokens]; candidates [tokens, K].

        Q = softmax(W hidden), P = softmax(W teacher), y = label
        ce  = -log Q(y)
        l1  = sum_v |Q(v) - P(v)| = 2 sum_v max(Q(v) - P(v), 0)                 (= 2 TV)
        candidates = top-K of Q (no gradient through the choice)
        ce', l1': see candidate_losses

    hidden, refined, teacher [tokens, H], labels [tokens]. With a draft vocabulary [V'] Q is zero
    elsewhere; P is not, and ce is 0 where y can not be proposed.
    """
    head = lm_head if vocab is None else lm_head[vocab]
    log_q = F.linear(hidden, head).float().log_softmax(-1)                  # [tokens, V']
    p = teacher_distribution(teacher, lm_head, softcap)                     # [tokens, V]
    ce, l1 = ce_and_l1(log_q, labels, p if vocab is None else p[:, vocab], vocab)
    candidates = log_q.detach().topk(c.top_k, dim=-1).indices               # [tokens, K]
    candidates = candidates if vocab is None else vocab[candidates]
    p = p.gather(-1, candidates)
    ce2, l12 = candidate_losses(refined, labels, candidates, p, lm_head, c)
    return torch.stack((ce, l1, ce2, l12)), candidates


def candidate_losses(refined, labels, candidates, p, lm_head, c: DSpineConfig):
    """The refinement's terms ce', l1' [tokens], over K candidates with target probabilities p.

        Q'  = softmax over candidates of W[candidate] . refined
        ce' = -log Q'(y) if y is a candidate, else 0
        l1' = sum |Q' - p / sum p|, 0 where the candidates' mass sum p <= 1e-4
    """
    scores = (lm_head[candidates] @ refined[..., None].to(lm_head.dtype))[..., 0]  # [tokens, K]
    return candidate_score_losses(scores, labels, candidates, p, c)


def candidate_score_losses(scores, labels, candidates, p, c: DSpineConfig):
    """The two losses above for given scores of the candidates [tokens, K]."""
    log_q = scores.float().log_softmax(-1)
    ce = -(log_q * (candidates == labels[:, None])).sum(-1)                 # at most one is y
    mass = p.sum(-1, keepdim=True)
    l1 = (log_q.exp() - p / mass.clamp_min(1e-20)).abs().sum(-1)
    return ce, l1 * (mass[:, 0] > c.candidate_mass_threshold)


def chunked_losses(hidden, refined, labels, weights, teacher, index, lm_head, c, a, softcap,
                   chunk, vocab=None):
    """a ce + (1-a) l1 + a ce' + (1-a) l1' summed with `weights` [tokens]; the sums; candidates.

    Plain twin of train_small's fused one. teacher [U, H] holds each target position once, index
    [tokens] (ascending) points into it. Checkpointing recomputes a chunk's logits in the backward
    pass, so that no [tokens, V] tensor outlives its chunk.
    """
    sums, candidates = 0.0, []
    for part in torch.arange(len(labels), device=labels.device).split(chunk):
        losses, top = checkpoint(
            vocabulary_losses, hidden[part], refined[part], labels[part], teacher[index[part]],
            lm_head, c, softcap, vocab, use_reentrant=False)
        sums = sums + losses @ weights[part]                                # [4]
        candidates.append(top)
    return sums @ sums.new_tensor([a, 1 - a, a, 1 - a]), sums.detach(), torch.cat(candidates)


def cosine_alignment(features, labels, codes) -> torch.Tensor:
    """1 - cos(feature, e(y)): features [L, tokens, r], labels, codes [V, r] -> [L, tokens]."""
    return 1 - F.cosine_similarity(features.float(), codes[labels].float(), dim=-1)


def objective(draft: DSpine, out: DraftOutput, input_ids, anchors, supervised, teacher_hidden,
              lm_head, *, beta: float, ce_weight: float | None = None,
              softcap: float | None = None, chunk: int = 512, losses=chunked_losses,
              alignment=cosine_alignment):
    """loss = a ce + (1-a) l1 + (a ce' + (1-a) l1') + beta stopgrad(ce) alignment, a = ce_weight.

    All terms are means over supervised proposal tokens, weighted by w_t = exp(-(t-1)/7);
    alignment is such a mean a layer, summed over layers.

    input_ids [N, S]; anchors [N, A]; supervised [N, A, T]; teacher_hidden [N, S, H] is the
    target's last hidden state after its final norm (`losses` gets those of each position once,
    with whatever columns a caller appended for it). Returns the loss and a dict of detached
    terms (with `weight`, the sum of w_t). Nothing supervised: a loss of 0 that has a gradient.
    """
    c, B, S = draft.config, out.hidden_states.shape[2], input_ids.shape[1]
    a = c.ce_weight if ce_weight is None else ce_weight
    slot = torch.arange(B - 1, device=anchors.device)                       # t - 1
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    # P_t is read at the token before it, p + t - 1: its place in the flattened teacher states
    before = (row * S + (anchors[..., None] + slot).clamp(max=S - 1)).flatten()
    keep = supervised.flatten().nonzero()[:, 0]                             # tokens that count,
    keep = keep[before[keep].argsort(stable=True)]                          # by target position
    if len(keep) == 0:
        zero = (out.hidden_states.float().sum() + out.layer_features.float().sum()) * 0.0
        return zero, dict.fromkeys(("ce", "l1", "refinement", "alignment", "weight", "tokens"), 0)
    pick = lambda x: x.flatten(0, 2)[keep]                                  # N, A, T -> tokens
    blocks = gather_blocks(input_ids, anchors, B)                           # [N, A, B]
    labels, slot = pick(blocks[..., 1:]), pick(slot.expand(supervised.shape))
    w = torch.exp(-slot / 7)
    refined = draft.refine(pick(out.pre_injection[..., 1:, :]), pick(blocks[..., :-1]))
    position, index = before[keep].unique_consecutive(return_inverse=True)
    loss, (ce, l1, ce2, l12), candidates = losses(
        pick(out.hidden_states[..., 1:, :]), refined, labels, w / w.sum(),
        teacher_hidden.flatten(0, 1)[position], index, lm_head, c, a, softcap, chunk,
        draft.draft_vocab)
    features = torch.stack([pick(f[..., 1:, :]) for f in out.layer_features])  # [L, tokens, r]
    align = alignment(features, labels, draft.transfer_codes) @ (w / w.sum())  # [L]
    loss = loss + beta * ce * align.sum()                                   # ce has no gradient
    hit = candidates == labels[:, None]                                     # [tokens, K]
    return loss, {
        "ce": ce.item(), "l1": l1.item(), "refinement": (a * ce2 + (1 - a) * l12).item(),
        "alignment": align.sum().item(), "alignment_by_layer": align.tolist(),
        "top1_by_slot": [hit[slot == t, 0].float().mean().nan_to_num().item()
                         for t in range(B - 1)],
        "coverage": hit.any(-1).float().mean().item(),
        "weight": w.sum().item(), "tokens": len(keep)}


# -------------------------------------------------------------------------------------------------
# 7. Choosing tokens (sec. 7, 8)
# -------------------------------------------------------------------------------------------------


def sampling_distribution(logits, temperature: float, top_k: int = 0, top_p: float = 1.0):
    """The one filter, logits [.., V] -> probabilities: plain sampling, draft and verification.

    Order as in transformers: temperature, then the top_k largest, then the smallest set whose mass
    reaches top_p. Temperature 0 is a one-hot at the argmax.
    """
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        values, order = logits.sort(dim=-1, descending=True)
        probs = values.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p                            # mass before suffices
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits.softmax(-1)


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample by inversion: probs [.., V] of any positive sum, uniform [..] in [0, 1) -> [..].

    The first index whose cumulative sum exceeds uniform * total: never one of probability zero.
    """
    cdf = probs.cumsum(-1)
    index = torch.searchsorted(cdf, uniform[..., None] * cdf[..., -1:], right=True)[..., 0]
    return index.clamp_(max=probs.shape[-1] - 1)


def select_path(cache, candidate_ids, temperature: float = 0.0, generator=None, *, top_k: int = 0,
                top_p: float = 1.0, uniform=None):
    """Walk the transition cache left to right: look-ups only.

    Row a of cache[t] belongs to the candidate chosen at t-1. Temperature 0 takes its argmax, else
    a sample of softmax(row / temperature), filtered like the target's distribution.

    cache [.., T, K, K], candidate_ids [.., T, K] -> tokens [.., T], rows [.., T] (the index chosen
    among the candidates), probs [.., T, K] (what it was drawn from: verification must use these).
    uniform [.., T] in [0, 1) decides the samples; drawn from `generator` where not given.
    """
    *lead, T, K = candidate_ids.shape
    row = torch.zeros(lead, dtype=torch.long, device=cache.device)          # at t = 1 rows agree
    rows, probs = [], []
    if temperature and uniform is None:
        uniform = torch.rand((*lead, T), generator=generator, device=cache.device)
    for t in range(T):
        at = row[..., None, None].expand(*lead, 1, K)
        scores = cache[..., t, :, :].gather(-2, at).squeeze(-2)             # [.., K]
        q = sampling_distribution(scores, temperature, top_k, top_p)
        row = inverse_cdf(q, uniform[..., t]) if temperature else scores.argmax(-1)
        rows.append(row)
        probs.append(q)
    rows, probs = torch.stack(rows, -1), torch.stack(probs, -2)
    return candidate_ids.gather(-1, rows[..., None]).squeeze(-1), rows, probs


# -------------------------------------------------------------------------------------------------
# 8. Verification (sec. 8): lossless
# -------------------------------------------------------------------------------------------------


def verify_greedy(logits: torch.Tensor, proposals: torch.Tensor) -> tuple[int, int]:
    """Keep proposals [T] while they are the argmax of logits [T+1, V]: (accepted, next token)."""
    best = logits.argmax(-1)                                                # [T+1]
    accepted = int((best[:-1] == proposals).cumprod(0).sum())
    return accepted, int(best[accepted])


def verify_sampled(target_probs, proposal: Proposal, uniform) -> tuple[int, int]:
    """Rejection sampling (Leviathan et al.; Chen et al. 2023) with a K-sparse draft distribution.

        accept x_t with probability min(1, p(x_t) / q(x_t));
        at the first refusal sample normalize(max(p - q, 0)), after a full block the last p.

    target_probs [T+1, V] is the target after its filters, uniform [T+1] in [0, 1) decides the T
    acceptances and the last draw. Returns (accepted, next token).
    """
    tokens, candidate_ids, draft_probs = proposal
    T = len(tokens)
    p = target_probs[:T].gather(-1, tokens[:, None])[:, 0]                  # [T]
    q = (draft_probs * (candidate_ids == tokens[:, None])).sum(-1)          # [T]
    accepted = int((uniform[:T] * q < p).cumprod(0).sum())
    probs = target_probs[accepted]
    if accepted < T:
        minus = -draft_probs[accepted].to(probs.dtype)
        residual = probs.scatter_add(0, candidate_ids[accepted], minus).clamp_(min=0)
        probs = residual if residual.sum() > 0 else probs  # rounding can empty it when p = q
    return accepted, int(inverse_cdf(probs, uniform[T]))


class Plain:
    """The operations that kernels.py fuses, under the names they have there."""
    adjacent_injection = staticmethod(Injection.forward)
    transition_cache = staticmethod(DSpine.transition_cache)
    select_path = staticmethod(select_path)
    verify_greedy = staticmethod(verify_greedy)
    verify_sampled = staticmethod(verify_sampled)


def operations(setting: str, x: torch.Tensor):
    """Who computes them for tensors on x's device: the module `kernels` or Plain."""
    if setting == "off" or (setting == "auto" and not x.is_cuda):
        return Plain
    try:
        import kernels
        from kernels import agree, available, triton  # Hugging Face's `kernels` has none of them
    except ImportError:                               # dspine.py was copied alone
        usable, why = False, "kernels.py is missing, or behind another `kernels` on sys.path"
    else:
        usable = available(x)
        why = f"the tensors are on {x.device}" if triton else "Triton is missing"
    if usable and (setting == "on" or agree(x.device)):
        return kernels
    if setting == "on":
        raise ValueError("kernels = 'on' needs kernels.py, Triton and the current CUDA device, of "
                         f"capability 8.0 or more; {why}: use 'auto' or 'off'")
    return Plain


# -------------------------------------------------------------------------------------------------
# 9. Decoding loop
# -------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What one target forward emitted (the first step: what prefill emitted)."""
    tokens: list[int]
    proposed: int = 0                  # tokens proposed to that forward
    accepted: int = 0                  # how many of them the target kept, before any cut
    source: str = "target"             # who proposed: "draft" | "copy"; "target": nobody did


@dataclass
class Statistics:
    """Counts and seconds of one generation. Prefill is apart: its token is in new_tokens only."""
    new_tokens: int = 0
    target_forwards: int = 0           # after prefill
    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted by each of them
    emitted_by: dict = field(default_factory=lambda: {"draft": 0, "copy": 0, "target": 0})
    finish_reason: str = "length"      # or "eos"
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: tokens emitted per target forward, the bonus token counted, prefill's token not."""
        return sum(self.accept_lengths) / max(1, self.target_forwards)

    @property
    def histogram(self) -> dict[int, int]:
        """accept length -> number of forwards."""
        return {n: self.accept_lengths.count(n) for n in sorted(set(self.accept_lengths))}

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first over the seconds after prefill."""
        return sum(self.accept_lengths) / max(1e-9, self.draft_seconds + self.verify_seconds)


class TargetRunner:
    """The target's forward over a cache that can be rolled back; keeps only the tapped states."""

    def __init__(self, target, target_layer_ids=()):
        from transformers import DynamicCache
        self.target, self.taps = target, list(target_layer_ids)
        self.cache = DynamicCache(config=target.config)

    def __call__(self, ids: torch.Tensor, logits_to_keep: int):
        """ids [1, s] -> logits [logits_to_keep, V] in float32 or wider, taps [s, n*H] or None."""
        out = self.target(input_ids=ids, cache=self.cache, use_cache=True,
                          logits_to_keep=logits_to_keep, output_hidden_states=bool(self.taps))
        if getattr(out, "cache", None) is None:
            raise ValueError(f"{type(self.target).__name__} returns no cache: it can not continue "
                             "from the tokens it has read")
        self.cache, logits, taps = out.cache, out.logits[0], None
        if self.taps:
            taps = torch.cat([out.hidden_states[l + 1][0] for l in self.taps], dim=-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), taps

    def begin_rollback(self):
        """After prefill: forwards may be undone from here on. ValueError where they can not."""
        # transformers 5.25 calls recurrent states croppable too, but some of its models (Zamba) do
        # not keep one a token, and what it then puts back is the state before the whole block
        stuck = {type(layer).__name__ for layer in self.cache.layers if not layer.is_croppable
                 or any(getattr(layer, "is_recurrent_states_initialized", {}).values())}
        if stuck:
            raise ValueError(f"{type(self.target).__name__} keeps state that can not be rolled "
                             f"back ({', '.join(sorted(stuck))}): rejected proposals would stay "
                             "in it, so decoding would not be lossless")
        self.cache.activate_past_recording()

    def rollback(self, count: int):
        """Forget the last `count` tokens; with 0 too, sliding windows trim themselves here."""
        self.cache.crop(-count)


class CopyIndex:
    """Proposals copied from the text so far: what followed the last place of its final n-gram.

    A departure from the paper, off by default. Appending and looking up take constant time; memory
    is linear in the text. The longest of `sizes` that matches decides.
    """

    def __init__(self, tokens: list[int], sizes: tuple[int, ...] = (3, 2)):
        self.sizes, self.tokens, self.follows = sizes, [], {}
        self.extend(tokens)

    def extend(self, tokens: list[int]):
        for token in tokens:
            for n in self.sizes:
                if len(self.tokens) >= n:  # this token follows the n-gram before it
                    self.follows[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def propose(self, length: int) -> list[int]:
        """Up to `length` tokens, none without a match. A copy that reaches the end goes round."""
        at = next((self.follows[gram] for n in self.sizes
                   if (gram := tuple(self.tokens[-n:])) in self.follows), None)
        if at is None:
            return []
        period = len(self.tokens) - at
        return [self.tokens[at + i % period] for i in range(length)]


def copy_proposal(tokens: list[int], device) -> Proposal:
    """Copied tokens as proposals of probability one: K = 1."""
    tokens = torch.tensor(tokens, dtype=torch.long, device=device)
    return Proposal(tokens, tokens[:, None], torch.ones(len(tokens), 1, device=device))


def check_request(target, draft, input_ids, max_new_tokens, filters, block_size) -> int:
    """Refuse what the loop can not do (ValueError); returns the block size."""
    trained = draft.config.block_size if draft is not None else 16
    block_size = trained if block_size is None else block_size
    temperature, top_k, top_p = filters["temperature"], filters["top_k"], filters["top_p"]
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError("input_ids must be [1, S] (batch size 1 only), got "
                         f"{tuple(input_ids.shape)}")
    V, S = target.get_input_embeddings().weight.shape[0], input_ids.shape[-1]
    text = target.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or math.inf
    rope = getattr(text, "rope_parameters", None) or {}
    longrope = rope.get("rope_type") == "longrope"
    switch = rope.get("original_max_position_embeddings") if longrope else None
    for ok, why in (
            (not switch or S > switch or S + max_new_tokens <= switch,
             f"longrope changes its frequencies at position {switch}, inside this generation: "
             "blocks would differ from single tokens; stay on one side of it"),
            (S > 0, "the prompt is empty: give at least one token"),
            (S == 0 or 0 <= int(input_ids.min()) <= int(input_ids.max()) < V,
             f"input_ids must lie in 0 .. {V - 1}"),
            (max_new_tokens >= 0, f"max_new_tokens = {max_new_tokens}: must not be negative"),
            (S + max_new_tokens <= limit, f"the prompt ({S} tokens) and max_new_tokens = "
             f"{max_new_tokens} exceed the target's {limit} positions: shorten either"),
            (0 <= temperature < math.inf, f"temperature = {temperature}: must be 0 or positive"),
            (top_k >= 0, f"top_k = {top_k}: must be 0 (off) or positive"),
            (0 < top_p <= 1, f"top_p = {top_p}: must lie in (0, 1]"),
            (2 <= block_size <= trained,
             f"block_size = {block_size}: must lie in 2 .. {trained}, the trained one "
             "(16 where nothing but copying proposes)")):
        if not ok:
            raise ValueError(why)
    return block_size


class _Loop:
    """The one loop: propose, verify, roll back. Without draft and copy it is plain decoding."""

    def __init__(self, target, draft, input_ids, max_new_tokens, filters, eos_token_ids,
                 block_size, generator, copy):
        self.adaptive = block_size == "auto"
        self.block_size = check_request(target, draft, input_ids, max_new_tokens, filters,
                                        None if self.adaptive else block_size)
        self.target, self.draft, self.input_ids = target, draft, input_ids
        self.budget, self.eos, self.filters = max_new_tokens, token_id_set(eos_token_ids), filters
        self.generator, self.copy, self.stats = generator, copy, Statistics()
        self.device = target.get_input_embeddings().weight.device
        # running means of kept proposals: where copies keep less than the draft, the draft goes,
        # and an adaptive block proposes 2 more than twice as many
        self.kept = {"draft": 0.0, "copy": float(self.block_size)}

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def choose(self, logits, proposal: Proposal) -> tuple[int, int]:
        """(accepted, next token) of a verified block; an empty proposal just takes a token."""
        ops = operations(getattr(self.draft, "kernels", "off"), logits)
        if self.filters["temperature"] == 0:
            return ops.verify_greedy(logits, proposal.tokens)
        uniform = torch.rand(len(logits), generator=self.generator, device=logits.device)
        return ops.verify_sampled(sampling_distribution(logits, **self.filters), proposal, uniform)

    def emit(self, tokens: list[int], accepted: int = 0, source: str = "target") -> list[int]:
        """Cut at the budget and behind the first end-of-sequence token, whichever comes first."""
        stats, tokens = self.stats, tokens[:self.budget - self.stats.new_tokens]
        stop = next((i for i, token in enumerate(tokens) if token in self.eos), None)
        if stop is not None:
            tokens, stats.finish_reason = tokens[:stop + 1], "eos"
        stats.new_tokens += len(tokens)
        stats.emitted_by[source] += min(accepted, len(tokens))
        stats.emitted_by["target"] += len(tokens) - min(accepted, len(tokens))
        if self.copy:
            self.index.extend(tokens)
        return tokens

    def stop_within(self, step: Step, kept: int):
        """Count only the first `kept` tokens of the last step: a caller stopped there."""
        stats, lost = self.stats, len(step.tokens) - kept
        by_source = min(step.accepted, len(step.tokens)) - min(step.accepted, kept)
        stats.new_tokens -= lost
        stats.emitted_by[step.source] -= by_source
        stats.emitted_by["target"] -= lost - by_source
        if stats.accept_lengths:
            stats.accept_lengths[-1] -= lost
        if lost:
            stats.finish_reason = "length"

    def prefill(self) -> int:
        """Run the prompt; returns the first anchor."""
        draft, ids = self.draft, self.input_ids.to(self.device)
        self.runner = TargetRunner(self.target, draft.config.target_layer_ids if draft else ())
        logits, taps = self.runner(ids, logits_to_keep=1)
        if draft is not None or self.copy:
            self.runner.begin_rollback()
        self.state = draft.start(self.target) if draft is not None else None
        self.waiting = [taps]  # of positions the draft has not read yet
        self.index = CopyIndex(ids[0].tolist()) if self.copy else None
        return self.choose(logits, copy_proposal([], self.device))[1]

    def length(self, source: str) -> int:
        """How many tokens to propose. A forward adds a token of the target's own: leave room.

        It depends on rounds before this one alone, so that sampling stays lossless.
        """
        length = min(self.block_size - 1, self.budget - self.stats.new_tokens - 1)
        return min(length, 2 + round(2 * self.kept[source])) if self.adaptive else length

    def propose(self, anchor: int) -> tuple[Proposal, str]:
        """Proposals and their source."""
        room = self.length("draft") > 0
        trusted = self.draft is None or self.kept["copy"] >= self.kept["draft"]
        if room and self.copy and trusted:
            if copied := self.index.propose(self.length("copy")):
                return copy_proposal(copied, self.device), "copy"
        if room and self.draft is not None:
            taps, self.waiting = torch.cat(self.waiting), []
            proposal = self.draft.propose(self.state, taps, anchor, self.length("draft"),
                                          **self.filters, generator=self.generator)
            return Proposal(*(x.to(self.device) for x in proposal)), "draft"
        return copy_proposal([], self.device), "target"

    @torch.no_grad()
    def run(self):
        stats = self.stats
        if self.budget == 0:
            return stats
        began = self.clock()
        anchor = self.prefill()
        stats.prefill_seconds = self.clock() - began
        yield Step(self.emit([anchor]))
        while stats.finish_reason != "eos" and stats.new_tokens < self.budget:
            began = self.clock()
            proposal, source = self.propose(anchor)
            proposed, drafted = len(proposal.tokens), self.clock()
            block = torch.cat((proposal.tokens.new_tensor([anchor]), proposal.tokens))[None]
            logits, taps = self.runner(block, logits_to_keep=proposed + 1)  # [proposed + 1, V]
            accepted, anchor = self.choose(logits.to(self.device), proposal)
            if proposed:
                self.runner.rollback(proposed - accepted)
                self.kept[source] += 0.2 * (accepted - self.kept[source])
            if self.draft is not None:
                self.waiting.append(taps[:accepted + 1])  # the old anchor's and what was kept
            stats.draft_seconds += drafted - began
            stats.verify_seconds += self.clock() - drafted
            tokens = self.emit(proposal.tokens[:accepted].tolist() + [anchor], accepted, source)
            stats.target_forwards += 1
            stats.accept_lengths.append(len(tokens))
            yield Step(tokens, proposed, accepted, source)
        return stats


def generate(target, draft: DSpine | None, input_ids, *, max_new_tokens: int,
             temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, eos_token_ids=(),
             block_size: int | str | None = None, generator=None, copy: bool = False):
    """DSpine decoding: a generator of Steps whose return value is Statistics (see `collect`).

    input_ids [1, S]. Emits max_new_tokens tokens, or fewer where one of eos_token_ids comes first
    (it is the last token then). Temperature 0 emits what generate_plain emits, token for token
    (in float32; in bfloat16 near-ties may fall either way, since a block of B rows is summed in
    another order than one row); otherwise tokens have the target's filtered distribution.
    block_size limits a round to so many tokens, its anchor included (default: what the draft was
    trained for); "auto" lets it follow what rounds before kept, for machines where a verified
    token costs time. copy=True lets rounds whose text repeats itself copy instead of draft
    (CopyIndex); with draft None it copies only. Raises ValueError for requests it can not serve
    and for targets whose cache can not be rolled back.
    """
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    return _Loop(target, draft, input_ids, max_new_tokens, filters, eos_token_ids, block_size,
                 generator, copy).run()


def generate_plain(target, input_ids, *, max_new_tokens: int, temperature: float = 0.0,
                   top_k: int = 0, top_p: float = 1.0, eos_token_ids=(), generator=None):
    """The same loop with nothing to propose: one token a target forward."""
    return generate(target, None, input_ids, max_new_tokens=max_new_tokens,
                    temperature=temperature, top_k=top_k, top_p=top_p,
                    eos_token_ids=eos_token_ids, generator=generator)


def collect(steps) -> tuple[list[int], Statistics]:
    """Run a generator of Steps to its end: all tokens, and the statistics it returned."""
    tokens = []
    while True:
        try:
            tokens += next(steps).tokens
        except StopIteration as end:
            return tokens, end.value


class TransformersDecoder:
    """The loop behind transformers' own generate, which calls this with its arguments prepared.

    Honours generation_config, stopping_criteria and streamers. Whatever the loop does not do is
    refused by name. `statistics` holds those of the last call.
    """

    FILTERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k",
               "TopPLogitsWarper": "top_p"}
    REFUSED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states",
               "token_healing", "penalty_alpha", "dola_layers")
    HANDLED = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")

    def __init__(self, draft: DSpine, block_size: int | str | None):
        self.draft, self.block_size, self.statistics = draft, block_size, None

    def _check(self, input_ids, processors, c, kwargs: dict):
        """Raise ValueError naming every setting that the loop does not implement."""
        mask, position_ids, cache = (kwargs.get(k) for k in self.HANDLED[:3])
        refused = []
        for p in processors or ():  # the config's own filters are applied by the loop
            setting = self.FILTERS.get(type(p).__name__)
            if setting is None or getattr(p, setting, None) != getattr(c, setting):
                refused.append(type(p).__name__)
        refused += [f"{k}={getattr(c, k)}" for k in ("num_beams", "num_return_sequences")
                    if getattr(c, k, None) not in (None, 1)]
        refused += [k for k in self.REFUSED if getattr(c, k, None)]
        refused += [k for k, v in kwargs.items() if v is not None and k not in self.HANDLED]
        counted = torch.arange(input_ids.shape[1], device=input_ids.device)
        refused += [name for name, found in (
            ("batch size > 1", input_ids.shape[0] != 1),
            ("padding in attention_mask", mask is not None and not bool(mask.all())),
            ("position_ids other than 0, 1, 2, ...",
             position_ids is not None and not torch.equal(position_ids.flatten(), counted)),
            ("a filled cache", cache is not None and cache.get_seq_length() > 0)) if found]
        if refused:
            raise ValueError(f"DSpine decoding does not implement: {', '.join(refused)}")

    def __call__(self, model, input_ids, logits_processor=None, stopping_criteria=None,
                 generation_config=None, synced_gpus=False, streamer=None, **kwargs):
        c = generation_config
        if streamer is None:  # transformers 5.24 keeps it from a callable: look at generate's own
            streamer = sys._getframe(1).f_locals.get("streamer")
        self._check(input_ids, logits_processor, c, kwargs)
        filters = dict(temperature=0.0, top_k=0, top_p=1.0)
        if c.do_sample:
            filters = dict(temperature=1.0 if c.temperature is None else c.temperature,
                           top_k=c.top_k or 0, top_p=1.0 if c.top_p is None else c.top_p)
        loop = _Loop(model, self.draft, input_ids, c.max_length - input_ids.shape[1], filters,
                     c.eos_token_id, self.block_size, None, False)
        ids, self.statistics = input_ids, loop.stats
        for step in loop.run():
            for i, token in enumerate(step.tokens):
                ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)
                if streamer is not None:
                    streamer.put(ids[0, -1:].cpu())
                if stopping_criteria and bool(stopping_criteria(ids, None).all()):
                    break
            else:
                continue
            loop.stop_within(step, i + 1)
            break
        if streamer is not None:
            streamer.end()
        if c.return_dict_in_generate:
            from transformers.generation import GenerateDecoderOnlyOutput
            return GenerateDecoderOnlyOutput(sequences=ids)
        return ids
