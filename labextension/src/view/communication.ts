/** How the ranks reach each other, as the plan says; above that, ranks for which the others wait again and again. */
import type { Finding, Plan } from '../protocol';
import type { JobSession } from '../session';
import { make } from './dom';
import { because } from './finding';
import { hostOf, spans } from './format';
import { facts, table } from './table';
import { trans } from './translate';

export class CommunicationTab {
  private plan: Plan | null = null;
  private shown = '';
  private visible = false;

  constructor(
    private readonly element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal
  ) {
    session.onChange(changes => (changes.has('state') || changes.has('status')) && this.draw(), signal);
  }

  show(): void {
    this.visible = true;
    this.draw();
  }

  hide(): void {
    this.visible = false;
  }

  private draw(): void {
    if (!this.visible) {
      return;
    }
    const plan = this.session.hello?.plan ?? null;
    const findings = this.session.status?.findings ?? [];
    const key = JSON.stringify(findings);
    if (plan === this.plan && key === this.shown) {
      return;
    }
    this.plan = plan;
    this.shown = key;
    const late = findings.length > 0 ? [this.stragglers(findings)] : [];
    this.element.replaceChildren(make('div.td-page', {}, ...late, ...(plan ? planned(plan) : []), ask()));
  }

  private stragglers(findings: readonly Finding[]): HTMLElement {
    const told = findings.map(finding => because(finding, this.session.job, this.signal));
    return make('section', { role: 'status', 'aria-label': trans('what slows the job') }, ...told);
  }
}

function planned(plan: Plan): HTMLElement[] {
  const first = plan.nodes[0];
  const rows = plan.nodes.map(node => [hostOf(node), spans(node.ranks), node.address, node.interface]);
  return [
    facts([
      [trans('backend'), plan.backend],
      [trans('rendezvous'), first ? trans('on %1 (%2)', hostOf(first), first.address) : '']
    ]),
    table(trans('Addresses'), [trans('Host'), trans('Ranks'), trans('Address'), trans('Interface')], rows)
  ];
}

function ask(): HTMLElement {
  return make(
    'div.td-empty',
    {},
    make('p', {}, trans('Where the time of a step goes: '), make('code', {}, '%dist profile JOB')),
    make('p', {}, trans('To check the links now, run this in a cell: '), make('code', {}, '%dist doctor'))
  );
}
