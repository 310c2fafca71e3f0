/** A grid of the ranks: how each stands, where, how far; the straggler marked. */
import type { Plan, RankState } from '../protocol';
import type { JobSession } from '../session';
import { isFinal } from '../state';
import { make, setAttribute, setText } from './dom';
import { duration, grouped, number, ranksOf, spans, stateWord, ticking } from './format';
import { gpuMemoryWords, memoryWords, percent, taken, type Taken } from './gauges';
import { drawShape, standingOf, type Standing } from './standing';
import { plural, trans } from './translate';

/** Above so many ranks those of one state stand in one line. */
export const FOLD = 64;

const BEHIND = 0.05;

const LEAST_BEHIND = 3;

/** Between two drawings; a rank's step changes faster than anyone reads. */
const PERIOD = 250;

type Column =
  | 'rank'
  | 'state'
  | 'host'
  | 'pid'
  | 'gpu'
  | 'step'
  | 'loss'
  | 'time'
  | 'cpu'
  | 'memory'
  | 'gpuUse'
  | 'gpuMemory';

/** Shown where the job has GPUs; the last of all. */
const OF_GPUS: readonly Column[] = ['gpuUse', 'gpuMemory'];

/** Columns after rank and state. */
const PLAIN = 10;

export interface Row {
  rank: RankState;
  standing: Standing;
  gpu: string;
  step: number | null;
  loss: number | null;
  /** Seconds since it began, to its end or now. */
  time: number;
  straggler: boolean;
  taken: Taken;
}

/** A line of the grid: one rank, or several of the same state. */
export type Line = { row: Row } | { group: string; rows: Row[] };

export class RanksTab {
  private readonly body = make('tbody');
  private readonly frame = make('div.td-table-frame');
  private readonly sorters = new Map<Column, HTMLElement>();
  private readonly lossHeader = make('span');
  private readonly drawn = new Map<string, HTMLTableRowElement>();
  private readonly open = new Set<string>();
  private sort: { by: Column; down: boolean } = { by: 'rank', down: false };
  private visible = false;
  private gpus = false;
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal,
    private readonly toLog: (rank: number) => void
  ) {
    const caption = make('caption.td-spoken', {}, trans('Ranks of the job'));
    this.frame.append(make('table.td-table.td-ranks', {}, caption, make('thead', {}, this.header()), this.body));
    element.append(this.frame);
    this.body.addEventListener('click', event => this.click(event), { signal });
    session.onChange(changes => (changes.has('state') || changes.has('status')) && this.later(), signal);
    signal.addEventListener('abort', () => this.hide(), { once: true });
  }

  show(): void {
    this.visible = true;
    this.draw();
  }

  hide(): void {
    this.visible = false;
    clearTimeout(this.timer ?? undefined);
    this.timer = null;
  }

  private later(): void {
    if (this.visible && this.timer === null) {
      this.timer = setTimeout(() => this.draw(), PERIOD);
    }
  }

  private header(): HTMLElement {
    const names: [Column, string | HTMLElement][] = [
      ['rank', trans('Rank')],
      ['state', trans('State')],
      ['host', trans('Host')],
      ['pid', trans('PID')],
      ['gpu', trans('GPU')],
      ['step', trans('Step')],
      ['loss', this.lossHeader],
      ['time', trans('Time')],
      ['cpu', trans('CPU')],
      ['memory', trans('Memory')],
      ['gpuUse', trans('GPU use')],
      ['gpuMemory', trans('GPU memory')]
    ];
    const cells = names.map(([column, name]) => {
      const sorter = make('button.td-sort', { type: 'button', title: measured(column) }, name);
      sorter.addEventListener('click', () => this.sortBy(column), { signal: this.signal });
      const cell = make('th', { scope: 'col', 'aria-sort': column === 'rank' ? 'ascending' : null }, sorter);
      this.sorters.set(column, cell);
      return cell;
    });
    return make('tr', {}, ...cells);
  }

  private sortBy(column: Column): void {
    this.sort = { by: column, down: this.sort.by === column && !this.sort.down };
    for (const [name, cell] of this.sorters) {
      setAttribute(cell, 'aria-sort', name !== column ? null : this.sort.down ? 'descending' : 'ascending');
    }
    this.draw();
  }

  private draw(): void {
    this.timer = null;
    const { session } = this;
    const loss = lossName(session.status?.curves.names ?? []);
    setText(this.lossHeader, loss || trans('Last value'));
    const rows = rowsOf(session, loss).sort(order(this.sort.by, this.sort.down));
    this.gpus = rows.some(row => row.gpu || row.taken.gpuTotal !== null);
    OF_GPUS.forEach(column => this.sorters.get(column)!.toggleAttribute('hidden', !this.gpus));
    const seen = new Set<string>();
    const elements: HTMLTableRowElement[] = [];
    const put = (key: string, fill: (element: HTMLTableRowElement) => void) => {
      const element = this.drawn.get(key) ?? make('tr', { 'data-key': key });
      this.drawn.set(key, element);
      fill(element);
      seen.add(key);
      elements.push(element);
    };
    for (const line of lines(rows)) {
      if ('row' in line) {
        put(`r${line.row.rank.rank}`, element => this.fillRow(element, line.row, 'alone'));
        continue;
      }
      const open = this.open.has(line.group);
      put(`g${line.group}`, element => fillGroup(element, line.group, line.rows, open));
      for (const row of open ? line.rows : []) {
        put(`r${row.rank.rank}`, element => this.fillRow(element, row, 'inside'));
      }
    }
    for (const key of this.drawn.keys()) {
      if (!seen.has(key)) {
        this.drawn.get(key)!.remove();
        this.drawn.delete(key);
      }
    }
    place(this.body, elements.length ? elements : [nothing()]);
  }

  private fillRow(element: HTMLTableRowElement, row: Row, depth: 'alone' | 'inside'): void {
    fillRow(element, row, depth);
    [...element.cells].slice(-OF_GPUS.length).forEach(cell => cell.toggleAttribute('hidden', !this.gpus));
  }

  private click(event: Event): void {
    const line = (event.target as Element).closest('tr');
    const key = line?.dataset.key ?? '';
    if (key.startsWith('r')) {
      this.toLog(Number(key.slice(1)));
    } else if (key.startsWith('g')) {
      const group = key.slice(1);
      this.open[this.open.has(group) ? 'delete' : 'add'](group);
      this.draw();
    }
  }
}

