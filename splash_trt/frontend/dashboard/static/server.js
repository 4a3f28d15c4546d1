// What the server is asked, with the key where it wants one, and the timeline put together from its answers.

const KEY = "splash-trt-key";
const DEADLINE_MS = 8000;
const EXPLAIN_MS = 2000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The answer's JSON. Refused: the server said no; any other error: it was not reached. */
export async function ask(path, body, deadline = DEADLINE_MS) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body ? JSON.stringify(body) : undefined,
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(deadline),
  });
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, answer?.error?.message ?? `the server answered ${response.status}`);
  if (answer === null) throw new Error("what answers is no Splash-TRT server");
  return answer;
}

/** Layout and why. An engine in a long step cannot say why, and the rest is worth having at once. */
export async function askLayout() {
  try {
    return await ask("v1/layout?explain=1", null, EXPLAIN_MS);
  } catch (error) {
    if (error.name !== "TimeoutError") throw error;
    return ask("v1/layout");
  }
}

/** The last half hour. Times are the server's seconds; `begins` is when second 0 was, in the browser's time. */
export class Timeline {
  constructor() {
    this.clear();
  }

  clear() {
    this.server = null;
    this.engine = null;
    this.next = 0;
    this.first = 0;
    this.columns = { running: [], waiting: [], tokens: [], output_tokens: [] };
    this.phases = [];
    this.switches = new Map();
  }

  /** Takes what has come; the switches that began or ended since, none where it is the first answer. */
  add(answer) {
    const isFirst = this.server !== answer.server;
    if (isFirst) {
      this.clear();
    } else if (this.engine !== answer.engine) {
      this.switches.clear();
    }
    const news = isFirst ? [] : answer.switches.filter((one) => this.#isNew(one));
    this.server = answer.server;
    this.engine = answer.engine;
    this.now = answer.now_s;
    this.begins = Date.now() / 1000 - answer.now_s;
    this.window = answer.window_s;
    this.#addSeconds(answer);
    const from = answer.phases[0]?.since_s ?? Infinity;
    this.phases = [...this.phases.filter((phase) => phase.since_s < from), ...answer.phases];
    for (const one of answer.switches) this.switches.set(one.record.number, one);
    this.next = answer.next;
    return news;
  }

  #isNew(one) {
    const known = this.switches.get(one.record.number);
    return !known || known.record.ended !== one.record.ended;
  }

  #addSeconds(answer) {
    const { first, ...columns } = answer.seconds;
    const isGap = first !== this.first + this.columns.running.length;
    for (const [name, values] of Object.entries(this.columns)) {
      if (isGap) values.length = 0;
      values.push(...columns[name]);
    }
    if (isGap) this.first = first;
    const excess = this.columns.running.length - this.window;
    if (excess > 0) {
      for (const values of Object.values(this.columns)) values.splice(0, excess);
      this.first += excess;
    }
  }

  /** Newest first. */
  get recent() {
    return [...this.switches.values()].sort((a, b) => b.record.number - a.record.number).slice(0, 50);
  }

  /** The values from second `from` on, before `to`; null where it does not reach. */
  slice(name, from, to) {
    const values = [];
    for (let second = from; second < to; second += 1) values.push(this.columns[name][second - this.first] ?? null);
    return values;
  }

  /** [{from, to, layout, switch, target}] between two times, without gaps. */
  spans(from, to) {
    const spans = [];
    this.phases.forEach((phase, index) => {
      const begin = Math.max(from, phase.since_s);
      const end = Math.min(to, this.phases[index + 1]?.since_s ?? to);
      if (end > begin) spans.push({ ...phase, from: begin, to: end });
    });
    return spans;
  }
}
