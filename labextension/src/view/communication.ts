/** How the ranks reach each other: what the plan says; what was measured comes with the diagnostics. */
import type { Plan } from '../protocol';
import type { JobSession } from '../session';
import { make } from './dom';
import { hostOf, spans } from './format';
import { facts, table } from './table';
import { trans } from './translate';

export class CommunicationTab {
  private shown: Plan | null | undefined;
  private visible = false;

  constructor(
    private readonly element: HTMLElement,
    private readonly session: JobSession,
    signal: AbortSignal
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
    const plan = this.session.hello?.plan ?? null;
    if (!this.visible || plan === this.shown) {
      return;
    }
    this.shown = plan;
    this.element.replaceChildren(make('div.td-page', {}, ...(plan ? planned(plan) : []), nothingYet()));
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

function nothingYet(): HTMLElement {
  return make(
    'div.td-empty',
    {},
    make('p', {}, trans('Nothing was measured between the ranks of this job.')),
    make('p', {}, trans('To check the links now, run this in a cell: '), make('code', {}, '%dist doctor'))
  );
}
