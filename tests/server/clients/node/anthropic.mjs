// https://ai-sdk.dev/providers/ai-sdk-providers/anthropic.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, WEATHER, Weather }
  from "./given.mjs";
import { called, tools } from "./given_tools.mjs";

const provider = createAnthropic({ baseURL: OPENAI, apiKey: "none" });
const asked = {
  model: provider(MODEL), maxRetries: 0, maxOutputTokens: 200, prompt: QUESTION, tools,
  stopWhen: stepCountIs(3),
};
assert.equal((await generateText(asked)).text, ANSWER);
let said = "";
for await (const part of streamText(asked).textStream) said += part;
assert.equal(said, ANSWER);
assert.deepEqual(called, [ARGUMENTS, ARGUMENTS]);
const forced = await generateText({
  model: provider(MODEL), maxRetries: 0, maxOutputTokens: 200, prompt: FORECAST,
  toolChoice: { type: "tool", toolName: "Weather" },
  tools: { Weather: tool({ inputSchema: Weather }) },
});
assert.deepEqual(forced.toolCalls[0].input, WEATHER);
