"""Tests of the project: `pytest -q`. Codes such as C04 name known faults of sibling projects.

Targets are tiny random transformers models; the reference for greedy output is a loop that runs
the whole text again for every token, without a cache. A Scripted draft proposes the true text
and corrupts chosen slots, so that every accept count can be asked for.
"""

import copy
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

# Triton decides at import whether it interprets. TRITON_INTERPRET=0 on a machine with a GPU runs
# the kernels' tests there, in bfloat16 too.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
import dspine
import family
import generate as program
import heads
import kernels
import train_small as training
from dspine import (DSpine, DSpineConfig, Injection, Plain, Proposal, collect, generate,
                    generate_plain)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")             # E05
ROOT = Path(__file__).resolve().parent
GOLDEN = ROOT / "assets"
VOCAB, MASK = 97, 96

# -------------------------------------------------------------------------------------------------
# Helpers
# -------------------------------------------------------------------------------------------------

LINEAR = dict(layer_types=["linear_attention", "full_attention"] * 2, linear_num_value_heads=2,
              linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
FAMILIES = {  # those whose caches can be rolled back
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": dict(sliding_window=8),
    "Gemma2": dict(sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0),
    "Gemma3": dict(sliding_window=8, query_pre_attn_scalar=8),
    "GPT2": dict(n_embd=32, n_layer=4, n_head=4, n_positions=512),
    "Lfm2": dict(layer_types=["conv", "full_attention"] * 2)}
REFUSED = {
    "Qwen3Next": LINEAR | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                               shared_expert_intermediate_size=16),
    "Qwen3_5": LINEAR, "Mamba": dict(state_size=4),
    "RecurrentGemma": dict(lru_width=32, attention_window_size=8)}


@cache
def tiny(family="Llama", dtype=torch.float32, seed=0, **sizes):
    """A random target of 4 layers; wide weights, so that greedy text is no trivial loop."""
    kind = getattr(transformers, family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM"))
    base = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
        pad_token_id=None)
    if family == "GPT2":
        base = {k: base[k] for k in ("vocab_size", "initializer_range", "tie_word_embeddings",
                                     "eos_token_id", "bos_token_id")}
    torch.manual_seed(seed)
    config = kind.config_class(**base | FAMILIES.get(family, {}) | REFUSED.get(family, {}) | sizes)
    return kind(config).to(dtype).eval().requires_grad_(False)