/** The curve that stands for how well it goes: one called loss, else the first. */
export function lossName(names: readonly string[]): string {
  const some = names.slice(0, 1000);
  return some.find(name => name === 'loss') ?? some.find(name => /loss/i.test(name)) ?? some[0] ?? '';
}

export function rowsOf(session: Pick<JobSession, 'state' | 'status' | 'hello' | 'clockSkew'>, loss: string): Row[] {
  const { state, status, hello } = session;
  const now = Date.now() / 1000 + session.clockSkew;
  const gpus = gpusOf(hello?.plan ?? null);
  const ranks = ranksOf(state);
  const live = ranks.filter(rank => rank.state === 'running' || rank.state === 'starting');
  const behind = straggler(live.map(rank => [rank.rank, status?.ranks[rank.rank]?.step ?? null]));
  return ranks.map(rank => ({
    rank,
    standing: standingOf(state, rank.rank),
    gpu: gpus.get(rank.rank) ?? '',
    step: status?.ranks[rank.rank]?.step ?? null,
    loss: status?.ranks[rank.rank]?.last[loss] ?? null,
    time: rank.started ? Math.max((rank.ended || state.ended || now) - rank.started, 0) : 0,
    straggler: rank.rank === behind,
    taken: taken(status?.gauges?.[rank.rank], live.includes(rank) && !isFinal(state))
  }));
}

function gpusOf(plan: Plan | null): Map<number, string> {
  const found = new Map<number, string>();
  for (const node of plan?.nodes ?? []) {
    node.ranks.forEach((rank, index) => found.set(rank, node.gpus[index] ?? ''));
  }
  return found;
}

/** The rank that alone is behind all others, by 5 % of their steps and at least 3; else null. */
export function straggler(steps: [number, number | null][]): number | null {
  const known = steps.filter((pair): pair is [number, number] => pair[1] !== null);
  const [last, next] = known.sort((one, other) => one[1] - other[1]);
  if (!last || !next || next[1] - last[1] < Math.max(LEAST_BEHIND, BEHIND * next[1])) {
    return null;
  }
  return last[0];
}

/** Each rank, or above `FOLD` one line a state; what needs a look (failures, the straggler) stays alone. */
export function lines(rows: Row[]): Line[] {
  if (rows.length <= FOLD) {
    return rows.map(row => ({ row }));
  }
  const groups = new Map<string, Row[]>();
  const alone: Line[] = [];
  for (const row of rows) {
    const notable = row.straggler || row.rank.error || row.rank.state === 'killed' || row.rank.state === 'lost';
    if (notable && alone.length < FOLD) {
      alone.push({ row });
    } else {
      const members = groups.get(row.standing.state);
      if (members) {
        members.push(row);
      } else {
        groups.set(row.standing.state, [row]);
      }
    }
  }
  return [...alone, ...[...groups].map(([group, members]) => ({ group, rows: members }))];
}

/** Ascending by a column and then by rank; what is not known comes last either way. */
function order(by: Column, down: boolean): (one: Row, other: Row) => number {
  const key = KEYS[by];
  return (one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === null || b === null) {
      return Number(a === null) - Number(b === null) || one.rank.rank - other.rank.rank;
    }
    const sign = typeof a === 'string' || typeof b === 'string' ? String(a).localeCompare(String(b)) : a - b;
    return (down ? -sign : sign) || one.rank.rank - other.rank.rank;
  };
}

