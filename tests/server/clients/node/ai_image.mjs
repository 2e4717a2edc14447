// A question about an image: https://ai-sdk.dev/docs/foundations/prompts#image-parts.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import { MODEL, OPENAI, WHAT } from "./given.mjs";

const provider = createOpenAICompatible({ name: "hmt", baseURL: OPENAI, apiKey: "none" });
const image = { type: "image", image: readFileSync(process.argv[4]), mediaType: "image/jpeg" };
const done = await generateText({
  model: provider(MODEL), maxRetries: 0, temperature: 0, maxOutputTokens: 6,
  messages: [{ role: "user", content: [image, { type: "text", text: WHAT }] }],
});
console.log(done.text);
