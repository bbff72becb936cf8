"""Tests of kernels.py and its bench scripts; a section of test_dspine.py.

Triton decides at import whether it interprets, so the first line must run before anything imports
it. TRITON_INTERPRET=0 on a machine with a GPU runs the same tests there, in bfloat16 too.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")                              # before triton

import copy
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dspine
import kernels
from dspine import DSpine, DSpineConfig, Injection, Plain, Proposal

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent

# -------------------------------------------------------------------------------------------------
# Kernels against their twins
# -------------------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available() and not kernels.INTERPRET
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
DTYPES = [torch.float32] + [torch.bfloat16] * ON_GPU  # the interpreter has no bfloat16 (E03)
EPS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # error over the largest value, against float64
with_triton = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")


def random_draft(H=40, r=24, m=20, K=3, B=5, V=97, spread=1.0):
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
    draft = random_draft(H=H, r=r, m=m, B=max(B, 2))
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
    draft = random_draft(K=K, B=T + 1, spread=spread, V=V, H=H)
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
    draft.load_state_dict(random_draft(K=3, B=3).state_dict())
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
    state = dspine.DraftState(embed, head)
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
    draft = random_draft(B=6, K=4).to(DEVICE)
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
    draft = random_draft()
    assert dspine.operations("auto", draft.fc.weight) is Plain
    assert draft.use_kernels("off") is draft
    monkeypatch.setattr(kernels, "INTERPRET", False)
    with pytest.raises(ValueError, match="needs Triton and a CUDA device.*the tensors on cpu"):
        draft.use_kernels("on")
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="Triton is missing"):
        draft.use_kernels("on")
    with pytest.raises(ValueError, match="kernels = 'fast': must be"):
        draft.use_kernels("fast")
    assert draft.kernels == "off"
    with pytest.raises(ValueError, match="GraphedDraft needs Triton"):
        kernels.GraphedDraft(draft, None)


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
    draft = random_draft(B=6, K=4).to(DEVICE)
    states = [prepared(draft, S) for S in (9, 40)]
    graphed = kernels.GraphedDraft(draft, Target(draft, states[0]), max_context=60, capture=ON_GPU)
    graphed.buckets = [16, 32, 60]
    for state in states:
        state.embed, state.lm_head = graphed.embed, graphed.lm_head
    pairs = [(copy.copy(state), state) for state in states]
    generators = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    replayed, replay = [], graphed.replay
    graphed.replay = lambda *key: (replayed.append(key), replay(*key))[1]
    for i in range(22):
        mine, theirs = pairs[i % 7 == 3]
        taps = torch.randn(1 + i * 5 % 6, draft.fc.in_features, device=DEVICE)
        given = taps, i, 3 if i == 8 else 5
        got, want = (drafter.propose(state, *given, temperature=temperature, generator=generator)
                     for drafter, state, generator in ((graphed, mine, generators[0]),
                                                       (draft, theirs, generators[1])))
        assert torch.equal(got.tokens, want.tokens) and mine.length == theirs.length
        assert torch.equal(got.candidate_ids, want.candidate_ids)
        torch.testing.assert_close(got.probs, want.probs, atol=1e-4, rtol=1e-3)
    assert {bucket for bucket, _ in replayed} == {16, 32, 60} and len(replayed) < 22


def test_graphed_kernel_step_of_several_requests():
    draft = random_draft(B=4, K=3).to(DEVICE)
    states = [prepared(draft, S) for S in (5, 12)]
    graphed = kernels.GraphedDraft(draft, Target(draft, states[0]), requests=2, max_context=40,
                                   capture=ON_GPU)
    taps, counts = torch.randn(2, 3, draft.fc.in_features, device=DEVICE), [1, 3]
    for i, state in enumerate(states):
        state.embed, state.lm_head = graphed.embed, graphed.lm_head
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
    monkeypatch.setattr(sys, "argv", ["latency.py", "--devices", "cpu", "--repeats", "2",
                                      "--context", "8", "--json", str(tmp_path / "x" / "l.json")])
    assert latency.main() == 0
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
