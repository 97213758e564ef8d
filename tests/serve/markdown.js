// Reads texts as the page does and prints the elements as JSON: node markdown.js SCRIPT, texts at standard input.
"use strict";
class Element {
  constructor(tag) { this.tag = tag; this.className = ""; this.parts = []; this.on = {}; }
  append(...parts) { this.parts.push(...parts); }
  addEventListener(kind, call) { this.on[kind] = call; }
}
globalThis.document = {createElement: (tag) => new Element(tag), createTextNode: (text) => text};
const markdown = (0, eval)(`${process.argv[2]}; markdown`);
const tree = (one) => (typeof one === "string" ? one
  : [one.tag + (one.className && "." + one.className) + (one.href ? "@" + one.href : ""), ...one.parts.map(tree)]);
const texts = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => markdown(text, () => {}).map(tree))));