def prompt(length=20, seed=1, vocab=VOCAB):
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(target, ids, count: int) -> list[int]:
    """Greedy tokens, one at a time, the whole text again for each: no cache."""
    for _ in range(count):
        ids = torch.cat((ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0].tolist()[-count:] if count else []


@cache
def truth(target, length=20, count=60) -> list[int]:
    return reference(target, prompt(length), count)


def config_for(target, **overrides):
    sizes = dict(num_hidden_layers=2, target_layer_ids=[0, 2], mask_token_id=MASK, block_size=6,
                 transfer_rank=16, message_size=8, top_k=4)
    return DSpineConfig.for_target(target, **sizes | overrides)


def random_draft(target, seed=0, draft_vocab=0, **overrides):
    """A draft for `target` in which every term of the method does something.

    draft_vocab: how many tokens it may propose, scattered over the vocabulary; 0: all.
    """
    torch.manual_seed(seed)
    draft = DSpine.for_target(config_for(target, **overrides), target)
    if draft_vocab:
        draft.set_draft_vocab(torch.randperm(draft.config.vocab_size)[:draft_vocab])
    with torch.no_grad():
        for name, p in draft.named_parameters():
            p += torch.randn_like(p) * 0.3
    return draft.requires_grad_(False)


class Scripted(DSpine):
    """Proposes the true continuation; in round i slots from pattern[i % len] on are wrong."""

    def __init__(self, target, ids, continuation, pattern, block_size=6, top_k=4):
        V, H = target.get_output_embeddings().weight.shape
        super().__init__(DSpineConfig(
            vocab_size=V, hidden_size=H, target_layer_ids=[0, 2], mask_token_id=V - 1,
            num_target_layers=target.config.num_hidden_layers, num_hidden_layers=1,
            intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=2,
            transfer_rank=2, message_size=2, top_k=top_k, block_size=block_size))
        self.transfer_ready.fill_(True)
        self.text, self.pattern, self.rounds = ids[0].tolist() + continuation, pattern, 0

    def propose(self, state, context_states, anchor_id, length, **filters):
        state.length += len(context_states)
        assert self.text[state.length] == anchor_id  # the context ends right before the anchor
        tokens = torch.tensor(self.text[state.length + 1:state.length + 1 + length])
        wrong = self.pattern[self.rounds % len(self.pattern)]
        tokens[wrong:] = (tokens[wrong:] + 1) % self.config.vocab_size
        self.rounds += 1
        return Proposal(tokens, tokens[:, None], torch.ones(len(tokens), 1))


def scripted(target, pattern, length=20, **sizes):
    return Scripted(target, prompt(length), truth(target, length), pattern, **sizes)


@pytest.fixture
def runners(monkeypatch):
    """Every TargetRunner made, with its calls: (cache length before, logits)."""
    made = []

    class Recorded(dspine.TargetRunner):
        def __init__(self, *args):
            super().__init__(*args)
            self.calls = []
            made.append(self)

        def __call__(self, ids, logits_to_keep):
            start = self.cache.get_seq_length()
            logits, taps = super().__call__(ids, logits_to_keep)
            self.calls.append((start, ids.shape[1], logits))
            return logits, taps

    monkeypatch.setattr(dspine, "TargetRunner", Recorded)
    return made


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# -------------------------------------------------------------------------------------------------
# Published numbers
# -------------------------------------------------------------------------------------------------


def golden(name):
    folder = ROOT / "assets" / f"golden_{name}"
    return (DSpine.from_pretrained(folder), load_file(folder / "inputs.safetensors"),
            load_file(folder / "expected.safetensors"))


def golden_forward(draft, given, replace=False):
    blocks = dspine.gather_blocks(given["input_ids"], given["anchors"], draft.config.block_size)
    return blocks, draft(blocks, given["target_hidden"], given["anchors"], given["embed"],
                         given["replace_mask"] if replace else None)


@pytest.mark.parametrize("name", ["a", "b"])
def test_published_numbers(name):
    draft, given, expected = golden(name)
    for suffix in ("", "_replaced"):
        blocks, out = golden_forward(draft, given, bool(suffix))
        for field, value in out._asdict().items():
            close(value, expected[field + suffix])
    blocks, out = golden_forward(draft, given)
    scores = F.linear(out.hidden_states[..., 1:, :], given["lm_head"])
    candidates = scores.topk(draft.config.top_k).indices
    assert torch.equal(candidates, expected["candidate_ids"])
    pre = out.pre_injection[..., 1:, :]
    table = draft.transition_cache(pre, candidates, blocks[..., 0], given["lm_head"])
    close(table, expected["transition_scores"])
    assert torch.equal(dspine.select_path(table, candidates)[0], expected["selected"])
    close(draft.refine(pre, blocks[..., :-1]), expected["refined_true_prev"])


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("name", ["a", "b"])
def test_published_losses(name, chunk):
    draft, given, expected = golden(name)
    blocks, out = golden_forward(draft, given)
    loss, terms = dspine.objective(
        draft, out, given["input_ids"], given["anchors"], torch.ones_like(blocks[..., 1:]).bool(),
        given["teacher_last_hidden"], given["lm_head"], beta=0.5, chunk=chunk)
    got = torch.tensor([terms[k] for k in ("ce", "l1", "refinement", "alignment")])
    close(got, expected["loss_terms"])
    close(loss, expected["loss_full_alignment"])


@pytest.mark.parametrize("name", ["a", "b"])
def test_transfer_table(name):
    """Published codes up to sign and order of the eigenvectors, which the Gram matrix ignores."""
    draft, given, _ = golden(name)
    head, r = given["lm_head"], draft.config.transfer_rank
    mean, directions, basis = dspine.transfer_space(head, r, chunk=7)
    codes = dspine.token_codes(head, mean, directions, chunk=7)
    close(codes @ codes.T, draft.transfer_codes @ draft.transfer_codes.T)
    close(basis @ basis.T, torch.eye(r))
    whole = dspine.token_codes(head, *dspine.transfer_space(head, r)[:2])
    close(codes @ codes.T, whole @ whole.T, 1e-5)
    flat = head[:, :4] @ torch.randn(4, head.shape[1])
    with pytest.raises(ValueError, match="4 positive eigenvalues.*transfer_rank = 5"):
        dspine.transfer_space(flat, 5)


# -------------------------------------------------------------------------------------------------
# Backbone and injection
# -------------------------------------------------------------------------------------------------


def test_zero_writes_are_an_exact_identity():
    """An untrained injection is the plain causal backbone (sec. 5), refinement the plain norm."""
    target = tiny()
    torch.manual_seed(0)
    fresh = DSpine.for_target(config_for(target), target)
    assert not fresh.injection.predecessor_gate.weight.any()
    plain = DSpine(config_for(target, inject="none"))
    plain.load_state_dict(fresh.state_dict())
    blocks, states = prompt(12).view(1, 2, 6), torch.randn(1, 20, 64)
    given = blocks, states, torch.tensor([[5, 14]]), target.get_input_embeddings().weight
    for a, b in zip(fresh(*given), plain(*given)):
        assert torch.equal(a, b)
    pre = torch.randn(3, 32)
    assert torch.equal(fresh.refine(pre, prompt(3)[0]), fresh.norm(pre))
    torch.nn.init.normal_(fresh.injection.writes[0].weight)
    assert not torch.equal(fresh(*given)[0], plain(*given)[0])


@pytest.mark.parametrize("replace", [False, True])
def test_who_sees_whom(replace):
    """The future, other blocks and later context change nothing; the anchor row is never written.

    The last true token is a predecessor of nobody; with replacement the others are, else none is.
    """
    target = tiny()
    draft, embed = random_draft(target), target.get_input_embeddings().weight
    plain = DSpine(config_for(target, inject="none"))
    plain.load_state_dict(draft.state_dict())
    blocks, states, anchors = prompt(18).view(1, 3, 6), torch.randn(1, 20, 64), [[4, 9, 12]]
    anchors, mask = torch.tensor(anchors), torch.tensor([[replace, replace, replace]])
    run = lambda model, b, s: model(b, s, anchors, embed, mask)
    out = run(draft, blocks, states)
    assert torch.equal(out.hidden_states[..., 0, :],
                       run(plain, blocks, states).hidden_states[..., 0, :])
    assert not torch.equal(out.hidden_states, run(plain, blocks, states).hidden_states)
    for slot in range(6):  # other true tokens from `slot` on, in block 1 only
        other = blocks.clone()
        other[0, 1, slot:] = (other[0, 1, slot:] + 1) % MASK
        got = run(draft, other, states)
        first = 0 if slot == 0 else slot + 1 if replace else 6  # the first row that may change
        same = [torch.equal(got.hidden_states[0, 1, t], out.hidden_states[0, 1, t])
                for t in range(6)]
        assert same == [t < first for t in range(6)]
        assert torch.equal(got.hidden_states[:, [0, 2]], out.hidden_states[:, [0, 2]])
        assert torch.equal(got.layer_features[:, :, [0, 2]], out.layer_features[:, :, [0, 2]])
    for cut in (8, 9):  # context at and behind an anchor is invisible to its block
        other = states.clone()
        other[:, cut:] += 1
        got = run(draft, blocks, other).hidden_states
        assert torch.equal(got[0, 0], out.hidden_states[0, 0])
        assert torch.equal(got[0, 1], out.hidden_states[0, 1]) == (cut == 9)


@pytest.mark.parametrize("overrides", [{}, dict(attention="bidirectional")])
@pytest.mark.parametrize("A", [17, 20, 33])
def test_many_blocks_of_a_row_equal_each_alone(A, overrides):
    """They attend in groups (17: of one, 20: of ten, 33: of eleven); two rows, in float64."""
    torch.manual_seed(0)
    draft = random_draft(tiny(), **overrides).double()
    states, embed = torch.randn(2, 30, 64).double(), tiny().get_input_embeddings().weight.double()
    ids, anchors = torch.randint(0, VOCAB, (2, 30)), torch.randint(1, 25, (2, A))
    blocks, replace = dspine.gather_blocks(ids, anchors, 6), torch.rand(2, A) < 0.5
    out = draft(blocks, states, anchors, embed, replace)
    for n, a in itertools.product(range(2), range(A)):
        n, a = slice(n, n + 1), slice(a, a + 1)
        alone = draft(blocks[n, a], states[n], anchors[n, a], embed, replace[n, a])
        close(out.hidden_states[n, a], alone.hidden_states, 1e-9)
        close(out.pre_injection[n, a], alone.pre_injection, 1e-9)
        close(out.layer_features[:, n, a], alone.layer_features, 1e-9)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_future_inputs_change_a_prefix_only_when_bidirectional(attention):
    draft = random_draft(tiny(), attention=attention)
    states, x, anchors = torch.randn(1, 9, 64), torch.randn(1, 1, 6, 32), torch.tensor([[9]])
    mask = dspine.block_mask(anchors, 9, 6, attention == "causal")
    run = lambda x: draft.forward_blocks(x, anchors, draft.context_keys_values(states), mask,
                                         draft.code(torch.tensor([[3]]))).hidden_states
    for t in range(1, 6):
        other = torch.cat((x[..., :t, :], x[..., t:, :] + 1), dim=2)
        assert torch.equal(run(x)[..., :t, :], run(other)[..., :t, :]) == (attention == "causal")


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_explicit_loops(causal):
    """C14 (queries fewer than keys), R03 (head_dim is not hidden / heads), grouped heads."""
    c = config_for(tiny(hidden_size=40, num_attention_heads=4, head_dim=16))
    draft, B, S, anchors = DSpine(c), 4, 10, torch.tensor([[6, 9]])
    attention = draft.layers[0].self_attn
    x, context = torch.randn(1, 2 * B, 40), torch.randn(1, S, 40)
    at = (anchors[..., None] + torch.arange(B)).flatten(1)
    kv = attention.keys_values(context, *draft.rope(torch.arange(S)[None]))
    got = attention(x, *draft.rope(at), kv, dspine.block_mask(anchors, S, B, causal))

    def vector(proj, norm, row, head, position):  # one head of one row, rotated by hand
        v = proj(row).view(-1, 16)[head]
        v = v / (v.square().mean() + c.rms_norm_eps).sqrt() * norm.weight
        turned = v.clone()
        for i in range(8):
            angle = torch.tensor(position * 1e4 ** (-2 * i / 16))
            turned[i] = v[i] * angle.cos() - v[i + 8] * angle.sin()
            turned[i + 8] = v[i + 8] * angle.cos() + v[i] * angle.sin()
        return turned

    for q in range(2 * B):
        block, keys = q // B, []
        keys += [(context[0, s], s) for s in range(int(anchors[0, block]))]
        last = q % B if causal else B - 1
        keys += [(x[0, block * B + s], int(at[0, block * B + s])) for s in range(last + 1)]
        heads = []
        for h in range(4):
            query = vector(attention.q_proj, attention.q_norm, x[0, q], h, int(at[0, q]))
            key = lambda row, p: vector(attention.k_proj, attention.k_norm, row, h // 2, p)
            scores = torch.stack([query @ key(row, p) for row, p in keys]) / 4
            values = torch.stack([attention.v_proj(row).view(2, 16)[h // 2] for row, _ in keys])
            heads.append(scores.softmax(-1) @ values)
        close(got[0, q], attention.o_proj(torch.cat(heads)), 1e-5)


def plain_write(draft, layer, h, prev):
    """sec. 5 for one receiver h [H] and predecessor feature prev [r]."""
    j, c = draft.injection, draft.config
    f = j.readouts[layer].weight @ h
    f = f / f.norm() * math.sqrt(c.transfer_rank)
    gate = torch.sigmoid(j.receiver_gate.weight @ f + j.predecessor_gate.weight @ prev + j.bias)
    delta = j.writes[layer].weight @ (gate * (j.message.weight @ prev))
    return h + h.norm() / math.sqrt(c.hidden_size) * delta


def plain_refine(draft, pre, token):
    """sec. 7 for one position and one token."""
    c = draft.config
    prev = math.sqrt(c.transfer_rank) * draft.transfer_codes[token]
    h = plain_write(draft, c.num_hidden_layers - 1, pre, prev)
    return draft.norm.weight * h / (h.square().mean() + c.rms_norm_eps).sqrt()


def test_injection_equals_a_plain_loop():
    draft, r = random_draft(tiny()), 16
    h, anchor = torch.randn(6, 32), draft.code(torch.tensor(5))
    for layer in range(2):
        features = [F.normalize(draft.injection.readouts[layer].weight @ x, dim=0) * math.sqrt(r)
                    for x in h]  # all read before anybody is updated
        expected = [h[0]] + [plain_write(draft, layer, h[t], anchor if t == 1 else features[t - 1])
                             for t in range(1, 6)]
        close(draft.injection(layer, h, anchor), torch.stack(expected), 1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transition_cache_equals_sequential_refinement(temperature):
    """By draft.refine row by row, and by a plain loop over the equations of sec. 7."""
    target = tiny()
    draft, head = random_draft(target), target.get_output_embeddings().weight
    T, K, anchor = 5, 4, 7
    pre, candidates = torch.randn(T, 32), torch.rand(T, VOCAB).topk(K).indices
    table = draft.transition_cache(pre, candidates, torch.tensor(anchor), head)
    for t in range(T):
        for a in range(K):
            token = anchor if t == 0 else int(candidates[t - 1, a])
            hidden = plain_refine(draft, pre[t], token)
            close(table[t, a], head[candidates[t]] @ hidden, 1e-4)
            close(draft.refine(pre[t], torch.tensor(token)), hidden, 1e-5)
    generator = torch.Generator().manual_seed(0)
    tokens, rows, probs = dspine.select_path(table, candidates, temperature, generator)
    previous = torch.tensor(anchor)
    for t in range(T):  # the serial process that the look-ups stand for
        scores = F.linear(draft.refine(pre[t], previous), head[candidates[t]])
        assert temperature or rows[t] == scores.argmax()
        close(probs[t], (scores / temperature).softmax(-1) if temperature
              else F.one_hot(scores.argmax(), K).float(), 1e-4)
        previous = tokens[t]
        assert previous == candidates[t, rows[t]]


@pytest.mark.parametrize("overrides", [
    {}, dict(attention="bidirectional", select="argmax"), dict(draft_vocab=30)])
def test_incremental_drafting_equals_a_fresh_step_and_the_training_forward(overrides):
    """T02 too: the same prefix gives the same proposal however the context came in."""
    target = tiny()
    draft, embed = random_draft(target, **overrides), target.get_input_embeddings().weight
    head, ids = target.get_output_embeddings().weight, prompt(24)
    states = torch.randn(1, 24, 64)
    state, done = draft.start(target), 0
    for p in (1, 5, 6, 11, 18):
        if p == 11:  # in pieces
            draft.extend_context(state, states[0, done:done + 2])
            done += 2
        step = draft.propose(state, states[0, done:p], int(ids[0, p]), 5)
        fresh = draft.propose(draft.start(target), states[0, :p], int(ids[0, p]), 5)
        anchors = torch.tensor([[p]])
        out = draft(dspine.gather_blocks(ids, anchors, 6), states, anchors, embed)
        scores = F.linear(out.hidden_states[0, 0, 1:], head)
        if draft.draft_vocab is not None:
            scores.scatter_add_(1, draft.draft_vocab.expand(5, -1), torch.full((5, 30), 1e3))
            scores -= 1e3
        scores, candidates = scores.topk(4)
        table = draft.transition_cache(out.pre_injection[0, 0, 1:], candidates, ids[0, p], head)
        if draft.config.select == "argmax":
            table = scores[:, None].expand(-1, 4, -1)
        tokens, _, probs = dspine.select_path(table, candidates)
        for other in (fresh, Proposal(tokens, candidates, probs)):
            for a, b in zip(step, other):
                close(a, b, 1e-6)
        short = draft.propose(draft.start(target), states[0, :p], int(ids[0, p]), 2)
        assert torch.equal(short.tokens, step.tokens[:2])  # a shorter block is a prefix
        done = p
        assert state.length == p and state.keys_values[0][0].shape[2] == p


@pytest.mark.parametrize("overrides", [
    {}, dict(attention="bidirectional", select="argmax"), dict(inject="none"),
    dict(inject="last")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_watching_shows_the_training_forward_and_changes_nothing(overrides, temperature):
    """DraftTrace against DSpine.forward of one prefix; the proposal bit for bit without it."""
    target = tiny()
    draft, embed = random_draft(target, **overrides), target.get_input_embeddings().weight
    head, ids, states = target.get_output_embeddings().weight, prompt(24), torch.randn(1, 24, 64)
    seen, p, T = [], 9, 4
    step = lambda: draft.propose(draft.start(target), states[0, :p], int(ids[0, p]), T,
                                 temperature=temperature,
                                 generator=torch.Generator().manual_seed(3))
    plain, draft.watch = step(), seen.append
    watched = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    (trace,) = seen
    anchors = torch.tensor([[p]])
    out = draft(dspine.gather_blocks(ids, anchors, 6), states, anchors, embed)
    assert trace.layer_features.shape == (2, 1, T, 16) and trace.cache.shape == (1, T, 4, 4)
    close(trace.layer_features, out.layer_features[:, :, 0, 1:T + 1])
    scores, candidates = F.linear(out.hidden_states[0, 0, 1:T + 1], head).topk(4)
    table = draft.transition_cache(out.pre_injection[0, 0, 1:T + 1], candidates, ids[0, p], head)
    table = scores[:, None].expand(-1, 4, -1) if "select" in overrides else table
    close(trace.cache[0], table)
    assert trace.anchor_ids.tolist() == [int(ids[0, p])]
    assert torch.equal(trace.candidate_ids[0], candidates)
    chosen = trace.candidate_ids.gather(-1, trace.rows[..., None])[0, :, 0]
    assert torch.equal(chosen, watched.tokens)


def test_features_are_computed_only_for_watchers_and_training(monkeypatch):
    target, calls = tiny(), []
    draft, original = random_draft(target, inject="none"), Injection.feature
    monkeypatch.setattr(Injection, "feature", lambda *args: calls.append(1) or original(*args))
    step = lambda: draft.propose(draft.start(target), torch.randn(4, 64), 5, 5)
    step()
    assert not calls
    draft.watch = lambda trace: None
    step()
    assert len(calls) == 2


# -------------------------------------------------------------------------------------------------
# Objective
# -------------------------------------------------------------------------------------------------


def plain_objective(draft, out, ids, anchors, supervised, teacher, head, beta):
    """sec. 6 token by token, nothing chunked or checkpointed."""
    c, total, weight = draft.config, torch.zeros(5), 0.0
    for n, a, t in supervised.nonzero().tolist():  # proposal t + 1
        p, w = int(anchors[n, a]), math.exp(-t / 7)
        label, previous = ids[n, p + t + 1], ids[n, p + t]
        P = (head @ teacher[n, p + t]).softmax(-1)
        log_q = (head @ out.hidden_states[n, a, t + 1]).log_softmax(-1)
        top = log_q.topk(c.top_k).indices
        refined = plain_refine(draft, out.pre_injection[n, a, t + 1], previous)
        log_q2, mass = (head[top] @ refined).log_softmax(-1), P[top].sum()
        l1 = (log_q2.exp() - P[top] / mass).abs().sum() if mass > 1e-4 else torch.tensor(0.0)
        cosines = [F.cosine_similarity(f[n, a, t + 1], draft.transfer_codes[label], dim=0)
                   for f in out.layer_features]
        total = total + w * torch.stack((
            -log_q[label], (log_q.exp() - P).abs().sum(), -log_q2[top == label].sum(), l1,
            sum(1 - x for x in cosines)))
        weight += w
    ce, l1, ce2, l12, align = total / weight
    return 0.1 * ce + 0.9 * l1 + 0.1 * ce2 + 0.9 * l12 + beta * ce.detach() * align


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_objective_and_gradients_equal_a_plain_loop(chunk):
    draft, given, _ = golden("b")
    draft.requires_grad_(True)
    teacher, head = given["teacher_last_hidden"] * 4, given["lm_head"]  # some masses are tiny
    supervised = torch.rand(*given["anchors"].shape, 7) < 0.7
    losses, gradients = [], []
    for f in (dspine.objective, plain_objective):
        _, out = golden_forward(draft, given)
        loss = f(draft, out, given["input_ids"], given["anchors"], supervised, teacher, head,
                 **dict(beta=0.5, chunk=chunk) if f is dspine.objective else dict(beta=0.5))
        losses.append(loss[0] if f is dspine.objective else loss)
        gradients.append(torch.autograd.grad(losses[-1], list(draft.parameters())))
    close(*losses, 1e-5)
    for (name, _), a, b in zip(draft.named_parameters(), *gradients):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=lambda m: f"{name}: {m}")


def test_nothing_supervised_gives_a_zero_loss_with_a_gradient():
    """T04."""
    draft, given, _ = golden("a")
    draft.requires_grad_(True)
    blocks, out = golden_forward(draft, given)
    loss, terms = dspine.objective(
        draft, out, given["input_ids"], given["anchors"], torch.zeros_like(blocks[..., 1:]).bool(),
        given["teacher_last_hidden"], given["lm_head"], beta=0.5)
    loss.backward()
    assert loss == 0 and terms["weight"] == 0 and not draft.fc.weight.grad.any()


def test_anchors_start_where_the_first_proposal_is_supervised():
    g = torch.Generator().manual_seed(0)
    loss_mask = torch.rand(5, 40, generator=g) < torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])[:, None]
    for count in (1, 8, 100):
        anchors, valid = dspine.sample_anchors(loss_mask, count, g)
        slots = dspine.supervised_slots(loss_mask, anchors, valid, 6)
        for n in range(5):
            legal = [p for p in range(39) if loss_mask[n, p + 1]]
            chosen = anchors[n][valid[n]].tolist()
            assert set(chosen) <= set(legal) and len(set(chosen)) == min(count, len(legal))
            for p, ok, slot in zip(anchors[n].tolist(), valid[n], slots[n].tolist()):
                run = [ok and p + t < 40 and bool(loss_mask[n, p + t]) for t in range(1, 6)]
                assert slot == [all(run[:t + 1]) for t in range(5)]
    draws = {tuple(dspine.sample_anchors(loss_mask, 3, g)[0][4].tolist()) for _ in range(20)}
    assert len(draws) > 10


def test_schedules():
    c = config_for(tiny())
    assert [dspine.alignment_beta(s, c) for s in (0, 73, 146, 999)] == [0, 0.25, 0.5, 0.5]
    for progress, rho in ((0, 0.5), (1 / 6, 0.5), (0.25, 0.25), (1 / 3, 0), (1, 0)):
        assert dspine.replacement_rate(progress, c) == pytest.approx(rho, abs=1e-9)


# -------------------------------------------------------------------------------------------------
# Greedy decoding
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", range(2, 17))
def test_greedy_equals_plain_for_every_accept_count(block_size, dtype):
    """C20, C21 (block 2, always wrong), C12: the accept lengths are those that were scripted."""
    target = tiny("Qwen3", dtype)
    for accepted in range(block_size):
        draft = scripted(target, [accepted], block_size=block_size)
        tokens, stats = collect(generate(target, draft, prompt(), max_new_tokens=20))
        assert tokens == truth(target)[:20]
        full, rest = divmod(19, accepted + 1)
        assert stats.accept_lengths == [accepted + 1] * full + [rest] * (rest > 0)
        assert stats.target_forwards == draft.rounds + (rest == 1 or accepted == 0)


@pytest.mark.parametrize("copy", [False, True])
def test_adaptive_blocks_follow_what_was_kept(copy):
    """"auto": short at first, twice the running mean, lossless wherever the proposals go wrong."""
    target = tiny("Qwen3")
    for pattern in ([0], [15], [15] * 8 + [0, 1] * 8, [3, 0, 5, 1, 9]):
        draft = scripted(target, pattern, block_size=16)
        steps = list(generate(target, draft, prompt(), max_new_tokens=60, block_size="auto",
                              copy=copy))
        assert [t for step in steps for t in step.tokens] == truth(target)[:60]
        if copy:
            continue
        kept = 0.0
        for step in steps[1:-1]:
            left = 2 + round(2 * kept)
            assert step.proposed <= left and (step.proposed == left or left > 15
                                              or step is steps[-2])
            kept += 0.2 * (step.accepted - kept)
        proposed = [step.proposed for step in steps[1:-2]]
        assert set(proposed) == {2} if pattern == [0] else max(proposed) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_its_cache_after_every_round(family, runners):
    """C02, C03 (window 8), C12: cache length, and the logits of a re-score without a cache."""
    target = tiny(family)
    draft = scripted(target, [5, 5, 5, 0, 5, 5, 0, 1, 5, 3, 2, 4])
    steps, text = generate(target, draft, prompt(), max_new_tokens=45), prompt()[0].tolist()
    for i, step in enumerate(steps):
        text += step.tokens
        kept = runners[0].cache
        assert kept.get_seq_length() == len(text) - 1
        windows = [x for x, sliding in zip(kept.layers, kept.is_sliding) if sliding]
        assert all(x.keys.shape[2] <= 8 for x in windows)  # trimmed after full acceptance too
    assert text[20:] == truth(target)[:45]
    assert len(set(text[20:])) > 5
    whole = target(torch.tensor([text]), use_cache=False).logits[0]
    end = len(text)
    for start, count, logits in reversed(runners[0].calls):  # rows of text that was kept
        first = start + count - len(logits)
        close(logits[:end - 1 - first], whole[first:end - 1], 2e-4)
        end = start + 1
    tokens, _ = collect(generate_plain(target, prompt(), max_new_tokens=45))
    assert tokens == text[20:]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_of_one_token(family):
    """R09."""
    target = tiny(family)
    draft = scripted(target, [5, 0, 2], length=1)
    tokens, _ = collect(generate(target, draft, prompt(1), max_new_tokens=25))
    assert tokens == truth(target, 1)[:25]


@pytest.mark.parametrize("family", REFUSED)
def test_targets_that_can_not_roll_back_are_refused(family):
    """C01: no token comes out."""
    target = tiny(family)
    draft = Scripted(target, prompt(), [0] * 60, [5])
    with pytest.raises(ValueError, match=f"{family}ForCausalLM"):
        next(generate(target, draft, prompt(), max_new_tokens=8))
    plain = lambda: collect(generate_plain(target, prompt(), max_new_tokens=8))[0]
    if family == "RecurrentGemma":  # returns no cache at all: not even plain decoding is right
        with pytest.raises(ValueError, match="returns no cache"):
            plain()
    else:
        assert plain() == reference(target, prompt(), 8)


@pytest.mark.parametrize("overrides", [
    {}, dict(top_k=1), dict(block_size=2), dict(inject="none"), dict(inject="last"),
    dict(attention="bidirectional", inject="none", select="argmax"), dict(draft_vocab=20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_draft_is_lossless(overrides, dtype):
    """C21 (K = 1, block 2), the ablations, and a draft of another dtype than the target's."""
    target = tiny()
    draft = random_draft(target, **overrides).to(dtype)
    assert collect(generate(target, draft, prompt(), max_new_tokens=30))[0] == truth(target)[:30]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("pattern", [[5], [0], [2]])
def test_budget(count, pattern):
    """C07, C08: never more, never fewer; the last proposal leaves room for the target's token."""
    target, B = tiny(), 6
    draft = scripted(target, pattern, block_size=B)
    steps = list(generate(target, draft, prompt(), max_new_tokens=count))
    assert sum((s.tokens for s in steps), []) == truth(target)[:count]
    left = count - 1
    for step in steps[1:]:
        assert step.proposed == min(B - 1, left - 1)
        left -= len(step.tokens)
    tokens, stats = collect(generate(target, draft, prompt(), max_new_tokens=count))
    assert stats.new_tokens == count == len(tokens) and stats.finish_reason == "length"


@pytest.mark.parametrize("place", range(10))
def test_ends_at_the_first_end_token(place):
    """C04, C05, C06: at every slot of a block, on the bonus token and on prefill's; P01."""
    target = tiny(seed=3)
    text = truth(target)
    eos = text[place]
    first = text.index(eos) + 1
    draft = scripted(target, [3, 5])
    for budget in (40, first):
        draft.rounds = 0
        steps = generate(target, draft, prompt(), max_new_tokens=budget, eos_token_ids=(eos,))
        tokens, stats = collect(steps)
        assert tokens == text[:first] and stats.finish_reason == "eos"
        assert stats.new_tokens == first == 1 + sum(stats.accept_lengths)
        assert draft.rounds == stats.target_forwards - (budget == first in (2, 6, 12))
        plain, _ = collect(generate_plain(target, prompt(), max_new_tokens=budget,
                                          eos_token_ids=(eos,)))
        assert plain == tokens


def test_end_token_places_are_all_reached():
    """The first ten tokens above are distinct, so that each place really ends at its own slot."""
    assert len(set(truth(tiny(seed=3))[:10])) == 10


def test_end_token_forms():
    """C10: whichever of several comes first, as int, list, set or tensor. C11: None."""
    target = tiny()
    text = truth(target)
    a, b = text[9], text[4]
    run = lambda ids: collect(generate(target, scripted(target, [5]), prompt(), max_new_tokens=20,
                                       eos_token_ids=ids))[0]
    for ids in ([a, b], (b, a), {a, b}, torch.tensor([a, b]), torch.tensor([[b]]), b):
        assert run(ids) == text[:text.index(b) + 1]
    assert run(None) == run(()) == run([]) == text[:20]


def test_mask_token_in_the_text_survives():
    """C09: (a) as an output token; (b) as a stop id it stops where plain decoding does."""
    target = tiny()
    text = truth(target)
    draft = random_draft(target, mask_token_id=text[3])
    run = lambda **k: collect(generate(target, draft, prompt(), max_new_tokens=20, **k))[0]
    assert run() == text[:20]
    assert run(eos_token_ids=text[3]) == text[:text.index(text[3]) + 1]


def test_statistics():
    """P01: [d1, d2, EOS, d4, d5, bonus] counts 3; a later match behind a miss counts nothing."""
    target = tiny(seed=3)
    text = truth(target)
    _, stats = collect(generate(target, scripted(target, [5]), prompt(), max_new_tokens=20,
                                eos_token_ids=text[3]))
    assert stats.accept_lengths == [3] and stats.emitted_by == {"draft": 3, "copy": 0, "target": 1}
    logits = F.one_hot(torch.tensor([4, 5, 6, 7, 8]), 10).float()
    assert dspine.verify_greedy(logits, torch.tensor([4, 0, 6, 7])) == (1, 5)
    _, stats = collect(generate(target, scripted(target, [5, 0, 2]), prompt(), max_new_tokens=25))
    assert stats.accept_lengths == [6, 1, 3, 6, 1, 3, 4] and stats.histogram == {
        6: 2, 1: 2, 3: 2, 4: 1}
    assert stats.new_tokens == 1 + sum(stats.accept_lengths) == sum(stats.emitted_by.values())
    assert stats.acceptance_length == 24 / 7 and stats.target_forwards == 7
    assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds) > 0
    plain = collect(generate_plain(target, prompt(), max_new_tokens=9))[1]
    assert plain.accept_lengths == [1] * 8 and plain.emitted_by["target"] == 9


@pytest.mark.parametrize("change, message", [
    (dict(input_ids=torch.zeros(2, 5).long()), "batch size 1"),             # C16
    (dict(input_ids=torch.zeros(1, 0).long()), "empty"),                    # R08
    (dict(input_ids=torch.tensor([[VOCAB]])), "0 .. 96"),
    (dict(input_ids=torch.tensor([[-1, 3]])), "0 .. 96"),
    (dict(max_new_tokens=-1), "max_new_tokens = -1"),
    (dict(max_new_tokens=493), "512 positions"),
    (dict(temperature=-0.5), "temperature = -0.5"),
    (dict(temperature=math.nan), "temperature = nan"),
    (dict(temperature=math.inf), "temperature = inf"),
    (dict(top_k=-1), "top_k = -1"),
    (dict(top_p=0.0), "top_p = 0.0"),
    (dict(top_p=1.1), "top_p = 1.1"),
    (dict(block_size=1), "block_size = 1"),
    (dict(block_size=7), "block_size = 7")])
def test_bad_requests_are_refused(change, message):
    target = tiny()
    request = dict(input_ids=prompt(), max_new_tokens=4) | change
    with pytest.raises(ValueError, match=message):
        generate(target, scripted(target, [5]), request.pop("input_ids"), **request)


def test_longrope_is_refused_where_it_changes_its_frequencies():
    """A block across the switch would rotate earlier tokens otherwise than single tokens do."""
    target = copy.deepcopy(tiny())
    target.config.rope_parameters = {"rope_type": "longrope",
                                     "original_max_position_embeddings": 40}
    with pytest.raises(ValueError, match="longrope changes its frequencies at position 40"):
        generate_plain(target, prompt(), max_new_tokens=30)
    generate_plain(target, prompt(), max_new_tokens=20)
    generate_plain(target, prompt(41), max_new_tokens=30)


def test_smaller_block_size_is_lossless():
    """P04."""
    target = tiny()
    for size in range(2, 7):
        steps = list(generate(target, scripted(target, [5]), prompt(), max_new_tokens=20,
                              block_size=size))
        assert sum((s.tokens for s in steps), []) == truth(target)[:20]
        assert max(s.proposed for s in steps) == size - 1


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_taps_are_the_outputs_of_the_layers(family):
    """S03, S04: hooks on the decoder layers; the last one is reported after the final norm."""
    target = tiny(family)
    layers = target.transformer.h if family == "GPT2" else target.model.layers
    seen, ids = {}, prompt()
    hooks = [layer.register_forward_hook(
        lambda m, i, out, l=l: seen.update({l: out[0] if isinstance(out, tuple) else out}))
        for l, layer in enumerate(layers)]
    with torch.no_grad():
        _, taps = dspine.TargetRunner(target, [2, 0, 1, 3])(ids, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    got = taps.view(20, 4, 32)
    for i, layer in enumerate((2, 0, 1, 3)):
        assert torch.equal(got[:, i], seen[layer].view(20, 32)) == (layer != 3)
    with pytest.raises(ValueError, match="target_layer_ids"):
        config_for(target, target_layer_ids=[1, 3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_draft_and_target_on_different_devices():
    """R13."""
    target = copy.deepcopy(tiny(dtype=torch.float64)).cuda()
    for device in ("cpu", "cuda"):
        draft = random_draft(tiny()).to(device)
        tokens, _ = collect(generate(target, draft, prompt(), max_new_tokens=30))
        assert tokens == truth(tiny(dtype=torch.float64))[:30]
        steps = generate(target, draft, prompt(), max_new_tokens=30, temperature=1.0)
        assert len(collect(steps)[0]) == 30


# -------------------------------------------------------------------------------------------------
# Sampling
# -------------------------------------------------------------------------------------------------

FILTERS = [dict(temperature=1.0), dict(temperature=0.5, top_k=2, top_p=0.9),
           dict(temperature=0.7, top_k=4, top_p=0.85), dict(temperature=1.5, top_k=3),
           dict(temperature=1.0, top_p=0.6)]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [5, 300])
def test_filter_equals_transformers(filters, vocab):
    """C24: the same set and the same numbers as plain sampling in transformers."""
    logits = torch.randn(64, vocab) * 3
    chain = [transformers.TemperatureLogitsWarper(filters["temperature"])]
    if "top_k" in filters:
        chain.append(transformers.TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        chain.append(transformers.TopPLogitsWarper(filters["top_p"]))
    expected = logits
    for warper in chain:
        expected = warper(None, expected)
    got = dspine.sampling_distribution(logits, **filters)
    close(got, expected.softmax(-1), 1e-6)
    assert torch.equal(got > 0, expected.isfinite())
    if "top_k" in filters:
        assert (got > 0).sum(-1).max() <= filters["top_k"]
    greedy = dspine.sampling_distribution(logits, 0.0, filters.get("top_k", 0))
    assert torch.equal(greedy, F.one_hot(logits.argmax(-1), vocab).float())


def test_inverse_cdf_never_returns_a_zero():
    """Weights of any sum, zeros at the start, the end and between; uniform up to its very ends."""
    torch.manual_seed(0)
    uniform = torch.cat((torch.linspace(0, 1, 999)[:-1], torch.tensor([1 - 2 ** -24, 2 ** -24])))
    for _ in range(200):
        probs = torch.rand(7) * torch.rand(1) * (torch.rand(7) < 0.5)
        probs[torch.randint(7, (1,))] = 0.1
        index = dspine.inverse_cdf(probs.expand(len(uniform), 7), uniform)
        assert (probs[index] > 0).all()
        share = F.one_hot(index[:998], 7).float().mean(0)
        close(share, probs / probs.sum(), 3e-3)


@pytest.mark.parametrize("filters", FILTERS)
def test_path_frequencies_equal_the_returned_probs(filters):
    """C23: q is the distribution that the proposals are drawn from, row by row."""
    g, draws, T, K = torch.Generator().manual_seed(0), 40000, 3, 4
    table = torch.randn(T, K, K, generator=g) * 2
    table[0] = table[0, :1]
    candidates = torch.arange(T * K).view(T, K)
    tokens, rows, probs = dspine.select_path(
        table.expand(draws, T, K, K), candidates.expand(draws, T, K), generator=g, **filters)
    assert torch.equal(tokens, rows + torch.arange(T) * K)
    assert (probs.gather(-1, rows[..., None]) > 0).all()
    for t in range(T):
        for a in range(K):
            chosen = rows[:, t - 1] == a if t else torch.ones(draws).bool()
            if not chosen.any():
                continue
            expected = dspine.sampling_distribution(table[t, a], **filters)
            close(probs[chosen, t], expected.expand(int(chosen.sum()), K), 1e-6)
            share = F.one_hot(rows[chosen, t], K).float().mean(0)
            bound = 3 * (K / int(chosen.sum())) ** 0.5
            assert (share - expected).abs().sum() / 2 < bound


def sobol(draws: int, columns: int):
    return torch.quasirandom.SobolEngine(columns, scramble=True, seed=0).draw(draws).clamp_max(
        1 - 2 ** -24)


def pair_frequencies(p_first, p_second, proposals, filters, u):
    """Frequencies [V, V] of two tokens, decoded by verify_sampled in rounds; the exact ones.

    p: target logits [V], [V, V] (by first token); proposals of two tokens, a row a draw.
    Quasi-random numbers u [draws, 4] instead of random ones make few draws enough.
    """
    V, draws = len(p_first), len(u)
    first, second = (dspine.sampling_distribution(p, **filters) for p in (p_first, p_second))
    counts = torch.zeros(V, V)
    for i, proposal in enumerate(zip(*proposals)):
        x1, x2 = proposal[0].tolist()
        target = torch.stack((first, second[x1], second[x2]))
        accepted, token = dspine.verify_sampled(target, Proposal(*proposal), u[i, :3])
        if accepted == 0:  # the second token comes from another round, by plain sampling
            pair = token, int(dspine.inverse_cdf(second[token], u[i, 3]))
        else:
            pair = x1, x2 if accepted == 2 else token
        counts[pair] += 1
    return counts / draws, first[:, None] * second


@pytest.mark.parametrize("quality", ["good", "bad", "one-hot"])
@pytest.mark.parametrize("filters", [FILTERS[0], FILTERS[2], FILTERS[1]])
def test_sampled_pairs_have_the_targets_distribution(filters, quality):
    """C23, C24: total variation to p(x1) p(x2 | x1) on five tokens; outside top-k: never."""
    g = torch.Generator().manual_seed(1)
    p_first, p_second = torch.randn(5, generator=g) * 1.5, torch.randn(5, 5, generator=g) * 1.5
    noise = {"good": 0.3, "bad": 4.0, "one-hot": 1.0}[quality]
    K = 1 if quality == "one-hot" else 3
    def draft(p):
        scores, candidates = (p + torch.randn(p.shape, generator=g) * noise).topk(K)
        return dspine.sampling_distribution(scores, **filters), candidates
    (q1, ids1), (q2, ids2), u = draft(p_first), draft(p_second), sobol(8192, 6)
    x1 = ids1[dspine.inverse_cdf(q1.expand(8192, K), u[:, 0])]
    q2, ids2 = q2[x1], ids2[x1]                                             # [draws, K]
    x2 = ids2.gather(1, dspine.inverse_cdf(q2, u[:, 1])[:, None])[:, 0]
    proposals = Proposal(*(torch.stack(pair, dim=1) for pair in (
        (x1, x2), (ids1.expand(8192, K), ids2), (q1.expand(8192, K), q2))))
    got, exact = pair_frequencies(p_first, p_second, proposals, filters, u[:, 2:])
    assert (got - exact).abs().sum() / 2 < 0.01
    assert not got[exact == 0].any()


def test_verification_by_hand():
    """Accept while u q < p; refusal samples max(p - q, 0); a full block samples the last p."""
    p = torch.tensor([[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 1.0, 0]])
    proposal = Proposal(torch.tensor([0, 3]), torch.tensor([[0, 2], [3, 1]]),
                        torch.tensor([[0.75, 0.25], [0.8, 0.2]]))
    run = lambda *u: dspine.verify_sampled(p, proposal, torch.tensor(u))
    assert run(0.66, 0.49, 0.5) == (2, 2)
    assert run(0.67, 0.0, 0.0) == run(0.67, 0.0, 0.99) == (0, 1)
    assert run(0.66, 0.51, 0.24) == (1, 0) and run(0.66, 0.51, 0.26) == (1, 2)
    assert dspine.verify_sampled(p[:1], Proposal(*(x[:0] for x in proposal)),
                                 torch.tensor([0.6])) == (0, 1)
    same = Proposal(torch.tensor([1]), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
    for u in (0.0, 0.5, 1 - 2 ** -24):
        assert dspine.verify_sampled(p[:2], same, torch.tensor([u, 0.0]))[0] == 1


@pytest.mark.parametrize("filters, draft_vocab", [
    (dict(temperature=1.0), 0), (dict(temperature=0.7, top_k=3), 0), (dict(temperature=1.0), 3)])
def test_sampling_end_to_end(filters, draft_vocab):
    """C23, C24 through the loop: chi-square of three tokens (prefill, proposed, bonus)."""
    sizes = dict(vocab_size=5, num_hidden_layers=2, initializer_range=0.2)
    target, ids, draws = tiny(**sizes), prompt(4, vocab=5), 1000
    draft = random_draft(target, target_layer_ids=[0], num_hidden_layers=1, block_size=3,
                         mask_token_id=4, transfer_rank=3, top_k=3, draft_vocab=draft_vocab)
    g = torch.Generator().manual_seed(0)
    counts, accepted = torch.zeros(5, 5, 5), set()
    for _ in range(draws):
        tokens, stats = collect(generate(target, draft, ids, max_new_tokens=3, generator=g,
                                         **filters))
        counts[tuple(tokens)] += 1
        accepted.add(tuple(stats.accept_lengths))
    assert accepted == {(2,), (1, 1)}
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    rows = target(torch.cat((ids.expand(125, -1), texts), dim=1), use_cache=False).logits[:, 3:6]
    p = dspine.sampling_distribution(rows, **filters)                       # [125, 3, V]
    exact = p.gather(-1, texts[..., None]).prod(1).view(5, 5, 5)
    assert not counts[exact == 0].any()
    expected = exact[exact > 0] * draws
    square = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    cells = len(expected) - 1
    assert square < cells + 4 * math.sqrt(2 * cells)


def test_sampling_with_adaptive_blocks():
    """Rounds of 2, 3, .. proposals, as long as the rounds before allow: tokens 6 to 8 of 8."""
    target, ids, draws = tiny(vocab_size=3, num_hidden_layers=2, initializer_range=0.2), prompt(
        4, vocab=3), 700
    draft = random_draft(target, target_layer_ids=[0], num_hidden_layers=1, block_size=6,
                         mask_token_id=2, transfer_rank=2, top_k=2)
    g, counts, proposed = torch.Generator().manual_seed(0), torch.zeros(3, 3, 3), set()
    for _ in range(draws):
        steps = list(generate(target, draft, ids, max_new_tokens=8, generator=g, temperature=1.0,
                              block_size="auto"))
        tokens = [token for step in steps for token in step.tokens]
        counts[tuple(tokens[5:])] += 1
        proposed |= {step.proposed for step in steps[1:]}
    assert {2, 3} <= proposed
    texts = torch.cartesian_prod(*[torch.arange(3)] * 8)
    rows = target(torch.cat((ids.expand(len(texts), -1), texts), dim=1),
                  use_cache=False).logits[:, 3:11].softmax(-1)              # [3^8, 8, V]
    exact = rows.gather(-1, texts[..., None]).prod(1).view(-1, 3, 3, 3).sum(0) * draws
    square = ((counts - exact) ** 2 / exact).sum()
    assert square < 26 + 4 * math.sqrt(2 * 26)


def test_seeds():
    """C25: temperature has an effect; a seed decides the whole output."""
    target = tiny()
    draft = random_draft(target)
    run = lambda seed, count, **k: tuple(collect(generate(
        target, draft, prompt(), max_new_tokens=count, temperature=1.0,
        generator=torch.Generator().manual_seed(seed), **k))[0])
    seen = [run(seed, 3) for seed in range(300)]
    assert all(len({tokens[i] for tokens in seen}) >= 3 for i in range(3))
    assert run(7, 30) == run(7, 30) != run(8, 30)
    assert run(7, 30, top_k=1) == tuple(truth(target)[:30])


def test_non_finite_scores_are_an_error():
    """S09: a float16 draft whose residual overflows."""
    target = tiny()
    draft = random_draft(target)
    draft.fc.weight.mul_(1e3)
    draft.layers[0].mlp.down_proj.weight.mul_(1e6)
    draft = draft.half()
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="not finite"):
            collect(generate(target, draft, prompt(), max_new_tokens=8, temperature=temperature))


# -------------------------------------------------------------------------------------------------
# Overfit
# -------------------------------------------------------------------------------------------------


def train(target, ids, steps, **sizes):
    """A draft trained with the objective on one text; the optimizer holds the draft alone."""
    torch.manual_seed(0)
    draft = DSpine.for_target(config_for(target, **sizes), target)
    c, embed, head = (draft.config, target.get_input_embeddings().weight,
                      target.get_output_embeddings().weight)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    taps, teacher = torch.cat([states[l + 1] for l in c.target_layer_ids], dim=-1), states[-1]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / steps)
        anchors, valid = dspine.sample_anchors(torch.ones_like(ids), 40)
        blocks = dspine.gather_blocks(ids, anchors, c.block_size)
        replace = torch.rand(anchors.shape) < dspine.replacement_rate(step / steps, c)
        out = draft(blocks, taps, anchors, embed, replace)
        supervised = dspine.supervised_slots(torch.ones_like(ids), anchors, valid, c.block_size)
        loss, _ = dspine.objective(draft, out, ids, anchors, supervised, teacher, head,
                                   beta=dspine.alignment_beta(step, c))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    return draft.requires_grad_(False)


@pytest.fixture(scope="module")
def overfit():
    target = tiny()
    text = truth(target, 4, 80)
    assert len(set(text)) > 30 and text[40:60] not in [text[i:i + 20] for i in range(40)]
    return target, text, train(target, torch.tensor([prompt(4)[0].tolist() + text]), 320,
                               block_size=8)


def acceptance(target, draft, **filters):
    tokens, stats = collect(generate(target, draft, prompt(4), max_new_tokens=70, **filters))
    return tokens, stats.acceptance_length


def test_overfit_draft_accepts_nearly_whole_blocks(overfit):
    """S01, T02: one text, trained a few seconds, then generated: about B tokens a forward."""
    target, text, draft = overfit
    tokens, length = acceptance(target, draft)
    assert tokens == text[:70] and length > 6.5


@pytest.mark.parametrize("shift", ["positions", "context"])
def test_shifted_positions_lower_acceptance(overfit, shift, monkeypatch):
    """S02: the block begins at the anchor's own position; the context ends right before it."""
    target, text, draft = overfit
    if shift == "positions":
        original = DSpine.context_keys_values
        monkeypatch.setattr(DSpine, "context_keys_values",
                            lambda self, x, start=0: original(self, x, start + 1))
    else:
        original = DSpine.extend_context
        monkeypatch.setattr(DSpine, "extend_context",
                            lambda self, state, x: original(self, state, x.roll(1, 0)))
    tokens, length = acceptance(target, draft)
    assert tokens == text[:70] and length < 3


def test_block_positions_start_at_the_context_length(overfit, monkeypatch):
    """S02: the anchor's absolute position is the number of positions before it."""
    target, text, draft = overfit
    seen, original = [], DSpine.forward_blocks
    monkeypatch.setattr(DSpine, "forward_blocks", lambda self, x, anchors, kv, *rest, **options: (
        seen.append((int(anchors), kv[0][0].shape[2])),
        original(self, x, anchors, kv, *rest, **options))[1])
    done = 4
    for step in generate(target, draft, prompt(4), max_new_tokens=30):
        done += len(step.tokens)
        assert not seen or seen[-1] == (done - len(step.tokens) - 1,) * 2
    assert len(seen) >= 4


# -------------------------------------------------------------------------------------------------
# Configuration and checkpoints
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [
    ("hidden_size", 0), ("block_size", 1), ("head_dim", 7), ("num_key_value_heads", 3),
    ("top_k", VOCAB + 1), ("transfer_rank", 33), ("mask_token_id", -1), ("mask_token_id", VOCAB),
    ("target_layer_ids", []), ("target_layer_ids", [1, 1]), ("target_layer_ids", [-1]),
    ("ce_weight", 1.5), ("inject", "sometimes"), ("attention", "full"), ("select", "beam"),
    ("rope_parameters", {"rope_theta": 1e4}), ("rope_parameters", {"rope_type": "default"}),
    ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4})])
def test_invalid_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"DSpineConfig.{name} = "):
        config_for(tiny(), **{name: value})


@pytest.mark.parametrize("layers", range(1, 7))
@pytest.mark.parametrize("taps", range(1, 6))
def test_tapped_layers_of_small_targets(layers, taps):
    """S05: distinct and below the last layer, or refused."""
    try:
        ids = dspine.tapped_layers(layers, taps)
    except ValueError as error:
        assert f"{layers} layers" in str(error) and layers < taps + 4
        return
    assert len(set(ids)) == taps and 0 <= min(ids) <= max(ids) < layers - 1


def test_tapped_layers_published():
    assert dspine.tapped_layers(36, 5) == [1, 9, 17, 25, 33]
    assert dspine.tapped_layers(8, 3) == [1, 3, 5] and dspine.tapped_layers(30, 1) == [15]


def test_mask_token_must_be_chosen():
    """R06, C09: no id, or one with a meaning of its own."""
    target = copy.deepcopy(tiny())
    target.config.eos_token_id, target.config.bos_token_id = [5, 6], 7
    target.config.pad_token_id = 8
    for mask in (None, 5, 6, 7, 8):
        with pytest.raises(ValueError, match=f"mask_token_id = {mask}.*never occurs in text"):
            config_for(target, mask_token_id=mask)
    assert config_for(target, mask_token_id=9).mask_token_id == 9


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_rope(style, kind, tmp_path):
    """S07: theta and scaling in both styles, checked by formula, kept by a save and load."""
    theta, factor, D, original = 1e6, 4.0, 8, 64
    extra = {"default": {}, "linear": {"factor": factor}, "yarn": {
        "factor": factor, "original_max_position_embeddings": original}}[kind]
    raw = json.loads((ROOT / "assets/golden_a/config.json").read_text(encoding="utf-8"))
    raw["max_position_embeddings"] = int(original * factor)
    del raw["rope_parameters"]
    if style == "v5":
        raw["rope_parameters"] = {"rope_type": kind, "rope_theta": theta, **extra}
    else:
        raw["rope_theta"] = theta
        raw["rope_scaling"] = None if kind == "default" else {"type": kind, **extra}
    draft = DSpine(DSpineConfig.from_dict(raw))
    frequencies = torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)])
    scale = 1.0
    if kind == "linear":
        frequencies = frequencies / factor
    if kind == "yarn":  # keep the fast ones, stretch the slow ones, a ramp between
        turn = lambda n: D * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(turn(32)), 0), min(math.ceil(turn(1)), D - 1)
        ramp = ((torch.arange(D // 2) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
        scale = 0.1 * math.log(factor) + 1
    close(draft.inv_freq, frequencies, 1e-6)
    assert draft.rope_scale == pytest.approx(scale)
    cos, sin = draft.rope(torch.tensor([[0, 3]]))
    close(cos[0, 0, 1], (3 * frequencies).cos().repeat(2) * scale, 1e-6)
    draft.transfer_ready.fill_(True)
    draft.save_pretrained(tmp_path)
    again = DSpine.from_pretrained(tmp_path)
    assert torch.equal(again.inv_freq, draft.inv_freq) and again.config == draft.config


@pytest.mark.parametrize("edit, message", [
    (lambda raw: raw["rope_parameters"].update(rope_type="magic"), "rope_parameters"),
    (lambda raw: raw.pop("rope_parameters"), "rope_theta"),
    (lambda raw: raw.pop("dspine_config"), "dspine_config"),
    (lambda raw: raw.pop("hidden_size"), "hidden_size"),
    (lambda raw: raw["dflash_config"].pop("mask_token_id"), "mask_token_id"),
    (lambda raw: raw.update(rope_parameters=None), "rope_theta"),
    (lambda raw: raw.update(dflash_config=None), "dflash_config"),
    (lambda raw: raw.update(config=[]), "no DSpine draft"),
    (lambda raw: raw.update(block_size=9), "one block_size"),
    (lambda raw: (raw.pop("block_size"), raw["dflash_config"].pop("block_size")), "block_size")])
def test_incomplete_config_files_are_refused(edit, message):
    raw = json.loads((ROOT / "assets/golden_a/config.json").read_text(encoding="utf-8"))
    edit(raw)
    with pytest.raises(ValueError, match=message):
        DSpineConfig.from_dict(raw)


def test_config_goes_round():
    raw = json.loads((ROOT / "assets/golden_a/config.json").read_text(encoding="utf-8"))
    config = DSpineConfig.from_dict(raw)
    written = config.to_dict()
    for name in ("architectures", "model_type", "dflash_config", "dspine_config", "layer_types",
                 "block_size", "num_target_layers", "rope_parameters", "vocab_size", "head_dim"):
        assert written[name] == raw[name]
    assert DSpineConfig.from_dict(written) == DSpineConfig.from_dict({"config": raw}) == config
    other = config_for(tiny(), inject="last", select="argmax", attention="bidirectional")
    assert DSpineConfig.from_dict(json.loads(json.dumps(other.to_dict()))) == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_bit_for_bit(dtype, tmp_path):
    """R01 (d, e), R03, T10: odd head size, tied target, draft tensors only."""
    target = tiny("Qwen3", dtype, hidden_size=40, num_attention_heads=4, head_dim=16,
                  tie_word_embeddings=True)
    draft = random_draft(target).to(dtype)
    draft.save_pretrained(tmp_path)
    again = DSpine.from_pretrained(tmp_path, target)
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(draft.state_dict()) == set(again.state_dict())
    assert not any("embed" in name or "lm_head" in name for name in saved)
    for name, value in draft.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    state = again.start(target)
    assert state.embed.data_ptr() == state.lm_head.data_ptr()  # the head is the embedding
    taps = torch.randn(20, 80)
    for a, b in zip(draft.propose(draft.start(target), taps, 3, 5),
                    again.propose(state, taps, 3, 5)):
        assert torch.equal(a, b)


def test_odd_sizes_train_and_generate():
    """R03, R01 (e): hidden 40, 4 heads of 16, 2 key/value heads, a tied head."""
    target = tiny("Qwen3", hidden_size=40, num_attention_heads=4, head_dim=16,
                  tie_word_embeddings=True)
    draft = train(target, prompt(40), 2)
    assert collect(generate(target, draft, prompt(), max_new_tokens=20))[0] == truth(target)[:20]


def test_slim_checkpoint_rebuilds_the_codes(tmp_path):
    target = tiny()
    draft = random_draft(target)
    draft.save_pretrained(tmp_path, slim=True)
    saved = load_file(tmp_path / "model.safetensors")
    assert "transfer_codes" not in saved and saved["transfer_directions"].shape == (32, 16)
    again = DSpine.from_pretrained(tmp_path, target)
    close(again.transfer_codes, draft.transfer_codes, 1e-6)
    assert again.transfer_ready
    again.save_pretrained(tmp_path / "twice", slim=True)
    twice = load_file(tmp_path / "twice" / "model.safetensors")
    assert all(torch.equal(saved[k], twice[k]) for k in saved)
    with pytest.raises(ValueError, match="slim"):
        DSpine.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="slim"):
        golden("a")[0].save_pretrained(tmp_path / "third", slim=True)


def test_draft_vocabulary_is_kept_slim_and_refused_by_the_published_layout(tmp_path):
    target = tiny()
    draft = random_draft(target, draft_vocab=40).bfloat16()
    with pytest.raises(ValueError, match="draft vocabulary"):
        draft.save_pretrained(tmp_path / "published")
    assert not (tmp_path / "published").exists()
    draft.save_pretrained(tmp_path, slim=True)
    again = DSpine.from_pretrained(tmp_path, target)
    assert again.draft_vocab.tolist() == sorted(draft.draft_vocab.tolist())
    tensors = load_file(tmp_path / "model.safetensors")
    for ids in ([1, 2, 3], [1, 2, 3, 3, 4], [0, 1, 2, VOCAB], [-1, 0, 1, 2]):
        save_file({**tensors, "draft_vocab": torch.tensor(ids)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="at least top_k = 4 distinct token ids"):
            DSpine.from_pretrained(tmp_path, target)


def test_codes_in_a_second_file_and_a_nested_config(tmp_path):
    """sec. 9: transfer.safetensors with tensor `codes`; the config under a key `config`."""
    source = ROOT / "assets" / "golden_a"
    tensors = load_file(source / "model.safetensors")
    save_file({"codes": tensors.pop("transfer_codes")}, tmp_path / "transfer.safetensors")
    del tensors["transfer_ready"]
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({"config": raw}), encoding="utf-8")
    draft, published = DSpine.from_pretrained(tmp_path), golden("a")[0]
    assert draft.config == published.config
    for name, value in published.state_dict().items():
        assert torch.equal(value, draft.state_dict()[name]), name


@pytest.mark.parametrize("edit, message", [
    (lambda t: t.pop("fc.weight"), "missing fc.weight"),                    # R01 (a)
    (lambda t: t.update({f"_orig_mod.{k}": t.pop(k) for k in list(t)}),     # R01 (b)
     "missing fc.weight.*and .* more"),
    (lambda t: t.update(extra=torch.ones(1)), "unexpected extra"),          # R01 (c)
    (lambda t: t.update({"norm.weight": torch.ones(33)}), r"norm.weight has shape \(33,\)"),
    (lambda t: t.update(transfer_ready=torch.tensor(False)), "transfer_ready")])
def test_wrong_tensors_are_named(edit, message, tmp_path):
    tensors = load_file(ROOT / "assets/golden_a/model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((ROOT / "assets/golden_a/config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        DSpine.from_pretrained(tmp_path)


def test_incomplete_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        DSpine.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((ROOT / "assets/golden_a/config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        DSpine.from_pretrained(tmp_path)


def test_a_cut_file_is_named(tmp_path):
    """A download that broke off."""
    random_draft(tiny()).save_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 40, len(data) - 100):
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            DSpine.from_pretrained(tmp_path)


@pytest.mark.parametrize("change, message", [
    (dict(hidden_size=40), "hidden_size is 32, the target's is 40"),
    (dict(vocab_size=98), "vocab_size is 97, the target's is 98"),
    (dict(num_hidden_layers=5), "num_target_layers is 4, the target's is 5")])
def test_drafts_of_another_target_are_refused(change, message, tmp_path):
    """R04: before the first token, at load and at generation."""
    draft, other = random_draft(tiny()), tiny(**change)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        DSpine.from_pretrained(tmp_path, other)
    with pytest.raises(ValueError, match=message):
        next(generate(other, draft, prompt(), max_new_tokens=4))
    with pytest.raises(ValueError, match=message):
        DSpine.for_target(draft.config, other)


def test_a_draft_without_codes_is_refused():
    with pytest.raises(ValueError, match="codes are not set"):
        next(generate(tiny(), DSpine(config_for(tiny())), prompt(), max_new_tokens=4))


@pytest.mark.parametrize("stage", ["write", "rename"])
def test_a_failing_write_leaves_nothing_and_harms_nothing(stage, tmp_path, monkeypatch):
    draft = random_draft(tiny())

    def partial(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    def fail(*_):
        raise OSError("disk full")

    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            draft.save_pretrained(folder)
        before = {p.name: p.read_bytes() for p in folder.glob("*")}
        with monkeypatch.context() as m, pytest.raises(OSError, match="disk full"):
            if stage == "write":
                m.setattr("safetensors.torch.save_file", partial)
            else:
                m.setattr(os, "replace", fail)
            random_draft(tiny(), seed=5).save_pretrained(folder)
        assert {p.name: p.read_bytes() for p in folder.glob("*")} == before


# -------------------------------------------------------------------------------------------------
# Inside transformers' generate
# -------------------------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT2"])
@pytest.mark.parametrize("eos", [None, [6], [6, 4]])
def test_custom_generate_equals_plain_generate(family, eos):
    """C04, C10: tokens and stream end at the first of several ids."""
    target, ids = tiny(family), prompt()
    settings = dict(do_sample=False, max_new_tokens=30, attention_mask=torch.ones_like(ids),
                    pad_token_id=0, eos_token_id=[truth(target)[i] for i in eos] if eos else None)
    decoder, streamer = scripted(target, [5, 2]).decoder(), Recorder()
    got = target.generate(ids, custom_generate=decoder, streamer=streamer, **settings)
    assert torch.equal(got, target.generate(ids, **settings))
    assert streamer.parts == got[0].tolist() and streamer.ended
    assert decoder.statistics.new_tokens == got.shape[1] - 20
    assert got.shape[1] == 50 or eos
    whole = target.generate(ids, custom_generate=decoder, return_dict_in_generate=True, **settings)
    assert torch.equal(whole.sequences, got)


def test_custom_generate_honours_stopping_criteria_and_config():
    target, ids, seen = tiny(), prompt(), []

    def stop(ids, scores, **_):
        seen.append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= 29])

    run = lambda **k: target.generate(ids, do_sample=False, pad_token_id=0, **k)
    criteria = transformers.StoppingCriteriaList([stop])
    decoder = scripted(target, [5]).decoder()
    got = run(max_new_tokens=30, stopping_criteria=criteria, custom_generate=decoder)
    assert got[0, 20:].tolist() == truth(target)[:9] and seen == list(range(21, 30))
    stats = decoder.statistics  # P01: the block was stopped behind its second token
    assert stats.new_tokens == 9 and stats.accept_lengths == [6, 2]
    assert stats.emitted_by == {"draft": 7, "copy": 0, "target": 2}
    end = next(i for i in range(9, 13) if truth(target)[i] not in truth(target)[:i])
    run(max_new_tokens=30, stopping_criteria=criteria, custom_generate=decoder,
        eos_token_id=truth(target)[end])
    assert decoder.statistics.finish_reason == "length"  # the end token lay behind the stop
    config = transformers.GenerationConfig(max_length=33, eos_token_id=truth(target)[11])
    with_config = target.generate(ids, generation_config=config,
                                  custom_generate=scripted(target, [4]).decoder(block_size=3))
    assert torch.equal(with_config, target.generate(ids, generation_config=config))


def test_custom_generate_samples_with_the_configs_filters():
    """C24: ids outside top-k never appear; top_k = 1 is greedy; a seed repeats."""
    target, ids = tiny(), prompt()
    decoder = random_draft(target).decoder()
    run = lambda **k: target.generate(ids, do_sample=True, max_new_tokens=20, pad_token_id=0,
                                      custom_generate=decoder, **k)[0]
    assert run(top_k=1).tolist()[20:] == truth(target)[:20]
    torch.manual_seed(3)
    first = run(top_k=3, temperature=2.0)
    torch.manual_seed(3)
    assert torch.equal(first, run(top_k=3, temperature=2.0))
    logits = target(first[None], use_cache=False).logits[0, 19:-1]
    ranks = (logits > logits.gather(-1, first[20:, None])).sum(-1)
    assert 0 < ranks.max() < 3


@pytest.mark.parametrize("settings, message", [
    (dict(num_beams=2), "num_beams=2"),
    (dict(repetition_penalty=1.3), "RepetitionPenalty"),                    # C15
    (dict(do_sample=True, min_p=0.1), "MinP"),
    (dict(no_repeat_ngram_size=2), "NoRepeatNGram"),
    (dict(bad_words_ids=[[3]]), "NoBadWords"),
    (dict(do_sample=True, num_return_sequences=2), "num_return_sequences=2|batch size"),
    (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
    (dict(inputs=torch.ones(2, 4).long()), "batch size"),                   # C16
    (dict(attention_mask=torch.tensor([[0] * 3 + [1] * 17])), "padding"),
    (dict(position_ids=torch.arange(3, 23)[None]), "position_ids"),
    (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha"),
    (dict(do_sample=True, logits_processor=[transformers.TopKLogitsWarper(1)]), "TopKLogits")])
def test_custom_generate_refuses_by_name(settings, message):
    target = tiny()
    request = dict(inputs=prompt(), do_sample=False, max_new_tokens=4, pad_token_id=0) | settings
    with pytest.raises(ValueError, match=message):
        target.generate(custom_generate=scripted(target, [5]).decoder(), **request)


# -------------------------------------------------------------------------------------------------
# Environment
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [["triton"], ["transformers", "safetensors", "numpy"]])
def test_import_needs_torch_alone(blocked):
    """E01: no driver, no triton, nothing but torch at import."""
    code = (f"import sys; sys.modules.update(dict.fromkeys({blocked}, None)); import dspine; "
            "assert 'transformers' not in sys.modules or sys.modules['transformers'] is None")
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", code], cwd=ROOT,
                   env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)


def test_no_deprecated_call_into_transformers(caplog):
    """E05: neither a warning nor a logged deprecation (the whole file runs under the first)."""
    target = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.utils.logging.enable_propagation()
        for temperature in (0.0, 1.0):
            collect(generate(target, random_draft(target), prompt(), max_new_tokens=12,
                             temperature=temperature))
        transformers.utils.logging.disable_propagation()
    assert not [r for r in caplog.records if "deprecat" in r.message.lower()]


def test_files_are_opened_as_utf8():
    """E06."""
    source = (ROOT / "dspine.py").read_text(encoding="utf-8")
    for call in ("open(", "read_text(", "write_text("):
        for line in source.splitlines():
            if call in line:
                assert "encoding=" in source[source.index(line):][:len(line) + 100], line


# -------------------------------------------------------------------------------------------------
# generate.py
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A tiny random Llama with a byte-level tokenizer, saved as a folder that --target accepts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", pad_token="<p>", unk_token="<u>",
        additional_special_tokens=["<spare>"])
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}")
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        max_position_embeddings=512, eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id, bos_token_id=None)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_draft(small, tmp_path_factory):
    """An untrained draft for `small`, with writes that do something."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    torch.manual_seed(4)
    config = dspine.DSpineConfig.for_target(
        target, 2, block_size=5, transfer_rank=12, message_size=8, top_k=4, mask_token_id=259)
    draft = dspine.DSpine.for_target(config, target)
    for write in draft.injection.writes:
        torch.nn.init.normal_(write.weight, std=0.3)
    folder = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(folder)
    return folder


def flags_for(small, draft) -> list[str]:
    """The command line that every run of generate.py here begins with."""
    return ["--prompt", "hi", "--target", str(small), "--draft", str(draft), "--dtype", "float32"]


def test_build_prompt(small):
    """One builder: template, system, raw, no template (R10), empty with and without BOS (R08)."""
    tokenizer = program.load_target(str(small), torch.float32, "cpu")[1]
    text = lambda *a, **k: tokenizer.decode(program.build_prompt(tokenizer, *a, **k)[0])
    assert text("hi") == "user:hi<e>a:" and text("hi", "sys") == "system:sys<e>user:hi<e>a:"
    assert text("hi", raw=True) == "hi"
    for empty in (dict(text=" "), dict(text="", raw=True)):
        with pytest.raises(ValueError, match="empty"):
            program.build_prompt(tokenizer, **empty)
    tokenizer.chat_template = None
    assert text("hi") == "hi"
    with pytest.raises(ValueError, match="chat template"):
        program.build_prompt(tokenizer, "hi", system="sys")
    tokenizer.bos_token = "<spare>"
    assert program.build_prompt(tokenizer, "", raw=True).tolist() == [[tokenizer.bos_token_id]]


def test_every_end_token_counts(small):
    """C10: ids of generation config, model config and tokenizer are joined; ints and lists."""
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    target.generation_config.eos_token_id, target.config.eos_token_id = [5, 6], 7
    assert program.eos_ids(target, tokenizer) == sorted({5, 6, 7, tokenizer.eos_token_id})
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    assert program.eos_ids(target, tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stream_never_splits_a_character(small, size):
    """R12: pieces join to the whole text, without U+FFFD; a cut tail comes once, at the end."""
    tokenizer = program.load_target(str(small), torch.float32, "cpu")[1]
    text = "añb 🎉漢字 x"
    ids = tokenizer(text).input_ids
    stream = program.TextStream(tokenizer)
    pieces = [stream.push(ids[i:i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + stream.end() == text and not any("\ufffd" in p for p in pieces)
    cut = program.TextStream(tokenizer)
    assert cut.push(tokenizer("🎉").input_ids[:-1]) == ""
    assert cut.end() == "\ufffd" and cut.end() == ""


@pytest.mark.parametrize("flags, message", [
    (["--prompt", " "], "the prompt is empty"),
    (["--draft", "nowhere"], "no such folder"),
    (["--target", "nowhere.gguf"], "no such file"),
    (["--target", "./nowhere"], "can not load the target"),
    (["--device", "cuda:7"], "no usable CUDA device"),
    (["--block-size", "6"], "block_size = 6: must lie in 2 .. 5"),
    (["--temperature", "-1"], "temperature = -1.0"),
    (["--top-p", "0"], "top_p = 0.0"),
    (["--max-new-tokens", "-1"], "must not be negative"),
    (["--max-new-tokens", "5000"], "512 positions"),
    (["--raw", "--system", "x"], "needs a chat template"),
    (["--trace", "--quiet"], "--quiet prints the answer alone"),
])
def test_bad_input_is_one_line(small, small_draft, capsys, flags, message):
    if "cuda" in flags[-1] and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert program.main(flags_for(small, small_draft) + flags) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_kernels_without_the_means_are_refused(small, small_draft, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda x: False)
    assert program.main(flags_for(small, small_draft) + ["--kernels", "on"]) == 1
    assert "kernels = 'on' needs kernels.py, Triton and the current CUDA" in capsys.readouterr().err


def test_draft_of_another_target_is_refused(small, tmp_path, capsys):
    """R04 at the command line: both values are named before anything is emitted."""
    shutil.copytree(GOLDEN / "golden_a", tmp_path / "d")
    assert program.main(flags_for(small, tmp_path / "d")) == 1
    out = capsys.readouterr()
    assert "vocab_size is 64, the target's is 264" in out.err and out.out == ""


@pytest.mark.parametrize("flags", [
    [], ["--no-copy"], ["--temperature", "0.8"], ["--block-size", "2"], ["--raw"]])
def test_command_line(small, small_draft, capsys, flags):
    base = flags_for(small, small_draft)
    assert program.main([*base, *flags, "--max-new-tokens", "24", "--compare"]) == 0
    out = capsys.readouterr()
    count = re.search(r"\[(\d+) tokens \(", out.err).group(1)
    assert 1 <= int(count) <= 24 and "acceptance length" in out.err
    assert ("equal in distribution" if "--temperature" in flags
            else f"equal to plain decoding ({count} tokens)") in out.out


def test_quiet_prints_the_answer_alone(small, small_draft, capsys):
    args = flags_for(small, small_draft)
    assert program.main([*args, "--quiet", "--max-new-tokens", "8"]) == 0
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    ids = program.build_prompt(tokenizer, "hi")
    plain, _ = dspine.collect(dspine.generate_plain(
        target, ids, max_new_tokens=8, eos_token_ids=program.eos_ids(target, tokenizer)))
    out = capsys.readouterr()
    assert out.out == tokenizer.decode(plain, skip_special_tokens=True) + "\n" and out.err == ""


def rounds_of(small, draft_folder, text="hi", **settings):
    """Records of a generation, its traces, tokens, and the draft and tokenizer."""
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    draft, seen, traces, records = program.load_draft(draft_folder, target), [], [], []
    stream = program.TextStream(tokenizer)

    def look(step):
        traces.append(seen.pop() if seen else None)
        records.append(program.round_record(step, traces[-1], draft, tokenizer, stream))
    draft.watch = seen.append
    ids = program.build_prompt(tokenizer, text)
    tokens, stats = collect(program.watched(
        generate(target, draft, ids, max_new_tokens=40, **settings), look))
    return records, traces, tokens, stats, draft, tokenizer


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_say_what_happened(small, small_draft, temperature):
    settings = dict(temperature=temperature, eos_token_ids=[])
    seeded = lambda: torch.Generator().manual_seed(5)
    records, traces, tokens, stats, draft, tokenizer = rounds_of(
        small, small_draft, copy=True, generator=seeded(), **settings)
    draft.watch, target = None, program.load_target(str(small), torch.float32, "cpu")[0]
    assert tokens == collect(generate(target, draft, program.build_prompt(tokenizer, "hi"),
                                      max_new_tokens=40, copy=True, generator=seeded(),
                                      **settings))[0]
    assert {"draft", "target"} <= {r["source"] for r in records}
    assert len(records) == 1 + stats.target_forwards
    codes = F.normalize(draft.transfer_codes, dim=-1)
    for record, trace in zip(records, traces):
        assert (trace is None) == (record["source"] != "draft") == ("positions" not in record)
        if trace is None:
            continue
        verdicts = [p["verdict"] for p in record["positions"]]
        kept, T = record["accepted"], record["proposed"]
        assert verdicts == (["kept"] * kept + ["refused"] + ["not judged"] * (T - kept - 1))[:T]
        for t, p in enumerate(record["positions"]):
            assert p["row"] == (record["positions"][t - 1]["chosen"] if t else 0)
            scores = trace.cache[0, t, p["row"]]
            assert p["scores"] == [round(x, 2) for x in scores.tolist()]
            assert temperature or p["chosen"] == int(scores.argmax())
            assert all(97 < sum(row) < 103 for row in p["percent"])
            for l, nearest in enumerate(p["layers"]):
                cosine = F.cosine_similarity(codes, trace.layer_features[l, 0, t][None])
                assert nearest[0] == (program.visible(tokenizer, int(cosine.argmax())),
                                      round(float(cosine.max()), 2))


def test_a_round_cut_by_the_end_says_so():
    letters = SimpleNamespace(decode=lambda ids, **_: "".join(chr(97 + i) for i in ids),
                              convert_ids_to_tokens=lambda i: chr(97 + i))
    draft = SimpleNamespace(transfer_codes=torch.eye(5))
    trace = dspine.DraftTrace(torch.tensor([0]), torch.ones(1, 1, 3, 5), torch.tensor(
        [[[1, 2], [3, 4], [0, 1]]]), torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, dtype=torch.long))
    step = dspine.Step([1], proposed=3, accepted=2, source="draft")
    record = program.round_record(step, trace, draft, letters, program.TextStream(letters))
    assert [p["verdict"] for p in record["positions"]] == ["kept", "past the end", "refused"]
    assert record["added"] is None and record["text"] == [("draft", "b")]


def test_visible_tokens(small):
    tokenizer = program.load_target(str(small), torch.float32, "cpu")[1]
    byte = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    spelled = lambda text: [program.visible(tokenizer, i) for i in byte(text)]
    assert spelled(" \n\tx\x1b<") == ["␣", "↵", "⇥", "x", "\\x1b", "<"]
    assert all(len(piece) == 1 and piece != "\ufffd" for piece in spelled("🙂"))
    assert program.visible(tokenizer, 263) == "<263>"  # a row of the head without a token
    assert program.fit("日本語", 5) == "日本…" and program.fit("ab", 3) == "ab "
    assert program.fit("日本語", 4) == "日… "
    spaced = SimpleNamespace(decode=lambda ids, **_: "the", convert_ids_to_tokens=lambda i: "▁the")
    assert program.visible(spaced, 5) == "␣the"


@pytest.mark.parametrize("flags", [["--trace"], ["--trace", "--no-copy"], ["--show-blocks"],
                                   ["--trace", "--temperature", "0.8"]])
def test_watching_in_plain_text(small, small_draft, capsys, flags):
    """Without a terminal: no escapes; without its marks the text is the answer."""
    base = [*flags_for(small, small_draft), "--max-new-tokens", "40"]
    rest = [f for f in flags if f not in ("--trace", "--show-blocks")]
    assert program.main([*base, *rest, "--quiet"]) == 0
    answer = capsys.readouterr().out
    assert program.main([*base, *flags]) == 0
    out, err = capsys.readouterr()
    assert "\033" not in out and out.startswith("written by: ‹draft› «copy» target\n")
    assert out[-len(answer):] == answer or re.sub("[‹›«»]", "", out).endswith(answer)
    if "--trace" in flags:
        forwards = int(re.search(r"(\d+) target forwards", err).group(1))
        assert len(re.findall(r"^round \d+: ", out, re.M)) == forwards
        proposed = sum(int(n) for n in re.findall(r"draft proposes (\d+)", out))
        assert proposed and proposed == len(re.findall(r"^ +\d+ .*%", out, re.M))
        assert ("copies" in out) == ("by copy" in err and " 0 by copy" not in err)


def test_colours_only_where_the_terminal_has_them(small, small_draft, capsys, monkeypatch):
    base = [*flags_for(small, small_draft), "--max-new-tokens", "12", "--trace"]
    for setting, coloured in (({"NO_COLOR": "", "TERM": "xterm"}, True),
                              ({"NO_COLOR": "1", "TERM": "xterm"}, False),
                              ({"NO_COLOR": "", "TERM": "dumb"}, False)):
        with monkeypatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, value)
            patch.setattr(sys.stdout, "isatty", lambda: True)
            assert program.main(base) == 0
        out = capsys.readouterr().out
        assert ("\033[32mdraft\033[0m" in out) == coloured == ("‹" not in out)


def test_ablations_are_named_in_a_trace():
    said = lambda **kind: program.ablations(config_for(tiny(), **kind))
    assert said() == [] and len(said(inject="none", select="argmax")) == 2
    assert "last" in said(inject="last")[0]


def test_compare_tells_rounding_from_a_fault(small):
    """C20: a difference is excused only in 16 bits and at a near-tie."""
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    ids = program.build_prompt(tokenizer, "hi")
    plain, _ = dspine.collect(dspine.generate_plain(target, ids, max_new_tokens=8))
    assert program.compare(target, ids, plain, plain)[0]
    wrong = [*plain[:4], (plain[4] + 1) % 264, *plain[5:]]
    fine, sentence = program.compare(target, ids, wrong, plain)
    assert not fine and "token 5" in sentence
    assert not program.compare(target, ids, plain[:-1], plain)[0]


@pytest.mark.parametrize("dtype, emitted, excused", [
    (torch.bfloat16, 1, True), (torch.bfloat16, 3, False), (torch.float32, 1, False)])
def test_compare_judges_the_token_that_was_emitted(dtype, emitted, excused):
    """C20: beside a near-tie (5.0, 4.9) a token 8 logits below the best is still a fault."""
    logits = torch.tensor([[[5.0, 4.9, 0.0, -3.0]]], dtype=dtype)

    class Fixed:
        device = "cpu"

        def __call__(self, **_):
            return SimpleNamespace(logits=logits)
    target, ids = Fixed(), torch.tensor([[0]])
    target.dtype = dtype
    assert program.compare(target, ids, [emitted, 2], [0, 2])[0] == excused
    assert not program.compare(target, ids, [0], [0, 2])[0]  # cut short is never rounding


@pytest.mark.parametrize("fault", ["interrupted", "checksum"])
def test_a_failed_download_leaves_nothing(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))

    def fetch(folder):
        (folder / "half.gguf").write_bytes(b"half")
        if fault == "interrupted":
            raise KeyboardInterrupt
        return folder / "half.gguf"
    monkeypatch.setattr(program, "fetch_default_gguf", fetch)
    with pytest.raises(KeyboardInterrupt if fault == "interrupted" else ValueError):
        program.load_target(None, torch.float32, "cpu")
    assert list((tmp_path / "cache").iterdir()) == []


def test_unwritable_home_is_survived(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("DSPINE_CACHE", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert program.cache_folder().parent == tmp_path and "not writable" in capsys.readouterr().err


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    blocks = [block.split("```")[0] for block in text.split("```sh\n")[1:]]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_readme_commands_exist():
    """Trap 1: the advertised path is the tested one."""
    commands = "\n".join(readme_commands())
    assert ('pip install -r requirements.txt && python generate.py '
            '--prompt "Explain why the sky is blue."') in commands
    assert "pip install -r requirements.txt && pytest -q" in commands
    parsed = 0
    for command in commands.splitlines():
        file, *words = shlex.split(command.split("&& ")[-1].removeprefix("python "), comments=True)
        if file.endswith(".py"):
            {"generate.py": program, "train_small.py": training}.get(
                file, file.startswith("bench/") and bench_module(Path(file).stem)).parse_args(words)
            parsed += 1
    assert parsed >= 10


def test_the_real_target_exactly_as_in_readme():
    """README's first command (its second half), then in float32 against plain decoding."""
    command = next(c for c in readme_commands() if "generate.py" in c).split("&& ")[1]
    words = [sys.executable, *shlex.split(command)[1:]]
    run = lambda *flags: subprocess.run([*words, *flags], cwd=ROOT, capture_output=True, text=True,
                                        encoding="utf-8", timeout=600)
    first = run()
    assert first.returncode == 0, first.stderr
    assert len(first.stdout) > 200 and "sky" in first.stdout
    assert "acceptance length" in first.stderr
    second = run("--compare", "--dtype", "float32", "--max-new-tokens", "64")
    assert second.returncode == 0, second.stderr
    assert "equal to plain decoding (64 tokens)" in second.stdout


# -------------------------------------------------------------------------------------------------
# Copying from the context
# -------------------------------------------------------------------------------------------------


def plain_search(tokens: list[int], length: int, sizes=(3, 2)) -> list[int]:
    """What CopyIndex.propose must return, by scanning the text."""
    for n in sizes:
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n:at] == tokens[-n:]:
                text = list(tokens)
                return [text.append(text[at + i]) or text[-1] for i in range(length)]
    return []


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 30])
def test_copy_index_equals_a_search(vocabulary):
    torch.manual_seed(vocabulary)
    tokens = torch.randint(vocabulary, (120,)).tolist()
    index = dspine.CopyIndex([])
    for i, token in enumerate(tokens):
        index.extend([token])
        assert index.propose(5) == plain_search(tokens[:i + 1], 5), i


