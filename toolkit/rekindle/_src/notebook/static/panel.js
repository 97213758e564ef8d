// A picture, the controls below it and a note below them. It needs the anywidget model, a DOM and the pieces, and nothing
// else: no imports, no network, no globals of a particular notebook.

const PATIENCE = 5000; // milliseconds that a kernel has to answer: it can't while a cell runs
const DOUBT = 1500; // the same after the notebook's connection to it has changed

function render({ model, el }) {
  const picture = make("div"), bar = make("div", { className: "rekindle-bar" }), note = make("div");
  const alarm = make("div", { className: "rekindle-alarm", hidden: true });
  // A copy of the picture lies in the notebook for the time without a kernel; it is hidden while this one is shown.
  const hide = make("style", { textContent: model.get("kept") && `.${model.get("kept")} { display: none }` });
  el.classList.add("rekindle-panel");
  el.append(hide, picture, bar, note, alarm);

  let asked = 0; // the timer of a message that was not answered yet
  let doubtful = false; // the connection has changed since the kernel answered last
  const typed = {}; // by the name of a field, its contents since the last press: what a busy kernel may still know
  let kept = 0; // how often keys were kept since the last one: another viewer may keep its own

  function say(event, name, value) {
    asked ||= setTimeout(unanswered, doubtful ? DOUBT : PATIENCE);
    if (event === "press") for (const input of fields()) typed[input.dataset.name] = [input.value];
    try {
      model.send({ event, name, value });
    } catch {
      doubtful = true; // the host knows that there is no kernel
      unanswered();
    }
  }

  function unanswered() {
    el.classList.toggle("rekindle-gone", doubtful);
    for (const one of bar.querySelectorAll("button, input, textarea")) one.disabled ||= doubtful;
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
  }

  function changed() {
    clearTimeout(asked);
    asked = 0;
    doubtful = true;
    say("ping", "");
  }

  function button({ name, label, title, disabled }) {
    return pressable({ label, title, disabled, pressed: () => say("press", name) });
  }

  const fields = () => bar.querySelectorAll("[data-name]");

  function write(name, value) {
    model.set("values", { ...model.get("values"), [name]: value });
    model.save_changes();
  }

  function named(made, name, label) {
    made.setAttribute("aria-label", label);
    made.dataset.name = name;
    typed[name] = [made.value];
    made.addEventListener("input", () => {
      typed[name] = [...typed[name].slice(-200), made.value];
      kept = 0;
      write(name, made.value);
    });
    return made;
  }

  function text({ name, label, width, rows }) {
    const kind = rows > 1 ? make("textarea", { rows }) : make("input", { type: "text" });
    const made = named(Object.assign(kind, { className: "rekindle-field", placeholder: label, value: model.get("values")[name] ?? "" }), name, label);
    made.style.width = width ?? "20em";
    made.addEventListener("keydown", (event) => {
      event.stopPropagation(); // a notebook's own shortcuts are not meant while somebody types
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault(); // Shift+Enter is for another line
      say("press", `${name}:enter`);
    });
    return made;
  }

  function slider({ name, label, title, least, most, step }) {
    const made = range({ label, title, least, most, step, value: model.get("values")[name] ?? least });
    named(made.input, name, label);
    return made.whole;
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

  let copied = {}; // the message that was copied last, which a new picture still says

  function copier(said, at) {
    const known = copied.at === at && copied.text === said.innerText;
    const made = make("button", { type: "button", className: "rekindle-copy", textContent: known ? "Copied" : "Copy" });
    made.addEventListener("click", () => {
      const held = make("textarea", { value: said.innerText, className: "rekindle-held" });
      el.append(held); // the clipboard's own interface is closed to frames of other origins, as VS Code's and Colab's
      held.select();
      const done = document.execCommand("copy");
      held.remove();
      for (const other of picture.querySelectorAll(".rekindle-copy")) other.textContent = "Copy";
      made.textContent = done ? "Copied" : "Not allowed";
      copied = done ? { at, text: said.innerText } : {};
    });
    return made;
  }

  function draw() {
    const open = [...picture.querySelectorAll("details[data-fold][open]")].map((one) => one.dataset.fold);
    picture.innerHTML = model.get("html");
    for (const one of picture.querySelectorAll("details[data-fold]")) one.open ||= open.includes(one.dataset.fold);
    picture.querySelectorAll("[data-said]").forEach((said, at) => said.after(copier(said, at)));
  }

  function annotate() {
    note.innerHTML = model.get("note");
  }

  const makers = { text, button, slider, file };

  function control() {
    // Controls that stay are not moved: who types in one keeps its focus and the caret.
    const before = new Map([...bar.children].map((one) => [one.dataset.control, one]));
    const now = model.get("controls").map((one) => {
      const control = JSON.stringify(one), made = before.get(control) ?? makers[one.kind](one);
      made.dataset.control = control;
      return made;
    });
    for (const one of before.values()) if (!now.includes(one)) one.remove();
    now.forEach((one, at) => { if (bar.children[at] !== one) bar.insertBefore(one, bar.children[at] ?? null); });
  }

  function fill() {
    const active = bar.getRootNode().activeElement; // some hosts draw into a shadow root
    for (const input of fields()) {
      const name = input.dataset.name, value = String(model.get("values")[name] ?? "");
      if (input.type === "range") {
        if (input.value !== value) input.value = value;
        input.nextSibling.textContent = input.value;
      } else if (input.value !== value && input === active && typed[name].includes(value) && kept++ < 8) {
        write(name, input.value); // the kernel wrote into another field before it knew of these keys
      } else if (input.value !== value) {
        input.value = value;
        typed[name] = [value];
      }
    }
  }

  picture.addEventListener("click", (event) => {
    const token = event.target.closest("[data-token]");
    if (token) say("token", "", Number(token.dataset.token));
  });
  const filed = { dragover: dragged, dragleave: dragged, drop: dragged, paste: pasted };
  for (const [event, react] of Object.entries(filed)) el.addEventListener(event, react);
  const heard = { "change:html": draw, "change:note": annotate, "change:controls": control, "change:values": fill };
  for (const react of Object.values(heard)) react();
  heard["change:heard"] = answered;
  heard["comm_live_update"] = changed; // a notebook's connection was lost, or is back
  for (const [event, react] of Object.entries(heard)) model.on(event, react);
  return () => {
    clearTimeout(asked);
    for (const [event, react] of Object.entries(filed)) el.removeEventListener(event, react);
    for (const [event, react] of Object.entries(heard)) model.off(event, react);
  };
}

export default { render };
