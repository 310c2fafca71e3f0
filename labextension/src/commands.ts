/** What can be done with a job, as commands: the panel, the palette and the keyboard share them. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, Notification, showDialog, showErrorMessage } from '@jupyterlab/apputils';

import type { JobsApi, JobSummary } from './api';
import { isFinal, type JobList, jobTitle, notebookName } from './joblist';
import { copy } from './view/dom';
import { startedAt, stateWord } from './view/format';
import { trans } from './view/translate';

export type Action = 'open' | 'cancel' | 'rerun' | 'reveal' | 'copy' | 'delete';

export const CommandIds: Record<Action | 'panel', string> = {
  panel: 'torchdist:show-jobs',
  open: 'torchdist:open-job',
  cancel: 'torchdist:cancel-job',
  rerun: 'torchdist:rerun-job',
  reveal: 'torchdist:reveal-cell',
  copy: 'torchdist:copy-command',
  delete: 'torchdist:delete-job'
};

export interface Surroundings {
  app: JupyterFrontEnd;
  api: JobsApi;
  list: JobList;
  openJob(job: string): void;
  showPanel(): void;
  /** Rejects with a sentence where the cell cannot be shown. */
  revealCell(job: JobSummary): Promise<void>;
}

type Perform = (job: string) => Promise<void> | void;

/** Each takes the argument `job`; without it the user chooses. */
export function addCommands(surroundings: Surroundings): void {
  const { app, list, openJob, showPanel } = surroundings;
  app.commands.addCommand(CommandIds.panel, { label: trans('Show Distributed Jobs'), execute: showPanel });
  const add = (action: Action, label: string, perform: Perform, which: (job: JobSummary) => boolean) =>
    app.commands.addCommand(CommandIds[action], {
      label,
      execute: async args => {
        const job = typeof args['job'] === 'string' ? args['job'] : await choose(list, label, which);
        try {
          await (job && perform(job));
        } catch (error) {
          await showErrorMessage(label, error instanceof Error ? error.message : String(error));
        }
      }
    });
  add('open', trans('Open Distributed Job'), openJob, () => true);
  add(
    'cancel',
    trans('Cancel Distributed Job'),
    job => cancel(surroundings, job),
    job => !isFinal(job)
  );
  add('rerun', trans('Run Distributed Job Again'), job => rerun(surroundings, job), isFinal);
  add(
    'reveal',
    trans('Show Cell of Distributed Job'),
    job => reveal(surroundings, job),
    job => job.notebook !== ''
  );
  add(
    'copy',
    trans('Copy Command of Distributed Job'),
    job => copyCommand(surroundings, job),
    () => true
  );
  add('delete', trans('Delete Distributed Job'), job => remove(surroundings, job), isFinal);
}

/** Null: there is none, or the user chose none. */
async function choose(list: JobList, title: string, which: (job: JobSummary) => boolean): Promise<string | null> {
  const jobs = [...list.jobs.values()].filter(which).sort((one, other) => other.submitted - one.submitted);
  if (jobs.length === 0) {
    await showDialog({
      title,
      body: trans('There is no job for which this can be done.'),
      buttons: [Dialog.okButton({ label: trans('OK') })]
    });
    return null;
  }
  const now = Date.now() / 1000 + list.clockSkew;
  const items = jobs.map(job => itemOf(job, now));
  const chosen = await InputDialog.getItem({ title, items, label: trans('Job') });
  return jobs[items.indexOf(chosen.value ?? '')]?.job ?? null;
}

/** `train · failed · 14:03:07 · night.ipynb · 20261122-…`: jobs of one name are told apart by when they began. */
export function itemOf(job: JobSummary, now: number): string {
  const when = job.submitted ? startedAt(job.submitted, now) : '';
  const parts = [jobTitle(job), stateWord(job.effective), when, notebookName(job), job.job];
  return parts.filter(Boolean).join(' · ');
}

function titleOf(list: JobList, job: string): string {
  const known = list.jobs.get(job);
  return known ? jobTitle(known) : job;
}

async function cancel({ api, list }: Surroundings, job: string): Promise<void> {
  const interrupt = Dialog.warnButton({ label: trans('Cancel the job') });
  const kill = Dialog.warnButton({ label: trans('Kill it') });
  const answer = await showDialog({
    title: trans('Cancel %1?', titleOf(list, job)),
    body: trans('Cancelling interrupts its ranks, as ■ does in a notebook. Killing ends them at once.'),
    buttons: [Dialog.cancelButton({ label: trans('Keep it running') }), kill, interrupt],
    defaultButton: 0
  });
  if (answer.button.accept) {
    Notification.info(await api.cancel(job, answer.button.label === kill.label), { autoClose: 4000 });
  }
}

async function rerun({ api, openJob }: Surroundings, job: string): Promise<void> {
  openJob(await api.rerun(job));
}

async function reveal({ list, revealCell }: Surroundings, job: string): Promise<void> {
  const known = list.jobs.get(job);
  if (known) {
    await revealCell(known);
  }
}

async function copyCommand({ api }: Surroundings, job: string): Promise<void> {
  const command = await api.command(job);
  if (!(await copy(command))) {
    await showDialog({
      title: trans('The page cannot use the clipboard'),
      body: command,
      buttons: [Dialog.okButton({ label: trans('OK') })]
    });
    return;
  }
  Notification.success(trans('Copied: %1', command), { autoClose: 3000 });
}

async function remove({ api, list }: Surroundings, job: string): Promise<void> {
  const answer = await showDialog({
    title: trans('Delete %1?', titleOf(list, job)),
    body: trans('Its logs, curves and results are deleted from the disk. This cannot be undone.'),
    buttons: [Dialog.cancelButton({ label: trans('Keep') }), Dialog.warnButton({ label: trans('Delete') })],
    defaultButton: 0
  });
  if (answer.button.accept) {
    await api.delete(job);
  }
}
