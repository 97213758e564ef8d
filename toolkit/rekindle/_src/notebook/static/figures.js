// Figures over recorded data: steps of a batch, a run in time, a distribution, a growing prefix tree. They ask no kernel for anything, so
// the same code runs as a widget and in a saved page. Text from models and readers is only ever set as text.

const COLOURS = Array.from({ length: 8 }, (_, place) => `var(--rk-series-${place})`);

function slider(label, least, most, step, value, changed) {
  return range({ label, least, most, step, value, changed });
}

// The batch over time, one line for each slot; a slider or a button goes from step to step.
function steps(el, { steps }) {
  const slots = Math.max(1, ...steps.map((step) => Math.max(0, ...step.rows.map((row) => row.slot + 1))));
  const width = 640, height = slots * 22 + 4, each = width / steps.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, style: "width:100%;max-width:640px;display:block" });
  const names = new Map();
  steps.forEach((step, at) => {
    for (const row of step.rows) {
      if (!names.has(row.id)) names.set(row.id, names.size);
      svg.append(shape("rect", {
        x: at * each, y: row.slot * 22 + 3, width: Math.max(each - 0.5, 0.5), height: 18, fill: COLOURS[names.get(row.id) % COLOURS.length],
        opacity: row.kind === "prefill" ? 1 : 0.5,
      }, `${row.id}: ${row.kind}`));
    }
  });
  const marker = shape("rect", { y: 0, height, width: Math.max(each, 2), fill: "none", stroke: "currentColor", "stroke-width": 1.5 });
  svg.append(marker);
  const texts = new Map(), words = make("div"), head = make("div", { style: "font-weight:600;margin:4px 0" });
  function show(at) {
    const step = steps[at];
    marker.setAttribute("x", at * each);
    head.textContent = `step ${at + 1} of ${steps.length}: ${step.tokens} ${step.tokens > 1 ? "tokens" : "token"} in ${step.rows.length} ${step.rows.length > 1 ? "rows" : "row"}`;
    texts.clear();
    for (const earlier of steps.slice(0, at + 1)) {
      for (const row of earlier.rows) texts.set(row.id, (texts.get(row.id) ?? "") + row.text);
    }
    words.replaceChildren(...step.rows.map((row) => make("div", { style: "font-family:monospace;font-size:85%;white-space:pre-wrap" },
      make("span", { style: `display:inline-block;width:.8em;height:.8em;margin-right:.5em;background:${COLOURS[names.get(row.id) % COLOURS.length]}` }),
      `${row.id} ${row.kind} ${row.start}–${row.stop - 1}${row.ended ? `, ended by ${row.ended}` : ""}: …${texts.get(row.id).slice(-60)}`)));
  }
  let timer = 0;
  const bar = slider("step", 1, steps.length, 1, 1, (at) => show(at - 1));
  const go = (by) => {
    bar.set(Math.min(steps.length, Math.max(1, Number(bar.input.value) + by)));
    show(Number(bar.input.value) - 1);
  };
  const stop = () => (clearInterval(timer), (timer = 0), (play.textContent = "play"));
  const play = pressable({ label: "play", pressed: () => {
    if (timer) return stop();
    if (Number(bar.input.value) === steps.length) go(-steps.length);
    play.textContent = "stop";
    timer = setInterval(() => (!el.isConnected || Number(bar.input.value) === steps.length ? stop() : go(1)), 180);
  } });
  const button = (label, by) => pressable({ label, pressed: () => (stop(), go(by)) });
  el.append(svg, bar.whole, make("div", { style: "display:flex;gap:6px" }, button("back", -1), button("on", 1), play), head, words);
  show(0);
}

