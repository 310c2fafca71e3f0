/** The fold of protocol/state.py, word for word: the golden journal under tests/unit/golden holds both together. */
import { decode } from './codec';
import {
  FINAL_STATES,
  RANK_ENDS,
  type ErrorRecord,
  type Event,
  type Finding,
  type JobState,
  type RankState,
  type Stage,
  type Stall,
  type Waiting
} from './protocol';

/** Operations whose size must be equal on all ranks. */
const SIZED: readonly string[] = ['all_reduce', 'broadcast', 'allreduce'];

type Data = Record<string, unknown>;

/** Data of a known kind that is damaged: the event changes nothing. */
class Damaged extends Error {}

export function newJobState(): JobState {
  return {
    job: '',
    name: null,
    label: '',
    state: 'submitted',
    world_size: 0,
    submitted: 0,
    ended: 0,
    reason: '',
    first_failure: null,
    ranks: {},
    notes: [],
    findings: [],
    stall: null,
    driver: null,
    attempt: 0,
    restarts: 0,
    queued: '',
    stages: [],
    seq: 0
  };
}

export function newRankState(rank: number): RankState {
  return {
    rank,
    node: '',
    host: '',
    pid: 0,
    state: 'starting',
    started: 0,
    ready: 0,
    ended: 0,
    error: null,
    code: null,
    why: '',
    results: [],
    left: [],
    dropped: 0,
    waiting: null,
    place: '',
    placed: 0,
    entered: {},
    counted: 0,
    proving: false,
    proved: 0
  };
}

export function isFinal(state: JobState): boolean {
  return (FINAL_STATES as readonly string[]).includes(state.state);
}

/** Who holds up the others, while no rank makes progress. */
export function stallOf({ state, stall }: Pick<JobState, 'state' | 'stall'>): Stall | null {
  return ['starting', 'running'].includes(state) ? stall : null;
}

/**
 * Ranks that failed or were killed: the one that is blamed, then the earliest first. Those stopped because of it, or
 * because the job stalled, are not among them.
 */
export function failures(state: JobState): RankState[] {
  if (state.stall?.ends && state.first_failure === null) {
    return [];
  }
  const when = (rank: RankState): number => (rank.error ? rank.error.t : rank.ended);
  const blamed = (rank: RankState): number => (rank.rank === state.first_failure ? 0 : 1);
  return Object.values(state.ranks)
    .filter(rank => ['failed', 'killed', 'lost'].includes(rank.state))
    .sort((a, b) => blamed(a) - blamed(b) || when(a) - when(b) || a.rank - b.rank);
}

/** The ranks that have not entered a collective, as far as is known: those that it waits for. */
export function awaited(state: JobState, waiting: Waiting): number[] {
  const members = waiting.members ?? Object.keys(state.ranks).map(Number);
  return members.filter(number => {
    const rank = state.ranks[number];
    return number < state.world_size && rank !== undefined && isBehind(rank, waiting);
  });
}

/** Rank and place, of those that were asked where they are after `since`. */
export function placesOf(state: JobState, ranks: readonly number[], since: number): [number, string][] {
  return ranks.flatMap(number => {
    const rank = state.ranks[number];
    return rank && rank.place && rank.placed > since ? [[number, rank.place] as [number, string]] : [];
  });
}

/** Ranks that wait at the same number of a group, each in another collective: one rank for each. */
export function differences(state: JobState): RankState[][] {
  const points = new Map<string, Map<string, RankState>>();
  for (const rank of Object.values(state.ranks)) {
    if (rank.waiting && rank.state === 'running') {
      const { group, number, operation, size } = rank.waiting;
      const found = points.get(`${group} ${number}`) ?? new Map<string, RankState>();
      const call = SIZED.includes(operation) ? `${operation} ${size}` : operation;
      found.set(call, found.get(call) ?? rank);
      points.set(`${group} ${number}`, found);
    }
  }
  return [...points.values()].filter(found => found.size > 1).map(found => [...found.values()]);
}

/** What a rank said of itself before the wait began may have changed, unless it has ended. */
function isBehind(rank: RankState, waiting: Waiting): boolean {
  const known = rank.counted > waiting.since || isOver(rank);
  return known && (rank.entered[waiting.group] ?? 0) < waiting.number;
}

/** The state after `events`, from `state` on. */
export function fold(events: Iterable<Event>, state: JobState = newJobState()): JobState {
  for (const event of events) {
    state = apply(state, event);
  }
  return state;
}

/**
 * The state after one event. What follows an end is kept out, so that a final state is final. An event of a known
 * kind whose data is damaged changes nothing: no reader stops at it.
 */
export function apply(state: JobState, event: Event): JobState {
  const next = { ...state, seq: event.seq };
  if (isFinal(state)) {
    return next;
  }
  try {
    return applied(next, event);
  } catch (error) {
    if (error instanceof Damaged) {
      return next;
    }
    throw error;
  }
}

