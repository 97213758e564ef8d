// Pieces of DOM and SVG that views and figures are made of. Text of models and readers is only ever set as text.

function make(tag, properties = {}, ...children) {
  const { style, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  if (style) made.style.cssText = style;
  made.append(...children);
  return made;
}

function shape(tag, attributes, title) {
  const space = "http://www.w3.org/2000/svg", made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title) made.append(Object.assign(document.createElementNS(space, "title"), { textContent: title }));
  return made;
}

// A slider with its name and its number. `changed` hears the number; `set` moves it without saying so.
function range({ label, title, least, most, step, value, changed }) {
  const input = make("input", { type: "range", min: least, max: most, step, ariaLabel: label });
  input.value = value;
  const shown = make("output", { textContent: input.value });
  input.addEventListener("input", () => {
    shown.textContent = input.value;
    changed?.(Number(input.value));
  });
  input.addEventListener("keydown", (event) => event.stopPropagation()); // arrows are not meant for the notebook
  const whole = make("label", { className: "rekindle-slider", title: title ?? "" }, make("span", { textContent: label }), input, shown);
  return { whole, input, set: (next) => ((input.value = next), (shown.textContent = input.value)) };
}

// A button; a quiet one has no outline until it is pointed at, a main one is filled.
function pressable({ label, title, look, disabled, pressed }) {
  const made = make("button", { type: "button", textContent: label, title: title ?? "", disabled: !!disabled });
  if (look) made.dataset.look = look;
  made.addEventListener("click", () => pressed());
  return made;
}

// A switch: a box to tick with its name.
function ticked({ label, title, value, changed }) {
  const input = make("input", { type: "checkbox", checked: !!value });
  input.addEventListener("change", () => changed(input.checked));
  return { whole: make("label", { className: "rekindle-tick", title: title ?? "" }, input, make("span", { textContent: label })), input };
}
