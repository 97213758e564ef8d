// Runs the page's script with as much of a document as it uses, over the network; what it shows is printed as JSON.
// node page.js ADDRESS SCRIPT IDS STEPS: each step is [action, …].
"use strict";
const [, , address, script, ids, steps] = process.argv;

class Element {
  constructor(tag) { Object.assign(this, {tag, text: "", children: [], hidden: false, value: "", on: {}, style: {}, className: ""}); }
  get textContent() { return this.children.length ? this.children.map((one) => one.textContent).join("|") : this.text; }
  set textContent(text) { this.children = []; this.text = String(text); }
  append(...parts) {
    for (const part of parts) {
      part.parent = this;
      this.children.push(part);
      if (part.tag === "option" && (part.chosen || this.children.length === 1)) this.value = part.value;
    }
  }
  replaceChildren(...parts) { this.children = []; this.append(...parts); }
  remove() { this.parent.children = this.parent.children.filter((one) => one !== this); }
  addEventListener(kind, call) { this.on[kind] = call; }
}
for (const name of ["innerHTML", "outerHTML"])
  Object.defineProperty(Element.prototype, name, {set() { throw new Error(name + " was set"); }});

const all = Object.fromEntries(JSON.parse(ids).map((id) => [id, new Element("div")]));
const written = (text) => Object.assign(new Element("text"), {text});
globalThis.document = {
  getElementById: (id) => all[id], createElement: (tag) => new Element(tag), createTextNode: written,
  addEventListener: (kind, call) => { page.on[kind] = call; },
};
const page = new Element("document");
globalThis.location = {href: address + "/"};
globalThis.Option = function (text, value, _, chosen) {
  const option = new Element("option");
  Object.assign(option, {text, value, chosen});
  return option;
};
const plain = globalThis.fetch;
globalThis.fetch = (path, options) => {
  if (options.body) sent.push(JSON.parse(options.body));
  return plain(new URL(path, location.href), options);
};
const find = (one, text) => (one.tag === "button" && one.textContent === text ? one : one.children.map((part) => find(part, text)).find(Boolean));
const tree = (one) => (one.tag === "text" ? one.text : [one.tag, one.className, ...(one.children.length ? one.children.map(tree) : [one.text])]);
const sent = [];
const until = async (holds) => { while (!holds()) await new Promise((go) => setTimeout(go, 10)); };

(async () => {
  (0, eval)(script);
  for (const [action, id, text] of JSON.parse(steps)) {
    if (action === "type") all[id].value = text;
    if (action === "click") all[id].on.click();
    if (action === "press") find(all[id], text).on.click();
    if (action === "key") page.on.keydown({key: id});
    if (action === "submit") all[id].on.submit({preventDefault() {}});
    if (action === "shows") await until(() => new RegExp(text).test(all[id].textContent));
  }
  const shown = Object.entries(all).map(([id, one]) => [id, {text: one.textContent, hidden: one.hidden, value: one.value, tree: tree(one)}]);
  console.log(JSON.stringify({...Object.fromEntries(shown), sent}));
  process.exit(0);
})();
