/** A finding, with what to do, and a command to copy. */
import type { Finding } from '../protocol';
import { shownLines } from './ansi';
import { button, copy, make, setText } from './dom';
import { shortPath } from './format';
import { trans } from './translate';

/** `NCCL_P2P_DISABLE=1` in a sentence. */
const VARIABLE = /\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+=[\w^./:-]*\w/g;

/** A cause that the failure itself does not say, with what to do and the lines that show it. */
export function because(finding: Finding, job: string, signal: AbortSignal): HTMLElement {
  const { sentence, cause, remedy, evidence } = finding;
  const lines = evidence.map(({ file, number, text }) => `${shortPath(file)}:${number}: ${shownLines(text)}`);
  const again = (remedy.match(VARIABLE) ?? []).map(variable => `%dist rerun ${job} --env ${variable}`);
  return make(
    'div.td-failure-cause',
    {},
    make('p', {}, make('strong', {}, sentence)),
    make('p', {}, cause, ' ', trans('What to do: %1', remedy)),
    ...again.map(command => copied(command, signal)),
    lines.length > 0 &&
      make(
        'details.td-fold',
        {},
        make('summary', {}, trans('Lines that show it')),
        make('pre.td-code', {}, lines.join('\n'))
      )
  );
}

/** A command with a button that copies it. */
export function copied(command: string, signal: AbortSignal): HTMLElement {
  const said = make('span.td-said', { role: 'status' });
  const click = async () => setText(said, (await copy(command)) ? trans('copied') : trans('the browser refused'));
  const label = { 'aria-label': trans('Copy %1', command) };
  const tool = button('button.td-button', trans('Copy'), () => void click(), signal, label);
  return make('div.td-command', {}, make('code', {}, command), tool, said);
}