@pytest.mark.parametrize("block_size", [2, 3, 5])
@pytest.mark.parametrize("with_draft", [True, False])
def test_copying_is_lossless(small, small_draft, with_draft, block_size):
    """Greedy equals plain at every budget, an end inside a copied run included; sources add up."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    draft = program.load_draft(small_draft, target) if with_draft else None
    ids = torch.tensor([[9, 8, 7, 6, 9, 8, 7, 6, 9, 8]])
    plain, _ = dspine.collect(dspine.generate_plain(target, ids, max_new_tokens=60))
    copied = 0
    for budget in (1, 2, 5, 60):
        tokens, stats = dspine.collect(dspine.generate(
            target, draft, ids, max_new_tokens=budget, block_size=block_size, copy=True))
        assert tokens == plain[:budget] and sum(stats.emitted_by.values()) == budget
        copied += stats.emitted_by["copy"]
    for end in sorted(set(plain))[:12]:
        tokens, stats = dspine.collect(dspine.generate(
            target, draft, ids, max_new_tokens=60, block_size=block_size, copy=True,
            eos_token_ids=end))
        assert tokens == plain[:plain.index(end) + 1] and stats.finish_reason == "eos"
        assert sum(stats.emitted_by.values()) == len(tokens) == 1 + sum(stats.accept_lengths)


def test_draft_reads_the_same_context_after_copied_rounds(small, small_draft):
    """After rounds that copied, the draft's context equals that of a run that never did."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    seen = {}

    class Watching(dspine.DSpine):
        def propose(self, state, context_states, anchor_id, length, **options):
            proposal = super().propose(state, context_states, anchor_id, length, **options)
            keys = [k.clone() for k, _ in state.keys_values]
            seen.setdefault(self.copying, {})[state.length] = keys
            return proposal
    draft = Watching.from_pretrained(small_draft, target)
    ids = torch.tensor([[9, 8, 7, 6, 9, 8, 7, 6, 9, 8]])
    for draft.copying in (False, True):
        dspine.collect(dspine.generate(target, draft, ids, max_new_tokens=80, copy=draft.copying))
    common = sorted(set(seen[False]) & set(seen[True]))
    assert len(common) > 5 and len(seen[True]) < len(seen[False])
    for n in common:
        for a, b in zip(seen[False][n], seen[True][n]):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_copied_tokens_sample_the_target():
    """A proposal of probability one: accepted with p(x), else p without x. Exact within 0.01."""
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(2, 5), -1)
    counts = torch.zeros(5)
    proposal = dspine.copy_proposal([2], "cpu")
    uniforms = torch.rand(40_000, 2)
    for uniform in uniforms:
        accepted, token = dspine.verify_sampled(p, proposal, uniform)
        counts[2 if accepted else token] += 1
    assert (counts / counts.sum() - p[0]).abs().sum() / 2 < 0.01


