/** The cancel button: asks first, then interrupts, then offers to kill. */
import type { JobSession } from '../session';
import { isFinal } from '../state';
import { button, make, setAttribute, setText } from './dom';
import { trans } from './translate';

type Stage = 'idle' | 'asking' | 'interrupted';

export class CancelControl {
  private readonly message = make('span.td-said', { role: 'status' });
  private readonly controls = make('span.td-cancel');
  private stage: Stage = 'idle';
  private busy = false;

  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal
  ) {
    element.append(this.message, this.controls);
    this.controls.addEventListener('keydown', event => this.key(event), { signal });
    this.draw();
  }

  /** Called when the job or its connection changed. */
  update(): void {
    if (isFinal(this.session.state)) {
      const inside = this.controls.contains(document.activeElement);
      this.controls.replaceChildren();
      setText(this.message, '');
      if (inside) {
        this.controls.closest('.td-view')?.querySelector<HTMLElement>('[role=tab][aria-selected=true]')?.focus();
      }
      return;
    }
    if (this.session.state.state === 'stopping' && this.stage !== 'interrupted') {
      this.go('interrupted');
      return;
    }
    this.refuse();
  }

  private go(stage: Stage): void {
    const inside = this.controls.contains(document.activeElement);
    this.stage = stage;
    this.draw();
    if (inside) {
      this.controls.querySelector('button')?.focus();
    }
  }

  private draw(): void {
    const { signal } = this;
    const buttons = {
      idle: () => [
        button('button.td-button.td-danger', trans('Cancel'), () => this.ifAble(() => this.go('asking')), signal)
      ],
      asking: () => [
        make('span.td-ask', {}, trans('Cancel this job?')),
        button('button.td-button.td-danger', trans('Cancel job'), () => this.ifAble(() => this.send(false)), signal, {
          title: trans('Interrupts every rank; what exists then comes back')
        }),
        button('button.td-button', trans('Keep running'), () => this.go('idle'), signal)
      ],
      interrupted: () => [
        button('button.td-button.td-danger', trans('Kill now'), event => this.kill(event), signal, {
          title: trans('Ends every process of the job at once; what they hold in memory is lost')
        })
      ]
    };
    this.controls.replaceChildren(...buttons[this.stage]());
    this.refuse();
  }

  /** Says why nothing can be cancelled now; the buttons stay reachable, so that the reason can be read. */
  private refuse(): void {
    const reason = this.refusal();
    for (const element of this.controls.querySelectorAll('button.td-danger')) {
      setAttribute(element, 'aria-disabled', reason ? 'true' : null);
      if (reason || element.getAttribute('aria-disabled')) {
        setAttribute(element, 'title', reason);
      }
    }
  }

  private refusal(): string {
    if (this.busy) {
      return trans('the job is being told');
    }
    if (this.session.connection === 'live') {
      return '';
    }
    return this.session.reason || trans('there is no connection to the job yet');
  }

  private ifAble(act: () => void): void {
    const reason = this.refusal();
    if (reason) {
      setText(this.message, trans('Not now: %1', reason));
    } else {
      act();
    }
  }

  /** The second click of a double click on “Cancel job” is not meant for this button. */
  private kill(event: MouseEvent): void {
    if (event.detail < 2) {
      this.ifAble(() => this.send(true));
    }
  }

  private async send(kill: boolean): Promise<void> {
    this.busy = true;
    setText(this.message, '');
    this.refuse();
    let said: string;
    let sent = true;
    try {
      said = (await this.session.ask({ what: 'cancel', kill })).said;
    } catch (error) {
      said = trans('Not cancelled: %1', error instanceof Error ? error.message : String(error));
      sent = false;
    }
    this.busy = false;
    if (this.signal.aborted || isFinal(this.session.state)) {
      return;
    }
    setText(this.message, said);
    this.go(sent ? 'interrupted' : this.stage === 'interrupted' ? 'interrupted' : 'idle');
  }

  private key(event: KeyboardEvent): void {
    if (event.key === 'Escape' && this.stage === 'asking' && !this.busy) {
      event.stopPropagation();
      this.go('idle');
    }
  }
}
