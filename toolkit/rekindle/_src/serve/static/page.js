const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p"];
const messages = []; // of the conversation, as the API has them
const turns = []; // the elements of each message
let key = "", running = null, models = [];
let conversation = 0; // its number: an answer that was stopped by a new one is not added to that

function headers() {
  const all = {"content-type": "application/json"};
  if (key) all.authorization = "Bearer " + key;
  return all;
}

async function problem(answer) {
  try { return (await answer.json()).error; } catch (_) { return {message: "the server answered " + answer.status}; }
}

function say(text) { $("note").textContent = text; }

const short = (name) => (name.split("/").length > 2 ? name.split("/").filter(Boolean).pop() : name);
const count = (number, noun) => number.toLocaleString("en") + " " + noun + (number === 1 ? "" : "s");
const time = (seconds) => (seconds < 0.1 ? Math.round(1e3 * seconds) + " ms" : seconds.toFixed(1) + " s");

function copied(text, button) {
  const held = document.createElement("textarea"); // the clipboard's own interface is closed to pages without TLS
  held.className = "held";
  held.value = text;
  document.body.append(held);
  held.select();
  button.textContent = document.execCommand("copy") ? "Copied" : "Not allowed";
  held.remove();
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

function action(label, act) {
  const button = made("button", "quiet", label);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

// A message, what was said about it, and what can be done with it.
function turn(role, text) {
  const words = made("div", "said " + role), facts = made("span", "facts"), acts = made("span", "acts");
  const whole = made("div", "turn " + role + "s", words, made("div", "below", facts, acts));
  words.textContent = text;
  $("talk").append(whole);
  const added = {whole, words, facts, acts};
  turns.push(added);
  return added;
}

function title() {
  const first = messages.length ? messages[0].content.split("\n")[0] : "New chat";
  $("title").textContent = first.length > 60 ? first.slice(0, 59) + "…" : first;
}

function calls() {
  const base = new URL("v1", location.href).href, model = $("model").value;
  const send = key ? ' \\\n  -H "Authorization: Bearer $KEY"' : "";
  const quoted = JSON.stringify(model);
  $("curl").textContent = "curl " + base + "/chat/completions" + send +
    ' \\\n  -H "Content-Type: application/json" \\\n  -d \'' +
    JSON.stringify({model, messages: [{role: "user", content: "Hello"}]}).replaceAll("'", "'\\''") + "'";
  $("python").textContent = (key ? "import os\n\n" : "") + "from openai import OpenAI\n\n" +
    "client = OpenAI(base_url=" + JSON.stringify(base) + ", api_key=" + (key ? 'os.environ["KEY"]' : '"none"') +
    ")\nanswer = client.chat.completions.create(\n    model=" + quoted +
    ', messages=[{"role": "user", "content": "Hello"}]\n)\nprint(answer.choices[0].message.content)';
}

async function look() {
  let answer;
  try { answer = await fetch("v1/models", {headers: headers()}); }
  catch (_) { $("state").textContent = "The server does not answer."; return; }
  $("locked").hidden = answer.status !== 401;
  $("open").hidden = !answer.ok;
  if (!answer.ok) {
    $("state").textContent = answer.status === 401
      ? (key ? "That key is wrong." : "This server asks for an API key.") : (await problem(answer)).message;
    return;
  }
  models = (await answer.json()).data;
  const chosen = $("model").value;
  $("state").textContent = "";
  $("models").replaceChildren(); $("model").replaceChildren();
  for (const one of models) {
    const context = one.max_model_len ? one.max_model_len.toLocaleString("en") + " tokens" : "is being loaded";
    $("models").append(made("tr", "", ...[one.id, context].map((text) => made("td", "", text))));
    $("model").append(new Option(short(one.id), one.id, false, one.id === chosen));
  }
  calls();
  if (models.some((one) => !one.max_model_len)) setTimeout(look, 2000);
}

// The sampling of the next answer: a notebook's chat has the model's own, or that of a preset.
function sampling() {
  const preset = PRESETS[$("preset").value];
  if (preset) return preset;
  const own = (models.find((one) => one.id === $("model").value) || {}).chat_sampling || {};
  return Object.fromEntries(SETTINGS.filter((name) => name in own).map((name) => [name, own[name]]));
}

async function read(answer, drawn) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const facts = {text: "", first: 0, last: 0, tokens: 0, end: "", thoughts: "", began: 0, thought: 0, thinking: 0};
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) return facts;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw Object.assign(new Error(event.error.message), event.error);
      const choice = event.choices && event.choices[0];
      if (event.usage) {
        facts.tokens = event.usage.completion_tokens;
        facts.thinking = (event.usage.completion_tokens_details || {}).reasoning_tokens || 0;
      }
      if (choice && choice.finish_reason) facts.end = choice.finish_reason;
      const {content, reasoning} = (choice && choice.delta) || {};
      if (!content && !reasoning) continue;
      facts.last = performance.now();
      facts.first = facts.first || facts.last;
      if (reasoning) {
        facts.began = facts.began || facts.last;
        facts.thought = facts.last - facts.began;
      }
      facts.thoughts += reasoning || "";
      facts.text += content || "";
      drawn(facts);
    }
  }
}

const thinking = (facts) =>
  ["reasoning", time(facts.thought / 1e3), facts.thinking ? count(facts.thinking, "token") : ""].filter(Boolean).join(", ");

