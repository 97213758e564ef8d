// A reader's guess next to a question of the course: says whether its numbers are those of the answer, and no more.
for (const field of document.querySelectorAll(".guess")) {
  const input = field.querySelector("input"), output = field.querySelector("output");
  const figures = field.dataset.figures.split(" ").map(Number);
  field.hidden = false;
  input.addEventListener("change", () => {
    const guesses = (input.value.replace(/(\d),(?=\d{3})/g, "$1").match(/-?\d+(\.\d+)?/g) ?? []).map(Number);
    const right = figures.filter((figure) => guesses.includes(figure)).length;
    if (!guesses.length) output.textContent = figures.length > 1 ? `${figures.length} numbers, please.` : "A number, please.";
    else if (right === figures.length) output.textContent = "Right. The answer below says why.";
    else if (figures.length > 1) output.textContent = `${right} of ${figures.length} are right.`;
    else output.textContent = figures[0] > guesses[0] ? "It is more." : "It is less.";
  });
}
