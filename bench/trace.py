"""Watch a draft work: every round of a few generations as one HTML page, readable offline.

    python bench/trace.py "Explain why the sky is blue." --out trace.html

The same records as `generate.py --trace`: layer by layer the token nearest to each position's
forming feature, the candidates, the path through the transition cache, what the target kept.
"""

import argparse
import html
import json
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from dspine import collect, generate  # noqa: E402
from generate import (DEFAULT_DRAFT, GGUF_NAME, HelpFormatter, TextStream,  # noqa: E402
                      ablations, build_prompt, default_device, eos_ids, guarded, load_draft,
                      load_target, note, read_prompt, round_record, watched)
from train_small import replacing  # noqa: E402


def trace(target, draft, tokenizer, text: str, args) -> dict:
    """The rounds of one generation and a line about it."""
    rounds, seen, stream = [], [], TextStream(tokenizer)
    look = lambda step: rounds.append(
        round_record(step, seen.pop() if seen else None, draft, tokenizer, stream))
    draft.watch = seen.append
    try:
        _, stats = collect(watched(generate(
            target, draft, build_prompt(tokenizer, text, raw=args.raw), copy=not args.no_copy,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature,
            eos_token_ids=eos_ids(target, tokenizer),
            generator=torch.Generator(target.device).manual_seed(args.seed)), look))
    finally:
        draft.watch = None
    if rest := stream.end():  # bytes of a character that was never finished
        rounds[-1]["text"].append(("target", rest))
    name = Path(args.target or GGUF_NAME).name.partition(".Q")[0]
    return {"prompt": text, "rounds": rounds, "summary":
            f"{name}, {args.dtype}, temperature {args.temperature:g}: {stats.new_tokens} tokens, "
            f"{stats.target_forwards} target forwards after prefill, "
            f"acceptance length {stats.acceptance_length:.2f}"}


