/** Elements from a tag, properties and children. What a rank wrote goes in as text, never as markup. */

export type Child = Node | string | null | undefined | false;

type Attributes = Record<string, string | number | boolean | null | undefined>;

/** `make('button.td-button', {type: 'button', 'aria-label': …}, 'text')`; null, undefined and false leave one out. */
export function make<K extends keyof HTMLElementTagNameMap>(
  selector: K | `${K}.${string}`,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const [tag, ...classes] = selector.split('.');
  const element = document.createElement(tag!) as HTMLElementTagNameMap[K];
  element.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) {
    setAttribute(element, name, value);
  }
  element.append(...children.filter((child): child is Node | string => Boolean(child)));
  return element;
}

/** Sets or takes away, and touches the document only where something changes. */
export function setAttribute(element: Element, name: string, value: Attributes[string]): void {
  if (value === null || value === undefined || value === false) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value === true ? '' : String(value));
  }
}

export function setText(element: Element, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** A button whose click lasts as long as `signal`. */
export function button(
  selector: 'button' | `button.${string}`,
  label: string,
  click: (event: MouseEvent) => void,
  signal: AbortSignal,
  attributes: Attributes = {}
): HTMLButtonElement {
  const element = make(selector, { type: 'button', ...attributes }, label);
  element.addEventListener('click', click, { signal });
  return element;
}

/** The text to the clipboard; where the page may not, by way of a selection. False: neither went. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make('textarea', { readonly: true, style: 'position:fixed;opacity:0' });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = typeof document.execCommand === 'function' && document.execCommand('copy');
    area.remove();
    return copied;
  }
}

/** Offers `content` as a file. VS Code takes the click for itself, at the document's body: the link stands in there. */
export function save(name: string, content: Blob): void {
  const address = URL.createObjectURL(content);
  const download = name.replace(/[^\p{L}\p{N}._-]+/gu, '_').slice(0, 120);
  const link = make('a', { href: address, download, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