function applied(state: JobState, event: Event): JobState {
  if (event.kind.startsWith('rank.') && event.rank !== null) {
    const known = Object.hasOwn(state.ranks, event.rank) ? state.ranks[event.rank] : undefined;
    const rank = applyRank(known ?? newRankState(event.rank), event);
    return { ...state, ranks: { ...state.ranks, [event.rank]: rank } };
  }
  return applyJob(state, event);
}

function applyJob(state: JobState, event: Event): JobState {
  switch (event.kind) {
    case 'job.submitted':
      return {
        ...state,
        job: state.job || get(event, 'job', ''),
        name: get<string | null>(event, 'name', state.name),
        label: get(event, 'label', state.label),
        world_size: get(event, 'world_size', state.world_size),
        submitted: event.t
      };
    case 'job.driver':
      return { ...state, driver: get<Data | null>(event, 'process', null) };
    case 'job.starting':
      return {
        ...state,
        state: 'starting',
        attempt: get(event, 'attempt', 1),
        restarts: get(event, 'restarts', 0),
        world_size: get(event, 'world_size', state.world_size),
        reason: '',
        ranks: {},
        stall: null
      };
    case 'job.engine':
      return { ...state, queued: need(event, 'state') === 'queued' ? inQueue(event) : '' };
    case 'job.stage': {
      const percent = get(event, 'percent', 0);
      if (percent) {
        return {
          ...state,
          stages: state.stages.map((one, i, all) => (i === all.length - 1 ? { ...one, percent } : one))
        };
      }
      const stage = { text: String(need(event, 'text')), began: event.t, seconds: get(event, 'seconds', 0), percent };
      return { ...state, stages: [...over(state.stages, event.t), stage] };
    }
    case 'job.running':
      return state.state === 'starting' ? { ...state, state: 'running', stages: over(state.stages, event.t) } : state;
    case 'job.stopping':
      return { ...state, state: 'stopping', reason: get(event, 'reason', '') };
    case 'job.stalled':
      return { ...state, stall: stalled(event) };
    case 'job.resumed':
      return { ...state, stall: null };
    case 'job.note':
      return { ...state, notes: [...state.notes, get(event, 'text', '')] };
    case 'job.ended':
      return {
        ...state,
        state: get(event, 'state', 'failed'),
        queued: '',
        ended: event.t,
        reason: get(event, 'reason', ''),
        first_failure: get<number | null>(event, 'first_failure', null),
        findings: list(get<unknown>(event, 'findings', [])).map(findingOf)
      };
    default:
      return state;
  }
}

/** The stages, of which none goes on any more. */
function over(stages: Stage[], t: number): Stage[] {
  const last = stages.at(-1);
  return !last || last.seconds
    ? stages
    : [...stages.slice(0, -1), { ...last, seconds: Math.max(t - last.began, 0.001) }];
}

/**
 * The same for every order in which the rank's own file and its agent's are read. How a rank says that it ended
 * stands above what was seen of its process.
 */
function applyRank(rank: RankState, event: Event): RankState {
  switch (event.kind) {
    case 'rank.started': {
      const process = record(get<unknown>(event, 'process', {}));
      const [host, pid] = [get(process, 'host', ''), get(process, 'pid', 0)];
      return { ...rank, node: event.node ?? '', host, pid, started: event.t };
    }
    case 'rank.ready':
      return { ...rank, state: isOver(rank) ? rank.state : 'running', ready: event.t };
    case 'rank.proving': {
      const proved = get(event, 'seconds', 0);
      return { ...rank, proving: !proved, proved };
    }
    case 'rank.waiting':
      return { ...counted(rank, event), waiting: waitingOf(event) };
    case 'rank.resumed':
      return { ...rank, waiting: null };
    case 'rank.entered':
      return counted(rank, event);
    case 'rank.place':
      return { ...rank, place: words(need(event, 'place')), placed: event.t };
    case 'rank.failed':
      return { ...rank, state: 'failed', error: errorRecord(event['error']), why: '', ended: event.t };
    case 'rank.interrupted':
      return { ...rank, state: 'interrupted', why: '', ended: event.t };
    case 'rank.result':
      return { ...rank, results: list(get<unknown>(event, 'names', [])) as string[], left: leftOf(event) };
    case 'rank.dropped':
      return { ...rank, dropped: rank.dropped + whole(event['lines']) };
    case 'rank.done':
      return { ...rank, state: 'done', why: '', ended: event.t };
    case 'rank.exited':
      return exited(rank, event);
    default:
      return rank;
  }
}

function exited(rank: RankState, event: Event): RankState {
  const code = get<number | null>(event, 'code', null);
  if (isOver(rank)) {
    return { ...rank, code };
  }
  return { ...rank, state: get(event, 'state', 'killed'), code, why: get(event, 'why', ''), ended: event.t };
}

function findingOf(value: unknown): Finding {
  const data = record(value);
  const text = (key: string): string => words(need(data, key));
  const evidence = list(need(data, 'evidence')).map(item => {
    const line = record(item);
    return { file: words(need(line, 'file')), number: whole(need(line, 'number')), text: words(need(line, 'text')) };
  });
  return {
    code: text('code'),
    severity: text('severity'),
    rank: need(data, 'rank') as number | null,
    node: need(data, 'node') as string | null,
    sentence: text('sentence'),
    cause: text('cause'),
    remedy: text('remedy'),
    evidence
  };
}

