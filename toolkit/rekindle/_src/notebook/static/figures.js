// Figures over recorded data: steps of a batch, a run in time, a distribution, attention, a growing prefix tree. They ask no kernel for anything, so
// the same code runs as a widget and in a saved page. Text from models and readers is only ever set as text.

const COLOURS = Array.from({ length: 8 }, (_, place) => `var(--rk-series-${place})`);

function slider(label, least, most, step, value, changed) {
  return range({ label, least, most, step, value, changed });
}

// The batch over time, one line for each slot; a slider or a button goes from step to step.
function steps(el, { steps }) {
  const slots = Math.max(1, ...steps.map((step) => Math.max(0, ...step.rows.map((row) => row.slot + 1))));
  const width = 640, height = slots * 22 + 4, each = width / steps.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, style: "width:100%;max-width:640px;display:block",
    role: "img", "aria-label": `${steps.length} steps of a batch, a line for each slot` });
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
    words.replaceChildren(...step.rows.map((row) => make("div", { style: "font-family:monospace;font-size:85%;white-space:pre-wrap;overflow-wrap:anywhere" },
      make("span", { style: `display:inline-block;width:.8em;height:.8em;margin-right:.5em;background:${COLOURS[names.get(row.id) % COLOURS.length]}` }),
      `${row.id} ${row.kind} ${row.stop - row.start > 1 ? `${row.start}–${row.stop - 1}` : row.start}${row.ended ? `, ended by ${row.ended}` : ""}: …${texts.get(row.id).slice(-60)}`)));
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
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, style: "width:100%;max-width:640px;display:block",
    role: "img", "aria-label": `${names.length} requests in ${steps.length} steps, a line for each slot, below the tokens per second` });
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
  const LEAST = { false: 2e-3, true: 1e-7 }; // what has a bar, on a linear and on a logarithmic axis: less could not be seen
  let temperature = 1, top = 1, least = 0, logarithmic = false;
  const bars = make("div", { role: "list" }), note = make("div", { style: "margin:4px 0" }), axis = make("div", { style: "opacity:.75;font-size:80%" });
  let largest = 1; // the share of the longest bar on a linear axis
  const length = (share) => (logarithmic ? Math.max(0, 1 + Math.log10(share) / 7) : share / largest);
  const percent = (share) => (share >= 5e-4 || !share ? `${(100 * share).toFixed(1)}%` : `${(100 * share).toExponential(0)}%`);
  const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const row = (name, share, inside, colour, words) => make("div", { role: "listitem", style: "display:flex;gap:8px;align-items:center;font-size:85%" },
    make("code", { textContent: name, title: name, style: "width:9em;flex:none;text-align:right;overflow:hidden;white-space:nowrap;text-overflow:ellipsis" }),
    make("div", { style: "flex:1;min-width:0" }, make("div", { style: `height:.8em;border-radius:2px;width:${100 * length(share)}%;background:${colour};opacity:${inside ? 1 : 0.35}` })),
    make("span", { textContent: words, style: "opacity:.75;width:9em;flex:none" }));
  function show() {
    const weigh = (logit) => Math.exp((logit - logits[0]) / temperature);
    const all = logits.map((logit) => [weigh(logit), 1]).concat(rest.map(([logit, count]) => [weigh(logit), count]));
    const total = all.reduce((sum, [weight, count]) => sum + weight * count, 0);
    let before = 0, kept = 0, mass = 0;
    const shares = all.map(([weight, count]) => {
      const share = weight / total, inside = before < top && share >= least * all[0][0] / total;
      const some = inside ? Math.min(count, Math.max(1, Math.ceil((top - before) / share))) : 0;
      before += share * count;
      kept += some;
      mass += some * share;
      return [share, some];
    });
    const seen = texts.map((text, at) => [text, ...shares[at]]).filter(([, share], at) => at < 3 || share >= LEAST[logarithmic]);
    const others = shares.reduce((sum, [, some]) => sum + some, 0) - seen.reduce((sum, [, , some]) => sum + some, 0);
    const theirs = shares.reduce((sum, [share, some]) => sum + share * some, 0) - seen.reduce((sum, [, share, some]) => sum + share * some, 0);
    const drawn = seen.map(([text, share, some]) => [text, some ? share / mass : share, some]);
    largest = Math.max(...drawn.map(([, share]) => share), others ? theirs / mass : 0);
    bars.replaceChildren(...drawn.map(([text, share, some]) => row(JSON.stringify(text), share, some > 0, COLOURS[0], some ? percent(share) : `cut, ${percent(share)}`)));
    if (others) bars.append(row(many(others, "other"), theirs / mass, true, "var(--rk-grey)", `${percent(theirs / mass)} together`));
    axis.textContent = logarithmic ? "The axis is logarithmic: a bar of full length is 100%, none 0.00001%." : `The longest bar is ${percent(largest)}.`;
    note.textContent = `${many(kept, "token")} can be drawn; what was cut had ${(100 * Math.max(0, 1 - mass)).toFixed(1)}% of the probability.`;
  }
  const controls = [
    slider("temperature", 0.1, 3, 0.1, 1, (value) => ((temperature = value), show())),
    slider("top_p", 0.05, 1, 0.05, 1, (value) => ((top = value), show())),
    slider("min_p", 0, 0.5, 0.01, 0, (value) => ((least = value), show())),
    ticked({ label: "logarithmic", value: false, changed: (on) => ((logarithmic = on), show()) }),
  ];
  el.append(make("div", { style: "display:flex;flex-wrap:wrap;gap:4px 16px;margin:4px 0" }, ...controls.map((one) => one.whole)), note, bars, axis);
  show();
}