# -------------------------------------------------------------------------------------------------
# train_small.py
# -------------------------------------------------------------------------------------------------


def make_trainer(small, out, rows=None, seed=0, flags=()):
    """A Trainer on hand-made rows of unequal length."""
    args = training.parse_args([
        "--target", str(small), "--out", str(out), "--steps", "10", "--layers", "2",
        "--block-size", "4", "--rank", "12", "--message", "8", "--top-k", "4", "--anchors", "6",
        "--lr", "1e-3", "--no-progress", "--no-compile", "--batch-rows", "4", *flags])
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(5)
    rows = rows or [{"ids": torch.randint(1, 250, (n,), generator=generator).tolist(),
                     "prompt_length": 4} for n in (9, 30, 17, 24, 12, 21)]
    torch.manual_seed(seed)
    config = dspine.DSpineConfig.for_target(
        target, 2, block_size=4, transfer_rank=12, message_size=8, top_k=4, mask_token_id=259,
        inject=args.inject, attention=args.attention, select=args.select)
    draft = dspine.DSpine.for_target(config, target).requires_grad_(True).train()
    out.mkdir(parents=True, exist_ok=True)
    return training.Trainer(args, draft, target, rows, out)


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.draft.parameters()])


def test_supervised_triples_by_hand():
    """Six tokens, prompt of two, B = 4: every (anchor, slot, label) there is, and no other."""
    ids, mask = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    anchors, valid = dspine.sample_anchors(mask, 100)
    assert anchors[valid].tolist() == [1, 2, 3, 4]
    supervised = dspine.supervised_slots(mask, anchors, valid, 4)
    labels = dspine.gather_blocks(ids, anchors, 4)[..., 1:]
    found = {(int(anchors[0, a]), int(t) + 1, int(labels[0, a, t]))
             for _, a, t in supervised.nonzero()}
    assert found == {(1, 1, 7), (1, 2, 8), (1, 3, 9), (2, 1, 8), (2, 2, 9), (2, 3, 10), (3, 1, 9),
                     (3, 2, 10), (4, 1, 10)}


def test_supervision_stops_at_the_first_gap():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    anchors = torch.tensor([[0, 1, 3]])
    supervised = dspine.supervised_slots(mask, anchors, torch.tensor([[True, True, False]]), 4)
    assert supervised.tolist() == [[[True, True, False], [True, False, False], [False] * 3]]


def test_loss_of_a_block_ignores_features_from_its_anchor_on(small, tmp_path):
    """Overlapping anchors included: taps at or behind an anchor do not change its block's loss."""
    t = make_trainer(small, tmp_path)
    for write in t.draft.injection.writes:
        torch.nn.init.normal_(write.weight, std=0.3)
    ids = torch.tensor([t.rows[1]["ids"]])
    taps, last = t.states[1]
    anchors = torch.tensor([[6, 7, 9]])

    def loss_of(block, taps):
        supervised = torch.zeros(1, 3, 3, dtype=torch.bool)
        supervised[0, block] = True
        out = t.draft(dspine.gather_blocks(ids, anchors, 4), taps, anchors, t.embed)
        loss, _ = dspine.objective(t.draft, out, ids, anchors, supervised, last, t.head, beta=0.5)
        return loss.item()
    for block, anchor in enumerate(anchors[0].tolist()):
        late, early = taps.clone(), taps.clone()
        late[:, anchor:] += torch.randn_like(late[:, anchor:])
        early[:, anchor - 1] += 1.0
        assert loss_of(block, late) == pytest.approx(loss_of(block, taps), abs=1e-6)
        assert abs(loss_of(block, early) - loss_of(block, taps)) > 1e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap, vocabulary, log_z", [
    (None, 0, False), (5.0, 0, False), (None, 300, False), (None, 300, True), (5.0, 300, True)])
