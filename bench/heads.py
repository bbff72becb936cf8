"""The other drafters of DSpine's family as heads on its backbone, for bench/family.py.

Each is a DSpine with another way to choose tokens and another loss: dspine.generate decodes with
it and train_small.Trainer trains it, unchanged. Equations are written from the description in the
DSpine paper (arXiv 2609.36173) and, for EAGLE-3, from its own; nobody's code was copied, and
"departures" says where the description leaves room or was left.

A head brings what its scores need beside the hidden state h_t [H], its `extra`:
    forward   teacher-forced, all slots in parallel: h and extra (in pre_injection) of each slot
    logits    scores [.., V'] of h and extra
    losses    of those, as dspine.objective asks for them
    propose_rows   the same scores at decoding, where the tokens before are those chosen

Sampling. DSpark, Domino and EAGLE-3 draw each token from softmax(scores / temperature) over the
whole draft vocabulary and hand that vector to verification (K = V'), so the draft distribution is
exactly what was sampled from. DFlash2 does so over its K candidates. DFlash proposes the argmax
of each position, one-hot: its positions do not know of each other, and sampled blocks would not
fit together.

Symbols as in dspine.py; T = B-1 proposals, x_0 the anchor, x_t the token at slot t, V' <= V the
draft vocabulary, c = RANK.
"""

import sys
from dataclasses import dataclass, replace as replaced
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dspine import (DraftOutput, DraftState, DSpine, DSpineConfig, Layer,  # noqa: E402
                    Proposal, RMSNorm, candidate_score_losses, ce_and_l1, check_scores,
                    inverse_cdf, sampling_distribution, select_path, teacher_distribution)

RANK = 256   # c: of every low-rank part
GROUP = 16   # DFlash2: channels that share a gate
SELF_FED = 3  # EAGLE-3: training steps on the layer's own output, after one on the target's

# -------------------------------------------------------------------------------------------------
# What heads share
# -------------------------------------------------------------------------------------------------


@dataclass
class HeadState(DraftState):
    matrices: tuple = ()               # Head.matrices
    feature: torch.Tensor | None = None  # EAGLE-3: context [N, H] right before the anchor


class Head(DSpine):
    """The backbone without injection, and scores W h_t."""

    FORM = {}  # fields of the config that make this head

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.injection, self.kernels = None, "off"
        self.trained_slots = config.block_size - 1

    @classmethod
    def from_backbone(cls, draft: DSpine) -> "Head":
        """A fresh head on the backbone of `draft`, whose weights it takes."""
        head = cls(replaced(draft.config, inject="none", **cls.FORM))
        head.load_state_dict(draft.state_dict(), strict=False)
        head.transfer_mean, head.transfer_directions = (draft.transfer_mean,
                                                        draft.transfer_directions)
        if draft.draft_vocab is not None:
            head.set_draft_vocab(draft.draft_vocab)
        return head.to(draft.fc.weight.device).train()

    def use_kernels(self, setting: str) -> "Head":
        if setting != "off":
            raise ValueError("kernels.py holds DSpine's operations only: use kernels 'off'")
        return self

    def forward_blocks(self, *inputs, **options) -> DraftOutput:
        out = super().forward_blocks(*inputs, **options | {"features": False})
        N, A, B, _ = out.hidden_states.shape
        return out._replace(layer_features=out.hidden_states.new_zeros(1, N, A, B, 0))

    def refine(self, extra, prev_ids):
        """What dspine.objective passes on as `refined`: extra [tokens, ..]."""
        return extra

    def matrices(self, lm_head) -> tuple:
        """The matrices [V', ..] that scores are products with; lm_head [V, H]."""
        return (self.draft_head(lm_head),)

    def logits(self, hidden, extra, matrices):
        """hidden [.., H] -> [.., V']."""
        return F.linear(hidden, matrices[0])

    def token_losses(self, hidden, extra, labels, p, index, lm_head, c):
        """ce, l1 and two more losses [4, tokens]; candidates [tokens, K].

            Q = softmax(logits);  ce = -log Q(y);  l1 = sum_v |Q(v) - P(v)|

        p [U, V] holds P of each target position once, index [tokens] points into it.
        """
        vocab = self.draft_vocab
        logits = self.logits(hidden, extra, self.matrices(lm_head)).float()  # [tokens, V']
        here = (p if vocab is None else p[:, vocab])[index]
        ce, l1 = ce_and_l1(logits.log_softmax(-1), labels, here, vocab)
        top = logits.detach().topk(c.top_k, dim=-1).indices
        candidates = top if vocab is None else vocab[top]
        more = self.candidate_losses(logits, top, candidates, extra, labels, p, index, c)
        return torch.stack((ce, l1, *more)), candidates

    def candidate_losses(self, logits, top, candidates, extra, labels, p, index, c):
        """ce', l1' [tokens] of a choice among candidates: none here."""
        return logits.new_zeros(2, len(labels))

    def losses(self, hidden, extra, labels, weights, teacher, index, lm_head, c, a, softcap,
               chunk, vocab=None):
        """a ce + (1-a) l1 + a ce' + (1-a) l1', in the form of dspine.chunked_losses."""
        sums, candidates = 0.0, []
        for part in torch.arange(len(labels), device=labels.device).split(chunk):
            low, high = index[part[0]], index[part[-1]]                     # index ascends
            with torch.no_grad():
                p = teacher_distribution(teacher[low:high + 1], lm_head, softcap)
            losses, top = checkpoint(
                self.token_losses, hidden[part], extra[part], labels[part], p, index[part] - low,
                lm_head, c, use_reentrant=False)
            # no matrix products: autocast would round them to bfloat16
            sums = sums + (losses * weights[part]).sum(-1)                  # [4]
            candidates.append(top)
        loss = (sums * sums.new_tensor([a, 1 - a, a, 1 - a])).sum()
        return loss, sums.detach(), torch.cat(candidates)

    def start(self, target) -> HeadState:
        state = super().start(target)
        return HeadState(**vars(state), matrices=self.matrices(state.lm_head))


