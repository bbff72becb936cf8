"""DSpine and its family on equal terms: trained alike, then decoded in turn.

    python bench/family.py PROMPTS                                            # the family
    python bench/family.py PROMPTS --methods full no-supervision token-ce last none dflash-l1

Every method trains on the same backbone, corpus, rows, anchors, budget of draft tokens and seeds,
through train_small.Trainer, in --out/METHOD-SEED; then all of them decode every prompt of PROMPTS
(as in bench/evaluate.py) in turn, beside plain decoding and transformers' own generate and prompt
lookup. The same command goes on where a stopped run was and skips what is finished. Tables in
Markdown, one of the losses on rows that were not trained on; everything also in --out/results.json.

METHODS below is the whole list. The budget counts supervised tokens: EAGLE-3, which supervises
fewer slots of a block, sees more blocks for it.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import heads  # noqa: E402
import train_small as training  # noqa: E402
from dspine import DSpine  # noqa: E402
from evaluate import conditions, decode_sets, read_sets, transformers_method  # noqa: E402
from generate import (HelpFormatter, default_device, eos_ids, guarded,  # noqa: E402
                      load_target)

# name: (class, what it changes of train_small's options)
HEAD = dict(supervise="none")  # heads have no features of layers
METHODS = {
    "dflash": (heads.DFlash, HEAD | dict(ce_start=1.0, ce_end=1.0)),  # ce alone
    "dspark": (heads.DSpark, HEAD),
    "domino": (heads.Domino, HEAD),
    "dflash2": (heads.DFlash2, HEAD),
    "eagle3": (heads.Eagle3, HEAD),
    "dspine": (DSpine, {}),
    # ablations of DSpine
    "no-supervision": (DSpine, dict(supervise="none")),
    "token-ce": (DSpine, dict(supervise="token-ce")),
    "last": (DSpine, dict(inject="last")),
    "none": (DSpine, dict(inject="none")),
    "dflash-l1": (DSpine, dict(inject="none", supervise="none", attention="bidirectional",
                               select="argmax")),  # DFlash's form, DSpine's loss
}
FAMILY = "dflash", "dspark", "domino", "dflash2", "eagle3", "dspine"
ALIASES = {"full": "dspine"}
SET_BY_METHOD = "inject", "supervise", "attention", "select"
NOT_IN_RESULTS = "cache_gb", "save_seconds", "no_compile", "chunk", "micro_rows"

# -------------------------------------------------------------------------------------------------
# Training
# -------------------------------------------------------------------------------------------------


class HeadTrainer(training.Trainer):
    """A head brings its own loss, and may supervise fewer slots."""

    def __init__(self, args, draft: heads.Head, target, rows, out, states):
        super().__init__(args, draft, target, rows, out, states)
        self.losses = draft.losses

    def teacher(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden  # heads compute P on the whole vocabulary

    def blocks(self, i: int):
        anchors, supervised, replace = super().blocks(i)
        supervised[..., self.draft.trained_slots:] = False
        return anchors, supervised, replace


def training_options() -> list[str]:
    """Names of the options that decide what a trained draft is."""
    p = argparse.ArgumentParser()
    training.add_training_options(p)
    return sorted(set(vars(p.parse_args([]))) - set(NOT_IN_RESULTS))


def make_method(name: str, args, target, tokenizer, rows) -> DSpine:
    """The fresh draft of a method: the same backbone for all of one seed."""
    kind, _ = METHODS[name]
    draft = training.make_draft(args, target, tokenizer)
    if args.draft_vocab:
        draft.set_draft_vocab(training.frequent_tokens(rows, args.draft_vocab,
                                                       draft.config.vocab_size))
    return draft if kind is DSpine else kind.from_backbone(draft)


def make_trainer(args, draft: DSpine, target, rows: list[dict], out: Path) -> training.Trainer:
    kind = training.Trainer if type(draft) is DSpine else HeadTrainer
    return kind(args, draft, target, rows, out, Path(args.out))


def train_method(name: str, args, target, tokenizer, rows: list[dict]) -> dict:
    """Train a method in --out/METHOD-SEED unless that is done; what its run.json says.

    ValueError where the folder belongs to a run with other options, corpus or target.
    """
    out = Path(args.out) / f"{name}-{args.seed}"
    out.mkdir(parents=True, exist_ok=True)
    corpus = hashlib.sha256(json.dumps([[r["ids"], r["prompt_length"]] for r in rows]).encode())
    options = {k: getattr(args, k) for k in training_options()}
    made_for = {**options, "corpus": corpus.hexdigest()[:12],
                "target": training.fingerprint(target)}
    path = out / "run.json"
    run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if run and run["made_for"] != made_for:
        other = [k for k in made_for if run["made_for"].get(k) != made_for[k]]
        raise ValueError(f"{out} was trained with another {', '.join(other)}: "
                         "use another --out or remove it")
    if run.get("finished"):
        return run
    training.write_json(path, {"made_for": made_for})
    draft = make_method(name, args, target, tokenizer, rows)
    trainer = make_trainer(args, draft, target, rows, out)
    size = sum(p.numel() for p in draft.parameters())
    tqdm.write(f"{out}: {size / 1e6:.1f} M parameters", file=sys.stderr)
    training.train(trainer)
    draft.to(target.dtype).requires_grad_(False).eval().save_pretrained(out, slim=True)
    run = {"made_for": made_for, "finished": True, "parameters": size, "steps": trainer.step,
           "draft_tokens": trainer.tokens, "seconds": round(trainer.seconds, 1)}
    training.write_json(path, run)
    (out / "checkpoint.pt").unlink()  # mostly the optimizer
    return run


def unseen_losses(name: str, args, target, rows: list[dict]) -> dict:
    """The objective's terms on rows that a trained method did not see, the same blocks for all
    methods of a seed: over the slots it trains, which are fewer for EAGLE-3. Empty without rows."""
    kind, _ = METHODS[name]
    out = Path(args.out) / f"{name}-{args.seed}"
    trainer = make_trainer(args, kind.from_pretrained(out, target), target, rows, out)
    trainer.progress = lambda: 1.0  # nothing is replaced any more
    bar = tqdm(range(len(rows)), desc=f"losses of {out.name}", disable=args.no_progress)
    with torch.no_grad():
        return training.mean_terms([terms for i in bar for _, terms in
                                    trainer.forward([i], [trainer.blocks(i)])])


# -------------------------------------------------------------------------------------------------
# Decoding and tables
# -------------------------------------------------------------------------------------------------


def decoders(args, target, eos, drafts: dict, temperature: float) -> dict:
    """What decodes each prompt in turn, for decode_in_turn; ratios refer to the first, plain."""
    settings = eos, args.max_new_tokens, temperature
    block_size = "auto" if args.adaptive else args.block_size
    ours = lambda draft: training.decoding_methods(target, draft, *settings, block_size=block_size)
    hf = lambda **kind: transformers_method(target, *settings, **kind)
    return {"plain": ours(None)["plain"], "transformers": hf(),
            "prompt lookup": hf(prompt_lookup_num_tokens=10),
            **{name: ours(draft)["DSpine"] for name, draft in drafts.items()}}


def rows_of(tables: dict, methods: list[str], seeds: list[int]) -> dict:
    """A row a method -> summaries [set][seed]; baselines have one seed."""
    names = {name: [name] for name in ("plain", "transformers", "prompt lookup")}
    names |= {name: [f"{name}-{seed}" for seed in seeds] for name in methods}
    return {name: [[table[run] for run in runs] for table in tables.values()]
            for name, runs in names.items()}


def print_table(title: str, tables: dict, methods: list[str], seeds: list[int]):
    """Means over seeds, +- half the range over seeds; the last columns average over sets too."""
    columns = ["method", *tables, "mean acceptance", "draft ms", "tokens/s", "x plain",
               "repetition"]
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    mean = lambda xs: sum(xs) / len(xs)

    def cell(values: list[float]) -> str:
        spread = f" ±{(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
        return f"{mean(values):.2f}{spread}"
    for name, summaries in rows_of(tables, methods, seeds).items():
        lengths = [[t["acceptance_length"] for t in by_seed] for by_seed in summaries]
        over = lambda key: mean([t[key] for by_seed in summaries for t in by_seed])
        draft = f"{over('draft_milliseconds'):.1f}" if name in methods else "-"
        cells = [name, *map(cell, lengths), cell([mean(x) for x in zip(*lengths)]), draft,
                 f"{over('tokens_per_second'):.1f}", f"{over('ratio'):.2f}",
                 f"{over('repetition'):.2f}"]
        print(f"| {' | '.join(cells)} |")


def print_runs(runs: dict, unseen: int):
    """What was trained, and its losses on `unseen` rows, if there are any: ce, l1 and top-1 of the
    scores before the choice, refinement of those after it."""
    slots = min((len(run["unseen"].get("top1_by_slot", ())) for run in runs.values()), default=0)
    slots = range(1, 1 + min(4, slots))
    losses = ("ce", "l1", "refinement", *(f"top-1 at {t}" for t in slots)) if unseen else ()
    columns = "run", "million parameters", "steps", "draft tokens", "trained tokens/s", *losses
    print(f"\nLosses on {unseen} rows that were not trained on.\n\n" if unseen else "\n", end="")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, run in runs.items():
        terms = run["unseen"]
        rate = run["draft_tokens"] / max(1e-9, run["seconds"])
        values = terms and [terms["ce"], terms["l1"], terms["refinement"],
                            *terms["top1_by_slot"][:len(slots)]]
        cells = (name, f"{run['parameters'] / 1e6:.1f}", f"{run['steps']}",
                 f"{run['draft_tokens']}", f"{rate:.0f}", *(f"{x:.3f}" for x in values))
        print(f"| {' | '.join(cells)} |")


def decode_all(args, target, tokenizer, sets: dict, methods: list[str], folders: dict) -> dict:
    """Tables {temperature: {set: {name: summary}}}, printed as they are made."""
    drafts, digest = {}, hashlib.sha256(json.dumps(sets).encode())
    for name, folder in folders.items():
        kind, _ = METHODS[name.rpartition("-")[0]]
        drafts[name] = kind.from_pretrained(folder, target)
        digest.update((folder / "model.safetensors").read_bytes())
    results = {}
    for temperature in args.temperatures:
        given = dict(temperature=temperature, block_size="auto" if args.adaptive
                     else args.block_size)
        title = conditions(target, argparse.Namespace(**vars(args) | given))
        key = (f"{title}; {training.fingerprint(target)}; prompts and drafts "
               f"{digest.hexdigest()[:12]}; {list(drafts)}")
        decoded = decode_sets(
            decoders(args, target, eos_ids(target, tokenizer), drafts, temperature), sets,
            tokenizer, Path(args.out) / "decode.jsonl", key)
        tables = {name: training.summarise(runs) for name, runs in decoded.items()}
        print_table(title, tables, methods, args.seeds)
        results[f"temperature {temperature:g}"] = {"conditions": title, "sets": tables}
    return results


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="DSpine and its family, trained and decoded alike.",
                                formatter_class=HelpFormatter)
    add = p.add_argument
    add("prompts", help="folder of .jsonl files, or one file, as in bench/evaluate.py")
    add("--methods", nargs="+", choices=[*METHODS, *ALIASES], metavar="METHOD",
        default=list(FAMILY), help=f"of: {', '.join(METHODS)}; full is dspine")
    add("--seeds", nargs="+", type=int, default=[0, 1], help="of initialisation, rows and anchors")
    add("--out", default="runs/family", help="folder for everything")
    add("--corpus", help="rows as train_small.py writes them, those held out are not used "
        "(default: its stage 1, in --out)")
    add("--unseen", help="rows to measure losses on (default: those held out of the corpus)")
    add("--target", help="as in generate.py")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16"), help="as in train_small.py")
    add("--no-progress", action="store_true", help="no bars while training")
    add = p.add_argument_group("decoding").add_argument
    add("--sets", nargs="+", help="names of the sets to take (default: all)")
    add("--per-set", type=int, default=12, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128, help="tokens to emit for each prompt")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="one table each")
    add("--adaptive", action="store_true", help="blocks follow what was kept before, as in "
        "generate.py on a CPU (default: whole blocks)")
    training.add_training_options(p)
    p.set_defaults(tokens=1_000_000)
    args = p.parse_args(argv)
    args.methods = list(dict.fromkeys(ALIASES.get(name, name) for name in args.methods))
    args.seeds = list(dict.fromkeys(args.seeds))
    return args


def check_args(args: argparse.Namespace):
    """ValueError for what would not be equal terms, and for what train_small refuses."""
    for name in SET_BY_METHOD:
        if getattr(args, name) != getattr(training.parse_args([]), name):
            raise ValueError(f"--{name} belongs to the methods: choose them with --methods")
    if args.init not in ("target", "random"):
        raise ValueError(f"--init {args.init}: must be target or random, so that all begin alike")
    if min(args.temperatures) < 0:
        raise ValueError(f"--temperatures {min(args.temperatures)}: must be 0 or positive")
    if min(args.seeds) < 0:
        raise ValueError(f"--seeds {min(args.seeds)}: must not be negative")
    if not (args.steps or args.tokens or args.minutes):
        raise ValueError("--tokens 0: give a budget, --steps, --tokens or --minutes")
    training.check_args(args)


def corpus(args, target, tokenizer) -> tuple[list[dict], list[dict]]:
    """Rows to train on, of --corpus, else of train_small's stage 1, and rows to measure losses on,
    of --unseen, else those held out, but none whose prompt is trained on. ValueError for a missing
    file and where none is left to train on or, of --unseen, to measure on."""
    def read(option: str) -> list[dict]:
        path = Path(getattr(args, option))
        if not path.is_file():
            raise ValueError(f"--{option} {path}: no such file")
        return training.read_corpus(path, target)
    unseen = read("unseen") if args.unseen else None  # before hours of writing
    path = args.corpus or Path(args.out) / "corpus.jsonl"
    rows = (read("corpus") if args.corpus
            else training.write_corpus(args, target, tokenizer, path))
    trained = training.rows_to_train_on(rows, path)
    prompt = lambda row: tuple(row["ids"][:row["prompt_length"]])
    known = {prompt(r) for r in trained}
    if unseen is None:
        unseen = [r for r in rows if r.get("held_out")]
    unseen = [r for r in unseen if prompt(r) not in known and training.answer_tokens([r]) >= 2]
    if args.unseen and not unseen:
        raise ValueError(f"--unseen {args.unseen} holds no row with two answer tokens whose prompt "
                         "is not trained on")
    return trained, unseen


def run(args) -> int:
    sets = read_sets(args)
    # what train_small knows and is no option here keeps its default there
    options = vars(training.parse_args([])) | vars(args) | dict(slim=True, prompts=None)
    args = argparse.Namespace(**options)
    check_args(args)
    device = default_device(args.device)
    dtype = args.dtype and getattr(torch, args.dtype)
    target, tokenizer = load_target(args.target, dtype, device)
    training.follow_own_distribution(target)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows, unseen = corpus(args, target, tokenizer)
    if not args.no_compile:
        training.use_compiler(device)
    runs = {}
    for seed in args.seeds:
        for name in args.methods:
            mine = argparse.Namespace(**options | METHODS[name][1] | dict(seed=seed))
            runs[f"{name}-{seed}"] = {
                **train_method(name, mine, target, tokenizer, rows),
                "unseen": unseen_losses(name, mine, target, unseen)}
    print_runs(runs, len(unseen))
    results = decode_all(args, target, tokenizer, sets, args.methods,
                         {name: out / name for name in runs})
    path = out / "results.json"  # tables of other methods stay
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    training.write_json(path, old | {" ".join(args.methods): {"runs": runs, "tables": results}})
    return 0


def main(argv=None) -> int:
    return guarded("family.py", run, parse_args(argv), "stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
