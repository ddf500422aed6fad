// The samples of one step that the driver has sent: of the last step, or of the one that the reader has chosen.
import { find, make, short } from "./elements.js";

let shown = "";

function row(sample) {
  const text = (value) => make("td", {}, make("pre", { tabindex: "0" }, value));
  const number = (value) => make("td", { class: "num" }, value);
  const reply = text(sample.reply);
  if (sample.status) reply.append(make("span", { class: "pill watch" }, sample.status));
  return make("tr", {}, text(sample.prompt), reply, number(short(sample.reward)), number(String(sample.tokens)),
    make("td", {}, sample.engines.join(", ")), number(sample.versions.join(", ")));
}

export function renderSamples(samples) {
  find("samples").hidden = !samples.length;
  if (!samples.length) return;
  const select = find("samples-step"), steps = [...new Set(samples.map((one) => String(one.step)))];
  const known = [...select.options].slice(1).map((option) => option.value);
  if (JSON.stringify(steps) !== JSON.stringify(known)) {
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...steps.map((step) => make("option", { value: step }, step)));
    select.value = steps.includes(chosen) ? chosen : "";
  }
  const of = samples.findLast((one) => !select.value || String(one.step) === select.value);
  const now = JSON.stringify(of);
  if (now === shown) return;
  shown = now;
  select.options[0].textContent = `the last (${samples[samples.length - 1].step})`;
  find("sample-rows").replaceChildren(...of.samples.map(row));
}
