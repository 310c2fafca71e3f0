/** What was captured, what was decided, and how to run it again. */
import type { JobSpec, Options, Plan, StrategyPlan } from '../protocol';
import type { JobSession } from '../session';
import { notesOf } from './describe';
import { make } from './dom';
import { copied } from './finding';
import { duration, hostOf, ranks, size, spans } from './format';
import { facts, table } from './table';
import { trans } from './translate';

type Hello = NonNullable<JobSession['hello']>;

const LONG = 200_000;

export class ReceiptTab {
  private shown = '';
  private shownHello: Hello | null = null;
  private visible = false;

  constructor(
    private readonly element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal
  ) {
    session.onChange(changes => changes.has('state') && this.draw(), signal);
  }

  show(): void {
    this.visible = true;
    this.draw();
  }

  hide(): void {
    this.visible = false;
  }

  private draw(): void {
    const { hello, state } = this.session;
    const notes = notesOf(state, hello?.notes ?? []);
    if (!this.visible || (hello === this.shownHello && notes.join('\n') === this.shown && this.element.firstChild)) {
      return;
    }
    this.shown = notes.join('\n');
    this.shownHello = hello;
    this.element.replaceChildren(make('div.td-page', {}, ...(hello ? this.page(hello, notes) : [waiting()])));
  }

  private page(hello: Hello, notes: string[]): HTMLElement[] {
    const { spec, plan } = hello;
    return [
      ...(notes.length
        ? [heading(trans('Notes')), make('ul.td-notes', {}, ...notes.map(note => make('li', {}, note)))]
        : []),
      heading(trans('Captured')),
      captured(hello),
      ...(plan ? [heading(trans('Plan')), facts(planFacts(plan)), planTable(plan)] : []),
      ...(spec ? [heading(trans('Options')), options(spec.options)] : []),
      heading(trans('Run it again, in a shell')),
      copied(hello.command, this.signal),
      ...(spec?.source.trim() ? [heading(spec.label || trans('Source')), source(spec)] : [])
    ];
  }
}

function heading(text: string): HTMLElement {
  return make('h4.td-heading', {}, text);
}

function waiting(): HTMLElement {
  return make('div.td-empty', {}, make('p', {}, trans('The job has not told yet what it captured.')));
}

function captured({ receipt }: Hello): HTMLElement {
  if (receipt.length === 0) {
    return make('p', {}, trans('nothing: the cell uses no name of the notebook'));
  }
  const header = [trans('Name'), trans('Kind'), trans('What'), trans('Size'), trans('Needed by')];
  const rows = receipt.map(item => [item.name, item.kind, item.what, item.size ? size(item.size) : '', item.needed]);
  return table(trans('Captured names'), header, rows);
}

/** ``OMP_NUM_THREADS`` of the nodes: ``4``, or ``4, 8`` where they differ. */
function threads(plan: Plan): string {
  return [...new Set(plan.nodes.map(node => node.threads))].join(', ');
}

/** The wording of views.plan_table. */
export function planFacts(plan: Plan): [string, string][] {
  return [
    [
      trans('ranks'),
      `${ranks(plan.world_size)}, ${trans('backend %1', plan.backend)}, OMP_NUM_THREADS=${threads(plan)}`
    ],
    [trans('strategy'), strategyWords(plan.strategy)],
    [trans('strategy options'), strategyOptions(plan.strategy)],
    [trans('decided'), plan.strategy?.notes.join('; ') ?? ''],
    [trans('start'), plan.fresh ? trans('new interpreters (--fresh)') : trans('forked from a warm process')],
    [
      trans('results'),
      trans('%1, names %2', plan.collect === 'all' ? trans('every rank') : trans('rank 0'), plan.out.join(', '))
    ],
    [trans('NUMA binding'), plan.numa_binding ?? ''],
    [trans('timeout'), plan.timeout ? duration(plan.timeout) : ''],
    [trans('environment'), plan.env_names.join(', ')]
  ];
}

/** `fsdp+tp, dp_shard=4 × tp=2, bf16`; the plan of an earlier version has none. */
function strategyWords(strategy: StrategyPlan | undefined): string {
  if (!strategy || strategy.name === 'none') {
    return '';
  }
  const order = ['pp', 'dp_replicate', 'dp_shard', 'cp', 'tp'].filter(name => (strategy.degrees[name] ?? 1) > 1);
  const mesh = order.map(name => `${name}=${strategy.degrees[name]}`).join(' × ');
  return [strategy.name, mesh || trans('one rank'), strategy.precision].join(', ');
}

function strategyOptions(strategy: StrategyPlan | undefined): string {
  const words = Object.entries(strategy?.options ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  if (strategy?.compile) {
    words.push('--compile');
  }
  if (strategy?.activation_checkpointing) {
    words.push('--activation-checkpointing');
  }
  if (strategy && strategy.grad_accumulation > 1) {
    words.push(`--grad-accumulation ${strategy.grad_accumulation}`);
  }
  if (strategy?.checkpoint) {
    words.push(`--checkpoint ${strategy.checkpoint}${strategy.resume ? ' --resume' : ''}`);
  }
  return words.join(', ');
}

function planTable(plan: Plan): HTMLElement {
  const header = [trans('Host'), trans('Ranks'), trans('Address'), trans('Devices')];
  const rows = plan.nodes.map(node => [
    hostOf(node),
    spans(node.ranks),
    `${node.address} (${node.interface})`,
    node.gpus.join(', ') || 'CPU'
  ]);
  return table(trans('Plan'), header, rows);
}

/** What was asked for; an option that was left alone is not shown. */
function options(chosen: Options): HTMLElement {
  const pairs = Object.entries(chosen)
    .filter(([, value]) => value !== null && value !== false && !(Array.isArray(value) && value.length === 0))
    .map(([name, value]) => {
      const text = value === true ? trans('yes') : Array.isArray(value) ? value.join(', ') : String(value);
      return [`--${name.replaceAll('_', '-')}`, text] as const;
    });
  return facts(pairs);
}

/** The cell with the numbers its tracebacks use. */
function source(spec: JobSpec): HTMLElement {
  const text = spec.source.replace(/\n+$/, '').slice(0, LONG);
  const lines = text.split('\n');
  const numbers = lines.map((_, index) => String(index + spec.first_line)).join('\n');
  return make(
    'div.td-source',
    { tabindex: '0', role: 'group', 'aria-label': trans('source of the job') },
    make('pre.td-source-numbers', { 'aria-hidden': 'true' }, numbers),
    make('pre.td-code', {}, make('code', {}, text))
  );
}
