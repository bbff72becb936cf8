"""Acceptance and speed on prompt sets, every method on every prompt in turn.

    python bench/evaluate.py PROMPTS --temperature 0

PROMPTS is a folder of JSON-lines files, one a set, with `turns`, `messages` or `prompt` in each
row (the first user turn is used). Results go to --out as they come; the same command goes on where
a killed run stopped. Prints a table in Markdown under a line with device, dtype, versions and
commit.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from dspine import Statistics  # noqa: E402
from generate import (DEFAULT_DRAFT, HelpFormatter, block_size, build_prompt,  # noqa: E402
                      default_block_size, default_device, eos_ids, guarded, load_draft,
                      load_target)
from train_small import (decode_in_turn, decoding_methods, drop_cut_line,  # noqa: E402
                         fingerprint, follow_own_distribution, read_prompts, read_rows, summarise)

METHODS = ("plain", "transformers", "prompt lookup", "DSpine", "copy", "DSpine + copy")


class _Rounds:
    """A transformers streamer that notes how many tokens each round brought, and when."""

    def __init__(self):
        self.counts, self.times, self.tokens = [], [], []

    def put(self, value):
        self.counts.append(value.numel())
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def transformers_method(target, eos, max_new_tokens: int, temperature: float, seed: int = 0,
                        **kind):
    """transformers' own generate (kind: prompt_lookup_num_tokens=..., or nothing) as a method.

    Its first round comes with prefill and is left out of lengths and seconds, as everywhere here.
    """
    sampling = dict(temperature=temperature, top_k=0, top_p=1.0) if temperature else {}

    def decode(ids):
        rounds, ids = _Rounds(), ids.to(target.device)
        torch.manual_seed(seed)
        began = time.perf_counter()
        target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, streamer=rounds,
            do_sample=temperature > 0, **sampling, **kind)
        prompt, first, *rest = rounds.counts
        return rounds.tokens[prompt:], Statistics(
            new_tokens=first + sum(rest), target_forwards=len(rest), accept_lengths=rest,
            prefill_seconds=rounds.times[1] - began,
            verify_seconds=rounds.times[-1] - rounds.times[1])
    return decode


def commit() -> str:
    """The commit this runs from, and whether files differ from it."""
    git = lambda *words: subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True,
                                        text=True, check=True).stdout.strip()
    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (" + changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: torch.device) -> str:
    """Name of the GPU, or of the CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path, name = Path("/proc/cpuinfo"), platform.processor()
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def conditions(target, args) -> str:
    """The line that belongs beside every figure."""
    return (f"{machine(target.device)}; {str(target.dtype).removeprefix('torch.')}; "
            f"torch {torch.__version__}, transformers {transformers.__version__}; "
            f"{args.per_set} prompts a set, {args.max_new_tokens} new tokens, "
            f"temperature {args.temperature:g}; block size "
            f"{default_block_size(target, args.block_size) or 'as trained'}; commit {commit()}")


def print_table(title: str, tables: dict):
    """Rows: methods. Columns: acceptance length of each set, then the averages over sets."""
    first = next(iter(next(iter(tables.values()))))  # what ratios refer to
    columns = ["method", *tables, "mean acceptance", "tokens/s", f"x {first}", "repetition"]
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in next(iter(tables.values())):
        rows = [table[name] for table in tables.values()]
        mean = lambda key: sum(row[key] for row in rows) / len(rows)
        cells = [name, *(f"{row['acceptance_length']:.2f} ({row['ratio']:.2f}x)" for row in rows),
                 f"{mean('acceptance_length'):.2f}", f"{mean('tokens_per_second'):.1f}",
                 f"{mean('ratio'):.2f}", f"{mean('repetition'):.2f}"]
        print(f"| {' | '.join(cells)} |")


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Acceptance and speed on prompt sets.",
                                formatter_class=HelpFormatter)
    add_options(p, "runs/evaluate.jsonl")
    p.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD",
                   default=[name for name in METHODS if name != "transformers"],
                   help=f"of: {', '.join(METHODS)}; ratios refer to the first")
    return p.parse_args(argv)


