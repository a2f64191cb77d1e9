// Runs features of a client and prints what came back, one JSON object a line.

// canonical writes a tool call as all drivers do.
export function canonical(name, args) {
  if (typeof args === "string") args = JSON.parse(args);
  const sorted = Object.fromEntries(Object.keys(args).sort().map((k) => [k, args[k]]));
  return `${name} ${JSON.stringify(sorted)}`;
}

export async function run(features) {
  for (const [feature, body] of Object.entries(features)) {
    const line = { feature };
    try {
      line.got = await body();
    } catch (e) {
      line.error = `${e.constructor.name}: ${String(e.message).slice(0, 500)}`;
      console.error(e.stack);
    }
    console.log(JSON.stringify(line));
  }
}
