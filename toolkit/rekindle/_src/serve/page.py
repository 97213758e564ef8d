"""The page at `/`: what runs here, how to call it, and a small chat.

It is one static document without anything of this server in it, so that it needs no key: its script asks the API, with
the key that is typed. It loads nothing else, which its policy enforces, and whatever it shows is set as text.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from rekindle._src.serve.bodies import Receive
from rekindle._src.serve.exchange import Exchange, Scope, Send, Service

STYLE = """
:root { color-scheme: light dark; --line: rgba(128,128,128,.35); --soft: rgba(128,128,128,.12); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
pre, code, textarea, input, select { font: 14px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem; border-radius: .4rem; overflow-x: auto; margin: .4rem 0; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1.2rem .2rem 0; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
textarea, input, select { box-sizing: border-box; max-width: 100%; padding: .4rem .5rem; border: 1px solid var(--line);
  border-radius: .4rem; background: transparent; color: inherit; }
textarea { width: 100%; min-height: 4.2rem; resize: vertical; } option { background: Canvas; color: CanvasText; }
button { font: inherit; padding: .3rem .9rem; border: 1px solid var(--line); border-radius: .4rem;
  background: var(--soft); color: inherit; cursor: pointer; }
button:disabled { opacity: .5; cursor: default; }
:focus-visible { outline: 2px solid Highlight; outline-offset: 1px; }
.row { display: flex; gap: .5rem; align-items: center; flex-wrap: wrap; margin: .5rem 0; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; padding: .5rem .8rem; border-radius: .4rem; }
.user { background: var(--soft); margin-left: 15%; } .assistant { border: 1px solid var(--line); margin-right: 15%; }
.note { opacity: .75; font-size: .9rem; } [hidden] { display: none !important; }
"""

SCRIPT = r"""
"use strict";
const $ = (id) => document.getElementById(id);
const messages = [];
let key = "", running = null;

function headers() {
  const all = {"content-type": "application/json"};
  if (key) all.authorization = "Bearer " + key;
  return all;
}

async function problem(answer) {
  try { return (await answer.json()).error.message; } catch (_) { return "the server answered " + answer.status; }
}

function say(text) { $("note").textContent = text; }

function bubble(role, text) {
  const part = document.createElement("div");
  part.className = "said " + role;
  part.textContent = text;
  $("talk").append(part);
  return part;
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
      ? (key ? "That key is wrong." : "This server asks for an API key.") : await problem(answer);
    return;
  }
  const {data} = await answer.json(), chosen = $("model").value;
  $("state").textContent = "";
  $("models").replaceChildren(); $("model").replaceChildren();
  for (const one of data) {
    const row = document.createElement("tr");
    const context = one.max_model_len ? one.max_model_len.toLocaleString("en") + " tokens" : "is being loaded";
    for (const text of [one.id, context]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    $("models").append(row);
    $("model").append(new Option(one.id, one.id, false, one.id === chosen));
  }
  calls();
  if (data.some((one) => !one.max_model_len)) setTimeout(look, 2000);
}

async function read(answer, part) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return text;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices && event.choices[0];
      if (choice && choice.delta && choice.delta.content) part.textContent = text += choice.delta.content;
      if (choice && choice.finish_reason === "length") say("The answer was cut.");
    }
  }
}

async function ask() {
  const question = $("text").value.trim();
  if (!question || running) return;
  running = new AbortController();
  $("send").textContent = "Stop";
  say("");
  messages.push({role: "user", content: question});
  const asked = bubble("user", question), part = bubble("assistant", "");
  $("text").value = "";
  try {
    const body = JSON.stringify({model: $("model").value, messages, stream: true});
    const options = {method: "POST", headers: headers(), body, signal: running.signal};
    const answer = await fetch("v1/chat/completions", options);
    if (!answer.ok) throw new Error(await problem(answer));
    await read(answer, part);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
  if (part.textContent) messages.push({role: "assistant", content: part.textContent});
  else { messages.pop(); part.remove(); asked.remove(); $("text").value = question; }
  running = null;
  $("send").textContent = "Send";
}

$("unlock").addEventListener("submit", (event) => { event.preventDefault(); key = $("key").value.trim(); look(); });
$("send").addEventListener("click", () => running ? running.abort() : ask());
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
$("again").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0; $("talk").replaceChildren(); say("");
});
$("model").addEventListener("change", calls);
look();
"""

BODY = """
<h1>rekindle</h1>
<div id="state" class="note">Asking the server …</div>
<form id="unlock"><div id="locked" class="row" hidden>
<label for="key">API key</label><input id="key" type="password" autocomplete="off"><button>Use it</button>
</div></form>
<div id="open" hidden>
<h2>Models</h2>
<table><thead><tr><th>name</th><th>context</th></tr></thead><tbody id="models"></tbody></table>
<h2>Chat</h2>
<div class="row"><label for="model">with</label><select id="model"></select></div>
<div id="talk" aria-live="polite"></div>
<textarea id="text" aria-label="Your message" placeholder="Your message. Shift-Enter makes a new line"></textarea>
<div class="row"><button id="send">Send</button><button id="again">New chat</button>
<span id="note" class="note" role="status"></span></div>
<h2>Call it</h2>
<p>It speaks the APIs of OpenAI and Anthropic. In a shell, and in Python with OpenAI's client:</p>
<pre id="curl"></pre>
<pre id="python"></pre>
<p class="note">The other endpoints are in openapi.json, its figures in metrics.</p>
</div>
<noscript>This page asks the API by a script. Without one: GET v1/models lists the models.</noscript>
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def document() -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """Return the page, and the headers that forbid it everything but its own script, style and this server's API."""
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>rekindle</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body>{BODY}<script>{SCRIPT}</script></body></html>\n"
    )
    policy = (
        f"default-src 'none'; script-src {_digest(SCRIPT)}; style-src {_digest(STYLE)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return page.encode(), tuple((name.encode(), value.encode()) for name, value in headers.items())


class WebPage:
    """An ASGI app that answers with the page."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page, headers = document()
        await Exchange(self._service, scope, send).reply_bytes(page, b"text/html; charset=utf-8", headers=headers)
        self._service.metrics.http("/", 200)
