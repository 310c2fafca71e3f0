/** The status bar's item: how many jobs run. A click shows them. */
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { JobList } from './joblist';
import { button, make, setText } from './view/dom';
import { drawShape } from './view/standing';
import { plural, trans } from './view/translate';

export class RunningJobs extends Widget {
  /** There are none, or there are some. */
  readonly activeChanged = new Signal<this, void>(this);

  constructor(
    private readonly list: JobList,
    showPanel: () => void
  ) {
    super();
    this.addClass('td-status');
    const { signal } = this.life;
    this.button = button('button.td-status-button', '', showPanel, signal, {
      title: trans('Show the distributed jobs')
    });
    this.button.append(this.shape, this.text);
    this.node.append(this.button);
    list.onChange(() => this.draw(), signal);
    this.draw();
  }

  get active(): boolean {
    return this.list.running > 0;
  }

  override dispose(): void {
    this.life.abort();
    super.dispose();
  }

  private draw(): void {
    const { running, waiting, stalled } = this.list;
    const jobs = plural('%1 distributed job', '%1 distributed jobs', running);
    const words = stalled
      ? trans('%1, %2 stalled', jobs, stalled)
      : waiting
        ? trans('%1, %2 waiting', jobs, waiting)
        : jobs;
    setText(this.text, words);
    drawShape(this.shape, { state: stalled ? 'stalled' : waiting ? 'waiting' : 'running', words: '' });
    if (this.active !== this.wasActive) {
      this.wasActive = this.active;
      this.activeChanged.emit();
    }
  }

  private readonly life = new AbortController();
  private readonly shape = make('span.td-status-shape');
  private readonly text = make('span');
  private readonly button: HTMLButtonElement;
  private wasActive = false;
}
