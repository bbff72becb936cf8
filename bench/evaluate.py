"""Acceptance and speed on prompt sets, every method on every prompt in turn.

    python bench/evaluate.py PROMPTS --temperature 0

PROMPTS is a folder of JSON-lines files, one a set, with `turns`, `messages` or `prompt` in each row
(the first user turn is used). Results go to --out as they come; the same command goes on where a
killed run stopped. Prints a table in Markdown under a line with device, dtype, versions and commit.
"""

import argparse
import json
import os
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
from generate import DEFAULT_DRAFT, build_prompt, default_device, eos_ids, load_draft, load_target  # noqa: E402
from train_small import decode_in_turn, decoding_methods, read_prompts, summarise  # noqa: E402


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


def transformers_method(target, eos, max_new_tokens: int, temperature: float, seed: int, **kind):
    """transformers' own generate (kind: prompt_lookup_num_tokens=..., or nothing) as a method.

    Its first round comes with prefill and is left out of lengths and seconds, as everywhere here.
    """
    sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)

    def decode(ids):
        rounds = _Rounds()
        torch.manual_seed(seed)
        began = time.perf_counter()
        target.generate(input_ids=ids.to(target.device), attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                        eos_token_id=eos, pad_token_id=eos[0], streamer=rounds, **sampling, **kind)
        prompt, first, *rest = rounds.counts
        return rounds.tokens[prompt:], Statistics(
            new_tokens=first + sum(rest), target_forwards=len(rest), accept_lengths=rest,
            prefill_seconds=rounds.times[1] - began, verify_seconds=rounds.times[-1] - rounds.times[1])
    return decode


def conditions(target, args) -> str:
    """The line that belongs beside every figure."""
    try:
        git = lambda *c: subprocess.run(("git", "-C", str(ROOT), *c), capture_output=True, text=True, check=True).stdout.strip()
        commit = git("rev-parse", "--short", "HEAD") + (" + changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        path = Path("/proc/cpuinfo")
        names = [x.split(":")[1].strip() for x in path.read_text().splitlines() if x.startswith("model name")] if path.exists() else []
        device = f"{(names or [platform.processor()])[0]}, {torch.get_num_threads()} threads"
    return (f"{device}; {str(target.dtype).removeprefix('torch.')}; torch {torch.__version__}, transformers "
            f"{transformers.__version__}; {args.per_set} prompts a set, {args.max_new_tokens} new tokens, "
            f"temperature {args.temperature:g}; commit {commit}")


def print_table(title: str, tables: dict):
    """Rows: methods. Columns: acceptance length of each set, then the averages over sets."""
    sets = list(tables)
    print(f"\n{title}\n\n| method | " + " | ".join(sets) + " | mean acceptance | tokens/s | x plain | repetition |")
    print("|---" * (len(sets) + 5) + "|")
    for name in tables[sets[0]]:
        mean = lambda key: sum(tables[s][name][key] for s in sets) / len(sets)
        cells = [f"{tables[s][name]['acceptance_length']:.2f} ({tables[s][name]['ratio']:.2f}x)" for s in sets]
        print(f"| {name} | " + " | ".join(cells) + f" | {mean('acceptance_length'):.2f} | {mean('tokens_per_second'):.1f} | "
              f"{mean('ratio'):.2f} | {mean('repetition'):.2f} |")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("prompts", help="folder of .jsonl files, or one file")
    p.add_argument("--sets", nargs="*", help="names of the sets to take (default: all)")
    p.add_argument("--per-set", type=int, default=12, help="prompts of each set (default 12)")
    p.add_argument("--max-new-tokens", type=int, default=128, help="(default 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="(default 0)")
    p.add_argument("--methods", nargs="*", default=["plain", "prompt lookup", "DSpine", "copy", "DSpine + copy"],
                   help="of: plain, transformers, prompt lookup, DSpine, copy, 'DSpine + copy'; the first is what ratios refer to")
    p.add_argument("--target", help="as in generate.py")
    p.add_argument("--draft", default=str(DEFAULT_DRAFT), help="folder of the draft")
    p.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="(default bfloat16)")
    p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    p.add_argument("--out", default="runs/evaluate.jsonl", help="records; a run with the same conditions goes on")
    args = p.parse_args()

    path = Path(args.prompts)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    files = [f for f in files if not args.sets or f.stem in args.sets]
    if not files or not all(f.is_file() for f in files):
        print(f"evaluate.py: no prompt sets in {path}", file=sys.stderr)
        return 1
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype), args.device or default_device())
    draft, eos = load_draft(args.draft, target), eos_ids(target, tokenizer)
    hf = lambda **kind: transformers_method(target, eos, args.max_new_tokens, args.temperature, 0, **kind)
    methods = decoding_methods(target, draft, eos, args.max_new_tokens, args.temperature)
    methods |= {"transformers": hf(), "prompt lookup": hf(prompt_lookup_num_tokens=10)}
    methods = {name: methods[name] for name in args.methods}

    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    title = conditions(target, args)
    key = f"{title}; draft {os.path.getmtime(Path(args.draft) / 'model.safetensors'):.0f}; {list(methods)}"
    done = {}
    if out.exists():
        for line in out.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and (row := json.loads(line))["key"] == key:
                done[row["set"], row["index"]] = row["records"]
    work = [(f.stem, i, text) for f in files for i, text in enumerate(read_prompts(str(f))[:args.per_set])]
    tables = {}
    with open(out, "a", encoding="utf-8") as log:
        warm = build_prompt(tokenizer, "Hello")
        for decode in methods.values():
            decode(warm)
        for name, i, text in tqdm(work, desc="prompts"):
            if (name, i) not in done:
                done[name, i] = decode_in_turn(methods, build_prompt(tokenizer, text))
                log.write(json.dumps({"key": key, "set": name, "index": i, "records": done[name, i]}) + "\n")
                log.flush()
    for f in files:
        tables[f.stem] = summarise([r for (name, _), r in sorted(done.items()) if name == f.stem])
    print_table(title, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
