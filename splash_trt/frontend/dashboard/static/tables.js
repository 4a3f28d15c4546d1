// Ranks, the switch under way, recent switches, and the layouts that the policy compared.

import {
  NONE, bytes, chip, clock, count, duration, element, layoutName, percent, setChildren, setText, short, signed, tableRow,
} from "./format.js";

const STATES = ["preparing", "migrating", "armed", "retiring"];
const $ = (id) => document.getElementById(id);

const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, value) => total + value, 0);
const bytesOf = (record) => sum(record.bytes_between_ranks) + (record.bytes_inside_ranks ?? 0);

function ends(record) {
  return record.source === record.target
    ? `${layoutName(record.source)}, other owners`
    : `${layoutName(record.source)} to ${layoutName(record.target)}`;
}

function arrow(source, target) {
  return [chip(source), element("span", { class: "arrow", "aria-hidden": "true" }, " → "),
    element("span", { class: "unseen" }, " to "), chip(target)];
}

/** One sentence for those who hear the page. */
export function sayEvent(record) {
  const name = `Switch ${record.number}, ${ends(record)},`;
  return record.ended ? `${name} ${record.outcome} after ${duration(sum(record.seconds_in))}.` : `${name} began.`;
}

export function showRanks(table, status) {
  const ranks = status.total_tokens.map((limit, rank) => [rank, status.used_tokens[rank], limit, status.running_by_rank[rank]]);
  const most = Math.max(1, ...status.total_tokens, Number(table.dataset.most ?? 0));
  table.dataset.most = most;
  setChildren(table.tBodies[0], [ranks, most], () => ranks.map(([rank, used, limit, running]) => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    const [room, held] = [element("span", { class: "room" }), element("span", { class: "held" })];
    room.style.width = `${(100 * limit) / most}%`;
    held.style.width = `${(100 * used) / most}%`;
    bar.append(room, held);
    const share = limit ? percent(used / limit) : NONE;
    return tableRow(table, [String(rank), count(running), element("span", { class: "gauge" }, bar, element("span", { class: "share" }, share)), count(used), count(limit - used), count(limit)]);
  }));
}

export function showSwitch(status, timeline) {
  const steady = status.switch === "steady";
  const record = timeline.recent.find((one) => !one.record.ended)?.record;
  const progress = steady ? 0 : status.switch_progress;
  $("switch-progress").value = progress;
  $("switch-progress").hidden = steady;
  $("switch-states").hidden = steady;
  setChildren($("switch-what"), steady ? ["steady", timeline.recent[0]] : [status, record], () => {
    if (steady) return [lastSwitch(timeline.recent[0]?.record)];
    const planned = record ? bytesOf(record) : 0;
    const moved = planned ? `; about ${bytes(planned * progress)} of ${bytes(planned)}` : "";
    return [...arrow(status.layout, status.switch_target), ` ${status.switch}, ${percent(progress)} of the rows moved${moved}`];
  });
  const at = STATES.indexOf(status.switch);
  setChildren($("switch-states"), status.switch, () => STATES.map((state, index) =>
    element("li", { class: index < at ? "done" : null, "aria-current": index === at ? "step" : null }, state)));
}

function lastSwitch(record) {
  if (!record) return "None, and there has been none.";
  return `None. The last one, ${ends(record)}, ${record.outcome} after ${duration(sum(record.seconds_in))}.`;
}

export function showSwitches(table, timeline) {
  const recent = timeline.recent;
  table.hidden = recent.length === 0;
  const since = Math.round(timeline.begins); // it wavers by what an answer takes
  if (Math.abs(since - Number(table.dataset.begins ?? 0)) > 1) table.dataset.begins = since;
  const begins = Number(table.dataset.begins);
  setChildren(table.tBodies[0], [recent, begins], () => recent.map(({ began_s, record }) => {
    const outcome = String(record.outcome);
    const kind = outcome.startsWith("committed") ? "good" : record.ended ? "bad" : "waiting";
    return tableRow(table, [
      clock(began_s + begins),
      element("span", {}, ...(record.source === record.target ? [chip(record.source), " owners"] : arrow(record.source, record.target))),
      element("span", { class: `outcome ${kind}` }, outcome),
      duration(record.ended ? sum(record.seconds_in) : null),
      bytes(bytesOf(record)),
      percent(record.slowdown),
      duration(record.stall_s),
      record.why ?? NONE,
    ]);
  }));
}

export function showCandidates(table, candidates, current) {
  table.hidden = candidates.length === 0;
  setChildren(table.tBodies[0], candidates, () => candidates.map((candidate) => {
    const { switch: cost, phases } = candidate;
    const stays = candidate.layout === current && !candidate.moves_owners;
    const name = [chip(candidate.layout), stays ? " stay" : candidate.moves_owners ? " owners" : ""];
    const route = cost.route.length > 1 ? ` by ${cost.route.slice(0, -1).map(layoutName).join(", ")}` : "";
    return tableRow(table, [
      [element("span", {}, ...name, route)],
      candidate.fits ? signed(candidate.gain_s) : "no room",
      duration(phases[0]?.p99_step_s),
      stays ? NONE : duration(cost.cost_s),
      stays ? NONE : duration(cost.seconds),
      stays ? NONE : bytes(cost.bytes),
      short(candidate.room_tokens),
    ]);
  }));
}
