// Asks the server once a second, more often while it switches, and shows what it says.

import * as chart from "./chart.js";
import {
  chip, count, element, giveRoles, layoutName, percent, plural, setChildren, setText, tableRow,
} from "./format.js";
import { ask, askLayout, key, Refused, Timeline } from "./server.js";
import { showCandidates, showRanks, showSwitch, showSwitches, sayEvent } from "./tables.js";

const POLL_MS = 1000;
const POLL_SWITCHING_MS = 250;
const RATE_S = 5;
const SHORTEST_S = 120;

const $ = (id) => document.getElementById(id);
const timeline = new Timeline();
let layout = null;
let timer = null;
let asking = false;
let answeredAt = null;

// --- the loop

async function turn() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const [history, about] = await Promise.all([ask(`v1/timeline?after=${timeline.next}`), askLayout()]);
    if (history.server !== timeline.server) setText($("model"), (await ask("v1/models")).data[0].id);
    const news = timeline.add(history);
    layout = about;
    answeredAt = Date.now();
    show(news);
  } catch (error) {
    showFailure(error);
  } finally {
    asking = false;
    const isSwitching = layout?.status && layout.status.switch !== "steady";
    if (!document.hidden && $("key-form").hidden) timer = setTimeout(turn, isSwitching ? POLL_SWITCHING_MS : POLL_MS);
  }
}

function showFailure(error) {
  document.body.classList.add("stale");
  if (error instanceof Refused && error.status === 401) {
    askForKey();
  } else if (error instanceof Refused) {
    connection("waiting", `Not ready: ${error.message}`);
    timeline.clear();
  } else {
    const since = answeredAt ? `; what is shown is of ${new Date(answeredAt).toLocaleTimeString("en-GB")}` : "";
    connection("lost", `Not connected, retrying${since}`);
  }
}

function connection(kind, text) {
  $("connection").className = `pill ${kind}`;
  setText($("connection"), text);
}

// --- the key

function askForKey() {
  const wasRefused = key.get() !== null;
  key.forget();
  connection("waiting", wasRefused ? "The key was refused" : "An API key is needed");
  setText($("key-why"), `${wasRefused ? "The server refused that key. " : "This server asks for a key. "}` +
    "It is kept in this tab only, until it is closed.");
  $("main").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  turn().then(() => {
    if (!$("main").hidden) $("main").focus();
  });
});

// --- what is shown

function show(news) {
  document.body.classList.remove("stale");
  connection("good", layout.status ? "Connected" : "Connected; the engine has not said how it stands");
  $("main").hidden = false;
  const { status } = layout;
  if (status) {
    showNow(status);
    showControls(status);
    showSwitch(status, timeline);
    showRanks($("ranks"), status);
  }
  showTimeline();
  showWhy(layout.explain);
  showSwitches($("switches"), timeline);
  $("no-switches").hidden = timeline.switches.size > 0;
  for (const one of news) $("events").append(element("span", {}, `${sayEvent(one.record)} `));
  while ($("events").children.length > 5) $("events").firstChild.remove();
}

function showNow(status) {
  setChildren($("now-layout"), [status.layout, status.mode], () => [chip(status.layout), element("small", {}, status.mode)]);
  setText($("now-running"), count(status.running));
  setText($("now-waiting"), count(status.waiting));
  const rate = (name) => {
    const values = timeline.slice(name, timeline.next - RATE_S, timeline.next).map((value) => value ?? 0);
    return values.reduce((sum, value) => sum + value, 0) / RATE_S;
  };
  const [all, output] = [count(rate("tokens")), count(rate("output_tokens"))];
  setChildren($("now-tokens"), [all, output], () => [all, element("small", {}, `${output} output`)]);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  setText($("now-cache"), percent(sum(status.used_tokens) / sum(status.total_tokens)));
}

