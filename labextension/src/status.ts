/** The status bar's item: how many jobs run. A click shows them. */
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { JobList } from './joblist';
import { button, make, setText } from './view/dom';
import { stateIcon } from './view/icons';
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
    this.button.append(stateIcon('running'), this.text);
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
    const { running } = this.list;
    setText(this.text, plural('%1 distributed job', '%1 distributed jobs', running));
    if (this.active !== this.wasActive) {
      this.wasActive = this.active;
      this.activeChanged.emit();
    }
  }

  private readonly life = new AbortController();
  private readonly text = make('span');
  private readonly button: HTMLButtonElement;
  private wasActive = false;
}
