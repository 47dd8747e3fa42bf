// What an operator lets be changed while the server runs.

import { ask } from "./api.js";

const NUMBERS = ["max_num_batched_tokens", "max_num_seqs"];

export class Knobs {
  constructor(form) {
    this.form = form;
    this.at = (id) => form.querySelector(`#${id}`);
    for (const name of NUMBERS) {
      this.at(name).addEventListener("input", () => { this.touched = true; this.echo(); });
    }
    this.at("policy").addEventListener("input", () => { this.touched = true; });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    this.touched = false; // what the server says does not move a knob that a hand is on
  }

  async load(limits) {
    const answer = await (await ask("/v1/batch/knobs")).json();
    this.limits = limits;
    this.at("knobs-set").disabled = !answer.can_change;
    this.at("knobs-hint").textContent = answer.can_change ? "They turn between two steps; nothing is compiled." : answer.hint;
    this.at("policy").replaceChildren(...answer.knobs.policy.choices.map((word) => new Option(word, word)));
    this.touched = false;
    this.show(answer.knobs);
  }

  show(knobs) {
    if (this.touched || !this.limits) return;
    const most = { max_num_batched_tokens: this.limits.max_tokens, max_num_seqs: this.limits.slots };
    for (const name of NUMBERS) {
      const input = this.at(name);
      input.min = 1;
      input.max = most[name];
      input.value = knobs[name].value;
    }
    this.at("policy").value = knobs.policy.value;
    this.echo();
  }

  echo() {
    for (const name of NUMBERS) {
      const input = this.at(name);
      this.at(`${name}_out`).textContent = `${input.value} of ${input.max}`;
      input.setAttribute("aria-valuetext", `${input.value} of ${input.max}`);
    }
  }

  async apply() {
    const status = this.at("knobs-status");
    const body = Object.fromEntries(NUMBERS.map((name) => [name, this.at(name).valueAsNumber]));
    body.policy = this.at("policy").value;
    try {
      const answer = await (await ask("/v1/batch/knobs", { body })).json();
      this.touched = false;
      this.show(answer.knobs);
      status.textContent = "Applied from the next step on.";
    } catch (error) {
      status.textContent = `Refused: ${error.message}`;
    }
  }
}