def choose_serially(score, anchor_ids, length: int, vocab, *, temperature=0.0, top_k=0, top_p=1.0,
                    generator=None, uniform=None) -> Proposal:
    """Left to right: x_t ~ softmax(score(t, x_{t-1}) / temperature); temperature 0: the argmax.

    score(t, tokens [N]) -> [N, V'] is asked for t = 0 .. T-1 in turn. The distribution is filtered
    like the target's and returned whole: candidates are the V' tokens (one at temperature 0).
    """
    token, tokens, probs = anchor_ids, [], []
    if temperature and uniform is None:
        uniform = torch.rand(len(token), length, generator=generator, device=token.device)
    for t in range(length):
        scores = score(t, token).float()                                    # [N, V']
        check_scores(scores)
        if temperature:
            probs.append(sampling_distribution(scores, temperature, top_k, top_p))
            at = inverse_cdf(probs[-1], uniform[:, t])
        else:
            at = scores.argmax(-1)
        token = at if vocab is None else vocab[at]
        tokens.append(token)
    tokens = torch.stack(tokens, dim=-1)                                    # [N, T]
    if not temperature:
        return Proposal(tokens, tokens[..., None], torch.ones_like(tokens[..., None]).float())
    probs = torch.stack(probs, dim=1)                                       # [N, T, V']
    ids = torch.arange(probs.shape[-1], device=tokens.device) if vocab is None else vocab
    return Proposal(tokens, ids.expand(probs.shape), probs)


# -------------------------------------------------------------------------------------------------
# The heads
# -------------------------------------------------------------------------------------------------


class DFlash(Head):
    """DFlash: every position on its own.

        scores_t = W h_t,  bidirectional inside the block;  x_t = argmax;  loss = ce

    This is DSpine's own ablation --inject none --attention bidirectional --select argmax, but for
    the loss. Departures: none known in the head; w_t and anchors are DSpine's.
    """
    FORM = dict(attention="bidirectional", select="argmax")


class Serial(Head):
    """scores_t = W h_t + W2 z_t, z_t [c] a summary of x_0 .. x_{t-1}; W2 = 0 at the start."""

    FORM = dict(attention="bidirectional")

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.second = nn.Linear(RANK, config.vocab_size, bias=False)        # W2
        nn.init.zeros_(self.second.weight)

    def summary(self, ids, memory=None):
        """z [M, s, c] of tokens [M, s] that follow those in `memory`; the memory after them."""
        raise NotImplementedError

    def matrices(self, lm_head) -> tuple:
        return self.draft_head(lm_head), self.draft_head(self.second.weight)

    def logits(self, hidden, extra, matrices):
        return F.linear(hidden, matrices[0]) + F.linear(extra, matrices[1])

    def forward(self, block_ids, context_states, anchors, embed, replace=None) -> DraftOutput:
        z, _ = self.summary(block_ids[..., :-1].flatten(0, 1))              # [N*A, T, c]
        z = F.pad(z, (0, 0, 1, 0)).unflatten(0, block_ids.shape[:2])        # [N, A, B, c]
        out = super().forward(block_ids, context_states, anchors, embed)
        return out._replace(pre_injection=z)

    @torch.no_grad()
    def propose_rows(self, state, anchor_ids, starts, length: int, **sampling) -> Proposal:
        hidden, _, _ = self.run_blocks(state, anchor_ids, starts, length)   # [N, T, H]
        parallel, second = F.linear(hidden, state.matrices[0]), state.matrices[1]
        memory = None

        def score(t, token):
            nonlocal memory
            z, memory = self.summary(token[:, None], memory)                # [N, 1, c]
            return parallel[:, t] + F.linear(z[:, 0], second)
        return choose_serially(score, anchor_ids, length, self.draft_vocab, **sampling)