def test_fused_losses_equal_the_plain_ones(softcap, vocabulary, log_z, compiled):
    """Values, gradients, candidates of the hand-written pass; chunks cut through positions."""
    if compiled and not training.use_compiler("cpu"):
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    raw = (GOLDEN / "golden_a" / "config.json").read_text(encoding="utf-8")
    c = dspine.DSpineConfig.from_dict(json.loads(raw))
    hidden, refined = (torch.randn(37, 24, requires_grad=True) for _ in range(2))
    lm_head, teacher = torch.randn(1024, 24), torch.randn(9, 24) * 0.5
    index = torch.randint(9, (37,)).sort().values.unique_consecutive(return_inverse=True)[1]
    labels, w = torch.randint(1024, (37,)), torch.rand(37)
    vocab = torch.randperm(1024)[:vocabulary].sort().values if vocabulary else None
    run = lambda f, teacher, chunk: f(hidden, refined, labels, w, teacher, index, lm_head, c, 0.3,
                                      softcap, chunk, vocab)
    a, sums_a, top_a = run(dspine.chunked_losses, teacher, 37)
    if log_z:
        z = dspine.teacher_logits(teacher, lm_head, softcap).logsumexp(-1, keepdim=True)
        teacher = torch.cat((teacher, z), dim=-1)
    b, sums_b, top_b = run(training.fused_losses, teacher, 8)
    torch.testing.assert_close((b, sums_b, top_b), (a, sums_a, top_a), atol=1e-4, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, (hidden, refined)) for loss in (a, b)]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)
    training._vocabulary_pass = training.vocabulary_pass


@pytest.mark.parametrize("cap", [None, 2.0])
def test_training_with_a_draft_vocabulary_equals_the_plain_losses(small, tmp_path, cap):
    """Gradients of a step, with log Z computed and with log Z from the disk."""
    t = make_trainer(small, tmp_path)
    t.softcap = t.states.softcap = cap
    t.draft.set_draft_vocab(torch.arange(0, 250, 3))
    t.optimizer.step = lambda: None

    def gradients():
        t.step = 5
        t.train_step()
        return [p.grad.clone() for p in t.draft.parameters()]
    computed = gradients()
    last = t.states[1][1]
    direct = dspine.teacher_logits(last[0], t.head, cap).logsumexp(-1)
    kept = t.states.log_zs[t.states.ends[1]:t.states.ends[2]]
    assert torch.equal(kept, direct) and kept.all()
    t.states.head = None                                                    # not used any more
    stored = gradients()
    t.losses = lambda *given: dspine.chunked_losses(*given[:4], given[4][:, :-1], *given[5:])
    plain = gradients()
    torch.testing.assert_close(computed, stored, atol=0, rtol=0)
    torch.testing.assert_close(computed, plain, atol=1e-5, rtol=1e-3)


def test_losses_with_a_draft_vocabulary_are_those_of_a_masked_head():
    """Equal to a head that gives the other tokens no mass; their ce alone is left out."""
    torch.manual_seed(0)
    raw = (GOLDEN / "golden_a" / "config.json").read_text(encoding="utf-8")
    c = dspine.DSpineConfig.from_dict(json.loads(raw))
    hidden, refined, teacher = (torch.randn(50, 24) for _ in range(3))
    lm_head, labels = torch.randn(1024, 24), torch.randint(1024, (50,))
    vocab = torch.randperm(1024)[:600].sort().values
    found, candidates = dspine.vocabulary_losses(hidden, refined, labels, teacher, lm_head, c,
                                                 vocab=vocab)
    mask = torch.full((1024,), -torch.inf).index_fill_(0, vocab, 0.0)
    q, p = (hidden @ lm_head.T + mask).softmax(-1), (teacher @ lm_head.T).softmax(-1)
    known = torch.isin(labels, vocab)
    assert 0 < known.sum() < 50 and torch.isin(candidates, vocab).all()
    ce = torch.where(known, -q[torch.arange(50), labels].log(), 0.0)
    torch.testing.assert_close(found[:2], torch.stack((ce, (q - p).abs().sum(-1))))
    assert torch.equal(candidates, q.topk(c.top_k).indices)


def test_frequent_tokens_are_counted_in_answers_alone():
    rows = [{"ids": [9, 9, 9, 9, 5, 5, 7], "prompt_length": 4},
            {"ids": [9, 3, 5, 3], "prompt_length": 1}]
    assert training.frequent_tokens(rows, 3, 12).tolist() == [5, 3, 7]
    assert len(training.frequent_tokens(rows, 10, 12).unique()) == 10


def test_grouped_top_k_is_exact():
    x = torch.randn(5, 4096)
    assert torch.equal(training.top_k_grouped(x, 16), x.topk(16).indices)


def test_nothing_supervised_changes_nothing(small, tmp_path):
    """T04: prompts without an answer give a finite zero and leave the weights."""
    t = make_trainer(small, tmp_path, rows=[{"ids": [1, 2, 3, 4, 5], "prompt_length": 5}] * 4)
    before = weights(t)
    terms = t.train_step()
    assert all(term["weight"] == 0 for term in terms) and torch.equal(weights(t), before)


def test_accumulation_equals_a_batch(small, tmp_path):
    """4 x 1 rows and one batch of 4, of unequal lengths: the same step."""
    after = []
    for micro in ("1", "4", "3"):
        t = make_trainer(small, tmp_path / micro, flags=("--micro-rows", micro))
        t.step = 200  # beta at its full value
        t.args.steps = 10_000
        t.train_step()
        after.append(weights(t))
    torch.testing.assert_close(after[0], after[1], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(after[0], after[2], atol=2e-6, rtol=1e-5)


def test_resume_is_exact(small, tmp_path):
    """T08: 5 steps, a checkpoint, 5 more = 10 straight, bit for bit; loads with weights_only."""
    straight = make_trainer(small, tmp_path / "a")
    training.train(straight)
    training.train(make_trainer(small, tmp_path / "b"), stop_at=5)
    with open(tmp_path / "b" / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 6, "l1": 0.0}\n{"step": 7, "l')  # killed after the checkpoint
    second = make_trainer(small, tmp_path / "b", seed=99)
    training.train(second)
    assert straight.step == second.step == 10 and torch.equal(weights(straight), weights(second))
    log = lambda folder: [(r["step"], r["l1"])
                          for r in training.read_rows(tmp_path / folder / "log.jsonl")]
    assert log("a") == log("b") and len(log("a")) == 10
    with pytest.raises(ValueError, match="other sizes"):
        training.train(make_trainer(small, tmp_path / "b", flags=("--inject", "none")))


def test_every_parameter_moves_and_the_target_stays(small, tmp_path):
    """T05, T06: after 100 steps none is unmoved; the optimizer holds the draft's and no other."""
    t = make_trainer(small, tmp_path, flags=("--steps", "100"))
    before = {n: p.detach().clone() for n, p in t.draft.named_parameters()}
    frozen = {n: p.clone() for n, p in t.target.named_parameters()}
    training.train(t)
    assert [n for n, p in t.draft.named_parameters() if torch.equal(p, before[n])] == []
    assert all(torch.equal(p, frozen[n]) and not p.requires_grad
               for n, p in t.target.named_parameters())
    held = {id(p) for g in t.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in t.draft.parameters()} and len(held) == len(before)


def test_a_non_finite_loss_stops_with_the_step(small, tmp_path):
    t = make_trainer(small, tmp_path)
    training.train(t, stop_at=2)
    with torch.no_grad():
        t.draft.fc.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="step 2"):
        t.train_step()


@pytest.mark.parametrize("flags", [
    ("--inject", "none", "--supervise", "none", "--attention", "bidirectional",
     "--select", "argmax"),
    ("--inject", "last"), ("--supervise", "token-ce"), ("--supervise", "none")])
def test_ablations_train_and_decode(small, tmp_path, flags):
    """Each option learns, saves, loads and stays lossless. The first line is DFlash."""
    t = make_trainer(small, tmp_path, flags=(*flags, "--steps", "30", "--lr", "3e-3"))
    training.train(t)
    t.draft.save_pretrained(tmp_path / "draft")
    draft = dspine.DSpine.from_pretrained(tmp_path / "draft", t.target)
    ids = torch.tensor([[9, 8, 7]])
    plain, _ = dspine.collect(dspine.generate_plain(t.target, ids, max_new_tokens=20))
    assert dspine.collect(dspine.generate(t.target, draft, ids, max_new_tokens=20))[0] == plain
    dspine.collect(dspine.generate(t.target, draft, ids, max_new_tokens=20, temperature=1.0))
    log = [json.loads(x)["ce"] for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum(log[-5:]) < sum(log[:5])


def test_token_ce_alignment_equals_a_plain_softmax_over_the_codes():
    features = torch.randn(2, 7, 5, requires_grad=True)
    labels, codes = torch.tensor([0, 3, 9, 4, 8, 9, 1]), torch.randn(11, 5)
    for vocab in (None, torch.tensor([1, 3, 4, 9, 10])):
        columns = list(range(11)) if vocab is None else vocab.tolist()
        plain = torch.stack([torch.stack([
            -(codes[columns] @ f).log_softmax(-1)[columns.index(y)] if y in columns else f.sum() * 0
            for f, y in zip(layer, labels.tolist())]) for layer in features])
        found = training.token_ce_alignment(features, labels, codes, vocab, chunk=3)
        close(found, plain)
        weights = torch.rand(2, 7)
        close(*(torch.autograd.grad((x * weights).sum(), features)[0] for x in (found, plain)))


def test_token_ce_is_over_the_draft_vocabulary(small, tmp_path):
    t = make_trainer(small, tmp_path, flags=("--supervise", "token-ce"))
    t.draft.set_draft_vocab(torch.arange(20))
    t = training.Trainer(t.args, t.draft, t.target, t.rows, tmp_path)
    found = t.alignment(torch.zeros(2, 3, 12), torch.tensor([0, 19, 20]), t.draft.transfer_codes)
    close(found, torch.tensor([[1.0, 1.0, 0.0]] * 2) * math.log(20))


def test_warm_start_copies_the_last_layers(small, tmp_path):
    t = make_trainer(small, tmp_path)
    training.warm_start(t.draft, t.target)
    theirs = t.target.model.layers[-2:]
    for mine, other in zip(t.draft.layers, theirs):
        assert torch.equal(mine.mlp.up_proj.weight, other.mlp.up_proj.weight)
        assert torch.equal(mine.self_attn.k_proj.weight, other.self_attn.k_proj.weight)
    context = t.draft.fc(torch.randn(1, 1, 64))
    assert context.shape == (1, 1, 32)
    from transformers import GPT2Config, GPT2LMHeadModel
    other = GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=32, n_layer=6, n_head=4))
    with pytest.raises(ValueError, match="--init random"):
        training.warm_start(t.draft, other)


def test_warm_start_refuses_another_activation(small, tmp_path):
    """Gemma's layers have these names and shapes but another activation."""
    t = make_trainer(small, tmp_path)
    t.target.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="activation gelu"):
        training.warm_start(t.draft, t.target)


@pytest.mark.parametrize("family, sizes, fits", [
    ("Llama", {}, True), ("Gemma2", {}, True), ("Cohere", dict(logit_scale=0.25), False),
    ("Granite", dict(logits_scaling=8.0), False)])
def test_targets_that_scale_their_logits_are_refused(family, sizes, fits):
    """The objective's P is head . hidden state (soft-capped): for these it is another's."""
    if fits:
        training.check_head(tiny(family))
    else:
        with pytest.raises(ValueError, match="scales or shifts its logits"):
            training.check_head(tiny(family, **sizes))


def test_a_checkpoint_belongs_to_its_target(small, tmp_path):
    """Another target of the same shape: other states, and the checkpoint is refused."""
    first = make_trainer(small, tmp_path)
    training.train(first, stop_at=1)
    other = make_trainer(small, tmp_path)
    with torch.no_grad():
        other.target.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert training.fingerprint(other.target) != training.fingerprint(first.target)
    with pytest.raises(ValueError, match="another target"):
        training.train(other)
    states = training.TargetStates(other.target, other.rows, [1, 3], tmp_path / "states0", 1)
    assert not states.done.any() and first.states.done.any()


def test_the_transfer_space_survives_resume_and_cast(small, tmp_path):
    """Signs of eigenvectors differ between machines: directions come from the checkpoint, and a
    bfloat16 export keeps them in float32."""
    first = make_trainer(small, tmp_path)
    training.train(first, stop_at=1)
    second = make_trainer(small, tmp_path)
    directions = second.draft.transfer_directions.clone()
    second.draft.transfer_directions.neg_()
    second.load(tmp_path / "checkpoint.pt")
    assert torch.equal(second.draft.transfer_directions, directions)
    codes = second.draft.transfer_codes.clone()
    second.draft.bfloat16().save_pretrained(tmp_path / "slim", slim=True)
    saved = load_file(tmp_path / "slim" / "model.safetensors")
    assert torch.equal(saved["transfer_directions"], directions)
    again = DSpine.from_pretrained(tmp_path / "slim", second.target)
    assert torch.equal(again.transfer_codes, codes)


def test_the_corpus_follows_the_targets_own_distribution(small):
    """C15: penalties of generation_config would make the answers another model's."""
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    ids = program.build_prompt(tokenizer, "hi hi hi hi")
    plain, _ = collect(generate_plain(target, ids, max_new_tokens=20, eos_token_ids=()))
    written = lambda: training.continue_batch(target, ids.tolist(), [], 0.0, 20)[0]
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    target.generation_config.repetition_penalty = 5.0
    assert written() != plain
    training.follow_own_distribution(target)
    assert written() == plain


def test_the_corpus_multiplies_all_rows_at_once(small):
    """A strided view of the last states would copy the target's whole head for every row."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    packed, head = [], target.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, out: packed.append(inputs[0].is_contiguous()))
    training.continue_batch(target, [[5, 6, 7], [8, 9, 10, 11]], [], 0.0, 3)
    assert packed == [True] * 3 and not head._forward_pre_hooks


def test_loops_are_cut():
    assert training.cut_loop([1, 2, 3, 4] + [7, 8, 9, 5] * 4) == [1, 2, 3, 4, 7, 8, 9, 5]
    assert training.cut_loop([1] + [2] * 20) == [1, 2]
    fine = list(range(30)) + list(range(30))
    assert training.cut_loop(fine) == fine and training.cut_loop([]) == []


def test_repetition_and_summary():
    """P01, P03: emitted tokens only; a loop shows in the repetition figure."""
    assert training.repetition(list(range(20))) == 0 and training.repetition([1, 2] * 20) > 0.9
    run = lambda lengths, seconds: {
        "accept_lengths": lengths, "decode_seconds": seconds, "prefill_seconds": 0.1,
        "draft_seconds": seconds / 2, "repetition": 0.0, "new_tokens": 1 + sum(lengths)}
    x = training.summarise([{"plain": run([1] * 6, 6.0), "x": run([3, 2, 1], 2.0)}] * 3)["x"]
    assert x["acceptance_length"] == 2 and x["ratio"] == 3
    assert x["histogram"] == {1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("text, prompts", [
    ('{"turns": ["a", "b"]}\n{"prompt": "c"}\n', ["a", "c"]), ("one\n\ntwo\n", ["one", "two"]),
    ('{"prompt": "a\u2028b"}\n', ["a\u2028b"]),  # a line separator inside a string ends no line
    ('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
     ["u"])])
def test_prompt_files(tmp_path, text, prompts):
    (tmp_path / "p").write_text(text, encoding="utf-8")
    assert training.read_prompts(str(tmp_path / "p")) == prompts


@pytest.mark.parametrize("content, message", [
    ("", "holds no prompt"), ('{"answer": 1}', "line 1: neither"),
    ('{"prompt": "a"}\n{x', "line 2: not valid JSON")])
def test_useless_prompt_files_are_refused(small, tmp_path, capsys, content, message):
    """T09."""
    (tmp_path / "p").write_text(content, encoding="utf-8")
    args = ["--target", str(small), "--out", str(tmp_path / "o"), "--prompts", str(tmp_path / "p"),
            "--dtype", "float32", "--no-progress"]
    assert training.main(args) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (["--rows", "0"], "--rows 0: must be at least 1"), (["--ce-start", "5"], "at most 1"),
    (["--draft-vocab", "3", "--slim"], "at least --top-k"), (["--draft-vocab", "99"], "add --slim"),
    (["--init", "DRAFT"], "it has a draft vocabulary"),
    (["--init", "DRAFT", "--slim", "--inject", "last"], "--inject last: the draft in"),
    (["--init", "DRAFT", "--slim", "--attention", "bidirectional"], "has causal")])
def test_useless_training_flags_are_refused_before_any_work(small, tmp_path, capsys, flags,
                                                            message):
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    random_draft(target, draft_vocab=60, mask_token_id=259).save_pretrained(tmp_path / "draft",
                                                                            slim=True)
    flags = [str(tmp_path / "draft") if x == "DRAFT" else x for x in flags]
    assert training.main(["--target", str(small), "--out", str(tmp_path / "o"), *flags,
                          "--dtype", "float32", "--no-progress"]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not list((tmp_path / "o").glob("*"))


def test_a_draft_trained_on_keeps_its_form_and_takes_the_weight_of_ce(small, tmp_path):
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    random_draft(target, inject="last", mask_token_id=259).save_pretrained(tmp_path)
    draft = training.make_draft(training.parse_args(
        ["--init", str(tmp_path), "--ce-end", "0.3", "--layers", "9"]), target, tokenizer)
    assert draft.config.inject == "last" and draft.config.ce_weight == 0.3
    assert draft.config.num_hidden_layers < 9


def test_a_corpus_of_another_program_is_read_or_refused(small, text_file, tmp_path, capsys):
    """Rows without held_out are trained on; ids of a larger vocabulary are named."""
    row = {"ids": list(range(1, 40)), "prompt_length": 4}
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    flags = ["--target", str(small), "--out", str(tmp_path), *TINY_RUN, "--corpus-tokens", "10",
             "--no-progress"]
    assert training.main(flags) == 0
    assert "no held-out prompt" in capsys.readouterr().out
    path.write_text(json.dumps({**row, "ids": [1, 2, 3, 4, 264]}) + "\n", encoding="utf-8")
    assert training.main(flags) == 1
    assert "corpus.jsonl, line 1: needs ids (token ids below 264)" in capsys.readouterr().err


def test_states_whose_file_was_deleted_are_computed_again(small, tmp_path):
    t = make_trainer(small, tmp_path)
    before = [x.clone() for x in t.states[1]]
    t.states.log_zs.fill_(5.0)
    (path,) = (p for p in tmp_path.glob("states0.*") if p.suffix not in (".done", ".log_z"))
    path.unlink()
    again = make_trainer(small, tmp_path).states
    assert before[0].abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, again[1])) and not again.log_zs.any()


TINY_RUN = [
    "--corpus-tokens", "900", "--answer-tokens", "24", "--prompt-tokens", "8", "--rows", "6",
    "--steps", "4", "--layers", "2", "--block-size", "4", "--rank", "12", "--message", "8",
    "--top-k", "4", "--anchors", "6", "--eval-prompts", "2", "--eval-tokens", "8",
    "--dtype", "float32", "--no-compile", "--device", "cpu"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{i * i} is {i} squared," for i in range(200)), encoding="utf-8")
    return path


def run_training(small, text_file, out, launcher=(), flags=()):
    command = [sys.executable, *launcher, str(ROOT / "train_small.py"), "--target", str(small),
               "--text", str(text_file), "--out", str(out), *TINY_RUN, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


def test_training_end_to_end(small, text_file, tmp_path, capsys):
    """Nothing in, a draft out that generate.py loads; the second run skips what is there."""
    flags = "--slim", "--draft-vocab", "60"
    done = run_training(small, text_file, tmp_path, flags=flags)
    assert "temperature 1" in done.stdout
    assert "rows cut where they loop" in done.stderr + done.stdout
    rows = training.read_rows(tmp_path / "corpus.jsonl")
    usable = [r for r in rows if not r["held_out"] and training.answer_tokens([r]) >= 2]
    assert len(usable) < len(rows) and f"parameters, {len(usable)} rows" in done.stdout
    assert {r["temperature"] > 0 for r in rows} == {True, False}
    assert len(load_file(tmp_path / "model.safetensors")["draft_vocab"]) == 60
    args = flags_for(small, tmp_path)
    assert program.main([*args, "--compare", "--max-new-tokens", "12"]) == 0
    assert "equal to plain" in capsys.readouterr().out
    names = {k for k in safe_keys(tmp_path / "model.safetensors")}
    assert not any("embed" in k or "lm_head" in k for k in names)  # T10: the draft's own alone
    state = lambda: [(tmp_path / name).read_bytes() for name in ("corpus.jsonl", "log.jsonl")]
    before = state()
    run_training(small, text_file, tmp_path, flags=flags)
    assert before == state()


def test_training_script_for_a_gpu(small, text_file, tmp_path):
    """bench/gpu_train.sh with its flags overridden: a target in pieces is joined, the draft cut."""
    flags = [*TINY_RUN, "--target", str(small), "--text", str(text_file), "--init", "random",
             "--draft-vocab", "60", "--batch-rows", "2", "--micro-rows", "1", "--minutes", "0",
             "--no-progress"]
    for i, piece in enumerate((b"GG", b"UF")):
        (tmp_path / f"target.gguf.0{i}").write_bytes(piece)
    done = subprocess.run(["bash", str(ROOT / "bench" / "gpu_train.sh"), str(tmp_path), *flags],
                          capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PIECES": "2K",
                               "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target.gguf").read_bytes() == b"GGUF"
    pieces = sorted(tmp_path.glob("model.safetensors.*"))
    whole = (tmp_path / "model.safetensors").read_bytes()
    assert len(pieces) > 1 and b"".join(p.read_bytes() for p in pieces) == whole


def test_rows_are_dealt_out_evenly(small, tmp_path):
    """Every row of a step goes to one process, and the long ones not all to the same."""
    lengths = (9, 30, 17, 24, 21, 12, 11, 26, 14)
    t = make_trainer(small, tmp_path, rows=[{"ids": [1] * n, "prompt_length": 2} for n in lengths])
    for t.world, t.args.batch_rows in ((1, 3), (2, 2), (2, 4), (3, 4), (3, 5), (4, 9)):
        shares = []
        for t.rank in range(t.world):
            shares.append(t.my_rows())
        assert all(shares) and sorted(sum(shares, [])) == sorted(t.row_ids())
    t.world, t.args.batch_rows, t.row_ids = 2, 4, lambda: [1, 0, 3, 2]      # 30, 9, 24, 17 tokens
    for t.rank, share in enumerate(([0, 1], [2, 3])):
        assert t.my_rows() == share


def test_two_processes_equal_one(small, text_file, tmp_path):
    """DistributedDataParallel over gloo: the same weights as accumulating in one process."""
    from safetensors.torch import load_file
    common = ("--eval-prompts", "0", "--batch-rows", "4")
    run_training(small, text_file, tmp_path / "one", flags=common)
    made = {"checkpoint.pt", "model.safetensors", "log.jsonl"}
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=lambda *_: made)
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    run_training(small, text_file, tmp_path / "two", torchrun, common)
    one, two = (load_file(tmp_path / k / "model.safetensors") for k in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-4, msg=name)


def safe_keys(path):
    from safetensors import safe_open
    with safe_open(path, "pt") as file:
        return list(file.keys())


# -------------------------------------------------------------------------------------------------
# README
# -------------------------------------------------------------------------------------------------


def test_readme_points_at_the_right_lines():
    """Idea -> line: each link's line defines the name it stands for."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)", text)
    assert len(links) >= 20
    for name, file, line in links:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        assert re.match(rf"\s*(def|class) {name}\b", lines[int(line) - 1]), (name, file, line)