// A run in time: each step is as wide as it took, one line for each slot, below the tokens per second. A slider goes through it.
function run(el, { names, steps }) {
  if (!steps.length) return el.append("Nothing was recorded.");
  const slots = 1 + Math.max(...steps.flatMap(([, , , , , rows]) => rows.map(([slot]) => slot)));
  const width = 640, above = 44, height = above + slots * 12 + 4, end = steps.at(-1)[0], span = Math.max(end / 25, 1);
  const x = (time) => (width * time) / end;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, style: "width:100%;max-width:640px;display:block" });
  const last = names.map(() => 0); // when each request had its last step
  for (const [at, took, , , moved, rows] of steps) {
    for (const [slot, name, prefill] of rows) {
      last[name] = at;
      svg.append(shape("rect", { x: x(at - took), y: above + slot * 12, width: Math.max(x(took), 0.3), height: 10,
        fill: COLOURS[name % COLOURS.length], opacity: prefill ? 1 : 0.5 }, `${names[name]}: ${prefill ? "prefill" : "decode"}`));
    }
    if (moved) svg.append(shape("circle", { cx: x(at), cy: above - 3, r: 2, fill: "var(--rk-ink)" }, `${moved} pages moved`));
  }
  const rate = (time) => {
    const from = Math.max(0, time - span);
    return (1000 * steps.reduce((sum, [at, , sampled]) => sum + (at > from && at <= time ? sampled : 0), 0)) / Math.max(time - from, 1);
  };
  const times = Array.from({ length: 81 }, (_, at) => (end * at) / 80), highest = Math.max(1, ...times.map(rate));
  const points = times.map((time) => `${x(time)},${above - 8 - ((above - 12) * rate(time)) / highest}`);
  svg.append(shape("polyline", { points: points.join(" "), fill: "none", stroke: COLOURS[0], "stroke-width": 1.5 }));
  const marker = shape("line", { y1: 0, y2: height, stroke: "currentColor", "stroke-width": 1.5 });
  svg.append(marker);
  const head = make("div", { style: "font-weight:600;margin:4px 0" }), words = make("div");
  function show(time) {
    marker.setAttribute("x1", x(time)), marker.setAttribute("x2", x(time));
    const over = steps.filter(([at]) => at <= time), tokens = over.reduce((sum, step) => sum + step[2], 0);
    const step = steps.find(([at, took]) => at - took <= time && time < at);
    head.textContent = `${Math.round(time)} ms: ${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"} so far, ${Math.round(rate(time)).toLocaleString("en")} a second now`;
    const ended = last.filter((at) => at <= time).length;
    words.textContent = step
      ? `Step ${over.length + 1} of ${steps.length} takes ${step[1].toFixed(1)} ms: ${step[3]} positions of ${step[5].length} requests` +
        `${step[4] ? `, ${step[4]} pages moved` : ""}. ${ended} of ${names.length} requests have ended.`
      : `No step runs. ${ended} of ${names.length} requests have ended.`;
  }
  const bar = slider("time in ms", 0, Math.ceil(end), 1, 0, show);
  el.append(svg, bar.whole, head, words);
  show(0);
}

// Probabilities of the next token under temperature, top_p and min_p. Unlikely tokens stand together, by how likely they are.
function distribution(el, { texts, logits, rest }) {
  let temperature = 1, top = 1, least = 0;
  const bars = make("div"), note = make("div", { style: "margin:4px 0" });
  function show() {
    const largest = logits[0];
    const weigh = (logit) => Math.exp((logit - largest) / temperature);
    const all = logits.map((logit) => [weigh(logit), 1]).concat(rest.map(([logit, count]) => [weigh(logit), count]));
    const total = all.reduce((sum, [weight, count]) => sum + weight * count, 0);
    let before = 0, kept = 0, mass = 0;
    const shares = all.map(([weight, count]) => {
      const share = weight / total, inside = before < top && share >= least * all[0][0] / total;
      const some = inside ? Math.min(count, Math.max(1, Math.ceil((top - before) / share))) : 0;
      before += share * count;
      kept += some;
      mass += some * share;
      return [share, inside];
    });
    bars.replaceChildren(...texts.map((text, at) => {
      const [share, inside] = shares[at];
      const drawn = inside ? share / mass : 0;
      return make("div", { style: "display:flex;gap:8px;align-items:center;font-size:85%" },
        make("code", { textContent: JSON.stringify(text), style: "width:8em;text-align:right;overflow:hidden" }),
        make("div", { style: `height:.8em;width:${drawn * 60}%;background:${COLOURS[0]};opacity:${inside ? 1 : 0.3}` }),
        make("span", { textContent: inside ? `${(100 * drawn).toFixed(1)} %` : "cut", style: "opacity:.7" }));
    }));
    note.textContent = `${kept.toLocaleString("en")} tokens can be drawn; what was cut had ${(100 * Math.max(0, 1 - mass)).toFixed(1)} % of the probability.`;
  }
  const controls = [
    slider("temperature", 0.1, 3, 0.1, 1, (value) => ((temperature = value), show())),
    slider("top_p", 0.05, 1, 0.05, 1, (value) => ((top = value), show())),
    slider("min_p", 0, 0.5, 0.01, 0, (value) => ((least = value), show())),
  ];
  el.append(...controls.map((one) => one.whole), note, bars);
  show();
}