const KEYS: Record<Column, (row: Row) => number | string | null> = {
  rank: row => row.rank.rank,
  state: row => row.standing.words,
  host: row => row.rank.host,
  pid: row => row.rank.pid,
  gpu: row => row.gpu,
  step: row => row.step,
  loss: row => (row.loss === null || Number.isNaN(Number(row.loss)) ? null : Number(row.loss)),
  time: row => row.time,
  cpu: row => row.taken.cpu,
  memory: row => row.taken.memory,
  gpuUse: row => row.taken.gpu,
  gpuMemory: row => row.taken.gpuMemory
};

/** What a column holds, where its name does not say it. */
function measured(column: Column): string | null {
  switch (column) {
    case 'cpu':
      return trans('Of the rank and its children, in per cent of one core, over about two seconds');
    case 'memory':
      return trans(
        'Of the rank and its children, without mapped files, measured every two seconds; after its end the highest value'
      );
    case 'gpuUse':
      return trans('Share of the time in which the GPU computed, for this rank or another process, as NVML reports it');
    case 'gpuMemory':
      return trans(
        'Memory that the rank uses on its GPU, of all memory of the GPU, as NVML reports it; after its end the highest value'
      );
    default:
      return null;
  }
}

function fillRow(element: HTMLTableRowElement, row: Row, depth: 'alone' | 'inside'): void {
  const { rank } = row;
  if (element.cells.length === 0) {
    const name = trans('rank %1', rank.rank);
    const link = make('button.td-link', { type: 'button', 'aria-label': trans('Log of rank %1', rank.rank) }, name);
    const state = make('td.td-rank-state', {}, make('span.td-state', {}, make('span')), make('span.td-behind'));
    const plain = Array.from({ length: PLAIN }, () => make('td'));
    element.append(make('th', { scope: 'row' }, link), state, ...plain);
  }
  setAttribute(element, 'class', depth === 'inside' ? 'td-rank td-inside' : 'td-rank');
  fillStanding(element.cells[1]!.firstElementChild!, row.standing);
  setText(element.cells[1]!.lastElementChild!, row.straggler ? trans('⚑ behind the others') : '');
  const time = rank.ended ? duration(row.time) : ticking(row.time);
  const step = row.step === null ? '' : grouped(Number(row.step));
  const texts = [
    rank.host,
    rank.pid ? String(rank.pid) : '',
    gpuName(row.gpu),
    step,
    number(row.loss),
    rank.started ? time : '',
    percent(row.taken.cpu),
    memoryWords(row.taken),
    percent(row.taken.gpu),
    gpuMemoryWords(row.taken)
  ];
  texts.forEach((text, index) => setText(element.cells[index + 2]!, text));
  setAttribute(element.cells[4]!, 'title', row.gpu || null);
  const shared = row.taken.shared && row.taken.gpuMemory !== null;
  const whose = trans('Of all processes on this GPU: NVML does not report the share of this rank');
  setAttribute(element.cells[PLAIN + 1]!, 'title', shared ? whose : null);
}

/** As much of a UUID as tells GPUs apart, which is also what CUDA_VISIBLE_DEVICES takes: `GPU-2c9f0a3e`. */
function gpuName(uuid: string): string {
  return /^(?:GPU|MIG)-[0-9a-f]{8}(?=-)/.exec(uuid)?.[0] ?? uuid;
}

function fillStanding(element: Element, standing: Standing): void {
  drawShape(element, standing);
  setText(element.lastElementChild!, standing.words);
  setAttribute(element, 'title', standing.words);
}

function fillGroup(element: HTMLTableRowElement, group: string, rows: Row[], open: boolean): void {
  if (element.cells.length === 0) {
    const toggle = make('button.td-link', { type: 'button' });
    element.append(
      make('th', { scope: 'row' }, toggle),
      make('td', {}, make('span.td-state', {}, make('span'))),
      make('td', { colspan: PLAIN })
    );
    element.className = 'td-rank td-group';
  }
  const numbers = rows.map(row => row.rank.rank).sort((one, other) => one - other);
  const toggle = element.cells[0]!.firstElementChild!;
  setText(toggle, `${open ? '▾' : '▸'} ${plural('%1 rank', '%1 ranks', rows.length)}`);
  setAttribute(toggle, 'aria-expanded', String(open));
  fillStanding(element.cells[1]!.firstElementChild!, { state: group, words: stateWord(group) });
  const text = spans(numbers);
  setText(element.cells[2]!, text.length > 120 ? text.slice(0, 119) + '…' : text);
}

function nothing(): HTMLTableRowElement {
  return make('tr', {}, make('td.td-empty', { colspan: PLAIN + 2 }, trans('No rank has started yet.')));
}

/** Brings the children of `body` into this order, and moves only those that stand elsewhere. */
function place(body: HTMLElement, elements: HTMLElement[]): void {
  elements.forEach((element, index) => {
    if (body.children[index] !== element) {
      body.insertBefore(element, body.children[index] ?? null);
    }
  });
  while (body.children.length > elements.length) {
    body.lastElementChild!.remove();
  }
}
