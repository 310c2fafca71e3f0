/** Draws what a rank displayed as JupyterLab draws outputs, and never as one that is trusted. */
import { type IRenderMimeRegistry, MimeModel } from '@jupyterlab/rendermime';
import type { JSONObject } from '@lumino/coreutils';
import { Widget } from '@lumino/widgets';

import type { Render } from './view/logdisplay';
import { trans } from './view/translate';

export function renderWith(rendermime: IRenderMimeRegistry): Render {
  return async (shown, element, signal) => {
    const [data, metadata] = [shown.data as JSONObject, shown.metadata as JSONObject];
    const mime = rendermime.preferredMimeType(data, 'ensure');
    if (!mime) {
      throw new Error(trans('There is no safe way to show %1 here.', Object.keys(data).join(', ')));
    }
    const renderer = rendermime.createRenderer(mime);
    await renderer.renderModel(new MimeModel({ data, metadata, trusted: false }));
    if (signal.aborted) {
      renderer.dispose();
      return;
    }
    Widget.attach(renderer, element);
    signal.addEventListener('abort', () => renderer.dispose(), { once: true });
  };
}
