import json, os, re, shlex, shutil, subprocess, sys
from pathlib import Path
import pytest, torch
import dspine
import generate as program
import train_small as training
ROOT = Path(__file__).resolve().parent
GOLDEN = ROOT / "assets"
torch.set_num_threads(1)
# ---------------------------------------------------------------------------------------------
# generate.py
# ---------------------------------------------------------------------------------------------


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
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<p>", unk_token="<u>",
                                   additional_special_tokens=["<spare>"])
    fast.chat_template = ("{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<e>' }}{% endfor %}"
                          "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}")
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, max_position_embeddings=512,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_draft(small, tmp_path_factory):
    """An untrained draft for `small`, with writes that do something."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    torch.manual_seed(4)
    draft = dspine.DSpine.for_target(dspine.DSpineConfig.for_target(
        target, 2, block_size=5, transfer_rank=12, message_size=8, top_k=4, mask_token_id=259), target)
    for write in draft.injection.writes:
        torch.nn.init.normal_(write.weight, std=0.3)
    folder = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(folder)
    return folder


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
    assert cut.push(tokenizer("🎉").input_ids[:-1]) == "" and cut.end() == "\ufffd" and cut.end() == ""


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
])
def test_bad_input_is_one_line(small, small_draft, capsys, flags, message):
    if "cuda" in flags[-1] and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    base = ["--prompt", "hi", "--target", str(small), "--draft", str(small_draft), "--dtype", "float32"]
    assert program.main(base + flags) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_draft_of_another_target_is_refused(small, tmp_path, capsys):
    """R04 at the command line: both values are named before anything is emitted."""
    shutil.copytree(GOLDEN / "golden_a", tmp_path / "d")
    assert program.main(["--prompt", "hi", "--target", str(small), "--draft", str(tmp_path / "d"), "--dtype", "float32"]) == 1
    out = capsys.readouterr()
    assert "vocab_size is 64, the target's is 264" in out.err and out.out == ""


@pytest.mark.parametrize("flags", [[], ["--no-copy"], ["--temperature", "0.8"], ["--block-size", "2"], ["--raw"]])
def test_command_line(small, small_draft, capsys, flags):
    base = ["--prompt", "hi", "--target", str(small), "--draft", str(small_draft), "--dtype", "float32", "--max-new-tokens", "24"]
    assert program.main(base + flags + ["--compare"]) == 0
    out = capsys.readouterr()
    count = re.search(r"\[(\d+) tokens \(", out.err).group(1)
    assert 1 <= int(count) <= 24 and "acceptance length" in out.err
    assert ("equal in distribution" if "--temperature" in flags else f"equal to plain decoding ({count} tokens)") in out.out


def test_quiet_prints_the_answer_alone(small, small_draft, capsys):
    args = ["--prompt", "hi", "--target", str(small), "--draft", str(small_draft), "--dtype", "float32", "--quiet"]
    assert program.main(args + ["--max-new-tokens", "8"]) == 0
    target, tokenizer = program.load_target(str(small), torch.float32, "cpu")
    ids = program.build_prompt(tokenizer, "hi")
    plain, _ = dspine.collect(dspine.generate_plain(target, ids, max_new_tokens=8, eos_token_ids=program.eos_ids(target, tokenizer)))
    out = capsys.readouterr()
    assert out.out == tokenizer.decode(plain, skip_special_tokens=True) + "\n" and out.err == ""


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
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [line for block in text.split("```sh\n")[1:] for line in block.split("```")[0].splitlines() if line.strip()]


def test_readme_commands_exist():
    """Trap 1: the advertised path is the tested one."""
    commands = "\n".join(readme_commands())
    assert 'pip install -r requirements.txt && python generate.py --prompt "Explain why the sky is blue."' in commands
    assert "pip install -r requirements.txt && pytest -q" in commands


def test_the_real_target_exactly_as_in_readme():
    """README's first command (its second half), then the same in float32 against plain decoding."""
    command = next(c for c in readme_commands() if "generate.py" in c).split("&& ")[1]
    words = [sys.executable, *shlex.split(command)[1:]]
    first = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout) > 200 and "sky" in first.stdout and "acceptance length" in first.stderr
    second = subprocess.run([*words, "--compare", "--dtype", "float32", "--max-new-tokens", "64"], cwd=ROOT,
                            capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert second.returncode == 0, second.stderr
    assert "equal to plain decoding (64 tokens)" in second.stdout


# ---------------------------------------------------------------------------------------------
# Copying from the context
# ---------------------------------------------------------------------------------------------


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
    """Greedy equals plain at every budget, an end token inside a copied run included; sources add up."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    draft = program.load_draft(small_draft, target) if with_draft else None
    ids = torch.tensor([[9, 8, 7, 6, 9, 8, 7, 6, 9, 8]])
    plain, _ = dspine.collect(dspine.generate_plain(target, ids, max_new_tokens=60))
    copied = 0
    for budget in (1, 2, 5, 60):
        tokens, stats = dspine.collect(dspine.generate(target, draft, ids, max_new_tokens=budget, block_size=block_size, copy=True))
        assert tokens == plain[:budget] and sum(stats.emitted_by.values()) == budget
        copied += stats.emitted_by["copy"]
    for end in sorted(set(plain))[:12]:
        tokens, stats = dspine.collect(dspine.generate(
            target, draft, ids, max_new_tokens=60, block_size=block_size, copy=True, eos_token_ids=end))
        assert tokens == plain[:plain.index(end) + 1] and stats.finish_reason == "eos"
        assert sum(stats.emitted_by.values()) == len(tokens) == 1 + sum(stats.accept_lengths)


def test_draft_reads_the_same_context_after_copied_rounds(small, small_draft):
    """After rounds that copied, the draft's context equals that of a run that never did."""
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    seen = {}

    class Watching(dspine.DSpine):
        def propose(self, state, context_states, anchor_id, length, **options):
            proposal = super().propose(state, context_states, anchor_id, length, **options)
            seen.setdefault(self.copying, {})[state.length] = [k.clone() for k, _ in state.keys_values]
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


# ---------------------------------------------------------------------------------------------
# train_small.py
# ---------------------------------------------------------------------------------------------


def make_trainer(small, out, rows=None, seed=0, flags=()):
    """A Trainer on hand-made rows of unequal length."""
    args = training.parse_args(["--target", str(small), "--out", str(out), "--steps", "10", "--layers", "2", "--block-size", "4",
                                "--rank", "12", "--message", "8", "--top-k", "4", "--anchors", "6", "--lr", "1e-3", "--no-progress",
                                "--no-compile", "--batch-rows", "4", *flags])
    target, _ = program.load_target(str(small), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(5)
    rows = rows or [{"ids": torch.randint(1, 250, (n,), generator=generator).tolist(), "prompt_length": 4}
                    for n in (9, 30, 17, 24, 12, 21)]
    torch.manual_seed(seed)
    config = dspine.DSpineConfig.for_target(target, 2, block_size=4, transfer_rank=12, message_size=8, top_k=4, mask_token_id=259,
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
    found = {(int(anchors[0, a]), int(t) + 1, int(labels[0, a, t])) for _, a, t in supervised.nonzero()}
    assert found == {(1, 1, 7), (1, 2, 8), (1, 3, 9), (2, 1, 8), (2, 2, 9), (2, 3, 10), (3, 1, 9), (3, 2, 10), (4, 1, 10)}


def test_supervision_stops_at_the_first_gap():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    anchors = torch.tensor([[0, 1, 3]])
    supervised = dspine.supervised_slots(mask, anchors, torch.tensor([[True, True, False]]), 4)
    assert supervised.tolist() == [[[True, True, False], [True, False, False], [False] * 3]]


def test_loss_of_a_block_ignores_features_from_its_anchor_on(small, tmp_path):
    """Overlapping anchors included: changing taps at or behind an anchor leaves that block's loss."""
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
        return dspine.objective(t.draft, out, ids, anchors, supervised, last, t.head, beta=0.5)[0].item()
    for block, anchor in enumerate(anchors[0].tolist()):
        late, early = taps.clone(), taps.clone()
        late[:, anchor:] += torch.randn_like(late[:, anchor:])
        early[:, anchor - 1] += 1.0
        assert loss_of(block, late) == pytest.approx(loss_of(block, taps), abs=1e-6)
        assert abs(loss_of(block, early) - loss_of(block, taps)) > 1e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_fused_losses_equal_the_plain_ones(softcap, compiled):
    """Values, gradients and candidates of the hand-written pass, chunks cutting through positions."""
    if compiled and not training.use_compiler("cpu"):
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    c = dspine.DSpineConfig.from_dict(json.loads((GOLDEN / "golden_a" / "config.json").read_text(encoding="utf-8")))
    hidden, refined = (torch.randn(37, 24, requires_grad=True) for _ in range(2))
    lm_head, teacher = torch.randn(1024, 24), torch.randn(9, 24) * 0.5
    index = torch.randint(9, (37,)).sort().values.unique_consecutive(return_inverse=True)[1]
    labels, w = torch.randint(1024, (37,)), torch.rand(37)
    run = lambda f, chunk: f(hidden, refined, labels, w, teacher, index, lm_head, c, 0.3, softcap, chunk)
    (a, sums_a, top_a), (b, sums_b, top_b) = run(dspine.chunked_losses, 37), run(training.fused_losses, 8)
    torch.testing.assert_close((b, sums_b, top_b), (a, sums_a, top_a), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(b, (hidden, refined)), torch.autograd.grad(a, (hidden, refined)), atol=1e-4, rtol=1e-4)
    training._vocabulary_pass = training.vocabulary_pass


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
    second = make_trainer(small, tmp_path / "b", seed=99)
    training.train(second)
    assert straight.step == second.step == 10 and torch.equal(weights(straight), weights(second))
    log = lambda folder: [(r["step"], r["l1"]) for r in map(json.loads, (tmp_path / folder / "log.jsonl").read_text().splitlines())]
    assert log("a") == log("b") and len(log("a")) == 10
    with pytest.raises(ValueError, match="other sizes"):
        training.train(make_trainer(small, tmp_path / "b", flags=("--inject", "none")))


def test_every_parameter_moves_and_the_target_stays(small, tmp_path):
    """T05, T06: after 100 steps none is unmoved; the optimizer holds exactly the draft's parameters."""
    t = make_trainer(small, tmp_path, flags=("--steps", "100"))
    before = {n: p.detach().clone() for n, p in t.draft.named_parameters()}
    frozen = {n: p.clone() for n, p in t.target.named_parameters()}
    training.train(t)
    assert [n for n, p in t.draft.named_parameters() if torch.equal(p, before[n])] == []
    assert all(torch.equal(p, frozen[n]) and not p.requires_grad for n, p in t.target.named_parameters())
    held = {id(p) for g in t.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in t.draft.parameters()} and len(held) == len(before)


def test_a_non_finite_loss_stops_with_the_step(small, tmp_path):
    t = make_trainer(small, tmp_path)
    training.train(t, stop_at=2)
    with torch.no_grad():
        t.draft.fc.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="step 2"):
        t.train_step()


@pytest.mark.parametrize("flags", [("--inject", "none", "--supervise", "none", "--attention", "bidirectional", "--select", "argmax"),
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


def test_loops_are_cut():
    assert training.cut_loop([1, 2, 3, 4] + [7, 8, 9, 5] * 4) == [1, 2, 3, 4, 7, 8, 9, 5]
    assert training.cut_loop([1] + [2] * 20) == [1, 2]
    fine = list(range(30)) + list(range(30))
    assert training.cut_loop(fine) == fine and training.cut_loop([]) == []


def test_repetition_and_summary():
    """P01, P03: emitted tokens only; a loop shows in the repetition figure."""
    assert training.repetition(list(range(20))) == 0 and training.repetition([1, 2] * 20) > 0.9
    run = lambda lengths, seconds: {"accept_lengths": lengths, "decode_seconds": seconds, "prefill_seconds": 0.1,
                                    "repetition": 0.0, "new_tokens": 1 + sum(lengths)}
    table = training.summarise([{"plain": run([1] * 6, 6.0), "x": run([3, 2, 1], 2.0)}] * 3)
    assert table["x"]["acceptance_length"] == 2 and table["x"]["ratio"] == 3 and table["x"]["histogram"] == {1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("text, prompts", [('{"turns": ["a", "b"]}\n{"prompt": "c"}\n', ["a", "c"]), ("one\n\ntwo\n", ["one", "two"]),
                                           ('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}', ["u"])])
def test_prompt_files(tmp_path, text, prompts):
    (tmp_path / "p").write_text(text, encoding="utf-8")
    assert training.read_prompts(str(tmp_path / "p")) == prompts


@pytest.mark.parametrize("content, message", [("", "holds no prompt"), ('{"answer": 1}', "line 1: neither")])
def test_useless_prompt_files_are_refused(small, tmp_path, capsys, content, message):
    """T09."""
    (tmp_path / "p").write_text(content, encoding="utf-8")
    args = ["--target", str(small), "--out", str(tmp_path / "o"), "--prompts", str(tmp_path / "p"), "--dtype", "float32", "--no-progress"]
    assert training.main(args) == 1
    assert message in capsys.readouterr().err


TINY_RUN = ["--corpus-tokens", "900", "--answer-tokens", "24", "--prompt-tokens", "8", "--rows", "6", "--steps", "4", "--layers", "2",
            "--block-size", "4", "--rank", "12", "--message", "8", "--top-k", "4", "--anchors", "6", "--eval-prompts", "2",
            "--eval-tokens", "8", "--dtype", "float32", "--no-compile", "--device", "cpu"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{i * i} is {i} squared," for i in range(200)), encoding="utf-8")
    return path


def run_training(small, text_file, out, launcher=(), flags=()):
    command = [sys.executable, *launcher, str(ROOT / "train_small.py"), "--target", str(small), "--text", str(text_file), "--out", str(out),
               *TINY_RUN, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


def test_training_end_to_end(small, text_file, tmp_path, capsys):
    """Nothing in, a draft out that generate.py loads; the second run skips what is there."""
    done = run_training(small, text_file, tmp_path)
    assert "temperature 1" in done.stdout and "rows cut where they loop" in done.stderr + done.stdout
    rows = training.read_rows(tmp_path / "corpus.jsonl")
    assert any(r["held_out"] for r in rows) and {r["temperature"] > 0 for r in rows} == {True, False}
    assert program.main(["--prompt", "hi", "--target", str(small), "--draft", str(tmp_path), "--dtype", "float32", "--compare",
                         "--max-new-tokens", "12"]) == 0
    assert "equal to plain" in capsys.readouterr().out
    names = {k for k in safe_keys(tmp_path / "model.safetensors")}
    assert not any("embed" in k or "lm_head" in k for k in names)  # T10: only the draft's own tensors
    before = (tmp_path / "corpus.jsonl").read_bytes(), len((tmp_path / "log.jsonl").read_text().splitlines())
    run_training(small, text_file, tmp_path)
    assert before == ((tmp_path / "corpus.jsonl").read_bytes(), len((tmp_path / "log.jsonl").read_text().splitlines()))


def test_two_processes_equal_one(small, text_file, tmp_path):
    """DistributedDataParallel over gloo: the same weights as accumulating in one process."""
    from safetensors.torch import load_file
    common = ("--eval-prompts", "0", "--batch-rows", "4")
    run_training(small, text_file, tmp_path / "one", flags=common)
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=lambda *_: {"checkpoint.pt", "model.safetensors", "log.jsonl"})
    run_training(small, text_file, tmp_path / "two", ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), common)
    one, two = (load_file(tmp_path / k / "model.safetensors") for k in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-4, msg=name)


def safe_keys(path):
    from safetensors import safe_open
    with safe_open(path, "pt") as file:
        return list(file.keys())
