"""The dashboard: one page without external parts, fed by GET /train/status.

    browser --GET /--> [ PAGE ] --GET /train/status, every second--> figures

Kept in a module, not in a data file, so that every way of installing the package carries it.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>DFlash Online trainer</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #888; --good: #2a9d5c; --bad: #d1495b; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h1 { font-size: 1.1rem; margin: 0 0 .8rem; }
h2 { font-size: .9rem; margin: 1.4rem 0 .4rem; color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: .6rem; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; min-width: 8rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; font-size: .85rem;
border-bottom: 1px solid var(--line); }
.bar { background: var(--line); border-radius: .2rem; height: .6rem; } .bar i { display: block; height: 100%;
background: var(--good); border-radius: .2rem; } .alarm { color: var(--bad); font-weight: 600; }
</style></head><body>
<h1>DFlash Online trainer <span id="run"></span></h1>
<div class="row" id="cards"></div><p class="alarm" id="alarm"></p>
<h2>Versions</h2><table id="versions"></table>
<h2>Accuracy per slot (teacher-forced, last step)</h2><table id="slots"></table>
<h2>Events</h2><table id="events"></table>
<script>
const $ = id => document.getElementById(id);
const text = value => { const node = document.createElement("td"); node.textContent = value; return node; };
const number = (value, digits) => value == null ? "-" : Number(value).toFixed(digits ?? 3);
const mega = bytes => (bytes / 1048576).toFixed(1) + " MB";
function rows(id, head, lines) {
  const table = $(id); table.replaceChildren();
  for (const [index, line] of [head, ...lines].entries()) {
    const row = document.createElement("tr");
    for (const cell of line) {
      const node = cell instanceof Node ? cell : text(cell);
      if (index === 0) node.style.color = "var(--soft)";
      row.append(node);
    }
    table.append(row);
  }
}
function bar(share) {
  const cell = document.createElement("td"), outer = document.createElement("div");
  const inner = document.createElement("i");
  outer.className = "bar"; inner.style.width = 100 * share + "%"; outer.append(inner); cell.append(outer);
  cell.style.width = "70%"; return cell;
}
function card(name, value) {
  const box = document.createElement("div"), big = document.createElement("b");
  const small = document.createElement("span");
  box.className = "card"; big.textContent = value; small.textContent = name;
  box.append(big, small); return box;
}
const live = version => Object.entries(version.live || {})
  .map(([policy, f]) => policy + " " + number(f.tau) + " (" + f.num_steps + " steps)").join(", ") || "-";
function show(s) {
  $("run").textContent = s.run_id ? "- " + s.run_id : "";
  $("alarm").textContent = s.state === "alarmed" || s.state === "failed" ? s.state + ": " + s.reason : "";
  if (!s.run_id) { $("cards").replaceChildren(card("state", s.state)); return; }
  const m = s.metrics || {}, now = (s.versions || []).find(v => v.version === s.drafter_version) || {};
  $("cards").replaceChildren(
    card("state", s.state), card("worker", s.worker ? s.worker.phase : "-"), card("step", s.step),
    card("live tau of " + (s.drafter_version || "-"), number(Object.values(now.live || {})[0]?.tau)),
    card("held-out tau", number(now.held_out_tau)), card("loss", number(m.loss)),
    card("gradient norm", number(m.grad_norm)), 
    card("learning rate", m.learning_rate?.toExponential(2) ?? "-"),
    card("records", s.records.num_total), card("unused", s.records.num_unused),
    card("held out", s.records.num_held_out), 
    card("dropped", Object.values(s.records.dropped).reduce((a, b) => a + b, 0)),
    card("buffer of " + mega(s.buffer.bound_bytes), mega(s.buffer.bytes)), 
    card("in flight", s.feed.in_flight),
    card("step seconds", number(m.step_s, 2)), card("restarts", s.worker ? s.worker.num_restarts : 0),
    card("alarms", s.num_alarms));
  rows("versions", ["version", "state", "step", "held-out tau", "live tau", "pause ms"], s.versions.map(v =>
    [v.version, v.state, v.step ?? "-", number(v.held_out_tau), live(v), number(v.pause_ms, 1)]));
  rows("slots", ["slot", "", ""], (m.slot_accuracy || []).map((a, i) => [i + 1, bar(a), number(a)]));
  rows("events", ["time", "kind", ""], [...s.events].reverse().map(e =>
    [new Date(1000 * e.time).toLocaleTimeString(), e.kind, JSON.stringify(e.data).slice(0, 160)]));
}
async function tick() {
  try { show(await (await fetch("train/status")).json()); }
  catch (error) { $("alarm").textContent = "no answer from the trainer: " + error; }
  setTimeout(tick, 1000);
}
tick();
</script></body></html>
"""
