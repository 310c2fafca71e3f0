/** Numbers, times and states as words, in the wording of views.py. Pure. */
import type { ErrorRecord, JobState, NodePlan, RankState, Waiting } from '../protocol';
import { shownText } from './ansi';
import { language, plural, trans } from './translate';

/** Bytes for people: `512 B`, `1.5 kB`, `256 MB` (powers of ten, three digits). */
export function size(bytes: number): string {
  let value = bytes;
  for (const unit of ['B', 'kB', 'MB', 'GB', 'TB']) {
    if (value < 999.5 || unit === 'TB') {
      return unit === 'B' ? `${bytes} B` : `${plain(value, 3)} ${unit}`;
    }
    value /= 1000;
  }
  throw new RangeError(`${bytes} bytes`);
}

/** A part of the whole in its unit: `12 of 80 GB`, `900 MB of 80 GB`. */
export function sizeOf(part: number, whole: number): string {
  const [one, all] = [size(part), size(whole)];
  const [value, unit] = one.split(' ');
  return trans('%1 of %2', all.endsWith(` ${unit}`) ? value! : one, all);
}

/** Seconds for people: `0.05 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`. */
export function duration(seconds: number): string {
  const value = Math.max(seconds, 0);
  if (value < 59.95) {
    return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  }
  const whole = Math.round(value);
  if (whole < 3600) {
    return trans('%1 min %2 s', Math.floor(whole / 60), two(whole % 60));
  }
  if (whole < 86400) {
    return trans('%1 h %2 min', Math.floor(whole / 3600), two(Math.floor((whole % 3600) / 60)));
  }
  return trans('%1 d %2 h', Math.floor(whole / 86400), two(Math.floor((whole % 86400) / 3600)));
}

/** As `duration`, for a clock that runs: whole seconds, so that nothing flickers. */
export function ticking(seconds: number): string {
  return seconds < 59.95 ? `${Math.floor(Math.max(seconds, 0))} s` : duration(Math.floor(seconds));
}

/** How long ago `then` was, both in seconds since the epoch; a clock that was set back reads `just now`. */
export function ago(then: number, now: number): string {
  const passed = now - then;
  if (passed < 5) {
    return trans('just now');
  }
  const units: [string, number][] = [
    ['d', 86400],
    ['h', 3600],
    ['min', 60],
    ['s', 1]
  ];
  const [unit, length] = units.find(([, length]) => passed >= length)!;
  return trans('%1 %2 ago', Math.floor(passed / length), unit);
}

/** A value in four significant digits: `0.1235`, `1234`, `1.235e+7`, `NaN`, `∞`. */
export function number(value: number | bigint | null | undefined): string {
  if (value === null || value === undefined) {
    return '';
  }
  const real = Number(value);
  if (Number.isNaN(real)) {
    return 'NaN';
  }
  if (!Number.isFinite(real)) {
    return real > 0 ? '∞' : '−∞';
  }
  return Number.isInteger(real) && Math.abs(real) < 1e15 ? grouped(real) : plain(real, 4);
}

/** A whole number with thin spaces between the thousands: `1 234 567`. */
export function grouped(value: number): string {
  const digits = String(Math.abs(value));
  return (value < 0 ? '-' : '') + (digits.length < 5 ? digits : digits.replace(/\B(?=(\d{3})+$)/g, '\u202f'));
}

/** Of `digits` significant digits, without trailing zeros. */
function plain(value: number, digits: number): string {
  const magnitude = Math.abs(value);
  if (value !== 0 && (magnitude >= 1e6 || magnitude < 1e-4)) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, 'e');
  }
  return String(Number(value.toPrecision(digits)));
}

function two(value: number): string {
  return String(value).padStart(2, '0');
}