// Attention, a layer at a time: every head as a small map, one of them large with its tokens. A cell is the square root of a weight.
function attention(el, { layers, heads, rows, columns, left: LEFT, top: TOP, reading, spans, cells, colour, note }) {
  const RIGHT = 34, SMALL = 64, COLUMNS = columns.length, ROWS = rows.length, SIZE = ROWS * COLUMNS;
  const only = COLUMNS === 1;
  let layer = 0, head = -1, first = only, apart = true, place = null, shares = [];

  const weight = Float32Array.from({ length: 256 }, (_, level) => (level / 255) ** 2);
  function read() { // loops over numbers: with functions and arrays for each cell, another layer took 3 times as long
    const bytes = atob(cells[layer]), mean = new Float32Array(SIZE);
    shares = [];
    for (let at = 0; at < heads[layer]; at += 1) {
      const map = new Float32Array(SIZE);
      for (let cell = 0; cell < SIZE; cell += 1) mean[cell] += (map[cell] = weight[bytes.charCodeAt(at * SIZE + cell)]) / heads[layer];
      shares.push(map);
    }
    shares.mean = mean;
    head = Math.min(head, shares.length - 1);
  }
  const of = (at) => (at < 0 ? shares.mean : shares[at]);
  function largest(map) {
    let most = 1e-6;
    for (let cell = 0; cell < SIZE; cell += 1) if (map[cell] > most && (first || cell % COLUMNS)) most = map[cell];
    return most;
  }
  const scaleOf = (at) => (apart ? largest(of(at)) : Math.max(...shares.map(largest)));
  const percent = (share) => `${(100 * share).toPrecision(share >= 0.1 ? 2 : 1)}%`;
  const nameOf = (at) => (at < 0 ? "mean" : `head ${at}`);

  function paint(canvas, at, scale) {
    const map = of(at), context = canvas.getContext("2d"), image = context.createImageData(COLUMNS, Math.max(1, ROWS)), pixels = image.data;
    for (let cell = 0; cell < SIZE; cell += 1) {
      pixels[4 * cell] = colour[0], pixels[4 * cell + 1] = colour[1], pixels[4 * cell + 2] = colour[2];
      pixels[4 * cell + 3] = first || cell % COLUMNS ? Math.min(255, (255 * map[cell]) / scale) : 0;
    }
    context.putImageData(image, 0, 0);
  }

  const size = Math.min(18, (620 - LEFT - RIGHT) / COLUMNS), width = LEFT + size * COLUMNS + RIGHT, height = TOP + size * ROWS + 2;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "img", style: "max-width:100%;height:auto;display:block;touch-action:manipulation" });
  const text = (x, y, content, more) => {
    const made = shape("text", { x, y, "font-size": Math.min(11, size), fill: "currentColor", ...more });
    made.textContent = content;
    svg.append(made);
    return made;
  };
  const left = rows.map((name, row) => text(LEFT - 5, TOP + size * (row + 0.5) + Math.min(11, size) * 0.35, name, { "text-anchor": "end" }));
  const above = columns.map((name, column) => {
    const x = LEFT + size * (column + 0.5) + Math.min(11, size) * 0.3;
    return text(x, TOP - 5, name, { transform: `rotate(-60 ${x} ${TOP - 5})` });
  });
  const picture = make("canvas", { width: COLUMNS, height: Math.max(1, ROWS) });
  const image = shape("image", { x: LEFT, y: TOP, width: size * COLUMNS, height: size * ROWS, preserveAspectRatio: "none", style: "image-rendering:pixelated" });
  const around = shape("rect", { x: LEFT, y: TOP, width: size * COLUMNS, height: size * ROWS, fill: "none", stroke: "currentColor", "stroke-opacity": 0.35, "stroke-width": 0.5 });
  const cursor = shape("rect", { width: size, height: size, fill: "none", stroke: "currentColor", "stroke-width": 1.5, visibility: "hidden" });
  svg.append(image, around, cursor);
  const words = make("div", { style: "min-height:1.5em;font-size:90%" });
  words.setAttribute("aria-live", "polite");
  const most = make("span"), sunk = make("span");
  const scales = make("div", { style: "font-size:90%;opacity:.75" }, "0 ", make("span", { ariaHidden: "true",
    style: `display:inline-block;width:96px;height:.7em;border-radius:2px;background:linear-gradient(90deg,transparent,rgb(${colour}))` }), most, sunk);
  // The text itself, shaded by what one of its tokens reads: the last one, or one that is pointed at.
  const reader = make("div", { style: "font-size:90%;opacity:.75" });
  const prose = make("div", { style: "white-space:pre-wrap;max-width:620px;line-height:1.7;cursor:default" });
  const pieces = columns.map((name, column) => {
    const piece = make("span", { textContent: name.replaceAll("·", " "), style: "border-radius:2px" });
    piece.addEventListener("pointerenter", () => {
      const row = reading.indexOf(spans[column][0]);
      if (row >= 0 && spans[column][1] === spans[column][0] + 1) point([row, column]);
    });
    return piece;
  });
  prose.append(...pieces);
  prose.addEventListener("pointerleave", () => point(null));
  const title = make("div", { style: "font-weight:600;margin:4px 0 2px" });
  const about = make("div", { style: "font-size:90%;opacity:.75", textContent: ["rows read, columns are read", "press a head to enlarge it", note].filter(Boolean).join(" · ") });

  function point(next) {
    for (const [names, at] of [[left, place?.[0]], [above, place?.[1]]]) if (at !== undefined) names[at].removeAttribute("font-weight");
    place = next;
    cursor.setAttribute("visibility", place ? "visible" : "hidden");
    if (!place) return describe();
    const [row, column] = place;
    left[row].setAttribute("font-weight", 700), above[column].setAttribute("font-weight", 700);
    cursor.setAttribute("x", LEFT + size * column), cursor.setAttribute("y", TOP + size * row);
    describe();
  }

  function shade() {
    const row = place ? place[0] : ROWS - 1;
    if (row < 0) return;
    const line = of(head).subarray(row * COLUMNS, (row + 1) * COLUMNS);
    let largest = 1e-6;
    line.forEach((share, column) => { if (first || column) largest = Math.max(largest, share); });
    pieces.forEach((piece, column) => {
      const shown = first || column ? line[column] : 0, own = spans[column][0] === reading[row];
      piece.style.background = `rgba(${colour},${(0.5 * shown / largest).toFixed(2)})`;
      piece.style.outline = own ? "1.5px solid var(--rk-orange)" : "";
      piece.title = shown ? percent(shown) : "";
    });
    reader.textContent = `what ${rows[row]} (${reading[row]}) reads, ${head < 0 ? "mean of all heads" : nameOf(head)}; point at another token`;
  }

  function describe() {
    const scale = scaleOf(head);
    shade();
    if (place) {
      const [row, column] = place, [start, stop] = spans[column];
      const where = stop === start + 1 ? `${columns[column]} (${start})` : `${columns[column]} (${start} to ${stop - 1})`;
      words.textContent = `${rows[row]} (${reading[row]}) reads ${where}: ${percent(of(head)[row * COLUMNS + column])}`;
    } else words.textContent = "Point at a cell for its number, or go there with the arrow keys.";
    const sink = shares.length && ROWS ? Array.from({ length: ROWS }, (_, row) => of(head)[row * COLUMNS]).reduce((sum, share) => sum + share, 0) / ROWS : 0;
    most.textContent = ` ${percent(scale)}`;
    sunk.textContent = first ? "" : ` · position 0, which gets ${percent(sink)}, is left out`;
  }

  const maps = make("div", { style: "display:flex;flex-wrap:wrap;gap:8px;margin:8px 0" });
  let small = [];
  function choose(at) {
    head = at;
    draw();
  }
  function smalls() {
    small = [-1, ...shares.keys()].map((at) => {
      const canvas = make("canvas", { width: COLUMNS, height: Math.max(1, ROWS), style: `width:${SMALL}px;height:${SMALL}px;image-rendering:pixelated;display:block` });
      const button = make("button", { type: "button", title: `show ${nameOf(at)} large`, style: "padding:2px;border-radius:4px;line-height:1.3" }, canvas, make("span", { textContent: nameOf(at), style: "font-size:80%" }));
      button.addEventListener("click", () => choose(at));
      return { at, canvas, button };
    });
    maps.replaceChildren(...small.map((each) => each.button));
  }
  function draw() {
    const common = apart ? 0 : scaleOf(head);
    for (const { at, canvas, button } of small) {
      paint(canvas, at, common || scaleOf(at));
      button.setAttribute("aria-pressed", at === head);
      button.style.outline = at === head ? "2px solid var(--rk-blue)" : "";
    }
    paint(picture, head, scaleOf(head));
    image.setAttribute("href", picture.toDataURL());
    above[0].setAttribute("opacity", first ? 1 : 0.75);
    title.textContent = `attention of layer ${layers[layer]}, ${head < 0 ? "mean of its heads" : nameOf(head)}`;
    svg.setAttribute("aria-label", `${title.textContent}. Arrow keys move over its cells.`);
    describe();
  }
  function change() {
    const before = shares.length;
    read();
    if (shares.length !== before) smalls();
    draw();
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), ratio = width / box.width;
    const column = Math.floor(((event.clientX - box.left) * ratio - LEFT) / size), row = Math.floor(((event.clientY - box.top) * ratio - TOP) / size);
    const inside = row >= 0 && row < ROWS && column >= 0 && column < COLUMNS;
    if (inside ? place?.[0] !== row || place?.[1] !== column : place) point(inside ? [row, column] : null);
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by || !ROWS) return;
    event.preventDefault();
    event.stopPropagation(); // a notebook would go to another cell
    const within = (value, most) => Math.min(most - 1, Math.max(0, value));
    point(place ? [within(place[0] + by[0], ROWS), within(place[1] + by[1], COLUMNS)] : [ROWS - 1, COLUMNS - 1]);
  });
  const controls = make("div", { style: "display:flex;flex-wrap:wrap;gap:4px 16px;margin:4px 0;align-items:center" });
  if (layers.length > 1) {
    const bar = range({ label: "layer", least: 0, most: layers.length - 1, step: 1, value: 0, changed: (at) => ((layer = at), change(), number()) });
    const number = () => (bar.whole.querySelector("output").textContent = layers[layer]); // some layers may be left out
    number();
    controls.append(bar.whole);
  }
  if (!only) controls.append(ticked({ label: "position 0", title: "Many heads rest there", value: first, changed: (on) => ((first = on), draw()) }).whole);
  controls.append(ticked({ label: "a scale for each head", title: "Otherwise the largest weight of all heads has the strongest shade", value: apart, changed: (on) => ((apart = on), draw()) }).whole);
  el.append(title, about, controls, reader, prose, svg, scales, words, maps);
  change();
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
  el.append(make("div", { style: "display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center" }, input, bar.whole), note, picture);
  show();
}

const FIGURES = { attention, steps, run, distribution, prefixes };

function mount(el, kind, data) {
  const inner = make("div", { className: "rekindle-figure" });
  el.replaceChildren(inner);
  const draw = FIGURES[kind];
  draw(inner, data);
}

export default { render: ({ model, el }) => mount(el, model.get("kind"), model.get("data")) };