function showTimeline() {
  // Not much further back than there is anything to see.
  const length = Math.min(
    Number(document.querySelector("input[name=window]:checked").value),
    Math.max(SHORTEST_S, 10 * Math.ceil((timeline.next - timeline.first) / 10)),
  );
  const width = Math.max(280, $("chart").clientWidth);
  $("chart").replaceChildren(chart.draw(timeline, length, width));
  setText($("chart-text"), chart.describe(timeline, length));
  setChildren($("legend"), layout.layouts, () => [
    ...layout.layouts.map((name) =>
      element("li", {}, chart.swatch(name), element("b", {}, layoutName(name)), ` ${chart.LAYOUTS[name] ?? ""}`)),
    ...Object.entries(chart.LINES).map(([name, text]) => element("li", {}, chart.swatch(name), text)),
  ]);
  const table = $("chart-table");
  if (!table.closest("details").open) return;
  const rows = chart.rows(timeline, length);
  setChildren(table.tBodies[0], rows, () =>
    rows.map((cells) => tableRow(table, cells)));
}

function showWhy(explain) {
  if (!explain) {
    setText($("verdict"), "The engine is in a long step and has not said.");
    return;
  }
  const policy = explain.policy;
  const pinned = explain.mode === "pinned";
  const verdict = policy?.verdict ?? "this deployment has no policy";
  const last = explain.why ? ` The switch under way is for: ${explain.why}.` : "";
  setText($("verdict"), (pinned
    ? `${layoutName(explain.layout)} is pinned; the load does not change it.`
    : `${policy?.objective ? `Auto, for ${policy.objective.goal}. ` : ""}Verdict: ${verdict}.`) + last);
  const load = policy?.load;
  setText($("load"), load
    ? `${pinned ? "The policy's last look" : "It saw"}: ${plural(load.running, "request")} running, ${count(load.waiting)} queued, ` +
      `${count(load.held_tokens)} tokens held, ${count(load.prompt_tokens_to_compute)} prompt tokens to compute, about ` +
      `${count(load.expected_output_tokens_left)} output tokens left.`
    : "");
  showCandidates($("candidates"), policy?.candidates ?? [], policy?.layout);
}

// --- what can be asked for

function showControls(status) {
  setChildren($("layouts"), layout.layouts, () => layout.layouts.map((name) => {
    const button = element("button", { type: "button", "data-layout": name }, element("span", { class: "unseen" }, "Switch to "), chip(name));
    button.addEventListener("click", () => change({ layout: name }, `Asked for ${layoutName(name)}.`));
    return button;
  }));
  for (const button of $("layouts").children) {
    if (button.dataset.layout === status.layout) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  const goal = status.switch !== "steady" && status.switch !== "aborting" ? status.switch_target : status.layout;
  const pinned = status.mode === "pinned";
  setText($("pin"), `Pin ${layoutName(goal)}`);
  $("pin").dataset.layout = goal;
  $("pin").setAttribute("aria-disabled", pinned);
  $("release").setAttribute("aria-disabled", !pinned);
  setText($("mode"), pinned
    ? `Pinned: it stays ${layoutName(status.layout)} until somebody switches or releases it.`
    : "Auto: the layout follows the load, also after a switch that is asked for here. Pin it to make it stay.");
}

async function change(body, said) {
  const asked = $("asked");
  asked.classList.remove("bad");
  try {
    await ask("v1/layout", body);
    setText(asked, said);
  } catch (error) {
    asked.classList.add("bad");
    if (error.status === 401) askForKey();
    setText(asked, error instanceof Refused ? `Refused: ${error.message}` : "Not connected; nothing was changed.");
  }
  turn();
}

function onPress(id, act) {
  $(id).addEventListener("click", () => {
    if ($(id).getAttribute("aria-disabled") !== "true") act();
  });
}

onPress("pin", () => {
  const goal = $("pin").dataset.layout;
  change({ layout: goal, pin: true }, `${layoutName(goal)} is pinned.`);
});
onPress("release", () => change({ layout: "auto" }, "The layout follows the load again."));
$("window").addEventListener("change", () => layout && showTimeline());
document.querySelector("details").addEventListener("toggle", () => layout && showTimeline());
document.addEventListener("visibilitychange", () => document.hidden || turn());
new ResizeObserver(() => layout && showTimeline()).observe($("main"));
document.querySelectorAll("table").forEach(giveRoles);
turn();