/** The time of day of `t` (seconds since the epoch), in the reader's zone: `14:03:07`. */
export function clock(t: number): string {
  const date = new Date(t * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(':');
}

/** Times under an axis, in seconds since the epoch: as fine as they are apart; the first of a day names the day. */
export function tickTimes(values: readonly number[]): string[] {
  const apart = values.length > 1 ? values[1]! - values[0]! : 1;
  const days = values.map(t => new Date(t * 1000).toDateString());
  return values.map((t, at) => {
    const day = new Date(t * 1000).toLocaleDateString(language, { day: 'numeric', month: 'short' });
    const time = apart < 60 ? clock(t) : clock(t).slice(0, 5);
    return apart >= 86400 || (at > 0 && days[at] !== days[at - 1]) ? day : time;
  });
}

/** When `t` was, as short as it can be said at `now`: `14:03:07`, `Nov 21, 14:03`. Both in seconds since the epoch. */
export function startedAt(t: number, now: number): string {
  const [then, today] = [new Date(t * 1000), new Date(now * 1000)];
  if (then.toDateString() === today.toDateString()) {
    return clock(t);
  }
  const year = then.getFullYear() === today.getFullYear() ? undefined : 'numeric';
  const day = then.toLocaleDateString(language, { day: 'numeric', month: 'short', year });
  return `${day}, ${clock(t).slice(0, 5)}`;
}

export function ranks(count: number): string {
  return plural('%1 rank', '%1 ranks', count);
}

/** `0-3`, `0, 2, 5`: consecutive numbers as a span. */
export function spans(numbers: readonly number[]): string {
  const parts: string[] = [];
  for (let at = 0; at < numbers.length; ) {
    let end = at;
    while (numbers[end + 1] === numbers[end]! + 1) {
      end += 1;
    }
    if (end - at >= 2) {
      parts.push(`${numbers[at]}-${numbers[end]}`);
    } else {
      parts.push(...numbers.slice(at, end + 1).map(String));
    }
    at = end + 1;
  }
  return parts.join(', ');
}

/** The first line of `text`, cut with an ellipsis. */
export function firstLine(text: string, limit = 200): string {
  const line = shownText(text.trim().split('\n', 1)[0]!);
  return line.length <= limit ? line : line.slice(0, limit - 1) + '…';
}

/** `ValueError: text`, the last line of a traceback. */
export function errorTitle(error: ErrorRecord): string {
  return error.message ? `${error.type}: ${error.message}` : error.type;
}

/** `running`, `timed out`…; of a job or of a rank. */
export function stateWord(state: string): string {
  switch (state) {
    case 'submitted':
      return trans('submitted');
    case 'starting':
      return trans('starting');
    case 'running':
      return trans('running');
    case 'waiting':
      return trans('waiting');
    case 'stalled':
      return trans('stalled');
    case 'stopping':
      return trans('stopping');
    case 'succeeded':
      return trans('succeeded');
    case 'done':
      return trans('done');
    case 'failed':
      return trans('failed');
    case 'cancelled':
      return trans('cancelled');
    case 'timed_out':
      return trans('timed out');
    case 'lost':
      return trans('lost');
    case 'orphaned':
      return trans('orphaned');
    case 'unreachable':
      return trans('unreachable');
    case 'interrupted':
      return trans('interrupted');
    case 'killed':
      return trans('killed');
    case 'stopped':
      return trans('stopped');
    default:
      return state;
  }
}

/** `all_reduce #17`. */
export function collective(waiting: Waiting): string {
  return `${waiting.operation} #${waiting.number}`;
}

/** `rank 3`, `ranks 0-6`; nothing of none. */
export function theRanks(numbers: readonly number[]): string {
  if (numbers.length === 0) {
    return '';
  }
  return numbers.length === 1 ? trans('rank %1', numbers[0]) : trans('ranks %1', spans(numbers));
}

/** The ranks of a job in their order. */
export function ranksOf(state: JobState): RankState[] {
  return Object.values(state.ranks).sort((one, other) => one.rank - other.rank);
}

/** What a node of a plan is called; plans of an earlier version know no hosts. */
export function hostOf(node: NodePlan): string {
  return node.host || node.name;
}

/** Names of the hosts the ranks run on, in order of rank. */
export function hosts(state: JobState): string[] {
  return [...new Set(ranksOf(state).map(rank => rank.host))].filter(host => host !== '');
}

/** `2 ranks on box`, `64 ranks on 8 hosts`. */
export function where(state: JobState): string {
  const count = ranks(state.world_size || Object.keys(state.ranks).length);
  const names = hosts(state);
  if (names.length === 0) {
    return count;
  }
  return names.length === 1 ? trans('%1 on %2', count, names[0]) : trans('%1 on %2 hosts', count, names.length);
}

/** Seconds from submission to the end, or to `now`. */
export function elapsed(state: JobState, now: number): number {
  return state.submitted ? Math.max((state.ended || now) - state.submitted, 0) : 0;
}

export function shortPath(file: string): string {
  return file.replace(/^.*[\\/](?:site|dist)-packages[\\/]/, '');
}
