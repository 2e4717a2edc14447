// https://github.com/openai/openai-node and its helpers.md.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, WEATHER, Parameters, Weather }
  from "./given.mjs";

const client = new OpenAI({ baseURL: OPENAI, apiKey: "none", maxRetries: 0 });
const called = [];
const tool = zodFunction({
  name: "get_weather",
  parameters: Parameters,
  function: (given) => {
    called.push(given);
    return "sunny";
  },
});
const messages = [{ role: "user", content: QUESTION }];
const { function: declared } = tool;
const done = await client.chat.completions.create({
  model: MODEL, messages, tools: [{ type: "function", function: declared }],
});
assert.equal(done.choices[0].finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(done.choices[0].message.tool_calls[0].function.arguments), ARGUMENTS);

for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: MODEL, messages, tools: [tool], stream });
  assert.equal(await runner.finalContent(), ANSWER);
}
assert.deepEqual(called, [ARGUMENTS, ARGUMENTS]);

const asked = [{ role: "user", content: FORECAST }];
const formed = await client.chat.completions.parse({
  model: MODEL, messages: asked, response_format: zodResponseFormat(Weather, "weather"),
});
assert.deepEqual(formed.choices[0].message.parsed, WEATHER);
const forced = await client.chat.completions.parse({
  model: MODEL, messages: asked, tools: [zodFunction({ name: "Weather", parameters: Weather })],
  tool_choice: "required",
});
assert.deepEqual(forced.choices[0].message.tool_calls[0].function.parsed_arguments, WEATHER);

// Responses.
const offered = [{ type: "function", strict: true, ...declared }];
const first = await client.responses.create({ model: MODEL, input: QUESTION, tools: offered });
assert.deepEqual(JSON.parse(first.output[0].arguments), ARGUMENTS);
const input = [{ type: "function_call_output", call_id: first.output[0].call_id, output: "sunny" }];
const stream = client.responses.stream({
  model: MODEL, input, tools: offered, previous_response_id: first.id,
});
let said = "";
for await (const event of stream) if (event.type === "response.output_text.delta") said += event.delta;
assert.equal(said, ANSWER);
assert.equal((await stream.finalResponse()).output_text, ANSWER);
const data = await client.responses.parse({
  model: MODEL, input: FORECAST, text: { format: zodTextFormat(Weather, "weather") },
});
assert.deepEqual(data.output_parsed, WEATHER);