function stalled(event: Event): Stall {
  const ends = need(event, 'ends');
  if (typeof ends !== 'boolean') {
    throw new Damaged();
  }
  return { since: real(need(event, 'since')), told: event.t, finding: findingOf(need(event, 'finding')), ends };
}

function waitingOf(event: Event): Waiting {
  const members = get<unknown>(event, 'members', null);
  return {
    operation: String(need(event, 'operation')),
    group: String(need(event, 'group')),
    number: whole(need(event, 'number')),
    since: real(need(event, 'since')),
    size: whole(get<unknown>(event, 'size', 0)),
    members: members === null ? null : list(members).map(whole)
  };
}

function inQueue(event: Event): string {
  const [position, reason] = [get<unknown>(event, 'position', null), get<unknown>(event, 'reason', '')];
  const words = position === null ? "in the launcher's queue" : `position ${whole(position)}`;
  return typeof reason === 'string' && reason !== '' ? `${words}: ${reason}` : words;
}

function counted(rank: RankState, event: Event): RankState {
  const counts = Object.entries(record(need(event, 'counts')));
  return {
    ...rank,
    entered: Object.fromEntries(counts.map(([group, count]) => [group, whole(count)])),
    counted: event.t
  };
}

function isOver(rank: RankState): boolean {
  return (RANK_ENDS as readonly string[]).includes(rank.state);
}

function leftOf(event: Event): [string, string][] {
  return list(get<unknown>(event, 'left', [])).map(item => {
    const pair = list(item);
    if (pair.length !== 2) {
      throw new Damaged();
    }
    return [String(pair[0]), String(pair[1])];
  });
}

function errorRecord(value: unknown): ErrorRecord {
  const data = record(value);
  const frames = list(get<unknown>(data, 'frames', [])).map(item => {
    const frame = list(item);
    if (frame.length < 4) {
      throw new Damaged();
    }
    return [String(frame[0]), whole(frame[1]), String(frame[2]), String(frame[3])] as ErrorRecord['frames'][number];
  });
  const [type, module, message, text] = ['type', 'module', 'message', 'text'].map(key => String(need(data, key)));
  return { type: type!, module: module!, message: message!, text: text!, frames, t: real(need(data, 't')) };
}

/** What Python's `data.get(key, otherwise)` gives: values are as they were written, whatever their type. */
function get<T>(data: Data, key: string, otherwise: T): T {
  return Object.hasOwn(data, key) ? (data[key] as T) : otherwise;
}

function need(data: Data, key: string): unknown {
  if (!Object.hasOwn(data, key)) {
    throw new Damaged();
  }
  return data[key];
}

function words(value: unknown): string {
  if (typeof value !== 'string') {
    throw new Damaged();
  }
  return value;
}

function record(value: unknown): Data {
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    throw new Damaged();
  }
  return value as Data;
}

/** As Python's `tuple(value)`: text is a sequence of its characters, a mapping of its keys. */
function list(value: unknown): unknown[] {
  if (Array.isArray(value)) {
    return [...value];
  }
  return typeof value === 'string' ? [...value] : Object.keys(record(value));
}

/** As Python's `float(value)`. */
function real(value: unknown): number {
  const plain = typeof value === 'boolean' || typeof value === 'bigint' ? Number(value) : value;
  if (typeof plain === 'number') {
    return plain;
  }
  if (typeof plain === 'string' && plain.trim() !== '' && !Number.isNaN(Number(plain))) {
    return Number(plain);
  }
  throw new Damaged();
}

/** As Python's `int(value)`. */
function whole(value: unknown): number {
  const number = real(value);
  if (!Number.isFinite(number) || (typeof value === 'string' && !Number.isInteger(number))) {
    throw new Damaged();
  }
  return Math.trunc(number);
}

/** An event from parsed JSON, as `Event.from_json`; null where it is damaged. */
export function eventFrom(value: unknown): Event | null {
  try {
    const data = record(value);
    const rank = data['rank'] ?? null;
    if (rank !== null && typeof rank !== 'number') {
      return null;
    }
    return {
      ...data,
      kind: String(need(data, 'kind')),
      t: real(data['t'] || 0),
      node: (data['node'] ?? null) as string | null,
      rank,
      seq: whole(data['seq'] || 0)
    };
  } catch (error) {
    if (error instanceof Damaged) {
      return null;
    }
    throw error;
  }
}

/** Events of a journal's whole lines. Damaged lines are skipped. */
export function parseLines(text: string): Event[] {
  const events: Event[] = [];
  for (const line of text.slice(0, text.lastIndexOf('\n') + 1).split('\n')) {
    try {
      const event = eventFrom(decode(line));
      if (event) {
        events.push(event);
      }
    } catch (error) {
      if (!(error instanceof SyntaxError)) {
        throw error;
      }
    }
  }
  return events;
}
