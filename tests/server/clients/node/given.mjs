// What every client is given, as in given.py.
import { z } from "zod";

const [server, MODEL] = process.argv.slice(2);
export { MODEL };
export const OPENAI = `${server}/v1`;
export const QUESTION = "What is the weather in Rome?";
export const ANSWER = "It is sunny in Rome.";
export const ARGUMENTS = { city: "Rome", days: 2 };
export const WHAT = "What is in this image?";
export const FORECAST = "Give the weather in Rome as data.";
export const WEATHER = { place: { city: "Rome" }, days: 2 };
export const Parameters = z.object({ city: z.string(), days: z.number().int() });
const Place = z.object({ city: z.string() }).meta({ id: "Place" });
export const Weather = z.object({ place: Place, days: z.number().int() });