class DSpark(Serial):
    """DSpark: DFlash's scores and a Markov bias over the whole vocabulary, left to right.

        z_t = W1[x_{t-1}],  W1 [V, c];  loss = 0.1 ce + 0.9 l1, teacher-forced

    Departures: the weight of ce begins at --ce-start, as for everyone here.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.first = nn.Embedding(config.vocab_size, RANK)                  # W1

    def summary(self, ids, memory=None):
        return self.first(ids), None


class Domino(Serial):
    """Domino: a recurrent summary of the block so far, left to right.

        z_t = GRU(z_{t-1}, E[x_{t-1}]),  z_0 = 0;  loss = 0.1 ce + 0.9 l1, teacher-forced

    E [V, c]. Departures: the description gives no loss and no sizes: they are DSpark's.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, RANK)              # E
        self.gru = nn.GRU(RANK, RANK, batch_first=True)

    def summary(self, ids, memory=None):
        return self.gru(self.embedding(ids), memory)


class Convolution(nn.Module):
    """Two-tap content-gated causal convolution inside a block, the identity at the start.

        y_t = (1 + a_t) x_t + b_t x_{t-1},  [a_t; b_t] = tanh(G x_t),  x_{-1} = 0,  G = 0 at start

    One a and one b for each group of 16 channels. x [N, A*B, H].
    """

    def __init__(self, c: DSpineConfig):
        super().__init__()
        if c.hidden_size % GROUP:
            raise ValueError(f"DFlash2 needs a hidden_size that {GROUP} divides, not "
                             f"{c.hidden_size}")
        self.block_size = c.block_size
        self.gate = nn.Linear(c.hidden_size, 2 * c.hidden_size // GROUP, bias=False)    # G
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        x = x.unflatten(1, (-1, self.block_size))                           # [N, A, B, H]
        before = F.pad(x, (0, 0, 1, 0))[..., :-1, :]
        own, left = torch.tanh(self.gate(x)).repeat_interleave(GROUP, dim=-1).chunk(2, dim=-1)
        return (x + own * x + left * before).flatten(1, 2)


class ConvolvedLayer(Layer):
    """A layer with convolutions before and after its attention and its MLP."""

    def __init__(self, c: DSpineConfig):
        super().__init__(c)
        self.convolutions = nn.ModuleList(Convolution(c) for _ in range(4))

    def forward(self, x, cos, sin, context_kv, mask):
        one, two, three, four = self.convolutions
        x = x + two(self.self_attn(one(self.input_layernorm(x)), cos, sin, context_kv, mask))
        return x + four(self.mlp(three(self.post_attention_layernorm(x))))


class DFlash2(Head):
    """DFlash2: convolved layers, and a path through the top K of each position.

        s_t(a, b) = W[b] . h_t + <A[a] * (D h_t), B[b]>,   a = x_{t-1},  b in top-K of W h_t
        loss = 0.1 ce + 0.9 l1 of W h_t + (0.1 ce' + 0.9 l1') of s_t over the K, teacher-forced

    A, B [V, c], D [c, H] = 0 at the start. Departures: the description gives no loss: it is
    DSpine's without alignment, nor sizes: c = RANK, and "group 16" is read as GROUP channels a
    gate; the path is walked greedily (or sampled) from the left.
    """
    FORM = dict(attention="bidirectional")

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(ConvolvedLayer(config) for _ in self.layers)
        self.left, self.right = (nn.Embedding(config.vocab_size, RANK) for _ in range(2))  # A, B
        self.project = nn.Linear(config.hidden_size, RANK, bias=False)      # D
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.project.weight)

    def refine(self, pre, prev_ids):
        """A[a] * (D h_t): pre [.., H], the state before `norm`, and prev_ids [..] -> [.., c]."""
        return self.left(prev_ids) * self.project(self.norm(pre))

    def candidate_losses(self, logits, top, candidates, extra, labels, p, index, c):
        path = (self.right(candidates) @ extra[..., None])[..., 0]          # [tokens, K]
        return candidate_score_losses(logits.gather(-1, top) + path, labels, candidates,
                                      p[index[:, None], candidates], c)

    @torch.no_grad()
    def propose_rows(self, state, anchor_ids, starts, length: int, **sampling) -> Proposal:
        hidden, pre, _ = self.run_blocks(state, anchor_ids, starts, length)  # [N, T, H]
        scores, candidate_ids = self.candidates(hidden, state.draft_head)   # [N, T, K] by b
        check_scores(scores)
        first = anchor_ids[:, None, None].expand_as(candidate_ids[:, :1])
        prev_ids = torch.cat((first, candidate_ids[:, :-1]), dim=1)         # [N, T, K] by a
        path = self.refine(pre[:, :, None], prev_ids) @ self.right(candidate_ids).mT
        tokens, _, probs = select_path((scores[:, :, None] + path).float(), candidate_ids,
                                       **sampling)                          # path [N, T, K, K]
        return Proposal(tokens, candidate_ids, probs)