def add_options(p: argparse.ArgumentParser, out: str):
    """Prompts, decoding, the pair of models and the file of records, for batch.py too."""
    add = p.add_argument
    add("prompts", help="folder of .jsonl files, or one file")
    add("--sets", nargs="+", help="names of the sets to take (default: all)")
    add("--per-set", type=int, default=12, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128, help="tokens to emit for each prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--block-size", type=block_size, help="as in generate.py")
    add("--target", help="as in generate.py")
    add("--draft", default=str(DEFAULT_DRAFT), help="folder of the draft")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of both")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--out", default=out, help="records; a run with the same conditions goes on")


def read_sets(args) -> dict:
    """name of a set -> its first --per-set prompts; ValueError where there are none."""
    path = Path(args.prompts)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    files = [f for f in files if not args.sets or f.stem in args.sets]
    if not files or not all(f.is_file() for f in files):
        raise ValueError(f"no prompt sets in {path}: name a folder of .jsonl files or one file")
    if missing := set(args.sets or ()) - {f.stem for f in files}:
        raise ValueError(f"no prompt sets named {', '.join(sorted(missing))} in {path}")
    if min(args.per_set, args.max_new_tokens) < 1:
        raise ValueError("--per-set and --max-new-tokens must be at least 1")
    return {f.stem: read_prompts(f)[:args.per_set] for f in files}


def decode_sets(methods: dict, sets: dict, tokenizer, out: Path, key: str) -> dict:
    """Every method on every prompt in turn: name of a set -> records of its prompts, in order.

    They are appended to `out` as they come; those it has under the same key are not made again.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    drop_cut_line(out)
    rows = read_rows(out)
    done = {(r["set"], r["index"]): r["records"] for r in rows if r.get("key") == key}
    work = [(name, i, text) for name, texts in sets.items() for i, text in enumerate(texts)]
    if len(done) < len(work):
        for decode in methods.values():
            decode(build_prompt(tokenizer, "Hello"))  # warm-up
    with open(out, "a", encoding="utf-8") as log:
        for name, i, text in tqdm(work, desc="prompts"):
            if (name, i) not in done:
                done[name, i] = decode_in_turn(methods, build_prompt(tokenizer, text))
                row = {"key": key, "set": name, "index": i, "records": done[name, i]}
                log.write(json.dumps(row) + "\n")
                log.flush()
    return {name: [done[name, i] for i in range(len(texts))] for name, texts in sets.items()}


def run(args) -> int:
    sets, draft_file = read_sets(args), Path(args.draft) / "model.safetensors"
    device = default_device(args.device)
    if not draft_file.is_file():
        raise ValueError(f"--draft {args.draft}: no folder with a draft")
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype), device)
    follow_own_distribution(target)
    draft, eos = load_draft(args.draft, target), eos_ids(target, tokenizer)
    settings = target, eos, args.max_new_tokens, args.temperature
    methods = decoding_methods(target, draft, *settings[1:], block_size=args.block_size)
    methods["transformers"] = transformers_method(*settings)
    methods["prompt lookup"] = transformers_method(*settings, prompt_lookup_num_tokens=10)
    methods = {name: methods[name] for name in args.methods}

    title = conditions(target, args)
    inputs = hashlib.sha256(json.dumps(sets).encode() + draft_file.read_bytes()).hexdigest()[:12]
    key = f"{title}; {fingerprint(target)}; prompts and draft {inputs}; {list(methods)}"
    print_table(title, {name: summarise(runs) for name, runs in decode_sets(
        methods, sets, tokenizer, Path(args.out), key).items()})
    return 0


if __name__ == "__main__":
    sys.exit(guarded("evaluate.py", run, parse_args(), "stopped; the same command goes on"))
