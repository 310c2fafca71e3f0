/** A job as a tab of the main area. */
import type { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import { downloadLog } from './api';
import { jobIcon } from './icon';
import { ServerSource } from './server';
import { JobSession } from './session';
import { titleOf } from './view/describe';
import type { Reveal } from './view/failure';
import type { Render } from './view/logdisplay';
import { startedAt } from './view/format';
import { JobView } from './view/job';
import { trans } from './view/translate';

export class JobTab extends Widget {
  /** `render` draws what ranks displayed, `reveal` shows a line of a cell of the job's notebook. */
  constructor(
    readonly job: string,
    title: string,
    settings: ServerConnection.ISettings,
    render: Render,
    reveal: Reveal
  ) {
    super();
    this.id = `torchdist-job-${job}`;
    this.addClass('td-main');
    this.addClass('td-fill');
    this.node.tabIndex = -1;
    this.title.label = title;
    this.title.caption = job;
    this.title.icon = jobIcon;
    this.title.closable = true;
    const { signal } = this.life;
    this.session = new JobSession(job, new ServerSource(settings, job), signal);
    const download = (file: string) => downloadLog(settings, job, file);
    new JobView(this.node, this.session, { signal, heading: true, download, render, reveal });
    this.session.onChange(changes => changes.has('state') && this.named(), signal);
  }

  /** Jobs of one name are told apart by when they began. */
  private named(): void {
    const { state, clockSkew } = this.session;
    if (state.submitted) {
      const when = startedAt(state.submitted, Date.now() / 1000 + clockSkew);
      this.title.label = `${titleOf(this.session)} · ${when}`;
      this.title.caption = [titleOf(this.session), trans('started %1', when), this.job].join('\n');
    }
  }

  /** Keys go to the tab that was opened or chosen, not to what had the focus before. */
  protected override onActivateRequest(): void {
    if (!this.node.contains(document.activeElement)) {
      this.node.focus();
    }
  }

  override dispose(): void {
    this.life.abort();
    super.dispose();
  }

  private readonly life = new AbortController();
  private readonly session: JobSession;
}
