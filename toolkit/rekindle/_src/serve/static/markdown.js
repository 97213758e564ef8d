// Markdown of an answer as elements: headings, paragraphs, lists, quotes, rules, tables, code, bold, italic and links.
// All else is text, and text is only ever set as text. A model writes it: each reader goes on from where the last one
// ended, and looks no further than RUN characters for an end. Images are not shown, since loading one tells its server.

const RUN = 2000, DEEPEST = 8, ROWS = 200, COLUMNS = 64;

function made(tag, look, ...children) {
  const element = document.createElement(tag);
  if (look) element.className = look;
  for (const one of children.flat()) element.append(typeof one === "string" ? document.createTextNode(one) : one);
  return element;
}

// What stands between two marks within a line; the end of the second mark is `stop`. Undefined if there is no such.
function between(text, at, open, close = open) {
  if (!text.startsWith(open, at)) return undefined;
  const start = at + open.length, end = text.slice(start, start + RUN).indexOf(close);
  return end > 0 ? { inner: text.slice(start, start + end), stop: start + end + close.length } : undefined;
}

function target(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) ? url.href : undefined;
  } catch (_) { return undefined; }
}

const tight = (found) => found && found.inner === found.inner.trim() ? found : undefined;

function backticks(text, at) {
  let length = 1;
  while (length < 8 && text[at + length] === "`") length += 1;
  return "`".repeat(length);
}

// The element that begins at a place of a line, and its end.
function element(text, at) {
  let found;
  if (text[at] === "`" && (found = between(text, at, backticks(text, at)))) return { part: made("code", "", found.inner.trim()), stop: found.stop };
  if ((found = tight(between(text, at, "**")))) return { part: made("b", "", inline(found.inner)), stop: found.stop };
  if (text[at] === "*" && (found = tight(between(text, at, "*")))) return { part: made("i", "", inline(found.inner)), stop: found.stop };
  const label = between(text, at, "[", "]"), href = label && between(text, label.stop, "(", ")"), where = href && target(href.inner);
  if (!where) return undefined;
  const link = made("a", "", inline(label.inner));
  Object.assign(link, { href: where, target: "_blank", rel: "noopener noreferrer", title: where });
  return { part: link, stop: href.stop };
}

function inline(text) {
  const parts = [];
  let from = 0, at = 0;
  while (at < text.length) {
    const found = "`*[".includes(text[at]) ? element(text, at) : undefined;
    if (!found) { at += 1; continue; }
    if (from < at) parts.push(text.slice(from, at));
    parts.push(found.part);
    from = at = found.stop;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

const indent = (line) => line.length - line.trimStart().length;

// The run of signs that begins a listing. A name of a language has no backtick: that is code within a line.
function fence(line) {
  const text = line.trimStart(), sign = text[0];
  let length = 0;
  if (sign !== "`" && sign !== "~") return undefined;
  while (text[length] === sign) length += 1;
  return length >= 3 && !text.includes("`", sign === "`" ? length : 0) ? text.slice(0, length) : undefined;
}

const closes = (line, run) => line.trim().startsWith(run) && line.trim() === run[0].repeat(line.trim().length);
const quoted = (line) => line.startsWith(">");

function heading(line) {
  let level = 0;
  while (line[level] === "#") level += 1;
  return level >= 1 && level <= 6 && line[level] === " " ? level : 0;
}

function rule(line) {
  const signs = line.split(" ").join("");
  return signs.length >= 3 && ["-", "*", "_"].some((sign) => signs === sign.repeat(signs.length));
}

// The mark of an item, such as "•" or "1.", and its text.
function item(line) {
  const text = line.trimStart();
  if (["- ", "* ", "+ "].includes(text.slice(0, 2))) return { mark: "•", text: text.slice(2) };
  let digits = 0;
  while (digits < 9 && text[digits] >= "0" && text[digits] <= "9") digits += 1;
  const named = digits && [". ", ") "].includes(text.slice(digits, digits + 2));
  return named ? { mark: `${text.slice(0, digits)}.`, text: text.slice(digits + 2) } : undefined;
}

function cells(line) {
  const row = line.trim();
  return row.slice(row.startsWith("|") ? 1 : 0, row.endsWith("|") ? -1 : undefined).split("|", COLUMNS).map((cell) => cell.trim());
}

function dashes(line) {
  const signs = ["-", ":", "|", " "];
  return line !== undefined && line.includes("|") && line.includes("-") && [...line].every((sign) => signs.includes(sign));
}

const plain = (line) => line.trim() && !fence(line) && !heading(line) && !rule(line) && !quoted(line) && !item(line);

function table(lines) {
  const [heads, ...rows] = [lines[0], ...lines.slice(2, 2 + ROWS)].map(cells);
  const row = (kind, texts) => made("tr", "", heads.map((_, at) => made(kind, "", inline(texts[at] ?? ""))));
  const body = rows.map((texts) => row("td", texts));
  return made("div", "wide", made("table", "", made("thead", "", row("th", heads)), made("tbody", "", body)));
}

function listing(code, copied) {
  const copy = made("button", "quiet", "Copy"), box = made("pre", "", made("code", "", code));
  copy.type = "button";
  copy.addEventListener("click", () => copied(code, copy));
  return made("div", "code", box, copy);
}

// The elements of a text. `copied` is called with the text of a listing and its button.
function markdown(text, copied, depth = 0) {
  const lines = text.split("\n"), parts = [];
  let at = 0;
  const until = (holds) => {
    const start = at;
    while (at < lines.length && holds(lines[at], at - start)) at += 1;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at], sign = fence(line);
    if (!line.trim()) at += 1;
    else if (sign) {
      at += 1;
      const code = until((one) => !closes(one, sign));
      at += 1;
      parts.push(listing(code.join("\n"), copied));
    } else if (heading(line)) {
      parts.push(made("div", `h${heading(line)}`, inline(line.slice(heading(line)).trim())));
      at += 1;
    } else if (rule(line)) parts.push(made("hr")), (at += 1);
    else if (quoted(line) && depth < DEEPEST) {
      const inner = until(quoted).map((one) => one.slice(one[1] === " " ? 2 : 1));
      parts.push(made("blockquote", "", markdown(inner.join("\n"), copied, depth + 1)));
    } else if (item(line) && depth < DEEPEST) {
      const { mark, text: words } = item(line), margin = indent(line);
      at += 1;
      const below = until((one) => one.trim() && indent(one) > margin);
      const least = below.reduce((most, one) => Math.min(most, indent(one)), Infinity);
      const inner = markdown(below.map((one) => one.slice(least)).join("\n"), copied, depth + 1);
      parts.push(made("div", "item", made("span", "", mark), made("div", "", inline(words), below.length ? inner : [])));
    } else if (line.includes("|") && dashes(lines[at + 1])) {
      parts.push(table(until((one, count) => count < 2 || one.includes("|"))));
    } else {
      const first = at;
      const words = until((one, count) => count === 0 || (plain(one) && !(one.includes("|") && dashes(lines[first + count + 1]))));
      parts.push(made("p", "", words.flatMap((one, count) => [...(count ? [made("br")] : []), ...inline(one)])));
    }
  }
  return parts;
}
