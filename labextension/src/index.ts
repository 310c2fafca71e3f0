/** The plugins of JupyterLab and Notebook: the output under a cell, and the panel with all that belongs to it. */
import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, Notification, WidgetTracker } from '@jupyterlab/apputils';
import { IDocumentManager } from '@jupyterlab/docmanager';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator } from '@jupyterlab/translation';

import { JobsApi, type JobSummary } from './api';
import { addCommands, CommandIds } from './commands';
import { jobIcon } from './icon';
import { JobList, jobTitle, named } from './joblist';
import { rendererFactory } from './mime';
import { JobPanel } from './panel';
import { revealCell, revealLine } from './reveal';
import { renderWith } from './richoutput';
import { RunningJobs } from './status';
import { JobTab } from './tab';
import { shownText } from './view/ansi';
import { brokenLine } from './view/describe';
import type { Reveal } from './view/failure';
import type { Render } from './view/logdisplay';
import { stateWord } from './view/format';
import { isInSight } from './view/sight';
import { trans, translateWith } from './view/translate';

/** Before the widget of the same output, whose rank is -10. */
const RANK = -20;

function speak(translator: ITranslator | null): void {
  if (translator) {
    const bundle = translator.load('jupyter_torchdist');
    translateWith({
      one: (text, ...args) => bundle.__(text, ...args),
      many: (single, many, count, ...args) => bundle._n(single, many, count, ...args),
      language: translator.languageCode
    });
  }
}

const output: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-torchdist:output',
  description: 'Shows the live view of a distributed job under its cell.',
  autoStart: true,
  requires: [IRenderMimeRegistry],
  optional: [INotebookTracker, IDocumentManager, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    rendermime: IRenderMimeRegistry,
    notebooks: INotebookTracker | null,
    documents: IDocumentManager | null,
    translator: ITranslator | null
  ) => {
    speak(translator);
    const settings = app.serviceManager.serverSettings;
    rendermime.addFactory(rendererFactory({ settings, rendermime, notebooks, documents }), RANK);
  }
};

const jobs: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-torchdist:jobs',
  description: 'The panel of all distributed jobs, their tabs, commands, status-bar item and notifications.',
  autoStart: true,
  requires: [IRenderMimeRegistry],
  optional: [
    ILabShell,
    ILayoutRestorer,
    ICommandPalette,
    INotebookTracker,
    IDocumentManager,
    IStatusBar,
    ISettingRegistry,
    ITranslator
  ],
  activate: (
    app: JupyterFrontEnd,
    rendermime: IRenderMimeRegistry,
    lab: ILabShell | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    notebooks: INotebookTracker | null,
    documents: IDocumentManager | null,
    statusBar: IStatusBar | null,
    registry: ISettingRegistry | null,
    translator: ITranslator | null
  ) => {
    speak(translator);
    const settings = app.serviceManager.serverSettings;
    const life = new AbortController();
    const list = new JobList(settings, life.signal);
    const api = new JobsApi(settings);
    const reveal = revealing(list, notebooks, documents);
    const openJob = jobTabs(app, lab, restorer, list, renderWith(rendermime), reveal);
    const panel = addPanel(app, restorer, list);
    const showPanel = (): void => app.shell.activateById(panel.id);
    addCommands({ app, api, list, openJob, showPanel, revealCell: job => revealCell(job, notebooks, documents) });
    for (const command of Object.values(CommandIds)) {
      palette?.addItem({ command, category: trans('Distributed Jobs') });
    }
    if (statusBar) {
      addStatus(statusBar, list, showPanel);
    }
    void notifyOfEnds(list, registry, openJob, life.signal);
  }
};

function addPanel(app: JupyterFrontEnd, restorer: ILayoutRestorer | null, list: JobList): JobPanel {
  const panel = new JobPanel(list, app.commands);
  panel.id = 'torchdist-jobs';
  panel.title.icon = jobIcon;
  panel.title.caption = trans('Distributed Jobs');
  app.shell.add(panel, 'left', { rank: 300, type: 'Distributed Jobs' });
  restorer?.add(panel, panel.id);
  return panel;
}

/** Opens a job's tab, or shows the one that is open. Notebook has one document a page: there it is below it. */
function jobTabs(
  app: JupyterFrontEnd,
  lab: ILabShell | null,
  restorer: ILayoutRestorer | null,
  list: JobList,
  render: Render,
  reveal: (job: string) => Reveal
): (job: string) => void {
  const tracker = new WidgetTracker<JobTab>({ namespace: 'torchdist-jobs' });
  void restorer?.restore(tracker, {
    command: CommandIds.open,
    args: tab => ({ job: tab.job }),
    name: tab => tab.job
  });
  return job => {
    const known = list.jobs.get(job);
    let tab = tracker.find(tab => tab.job === job);
    if (!tab) {
      const title = known ? jobTitle(known) : job;
      tab = new JobTab(job, title, app.serviceManager.serverSettings, render, reveal(job));
      void tracker.add(tab);
      tab.toggleClass('td-down', !lab);
      app.shell.add(tab, lab ? 'main' : 'down', { type: 'Distributed Job' });
    }
    app.shell.activateById(tab.id);
  };
}

/** Lines of the notebook that ran a job; `Cell In[5]` is the cell of that number, but for the job's own. */
function revealing(
  list: JobList,
  notebooks: INotebookTracker | null,
  documents: IDocumentManager | null
): (job: string) => Reveal {
  return job => async (cell, line) => {
    const known = list.jobs.get(job);
    if (!known?.notebook) {
      throw new Error(trans('The notebook of this job is not known.'));
    }
    await revealLine(known, cell, line, notebooks, documents);
  };
}

function addStatus(statusBar: IStatusBar, list: JobList, showPanel: () => void): void {
  const item = new RunningJobs(list, showPanel);
  statusBar.registerStatusItem('jupyter-torchdist:running', {
    item,
    align: 'left',
    rank: 5,
    isActive: () => item.active,
    activeStateChanged: item.activeChanged
  });
}

type Which = 'all' | 'failures' | 'none';

async function notifyOfEnds(
  list: JobList,
  registry: ISettingRegistry | null,
  openJob: (job: string) => void,
  signal: AbortSignal
): Promise<void> {
  let which: Which = 'all';
  list.onChange(({ ended }) => {
    for (const job of ended) {
      // Who cancels a job knows of its end.
      if (
        job.effective !== 'cancelled' &&
        (which === 'all' || (which === 'failures' && job.effective !== 'succeeded'))
      ) {
        void isInSight(job.job).then(seen => seen || notify(job, openJob));
      }
    }
  }, signal);
  const settings = await registry?.load(jobs.id);
  const read = (): void => {
    which = settings!.get('notify').composite as Which;
  };
  settings?.changed.connect(read);
  if (settings) {
    read();
  }
}

function notify(job: JobSummary, openJob: (job: string) => void): void {
  const broken = job.broken.length > 0;
  const kind = job.effective !== 'succeeded' ? 'error' : broken ? 'warning' : 'success';
  // What failed stands under the cell and in the tab; here it is said that something did.
  const reason = job.effective === 'failed' ? '' : shownText(job.reason);
  const said = broken ? brokenLine(named(job.broken)) : '';
  const words = [trans('%1 %2', jobTitle(job), stateWord(job.effective)), reason, said].filter(Boolean).join(': ');
  Notification.emit(words, kind, {
    autoClose: kind === 'success' ? 5000 : 30000,
    actions: [{ label: trans('Open'), callback: () => openJob(job.job) }]
  });
}

export default [output, jobs];
