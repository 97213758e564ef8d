// Types into a panel's field over a connection with delays, in simulated time, and prints as JSON what was sent.
// node keys.js SCRIPT, with cases at its standard input: a case is { keys: [[at, key], …], there: [delay, …], back: [delay, …], refuses: [press, …] }.
// The kernel is the widget's: it merges what it reads, writes what it has, and empties the field after a press.
"use strict";
const script = process.argv[2], cases = require("node:fs").readFileSync(0, "utf8");
const contents = (0, eval)(`${script}; contents`);

function merged(text, base, now) {
  return base !== null && now !== base && text.startsWith(base) ? now + text.slice(base.length) : text;
}

function played({ keys, there, back, refuses }) {
  const events = []; // [time, order, action]
  let order = 0, clock = 0, shown = "", typed = 0, presses = 0, most = 0;
  const at = (time, action) => events.push([time, order++, action]);
  const line = (delays) => { // delays of a connection that keeps the order
    let last = 0, count = 0;
    return (action) => at(last = Math.max(last, clock + delays[count++ % delays.length]), action);
  };
  const toKernel = line(there), toPage = line(back), sent = [];
  let say = "";

  const show = (text) => { if (text !== undefined) shown = text; };
  const write = (text) => { say = text; toPage(() => show(page.take("say", text, true))); };

  function read({ event, name, page: who, number, fields }) {
    const now = Object.fromEntries(Object.entries(fields).map(([one, [text, base]]) => [one, merged(text, base, say)]));
    toPage(() => page.answered([who, number, now]));
    if ("say" in now && now.say !== say) write(now.say);
    if (event !== "press" || !say) return;
    if (refuses.includes(presses++)) return;
    sent.push(say);
    write("");
  }

  let underway = 0;
  const page = contents((message) => {
    most = Math.max(most, message.event === "typed" ? ++underway : 0);
    toKernel(() => { underway -= message.event === "typed"; read(message); });
  });
  shown = page.open("say", "");
  for (const [time, key] of keys) {
    at(time, () => {
      if (key === "Enter") return page.post({ event: "press", name: "say:enter" });
      shown = key === "Backspace" ? shown.slice(0, -1) : shown + key;
      page.type("say", shown);
    });
  }
  while (events.length) {
    if (++typed > 1e5) throw new Error("it does not come to rest");
    events.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
    const [time, , action] = events.shift();
    clock = time;
    action();
  }
  return { sent, shown, kernel: say, most };
}

console.log(JSON.stringify(JSON.parse(cases).map(played)));