# -------------------------------------------------------------------------------------------------
# bench/
# -------------------------------------------------------------------------------------------------


def test_evaluation_of_prompt_sets(small, small_draft, tmp_path):
    """Every method on every set, conditions beside the table; a second run reads what is there."""
    (tmp_path / "sets").mkdir()
    for name in ("one", "two"):
        (tmp_path / "sets" / f"{name}.jsonl").write_text(
            '{"turns": ["hello"]}\n{"turns": ["12 + 12 + 12 + 12"]}\n', encoding="utf-8")
    command = [sys.executable, str(ROOT / "bench" / "evaluate.py"), str(tmp_path / "sets"),
               "--target", str(small), "--draft", str(small_draft), "--dtype", "float32",
               "--max-new-tokens", "12", "--out", str(tmp_path / "log.jsonl")]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                                    env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "float32" in first.stdout and "commit" in first.stdout and first.stdout == second.stdout
    rows = [line.split("|")[1].strip() for line in first.stdout.splitlines() if line[:2] == "| "]
    assert rows == ["method", "plain", "prompt lookup", "DSpine", "copy", "DSpine + copy"]
    log = tmp_path / "log.jsonl"
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 4
    tokens = [{name: r["tokens"] for name, r in x["records"].items()} for x in records]
    for t in tokens:
        assert all(t[name] == t["plain"] for name in t), t
    for r in (r for x in records for r in x["records"].values()):  # prefill's token is left out
        assert r["new_tokens"] == len(r["tokens"]) and sum(r["accept_lengths"]) < len(r["tokens"])
    looked_up = [r for x in records if (r := x["records"]["prompt lookup"])["new_tokens"] == 12]
    assert looked_up and max(max(r["accept_lengths"]) for r in looked_up) > 1
    (tmp_path / "sets" / "one.jsonl").write_text('{"prompt": "other"}\n', encoding="utf-8")
    third = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert third.returncode == 0, third.stderr
    assert len(log.read_text(encoding="utf-8").splitlines()) == 7  # other prompts: measured anew


@pytest.fixture(scope="module")
def batch():
    spec = importlib.util.spec_from_file_location("batch", ROOT / "bench" / "batch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILTERS = [dict(), dict(temperature=0.8, top_k=6, top_p=0.95)]


def check_batch(batch, target, draft, requests, block_size=None, **filters):
    """Every row's tokens and statistics are those of its single run; returns accept lengths."""
    found = batch.generate_rows(target, draft, requests(), block_size=block_size, **filters)
    for r, tokens, stats in zip(requests(), found.tokens, found.statistics):
        options = dict(max_new_tokens=r.max_new_tokens, eos_token_ids=r.eos_token_ids,
                       generator=r.generator) | filters
        alone, expected = collect(
            generate(target, draft, r.input_ids, block_size=block_size, **options)
            if draft else generate_plain(target, r.input_ids, **options))
        assert tokens == alone
        for name in ("accept_lengths", "target_forwards", "finish_reason", "emitted_by"):
            assert getattr(stats, name) == getattr(expected, name), name
    return [stats.accept_lengths for stats in found.statistics]


def drift_apart(accept_lengths) -> bool:
    """Whether rows of one round emitted different numbers of tokens."""
    return any(len(set(one) - {None}) > 1 for one in itertools.zip_longest(*accept_lengths))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("family, block_size", [
    ("Llama", None), ("Qwen3", "auto"), ("GPT2", 3)])
def test_rows_of_a_batch_equal_their_single_runs(batch, family, block_size, filters):     # C16
    """Unequal prompts, budgets and end tokens; a vocabulary so small that a draft is often right.

    Rows that end leave the others undisturbed. Without a draft it is plain batched decoding.
    """
    V, drifted = 7, False
    target = tiny(family, vocab_size=V)
    draft = random_draft(target, mask_token_id=V - 1, transfer_rank=6)
    rows = list(zip((3, 20, 1, 11, 7), (1, 25, 2, 20, 13), ((), (), (), (2,), (3, 5))))
    requests = lambda: [
        batch.Request(prompt(length, i, V), budget, eos, torch.Generator().manual_seed(i))
        for i, (length, budget, eos) in enumerate(rows)]
    for part in (slice(1, 2), slice(1, 3), slice(0, 5)):
        few = lambda: requests()[part]
        drifted |= drift_apart(check_batch(batch, target, draft, few, block_size, **filters))
        check_batch(batch, target, None, few, **filters)
    assert drifted


def test_rows_that_accept_everything_beside_rows_that_accept_nothing(batch, overfit):
    """Prompts cut from the text that a draft knows by heart, and others."""
    target, text, draft = overfit
    text = torch.tensor([prompt(4)[0].tolist() + text])
    ids = [text[:, :40], prompt(9), text[:, :8], prompt(30, 5), text[:, :22]]
    requests = lambda: [batch.Request(x, 24 + i) for i, x in enumerate(ids)]
    lengths = check_batch(batch, target, draft, requests)
    assert max(map(max, lengths)) == 8 and min(map(max, lengths)) < 4 and drift_apart(lengths)


@pytest.mark.parametrize("overrides", [
    dict(inject="none"), dict(attention="bidirectional", inject="none", select="argmax")])
def test_rows_of_ablated_drafts(batch, overrides):
    target = tiny(vocab_size=7)
    draft = random_draft(target, mask_token_id=6, transfer_rank=6, **overrides)
    for filters in FILTERS:
        check_batch(batch, target, draft, lambda: [
            batch.Request(prompt(3 + 9 * i, i, 7), 20, (), torch.Generator().manual_seed(i))
            for i in range(3)], **filters)


def test_slots_beyond_a_rows_budget_stay_inside_the_targets_positions(batch):
    """A neighbour's longer block would ask for position 40 of a target that has 40."""
    target = tiny("GPT2", n_positions=40)
    ids = prompt(38), prompt(20)
    check_batch(batch, target, random_draft(target), lambda: [
        batch.Request(x, 40 - x.shape[1]) for x in ids])


@pytest.mark.parametrize("family", ["Mistral", "Lfm2", "Qwen3Next", "Qwen3 eager", "longrope"])
def test_targets_that_a_batch_can_not_hold_are_refused(batch, family):
    target, message = tiny(family.split()[0]) if family != "longrope" else tiny(), "one request"
    if family == "Qwen3 eager":
        target = copy.deepcopy(target)
        target.set_attn_implementation("eager")
    if family == "longrope":
        target = copy.deepcopy(target)
        target.config.rope_parameters = {"rope_type": "longrope",
                                         "original_max_position_embeddings": 400}
    with pytest.raises(ValueError, match=f"{type(target).__name__} .*{message} at a time"):
        batch.generate_rows(target, None, [batch.Request(prompt(), 8)])


def test_verification_of_rows_equals_that_of_each(batch):
    """Rows of 0 .. T proposals; draft probabilities near the target's, so that many are kept."""
    torch.manual_seed(0)
    N, T, K, V, kept = 200, 4, 3, 9, set()
    lengths = torch.randint(T + 1, (N,))
    logits, uniform = torch.randn(N, T + 1, V), torch.rand(N, T + 1)
    ids = logits[:, :T].topk(K).indices
    probs = (logits[:, :T].gather(-1, ids) + torch.randn(N, T, K) * 0.5).softmax(-1)
    chosen = dspine.inverse_cdf(probs, torch.rand(N, T))
    proposal = Proposal(ids.gather(-1, chosen[..., None])[..., 0], ids, probs)
    for filters in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 4}):
        accepted, tokens = batch.verify_rows(logits, proposal, lengths, filters, uniform)
        for n, count in enumerate(lengths.tolist()):
            own, rows = Proposal(*(x[n, :count] for x in proposal)), logits[n, :count + 1]
            alone = dspine.verify_greedy(rows, own.tokens)
            if filters["temperature"]:
                p = dspine.sampling_distribution(rows, **filters)
                alone = dspine.verify_sampled(p, own, uniform[n, :count + 1])
            assert (int(accepted[n]), int(tokens[n])) == alone
            kept.add((count, alone[0]))
    assert kept == {(count, n) for count in range(T + 1) for n in range(count + 1)}


def test_batch_throughput_of_prompt_sets(small, small_draft, tmp_path, batch, capsys):
    """Every number of requests on the same prompts; a second run reads what is there."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"turns": ["hello"]}\n{"turns": ["12 + 12 + 12"]}\n', encoding="utf-8")
    log = tmp_path / "runs" / "log.jsonl"
    flags = [str(tmp_path), "--target", str(small), "--draft", str(small_draft), "--dtype",
             "float32", "--max-new-tokens", "6", "--repeats", "2", "--out", str(log)]
    outputs = []
    for _ in range(2):
        assert batch.run(batch.parse_args([*flags, "--requests", "1", "2", "4"])) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "commit" in outputs[0] and "faster" in outputs[0]
    cells = [line.split(" | ") for line in outputs[0].splitlines() if line[:2] == "| "][1:]
    assert [c[0] for c in cells] == ["| 1", "| 2", "| 4"] and all("100%" in c[-1] for c in cells)
    assert len({c[4] for c in cells}) == 1  # what rows accept does not depend on the batch
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 2 * (4 + 2 + 1)
    assert list(records[0]["records"]) == list(records[-1]["records"])[::-1]  # in turn
    for flag, message in ((["--requests", "9"], "4 prompts for 9 requests"),
                          (["--requests", "0"], "at least 1"),
                          (["--requests", "1", "--draft", "nowhere"], "no folder with a draft")):
        assert program.guarded("batch.py", batch.run, batch.parse_args([*flags, *flag])) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("fast, slow, said", [(4, 8, "up to 4"), (None, 1, "at none")])
def test_batch_says_where_it_stops_paying(batch, capsys, fast, slow, said):
    """By hand: medians of passes, ratios of each pass; then the sentence under the table."""
    record = lambda emitted, seconds: {
        "emitted": emitted, "forwards": 2, "tokens": [[1]], "prefill_seconds": 1.0,
        "decode_seconds": seconds}
    passes = lambda seconds: [[{"plain": record(4, 2.0), "DSpine": record(4, s)}] for s in seconds]
    row = batch.summarise(passes([1.0, 4.0, 1.6]))
    assert row == {"plain": 2.0, "DSpine": 2.5, "ratio": 1.25, "acceptance_length": 2.0,
                   "prefill_seconds": 1.0, "equal": 1.0}
    table = {fast: row} if fast else {}
    batch.print_table("title", table | {slow: batch.summarise(passes([4.0]))}, True)
    assert said in capsys.readouterr().out


def bench_module(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trace_page(small, small_draft, tmp_path, monkeypatch, capsys):
    """One page without external resources; whatever the text holds, it stays text."""
    from html.parser import HTMLParser
    module, out = bench_module("trace"), tmp_path / "trace.html"
    evil = "</script><script>alert('1')</script> <!-- \"&amp; {{data}} \u2028"
    args = lambda *more: module.parse_args([
        evil, "hi", "--target", str(small), "--draft", str(small_draft), "--max-new-tokens", "12",
        "--out", str(out), *more])
    assert module.run(args()) == 0
    made = out.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(|innerHTML|\{\{", made.replace(
        "{{data}}", "")) and len(made) < 300_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.html"]

    class Reader(HTMLParser):
        tags, text, inside = [], {}, None

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)
            self.inside = dict(attributes).get("class") or dict(attributes).get("id")

        def handle_data(self, data):
            self.text.setdefault(self.inside, []).append(data)
    reader = Reader()
    reader.feed(made)
    assert reader.tags.count("script") == 2 and reader.text["prompt"][0] == evil
    data = json.loads(reader.text["data"][0])
    assert [d["prompt"] for d in data] == [evil, "hi"]
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    plain, _ = collect(generate_plain(target, program.build_prompt(tokenizer, "hi"),
                                      max_new_tokens=12,
                                      eos_token_ids=program.eos_ids(target, tokenizer)))
    text = "".join(words for r in data[1]["rounds"] for _, words in r["text"])
    assert text == tokenizer.decode(plain, skip_special_tokens=True)

    def fails(self, *_, **__):
        raise OSError("disk full")
    monkeypatch.setattr(Path, "write_text", fails)
    assert program.guarded("trace.py", module.run, args()) == 1
    assert "disk full" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == made
    assert program.guarded("trace.py", module.run, args("--out", str(tmp_path / "no" / "x"))) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_the_example_page_is_of_this_version():
    made = (ROOT / "assets" / "trace.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', made)[1])
    assert bench_module("trace").page(data, []) == made and len(made) < 300_000


@pytest.fixture(scope="module")
def probe():
    return bench_module("probe")


def probed(**overrides):
    """A random draft, and its forward over two blocks as a function of `replace`."""
    target = tiny()
    draft = random_draft(target, **overrides)
    blocks, states = prompt(12).view(1, 2, 6), torch.randn(1, 20, 64)
    embed, anchors = target.get_input_embeddings().weight, torch.tensor([[5, 14]])
    return draft, blocks, lambda replace=None: draft(blocks, states, anchors, embed, replace)


def test_probe_without_an_edit_is_the_drafters_forward(probe):
    draft, blocks, forward = probed()
    plain = forward()
    with probe.received(draft, lambda l, prev: prev):
        for a, b in zip(forward(), plain):
            assert torch.equal(a, b)
    with probe.received(draft, lambda l, prev: prev + 1):
        assert not torch.equal(forward()[0], plain[0])
    assert torch.equal(forward()[0], plain[0])                              # the edit is gone
    with probe.received(draft, lambda l, prev: prev):
        assert draft.kernels == "off"
    assert draft.kernels == "auto"


@pytest.mark.parametrize("inject", ["every", "last"])
def test_probe_corruption_follows_causality(probe, inject):
    """A message to position t changes t and what can hear from it: at the last layer nobody."""
    draft, _, forward = probed(inject=inject)
    sent, last = {}, draft.config.num_hidden_layers - 1
    with probe.received(draft, lambda l, prev: sent.setdefault(l, prev)):
        clean = forward().hidden_states
    assert set(sent) == ({last} if inject == "last" else {0, last})
    for kind in probe.CORRUPTIONS:
        messages = probe.corrupted(sent, kind, torch.Generator().manual_seed(0))
        for t in range(1, 6):
            to = torch.arange(1, 6)[:, None] == t
            for layers in ({last: messages[last]}, messages):
                with probe.received(draft, probe.replaced(layers, to)):
                    other = forward().hidden_states
                changed = [not torch.equal(other[0, :, i], clean[0, :, i]) for i in range(6)]
                spreads = inject == "every" and len(layers) == 2
                assert changed == [i >= t if spreads else i == t for i in range(6)]


@pytest.mark.parametrize("layers", [1, 2])
def test_probe_true_predecessors_are_those_of_training(probe, layers):
    """At layers below replacement_layers: forward(replace=True), bit for bit."""
    draft, blocks, forward = probed(replacement_layers=layers)
    true = draft.code(blocks[..., :-1])
    edit = probe.replaced({l: true for l in range(layers)}, torch.ones(5, 1).bool())
    with probe.received(draft, edit):
        got = forward()
    for a, b, c in zip(got, forward(torch.ones(1, 2).bool()), forward()):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_probe_donors_and_noise(probe):
    """Another block's message, the same block at every layer; noise as long as a message."""
    sent = {l: torch.arange(7.0).view(1, 7, 1, 1).expand(1, 7, 5, 16) + 100 * l for l in (0, 2)}
    other = probe.corrupted(sent, "other block", torch.Generator().manual_seed(0))
    assert (other[0] != sent[0]).all() and torch.equal(other[2], other[0] + 200)
    assert sorted(other[0][0, :, 0, 0].tolist()) == list(range(7))
    noise = probe.corrupted(sent, "noise", torch.Generator().manual_seed(0))
    close(noise[0].norm(dim=-1), torch.full((1, 7, 5), 4.0))
    assert not torch.equal(noise[0], noise[2])


def test_probe_nearest_code_and_standard_errors(probe):
    """Codes are nearest to themselves at any length; three rows of text, by hand."""
    draft = random_draft(tiny())
    ids = torch.arange(VOCAB)
    assert torch.equal(probe.nearest_token(draft.code(ids), draft.transfer_codes, chunk=7), ids)
    mean, error = probe.estimate(torch.tensor([[3.0], [1], [2]]), torch.tensor([[4.0]] * 3))
    close(mean, torch.tensor([0.5]))                                        # 6 of 12 tokens
    close(error, torch.tensor([0.25 / 3 ** 0.5]))                           # std(.75, .25, .5)


@pytest.mark.parametrize("vocab", [None, 40])
def test_probe_row_equals_the_objectives_own_counts(probe, vocab):
    """Accuracy and ce of the clean run are objective's; position 1 always has the true code."""
    target = tiny()
    draft = random_draft(target)
    ids, states = prompt(30), torch.randn(1, 30, 64)
    if vocab:
        draft.set_draft_vocab(torch.arange(vocab))
        ids %= vocab  # objective counts a token outside as a miss, the probe leaves it out
    embed, head = (m.weight for m in (target.get_input_embeddings(),
                                      target.get_output_embeddings()))
    mask = (torch.arange(30) >= 6)[None]
    anchors, valid = dspine.sample_anchors(mask, 9, torch.Generator().manual_seed(0))
    supervised = dspine.supervised_slots(mask, anchors, valid, 6)
    found = probe.probe_row(draft, states, ids, anchors, supervised, embed, head,
                            torch.Generator().manual_seed(0))
    blocks = dspine.gather_blocks(ids, anchors, 6)
    _, terms = dspine.objective(draft, draft(blocks, states, anchors, embed), ids, anchors,
                                supervised, states[..., :32], head, beta=0.0)
    tokens, (right, ce, same) = torch.tensor(found["tokens"]), torch.tensor(found["clean"])
    assert tokens.tolist() == supervised.sum((0, 1)).tolist() and torch.equal(same, tokens)
    close(right / tokens, torch.tensor(terms["top1_by_slot"]))
    close((ce * torch.exp(-torch.arange(5) / 7)).sum() / terms["weight"],
          torch.tensor(terms["ce"]))
    for given in found["true"]:
        assert [m[0] for m in given] == [m[0] for m in found["clean"]]
    assert found["true"][-1] != found["clean"] and found["noise"][0][2][0] < tokens[0]
    ids[:, 20] = VOCAB - 1  # with the vocabulary not among its tokens
    less = probe.probe_row(draft, states, ids, anchors, supervised, embed, head,
                           torch.Generator().manual_seed(0))
    assert (sum(less["tokens"]) < tokens.sum()) == (vocab is not None)


def probe_corpus(path):
    """Rows as train_small writes them; the first was trained on."""
    generator = torch.Generator().manual_seed(5)
    rows = [{"ids": torch.randint(1, 250, (n,), generator=generator).tolist(), "prompt_length": 4,
             "held_out": i > 0} for i, n in enumerate((30, 30, 9, 17))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def test_probe_end_to_end(small, small_draft, tmp_path, probe, capsys, monkeypatch):
    """Tables, JSON, figure (a line without matplotlib); a second run reads the rows done."""
    probe_corpus(tmp_path / "c.jsonl")
    flags = ["--corpus", str(tmp_path / "c.jsonl"), "--target", str(small), "--anchors", "5",
             "--draft", str(small_draft), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "probe.py"), *flags], cwd=ROOT,
                          capture_output=True, text=True, encoding="utf-8", timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "probe.json").read_text(encoding="utf-8"))
    assert found["conditions"].startswith("3 held-out rows") and found["tokens"][0] == 15
    assert found["tables"]["formation"]["rows"] == ["layer 1", "layer 2", "logits"]
    for table in found["tables"].values():
        assert table["title"] in done.stdout
        for name in ("mean", "standard_error"):
            assert len(table[name]) == len(table["rows"])
            assert all(len(row) == len(table["columns"]) for row in table[name])
    changed = found["tables"]["changed"]["mean"]
    assert all(row[:t] == [0] * t for t, row in enumerate(changed[:-1]))    # nothing before t
    assert all(found["tables"]["true_ce"]["mean"][-1][1:])  # a change at every other position
    files = {"probe.json", "rows.jsonl"}
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert set(os.listdir(tmp_path / "out")) == files | ({"probe.png"} if drawn else set())
    log = (tmp_path / "out" / "rows.jsonl").read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert probe.main(flags) == 0
    out = capsys.readouterr().out
    assert "no figure: matplotlib is not installed" in out
    assert out.split("no figure")[0].strip() == done.stdout.split("\nfigure:")[0].split(
        "no figure")[0].strip()
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == log


@pytest.mark.parametrize("content, flags, message", [
    (None, ["--corpus", "nowhere"], "--corpus nowhere: no such file"),
    (None, ["--rows", "1"], "--rows 1: must be at least 2"),
    (None, ["--anchors", "1"], "--anchors 1: must be at least 2"),
    (None, ["--figure", "x.gif"], "must end in .png or .svg"),
    (None, ["--draft", "nowhere"], "not a DSpine draft"),
    ("{x\n", [], "line 1: not valid JSON"),
    ('{"prompt": "a", "held_out": true}\n', [], "line 1: needs ids"),
    ('{"ids": [1, 2, 3, 4], "prompt_length": 2}\n', [], "has 0 held-out rows"),
    ('{"ids": [1, 2, 3, 999], "prompt_length": 2, "held_out": true}\n' * 2, [],
     "token ids below 264")])