// Draws an answer while it is written, ten times a second at most. Its reasoning is folded, and stays as it was unfolded.
function drawing(part) {
  let due = null, latest = null;
  const words = made("div", ""), summary = made("summary", "note"), body = made("div", "thoughts");
  const fold = made("details", "", summary, body);
  const draw = () => {
    due = null;
    const low = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
    words.replaceChildren(...markdown(latest.text, copied));
    if (latest.thoughts) {
      summary.textContent = thinking(latest);
      body.textContent = latest.thoughts;
    }
    if (part.words.children.length < 1 + !!latest.thoughts)
      part.words.replaceChildren(...(latest.thoughts ? [fold, words] : [words]));
    if (low) $("talk").scrollTop = $("talk").scrollHeight;
  };
  return {
    more(facts) { latest = facts; if (due === null) due = setTimeout(draw, 100); },
    end() { if (due !== null) clearTimeout(due); draw(); },
  };
}

function ended(facts, began, stopped) {
  const seconds = (facts.last - facts.first) / 1e3, rate = facts.tokens > 1 && seconds > 0 ? (facts.tokens - 1) / seconds : 0;
  const speed = facts.first ? "first token after " + time((facts.first - began) / 1e3) + (rate ? ", then " + Math.round(rate).toLocaleString("en") + " tokens/s" : "") : "";
  const tokens = facts.tokens ? count(facts.tokens, "token") : "";
  const how = stopped ? "stopped" : {length: "cut at " + tokens, stop: tokens && tokens + ", ended by the model"}[facts.end] || tokens;
  return [short($("model").value), speed, how].filter(Boolean).join(" · ");
}

function busy(now) {
  running = now;
  $("send").textContent = now ? "Stop" : "Send";
  $("send").title = now ? "Stop the answer; its text stays (Esc)" : "Enter sends, Shift+Enter is a new line";
  $("talk").ariaBusy = String(!!now);
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + 2 + "px";
}

function acts() {
  turns.forEach(({acts}, at) => {
    const {role, content} = messages[at] || {}, last = at === turns.length - 1;
    const all = role === "assistant" ? [action("Copy", (button) => copied(content, button))] : [];
    if (role === "assistant" && last) all.push(action("Again", again));
    acts.replaceChildren(...all);
  });
}

// Asks for an answer. If no text comes, the `earlier` answer is back, or else the question is in the input line again.
async function answered(earlier) {
  const control = new AbortController(), began = performance.now(), part = turn("assistant", "");
  const picture = drawing(part), mine = conversation;
  let facts = {text: "", tokens: 0}, failure = null;
  busy(control);
  say("");
  $("room").hidden = true;
  part.words.textContent = "…";
  try {
    const body = JSON.stringify({
      model: $("model").value, messages, ...sampling(), stream: true, stream_options: {include_usage: true}});
    const options = {method: "POST", headers: headers(), body, signal: control.signal};
    const answer = await fetch("v1/chat/completions", options);
    if (!answer.ok) { const wrong = await problem(answer); throw Object.assign(new Error(wrong.message), wrong); }
    facts = await read(answer, (so) => { facts = so; picture.more(so); });
  } catch (error) {
    failure = error;
  }
  if (facts.text) picture.more(facts);
  if (facts.text) picture.end();
  busy(null);
  if (mine !== conversation) return;
  const stopped = failure && failure.name === "AbortError";
  if (failure && !stopped) say(failure.message);
  if (facts.text) {
    messages.push({role: "assistant", content: facts.text, ...(facts.thoughts && {reasoning_content: facts.thoughts})});
    part.facts.textContent = ended(facts, began, stopped);
  } else { // it is as if nothing was said
    if (!failure || stopped) say("The answer ended before its text began.");
    turns.pop().whole.remove();
    if (earlier) {
      messages.push(earlier.message);
      turns.push(earlier.part);
      $("talk").append(earlier.part.whole);
    } else if (messages.length && messages[messages.length - 1].role === "user") {
      turns.pop().whole.remove();
      const text = messages.pop().content;
      $("text").value = $("text").value ? text + "\n" + $("text").value : text;
      grow();
      $("room").hidden = !(failure && failure.code === "context_length_exceeded" && messages.length);
    }
  }
  title();
  acts();
}

async function ask() {
  const question = $("text").value.trim();
  if (!question || running) return;
  messages.push({role: "user", content: question});
  turn("user", question);
  $("text").value = "";
  grow();
  title();
  acts();
  $("talk").scrollTop = $("talk").scrollHeight;
  await answered();
}

async function again() {
  if (running || !messages.length || messages[messages.length - 1].role !== "assistant") return;
  const earlier = {message: messages.pop(), part: turns.pop()};
  earlier.part.whole.remove();
  await answered(earlier);
}

// Drops the first message and all before the next one, and sends what had no room.
async function forget() {
  const next = messages.findIndex((one, at) => at > 0 && one.role === "user");
  const dropped = next < 0 ? messages.length : next;
  messages.splice(0, dropped);
  for (const {whole} of turns.splice(0, dropped)) whole.remove();
  await ask();
}

$("unlock").addEventListener("submit", (event) => { event.preventDefault(); key = $("key").value.trim(); look(); });
$("send").addEventListener("click", () => running ? running.abort() : ask());
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("text").addEventListener("input", grow);
$("room").addEventListener("click", forget);
$("new").addEventListener("click", () => {
  if (running) running.abort();
  conversation += 1;
  messages.length = turns.length = 0; $("talk").replaceChildren(); say(""); title();
  $("room").hidden = true;
});
$("model").addEventListener("change", calls);
look();
