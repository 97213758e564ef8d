// A picture, the controls below it and a note below them. It needs the anywidget model, a DOM and the pieces, and nothing
// else: no imports, no network, no globals of a particular notebook.

const PATIENCE = 5000; // milliseconds that a kernel has to answer: it can't while a cell runs
const SHY = ["copy", "edit", "again", "pick"]; // what appears under the pointer, or with the focus
const DOUBT = 1500; // the same after the notebook's connection to it has changed

function render({ model, el }) {
  const picture = make("div"), bar = make("div", { className: "rekindle-bars" });
  const note = make("div", { role: "status" });
  const alarm = make("div", { className: "rekindle-alarm", hidden: true });
  // A copy of the picture lies in the notebook for the time without a kernel; it is hidden while this one is shown.
  const hide = make("style", { textContent: model.get("kept") && `.${model.get("kept")} { display: none }` });
  el.classList.add("rekindle-panel");
  el.append(hide, picture, bar, note, alarm);

  let held = []; // the elements around what has the focus, the nearest first; none while nothing here has it

  function remember(event) {
    held = event.composedPath().filter((one) => one.nodeType === 1 && !el.contains(one));
  }

  // A button that ends its view goes with it. Who pressed it by a key would have to find back from the page's top.
  function handOn() {
    const lost = [null, document.body].includes(document.activeElement) || el.contains(document.activeElement);
    if (lost) held.find((one) => one.isConnected && one.hasAttribute("tabindex"))?.focus();
  }

  function left() {
    setTimeout(() => {
      if (el.isConnected && !el.contains(el.getRootNode().activeElement)) held = [];
    });
  }

  let asked = 0; // the timer of a message that was not answered yet
  let doubtful = false; // the connection has changed since the kernel answered last
  const written = contents(deliver);

  function deliver(message) {
    try {
      model.send(message);
    } catch {
      doubtful = true; // the host knows that there is no kernel
      unanswered();
    }
  }

  function say(event, name, value) {
    asked ||= setTimeout(unanswered, doubtful ? DOUBT : PATIENCE);
    written.post({ event, name, value });
  }

  function unanswered() {
    el.classList.toggle("rekindle-gone", doubtful);
    for (const one of bar.querySelectorAll("button, input, select, textarea")) one.disabled ||= doubtful;
    const busy = "No answer from the kernel: it is busy, or gone. What is shown here stays in the notebook.";
    alarm.textContent = doubtful ? model.get("gone") : busy;
    alarm.hidden = false;
  }

  function answered() {
    clearTimeout(asked);
    asked = 0;
    alarm.hidden = true;
    doubtful = false;
    if (el.classList.contains("rekindle-gone")) bar.replaceChildren(), control(); // it was only away: its controls act again
    el.classList.remove("rekindle-gone");
    written.answered(model.get("heard"));
  }

  function changed() {
    clearTimeout(asked);
    asked = 0;
    doubtful = true;
    written.lost();
    say("ping", "");
  }

  function button({ name, label, title, disabled, look }) {
    const made = pressable({ label, title, disabled, look, pressed: () => say("press", name) });
    if (look === "on") made.ariaPressed = "true";
    return made;
  }

  const fields = () => bar.querySelectorAll("[data-name]");

  const value = (name) => String(model.get("values")[name] ?? "");

  function named(made, name, label) {
    made.setAttribute("aria-label", label);
    made.dataset.name = name;
    made.value = written.open(name, value(name)) || made.value;
    made.addEventListener("input", () => written.type(name, made.value));
    return made;
  }

  function grow(input) {
    if (!input.classList.contains("rekindle-grows") || !input.isConnected) return;
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  }

  function text({ name, label, width, rows, grows }) {
    const kind = rows > 1 || grows ? make("textarea", { rows: rows ?? 1 }) : make("input", { type: "text" });
    const made = named(Object.assign(kind, { className: `rekindle-field${grows ? " rekindle-grows" : ""}`, placeholder: label }), name, label);
    made.style.width = width ?? "20em";
    made.addEventListener("input", () => grow(made));
    made.addEventListener("keydown", (event) => {
      event.stopPropagation(); // a notebook's own shortcuts are not meant while somebody types
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault(); // Shift+Enter is for another line
      say("press", `${name}:enter`);
    });
    return made;
  }

  function slider({ name, label, title, least, most, step }) {
    const made = range({ label, title, least, most, step, value: value(name) || least });
    made.set(named(made.input, name, label).value);
    return made.whole;
  }

  function choice({ name, label, title, choices }) {
    const made = make("select", { className: "rekindle-field", title });
    made.append(...choices.map((one) => make("option", { value: one, textContent: one })));
    named(made, name, label);
    made.addEventListener("change", () => say("press", name));
    made.addEventListener("keydown", (event) => event.stopPropagation()); // arrows choose, and are not the notebook's
    return made;
  }

  function file({ label, title, accept }) {
    const whole = make("span"), chosen = make("input", { type: "file", accept, multiple: true, hidden: true });
    const made = pressable({ label, title, pressed: () => chosen.click() });
    chosen.addEventListener("change", () => { take([...chosen.files]); chosen.value = ""; });
    whole.append(made, chosen);
    return whole;
  }

  const takes = () => model.get("files") >= 0 && !el.classList.contains("rekindle-gone");

  async function take(files) {
    for (const [at, one] of files.slice(0, 16).entries()) {
      const uri = one.size > model.get("files") ? "" : await content(one);
      say("file", "", { at, size: one.size, uri });
    }
  }

  function content(one) {
    return new Promise((done) => {
      const reader = new FileReader();
      reader.addEventListener("loadend", () => done(reader.result ?? ""));
      reader.readAsDataURL(one);
    });
  }

  function dragged(event) {
    const over = event.type === "dragover", dropped = event.type === "drop";
    if ((over || dropped) && !(takes() && event.dataTransfer?.types.includes("Files"))) return;
    el.classList.toggle("rekindle-drop", over);
    if (!over && !dropped) return;
    event.preventDefault(); // a notebook would open the file, or take it for one of its own
    event.stopPropagation();
    if (dropped) take([...event.dataTransfer.files]);
  }

  function pasted(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || !takes()) return;
    event.preventDefault();
    event.stopPropagation();
    take(files);
  }

  let copied = {}; // the place of what was copied last, which a new picture still says

  function copy(made) {
    const whole = made.closest(".rekindle-turn, .rekindle-code"), said = whole?.querySelector("[data-said], pre");
    if (!said) return;
    const held = make("textarea", { value: said.innerText, className: "rekindle-held" });
    el.append(held); // the clipboard's own interface is closed to frames of other origins, as VS Code's and Colab's
    held.select();
    const done = document.execCommand("copy");
    held.remove();
    made.focus();
    const all = [...picture.querySelectorAll("[data-press=copy]")];
    for (const other of all) other.dataset.label = "Copy";
    made.dataset.label = done ? "Copied" : "Not allowed";
    copied = done ? { at: all.indexOf(made), text: said.textContent } : {};
  }

  // What a picture declares as pressable becomes a button. Its label is no text of it, so that nobody copies it.
  function prepare(root) {
    for (const one of root.querySelectorAll("[data-press]")) {
      const made = make("button", { type: "button", title: one.title });
      Object.assign(made.dataset, { look: "quiet", ...one.dataset });
      if (SHY.includes(made.dataset.press)) made.className = "rekindle-shy";
      made.setAttribute("aria-label", made.dataset.label);
      one.replaceWith(made);
    }
    root.querySelectorAll("[data-press=copy]").forEach((made, at) => {
      const whole = made.closest(".rekindle-turn, .rekindle-code");
      if (copied.at === at && copied.text === whole?.querySelector("[data-said], pre")?.textContent) made.dataset.label = "Copied";
    });
    for (const row of root.querySelectorAll("[data-row]")) {
      row.setAttribute("tabindex", "0");
      row.setAttribute("role", "button");
      row.closest("svg")?.setAttribute("role", "group"); // parts of an image are nothing that can be pressed
    }
    for (const tokens of root.querySelectorAll("[data-tokens]")) {
      tokens.tabIndex = 0;
      tokens.setAttribute("role", "group");
      tokens.setAttribute("aria-label", "tokens of the answer: arrows go through them, Enter marks one");
    }
  }

  // Change what differs and leave the rest: a selection, a focus and an unfolded part stay while a text grows.
  function morph(now, next) {
    const before = [...now.childNodes], after = [...next.childNodes];
    after.forEach((one, at) => {
      const was = before[at];
      if (!was) now.append(one);
      else if (was.isEqualNode(one)) return;
      else if (was.nodeType !== 1 || was.nodeName !== one.nodeName) was.replaceWith(one);
      else {
        const folds = was.dataset?.fold !== undefined && was.dataset.fold === one.dataset.fold;
        for (const { name } of [...was.attributes]) if (!one.hasAttribute(name) && !(folds && name === "open")) was.removeAttribute(name);
        for (const { name, value } of one.attributes) if (was.getAttribute(name) !== value) was.setAttribute(name, value);
        morph(was, one);
      }
    });
    for (const one of before.slice(after.length)) one.remove();
  }

  function draw() {
    const log = picture.querySelector("[role=log]");
    const low = !log || log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const next = make("template");
    next.innerHTML = model.get("html");
    prepare(next.content);
    morph(picture, next.content);
    const now = picture.querySelector("[role=log]");
    if (now && low) now.scrollTop = now.scrollHeight;
  }

  function annotate() {
    note.innerHTML = model.get("note");
  }

  const makers = { text, button, slider, choice, file };

  function area(group) {
    const known = [...bar.children].find((one) => one.dataset.group === group);
    return known ?? make("div", { className: `rekindle-bar rekindle-${group || "plain"}` });
  }

  function control() {
    // Controls that stay are not moved: who types in one keeps its focus and the caret.
    const active = bar.getRootNode().activeElement; // some hosts draw into a shadow root
    const before = new Map([...bar.querySelectorAll("[data-control]")].map((one) => [one.dataset.control, one]));
    const lost = bar.contains(active) ? active.closest("[data-control]")?.dataset : undefined;
    const groups = new Map();
    for (const one of model.get("controls")) {
      const control = JSON.stringify(one), made = before.get(control) ?? makers[one.kind](one);
      made.dataset.control = control;
      made.dataset.spot = one.spot || one.name;
      groups.set(one.group ?? "", [...(groups.get(one.group ?? "") ?? []), made]);
    }
    const now = [...groups.values()].flat();
    for (const one of before.values()) if (!now.includes(one)) one.remove();
    const areas = [...groups].map(([group, controls]) => {
      const whole = area(group);
      whole.dataset.group = group;
      controls.forEach((one, at) => { if (whole.children[at] !== one) whole.insertBefore(one, whole.children[at] ?? null); });
      return whole;
    });
    for (const one of [...bar.children]) if (!areas.includes(one)) one.remove();
    areas.forEach((one, at) => { if (bar.children[at] !== one) bar.insertBefore(one, bar.children[at] ?? null); });
    if (lost && !now.some((one) => one.dataset.control === lost.control)) now.find((one) => one.dataset.spot === lost.spot)?.focus();
    written.close([...fields()].map((input) => input.dataset.name));
    for (const input of fields()) grow(input);
  }

  function fill() {
    written.answered(model.get("heard")); // a host that comes back sets both at once
    for (const input of fields()) {
      requestAnimationFrame(() => grow(input));
      const name = input.dataset.name, ranges = input.type === "range";
      const text = written.take(name, value(name), ["text", "textarea"].includes(input.type));
      if (text === undefined) continue;
      input.value = text;
      if (ranges) input.nextSibling.textContent = input.value;
    }
  }

  function pressed(target) {
    const made = target.closest("[data-press], [data-row], [data-token]");
    if (!made || el.classList.contains("rekindle-gone")) return made?.dataset.press === "copy" ? copy(made) : undefined;
    const { press, row, at, token } = made.dataset;
    if (press === "copy") copy(made);
    else if (token) say("token", "", Number(token));
    else say("act", press ?? row, Number(at));
  }

  let cursor = 0; // the token that arrows have come to

  function stepped(event) {
    const target = event.composedPath()[0], tokens = target.closest?.("[data-tokens]");
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const enters = event.key === "Enter" || event.key === " ";
    if (target.closest?.("[data-press]") && enters) event.stopPropagation(); // the notebook has keys of its own
    if (target.closest?.("[data-row]") && enters) pressed(target);
    else if (!tokens || !(by || enters)) return;
    const all = [...(tokens?.querySelectorAll("[data-token]") ?? [])];
    if (by && all.length) {
      cursor = Math.min(all.length - 1, Math.max(0, cursor + by));
      for (const one of all) one.classList.toggle("rekindle-cursor", one === all[cursor]);
      all[cursor].scrollIntoView({ block: "nearest" });
    } else if (tokens && enters && all[cursor]) pressed(all[cursor]);
    event.preventDefault();
    event.stopPropagation();
  }

  bar.addEventListener("keydown", (event) => {
    if (event.target.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) event.stopPropagation();
  });
  picture.addEventListener("click", (event) => pressed(event.target));
  picture.addEventListener("keydown", stepped);
  el.addEventListener("focusin", remember);
  el.addEventListener("focusout", left);
  const filed = { dragover: dragged, dragleave: dragged, drop: dragged, paste: pasted };
  for (const [event, react] of Object.entries(filed)) el.addEventListener(event, react);
  const heard = { "change:html": draw, "change:note": annotate, "change:controls": control, "change:values": fill };
  for (const react of Object.values(heard)) react();
  heard["change:heard"] = answered;
  heard["comm_live_update"] = changed; // a notebook's connection was lost, or is back
  for (const [event, react] of Object.entries(heard)) model.on(event, react);
  return () => {
    clearTimeout(asked);
    handOn();
    for (const [event, react] of Object.entries(filed)) el.removeEventListener(event, react);
    for (const [event, react] of Object.entries(heard)) model.off(event, react);
  };
}

export default { render };