def test_probe_refuses_useless_input(small, small_draft, tmp_path, probe, capsys, content, flags,
                                     message):
    probe_corpus(tmp_path / "c.jsonl")
    if content:
        (tmp_path / "c.jsonl").write_text(content, encoding="utf-8")
    assert probe.main(["--corpus", str(tmp_path / "c.jsonl"), "--target", str(small), "--draft",
                       str(small_draft), "--out", str(tmp_path / "out"), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "probe.json").exists()


def test_probe_refuses_a_draft_without_messages(probe):
    for overrides in (dict(inject="none"), dict(block_size=2)):
        with pytest.raises(ValueError, match="nothing to probe"):
            probe.check_draft(random_draft(tiny(), **overrides))


# -------------------------------------------------------------------------------------------------
# The family: bench/heads.py, bench/family.py
# -------------------------------------------------------------------------------------------------

HEADS = [heads.DFlash, heads.DSpark, heads.Domino, heads.DFlash2, heads.Eagle3]


def random_head(kind, draft):
    """A head of every kind in which every term does something."""
    torch.manual_seed(1)
    head = kind.from_backbone(draft).requires_grad_(False).eval()
    for p in head.parameters():
        p += torch.randn_like(p) * 0.3
    return head


@pytest.mark.parametrize("vocab", [None, torch.arange(1, 97, 2)])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_lossless(kind, vocab):
    target = tiny()
    head = random_head(kind, random_draft(target))
    if vocab is not None:
        head.set_draft_vocab(vocab)
    tokens, stats = collect(generate(target, head, prompt(), max_new_tokens=30))
    assert tokens == truth(target)[:30] and stats.target_forwards > 0
    sampled, _ = collect(generate(target, head, prompt(), max_new_tokens=30, temperature=1.0))
    assert len(sampled) == 30


@pytest.mark.parametrize("filters", [
    dict(temperature=1.0), dict(temperature=0.7, top_k=4, top_p=0.85)])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_sample_the_target(kind, filters):
    """C23, C24: pairs that a head itself proposes, many rows at once, give the target's."""
    draws = 2048
    target = tiny(vocab_size=5, num_hidden_layers=2, initializer_range=0.2)
    head = random_head(kind, random_draft(
        target, target_layer_ids=[0], num_hidden_layers=1, block_size=3, mask_token_id=4,
        transfer_rank=3, top_k=3))
    state = head.start(target)
    head.extend_context(state, torch.randn(4, 32))
    state.keys_values = [tuple(x.expand(draws, -1, -1, -1) for x in kv)
                         for kv in state.keys_values]
    if state.feature is not None:
        state.feature = state.feature.expand(draws, -1)
    u, g = sobol(draws, 6), torch.Generator().manual_seed(1)
    proposals = head.propose_rows(state, torch.full((draws,), 2), torch.full((draws,), 4), 2,
                                  uniform=u[:, :2], **filters)
    p_first, p_second = torch.randn(5, generator=g) * 1.5, torch.randn(5, 5, generator=g) * 1.5
    got, exact = pair_frequencies(p_first, p_second, proposals, filters, u[:, 2:])
    assert (got - exact).abs().sum() / 2 < 0.02
    assert not got[exact == 0].any()


def serial_and_parallel(head, vocab):
    """A sampled block's distributions [T, K], and those of the training forward on its tokens."""
    target, states, ids = tiny(), torch.randn(1, 24, 64), prompt(24)
    if vocab is not None:
        head.set_draft_vocab(vocab)
    embed, lm_head = (m.weight for m in (target.get_input_embeddings(),
                                         target.get_output_embeddings()))
    anchors, T = torch.tensor([[4, 9, 17]]), head.config.block_size - 1
    blocks, steps = torch.zeros(1, 3, T + 1, dtype=torch.long), []
    for j, p in enumerate(anchors[0].tolist()):
        steps.append(head.propose(head.start(target), states[0, :p], int(ids[0, p]), T,
                                  temperature=1.0, generator=torch.Generator().manual_seed(j)))
        blocks[0, j] = torch.cat((ids[0, p:p + 1], steps[-1].tokens))
        chosen = steps[-1].candidate_ids == steps[-1].tokens[:, None]
        assert (steps[-1].probs[chosen] > 0).all() and chosen.sum() == T
    assert head.trained_slots == (4 if isinstance(head, heads.Eagle3) else T)
    head.trained_slots = T
    out = head(blocks, states, anchors, embed)
    hidden, pre = out.hidden_states[0, :, 1:], out.pre_injection[0, :, 1:]
    extra = head.refine(pre, blocks[0, :, :-1])
    logits = head.logits(hidden, extra, head.matrices(lm_head))             # [A, T, V']
    if isinstance(head, heads.DFlash2):
        ids = torch.stack([s.candidate_ids for s in steps])                 # [A, T, K]
        at = ids if vocab is None else torch.searchsorted(vocab, ids)
        path = (head.right(ids) * extra[:, :, None]).sum(-1)
        logits = logits.gather(-1, at) + path
    return torch.stack([s.probs for s in steps]), logits.softmax(-1)


@pytest.mark.parametrize("vocab", [None, torch.arange(1, 97, 2)])
@pytest.mark.parametrize("kind", HEADS[1:])
def test_heads_score_in_training_as_in_decoding(kind, vocab):
    """Teacher-forced scores, all blocks in parallel = serial ones, for the tokens chosen there."""
    serial, parallel = serial_and_parallel(random_head(kind, random_draft(tiny())), vocab)
    close(serial, parallel, 1e-5)
    assert (serial[:, 1:] - serial[:, :-1]).abs().max() > 0.01


@pytest.mark.parametrize("kind", [heads.DSpark, heads.Domino])
def test_serial_heads_by_hand(kind):
    """The equations in the docstrings, token after token."""
    head, ids = random_head(kind, random_draft(tiny())), prompt(5)
    hidden, z = torch.randn(5, 32), torch.zeros(heads.RANK)
    got, _ = head.summary(ids)
    for t, token in enumerate(ids[0]):
        if kind is heads.DSpark:
            z = head.first.weight[token]
        else:
            x, gru = head.embedding.weight[token], head.gru
            a, b = (F.linear(x, gru.weight_ih_l0, gru.bias_ih_l0).chunk(3),
                    F.linear(z, gru.weight_hh_l0, gru.bias_hh_l0).chunk(3))
            reset, keep = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            z = keep * z + (1 - keep) * torch.tanh(a[2] + reset * b[2])
        close(got[0, t], z, 1e-4)
        head_row = tiny().get_output_embeddings().weight
        scores = head.logits(hidden[t], got[0, t], head.matrices(head_row))
        close(scores, head_row @ hidden[t] + head.second.weight @ z, 1e-3)


def test_convolution_by_hand():
    """Two blocks do not touch; at the start it is the identity, and so is the whole head."""
    c = config_for(tiny())
    conv, x = heads.Convolution(c), torch.randn(1, 12, 32)
    assert torch.equal(conv(x), x)
    torch.nn.init.normal_(conv.gate.weight)
    for i, y in enumerate(conv(x)[0]):
        a, b = torch.tanh(conv.gate.weight @ x[0, i]).chunk(2)
        before = x[0, i - 1] if i % 6 else torch.zeros(32)
        for channel in range(32):
            g = channel // 16
            close(y[channel], x[0, i, channel] * (1 + a[g]) + b[g] * before[channel], 1e-5)


def test_heads_begin_as_the_backbone():
    """DFlash is DSpine's ablation; DSpark, Domino and DFlash2 propose the same before training."""
    target, states = tiny(), torch.randn(9, 64)
    form = dict(inject="none", attention="bidirectional", select="argmax")
    draft = random_draft(target, **form)
    propose = lambda d: d.propose(d.start(target), states, 3, 5)
    want = propose(draft)
    for kind in HEADS[:4]:
        head = kind.from_backbone(draft).requires_grad_(False)
        got = propose(head)
        assert torch.equal(got.tokens, want.tokens)
        out = head(prompt(6)[None], states[None], torch.tensor([[9]]),
                   target.get_input_embeddings().weight)
        assert torch.equal(out.hidden_states, draft(
            prompt(6)[None], states[None], torch.tensor([[9]]),
            target.get_input_embeddings().weight).hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(propose(heads.DFlash.from_backbone(draft)), want))
    assert heads.DFlash.from_backbone(draft).config == draft.config


def head_trainer(small, out, kind, steps=3):
    t = make_trainer(small, out, flags=("--supervise", "none", "--steps", str(steps)))
    return family.HeadTrainer(t.args, kind.from_backbone(t.draft), t.target, t.rows, out, None)


@pytest.mark.parametrize("kind", HEADS)
def test_heads_train_save_and_load(kind, small, tmp_path):
    """Three steps move every parameter; the same rows and anchors as DSpine; back from disk."""
    t = head_trainer(small, tmp_path, kind)
    mine, theirs = t.blocks(1), make_trainer(small, tmp_path / "dspine").blocks(1)
    slots = t.draft.trained_slots
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1][..., :slots], theirs[1][..., :slots])
    before = {n: p.detach().clone() for n, p in t.draft.named_parameters()}
    training.train(t)
    assert [n for n, p in t.draft.named_parameters() if torch.equal(p, before[n])] == []
    t.draft.save_pretrained(tmp_path / "head", slim=True)
    head = kind.from_pretrained(tmp_path / "head", t.target)
    run = lambda d: collect(generate(t.target, d, prompt(), max_new_tokens=20, temperature=1.0,
                                     generator=torch.Generator().manual_seed(0)))
    (a, b), (c, d) = run(head), run(t.draft.eval())
    assert a == c and b.accept_lengths == d.accept_lengths
    t.draft.trained_slots = 2
    assert t.blocks(1)[1][..., :2].any() and not t.blocks(1)[1][..., 2:].any()


def test_heads_loss_by_hand(small, tmp_path):
    """DSpark: the weighted mean of a ce + (1-a) l1, slot by slot, with its gradient."""
    t = head_trainer(small, tmp_path, heads.DSpark)
    torch.nn.init.normal_(t.draft.second.weight, std=0.1)
    row, (anchors, supervised, _) = t.rows[1], t.blocks(1)
    ids, (taps, last) = torch.tensor([row["ids"]]), t.states[1]
    blocks = dspine.gather_blocks(ids, anchors, 4)
    ((loss, _),) = t.forward([1], [t.blocks(1)])
    out, total, weight = t.draft(blocks, taps, anchors, t.embed), 0.0, 0.0
    for _, j, s in supervised.nonzero().tolist():
        prev, label, w = blocks[0, j, s], blocks[0, j, s + 1], math.exp(-s / 7)
        q = (t.head @ out.hidden_states[0, j, s + 1]
             + t.draft.second.weight @ t.draft.first.weight[prev]).softmax(-1)
        p = (t.head @ last[0, anchors[0, j] + s]).softmax(-1)
        a = t.ce_weight()
        total = total + w * (-a * q[label].log() + (1 - a) * (q - p).abs().sum())
        weight += w
    close(loss, total / weight, 1e-5)
    gradients = [torch.autograd.grad(x, t.draft.first.weight)[0] for x in (loss, total / weight)]
    close(*gradients, 1e-6)


def test_heads_sum_their_losses_in_float32(small, tmp_path):
    """Autocast would round the sums, and the weights in the gradient, to bfloat16."""
    t = head_trainer(small, tmp_path, heads.DSpark)
    kinds = []

    def losses(*given):
        with torch.autocast("cpu", torch.bfloat16):
            loss, sums, candidates = t.draft.losses(*given)
        kinds.extend((loss.dtype, sums.dtype))
        return loss, sums, candidates
    t.losses = losses
    t.forward([1], [t.blocks(1)])
    assert kinds == [torch.float32] * 2


def test_heads_refuse_what_they_can_not_do():
    draft = random_draft(tiny(hidden_size=40, head_dim=8))
    with pytest.raises(ValueError, match="16 divides, not 40"):
        heads.DFlash2.from_backbone(draft)
    with pytest.raises(ValueError, match="kernels 'off'"):
        heads.DFlash.from_backbone(draft).use_kernels("auto")
    assert heads.DFlash.from_backbone(draft).kernels == "off"


@pytest.fixture(scope="session")
def family_flags(small, tmp_path_factory):
    """Prompts, a corpus and sizes for bench/family.py."""
    folder, g = tmp_path_factory.mktemp("family"), torch.Generator().manual_seed(5)
    (folder / "set.jsonl").write_text('{"prompt": "hello"}\n', encoding="utf-8")
    rows = [{"ids": torch.randint(1, 250, (n,), generator=g).tolist(), "prompt_length": 4}
            for n in (9, 30, 17, 24, 21, 5)]
    rows = [*rows[:4], *({**row, "held_out": True} for row in (rows[0], *rows[4:]))]
    (folder / "rows.json").write_text("".join(json.dumps(r) + "\n" for r in rows),
                                      encoding="utf-8")
    return [str(folder / "set.jsonl"), "--target", str(small), "--corpus",
            str(folder / "rows.json"), "--dtype", "float32", "--device", "cpu", "--steps", "3",
            "--layers", "2", "--block-size", "4", "--rank", "12", "--message", "8", "--top-k", "4",
            "--anchors", "6", "--max-new-tokens", "8", "--no-compile", "--no-progress"]


def test_family_end_to_end(family_flags, tmp_path):
    """Every method and ablation in one program; the second run skips what is finished."""
    (tmp_path / "decode.jsonl").write_text('{"key": 1}\n{"key": "cut', encoding="utf-8")
    command = [sys.executable, str(ROOT / "bench" / "family.py"), *family_flags,
               "--out", str(tmp_path), "--draft-vocab", "200",
               "--methods", *family.METHODS, "full"]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                                    env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout and "M parameters" not in second.stdout + second.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    results = results[" ".join(family.METHODS)]
    runs = [f"{name}-{seed}" for seed in (0, 1) for name in family.METHODS]
    assert list(results["runs"]) == runs
    rows = [line.split("|")[1].strip() for line in first.stdout.splitlines() if line[:2] == "| "]
    table = ["method", "plain", "transformers", "prompt lookup", *family.METHODS]
    assert rows == ["run", *runs, *table, *table]
    for record in training.read_rows(tmp_path / "decode.jsonl")[1:]:
        assert set(record["records"]) == {"plain", "transformers", "prompt lookup", *runs}
        if "temperature 0" in record["key"]:
            assert len({str(r["tokens"]) for r in record["records"].values()}) == 1
    steps = {r["steps"] for r in results["runs"].values()}
    assert steps == {3} and not list(tmp_path.glob("*/checkpoint.pt"))
    # data, done and log Z of the target's states, shared by all: rows to train on, unseen rows
    assert len(list(tmp_path.glob("states0.*"))) == 6
    assert "Losses on 1 rows that were not trained on." in first.stdout
    assert all(0 < r["unseen"]["ce"] < 8 for r in results["runs"].values())


def test_family_trains_on_no_held_out_row_and_measures_on_no_other(family_flags, small, tmp_path):
    args = family.parse_args(family_flags)
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    corpus = training.read_corpus(Path(args.corpus), target)
    assert len(corpus) == 7
    # of the held-out rows one has a prompt that is trained on, one has no token to predict
    assert family.corpus(args, target, tokenizer) == (corpus[:4], corpus[5:6])
    (tmp_path / "unseen").write_text("".join(json.dumps(corpus[i]) + "\n" for i in (0, 6, 5, 4)),
                                     encoding="utf-8")
    args.unseen = str(tmp_path / "unseen")
    assert family.corpus(args, target, tokenizer) == (corpus[:4], corpus[5:6])


def test_unseen_losses_are_the_objective_with_nothing_replaced(family_flags, small, tmp_path):
    args = SimpleNamespace(**vars(training.parse_args([])) | vars(family.parse_args(
        [*family_flags, "--out", str(tmp_path), "--lr", "0.01"])) | {"seed": 0, "slim": True})
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    rows, unseen = family.corpus(args, target, tokenizer)
    family.train_method("dspine", args, target, tokenizer, rows)
    losses = family.unseen_losses("dspine", args, target, unseen)
    draft = DSpine.from_pretrained(tmp_path / "dspine-0", target)
    args.ce_start = args.ce_end  # refinement is weighed as at the end
    trainer = training.Trainer(args, draft, target, unseen, tmp_path)
    anchors, supervised, replace = trainer.blocks(0)
    assert replace.any()  # at the start of training, but not in what is measured
    [(_, terms)] = trainer.forward([0], [(anchors, supervised, torch.zeros_like(replace))])
    assert losses == training.mean_terms([terms])
    assert family.unseen_losses("dspine", args, target, []) == {}


