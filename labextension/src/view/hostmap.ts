/** The hosts of a job as groups of their ranks, and by what the ranks reach each other. */
import type { JobState, NodePlan, Plan, Transports } from '../protocol';
import type { JobSession } from '../session';
import { button, make, setAttribute, setText } from './dom';
import { copied } from './finding';
import { hostOf, spans } from './format';
import { drawShape, makeShape, standingOf } from './standing';
import { table } from './table';
import { plural, trans } from './translate';

/** Hosts that are drawn; the others stand in a table. */
const HOSTS = 48;

/** Ranks that are drawn of a host. */
const RANKS = 64;

export class HostMap {
  readonly element = make('div.td-part', { role: 'group', 'aria-label': trans('Hosts and ranks') });
  private readonly chips = new Map<number, HTMLElement>();
  private plan: Plan | null = null;
  private told: readonly Transports[] | null = null;
  private state: JobState | null = null;

  constructor(
    private readonly session: JobSession,
    private readonly signal: AbortSignal,
    private readonly toLog: (rank: number) => void
  ) {}

  /** `told`: what NCCL's log says of each node; null: not known yet. */
  draw(plan: Plan, told: readonly Transports[] | null): void {
    if (plan !== this.plan || told !== this.told) {
      this.plan = plan;
      this.told = told;
      this.state = null;
      this.chips.clear();
      this.element.replaceChildren(...this.parts(plan, told));
    }
    const { state } = this.session;
    if (state === this.state) {
      return;
    }
    this.state = state;
    for (const [rank, chip] of this.chips) {
      const standing = standingOf(state, rank);
      drawShape(chip.firstElementChild!, standing);
      setText(chip.lastElementChild!, trans('%1, its log', standing.words));
      setAttribute(chip, 'title', trans('rank %1: %2', rank, standing.words));
    }
  }

  private parts(plan: Plan, told: readonly Transports[] | null): HTMLElement[] {
    const by = new Map(told?.map(one => [one.node, one]));
    const cards = plan.nodes.slice(0, HOSTS).map(node => this.card(plan, node, told && by.get(node.name)));
    const parts: HTMLElement[] = [make('div.td-hosts', {}, ...cards)];
    if (plan.nodes.length > 1) {
      parts.push(wire(plan, told));
    }
    const rest = plan.nodes.slice(HOSTS);
    if (rest.length > 0) {
      const rows = rest.map(node => [hostOf(node), spans(node.ranks), node.address, node.interface]);
      const header = [trans('Host'), trans('Ranks'), trans('Address'), trans('Interface')];
      parts.push(table(trans('Other hosts'), header, rows));
    }
    if (told && plan.backend === 'nccl' && plan.world_size > 1 && !told.some(known)) {
      parts.push(this.unknown());
    }
    return parts;
  }

  private card(plan: Plan, node: NodePlan, told: Transports | null | undefined): HTMLElement {
    const where = [node.address, node.interface].filter(Boolean).join(', ');
    const chips = node.ranks.slice(0, RANKS).map((rank, place) => make('li', {}, this.chip(node, rank, place)));
    const more = node.ranks.length - chips.length;
    return make(
      'div.td-host',
      {},
      make('div.td-host-name', {}, make('strong', {}, hostOf(node)), make('span.td-soft', {}, where)),
      make('ul.td-chips', {}, ...chips),
      more > 0 && make('p.td-more', {}, plural('and %1 more rank', 'and %1 more ranks', more)),
      node.ranks.length > 1 && make('p.td-link-words', {}, '⇄ ', within(plan, node, told))
    );
  }

  private chip(node: NodePlan, rank: number, place: number): HTMLElement {
    const chip = button('button.td-chip', '', () => this.toLog(rank), this.signal);
    const number = node.gpu_numbers[place];
    const gpu = number === undefined ? `cuda:${place}` : trans('GPU %1', number);
    const device = node.gpus[place] ? gpu : trans('CPU');
    chip.append(
      makeShape(),
      make('span.td-spoken', {}, trans('rank')),
      String(rank),
      make('small', {}, device),
      make('span.td-spoken')
    );
    this.chips.set(rank, chip);
    return chip;
  }

  private unknown(): HTMLElement {
    const words = trans('NCCL names the transports where its log is at INFO. To run the job again with it:');
    return make(
      'div',
      {},
      make('p', {}, words),
      copied(`%dist rerun ${this.session.job} --env NCCL_DEBUG=INFO`, this.signal)
    );
  }
}

function known({ inside, outside }: Transports): boolean {
  return inside.length + outside.length > 0;
}

/** What connects all hosts: a line below them. */
function wire(plan: Plan, told: readonly Transports[] | null): HTMLElement {
  const words = make('span');
  if (plan.backend !== 'nccl') {
    setText(words, overGloo(plan, [...new Set(plan.nodes.map(node => node.interface))]));
  } else {
    setText(words, told ? named([...new Set(told.flatMap(one => one.outside))]) : '…');
  }
  return make('p.td-wire', {}, trans('between hosts: '), words);
}

function within(plan: Plan, node: NodePlan, told: Transports | null | undefined): string {
  if (plan.backend !== 'nccl') {
    return overGloo(plan, [node.interface]);
  }
  return told === null ? '…' : named(told?.inside ?? []);
}

function overGloo(plan: Plan, interfaces: string[]): string {
  if (plan.env_names.includes('GLOO_SOCKET_IFNAME')) {
    return trans('Gloo, TCP on the interface that GLOO_SOCKET_IFNAME names');
  }
  const known = interfaces.filter(Boolean);
  return known.length === interfaces.length ? trans('Gloo, TCP on %1', known.join(', ')) : trans('Gloo, TCP');
}

/** `P2P/CUMEM (from GPU to GPU), SHM (through the memory of the host)`. */
function named(transports: readonly string[]): string {
  const words = transports.map(via => (meaning(via) ? trans('%1 (%2)', via, meaning(via)) : via));
  return words.join(', ') || trans('not known');
}

function meaning(via: string): string {
  if (via.startsWith('P2P/MNNVL')) {
    return trans('NVLink between hosts');
  }
  if (via.startsWith('P2P/')) {
    return trans('from GPU to GPU');
  }
  if (via === 'SHM') {
    return trans('through the memory of the host');
  }
  if (via.startsWith('NET/IB/')) {
    return via.endsWith('/GDRDMA')
      ? trans('InfiniBand or RoCE, straight from the memory of the GPU')
      : trans('InfiniBand or RoCE');
  }
  return via.startsWith('NET/Socket/') ? trans('TCP') : '';
}
