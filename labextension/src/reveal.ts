/** From a job to the cell that ran it. */
import { PageConfig } from '@jupyterlab/coreutils';
import type { IDocumentManager } from '@jupyterlab/docmanager';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import type { JobSummary } from './api';
import { MIME_TYPE } from './protocol';
import { trans } from './view/translate';

/** Opens the notebook of `job` and scrolls to its cell. Rejects with a sentence where that cannot be. */
export async function revealCell(
  job: JobSummary,
  notebooks: INotebookTracker | null,
  documents: IDocumentManager | null
): Promise<void> {
  const panel = openPanel(job, notebooks) ?? (await open(job, documents));
  await panel.context.ready;
  await panel.revealed;
  documents?.openOrReveal(panel.context.path);
  const index = cellOf(panel, job.job);
  if (index < 0) {
    throw new Error(trans('%1 is open; the output of this job is no longer in it.', panel.context.path));
  }
  panel.content.activeCellIndex = index;
  await panel.content.scrollToItem(index, 'center');
}

/** The notebook that shows the job, else the one with its path. */
function openPanel(job: JobSummary, notebooks: INotebookTracker | null): NotebookPanel | undefined {
  return (
    notebooks?.find(panel => cellOf(panel, job.job) >= 0) ??
    notebooks?.find(panel => job.notebook.endsWith(`/${panel.context.path}`))
  );
}

async function open(job: JobSummary, documents: IDocumentManager | null): Promise<NotebookPanel> {
  for (const path of pathsBelowRoot(job.notebook)) {
    try {
      await documents?.services.contents.get(path, { content: false });
    } catch {
      continue; // not below this server's root
    }
    const panel = documents?.openOrReveal(path) as NotebookPanel | undefined;
    if (panel) {
      return panel;
    }
    throw new Error(trans('%1 was opened in another window.', path));
  }
  throw new Error(trans('%1 is not among the files of this server.', job.notebook));
}

/** What the notebook's absolute path may be among the server's files, whose root may be given with a `~`. */
export function pathsBelowRoot(notebook: string, root = PageConfig.getOption('serverRoot')): string[] {
  const paths: string[] = [];
  const base = root.replace(/\/+$/, '');
  if (base.startsWith('~')) {
    const below = base.slice(1);
    const at = below ? notebook.indexOf(`${below}/`) : -1;
    const parts = notebook.split('/');
    paths.push(at >= 0 ? notebook.slice(at + below.length + 1) : parts.slice(3).join('/'), parts.slice(2).join('/'));
  } else if (notebook.startsWith(`${base}/`)) {
    paths.push(notebook.slice(base.length + 1));
  } else if (!notebook.startsWith('/')) {
    paths.push(notebook);
  }
  return [...new Set(paths.filter(Boolean))];
}

function cellOf(panel: NotebookPanel, job: string): number {
  const cells = panel.content.model?.cells;
  for (let index = 0; index < (cells?.length ?? 0); index++) {
    const outputs = cells!.get(index).toJSON()['outputs'];
    if (Array.isArray(outputs) && outputs.some(output => isOf(output, job))) {
      return index;
    }
  }
  return -1;
}

function isOf(output: unknown, job: string): boolean {
  const data = (output as { data?: Record<string, { job?: string }> } | null)?.data;
  return data?.[MIME_TYPE]?.job === job;
}