def test_family_goes_on_after_a_stop(family_flags, tmp_path, monkeypatch, capsys):
    run = lambda out, *flags: family.main([
        *family_flags, "--out", str(tmp_path / out), "--methods", "domino", "--seeds", "0",
        "--temperatures", "0", "--save-seconds", "0", *flags])
    assert run("straight") == 0
    step = training.Trainer.train_step

    def stops(trainer):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return step(trainer)
    monkeypatch.setattr(training.Trainer, "train_step", stops)
    assert run("stopped") == 130 and "goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("stopped") == 0
    a, b = (load_file(tmp_path / out / "domino-0" / "model.safetensors")
            for out in ("straight", "stopped"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    capsys.readouterr()
    assert run("stopped", "--lr", "1e-4") == 1
    assert "trained with another lr: use another --out" in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (["--corpus", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--unseen", "nowhere.jsonl"], "--unseen nowhere.jsonl: no such file"),
    (["--unseen", "EMPTY"], "holds no row with two"),
    (["--inject", "last"], "--inject belongs to the methods"),
    (["--init", "draft"], "must be target or random"),
    (["--temperatures", "-1"], "must be 0 or positive"),
    (["--seeds", "-1"], "--seeds -1"), (["--steps", "0", "--tokens", "0"], "give a budget"),
    (["--sets", "none"], "no prompt sets"), (["--sets", "set", "sat"], "no prompt sets named sat"),
    (["--anchors", "0"], "--anchors 0"),
    (["--corpus", "README.md"], "not valid JSON")])
def test_family_bad_input_is_one_line(family_flags, tmp_path, capsys, flags, message):
    (tmp_path / "EMPTY").touch()
    flags = [str(tmp_path / f) if f == "EMPTY" else f for f in flags]
    assert family.main([*family_flags, "--out", str(tmp_path), *flags]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1


# -------------------------------------------------------------------------------------------------
# Kernels against their twins
# -------------------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available() and not kernels.INTERPRET
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
DTYPES = [torch.float32] + [torch.bfloat16] * ON_GPU  # the interpreter has no bfloat16 (E03)
EPS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # error over the largest value, against float64
with_triton = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")


def kernel_draft(H=40, r=24, m=20, K=3, B=5, V=97, spread=1.0):
    """Odd sizes, no two weights alike; `spread` stretches rows over that many orders."""
    draft = DSpine(DSpineConfig(
        vocab_size=V, hidden_size=H, num_target_layers=6, target_layer_ids=[1], mask_token_id=3,
        num_hidden_layers=2, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, block_size=B, transfer_rank=r, message_size=m, top_k=K))
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    torch.nn.init.normal_(draft.norm.weight)
    draft.transfer_codes.copy_(F.normalize(torch.randn(V, r), dim=-1))
    draft.transfer_ready.fill_(True)
    for write in draft.injection.writes:
        write.weight.data *= spread
    return draft.requires_grad_(False)


def wide(module):
    """The same weights in float64: the reference."""
    return copy.deepcopy(module).double()


def error(got, exact) -> float:
    """Largest error over the largest value."""
    exact = exact.cpu().double()
    return ((got.cpu().double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()


def to(*values, dtype=None):
    return [x.to(DEVICE, dtype) if x is not None and x.is_floating_point() else
            x if x is None else x.to(DEVICE) for x in values]


def injection_case(B, N, replaced, spread=1.0, H=40, r=24, m=20):
    draft = kernel_draft(H=H, r=r, m=m, B=max(B, 2))
    h = torch.randn(N, 1, B, H) * 10 ** (spread * (torch.rand(N, 1, B, 1) - 0.5))
    code = F.normalize(torch.randn(N, 1, r), dim=-1) * math.sqrt(r)
    true = F.normalize(torch.randn(N, 1, B - 1, r), dim=-1) * math.sqrt(r) if replaced else None
    replace = torch.arange(N).view(N, 1, 1, 1) % 2 == 0 if replaced else None
    return draft.injection, h, code, true, replace


@with_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, N, replaced, spread", [
    (2, 1, False, 0), (3, 2, True, 0), (5, 7, False, 8), (8, 2, True, 8), (17, 1, False, 0),
    (17, 4, True, 4)])
def test_kernel_injection(B, N, replaced, spread, dtype):
    """Rows over up to eight orders of magnitude; each block is compared on its own scale."""
    injection, *given = injection_case(B, N, replaced, spread)
    given = [x.to(dtype) if x is not None and x.is_floating_point() else x for x in given]
    injection = injection.to(dtype)
    exact = Injection.forward(wide(injection), 1, *(
        x.double() if x is not None and x.is_floating_point() else x for x in given))
    got = kernels.adjacent_injection(copy.deepcopy(injection).to(DEVICE), 1, *to(*given))
    assert got.dtype == dtype and torch.equal(got[..., 0, :].cpu(), given[0][..., 0, :])
    assert max(error(g, e) for g, e in zip(got.flatten(0, 2), exact.flatten(0, 2))) < EPS[dtype]


@with_triton
def test_kernel_injection_over_slices_of_a_wide_state():
    """H 1111 is summed in slices (programs that share a row), r 65 and m 33 leave ragged tiles."""
    injection, h, code, *_ = injection_case(4, 1, False, H=1111, r=65, m=33)
    partial, square = kernels.run_readout(*to(h[0, 0], injection.readouts[0].weight))
    assert len(partial) == len(square) == 2
    exact = Injection.forward(wide(injection), 0, h.double(), code.double())
    got = kernels.adjacent_injection(copy.deepcopy(injection).to(DEVICE), 0, *to(h, code))
    assert error(got, exact) < EPS[torch.float32]


@with_triton
def test_kernel_injection_takes_any_layout_and_no_rows():
    injection, h, code, *_ = injection_case(5, 3, False)
    want = injection(0, h, code)
    injection, (h, code, want) = injection.to(DEVICE), to(h, code, want)
    apart = torch.randn(3, 1, 5, 80, device=DEVICE)[..., ::2]
    apart.copy_(h)
    for layout in (h.transpose(0, 2).contiguous().transpose(0, 2), apart):
        assert not layout.is_contiguous()
        got = kernels.adjacent_injection(injection, 0, layout, code.expand(3, 1, -1))
        assert error(got, want) < EPS[torch.float32]
    assert kernels.adjacent_injection(injection, 0, h[:0], code[:0]).shape == (0, 1, 5, 40)
    alone = kernels.adjacent_injection(injection, 0, h[..., :1, :], code)
    assert torch.equal(alone, h[..., :1, :])                                # the anchor only
    for B in (2, 5):
        one = kernels.adjacent_injection(injection, 0, h[1, 0, :B], code[1, 0])
        assert error(one, want[1, 0, :B]) < EPS[torch.float32]


@with_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, N, replaced", [(2, 1, False), (5, 3, True), (17, 2, False)])
def test_kernel_injection_gradients(B, N, replaced, dtype):
    """As the twin's in float64, for the states, the codes and every weight."""
    injection, *given = injection_case(B, N, replaced)
    weight = torch.randn(N, 1, B, 40)

    def gradients(function, module, dtype, device):
        module = copy.deepcopy(module).to(device, dtype).requires_grad_(True)
        h, code, true, replace = (x.to(device) if x is not None else None for x in given)
        h, code, true = (x if x is None else x.to(dtype).detach().requires_grad_()
                         for x in (h, code, true))
        out = function(module, 1, h, code, true, replace)
        (out * weight.to(device, dtype)).sum().backward()
        leaves = dict(h=h, code=code, true=true) | dict(module.named_parameters())
        return {name: x.grad for name, x in leaves.items() if x is not None and x.grad is not None}

    exact = gradients(Injection.forward, injection, torch.float64, "cpu")
    got = gradients(kernels.adjacent_injection, injection, dtype, DEVICE)
    assert got.keys() == exact.keys() and len(exact) >= 8 - (B == 2)
    for name in exact:
        assert exact[name].abs().max() == got[name].abs().max() == 0 or \
            error(got[name], exact[name]) < 2 * EPS[dtype], name


@with_triton
def test_kernel_row_offsets_need_64_bits():
    """The third row starts 2**31 + 128 numbers behind the first."""
    stride = 2 ** 30 + 64
    try:
        rows = torch.empty(2 * stride + 40, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no 4 GB of address space")
    rows = rows.as_strided((3, 40), (stride, 1))
    values, readout = torch.randn(3, 40), torch.randn(24, 40, dtype=torch.float16)
    rows.copy_(values)
    partial, square = kernels.run_readout(rows, readout.to(DEVICE))
    exact = values.half().double()
    assert error(partial.sum(0), exact @ readout.double().T) < 1e-5
    assert error(square.sum(0), exact.square().sum(1)) < 1e-5


def cache_case(K, T, lead, spread, V=97, H=40):
    draft = kernel_draft(K=K, B=T + 1, spread=spread, V=V, H=H)
    pre = torch.randn(*lead, T, H) * 10 ** (4 * torch.rand(*lead, T, 1) - 2)
    ids = torch.rand(*lead, T, V).argsort(-1)[..., :K].contiguous()
    return draft, pre, ids, torch.randint(V, lead), torch.randn(V, H)


@pytest.mark.parametrize("inject", ["every", "none"])
def test_message_space_identity_is_exact(inject):
    """In float64, with writes small and large against the states."""
    for spread in (1e-2, 1.0, 1e3):
        draft, pre, ids, anchor, head = cache_case(5, 4, (2, 3), spread)
        draft = draft.double()
        draft.config.inject = inject
        given = pre.double(), ids, anchor, head.double()
        assert error(draft.message_space_cache(*given), draft.transition_cache(*given)) < 1e-6


def test_message_space_follows_its_weights():
    """Computed once, and again after an optimizer step, a load or a cast."""
    draft, pre, ids, anchor, head = cache_case(3, 2, (), 1.0)
    check = lambda: error(draft.message_space_cache(pre.to(head.dtype), ids, anchor, head),
                          draft.transition_cache(pre.to(head.dtype), ids, anchor, head)) < 1e-5
    assert check() and draft.message_space() is draft.message_space()
    draft.injection.writes[-1].weight.mul_(3)
    draft.norm.weight.add_(1)
    assert check()
    draft.load_state_dict(kernel_draft(K=3, B=3).state_dict())
    assert check()
    draft, head = draft.double(), head.double()
    assert check() and draft.message_space().gram.dtype == torch.float64


@with_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, T, lead, spread", [
    (3, 1, (), 1.0), (16, 4, (), 30.0), (3, 7, (2,), 1e-2), (16, 16, (), 1.0), (5, 2, (2, 1), 1e3),
    (3, 4, (0,), 1.0)])
def test_kernel_transition_cache(K, T, lead, spread, dtype):
    draft, *given = cache_case(K, T, lead, spread)
    draft, given = draft.to(dtype), [x.to(dtype) if x.is_floating_point() else x for x in given]
    exact = DSpine.transition_cache(wide(draft), *(
        x.double() if x.is_floating_point() else x for x in given))
    got = kernels.transition_cache(copy.deepcopy(draft).to(DEVICE), *to(*given))
    assert got.shape == (*lead, T, K, K) and got.dtype == torch.float32
    if got.numel():
        assert error(got, exact) < EPS[dtype]


@with_triton
def test_kernel_transition_cache_over_slices_of_a_wide_head():
    """H 1111 in slices; states and codes as views, as DSpine.propose and a cast leave them."""
    draft, pre, ids, anchor, head = cache_case(3, 3, (2,), 1.0, H=1111)
    exact = wide(draft).transition_cache(pre.double(), ids, anchor, head.double())
    apart = torch.zeros(2, 4, 1111)
    apart[:, 1:] = pre
    backwards = ids.flip(-1).contiguous().to(DEVICE).flip(-1)
    got = kernels.transition_cache(draft.to(DEVICE), apart.to(DEVICE)[:, 1:], backwards,
                                   *to(anchor, head))
    assert error(got, exact) < EPS[torch.float32]


@with_triton
@pytest.mark.parametrize("K, T, lead", [(3, 1, ()), (16, 15, ()), (3, 4, (5,)), (5, 7, (2, 3)),
                                        (3, 4, (0,)), (1, 2, ())])
def test_kernel_path_equals_the_twin(K, T, lead):
    """Tokens and rows bit for bit, given the same uniforms; probabilities to the last bits."""
    for scale in (0.1, 1.0, 30.0):
        cache = torch.randn(*lead, T, K, K) * scale
        cache[..., 0, :, :] = cache[..., 0, :1, :]
        ids = torch.rand(*lead, T, 50).argsort(-1)[..., :K]
        for temperature in (0.0, 0.6, 1.0):
            uniform = torch.rand(*lead, T)
            want = dspine.select_path(cache, ids, temperature, uniform=uniform)
            given = *to(cache, ids), temperature
            got = kernels.select_path(*given, uniform=uniform.to(DEVICE))
            assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
            torch.testing.assert_close(got[2].cpu(), want[2], rtol=1e-5, atol=1e-7)


@with_triton
def test_kernel_path_at_the_edges_of_its_intervals():
    """Uniforms on a cumulative sum and a bit beside it; probabilities that vanish at either end."""
    for K in (3, 5, 7, 16):
        edges = (torch.ones(K) / K).cumsum(0)
        edges = torch.cat([edges, *(edges.nextafter(torch.tensor(x)) for x in (0.0, 1.0))])
        uniform = torch.cat([edges.clamp(max=1 - 2 ** -24), torch.zeros(1)])[:, None]
        for low in ([], [0], [K - 1], [0, K - 1]):
            cache = torch.zeros(len(uniform), 1, K, K)
            cache[..., low] = -1e4
            ids = torch.arange(K).expand(len(uniform), 1, K)
            want = dspine.select_path(cache, ids, 1.0, uniform=uniform)[1]
            got = kernels.select_path(*to(cache, ids), 1.0, uniform=uniform.to(DEVICE))[1]
            assert torch.equal(got.cpu(), want) and not torch.isin(want, torch.tensor(low)).any()


@with_triton
def test_kernel_path_draws_ties_and_filters_as_the_twin():
    cache, ids = torch.randn(2, 4, 5, 5), torch.rand(2, 4, 50).argsort(-1)[..., :5]
    cache[:, 1], cache[:, 2, :, 3:] = 1.0, 9.0                              # ties: the first one
    seeded = lambda: torch.Generator(DEVICE).manual_seed(7)
    cache, ids = to(cache, ids)
    wide_cache = cache.flip(-1).contiguous().flip(-1)                       # not contiguous
    for keywords in (dict(), dict(temperature=0.8, generator=1), dict(temperature=1.0, generator=1),
                     dict(temperature=0.9, generator=1, top_k=2),
                     dict(temperature=0.9, generator=1, top_p=0.6)):
        want, got = (function(table, ids, **keywords | (
            {"generator": seeded()} if "generator" in keywords else {}))
            for function, table in ((dspine.select_path, cache), (kernels.select_path, wide_cache)))
        assert all(torch.equal(g, w) for g, w in zip(got[:2], want[:2]))
    assert (kernels.select_path(cache, ids)[1][:, 1:3].cpu() == torch.tensor([0, 3])).all()


def verify_case(T, K, V, kind, generator):
    """Target, proposals and uniforms; `kind`: a draft that is random, or the target itself."""
    rand = lambda *shape: torch.rand(shape, generator=generator)
    probs = ((rand(T + 1, V) * 12).softmax(-1) if kind != "sparse" else
             F.normalize(rand(T + 1, V) * (rand(T + 1, V) < 0.01) + 1e-30, p=1, dim=-1))
    probs = probs.masked_fill(probs < 1e-20, 0)
    ids = probs[:T].topk(K, dim=-1).indices
    q = rand(T, K).softmax(-1)
    if kind == "same":
        q = probs[:T].gather(-1, ids)
        q = q / q.sum(-1, keepdim=True)
    rows = dspine.inverse_cdf(q, rand(T))
    return probs, Proposal(ids.gather(-1, rows[:, None])[:, 0], ids, q), rand(T + 1)


@with_triton
@pytest.mark.parametrize("T, K, V", [(0, 1, 300), (1, 3, 97), (4, 5, 5000), (15, 16, 2048)])
def test_kernel_verify_sampled_equals_the_twin(T, K, V):
    """(accepted, next token) bit for bit, given the same uniforms, slice borders included."""
    generator, seen = torch.Generator().manual_seed(T), set()
    for kind in ("random", "same", "sparse") * (4 if V < 5000 else 3):
        given = probs, proposal, uniform = verify_case(T, K, V, kind, generator)
        want = dspine.verify_sampled(*given)
        got = kernels.verify_sampled(*to(probs), Proposal(*to(*proposal)), *to(uniform))
        assert got == want and probs[got[0], got[1]] > 0
        seen.add(got[0])
    assert T < 4 or len(seen) > 1


@with_triton
def test_kernel_verify_sampled_where_nothing_is_left():
    """p = q at a refusal (rounding): the twin falls back to p. Uniforms at both ends."""
    probs = torch.zeros(2, 4097)
    probs[:, 4096] = probs[:, 5] = 0.5
    for u0, u1 in ((1.0, 0.0), (1.0, 1 - 2 ** -24), (0.0, 0.0), (0.0, 1 - 2 ** -24)):
        given = probs, Proposal(torch.tensor([5]), torch.tensor([[5, 4096]]),
                                torch.tensor([[0.5, 0.5]])), torch.tensor([u0, u1])
        want = dspine.verify_sampled(*given)
        assert kernels.verify_sampled(*to(probs), Proposal(*to(*given[1])), *to(given[2])) == want
        assert want == (int(u0 < 1), 5 if u1 == 0 else 4096)


@with_triton
@pytest.mark.parametrize("T, V", [(0, 97), (1, 4096), (6, 9001)])
def test_kernel_verify_greedy_equals_the_twin(T, V):
    logits = torch.randn(T + 1, V).clamp(max=1)                             # many ties: the first
    best = logits.argmax(-1)[:-1]
    for wrong in {0, T // 2, T}:
        proposals = best.clone()
        proposals[wrong:] += 1
        assert kernels.verify_greedy(*to(logits, proposals)) == (wrong, int(logits[wrong].argmax()))
    logits[T, V - 1] = math.nan
    assert dspine.verify_greedy(logits, best) == (T, V - 1)
    assert kernels.verify_greedy(*to(logits, best)) == (T, V - 1)
    assert int(kernels.ticket(DEVICE)) == 0


@with_triton
def test_kernels_leave_what_they_do_not_cover_to_the_twins():
    """float64: the same numbers to the last bit."""
    draft, pre, ids, anchor, head = cache_case(3, 4, (), 1.0)
    draft, pre, head = draft.double(), pre.double(), head.double()
    cache = kernels.transition_cache(draft, pre, ids, anchor, head)
    assert torch.equal(cache, draft.transition_cache(pre, ids, anchor, head))
    code = torch.randn(1, 24).double()
    assert torch.equal(kernels.adjacent_injection(draft.injection, 0, pre[None], code),
                       draft.injection(0, pre[None], code))
    assert kernels.select_path(cache.double(), ids)[2].dtype == torch.float64
    probs, proposal, uniform = verify_case(3, 3, 97, "random", torch.Generator())
    assert kernels.verify_sampled(probs.double(), proposal, uniform) == \
        dspine.verify_sampled(probs.double(), proposal, uniform)
    assert kernels.verify_greedy(probs.double(), proposal.tokens) == \
        dspine.verify_greedy(probs.double(), proposal.tokens)


# -------------------------------------------------------------------------------------------------
# Choosing kernels; the graphed draft
# -------------------------------------------------------------------------------------------------


def prepared(draft, S=9):
    """A draft and the state that a target of random embeddings would give it."""
    c, dtype = draft.config, draft.fc.weight.dtype
    embed, head = torch.randn(2, c.vocab_size, c.hidden_size, device=DEVICE).to(dtype)
    state = dspine.DraftState(embed, head, head)
    if S:
        draft.extend_context(state, torch.randn(S, draft.fc.in_features, device=DEVICE).to(dtype))
    return state


class Target:
    """What DSpine.start reads of one."""

    def __init__(self, draft, state):
        holder = lambda weight: type("Head", (), {"weight": weight})()
        text = type("Text", (), {"num_hidden_layers": draft.config.num_target_layers})()
        self.config = type("Config", (), {"get_text_config": lambda self: text})()
        self.get_input_embeddings = lambda: holder(state.embed)
        self.get_output_embeddings = lambda: holder(state.lm_head)


@with_triton
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kernels_in_a_draft_step(temperature):
    """One switch: the proposals of `on` are those of `off`."""
    draft = kernel_draft(B=6, K=4).to(DEVICE)
    state, taps = prepared(draft), torch.randn(2, draft.fc.in_features, device=DEVICE)
    proposals = []
    for setting in ("off", "on"):
        draft.use_kernels(setting)
        generator = torch.Generator(DEVICE).manual_seed(5)
        proposals.append(draft.propose(copy.copy(state), taps, 7, 5, temperature=temperature,
                                       generator=generator))
    off, on = proposals
    assert torch.equal(off.tokens, on.tokens) and torch.equal(off.candidate_ids, on.candidate_ids)
    torch.testing.assert_close(off.probs, on.probs, atol=1e-4, rtol=1e-3)


def test_kernels_auto_needs_cuda_and_on_says_what_is_missing(monkeypatch):
    draft = kernel_draft()
    assert draft.kernels == "auto" and dspine.operations("auto", draft.fc.weight) is Plain
    assert draft.use_kernels("off") is draft and draft.kernels == "off"
    monkeypatch.setattr(kernels, "INTERPRET", False)
    with pytest.raises(ValueError, match="Triton and the current CUDA device.*are on cpu: use"):
        draft.use_kernels("on")
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="Triton is missing"):
        draft.use_kernels("on")
    for other in None, SimpleNamespace():  # no such file; the package of that name
        monkeypatch.setitem(sys.modules, "kernels", other)
        with pytest.raises(ValueError, match="kernels.py is missing"):
            draft.use_kernels("on")
    with pytest.raises(ValueError, match="kernels = 'fast': must be"):
        draft.use_kernels("fast")
    assert draft.kernels == "off"
    with pytest.raises(ValueError, match="GraphedDraft needs Triton"):
        kernels.GraphedDraft(draft, None)


class OnCuda:
    """What operations() reads of a tensor, on a device that may not be here."""
    is_cuda, device = True, DEVICE


@with_triton
def test_kernels_auto_uses_them_where_they_agree_and_a_copied_file_goes_without(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda x: True)
    kernels.agree.cache_clear()
    state, seeded = torch.get_rng_state(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(action="error"):
            assert dspine.operations("auto", OnCuda) is kernels
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state) and not seeded         # the user's seeds stay
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert dspine.operations("auto", OnCuda) is Plain


def test_kernels_serve_the_current_cuda_device_alone(monkeypatch):
    monkeypatch.setattr(kernels, "triton", "there")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, device.index))
    on = lambda index: SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
    for interpret, want in (False, [False, True, False]), (True, [False, False, True]):
        monkeypatch.setattr(kernels, "INTERPRET", interpret)
        assert [kernels.available(x) for x in (on(0), on(1), torch.ones(1))] == want
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert torch.version.hip or not kernels.available(on(1))


def test_plain_decoding_asks_for_no_kernels(monkeypatch):
    """Nor does copying alone: without a draft there is no switch to turn them off."""
    target, asked = tiny(), []
    monkeypatch.setattr(dspine, "operations", lambda setting, x: (asked.append(setting), Plain)[1])
    collect(generate_plain(target, prompt(5), max_new_tokens=6))
    collect(generate(target, None, prompt(5), max_new_tokens=6, copy=True))
    assert set(asked) == {"off"}


def breaks(*args, **options):
    raise RuntimeError("no such instruction\nat line 3")


@with_triton
@pytest.mark.parametrize("name, broken, said", [
    ("adjacent_injection", lambda *given: Injection.forward(*given) + 2e-3,
     "adjacent_injection in torch.float32$"),
    ("transition_cache", lambda draft, pre, ids, *_: torch.full((*ids.shape, 16), torch.nan),
     "transition_cache in torch.float32, transition_cache in torch.float16,"),
    ("select_path", lambda *given, **options: (dspine.select_path(*given, **options)[0] + 1,),
     "select_path, select_path, sampled$"),
    ("verify_greedy", lambda *given: (5, 1), "verify_greedy, verify_greedy, verify_greedy$"),
    ("verify_sampled", lambda *given: (3, 1), "verify_sampled, verify_sampled, verify_sampled$"),
    ("verify_greedy", breaks, "RuntimeError: no such instruction$")])
def test_kernels_auto_leaves_off_what_disagrees(name, broken, said, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda x: True)
    for function in ("adjacent_injection", "transition_cache", "select_path", "verify_greedy",
                     "verify_sampled"):  # the twins agree with themselves, and are faster here
        monkeypatch.setattr(kernels, function, getattr(Plain, function))
    assert list(kernels.disagreements(DEVICE)) == []
    monkeypatch.setattr(kernels, name, broken)
    kernels.agree.cache_clear()
    with pytest.warns(UserWarning, match=f"kernels are off .*: {said}"):
        assert dspine.operations("auto", OnCuda) is Plain
    with warnings.catch_warnings(action="error"):
        assert dspine.operations("auto", OnCuda) is Plain                   # said once
    kernels.agree.cache_clear()


@pytest.mark.parametrize("first", ["import kernels", "from kernels.inner import Mode"])
def test_kernels_stand_in_for_the_package_they_hide(first, tmp_path, monkeypatch):
    """transformers imports Hugging Face's package `kernels`, which this folder's file hides."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from kernels.inner import Mode\n"
                                                      "__version__ = '9'\n")
    (tmp_path / "kernels" / "inner.py").write_text("class Mode: pass\n")
    code = (f"{first}; import kernels; from kernels import Mode, __version__, agree; "
            "import kernels.inner; assert Mode is kernels.inner.Mode; "
            "print(__version__, agree.__module__)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0 and run.stdout.strip() == "9 kernels", run.stderr
    monkeypatch.setattr(kernels, "__path__", [])                            # it is not installed
    assert not hasattr(kernels, "Mode") and not hasattr(kernels, "__wrapped__")


@pytest.mark.parametrize("block", ["", "sys.modules['triton'] = None; "])
def test_kernels_import_without_a_gpu_or_triton(block):                     # E01
    code = (f"import sys; {block}import dspine, torch; assert 'kernels' not in sys.modules; "
            "import kernels; x = torch.ones(1, 2, 3); assert not kernels.available(x); "
            "assert dspine.operations('auto', x) is dspine.Plain; "
            "print(kernels.select_path(torch.ones(1, 2, 2).double(), torch.arange(2)[None])[0])")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env=env | {"CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0 and run.stdout.strip() == "tensor([0])", run.stderr


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphed_kernel_steps_equal_plain_steps(temperature):
    """Steps of 1 .. B new positions over bucket borders, a short block, two requests in turn."""
    draft = kernel_draft(B=6, K=4).to(DEVICE)
    if temperature:
        draft.set_draft_vocab(torch.arange(0, draft.config.vocab_size, 3))
    states = [prepared(draft, S) for S in (9, 40)]
    graphed = kernels.GraphedDraft(draft, Target(draft, states[0]), max_context=60, capture=ON_GPU)
    graphed.buckets = [16, 32, 60]
    for state in states:
        state.embed, state.lm_head = graphed.embed, graphed.lm_head
        state.draft_head = graphed.draft_head
    pairs = [(copy.copy(state), state) for state in states]
    generators = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    replayed, replay, seen = [], graphed.replay, []
    graphed.replay = lambda *key: (replayed.append(key), replay(*key))[1]
    for i in range(22):
        mine, theirs = pairs[i % 7 == 3]
        taps = torch.randn(1 + i * 5 % 6, draft.fc.in_features, device=DEVICE)
        given = taps, i, 3 if i == 8 else 5
        draft.watch = seen.append if i == 12 else None
        got, want = (drafter.propose(state, *given, temperature=temperature, generator=generator)
                     for drafter, state, generator in ((graphed, mine, generators[0]),
                                                       (draft, theirs, generators[1])))
        assert torch.equal(got.tokens, want.tokens) and mine.length == theirs.length
        assert torch.equal(got.candidate_ids, want.candidate_ids)
        torch.testing.assert_close(got.probs, want.probs, atol=1e-4, rtol=1e-3)
    assert {bucket for bucket, _ in replayed} == {16, 32, 60} and len(replayed) < 22
    assert len(seen) == 2 and torch.equal(seen[0].rows, seen[1].rows)  # watched steps are plain


def test_graphed_kernel_step_of_several_requests():
    draft = kernel_draft(B=4, K=3).to(DEVICE)
    states = [prepared(draft, S) for S in (5, 12)]
    graphed = kernels.GraphedDraft(draft, Target(draft, states[0]), requests=2, max_context=40,
                                   capture=ON_GPU)
    taps, counts = torch.randn(2, 3, draft.fc.in_features, device=DEVICE), [1, 3]
    for i, state in enumerate(states):
        state.embed, state.lm_head = graphed.embed, graphed.lm_head
        state.draft_head = graphed.draft_head
        graphed.load(i, state)
    got = graphed.step(taps, [5, 12], counts, [8, 9])
    for i, state in enumerate(states):
        want = draft.propose(state, taps[i, :counts[i]], 8 + i, 3)
        assert torch.equal(got.tokens[i], want.tokens)
    graphed.taps.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="not finite"):
        graphed.step(graphed.taps.clone(), [5, 12], counts, [8, 9])


# -------------------------------------------------------------------------------------------------
# Kernels compiled for GPUs that are not here; the latency table
# -------------------------------------------------------------------------------------------------


@with_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's ptxas is a Linux program")
def test_kernels_compile_without_spills(tmp_path):
    """Every launch at the published size (H 4096, r 1024, m 512, K 16, B 16), sm_80 and sm_90."""
    run = subprocess.run([sys.executable, ROOT / "bench" / "compile_kernels.py"], text=True,
                         capture_output=True, env=os.environ | {
                             "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    print(run.stdout)
    assert run.returncode == 0 and "NOT FINE" not in run.stdout, run.stdout + run.stderr
    names = {name for name in vars(kernels) if name.endswith("_kernel")}
    for sm in ("sm_80", "sm_90"):
        assert {line.split()[0] for line in run.stdout.splitlines() if sm in line} == names
    assert len(names) == 10


def test_kernel_latency_table(tmp_path, monkeypatch, capsys):
    """The script at a tiny size: every row, the bars, and a JSON file that holds both."""
    spec = importlib.util.spec_from_file_location("latency", ROOT / "bench" / "latency.py")
    latency = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(latency)
    small = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, transfer_rank=12, message_size=10, top_k=4,
                 block_size=4, vocab_size=97, num_target_layers=6)
    monkeypatch.setattr(latency, "SIZES", {"default": small, "published": small})
    flags = ["--devices", "cpu", "--repeats", "2", "--context", "8", "--json",
             str(tmp_path / "x" / "l.json")]
    assert latency.run(latency.parse_args(flags)) == 0
    out, tables = capsys.readouterr().out, json.loads((tmp_path / "x" / "l.json").read_text())
    assert [t["size"] for t in tables] == ["default", "published"]
    for table in tables:
        assert {"backbone", "injections", "head + top-k", "cache + path", "draft step",
                "Markov head", "GRU head", "refinement", "refinement, prepared",
                "target, 4 tokens", "target, 1 token"} <= table["milliseconds"].keys()
        assert all(ms > 0 for ms in table["milliseconds"].values())
    assert "injections / draft step" in out and len(tables[1]["bars"]) == 3
    assert os.listdir(tmp_path / "x") == ["l.json"]                         # no part file is left


def test_kernel_latency_serial_heads_agree(monkeypatch):
    """Validate, then time: both refinements choose what the transition cache chooses."""
    spec = importlib.util.spec_from_file_location("latency", ROOT / "bench" / "latency.py")
    latency = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(latency)
    draft, pre, ids, _, head = cache_case(5, 6, (), 1.0)
    anchor = torch.tensor(7)
    want = dspine.select_path(draft.transition_cache(pre, ids, anchor, head), ids)[0]
    assert torch.equal(latency.refinement(draft, pre, ids, anchor[None], head), want)
    assert torch.equal(latency.prepared_refinement(draft, pre, ids, anchor[None], head), want)