// Prompts in pages of a few words, as a tree: what begins alike is stored once.
function prefixes(el, { texts, page }) {
  let size = page;
  const prompts = [...texts], picture = make("div", { style: "font-size:85%;overflow-x:auto" });
  const note = make("div", { style: "margin:4px 0" });
  const input = make("input", { type: "text", className: "rekindle-field", ariaLabel: "a prompt",
    placeholder: "type a prompt, and press Enter to send it", style: "width:min(32em,95%)" });
  const pagesOf = (text) => {
    const words = text.split(/\s+/).filter(Boolean), pages = [];
    for (let at = 0; at + size <= words.length; at += size) pages.push(words.slice(at, at + size).join(" "));
    return [pages, words.length];
  };
  function grow() {
    const root = { pages: new Map() };
    let stored = 0, sent = 0;
    for (const text of prompts) {
      let node = root;
      for (const name of pagesOf(text)[0]) {
        sent += 1;
        if (!node.pages.has(name)) node.pages.set(name, { pages: new Map(), visits: 0 }), (stored += 1);
        node = node.pages.get(name);
        node.visits += 1;
      }
    }
    return { root, stored, sent };
  }
  function show() {
    const { root, stored, sent } = grow(), [mine, words] = pagesOf(input.value);
    const hits = new Set();
    for (let node = root, at = 0; at < mine.length && node.pages.has(mine[at]); at += 1) hits.add((node = node.pages.get(mine[at])));
    const draw = (node, depth) => [...node.pages].flatMap(([name, below]) => [
      make("div", { style: `margin-left:${depth * 1.6}em;padding:1px 6px;margin-bottom:2px;width:fit-content;border-radius:3px;` +
        `background:${hits.has(below) ? "color-mix(in srgb, var(--rk-blue) 45%, transparent)" : "var(--rk-press)"}`, textContent: `${name}${below.visits > 1 ? `  ×${below.visits}` : ""}` }),
      ...draw(below, depth + 1)]);
    picture.replaceChildren(...draw(root, 0));
    note.textContent = `${prompts.length} prompts of ${sent} whole pages, ${stored} pages stored. ` +
      (words ? `What you type has ${words} words, and ${Math.min(hits.size * size, words - 1)} of them are cached.` : "");
  }
  input.addEventListener("input", show);
  input.addEventListener("keydown", (event) => {
    event.stopPropagation(); // a notebook's own shortcuts are not meant while somebody types
    if (event.key !== "Enter" || event.isComposing || !input.value.trim()) return;
    prompts.push(input.value);
    input.value = "";
    show();
  });
  const bar = slider("words in a page", 1, 8, 1, size, (value) => ((size = value), show()));
  el.append(input, bar.whole, note, picture);
  show();
}

const FIGURES = { steps, run, distribution, prefixes };

function mount(el, kind, data) {
  const inner = make("div", { className: "rekindle-figure" });
  el.replaceChildren(inner);
  const draw = FIGURES[kind];
  draw(inner, data);
}

export default { render: ({ model, el }) => mount(el, model.get("kind"), model.get("data")) };