class Eagle3(Head):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840), a stand-in: one layer, run token after token.

        i_t = F [norm(embed(x_t)); norm(f_t)],  f_0 = context at the position before the anchor
        f_{t+1} = layer(i_t over the context and i_0 .. i_{t-1});   scores_{t+1} = W norm(f_{t+1})

    Trained as it decodes: one step on the target's feature, then SELF_FED on its own f; slots
    of a block behind those are not supervised. F [H, 2H] starts as a sum. Departures: a chain, no
    tree; the layer's input is H wide, not 2H; keys of the context come from taps alone, as
    everywhere here, without the embeddings of the tokens that follow; loss 0.1 ce + 0.9 l1
    instead of cross entropy with P.
    """
    FORM = dict(num_hidden_layers=1)

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        H, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm, self.feature_norm = RMSNorm(H, eps=eps), RMSNorm(H, eps=eps)
        self.fuse = nn.Linear(2 * H, H, bias=False)                         # F
        with torch.no_grad():
            self.fuse.weight.copy_(torch.eye(H).repeat(1, 2))
        self.trained_slots = min(1 + SELF_FED, config.block_size - 1)

    @classmethod
    def from_backbone(cls, draft: DSpine) -> "Eagle3":
        head = super().from_backbone(draft)
        head.layers[0].load_state_dict(draft.layers[-1].state_dict())
        return head

    def step(self, t: int, embedded, feature, anchors, keys_values, S: int):
        """f_{t+1} [N, A, H] and the keys and values with those of i_t.

        embedded = embed(x_t), feature = f_t [N, A, H]; anchors [N, A]; keys_values of S context
        positions and of i_0 .. i_{t-1} of every block.
        """
        layer, (N, A) = self.layers[0], anchors.shape
        x = self.fuse(torch.cat((self.embed_norm(embedded), self.feature_norm(feature)), dim=-1))
        cos, sin = self.rope(anchors + t)
        context = torch.arange(S, device=x.device) < anchors[..., None]     # [N, A, S]
        own = torch.eye(A, dtype=torch.bool, device=x.device).repeat(1, t + 1)  # [A, (t+1)*A]
        mask = torch.cat((context, own.expand(N, -1, -1)), dim=-1)[:, None]
        (old,) = keys_values
        new = layer.self_attn.keys_values(layer.input_layernorm(x), cos, sin)
        grown = tuple(torch.cat(pair, dim=2) for pair in zip(old, new))
        return layer(x, cos, sin, old, mask), [grown]

    def forward(self, block_ids, context_states, anchors, embed, replace=None) -> DraftOutput:
        (N, A, B), S = block_ids.shape, context_states.shape[1]
        keys_values = self.context_keys_values(context_states)
        n = torch.arange(N, device=anchors.device)[:, None]
        feature = self.encode_context(context_states)[n, (anchors - 1).clamp_min(0)]
        feature = feature * (anchors > 0)[..., None]                        # [N, A, H]
        hidden = []
        for t in range(self.trained_slots):
            embedded = F.embedding(block_ids[..., t], embed).to(feature.dtype)
            feature, keys_values = self.step(t, embedded, feature, anchors, keys_values, S)
            hidden.append(self.norm(feature))
        hidden = F.pad(torch.stack(hidden, dim=2), (0, 0, 1, B - 1 - len(hidden)))
        return DraftOutput(hidden, hidden, hidden.new_zeros(1, N, A, B, 0))  # [N, A, B, H]

    def extend_context(self, state, context_states):
        super().extend_context(state, context_states)
        state.feature = self.encode_context(context_states[-1:].to(self.fc.weight.device))

    @torch.no_grad()
    def propose_rows(self, state, anchor_ids, starts, length: int, **sampling) -> Proposal:
        feature, keys_values = state.feature[:, None], state.keys_values
        S = keys_values[0][0].shape[2]

        def score(t, token):
            nonlocal feature, keys_values
            embedded = F.embedding(token[:, None], state.embed)             # [N, 1, H]
            feature, keys_values = self.step(t, embedded, feature, starts[:, None], keys_values, S)
            return self.logits(self.norm(feature[:, 0]), None, state.matrices)
        return choose_serially(score, anchor_ids, length, self.draft_vocab, **sampling)
