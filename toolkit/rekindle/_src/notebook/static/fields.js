// The contents of a panel's fields, which its pages and its kernel both change.
//
// Every message to the kernel carries the texts that the kernel has not been told, so a press never overtakes the keys
// before it. Between presses keys go in one message at a time: the next one waits for the answer, and carries all that
// was typed meanwhile. A text goes with its base, the text that the kernel was told before. Where one side has written
// something else since then, as an empty field after a message was sent, both add what the other has typed to that.

function contents(send) {
  const page = Math.random().toString(36).slice(2); // several pages may show one panel
  const now = {}; // by the name of a field, its text in this page
  const known = {}; // the same as the kernel has it, as far as this page has heard
  const underway = []; // messages without an answer, the oldest first
  let number = 0; // of the last message
  let unsure = false; // messages may have been lost, so that texts have no base

  const told = (name) => underway.findLast(({ texts }) => name in texts)?.texts[name] ?? known[name];
  const untold = () => Object.keys(now).filter((name) => now[name] !== told(name));

  function post(message) {
    const fields = Object.fromEntries(untold().map((name) => [name, [now[name], unsure ? null : told(name)]]));
    const texts = Object.fromEntries(Object.entries(fields).map(([name, [text]]) => [name, text]));
    underway.push({ number: ++number, texts });
    send({ ...message, page, number, fields });
  }

  function tell() {
    if (!underway.length && untold().length) post({ event: "typed" });
  }

  // A text of this page, after the kernel has written another one in place of the known one.
  function merged(name, text, written, grows) {
    if (text === known[name] || text === written) return written;
    return grows && text.startsWith(known[name]) ? written + text.slice(known[name].length) : text;
  }

  return {
    post,

    // A field is shown. Gives its text, which is the kernel's unless this page has a later one.
    open(name, text) {
      if (!(name in now) || now[name] === known[name]) now[name] = known[name] = text;
      return now[name];
    },

    // Only the fields of these names are still shown.
    close(names) {
      for (const name of Object.keys(now)) if (!names.includes(name)) delete now[name], delete known[name];
    },

    type(name, text) {
      now[name] = text;
      tell();
    },

    // The kernel has read a message of a page, and all before it; it has these texts of the message's fields.
    answered([who, read, fields]) {
      if (who !== page) return;
      unsure = false;
      while (underway.length && underway[0].number <= read) {
        const { number: one, texts } = underway.shift();
        for (const name in texts) if (name in known) known[name] = (one === read ? fields[name] : undefined) ?? texts[name];
      }
      tell();
    },

    // The connection has changed, and messages without an answer may be lost.
    lost() {
      underway.length = 0;
      unsure = true;
    },

    // The kernel's text of a field, which `grows` where keys add to it. Gives the text to show, or undefined where
    // nothing changes.
    take(name, written, grows) {
      if (written === known[name]) return undefined;
      const before = now[name];
      now[name] = merged(name, before, written, grows);
      for (const { texts } of underway) if (name in texts) texts[name] = merged(name, texts[name], written, grows);
      known[name] = written;
      tell();
      return now[name] === before ? undefined : now[name];
    },
  };
}
