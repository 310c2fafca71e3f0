/** A job as a tab of the main area. */
import type { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import { downloadLog } from './api';
import { jobIcon } from './icon';
import { ServerSource } from './server';
import { JobSession } from './session';
import { JobView } from './view/job';

export class JobTab extends Widget {
  constructor(
    readonly job: string,
    title: string,
    settings: ServerConnection.ISettings
  ) {
    super();
    this.id = `torchdist-job-${job}`;
    this.addClass('td-main');
    this.addClass('td-fill');
    this.title.label = title;
    this.title.caption = job;
    this.title.icon = jobIcon;
    this.title.closable = true;
    const { signal } = this.life;
    const session = new JobSession(job, new ServerSource(settings, job), signal);
    const download = (file: string) => downloadLog(settings, job, file);
    new JobView(this.node, session, { signal, heading: true, download });
    session.onChange(() => {
      const { label, name } = session.state;
      this.title.label = name || label || this.title.label;
    }, signal);
  }

  override dispose(): void {
    this.life.abort();
    super.dispose();
  }

  private readonly life = new AbortController();
}
