// The tool that clients of the AI SDK are given, and the arguments of its calls.
import { tool } from "ai";
import { Parameters } from "./given.mjs";

export const called = [];
export const tools = {
  get_weather: tool({
    description: "Tells the weather.",
    inputSchema: Parameters,
    execute: async (given) => {
      called.push(given);
      return "sunny";
    },
  }),
};
