// openai for Node: whole and streamed answers, and typed errors.
import OpenAI from "openai";

const options = { baseURL: process.env.JCB_URL + "/v1", maxRetries: 0 };
const client = new OpenAI(options);
const common = {
  model: process.env.JCB_MODEL,
  messages: [{ role: "user", content: "What is the capital of France? Answer in one word." }],
  temperature: 0,
  max_tokens: 8,
};
const whole = (await client.chat.completions.create(common)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const errors = [];
const wrong = new OpenAI({ ...options, apiKey: "wrong" });
for (const ask of [
  () => client.chat.completions.create({ ...common, temperature: 99 }),
  () => client.chat.completions.create({ ...common, model: "other" }),
  () => wrong.models.list(),
]) {
  try {
    await ask();
    errors.push("none");
  } catch (error) {
    errors.push(error.constructor.name);
  }
}
console.log(JSON.stringify({ whole, streamed, errors }));
