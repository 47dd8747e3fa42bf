// The conversation: one answer at a time, streamed, and a crowd of others to keep it company.

import { ask, readEvents } from "./api.js";

const STORY = "You are the guide of a small museum of machines. You answer in plain words, you stay with the facts, " +
  "and you never say more than you were asked. The museum has three rooms: looms and engines, telegraphs and " +
  "telephones, computers and their memories. Visitors are of every age, and many of them are in a hurry. ";
const QUESTIONS = [
  "What does a loom have in common with a computer?", "How does a telegraph send a letter?",
  "Why were the first computers so large?", "Tell me about the steam engine in two sentences.",
  "What is a punched card?", "How did people telephone before there were numbers to dial?",
  "Which machine in the museum is the oldest?", "Explain to a child what memory is in a computer.",
];

export class Chat {
  constructor(page) {
    this.page = page;
    this.messages = [];
    this.running = null;
    this.crowd = null;
  }

  settings() {
    const { temperature, maxTokens } = this.page;
    return { stream: true, temperature: temperature.valueAsNumber || 0, max_tokens: maxTokens.valueAsNumber || 128 };
  }

  async send(text) {
    const { log, send, stop, system } = this.page;
    log.querySelector(".empty")?.remove();
    this.messages.push({ role: "user", content: text });
    this.add("user", "You").body.textContent = text;
    const answer = this.add("assistant", "Model");
    this.running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    log.setAttribute("aria-busy", "true"); // read out when it is whole
    const opening = system.value.trim() ? [{ role: "system", content: system.value }] : [];
    const body = { messages: [...opening, ...this.messages], ...this.settings() };
    const note = await this.stream(body, answer);
    if (answer.body.textContent) this.messages.push({ role: "assistant", content: answer.body.textContent });
    else this.messages.pop(); // a question without an answer is not asked again
    answer.note.textContent = note;
    log.setAttribute("aria-busy", "false");
    this.running = null;
    send.disabled = false;
    stop.disabled = this.crowd === null;
    this.toEnd();
  }

  // Shows an answer as it comes; what to say under it.
  async stream(body, answer) {
    const began = performance.now();
    let first = 0, tokens = 0;
    try {
      const response = await ask("/v1/chat/completions", { body, signal: this.running.signal });
      for await (const event of readEvents(response)) {
        if (event.error) throw new Error(event.error.message);
        const text = event.choices[0]?.delta.content;
        if (!text && text !== "") continue;
        if (event.choices[0].delta.role === undefined) tokens++;
        if (tokens === 1 && !first) first = performance.now();
        answer.body.textContent += text;
        this.toEnd();
      }
    } catch (error) {
      if (error.name !== "AbortError") return `Failed: ${error.message}`;
      return `Stopped after ${tokens} tokens.`;
    }
    const seconds = (performance.now() - first) / 1000;
    const rate = tokens > 1 ? `, then ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    return `${tokens} tokens; the first after ${Math.round(first - began)} ms${rate}.`;
  }

  stop() {
    this.running?.abort();
    this.crowd?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.page.log.replaceChildren();
  }

  add(kind, name) {
    const item = document.createElement("article");
    item.className = kind;
    const who = document.createElement("h3");
    const body = document.createElement("p");
    const note = document.createElement("p");
    note.className = "note";
    who.textContent = name;
    item.append(who, body, note);
    this.page.log.append(item);
    this.toEnd();
    return { body, note };
  }

  toEnd() {
    this.page.log.scrollTop = this.page.log.scrollHeight;
  }

  // `count` prompts at once that begin alike; one request carries them all, since browsers open only six connections.
  async sendCrowd(count) {
    const { crowdStatus, crowd, stop } = this.page;
    this.crowd = new AbortController();
    crowd.disabled = true;
    stop.disabled = false;
    let done = 0;
    const show = () => { crowdStatus.textContent = `Crowd: ${done} of ${count} answered.`; };
    show();
    const prompt = Array.from({ length: count }, (_, index) => {
      const question = `Visitor ${index + 1}: ${QUESTIONS[index % QUESTIONS.length]} `;
      return `${STORY}\n\n${question.repeat(1 + 2 * (index % 3))}\nGuide:`;
    });
    try {
      const body = { prompt, ...this.settings(), temperature: 0.8, seed: 1 };
      for await (const event of readEvents(await ask("/v1/completions", { body, signal: this.crowd.signal }))) {
        if (event.error) throw new Error(event.error.message);
        done += event.choices.filter((choice) => choice.finish_reason).length;
        show();
      }
    } catch (error) {
      crowdStatus.textContent = error.name === "AbortError" ? "Crowd: stopped." : `Crowd: ${error.message}`;
    }
    this.crowd = null;
    crowd.disabled = false;
    stop.disabled = this.running === null;
  }
}