def script_json(value) -> str:
    """JSON that can stand inside <script>: no <, so neither </script> nor a comment begins."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def answer(example: dict) -> str:
    """The prompt and the text, each piece in a span that names its writer and round."""
    spans = "".join(f'<span class="{who}" data-round="{i}">{html.escape(text)}</span>'
                    for i, r in enumerate(example["rounds"]) for who, text in r["text"])
    return (f'<article hidden><p class="prompt">{html.escape(example["prompt"])}</p>'
            f'<p class="text">{spans}</p><p class="note">{html.escape(example["summary"])}</p>'
            "</article>")


def page(examples: list[dict], notes: list[str]) -> str:
    """One HTML file without external resources."""
    values = {"notes": "".join(f"<p>{html.escape(line)}</p>" for line in notes),
              "answers": "\n".join(map(answer, examples)), "data": script_json(examples)}
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], PAGE)


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Rounds of DSpine decoding as one HTML page.",
                                formatter_class=HelpFormatter)
    add = p.add_argument
    add("prompts", nargs="+", help="user turns, one generation each; - reads standard input")
    add("--out", required=True, help="the page to write")
    add("--max-new-tokens", type=int, default=32, help="tokens to emit for each prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of sampling")
    add("--raw", action="store_true", help="no chat template: continue the text itself")
    add("--no-copy", action="store_true", help="every round drafts: none copies from the text")
    add("--target", help="as in generate.py")
    add("--draft", default=str(DEFAULT_DRAFT), help="folder of the draft")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of both")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    return p.parse_args(argv)


def run(args) -> int:
    device, out = default_device(args.device), Path(args.out)
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if args.max_new_tokens < 1:
        raise ValueError("--max-new-tokens must be at least 1")
    texts = [read_prompt(argparse.Namespace(prompt=text, raw=args.raw)) for text in args.prompts]
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype), device)
    draft = load_draft(args.draft, target)
    examples = [trace(target, draft, tokenizer, text, args) for text in texts]
    with replacing(out) as part:
        part.write_text(page(examples, ablations(draft.config)), encoding="utf-8")
    note(f"{out}: {out.stat().st_size / 1000:.0f} kB")
    return 0


# The page. Draws `data`, the list of examples that trace() makes, with textContent alone.
PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>DSpine, round by round</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --cell: #f6f8fa; --draft: #1a7f37; --copy: #8a5a00; --no: #c4212d; --bar: #b6dcc2; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9aa4af;
  --line: #3d444d; --cell: #1a2029; --draft: #4ac26b; --copy: #d9a32c; --no: #ff6a63;
  --bar: #1d5230; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 1rem; margin: .9rem 0 .5rem; min-height: 1.5em; }
p { margin: .4rem 0; }
.note, summary { color: var(--soft); font-size: .85rem; }
.prompt::before { content: "prompt  "; color: var(--soft); font-size: .85rem; white-space: pre; }
.prompt, .text { white-space: pre-wrap; overflow-wrap: anywhere; }
.text span { cursor: pointer; border-radius: 3px; }
.draft { color: var(--draft); text-decoration: underline; text-underline-offset: 3px; }
.copy { color: var(--copy); text-decoration: underline dotted; text-underline-offset: 3px; }
.now { background: var(--line); }
nav { display: flex; gap: .5rem; align-items: center; flex-wrap: wrap; margin-top: .8rem; }
nav input[type=range] { flex: 1 1 8rem; max-width: 26rem; accent-color: var(--draft); }
button, select { font: inherit; color: inherit; background: var(--cell);
  border: 1px solid var(--line); border-radius: 6px; padding: .3rem .7rem; min-height: 2.2rem; }
:focus-visible { outline: 2px solid var(--ink); outline-offset: 1px; }
#figure { position: relative; overflow-x: auto; }
#blocks { display: flex; gap: 1rem; padding: .2rem; width: max-content; min-width: 100%; }
.column { display: flex; flex-direction: column; gap: .3rem; flex: 1 0 6.2rem; max-width: 10rem; }
.column > div { display: flex; flex-direction: column; gap: .3rem; }
.labels { flex: 0 0 5.5rem; }
.cell, .labels span, .head { height: 1.9rem; line-height: 1.8rem; padding: 0 .4rem; min-height: 0;
  overflow: hidden; text-overflow: ellipsis; white-space: pre; text-align: left; }
.labels > span, .labels > :not(.candidates) span, .head { padding-left: 0; color: var(--soft);
  font-size: .85rem; }
.labels .cell { background: var(--cell); border: 1px solid var(--soft); padding-left: .4rem; }
.cell { font: .85rem/1.8rem ui-monospace, "DejaVu Sans Mono", monospace; border-radius: 5px; }
.layers .cell { border-style: dashed; background: none; }
.layers .same { border: 1px solid var(--draft); color: var(--draft); font-weight: bold; }
.candidates { margin: .5rem 0 .2rem; }
.candidates .cell { background: linear-gradient(90deg, var(--bar) var(--p), var(--cell) 0); }
.chosen { box-shadow: 0 0 0 1.5px var(--rim, var(--soft)); border-color: var(--rim, var(--soft)); }
.kept { --rim: var(--draft); }
.refused { --rim: var(--no); }
.kept .chosen, .refused .chosen { font-weight: bold; }
.preview .candidates { outline: 2px dashed var(--soft); outline-offset: 2px; border-radius: 5px; }
.verdict { font-size: .85rem; line-height: 1.3; min-height: 2.6em; margin-top: auto;
  overflow-wrap: anywhere; }
.kept .verdict { color: var(--draft); }
.refused .verdict { color: var(--no); }
svg { position: absolute; left: 0; top: 0; pointer-events: none; }
svg line { stroke: var(--soft); stroke-width: 2; stroke-dasharray: 3 4; }
svg .kept { stroke: var(--draft); stroke-width: 3; stroke-dasharray: none; }
svg .refused { stroke: var(--no); stroke-dasharray: 6 4; }
#detail { position: sticky; bottom: 0; margin: .6rem 0; padding: .5rem .7rem; min-height: 3.4rem;
  border: 1px solid var(--line); border-radius: 6px; background: var(--page); font-size: .9rem; }
@media (max-width: 40rem) {
  #blocks { flex-direction: column; width: auto; gap: .7rem; }
  .labels { display: none; }
  .column { max-width: none; flex: none; flex-flow: row wrap; column-gap: .8rem;
    border-top: 1px solid var(--line); padding-top: .4rem; }
  .column > div:not(.head, .verdict) { flex: 0 0 100%; order: 1; flex-flow: row wrap; }
  .column > div::before { content: attr(data-label); font-size: .75rem; line-height: 1.9rem;
    flex: 0 0 4.6rem; color: var(--soft); }
  .head::before { content: "position "; font-size: inherit; }
  .verdict::before { display: none; }
  .cell { max-width: 10rem; min-width: 2.4rem; }
  .candidates { margin: 0; }
  .column > .head, .column > .verdict { height: auto; min-height: 0; margin: 0;
    line-height: 1.5rem; display: block; }
  svg { display: none; }
  #detail { min-height: 4.8rem; }
}
</style>
</head>
<body>
<h1>DSpine, round by round</h1>
<div class="note">{{notes}}</div>
<nav id="choose" hidden><label>Prompt <select id="example"></select></label></nav>
<main>
{{answers}}
<p class="note">Written by: <span class="draft">draft</span> &nbsp;
<span class="copy">copied from the text</span> &nbsp; the target itself.
Choose a piece to see its round.</p>
<nav aria-label="Rounds">
<button id="back" aria-label="Round before">◀</button>
<input id="round" type="range" min="0" value="1" aria-label="Round">
<button id="next" aria-label="Next round">▶</button>
<span id="count" class="note"></span>
<label class="note"><input id="all" type="checkbox"> all candidates</label>
</nav>
<h2 id="what" aria-live="polite"></h2>
<div id="figure"><div id="blocks"></div></div>
<p id="detail" aria-live="polite"></p>
<details open><summary>How to read this</summary>
<p class="note">One column is one proposed position; all are computed in one parallel forward.
<b>Layers:</b> after each layer, the token whose code is nearest to what the position is forming;
green where it is already the token chosen in the end. Every position also reads its left
neighbour's forming token. <b>Candidates:</b> the likeliest tokens of a position before it knows
which predecessor was chosen, best first. The bars are the row of the transition cache that belongs
to the chosen predecessor (softmax of its scores). Point at another candidate: the next position's
bars show the row that would follow it. <b>Path:</b> the outlined candidates. <b>Target:</b> it
keeps the path up to its first refusal and adds one token of its own.</p>
<p class="note">Keys: ← → step through rounds; inside the figure the arrow keys walk its cells.</p>
</details>
</main>
<noscript><p>The rounds need JavaScript; the text and who wrote it is above.</p>
<style>article[hidden] { display: block !important; }</style></noscript>
<script type="application/json" id="data">{{data}}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent), FEW = 6;
const $ = id => document.getElementById(id), articles = [...document.querySelectorAll("article")];
let example = 0, round = 1;

function make(tag, name, text, parent) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  if (parent) parent.append(e);
  return e;
}

function described(r) {
  const own = r.added === null ? "the end comes first" : `the target adds ${r.added}`;
  if (!round) return `Prefill: ${own}.`;
  const did = {draft: `the draft proposes ${r.proposed} after ${r.anchor}`,
    copy: `${r.proposed} tokens are copied from the text so far; the draft rests`,
    target: "nothing is proposed"}[r.source];
  return `Round ${round}: ${did}; ${r.accepted} kept; ${own}.`;
}

function verdict(p, t, r) {
  const last = t + 1 === r.positions.length && p.verdict === "kept" && r.added !== null;
  return {kept: "✓ kept" + (last ? `; then ${r.added}` : ""), "refused": "✗ refused" +
    (r.added === null ? "" : `: ${r.added}`), "not judged": "– not judged",
    "past the end": "– past the end"}[p.verdict];
}

function bars(t, row) {  // position t's candidates under one row of its transition cache
  const r = data[example].rounds[round];
  for (const cell of document.querySelectorAll(`.candidates .cell[data-t="${t}"]`))
    cell.style.setProperty("--p", r.positions[t].percent[row][cell.dataset.b] + "%");
}

function draw() {
  const rounds = data[example].rounds, r = rounds[round], last = rounds.length - 1;
  const blocks = $("blocks");
  articles.forEach((a, i) => { a.hidden = i !== example; });
  document.querySelectorAll("article span").forEach(s => s.classList.toggle(
    "now", !s.closest("article").hidden && +s.dataset.round === round));
  $("round").max = last; $("round").value = round; $("count").textContent = `${round} of ${last}`;
  $("back").disabled = round === 0; $("next").disabled = round === last;
  $("what").textContent = described(r);
  blocks.replaceChildren();
  const positions = r.positions || [];
  $("detail").hidden = !positions.length;
  $("detail").textContent = "Point at a token, or walk there with the arrow keys, for its scores.";
  path([]);
  if (!positions.length) return;
  const few = $("all").checked ? Infinity : FEW, labels = make("div", "column labels", "", blocks);
  make("span", "", "position", labels);
  const names = make("div", "", "", labels), anchor = make("div", "candidates", "", labels);
  positions[0].layers.forEach((_, l) => make("span", "", `layer ${l + 1}`, names));
  make("span", "cell chosen", r.anchor, anchor).title = "anchor: the target's last token";
  positions.forEach((p, t) => {
    const column = make("div", `column ${p.verdict.replaceAll(" ", "-")}`, "", blocks);
    column.setAttribute("role", "group");
    column.setAttribute("aria-label", `position ${t + 1}`);
    make("div", "head", `${t + 1}`, column);
    const layers = make("div", "layers", "", column), list = make("div", "candidates", "", column);
    layers.dataset.label = "forming"; list.dataset.label = "candidates";
    p.layers.forEach((nearest, l) => {
      const same = nearest[0][0] === p.candidates[p.chosen];
      Object.assign(make("button", "cell" + (same ? " same" : ""), nearest[0][0], layers).dataset,
                    {t, l});
    });
    p.candidates.forEach((token, b) => {
      if (b >= few && b !== p.chosen) return;
      const cell = make("button", "cell" + (b === p.chosen ? " chosen" : ""), token, list);
      Object.assign(cell.dataset, {t, b});
    });
    make("div", "verdict", verdict(p, t, r), column);
    bars(t, p.row);
  });
  const cells = [...blocks.querySelectorAll("button")];
  cells.forEach(c => { c.tabIndex = -1; });
  (blocks.querySelector("button.chosen") || cells[0]).tabIndex = 0;
  path(positions);
}

function path(positions) {  // lines between the chosen candidates
  document.querySelectorAll("svg").forEach(old => old.remove());
  if (!positions.length) return;
  const box = $("blocks").getBoundingClientRect(), space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("width", box.width); svg.setAttribute("height", box.height);
  const chosen = [...$("blocks").querySelectorAll(".chosen")].map(c => c.getBoundingClientRect());
  chosen.slice(1).forEach((to, t) => {
    const line = document.createElementNS(space, "line"), from = chosen[t];
    line.setAttribute("class", positions[t].verdict.replaceAll(" ", "-"));
    Object.entries({x1: from.right - box.left, y1: (from.top + from.bottom) / 2 - box.top,
      x2: to.left - box.left, y2: (to.top + to.bottom) / 2 - box.top})
      .forEach(([k, v]) => line.setAttribute(k, v));
    svg.append(line);
  });
  $("figure").append(svg);
}

function show(cell) {
  const r = data[example].rounds[round], t = +cell.dataset.t, p = r.positions[t];
  const token = cell.textContent, previous = t ? r.positions[t - 1].candidates[p.row] : r.anchor;
  document.querySelectorAll(".preview").forEach(c => c.classList.remove("preview"));
  r.positions.forEach((q, i) => bars(i, q.row));
  if (cell.dataset.l !== undefined) {
    const near = p.layers[cell.dataset.l].map(([name, cos]) => `${name} (${cos.toFixed(2)})`);
    $("detail").textContent = `Position ${t + 1} after layer ${+cell.dataset.l + 1}: nearest ` +
      `tokens, with cosine: ${near.join(", ")}.`;
    return;
  }
  const b = +cell.dataset.b, better = p.scores.filter(s => s > p.scores[b]).length;
  let text = `Position ${t + 1}: ${token} after ${previous}, ` +
    `${t ? "chosen there" : "the anchor"}: score ${p.scores[b].toFixed(2)}, ` +
    `${p.percent[p.row][b]}%, no. ${better + 1} of ${p.scores.length}; ` +
    `no. ${b + 1} before the predecessor was known.`;
  if (t + 1 < r.positions.length && b !== p.chosen) {
    const row = r.positions[t + 1].percent[b], best = row.indexOf(Math.max(...row));
    bars(t + 1, b);
    cell.closest(".column").nextElementSibling.classList.add("preview");
    text += ` Had it been chosen: ${r.positions[t + 1].candidates[best]} next, ${row[best]}%.`;
  }
  $("detail").textContent = text;
}

function go(to) { round = Math.max(0, Math.min(data[example].rounds.length - 1, to)); draw(); }

$("back").onclick = () => go(round - 1);
$("next").onclick = () => go(round + 1);
$("round").oninput = () => go(+$("round").value);
$("all").onchange = draw;
$("example").onchange = () => { example = +$("example").value; go(1); };
addEventListener("resize", () => path(data[example].rounds[round].positions || []));
for (const kind of ["mouseover", "focusin", "click"])
  $("blocks").addEventListener(kind, e => { if (e.target.matches("button")) show(e.target); });
document.querySelector("main").addEventListener("click", e => {
  if (e.target.dataset.round) go(+e.target.dataset.round); });
addEventListener("keydown", e => {
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1],
    ArrowDown: [0, 1]}[e.key];
  if (!step || e.altKey || e.ctrlKey || e.metaKey || e.target.matches("input, select")) return;
  const column = e.target.closest(".column");
  if (!column) { if (step[0]) { go(round + step[0]); e.preventDefault(); } return; }
  const columns = [...document.querySelectorAll(".column:not(.labels)")];
  const inside = c => [...c.querySelectorAll("button")], here = inside(column).indexOf(e.target);
  const side = columns[columns.indexOf(column) + step[0]], list = side ? inside(side) : [];
  const to = list[Math.min(here + step[1], list.length - 1)];
  if (to) {
    e.target.tabIndex = -1; to.tabIndex = 0; to.focus();
    to.scrollIntoView({block: "nearest", inline: "nearest"});
  }
  e.preventDefault();
});
data.forEach((d, i) => { make("option", "", d.prompt.slice(0, 60), $("example")).value = i; });
$("choose").hidden = data.length < 2;
go(1);
</script>
</body>
</html>
"""

if __name__ == "__main__":
    sys.exit(guarded("trace.py", run, parse_args()))
