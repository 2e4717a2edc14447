// https://ai-sdk.dev/providers/openai-compatible-providers and .../ai-sdk-core/tools-and-tool-calling.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, WEATHER, Weather }
  from "./given.mjs";
import { called, tools } from "./given_tools.mjs";

const compatible = createOpenAICompatible({
  name: "hmt", baseURL: OPENAI, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const responses = createOpenAI({ baseURL: OPENAI, apiKey: "none" }); // by default, /v1/responses
for (const model of [compatible(MODEL), responses(MODEL)]) {
  called.length = 0;
  const asked = { model, maxRetries: 0, prompt: QUESTION, tools, stopWhen: stepCountIs(3) };
  const done = await generateText(asked);
  assert.equal(done.text, ANSWER);
  const stream = streamText(asked);
  let said = "";
  for await (const part of stream.textStream) said += part;
  assert.equal(said, ANSWER);
  assert.ok((await stream.usage).outputTokens > 0);
  assert.deepEqual(called, [ARGUMENTS, ARGUMENTS]);

  const formed = { model, maxRetries: 0, schema: Weather, prompt: FORECAST };
  assert.deepEqual((await generateObject(formed)).object, WEATHER);
  const partial = streamObject(formed);
  let last;
  for await (const part of partial.partialObjectStream) last = part;
  assert.deepEqual(last, WEATHER);
  const forced = await generateText({
    model, maxRetries: 0, prompt: FORECAST, toolChoice: "required",
    tools: { Weather: tool({ inputSchema: Weather }) },
  });
  assert.deepEqual(forced.toolCalls[0].input, WEATHER);
}
